"""What PyTorch renamed, each with the release it starts at. The rest of what a cell runs knows no versions."""

import re
from collections.abc import Sequence

# Oldest first; a name holds from its release until the next one.
CONFIG_NAMES: dict[str, Sequence[tuple[str, str]]] = {
    "recompile_limit": (("2.0", "cache_size_limit"), ("2.7", "recompile_limit")),
    "accumulated_recompile_limit": (
        ("2.1", "accumulated_cache_size_limit"),
        ("2.7", "accumulated_recompile_limit"),
    ),
}


def config_name(name: str, torch_version: str) -> str:
    """Return what a dynamo setting, called by its newest name, is called in a release. '' if that release lacks it."""
    release, held = _release(torch_version), ""
    for since, name_then in CONFIG_NAMES[name]:
        if release >= _release(since):
            held = name_then
    return held


def _release(version: str) -> tuple[int, ...]:
    # A local part (2.13.0+cpu), a nightly or a candidate counts as the release it belongs to.
    numbers = re.match(r"\d+(?:\.\d+)*", version)
    if not numbers:
        raise ValueError(f"not a torch version: {version!r}")
    return tuple(int(part) for part in numbers.group().split("."))
