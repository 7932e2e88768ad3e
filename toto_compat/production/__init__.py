"""For the service: `configure`, `forecaster` and `guarded`. Beside them the tools around it, for the command line."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toto_compat.production.configuration import configure
    from toto_compat.production.guard import Budget, Shadow, guarded
    from toto_compat.production.switched import forecaster

__all__ = ["Budget", "Shadow", "configure", "forecaster", "guarded"]

_HOMES = {
    "configure": "configuration",
    "forecaster": "switched",
    "guarded": "guard",
    "Budget": "guard",
    "Shadow": "guard",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # on first use: the tools of this package work on machines without torch, and one of them without pydantic
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
