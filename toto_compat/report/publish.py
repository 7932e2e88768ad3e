"""The end of a run: its table on disk and on the screen, what went wrong, and the exit code that says so."""

import sys
from collections.abc import Iterator, Sequence

import click

from toto_compat.contract.cell_name import CellName
from toto_compat.contract.log_line import LONGEST_LINE
from toto_compat.errors import ExitCode
from toto_compat.evidence.files import write_atomically
from toto_compat.evidence.store import log_path
from toto_compat.report.compatibility import as_json, compatibility
from toto_compat.report.table import markdown_table, skipped_line, terminal_table
from toto_compat.runtimes.progress import as_text
from toto_compat.verdict.judge import Status
from toto_compat.verdict.judged_run import JudgedRun


def publish(judged: JudgedRun, *, to_json: bool = False) -> None:
    """Write the table into the run's folder and print it."""
    write_compatibility(judged)
    if to_json:
        click.echo(as_json(compatibility(judged)), nl=False)
    else:
        click.echo(terminal_table(judged, colour=sys.stdout.isatty()))


def write_compatibility(judged: JudgedRun) -> None:
    """Write compatibility.json, .md and .html into the run's folder: this is where verdicts live."""
    # here and not above: matplotlib and jinja2 take longer to import than the rest of this takes to run
    from toto_compat.report.html import render_page
    from toto_compat.report.page_data import history_of

    folder = judged.run.folder
    write_atomically(folder / "compatibility.json", as_json(compatibility(judged)))
    write_atomically(folder / "compatibility.md", as_text(markdown_table(judged)))
    # of a damaged run beside it nothing is said here: `toto-compat report` names the file
    write_atomically(folder / "compatibility.html", render_page(judged, history_of(folder.parent, until=judged)))


def closing_lines(judged: JudgedRun, required: Sequence[CellName]) -> Iterator[str]:
    """Return what a reader of the table has to know beside it."""
    folder, cells = judged.run.folder, judged.run.cells
    for cell in cells:
        log = log_path(folder, cell.cell)
        for what, failure in cell.failures:
            told = f"could not be run: {what}: {failure.kind}: {failure.message}"
            # a message of torch may be a whole graph in one line; the result and the log have the rest
            yield told if len(told) <= LONGEST_LINE else f"{told[:LONGEST_LINE]}..."
            yield from (f"    {line[:LONGEST_LINE]}" for line in failure.last_lines[-5:])
        if cell.could_not_run and log.exists():
            yield f"    log: {log}"
        if cell.skipped:
            yield skipped_line(cell)
    reused = sum(cell.reused for cell in cells)
    if reused:
        yield f"{reused} of {len(cells)} cells are unchanged and come from the store (--fresh runs them again)"
    missed = missed_requirements(judged, required)
    if missed:
        yield f"required to be PASS and are not: {', '.join(missed)}"


def missed_requirements(judged: JudgedRun, required: Sequence[CellName]) -> list[CellName]:
    passed = {cell.result.cell for cell in judged.cells if cell.verdict is Status.PASS}
    return [cell for cell in required if cell not in passed]


def exit_code(judged: JudgedRun, required: Sequence[CellName], *, environment_failed: bool) -> ExitCode:
    """Put a cell that could not be run before a requirement: without it the requirement was never tried."""
    if environment_failed:
        return ExitCode.ENVIRONMENT
    if any(cell.could_not_run for cell in judged.run.cells):
        return ExitCode.CELL_NOT_RUN
    return ExitCode.REQUIREMENT if missed_requirements(judged, required) else ExitCode.OK
