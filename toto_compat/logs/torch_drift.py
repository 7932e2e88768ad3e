"""What differs between torch releases as far as a compiled Toto notices it: a page of the docs site.

Names come from `contract/torch_releases.py`, source lines from `release_hint.py`. The wording of messages stands here
as the lines that releases print, and a test holds each of them against the grammar in `contract/torch_messages.py`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from packaging.version import Version

from toto_compat.contract.torch_releases import CONFIG_NAMES
from toto_compat.logs.release_hint import limit_warning_lines


@dataclass(frozen=True)
class Drift:
    """One thing that is different from a release on."""

    since: str
    what: str
    now: str
    matters: str  # for somebody who compiles Toto, or reads its logs


@dataclass(frozen=True)
class Wording:
    """A message and how it reads from a release on."""

    since: str
    kind: str  # of the event, as `analyze` names it
    line: str


_BEHAVIOUR = (
    Drift(
        "2.5", "`inline_inbuilt_nn_modules`", "on", "Modules of one class share compiled code; guards name parameters."
    ),
    Drift(
        "2.5",
        "`cudagraph_support_input_mutation`",
        "on",
        "Mutated inputs may stay in a CUDA graph if their address does.",
    ),
    Drift(
        "2.5",
        "`fx_graph_cache`",
        "on",
        "A second process finds compiled graphs on disk: its first forecast is a warm start.",
    ),
    Drift("2.6", "`specialize_float`", "off", "A Python float is an input of the graph, no longer a constant of it."),
    Drift("2.6", '`torch.compiler.set_stance("fail_on_recompile")`', "new", "A service can refuse to recompile."),
    Drift("2.7", "AOTAutograd cache", "on", "More of a warm start comes from disk."),
    Drift("2.7", "`CompilationMetrics.recompile_reason`", "new", "Reasons can be read without the log."),
    Drift(
        "2.9",
        "`graph_partition`",
        "on",
        "Inductor splits a graph around what CUDA graphs cannot take, and keeps the rest.",
    ),
    Drift(
        "2.9.1",
        "`mark_static_address(guard=)`",
        "off by default",
        "A buffer that moves is recorded anew in silence; it recompiled before.",
    ),
    Drift(
        "2.11",
        "counter of resumed frames",
        "`resumes`, before `inline_call`",
        "Whoever reads `torch._dynamo.utils.counters` has to know both.",
    ),
)
_ERRORS = (
    Drift("2.4", "the recompile limit under `fullgraph=True`", "raises `Unsupported`", "What a service has to catch."),
    Drift(
        "2.5",
        "the recompile limit under `fullgraph=True`",
        "raises `CacheLimitExceeded`",
        "What a service has to catch.",
    ),
    Drift(
        "2.6",
        "the recompile limit under `fullgraph=True`",
        "raises `RecompileLimitExceeded`",
        "What a service has to catch.",
    ),
    Drift(
        "2.7",
        "the recompile limit under `fullgraph=True`",
        "raises `FailOnRecompileLimitHit`",
        "What a service has to catch.",
    ),
)
WORDINGS = (
    Wording("2.4", "recompile_limit", "torch._dynamo hit config.cache_size_limit (8)"),
    Wording("2.7", "recompile_limit", "torch._dynamo hit config.recompile_limit (8)"),
    Wording("2.4", "graph_break", "Graph break: from user code at:"),
    Wording("2.6", "graph_break", "Graph break in user code at toto/model/util.py:168"),
    Wording("2.4", "recompile", "Recompiling function forward in toto/model/transformer.py:121"),
    Wording("2.4", "cudagraph_skip", "skipping cudagraphs due to mutated inputs (8 instances)"),
    Wording("2.9", "cudagraph_partition", "cudagraph partition due to non gpu ops"),
)
# The first Python that dynamo refuses, by the last release that refuses it.
FIRST_PYTHON_REFUSED = {"2.5": "3.13", "2.9": "3.14", "2.14": "3.15", "2.15": "3.16"}


def drifts() -> list[Drift]:
    """List every difference, oldest release first."""
    return sorted((*_renamed(), *_reworded(), *_BEHAVIOUR, *_ERRORS), key=lambda one: Version(one.since))


def _renamed() -> Iterator[Drift]:
    for names in CONFIG_NAMES.values():
        for (_, before), (since, now) in pairwise(names):
            told = f"Settings and logs say `{now}`; the old name stays as an alias."
            yield Drift(since, f"setting `{before}`", f"is called `{now}`", told)


def _reworded() -> Iterator[Drift]:
    for kind in dict.fromkeys(one.kind for one in WORDINGS):
        for later in [one for one in WORDINGS if one.kind == kind][1:]:
            yield Drift(
                later.since, f"log line of a {kind.replace('_', ' ')}", f"`{later.line}`", "What a log is searched for."
            )


def drift_markdown() -> str:
    """Write the page of the docs site."""
    head = [
        "# What differs between torch releases",
        "",
        "What changes from release to release for a compiled Toto, or for somebody who reads its logs. This page",
        "is made from `toto_compat/logs/torch_drift.py` and the tables that cells and the log analyzer use.",
        "",
        "| since | what | is now | why it matters |",
        "|---|---|---|---|",
        *(f"| {one.since} | {one.what} | {one.now} | {one.matters} |" for one in drifts()),
        "",
        "## How log lines read",
        "",
        "| event | since | line |",
        "|---|---|---|",
        *(f"| `{one.kind}` | {one.since} | `{one.line}` |" for one in WORDINGS),
        "",
        "[How to read each kind of line](log-lines.md) says what they mean and what to do.",
        "",
        "## Which release wrote a log",
        "",
        "The warning about the recompile limit begins with the source line that printed it. That line moves with every",
        "release:",
        "",
        "| torch | prefix |",
        "|---|---|",
        *(
            f"| {release} | `torch/_dynamo/convert_frame.py:{line}]` |"
            for release, line in limit_warning_lines().items()
        ),
        "",
        "## Which Python dynamo takes",
        "",
        "| torch up to | refuses Python from |",
        "|---|---|",
        *(f"| {release} | {python} |" for release, python in FIRST_PYTHON_REFUSED.items()),
    ]
    return "\n".join(head) + "\n"
