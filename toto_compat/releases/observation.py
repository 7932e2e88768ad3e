"""One release seen through one gate: its state, the evidence behind it, and where that comes from."""

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from toto_compat.contract.cell_name import CellName
from toto_compat.contract.gate_limit import GateLimit
from toto_compat.contract.request import CellRequest
from toto_compat.contract.result import Outcome
from toto_compat.contract.suites import Suite
from toto_compat.errors import StorageError
from toto_compat.evidence.files import read_bytes
from toto_compat.evidence.store import StoredCell, list_runs, load_run, read_cell
from toto_compat.matrix.gates import Gate
from toto_compat.verdict.judge import JudgedGate, Status, judge

# What of an environment changes what is measured; the rest is for containers and GPUs.
MEASURED_BY = ("torch", "build", "python", "toto_ts", "xformers", "pins")


@dataclass(frozen=True)
class Criterion:
    """What makes two releases differ: the gate's verdict by a limit, or its figure itself."""

    gate: Gate
    limit: GateLimit
    any_change: bool = False

    @property
    def text(self) -> str:
        if self.any_change:
            return f"the figure of {self.gate.value} changes"
        return f"{self.gate.value} crosses its limit ({self.limit.text})"


@dataclass(frozen=True)
class Observation:
    """A look at a release. `state` None: there was nothing to see, and `why` says so."""

    release: str
    environment: str
    source: str  # 'reference/cpu', 'the store of finished cells', 'run now'
    state: Hashable | None
    why: str
    cell: StoredCell | None = None
    judged: JudgedGate | None = None

    @property
    def text(self) -> str:
        return f"{self.release}: {self.why} ({self.source})"


def observe(cell: StoredCell, criterion: Criterion, source: str) -> Observation:
    """Look at a finished cell through the gate."""
    whole = _as_it_always_ends(cell)
    judged = judge(whole, {criterion.gate: criterion.limit}).gates.get(criterion.gate)
    state, why = _state(whole, judged, criterion)
    return Observation(cell.request.environment.torch, cell.cell.environment, source, state, why, cell, judged)


def _as_it_always_ends(cell: StoredCell) -> StoredCell:
    """Take the counts of a cell for whole that ends early whatever is demanded of it, since its announced shapes
    compile after the warm-up or dynamo gave a function up: so it ends on every release, after the same forecasts."""
    evidence = cell.evidence.get(Suite.RECOMPILE)
    if evidence is None or not evidence.skipped:
        return cell
    figures = [evidence.figures.get(gate.figure) for gate in (Gate.RECOMPILES, Gate.RECOMPILE_LIMIT)]
    if not any(figure is not None and figure.value for figure in figures):
        return cell
    whole = evidence.model_copy(update={"skipped": ""})
    return cell.model_copy(update={"evidence": {**cell.evidence, Suite.RECOMPILE: whole}})


def _state(cell: StoredCell, judged: JudgedGate | None, criterion: Criterion) -> tuple[Hashable | None, str]:
    if judged is None:
        return None, f"{criterion.gate.value} does not apply"
    if judged.status not in (Status.PASS, Status.FAIL):
        told = f": {cell.failure.message.splitlines()[0]}" if cell.failure and cell.failure.message.strip() else ""
        return None, f"{judged.status.value}, {judged.reason}{told if told.strip(': ') not in judged.reason else ''}"
    if not criterion.any_change:
        return judged.status.value, f"{judged.status.value}, {judged.reason}"
    evidence = cell.evidence[criterion.gate.rule.suite]
    if evidence.outcome is Outcome.MODEL_FAILED or judged.value is None:
        return "raised", judged.reason
    if evidence.skipped:  # another release may have been counted further
        return None, f"counted in part, without {evidence.skipped}"
    return judged.value, f"{criterion.gate.value} {judged.value:g}"


def stored_observations(
    wanted: Mapping[CellName, CellRequest], criterion: Criterion, *, results: Path, store: Path
) -> Iterator[Observation]:
    """Look at what earlier runs left: in the results folder, then in the store of finished cells."""
    for name in list_runs(results):
        try:
            cells = load_run(results / name).cells
        except StorageError:
            continue  # a damaged run is no evidence; `report` names it
        yield from _usable(cells, wanted, criterion, name)
    for path in sorted(store.glob("*/*.json")):
        try:
            head = read_bytes(path)[:400].decode("utf-8", errors="replace")
            if not any(f'"{name}"' in head for name in wanted):
                continue
            cell = read_cell(path)
        except StorageError:
            continue
        yield from _usable((cell,), wanted, criterion, "the store of finished cells")


def _usable(
    cells: tuple[StoredCell, ...], wanted: Mapping[CellName, CellRequest], criterion: Criterion, source: str
) -> Iterator[Observation]:
    for cell in cells:
        request = wanted.get(cell.cell)
        if request is not None and is_the_same_question(cell, request, criterion.gate):
            seen = observe(cell, criterion, source)
            if seen.state is not None:
                yield seen


def is_the_same_question(cell: StoredCell, request: CellRequest, gate: Gate) -> bool:
    """Tell if a stored cell answers what would be asked now: counts of another workload or suite are other counts."""
    suite, then = gate.rule.suite, cell.request
    evidence = cell.evidence.get(suite)
    return (
        evidence is not None
        and evidence.version == suite.rule.version
        and then.workload == request.workload
        and then.settings == request.settings
        and then.speaks_of is request.speaks_of
        and all(getattr(then.environment, one) == getattr(request.environment, one) for one in MEASURED_BY)
        and then.cache.source == request.cache.source == "builtin"
        and not then.lower_only
    )
