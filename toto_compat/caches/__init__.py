"""KV caches under test. They know torch and toto-ts, and nothing of what measures them."""
