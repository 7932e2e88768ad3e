"""Two runs side by side: what got better, worse, new or lost, with the noise of timings taken into account."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from toto_compat.contract.result import Kind
from toto_compat.matrix.gates import Comparison, Gate
from toto_compat.verdict.judge import JudgedCell, JudgedGate, Status


class Change(StrEnum):
    """In the order in which the changes of its gates name the change of a row."""

    REGRESSED = "regressed"
    MISSING = "missing"
    IMPROVED = "improved"
    NEW = "new"
    SAME = "same"


@dataclass(frozen=True)
class GateChange:
    gate: Gate
    change: Change
    text: str  # one line: what was, what is


@dataclass(frozen=True)
class RowChange:
    cell: str
    change: Change
    before: Status | None
    after: Status | None
    gates: tuple[GateChange, ...] = ()

    @property
    def is_worse(self) -> bool:
        """Say whether it regressed or is no longer known to pass: a row that is gone says nothing good."""
        lost = self.before is Status.PASS and self.after in (None, Status.INCONCLUSIVE)
        return self.change is Change.REGRESSED or lost

    @property
    def text(self) -> str:
        told = [gate.text for gate in self.gates if gate.change is self.change and gate.text]
        if not told:  # a verdict that flipped inside the noise has to be explained, not hidden
            told = [gate.text for gate in self.gates if gate.text]
        return "; ".join(told)


# The spread of latency is itself a noisy figure, one outlier doubles it.
_SPREAD_FACTOR = 2.0


def compare(before: Sequence[JudgedCell], after: Sequence[JudgedCell]) -> list[RowChange]:
    """Find one change per cell of either run. Judge both by the same limits first, or limits show up as changes."""
    old, new = _by_name(before), _by_name(after)
    return [compare_row(name, old.get(name), new.get(name)) for name in dict.fromkeys([*old, *new])]


def _by_name(cells: Sequence[JudgedCell]) -> Mapping[str, JudgedCell]:
    # a CUDA environment can also run on the CPU: those are two different rows
    return {
        cell.result.cell
        if cell.result.request.speaks_of is cell.result.request.environment.device
        else f"{cell.result.cell} on {cell.result.request.speaks_of.value}": cell
        for cell in cells
    }


def compare_row(name: str, old: JudgedCell | None, new: JudgedCell | None) -> RowChange:
    """Compare one row of two runs; `name` is what it is called, since each may be of another environment."""
    if old is None:
        assert new is not None
        return RowChange(name, Change.NEW, None, new.verdict)
    if new is None:
        return RowChange(name, Change.MISSING, old.verdict, None)
    same_series = _series_of(old) == _series_of(new)
    gates = tuple(
        _compare_gate(gate, old.gates.get(gate), new.gates.get(gate))
        if same_series or not gate.rule.suite.rule.needs_symbols
        else GateChange(gate, Change.SAME, f"{gate.value} is of other series of yours in each run")
        for gate in Gate
        if gate in old.gates or gate in new.gates
    )
    changes = {gate.change for gate in gates}
    change = next((change for change in Change if change in changes), Change.SAME)
    return RowChange(name, change, old.verdict, new.verdict, gates)


def _series_of(cell: JudgedCell) -> set[tuple[str, str]]:
    """Return the user's own series that a cell forecast, by name and content."""
    return {(symbol.name, symbol.content) for symbol in cell.result.request.symbols}


def _compare_gate(  # noqa: PLR0911 - one return per way to compare
    gate: Gate, old: JudgedGate | None, new: JudgedGate | None
) -> GateChange:
    if old is None or new is None:
        return GateChange(gate, Change.NEW if old is None else Change.MISSING, f"{gate.value} was not judged in both")
    if old.version and new.version and old.version != new.version:
        return GateChange(gate, Change.SAME, f"{gate.value} was measured by versions {old.version} and {new.version}")
    decided = (Status.PASS, Status.FAIL)
    if old.status not in decided or new.status not in decided:
        return _compare_presence(gate, old, new, decided)
    if old.value is None or new.value is None:
        # MODEL_FAILED carries an error instead of a figure
        return GateChange(gate, _by_status(old, new), _told(gate, old, new))
    match gate.rule.comparison:
        case Comparison.COUNT:
            return _compare_numbers(gate, old, new)
        case Comparison.INTERVAL:
            return _compare_intervals(gate, old, new)
        case Comparison.MARGIN:
            return _compare_with_margin(gate, old, new, factor=1.0 + gate.rule.margin)
        case Comparison.SPREAD if old.status is not new.status:
            return _compare_with_margin(gate, old, new, factor=_SPREAD_FACTOR)
        case Comparison.SPREAD:
            return GateChange(gate, Change.SAME, "")
        case Comparison.STATUS:
            return GateChange(gate, _by_status(old, new), "" if old.status is new.status else _told(gate, old, new))


def _compare_presence(gate: Gate, old: JudgedGate, new: JudgedGate, decided: tuple[Status, ...]) -> GateChange:
    if old.status in decided:
        return GateChange(gate, Change.MISSING, f"{gate.value} is no longer decided: {new.reason}")
    if new.status in decided:
        change = Change.REGRESSED if new.status is Status.FAIL else Change.NEW
        return GateChange(gate, change, f"{gate.value} is now decided: {new.reason}")
    predictions = old.value is not None and new.value is not None and old.kind is new.kind is Kind.PREDICTED
    if predictions and gate.rule.comparison is Comparison.COUNT:
        return _compare_numbers(gate, old, new)
    return GateChange(gate, Change.SAME, "")


def _by_status(old: JudgedGate, new: JudgedGate) -> Change:
    if old.status is new.status:
        return Change.SAME
    return Change.REGRESSED if new.status is Status.FAIL else Change.IMPROVED


def _compare_numbers(gate: Gate, old: JudgedGate, new: JudgedGate) -> GateChange:
    assert old.value is not None and new.value is not None
    if old.value == new.value:
        return GateChange(gate, Change.SAME, "")
    better = (new.value > old.value) is gate.rule.larger_is_better
    return GateChange(gate, Change.IMPROVED if better else Change.REGRESSED, _told(gate, old, new))


def _compare_with_margin(gate: Gate, old: JudgedGate, new: JudgedGate, *, factor: float) -> GateChange:
    assert old.value is not None and new.value is not None
    if new.value > old.value * factor:
        return GateChange(gate, Change.REGRESSED, _told(gate, old, new))
    if old.value > new.value * factor:
        return GateChange(gate, Change.IMPROVED, _told(gate, old, new))
    note = f"{_told(gate, old, new)}, within noise" if old.status is not new.status else ""
    return GateChange(gate, Change.SAME, note)


def _compare_intervals(gate: Gate, old: JudgedGate, new: JudgedGate) -> GateChange:
    """A change is real when the intervals do not meet and their centres differ by more than processes differ anyway."""
    old_low, old_high = _interval(old)
    new_low, new_high = _interval(new)
    shift = _centre(new_low, new_high) / _centre(old_low, old_high)
    told = (
        f"{gate.value} {old_low:.2f} to {old_high:.2f}x before, {new_low:.2f} to {new_high:.2f}x now ({shift - 1:+.0%})"
    )
    if new_high < old_low and shift < 1.0 - gate.rule.margin:
        return GateChange(gate, Change.REGRESSED, told)
    if new_low > old_high and shift > 1.0 + gate.rule.margin:
        return GateChange(gate, Change.IMPROVED, told)
    return GateChange(gate, Change.SAME, f"{told}, within noise" if old.status is not new.status else "")


def _interval(judged: JudgedGate) -> tuple[float, float]:
    figure = judged.figure
    assert figure is not None and figure.value is not None
    low = figure.low if figure.low is not None else figure.value
    high = figure.high if figure.high is not None else figure.value
    return low, high


def _centre(low: float, high: float) -> float:
    """Take the geometric mean: of a ratio, twice and half are the same distance from one."""
    return math.sqrt(low * high) if low > 0 and high > 0 else max(low, high, 1e-12)


def _told(gate: Gate, old: JudgedGate, new: JudgedGate) -> str:
    if old.value is None or new.value is None:
        return f"{gate.value}: {old.status.value} before, {new.status.value} now ({new.reason})"
    predicted = " (predicted)" if new.kind is Kind.PREDICTED else ""
    return f"{gate.value} {old.value:g} before, {new.value:g} now{predicted}"
