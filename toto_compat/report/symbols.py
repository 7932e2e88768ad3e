"""The user's own series in the reports: a row per symbol under its cell."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

from toto_compat.contract.result import Outcome
from toto_compat.contract.suites import Suite
from toto_compat.verdict.judge import JudgedCell, one_line

HEADINGS = ("symbol", "MAE eager", "MAE compiled", "difference", "speedup", "recompiles", "notes")
_WIDTHS = [16, None, None, None, None, None, 22]  # of a terminal's columns: with the figures at most 100
_MARKUP = "\\`*_{}[]<>()#+-.!|~^$&"


@dataclass(frozen=True)
class SymbolRow:
    """What was measured of one symbol; None where it was not, and `notes` says why."""

    symbol: str
    mae_eager: float | None
    mae_compiled: float | None
    difference: float | None  # over eager's
    equivalence: float | None
    speedup: float | None
    recompiles: float | None
    notes: str

    @property
    def texts(self) -> tuple[str, ...]:
        """Write the row as people read it, in the order of the headings, made fit for one line."""
        return (
            one_line(self.symbol),
            _text(self.mae_eager, "{:.6g}"),
            _text(self.mae_compiled, "{:.6g}"),
            _text(self.difference, "{:.2g}"),
            _text(self.speedup, "{:.2f}x"),
            _text(self.recompiles, "{:g}"),
            one_line(self.notes),
        )


def symbol_rows(cell: JudgedCell) -> tuple[SymbolRow, ...]:
    """List a cell's rows as the command line has them; none without series, or where their suite failed."""
    evidence = cell.result.evidence.get(Suite.SYMBOLS)
    rows = evidence.details.get("symbols") if evidence and evidence.outcome is Outcome.MEASURED else None
    return tuple(_row(row) for row in rows if isinstance(row, Mapping)) if isinstance(rows, list) else ()


def symbols_table(cell: JudgedCell) -> str:
    """Show the rows on a terminal, indented under the name of their cell; empty without any."""
    rows = symbol_rows(cell)
    if not rows:
        return ""
    name = cell.result.cell
    lines = [HEADINGS, *(row.texts for row in rows)]
    table = tabulate(lines, tablefmt="plain", disable_numparse=True, maxcolwidths=_WIDTHS)
    title = f"{name.cache}/{name.mode_and_settings} on your series, compiled against upstream eager:"
    return "\n".join([f"  {title}", *(f"    {line}".rstrip() for line in table.splitlines())])


def symbols_markdown(cell: JudgedCell) -> str:
    """Write the same as a Markdown table."""
    rows = symbol_rows(cell)
    if not rows:
        return ""
    texts = [[escaped_name(text) for text in row.texts] for row in rows]
    table = tabulate(texts, headers=HEADINGS, tablefmt="github", disable_numparse=True)
    return f"Your series in {escaped_name(cell.result.cell)}, compiled against upstream eager:\n\n{table}"


def escaped_name(text: str) -> str:
    """Escape a text with a user's file name in it, so that Markdown and HTML take nothing for markup."""
    plain = "".join(f"\\{letter}" if letter in _MARKUP else letter for letter in one_line(text))
    return plain.replace("\\&", "&amp;").replace("\\<", "&lt;").replace("\\>", "&gt;")


def _row(row: Mapping[str, Any]) -> SymbolRow:
    noted = row.get("notes")
    notes = [str(note) for note in noted] if isinstance(noted, list) else []
    if row.get("problem"):
        notes.append(str(row["problem"]))
    figures = ("mae_eager", "mae_compiled", "difference", "equivalence", "speedup", "recompiles")
    return SymbolRow(
        symbol=str(row.get("symbol", "")), notes="; ".join(notes), **{name: _number(row.get(name)) for name in figures}
    )


def _number(value: Any) -> float | None:
    """Read a figure as it is stored; what JSON has no number for is stored as text or null."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else None


def _text(value: float | None, pattern: str) -> str:
    if value is None:
        return "?"
    return pattern.format(value) if math.isfinite(value) else str(value)
