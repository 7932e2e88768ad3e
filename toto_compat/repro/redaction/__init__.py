"""Secrets are taken out of text, data and code before anything is written: one module for each way they are told."""
