"""What changed between two cells of one cache and mode: figures, and the reasons that the compiler gave."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toto_compat.contract.result import CellResult, Outcome, SuiteEvidence
from toto_compat.contract.suites import Suite
from toto_compat.verdict.judge import one_line

_MOST_REASONS = 12
# torch before 2.13 says L['inputs'] of what it calls inputs later
_LOCAL = re.compile(r"\b[LG]\['(\w+)'\]")
# Of the counts of the recompile suite these say what the compiler did; the rest are times and sizes.
_COUNTS = ("recompiles", "recompiles_total", "recompile_limit", "graph_breaks", "graphs", "compilations")


@dataclass(frozen=True)
class ReasonChange:
    """One reason of the compiler's and how often it was given, before and after."""

    kind: str
    function: str
    reason: str
    before: int
    after: int

    @property
    def text(self) -> str:
        where = f" in {self.function}" if self.function else ""
        return one_line(f"{self.kind.replace('_', ' ')}{where}: {self.reason}: {self.before} before, {self.after} now")


def count_changes(before: CellResult, after: CellResult) -> Iterator[str]:
    """Name the counts of the compiler's work that differ."""
    old, new = _recompile(before), _recompile(after)
    if old is None or new is None:
        return
    for name in _COUNTS:
        then, now = (one.figures[name].value if name in one.figures else None for one in (old, new))
        if then != now and then is not None and now is not None:
            yield f"{name.replace('_', ' ')} {then:g} before, {now:g} now"


def reason_changes(before: CellResult, after: CellResult) -> list[ReasonChange]:
    """Reasons that are new, gone, or given more or less often; the largest changes first."""
    old, new = reasons_of(before), reasons_of(after)
    changes = [ReasonChange(*key, old[key], new[key]) for key in {*old, *new} if old[key] != new[key]]
    return sorted(changes, key=lambda one: (-abs(one.after - one.before), one.kind, one.function, one.reason))


def new_reasons(before: CellResult, after: CellResult) -> list[ReasonChange]:
    """Reasons for a recompile, a limit hit or a graph break that were never given before.

    Releases reword why a graph breaks: a reason that is new where another of the same function is gone is that one.
    """
    if _recompile(before) is None:  # then nothing was counted, which is not the same as nothing
        return []
    changes = [
        one for one in reason_changes(before, after) if one.kind in ("recompile", "recompile_limit", "graph_break")
    ]
    gone = Counter((one.kind, one.function) for one in changes if one.after == 0 and one.kind == "graph_break")
    new = []
    for one in (one for one in changes if one.before == 0):
        if gone[one.kind, one.function]:
            gone[one.kind, one.function] -= 1
        else:
            new.append(one)
    return new


def reasons_of(cell: CellResult) -> Counter[tuple[str, str, str]]:
    """Count the reasons in the evidence: kind, function, and what torch said with numbers and names taken out."""
    evidence = _recompile(cell)
    if evidence is None:
        return Counter()
    listed: Any = evidence.details.get("reasons")
    # of what was thinned the largest reasons are left, and the events have all
    if isinstance(listed, Sequence) and "reasons" not in evidence.details.get("thinned", {}):
        rows = [one for one in listed if isinstance(one, Mapping)]
        return Counter({_key(one): int(one.get("count", 1)) for one in rows})
    counted: Counter[tuple[str, str, str]] = Counter()
    for event in evidence.events:
        counted[(event.kind.value, event.function, _as_named_later(event.normalised_reason or event.reason))] += (
            event.count
        )
    return counted


def _key(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return str(row.get("kind", "")), str(row.get("function", "")), _as_named_later(str(row.get("reason", "")))


def _as_named_later(reason: str) -> str:
    return _LOCAL.sub(r"\1", reason)


def _recompile(cell: CellResult) -> SuiteEvidence | None:
    evidence = cell.evidence.get(Suite.RECOMPILE)
    return evidence if evidence is not None and evidence.outcome is Outcome.MEASURED else None


def reason_lines(changes: Sequence[ReasonChange]) -> list[str]:
    """The reasons as text, the many small ones summed up."""
    lines = [one.text for one in changes[:_MOST_REASONS]]
    if len(changes) > _MOST_REASONS:
        lines.append(f"and {len(changes) - _MOST_REASONS} more, each given less often")
    return lines
