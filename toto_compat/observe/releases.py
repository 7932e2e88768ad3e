"""What PyTorch renamed or reworded, each with the release it starts at. The rest of the package knows no versions."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

# Oldest first; an entry holds from its release until the next one.
_Names = Sequence[tuple[str, str]]

CONFIG_NAMES: dict[str, _Names] = {
    "recompile_limit": (("2.0", "cache_size_limit"), ("2.7", "recompile_limit")),
    "accumulated_recompile_limit": (
        ("2.1", "accumulated_cache_size_limit"),
        ("2.7", "accumulated_recompile_limit"),
    ),
    "fail_on_recompile_limit_hit": (("2.6", "fail_on_cache_limit_hit"), ("2.7", "fail_on_recompile_limit_hit")),
    "capture_scalar_outputs": (("2.0", "capture_scalar_outputs"),),
}

LIMIT_TEXTS: _Names = (("2.0", "hit config.cache_size_limit"), ("2.7", "hit config.recompile_limit"))

GRAPH_BREAK_TEXTS: _Names = (
    ("2.0", "Graph break: from user code at:"),
    ("2.6", "Graph break in user code at"),
)

# What torch raises under fullgraph=True once the limit is hit.
LIMIT_EXCEPTIONS: _Names = (
    ("2.0", "Unsupported"),
    ("2.5", "CacheLimitExceeded"),
    ("2.6", "RecompileLimitExceeded"),
    ("2.7", "FailOnRecompileLimitHit"),
)

# The artifact logger that says why CUDA graphs were skipped. Read in 2.9.0 and 2.13.0; 2.10 to 2.12 were not looked at.
CUDAGRAPH_SKIP_ARTIFACTS: _Names = (("2.0", "perf_hints"), ("2.13", "cudagraphs"))

# The counter group that holds how often dynamo resumed after a graph break.
RESUME_COUNTERS: _Names = (("2.0", "inline_call"), ("2.11", "resumes"))

# What a callback on compile start is given.
COMPILE_START_ARGUMENTS: _Names = (("2.0", ""), ("2.8", "CallbackArgs"))

# Where the warning that dynamo gave up on a function is logged from, in torch/_dynamo/convert_frame.py.
LIMIT_WARNING_LINES: dict[int, str] = {844: "2.5.1", 964: "2.7.0", 1358: "2.9.0", 1994: "2.13.0", 2061: "2.15.0"}


@dataclass(frozen=True)
class ReleaseHint:
    """Which release a logging prefix points at, and how firmly."""

    release: str  # '2.9.0' or '2.7 or later'
    because: str
    exact: bool = False


def _release(version: str) -> tuple[int, ...]:
    # A local part (2.13.0+cpu), a nightly or a candidate counts as the release it belongs to.
    found = re.match(r"\d+(?:\.\d+)*", version)
    if not found:
        raise ValueError(f"not a torch version: {version!r}")
    return tuple(int(part) for part in found.group().split("."))


def _holding(names: _Names, torch_version: str) -> str:
    release = _release(torch_version)
    held = ""
    for since, name in names:
        if release >= _release(since):
            held = name
    return held


def config_name(name: str, torch_version: str) -> str:
    """What a dynamo setting, called by its newest name, is called in a release. '' if that release lacks it."""
    return _holding(CONFIG_NAMES[name], torch_version)


def limit_text(torch_version: str) -> str:
    """How the warning about the recompile limit reads in a release."""
    return _holding(LIMIT_TEXTS, torch_version)


def graph_break_text(torch_version: str) -> str:
    """How the first line of a graph break reads in a release."""
    return _holding(GRAPH_BREAK_TEXTS, torch_version)


def limit_exception(torch_version: str) -> str:
    """The exception of a release for a limit hit under fullgraph=True."""
    return _holding(LIMIT_EXCEPTIONS, torch_version)


def cudagraph_skip_artifact(torch_version: str) -> str:
    """The name for set_logs that shows why CUDA graphs were skipped."""
    return _holding(CUDAGRAPH_SKIP_ARTIFACTS, torch_version)


def resume_counter(torch_version: str) -> str:
    """The counter group of resumed functions."""
    return _holding(RESUME_COUNTERS, torch_version)


def compile_start_argument(torch_version: str) -> str:
    """The type that an on_compile_start callback receives. '' means it is called with nothing."""
    return _holding(COMPILE_START_ARGUMENTS, torch_version)


_CONVERT_FRAME = re.compile(r"(?:^|/)convert_frame\.py:(\d+)$")


def release_hint(logged_from: str, limit_name: str = "") -> ReleaseHint | None:
    """The release that a limit warning's own source line, or failing that its wording, points at."""
    found = _CONVERT_FRAME.search(logged_from)
    if found and (release := LIMIT_WARNING_LINES.get(int(found.group(1)))):
        return ReleaseHint(
            release, f"the limit warning stands at convert_frame.py:{found.group(1)} in that release", exact=True
        )
    if limit_name.endswith("cache_size_limit"):
        return ReleaseHint("2.6 or earlier", "the limit is called cache_size_limit up to 2.6")
    if limit_name.endswith("recompile_limit"):
        return ReleaseHint("2.7 or later", "the limit is called recompile_limit from 2.7 on")
    return None
