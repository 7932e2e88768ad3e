"""The runs of results/reference: what they hold, what of it is stale, and how a new cell gets in."""

import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from toto_compat.contract.cell_name import CellName
from toto_compat.contract.demands import broken_demand
from toto_compat.contract.files import utc_now
from toto_compat.contract.gate_limit import GateLimit
from toto_compat.contract.request import CellRequest, Device
from toto_compat.contract.result import Outcome
from toto_compat.contract.suites import WITHOUT_GPU
from toto_compat.errors import SelectionError, StorageError
from toto_compat.evidence.files import write_atomically
from toto_compat.evidence.store import (
    Run,
    RunInfo,
    StoredCell,
    cell_path,
    load_run,
    read_cell,
    write_run_info,
)
from toto_compat.matrix.expand import gate_limits
from toto_compat.matrix.gates import Gate
from toto_compat.matrix.load import matrix_hash
from toto_compat.matrix.request import matrix_request
from toto_compat.matrix.schema import Matrix
from toto_compat.reference.plan import PlannedRow
from toto_compat.reference.thinning import as_text, check_same_verdict, thinned
from toto_compat.releases.observation import MEASURED_BY
from toto_compat.verdict.judge import Status, judge

MOST_BYTES = 5_000_000  # of everything that is committed
_BYTES_OF_A_CELL = 48_000  # thinned, with its row of compatibility.json: 41 to 46 kB of those of 2.13.0
_COMMAND = ("nox", "-s", "reference")


class State(StrEnum):
    """What the reference has of a planned row."""

    MISSING = "missing"
    STALE = "stale"  # a suite's version, the workload or the environment's pins changed since
    COULD_NOT_RUN = "could not be run"  # twice, and nothing that was measured decides: tried again when that is asked
    THERE = "there"


@dataclass(frozen=True)
class KeptRow:
    row: PlannedRow
    state: State
    why: str = ""


def kept_row(folder: Path, row: PlannedRow, matrix: Matrix) -> KeptRow:
    """Look a planned row up in results/reference."""
    path = cell_path(folder / row.run, row.cell)
    if not path.exists():
        return KeptRow(row, State.MISSING)
    stored = read_cell(path)
    if why := stale_because(stored, row, matrix):
        return KeptRow(row, State.STALE, why)
    if is_undecided(stored, row, matrix):
        return KeptRow(row, State.COULD_NOT_RUN, next((one.message for _, one in stored.failures), ""))
    return KeptRow(row, State.THERE)


def is_undecided(cell: StoredCell, row: PlannedRow, matrix: Matrix) -> bool:
    """Say whether something could not be run, and nothing that was measured decides without it."""
    return cell.could_not_run and judge(cell, gate_limits(matrix, row.profile)).verdict is not Status.FAIL


def stale_because(cell: StoredCell, row: PlannedRow, matrix: Matrix) -> str:
    """Say what changed since a cell was measured: a suite's version, or what is asked. Source lines do not count."""
    for suite, evidence in cell.evidence.items():
        measured = evidence.outcome in (Outcome.MEASURED, Outcome.MODEL_FAILED)
        if measured and evidence.version != suite.rule.version:
            return (
                f"the suite {suite.value} is of version {suite.rule.version}, this was measured by {evidence.version}"
            )
    now = matrix_request(
        matrix,
        Path(),
        cell.cell,
        row.profile,
        Device.CPU,
        lower_only=row.lower_only,
        architectures=row.architectures,
    )
    if why := _asked_otherwise(cell, now):
        return why
    if cell.skipped and not row.lower_only and not broken_demand(now.demands, cell.evidence):
        return "it was measured in part, since it broke a limit that is another now"
    for field in MEASURED_BY:
        if getattr(now.environment, field) != getattr(cell.request.environment, field):
            return f"{field} of {row.cell.environment} changed"
    return ""


def _asked_otherwise(cell: StoredCell, now: CellRequest) -> str:
    """Say what is asked now and was not then. What was asked beyond that is no reason to measure again."""
    mine, its = now.profile, cell.request.profile
    if new := [suite.value for suite in mine.suites if suite not in its.suites]:
        return f"the profile {now.profile_name} has the suite {new[0]} now"
    lacking = sorted(set(mine.architectures) - set(its.architectures))
    if lacking and set(mine.suites) & set(WITHOUT_GPU):
        return f"it was not compiled for {lacking[0]}"
    if now.workload != cell.request.workload or now.settings != cell.request.settings:
        return f"the profile {now.profile_name} asks for something else now"
    for field in sorted(type(mine).model_fields.keys() - {"suites", "architectures", "timeout_minutes"}):
        if getattr(mine, field) != getattr(its, field):
            return f"{field} of the profile {now.profile_name} was {getattr(its, field)} and is {getattr(mine, field)}"
    return ""


def keep(folder: Path, name: str, matrix: Matrix, *, profile: str, cells: Iterable[StoredCell], revision: str) -> Run:
    """Put cells into a run of the reference, thinned; what stale cells it had of the same name is replaced."""
    target = folder / name
    gates = limits_of(matrix, profile)
    added: dict[CellName, StoredCell] = {}
    for cell in cells:
        added[cell.cell] = thinned(cell)
        check_same_verdict(cell, added[cell.cell], gates)
    before = load_run(target).info if (target / "run.json").exists() else None
    present = [*(before.cells if before else ()), *added]
    here = [name for name in dict.fromkeys(present) if name in added or cell_path(target, name).exists()]
    info = RunInfo(
        name=name,
        command=_COMMAND,
        profile=profile,
        runtime="venv",
        executor="local",
        device=Device.CPU.value,
        cells=tuple(sorted(here, key=_table_order(matrix))),
        gates=gates,
        releases=tuple(dict.fromkeys(environment.torch for environment in matrix.environments.values())),
        production_profile=matrix.production_profile,
        production_workloads=matrix.production_workloads,
        matrix_file="matrix.yaml",
        matrix_hash=matrix_hash(matrix),
        git_revision=revision if added else before.git_revision if before else "",
        host=platform.node() if added else before.host if before else "",
        started=before.started if before else utc_now(),
        finished=utc_now() if added else before.finished if before else "",
    )
    # The list first: after a kill it names a cell too many, which is missing and run again. A file that no list names
    # would be taken for kept and never be shown.
    write_run_info(target, info)
    for name_of_cell, thin in added.items():
        write_atomically(cell_path(target, name_of_cell), as_text(thin))
    return load_run(target)


def limits_of(matrix: Matrix, profile: str) -> dict[Gate, GateLimit]:
    """The limits that a run of the reference is judged by: no series of a user's own is in it."""
    limits = gate_limits(matrix, profile)
    return {gate: limit for gate, limit in limits.items() if not gate.rule.suite.rule.needs_symbols}


def has_other_limits(folder: Path, name: str, matrix: Matrix, profile: str) -> bool:
    """Say whether a run that is there is judged by other limits than matrix.yaml's of today."""
    there = (folder / name / "run.json").exists()
    return there and load_run(folder / name).info.gates != limits_of(matrix, profile)


def check_made_here(folder: Path, runs: Sequence[str]) -> None:
    """Refuse to add to a run that something else made: its limits, its command and its table would be lost."""
    for name in runs:
        if (folder / name / "run.json").exists() and load_run(folder / name).info.command != _COMMAND:
            raise SelectionError(
                f"runs.{name}: {folder / name} was not made by `{' '.join(_COMMAND)}`",
                hint="give the run another name in plan.yaml",
            )


def _table_order(matrix: Matrix) -> Callable[[CellName], tuple[int, int, str]]:
    environments, caches = list(matrix.environments), list(matrix.caches)

    def place(cell: CellName) -> tuple[int, int, str]:
        return (
            environments.index(cell.environment) if cell.environment in environments else len(environments),
            caches.index(cell.cache) if cell.cache in caches else len(caches),
            cell.mode_and_settings,
        )

    return place


def check_size(folder: Path, cells_to_come: int = 0) -> int:
    """Bytes of all that is committed, and of cells to come: too many are an error before hours are spent on them."""
    # pages are made from the rest, and not committed
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".html"]
    size = sum(path.stat().st_size for path in files) + cells_to_come * _BYTES_OF_A_CELL
    if size > MOST_BYTES:
        largest = max(files, key=lambda path: path.stat().st_size)
        to_come = f" with {cells_to_come} cells to come" if cells_to_come else ""
        raise StorageError(
            f"{folder}: {size / 10**6:.1f} MB{to_come}, and at most {MOST_BYTES / 10**6:.0f} are committed",
            hint=f"thin more in toto_compat/reference/thinning.py; the largest file is {largest}",
        )
    return size
