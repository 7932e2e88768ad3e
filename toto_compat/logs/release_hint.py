"""Which PyTorch release a log is of, as far as its lines tell."""

import re
from dataclasses import dataclass

# Where the warning that dynamo gave up on a function is logged from, in torch/_dynamo/convert_frame.py.
LIMIT_WARNING_LINES: dict[int, str] = {844: "2.5.1", 964: "2.7.0", 1358: "2.9.0", 1994: "2.13.0", 2061: "2.15.0"}


@dataclass(frozen=True)
class ReleaseHint:
    """Says which release a logging prefix points at, and how firmly."""

    release: str  # '2.9.0' or '2.7 or later'
    because: str
    exact: bool = False


_CONVERT_FRAME = re.compile(r"(?:^|/)convert_frame\.py:(\d+)$")


def release_hint(logged_from: str, limit_name: str = "") -> ReleaseHint | None:
    """The release that a limit warning's own source line, or failing that its wording, points at."""
    place = _CONVERT_FRAME.search(logged_from)
    if place and (release := LIMIT_WARNING_LINES.get(int(place.group(1)))):
        return ReleaseHint(
            release, f"the limit warning stands at convert_frame.py:{place.group(1)} in that release", exact=True
        )
    if limit_name.endswith("cache_size_limit"):
        return ReleaseHint("2.6 or earlier", "the limit is called cache_size_limit up to 2.6")
    if limit_name.endswith("recompile_limit"):
        return ReleaseHint("2.7 or later", "the limit is called recompile_limit from 2.7 on")
    return None
