"""`toto-compat report` and `toto-compat diff`: stored runs shown and compared, nothing is run."""

import json
import sys
import webbrowser
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import click
from tabulate import tabulate

from toto_compat.errors import ExitCode
from toto_compat.evidence.files import write_atomically
from toto_compat.evidence.store import Run, find_run, load_run
from toto_compat.report.ci import badge, junit_xml, step_summary
from toto_compat.report.compatibility import as_json, compatibility
from toto_compat.report.record import decision_record
from toto_compat.report.table import escaped_markdown, markdown_table, terminal_table
from toto_compat.runtimes.progress import as_text, print_out, say
from toto_compat.verdict.comparison import Change, RowChange, compare
from toto_compat.verdict.judged_run import JudgedRun, judge_run, read_gates
from toto_compat.verdict.verdict_rows import env_text, verdict_of

# What `--format` takes: a judged run -> text. A new format is a function and a row here; the page is written to a file.
FORMATS: Mapping[str, Callable[[JudgedRun], str]] = {
    "table": lambda judged: terminal_table(judged) + "\n",
    "md": markdown_table,
    "json": lambda judged: as_json(compatibility(judged)),
    "junit": junit_xml,
    "summary": step_summary,
    "badge": lambda judged: json.dumps(badge(judged)) + "\n",
    "decision": decision_record,
    "verdict": lambda judged: verdict_of(judged).model_dump_json(by_alias=True, indent=2) + "\n",
    "env": lambda judged: env_text(judged.decision),
}
PAGE = "html"
_RESULTS = click.option(
    "--results", type=click.Path(path_type=Path), default=Path("results"), show_default=True, help="Folder of the runs."
)
_GATES = click.option(
    "--gates", type=click.Path(path_type=Path), help="Limits in this YAML file replace the run's own; the others hold."
)


@click.command("report")
@click.argument("run", default="latest")
@click.option(
    "--format",
    "form",
    type=click.Choice([*FORMATS, PAGE]),
    default="table",
    show_default=True,
    help="What to write: for people, for CI, the verdict for a service, lines for its env file.",
)
@click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), help="With --format env: the device to print the lines for."
)
@_GATES
@click.option("--open", "open_page", is_flag=True, help="Write the HTML page and open it in the browser.")
@click.option("--output", type=click.Path(path_type=Path), help="Write to this file instead of the terminal.")
@_RESULTS
def report_command(
    *,
    run: str,
    form: str,
    device: str | None,
    gates: Path | None,
    open_page: bool,
    output: Path | None,
    results: Path,
) -> None:
    """Show a RUN (a name under results/, a path, or 'latest'), judged from its stored evidence."""
    if device and (form != "env" or open_page):
        raise click.UsageError("--device is of --format env")
    stored = _stored_run(run, results)
    judged = judge_run(stored, read_gates(gates, stored.info) if gates else None)
    if open_page or form == PAGE:
        # the run's own page stays what its own limits say
        name = f"compatibility-{gates.stem}.html" if gates else "compatibility.html"
        page = output or stored.folder / name
        _write_page(judged, page, results)
        if open_page:
            webbrowser.open(page.resolve().as_uri())
        return
    if stored.unfinished:
        # on the error stream, so that every format stays what it is
        say(f"{len(stored.unfinished)} planned cells have no result: {_some(stored.unfinished)}")
    on_terminal = form == "table" and output is None and sys.stdout.isatty()
    text = env_text(judged.decision, device) if form == "env" else FORMATS[form](judged)
    if output:
        write_atomically(output, as_text(text))
        say(f"written: {output}")
    elif on_terminal:
        click.echo(terminal_table(judged, colour=True))
    else:
        print_out(text, end_line=False)


@click.command("diff")
@click.argument("before")
@click.argument("after", default="latest")
@_GATES
@click.option("--json", "as_json_text", is_flag=True, help="Print the changes as JSON.")
@click.option("--all", "show_all", is_flag=True, help="List the rows that stayed the same, too.")
@click.option(
    "--fail-on-regression",
    is_flag=True,
    help=f"Exit with {ExitCode.FINDINGS.value} if a row got worse, or one that was PASS is missing or undecided now.",
)
@_RESULTS
def diff_command(
    *,
    before: str,
    after: str,
    gates: Path | None,
    as_json_text: bool,
    show_all: bool,
    fail_on_regression: bool,
    results: Path,
) -> None:
    """Show what got better, worse, new or lost from run BEFORE to run AFTER (default: latest), beyond noise.

    A name such as reference/cpu compares with the committed runs.
    """
    old, new = _stored_run(before, results), _stored_run(after, results)
    # both by the same limits: a limit that moved is not a change of the model
    limits = read_gates(gates, new.info) if gates else new.info.gates
    rows = compare(judge_run(old, limits).cells, judge_run(new, limits).cells)
    if as_json_text:
        print_out(as_json(_diff_as_json(old.info.name, new.info.name, rows)), end_line=False)
    else:
        print_out(_diff_as_text(old.info.name, new.info.name, rows, show_all=show_all))
    if fail_on_regression and any(row.is_worse for row in rows):
        sys.exit(ExitCode.FINDINGS)


def _stored_run(name: str, results: Path) -> Run:
    """Load the run under the name that finds it: one that was copied still carries the name it ran under."""
    stored = load_run(find_run(name, results))
    root = results.resolve()
    found_as = stored.folder.relative_to(root).as_posix() if stored.folder.is_relative_to(root) else name
    return replace(stored, info=stored.info.model_copy(update={"name": found_as}))


def _some(names: tuple[str, ...]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _write_page(judged: JudgedRun, page: Path, results: Path) -> None:
    # matplotlib and jinja2 are only worth their import time for the page
    from toto_compat.report.html import write_html

    write_html(judged, page, results=results if results.is_dir() else None, note=say)
    say(f"written: {page}")


def _diff_as_text(before: str, after: str, rows: list[RowChange], *, show_all: bool) -> str:
    counts = Counter(row.change for row in rows)
    shown = [row for row in sorted(rows, key=lambda row: list(Change).index(row.change)) if _is_shown(row, show_all)]
    table = tabulate(
        [[row.change.value, escaped_markdown(row.cell), _verdicts(row), escaped_markdown(row.text)] for row in shown],
        headers=["change", "cell", "verdict", "what changed"],
        tablefmt="github",
        disable_numparse=True,
    )
    totals = ", ".join(f"{counts[change]} {change.value}" for change in Change)
    return f"{before} -> {after}: {totals}" + (f"\n\n{table}" if shown else "")


def _is_shown(row: RowChange, show_all: bool) -> bool:
    return show_all or row.change is not Change.SAME or row.before is not row.after


def _verdicts(row: RowChange) -> str:
    old, new = (verdict.value if verdict else "none" for verdict in (row.before, row.after))
    return old if old == new else f"{old} -> {new}"


def _diff_as_json(before: str, after: str, rows: list[RowChange]) -> dict[str, object]:
    return {
        "schema": 1,
        "before": before,
        "after": after,
        "rows": [
            {
                "cell": row.cell,
                "change": row.change.value,
                "before": row.before.value if row.before else None,
                "after": row.after.value if row.after else None,
                "gates": {
                    changed.gate.value: {"change": changed.change.value, "text": changed.text}
                    for changed in row.gates
                    if changed.change is not Change.SAME or changed.text
                },
            }
            for row in rows
        ],
    }
