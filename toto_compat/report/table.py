"""The compatibility table for a terminal (at most 100 columns, readable without colour) and as Markdown."""

from collections.abc import Sequence
from itertools import groupby

import click
from tabulate import tabulate

from toto_compat.evidence.schema import Kind
from toto_compat.matrix.schema import Gate
from toto_compat.verdict.decision import Decision
from toto_compat.verdict.gates import JudgedCell, JudgedGate, Status

# shape first, so that the verdict is clear without colour and in monospace alike
MARKS = {Status.PASS: "+", Status.FAIL: "x", Status.INCONCLUSIVE: "?", Status.NOT_APPLICABLE: "-"}
_COLOURS = {Status.PASS: "green", Status.FAIL: "red", Status.INCONCLUSIVE: "yellow"}
_LEGEND = "recomp.: after warm-up/total. ~: predicted, decides nothing. Eager is the reference, not a row."


def terminal_table(cells: Sequence[JudgedCell], decision: Decision, *, colour: bool = False) -> str:
    """One block per environment, then the sentence that answers the question."""
    blocks = []
    for environment, group in groupby(cells, key=lambda cell: cell.result.request.environment_name):
        rows = [_terminal_row(cell, colour=colour) for cell in group]
        # the headers as a row: tabulate pads real ones by two columns each, and eight of them would pass 100
        headers = ["cache", "mode", "verdict", "decided by", "equiv", "recomp.", "breaks", "speedup"]
        body = tabulate([headers, *rows], tablefmt="plain", disable_numparse=True, stralign="left")
        first, rest = body.split("\n", 1)
        blocks.append(f"{environment}\n{first}\n{'-' * len(first)}\n{rest}")
    blocks.append(_LEGEND)
    blocks.append(decision.sentence)
    return "\n\n".join(blocks)


def markdown_table(cells: Sequence[JudgedCell], decision: Decision) -> str:
    """The same as one Markdown table that can be pasted into a pull request."""
    headers = ["environment", "device", "cache", "mode", "verdict", "decided by", "why", "equivalence",
               "recompiles after warm-up / total", "graph breaks", "CUDA graphs", "speedup", "memory"]  # fmt: skip
    rows = []
    for cell in cells:
        request = cell.result.request
        row = [
            request.environment_name,
            request.device.value,
            request.cache.name,
            _mode(cell, separator="+"),
            f"**{cell.verdict.value}**",
            cell.decided_by.value if cell.decided_by else "",
            cell.reason,
            _status(cell, Gate.EQUIVALENCE),
            _recompiles(cell),
            _number(cell, Gate.GRAPH_BREAKS),
            _number(cell, Gate.CUDAGRAPHS, na_shows_value=True),
            _number(cell, Gate.SPEEDUP, pattern="{:.2f}x"),
            _number(cell, Gate.MEMORY, pattern="{:.2f}x"),
        ]
        rows.append([escaped_markdown(text) for text in row])
    table = tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)
    legend = "~ predicted, decides nothing; ? not measured. Eager is the reference, not a row."
    return f"{table}\n\n{legend}\n\n{plain_markdown(decision.sentence)}\n"


def value_text(judged: JudgedGate, pattern: str = "{:g}") -> str:
    """A figure with its kind: '3', '~3' when predicted or reported, '?' when there is none."""
    if judged.value is None:
        return "?" if judged.status is not Status.NOT_APPLICABLE else "-"
    mark = "" if judged.kind is Kind.MEASURED else "~"
    return mark + pattern.format(judged.value)


def _terminal_row(cell: JudgedCell, *, colour: bool) -> list[str]:
    verdict = f"{MARKS[cell.verdict]} {cell.verdict.value}"
    if colour:
        verdict = click.style(verdict, fg=_COLOURS[cell.verdict], bold=True)
    return [
        _wrapped(cell.result.request.cache.name, 16),
        _mode(cell, separator="\n+"),
        verdict,
        _wrapped(cell.decided_by.value if cell.decided_by else "", 16),
        _status(cell, Gate.EQUIVALENCE),
        _recompiles(cell),
        _number(cell, Gate.GRAPH_BREAKS),
        _number(cell, Gate.SPEEDUP, pattern="{:.2f}x"),
    ]


def _mode(cell: JudgedCell, *, separator: str) -> str:
    request = cell.result.request
    return request.mode if request.settings_name == "stock" else f"{request.mode}{separator}{request.settings_name}"


def _status(cell: JudgedCell, gate: Gate) -> str:
    judged = cell.gates.get(gate)
    if judged is None:
        return ""
    return judged.status.value if judged.status in (Status.PASS, Status.FAIL) else MARKS[judged.status]


def _recompiles(cell: JudgedCell) -> str:
    return f"{_number(cell, Gate.RECOMPILES)}/{_number(cell, Gate.RECOMPILES_TOTAL)}"


def _number(cell: JudgedCell, gate: Gate, *, pattern: str = "{:g}", na_shows_value: bool = False) -> str:
    judged = cell.gates.get(gate)
    if judged is None:
        return ""
    if judged.status is Status.NOT_APPLICABLE and not na_shows_value:
        return MARKS[Status.NOT_APPLICABLE]
    return value_text(judged, pattern)


def _wrapped(text: str, width: int) -> str:
    """Broken after an underscore or hyphen where possible: names have no spaces to break at."""
    lines = []
    while len(text) > width:
        cut = max(text.rfind("_", 0, width), text.rfind("-", 0, width)) + 1 or width
        lines.append(text[:cut])
        text = text[cut:]
    return "\n".join([*lines, text])


def plain_markdown(text: str) -> str:
    """Text outside a table: no markup of its own."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("\n", " ")


def escaped_markdown(text: str) -> str:
    return plain_markdown(text.replace("\\", "\\\\").replace("|", "\\|"))
