"""Evidence on disk: runs, the store of finished cells, and the files both are made of."""
