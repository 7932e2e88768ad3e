"""The reference as pages of the docs site."""

import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from packaging.version import Version

from toto_compat.contract.suites import Suite
from toto_compat.environments.torch_sources.defaults import older_names, torch_defaults
from toto_compat.logs.torch_drift import drift_markdown
from toto_compat.reference.showing import SHOWN, judged_reference, release_table, verdict_text
from toto_compat.reference.torch_logs import counts_table, read_counts
from toto_compat.releases.upgrade import WATCHED, moved_defaults
from toto_compat.report.html import render_page
from toto_compat.report.table import escaped_markdown, plain_markdown
from toto_compat.verdict.decision import torch_release
from toto_compat.verdict.judge import JudgedCell
from toto_compat.verdict.judged_run import JudgedRun


def differences_page(folder: Path) -> str:
    """What differs between releases: as it is known, as upstream's counts were measured, as torch's defaults moved."""
    judged = judged_reference(folder)
    return "\n".join([drift_markdown().rstrip(), *_measured(judged), *_moved(judged)]) + "\n"


def _measured(judged: JudgedRun) -> Iterator[str]:
    yield ""
    yield "## What was measured on each release"
    yield ""
    yield f"`upstream` and `fixed_size` in mode default, of [the reference](reference.md#{SHOWN}):"
    yield ""
    yield "| torch | `upstream`: recompiles | graph breaks | given up at the limit | verdict | `fixed_size` |"
    yield "|---|---|---|---|---|---|"
    for release in _releases(judged):
        own = {cell.result.cell.partition("/")[2]: cell for cell in judged.cells if torch_release(cell) == release}
        upstream, fixed_size = own.get("upstream/default"), own.get("fixed_size/default")
        counts = [_count(upstream, name) for name in ("recompiles_total", "graph_breaks", "recompile_limit")]
        verdicts = [verdict_text(cell) if cell is not None else "" for cell in (upstream, fixed_size)]
        yield f"| {' | '.join(map(escaped_markdown, (release, *counts, *verdicts)))} |"


def _count(cell: JudgedCell | None, name: str) -> str:
    figure = cell.figure(Suite.RECOMPILE, name) if cell is not None else None
    return f"{figure.value:g}" if figure is not None and figure.value is not None else "not counted"


def _moved(judged: JudgedRun) -> Iterator[str]:
    rows = []
    for before, after in pairwise(_releases(judged)):
        try:
            moved = moved_defaults(torch_defaults(before), torch_defaults(after), older_names(after))
        except KeyError:  # a release that the table of defaults lacks
            continue
        told = [one.text for one in moved if one.name in WATCHED]
        rows.append((after, before, "<br>".join(map(escaped_markdown, told)) or "none of these"))
    if not rows:
        return
    yield ""
    yield "## Defaults of torch that moved"
    yield ""
    yield "Those that the caches here depend on, read from the sources in the wheels:"
    yield ""
    yield "| torch | against | defaults |"
    yield "|---|---|---|"
    yield from (f"| {' | '.join(row)} |" for row in rows)


def reference_runs(folder: Path) -> list[str]:
    return sorted(path.parent.name for path in folder.glob("*/run.json"))


def reference_page(folder: Path) -> str:
    """Every run of the reference: its table, its answer, its origin, and the second count where there is one."""
    lines = [
        "# Reference results",
        "",
        "These runs are committed with the project, and this page is made from them. Every cell carries where its",
        "evidence comes from. [How to read the table](reading-the-table.md) says what the words mean.",
    ]
    for name in reference_runs(folder):
        lines += ["", *_section(folder, name)]
    return "\n".join(lines) + "\n"


def _section(folder: Path, name: str) -> Iterator[str]:
    judged = judged_reference(folder, name)
    info = judged.run.info
    yield f"## {name}"
    yield ""
    rows = "1 row" if len(judged.cells) == 1 else f"{len(judged.cells)} rows"
    yield (
        f"{rows} on torch {', '.join(_releases(judged))}, {_kind_of_evidence(judged)}, profile `{info.profile}`, "
        f"runtime {info.runtime}, finished {(info.finished or info.started)[:10]}, made by "
        f"`{shlex.join(info.command)}`. "
        f"[The page of this run](reference/{name}.html) has every gate, figure and event."
    )
    yield ""
    yield release_table(judged.cells)
    yield ""
    yield plain_markdown(judged.decision.sentence)
    yield from _second_count(folder / name)
    yield ""
    yield "### Where it was measured" + f" {{: #origin-{name} }}"
    yield ""
    yield from _origins(judged)


def _kind_of_evidence(judged: JudgedRun) -> str:
    if all(cell.result.request.lower_only for cell in judged.cells):
        return "compiled for CUDA without a GPU (predictions, which decide nothing)"
    devices = sorted({cell.result.request.device.value for cell in judged.cells})
    return f"measured on {' and '.join(devices)}"


def _releases(judged: JudgedRun) -> list[str]:
    """The releases of a run, oldest first."""
    return sorted({torch_release(cell) for cell in judged.cells}, key=Version)


def _second_count(run_folder: Path) -> Iterator[str]:
    counts = read_counts(run_folder)
    if not counts.counts:
        return
    yield ""
    yield "The recompiles and graph breaks of these rows, counted a second time by the text of `TORCH_LOGS` alone. The"
    yield "log has every recompile; the gate `recompiles_total` leaves out those that the announced batches need, and"
    yield "is lower. A forecast that raises is counted only as far as it came, or not at all."
    yield ""
    yield counts_table(counts.counts)


def _origins(judged: JudgedRun) -> Iterator[str]:
    yield "| torch | Python | toto-ts | processor | runtime | cells |"
    yield "|---|---|---|---|---|---|"
    seen: dict[tuple[str, ...], int] = {}
    for cell in judged.cells:
        where = cell.result.provenance
        key = (
            where.torch,
            where.python,
            where.toto_ts,
            f"{where.gpu or where.cpu}, {where.cores} cores",
            where.runtime,
        )
        seen[key] = seen.get(key, 0) + 1
    for where_measured, count in seen.items():
        yield "| " + " | ".join(escaped_markdown(part) for part in (*where_measured, str(count))) + " |"


def report_pages(folder: Path) -> Iterator[tuple[str, str]]:
    """The self-contained page of every run, by the run's name."""
    for name in reference_runs(folder):
        yield name, render_page(judged_reference(folder, name), {})
