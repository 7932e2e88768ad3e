"""Reading the logs of a running service: formats of lines here, the messages in them in the contract."""
