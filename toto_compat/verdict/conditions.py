"""The four conditions under which compile was switched off, each met or not, by the row that the decision speaks of."""

from collections.abc import Sequence
from dataclasses import dataclass

from toto_compat.matrix.gates import Gate
from toto_compat.verdict.decision import DeviceDecision
from toto_compat.verdict.gain import FEWEST_PROCESSES, gain_of
from toto_compat.verdict.judge import JudgedCell, Status

_MOST_RECOMPILES = 9  # "under 10 a run"
_LEAST_SPEEDUP = 2.0


@dataclass(frozen=True)
class Condition:
    """One condition of the decision record; `met` None: not measured."""

    text: str
    met: bool | None
    evidence: str


def conditions(decided: DeviceDecision) -> tuple[Condition, ...]:
    """Check off what the decision record asked for before compile may go back on."""
    cell = decided.speaks_of
    return (
        _by_gates(
            "Recompiles in the KV cache are fixed",
            cell,
            (Gate.RECOMPILE_LIMIT, Gate.RECOMPILES),
        ),
        _by_gates(
            "Changing lengths, horizons and batches are handled without compiling anew",
            cell,
            (Gate.RECOMPILES, Gate.GRAPH_BREAKS),
        ),
        _by_total(cell),
        _by_speed(cell),
    )


def _by_gates(text: str, cell: JudgedCell | None, gates: Sequence[Gate]) -> Condition:
    judged = [cell.gates[gate] for gate in gates if gate in cell.gates] if cell else []
    if cell is None or len(judged) < len(gates):
        return Condition(text, None, "not measured")
    statuses = {one.status for one in judged}
    met = True if statuses == {Status.PASS} else False if Status.FAIL in statuses else None
    return Condition(text, met, f"{cell.result.cell}: " + "; ".join(f"{one.gate.value} {one.reason}" for one in judged))


def _by_total(cell: JudgedCell | None) -> Condition:
    text = f"Fewer than {_MOST_RECOMPILES + 1} recompiles a run"
    judged = cell.gates.get(Gate.RECOMPILES_TOTAL) if cell else None
    if cell is None or judged is None or judged.status not in (Status.PASS, Status.FAIL) or judged.value is None:
        return Condition(text, None, judged.reason if judged else "not measured")
    return Condition(text, judged.value <= _MOST_RECOMPILES, f"{cell.result.cell}: {judged.value:g} in the whole run")


def _by_speed(cell: JudgedCell | None) -> Condition:
    text = f"Consistently at least {_LEAST_SPEEDUP:g}x faster"
    gain = gain_of(cell) if cell else None
    if cell is None or gain is None:
        return Condition(text, None, "not measured")
    told = f"{cell.result.cell}: lower end {gain.least:.2f}x"
    timed = cell.gates.get(Gate.SPEEDUP)
    if timed is not None and timed.status is Status.INCONCLUSIVE:
        return Condition(text, None, f"{told}, but {timed.reason}")
    if gain.least < _LEAST_SPEEDUP:
        return Condition(text, False, told)
    if gain.processes < FEWEST_PROCESSES:
        need = f"{FEWEST_PROCESSES} processes show whether it is so consistently"
        return Condition(text, None, f"{told} in {gain.processes} process{'es' if gain.processes > 1 else ''}; {need}")
    steady = cell.gates.get(Gate.LATENCY_STABILITY)
    if steady is not None and steady.status is not Status.PASS:
        return Condition(text, False if steady.status is Status.FAIL else None, f"{told}, but {steady.reason}")
    return Condition(text, True, f"{told} over {gain.processes} processes")
