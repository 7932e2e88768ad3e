"""The runs of results/reference: what they hold, what of it is stale, and how a new cell gets in."""

import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from toto_compat.contract.cell_name import CellName
from toto_compat.contract.files import utc_now
from toto_compat.contract.request import Device
from toto_compat.contract.result import Outcome
from toto_compat.errors import StorageError
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
from toto_compat.matrix.load import matrix_hash
from toto_compat.matrix.request import matrix_request
from toto_compat.matrix.schema import Matrix
from toto_compat.reference.plan import PlannedRow
from toto_compat.reference.thinning import check_same_verdict, thinned
from toto_compat.releases.observation import MEASURED_BY

MOST_BYTES = 5_000_000  # of everything that is committed


class State(StrEnum):
    """What the reference has of a planned row."""

    MISSING = "missing"
    STALE = "stale"  # a suite's version, the workload or the environment's pins changed since
    COULD_NOT_RUN = "could not be run"  # tried again at the next occasion
    THERE = "there"


@dataclass(frozen=True)
class KeptRow:
    row: PlannedRow
    cells: tuple[CellName, ...]  # one for every workload of the profile
    state: State
    why: str = ""


def kept_row(folder: Path, row: PlannedRow, matrix: Matrix) -> KeptRow:
    """Look a planned row up in results/reference."""
    workloads = matrix.profiles[row.profile].workloads
    cells = tuple(CellName(f"{row.cell}@{one}") for one in workloads) if len(workloads) > 1 else (row.cell,)
    for cell in cells:
        path = cell_path(folder / row.run, cell)
        if not path.exists():
            return KeptRow(row, cells, State.MISSING)
        stored = read_cell(path)
        why = stale_because(stored, row, matrix)
        if why:
            return KeptRow(row, cells, State.STALE, why)
        if stored.could_not_run:
            return KeptRow(row, cells, State.COULD_NOT_RUN, next((one.message for _, one in stored.failures), ""))
    return KeptRow(row, cells, State.THERE)


def stale_because(cell: StoredCell, row: PlannedRow, matrix: Matrix) -> str:
    """Say what changed since a cell was measured: a suite's version, or what is asked. Source lines do not count."""
    for suite, evidence in cell.evidence.items():
        measured = evidence.outcome in (Outcome.MEASURED, Outcome.MODEL_FAILED)
        if measured and evidence.version != suite.rule.version:
            return (
                f"the suite {suite.value} is of version {suite.rule.version}, this was measured by {evidence.version}"
            )
    now = matrix_request(matrix, Path(), cell.cell, row.profile, Device.CPU, lower_only=row.lower_only)
    new = [suite.value for suite in now.profile.suites if suite not in cell.request.profile.suites]
    if new:
        return f"the profile {row.profile} has the suite {new[0]} now"
    if now.workload != cell.request.workload or now.settings != cell.request.settings:
        return f"the profile {row.profile} asks for something else now"
    for field in MEASURED_BY:
        if getattr(now.environment, field) != getattr(cell.request.environment, field):
            return f"{field} of {row.cell.environment} changed"
    return ""


def keep(folder: Path, name: str, matrix: Matrix, *, profile: str, cells: Iterable[StoredCell], revision: str) -> Run:
    """Put cells into a run of the reference, thinned; what stale cells it had of the same name is replaced."""
    target = folder / name
    gates = {
        gate: limit for gate, limit in gate_limits(matrix, profile).items() if not gate.rule.suite.rule.needs_symbols
    }
    added: dict[CellName, StoredCell] = {}
    for cell in cells:
        added[cell.cell] = thinned(cell)
        check_same_verdict(cell, added[cell.cell], gates)
    before = load_run(target).info if (target / "run.json").exists() else None
    present = [*(before.cells if before else ()), *added]
    here = [name for name in dict.fromkeys(present) if name in added or cell_path(target, name).exists()]
    info = RunInfo(
        name=name,
        command=("nox", "-s", "reference"),
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
        write_atomically(cell_path(target, name_of_cell), thin.model_dump_json(by_alias=True) + "\n")
    return load_run(target)


def _table_order(matrix: Matrix) -> Callable[[CellName], tuple[int, int, str]]:
    environments, caches = list(matrix.environments), list(matrix.caches)

    def place(cell: CellName) -> tuple[int, int, str]:
        return (
            environments.index(cell.environment) if cell.environment in environments else len(environments),
            caches.index(cell.cache) if cell.cache in caches else len(caches),
            cell.mode_and_settings,
        )

    return place


def check_size(folder: Path, runs: Sequence[str]) -> int:
    """Bytes of the runs that are committed; too many are an error before anybody commits them."""
    # pages are made from the rest, and not committed
    files = [path for name in runs for path in (folder / name).rglob("*") if path.is_file() and path.suffix != ".html"]
    size = sum(path.stat().st_size for path in files)
    if size > MOST_BYTES:
        largest = max(files, key=lambda path: path.stat().st_size)
        raise StorageError(
            f"{folder}: {size / 10**6:.1f} MB, and at most {MOST_BYTES / 10**6:.0f} are committed",
            hint=f"thin more in toto_compat/reference/thinning.py; the largest file is {largest}",
        )
    return size
