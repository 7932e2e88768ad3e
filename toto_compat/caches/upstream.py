"""toto-ts's own KV cache, as released."""

from toto.model.util import KVCache

__all__ = ["KVCache"]
