"""The compatibility table for a terminal (at most 100 columns, readable without colour) and as Markdown."""

from collections.abc import Sequence
from itertools import groupby

import click
from tabulate import tabulate

from toto_compat.contract.log_line import printable
from toto_compat.contract.result import CellResult, Kind
from toto_compat.matrix.gates import Gate
from toto_compat.report.symbols import symbols_markdown, symbols_table
from toto_compat.runtimes.progress import as_text
from toto_compat.verdict.judge import JudgedCell, JudgedGate, Status, draws_of, forecast_text, one_line
from toto_compat.verdict.judged_run import JudgedRun

# shape first, so that the verdict is clear without colour and in monospace alike
MARKS = {Status.PASS: "+", Status.FAIL: "x", Status.INCONCLUSIVE: "?", Status.NOT_APPLICABLE: "-"}
_COLOURS = {Status.PASS: "green", Status.FAIL: "red", Status.INCONCLUSIVE: "yellow"}
_LEGEND = "~: predicted, decides nothing. Eager is the reference, not a row."


def terminal_table(judged: JudgedRun, *, colour: bool = False) -> str:
    """Write one block per environment, then the sentence that answers the question."""
    columns = [column for column in gate_columns() if column[0].rule.column and column[0].rule.column.short]
    headings = [_heading(column, short=True) for column in columns]
    blocks = []
    for environment, group in groupby(judged.cells, key=lambda cell: cell.result.cell.environment):
        cells = list(group)
        rows = [_terminal_row(cell, columns, colour=colour) for cell in cells]
        # the headers as a row: tabulate pads real ones by two columns each, and eight of them would pass 100
        headers = ["cache", "mode", "verdict", "decided by", *headings]
        body = tabulate([headers, *rows], tablefmt="plain", disable_numparse=True, stralign="left")
        first, rest = body.split("\n", 1)
        blocks.append(f"{printable(environment)}\n{first}\n{'-' * len(first)}\n{rest}")
        blocks += [as_text(table) for cell in cells if (table := symbols_table(cell))]
    shared = [f"{_heading(column, short=True)}: {_heading(column)}." for column in columns if len(column) > 1]
    blocks.append("\n".join([*shared, _LEGEND]))
    blocks.append(as_text(judged.decision.sentence))
    return "\n\n".join(blocks)


def markdown_table(judged: JudgedRun) -> str:
    """Write the same as one Markdown table that can be pasted into a pull request."""
    columns = gate_columns()
    headers = ["environment", "device", "cache", "mode", "workload", "verdict", "decided by", "why"]
    headers += [_heading(column) for column in columns]
    rows = []
    for cell in judged.cells:
        row = [
            cell.result.cell.environment,
            cell.result.request.speaks_of.value,
            cell.result.cell.cache,
            cell.result.cell.mode_and_settings,
            forecast_text(cell),
            f"**{cell.verdict.value}**",
            cell.decided_by.value if cell.decided_by else "",
            cell.reason,
            *(_figures(cell, column, predictions=True) for column in columns),
        ]
        rows.append([escaped_markdown(text) for text in row])
    table = tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)
    legend = "~ predicted, decides nothing; ? not measured. Eager is the reference, not a row."
    symbols = [under for cell in judged.cells if (under := symbols_markdown(cell))]
    skipped = [plain_markdown(skipped_line(cell.result)) for cell in judged.cells if cell.result.skipped]
    return "\n\n".join([table, legend, *symbols, *skipped, plain_markdown(judged.decision.sentence)]) + "\n"


def skipped_line(result: CellResult) -> str:
    """Say what was not run in a cell that could not PASS any more, and why; what shares a reason is told together."""
    by_reason: dict[str, list[str]] = {}
    for what, why in result.skipped.items():
        by_reason.setdefault(why, []).append(what)
    told = "; ".join(f"{', '.join(names)} ({why})" for why, names in by_reason.items())
    return one_line(f"skipped in {result.cell}: {told}")


def gate_columns() -> list[tuple[Gate, ...]]:
    """List the columns of the tables, from the gate table: gates with one heading share a column."""
    columns: dict[str, list[Gate]] = {}
    for gate in Gate:
        if gate.rule.column:
            columns.setdefault(gate.rule.column.short or gate.rule.column.title, []).append(gate)
    return [tuple(gates) for gates in columns.values()]


def _heading(gates: Sequence[Gate], *, short: bool = False) -> str:
    shown = [gate.rule.column for gate in gates if gate.rule.column]
    return shown[0].short if short else " / ".join(column.title for column in shown)


def value_text(judged: JudgedGate, pattern: str = "{:g}") -> str:
    """Write a figure with its kind: '3', '~3' when predicted or reported, '?' when there is none."""
    if judged.value is None:
        return "?" if judged.status is not Status.NOT_APPLICABLE else "-"
    mark = "" if judged.kind is Kind.MEASURED else "~"
    return mark + pattern.format(judged.value)


def _terminal_row(cell: JudgedCell, columns: Sequence[tuple[Gate, ...]], *, colour: bool) -> list[str]:
    verdict = f"{MARKS[cell.verdict]} {cell.verdict.value}"
    if colour:
        verdict = click.style(verdict, fg=_COLOURS[cell.verdict], bold=True)
    return [
        _wrapped(printable(cell.result.cell.cache), 16),
        _mode_and_workload(cell),
        verdict,
        _wrapped(cell.decided_by.value if cell.decided_by else "", 16),
        *(_figures(cell, column) for column in columns),
    ]


def _mode_and_workload(cell: JudgedCell) -> str:
    """Write the mode, below it settings and workload; precision and draws where a row is one of several."""
    lines = [cell.result.cell.mode_and_settings.replace("+", "\n+")]
    if cell.result.cell.workload:
        lines += [f"@{cell.result.cell.workload}", cell.result.request.workload.precision, f"{draws_of(cell)} draws"]
    return as_text("\n".join(line for line in lines if line != " draws"))


def _figures(cell: JudgedCell, gates: Sequence[Gate], *, predictions: bool = False) -> str:
    """Return what a column says of a cell; gates that were not judged leave it empty."""
    return "/".join(_figure(cell, gate, predictions=predictions) for gate in gates)


def _figure(cell: JudgedCell, gate: Gate, *, predictions: bool) -> str:
    judged, column = cell.gates.get(gate), gate.rule.column
    if judged is None or column is None:
        return ""
    if not column.pattern:
        return judged.status.value if judged.status in (Status.PASS, Status.FAIL) else MARKS[judged.status]
    if judged.status is Status.NOT_APPLICABLE and not (predictions and column.shown_if_not_applicable):
        return MARKS[Status.NOT_APPLICABLE]
    return value_text(judged, column.pattern)


def _wrapped(text: str, width: int) -> str:
    """Break after an underscore or hyphen where possible: names have no spaces to break at."""
    lines = []
    while len(text) > width:
        cut = max(text.rfind("_", 0, width), text.rfind("-", 0, width)) + 1 or width
        lines.append(text[:cut])
        text = text[cut:]
    return "\n".join([*lines, text])


def plain_markdown(text: str) -> str:
    """Escape text outside a table: none of it becomes an element, a link or an image that is fetched."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("](", "]\\(").replace("\n", " ")


def escaped_markdown(text: str) -> str:
    return plain_markdown(text.replace("\\", "\\\\").replace("|", "\\|"))
