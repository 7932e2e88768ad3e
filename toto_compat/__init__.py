"""Evidence on where torch.compile can be re-enabled for Toto."""
