"""Evidence on where torch.compile can be re-enabled for Toto, and the cache that makes it possible."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toto_compat.model.forecaster import compile_toto

__all__ = ["compile_toto"]


def __getattr__(name: str) -> Any:
    if name == "compile_toto":
        # on first use: most of this package works on machines without torch
        from toto_compat.model.forecaster import compile_toto

        return compile_toto
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
