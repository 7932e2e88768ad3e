"""The reference as pages of the docs site."""

from collections.abc import Iterator
from pathlib import Path

from packaging.version import Version

from toto_compat.reference.showing import judged_reference, release_table
from toto_compat.reference.torch_logs import counts_table, read_counts
from toto_compat.report.html import render_page
from toto_compat.report.table import escaped_markdown, plain_markdown
from toto_compat.verdict.decision import torch_release
from toto_compat.verdict.judged_run import JudgedRun


def reference_runs(folder: Path) -> list[str]:
    return sorted(path.parent.name for path in folder.glob("*/run.json"))


def reference_page(folder: Path) -> str:
    """Every run of the reference: its table, its answer, its origin, and the second count where there is one."""
    lines = [
        "# Reference results",
        "",
        "These runs are committed with the project; `nox -s reference` makes them and this page. Every cell carries",
        "where its evidence comes from. [How to read the table](reading-the-table.md) says what the words mean.",
    ]
    for name in reference_runs(folder):
        lines += ["", *_section(folder, name)]
    return "\n".join(lines) + "\n"


def _section(folder: Path, name: str) -> Iterator[str]:
    judged = judged_reference(folder, name)
    info = judged.run.info
    yield f"## {name}"
    yield ""
    yield (
        f"{len(judged.cells)} rows on {_releases(judged)}, profile `{info.profile}`, runtime {info.runtime}, finished "
        f"{(info.finished or info.started)[:10]}. [The page of this run](reference/{name}.html) has every gate, "
        "figure and event."
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


def _releases(judged: JudgedRun) -> str:
    releases = sorted({torch_release(cell) for cell in judged.cells}, key=Version)
    return f"torch {', '.join(releases)}"


def _second_count(run_folder: Path) -> Iterator[str]:
    counts = read_counts(run_folder)
    if not counts.counts:
        return
    yield ""
    yield "The same recompiles and graph breaks, counted by the text of `TORCH_LOGS` alone:"
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
