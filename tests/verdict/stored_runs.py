"""Runs on disk, written with the project's own store, and judged ones that never were."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.verdict.sample_cells import GATES
from toto_compat.contract.gate_limit import GateLimit
from toto_compat.contract.result import CellResult
from toto_compat.evidence.store import Run, RunInfo, StoredCell, write_cell, write_run_info
from toto_compat.matrix.gates import Gate
from toto_compat.verdict.judged_run import JudgedRun, judge_run


def store_run(
    results: Path,
    name: str,
    cells: Sequence[CellResult],
    *,
    gates: Mapping[Gate, GateLimit] = GATES,
    started: str = "2026-11-16T10:00:00Z",
    device: str = "cpu",
) -> Path:
    folder = results / name
    info = info_of_run(name, cells, gates=gates, started=started, device=device)
    write_run_info(folder, info)
    for cell in cells:
        write_cell(folder, stored(cell, started))
    return folder


def judged_run(*cells: CellResult, folder: Path = Path("never-written")) -> JudgedRun:
    """The run of these cells, judged by the usual limits."""
    info = info_of_run("run", cells)
    return judge_run(Run(folder, info, tuple(stored(cell, info.started) for cell in cells)))


def stored(cell: CellResult, started: str) -> StoredCell:
    return StoredCell.model_validate({**dict(cell), "stored": started, "seconds": 12.0})


def info_of_run(
    name: str,
    cells: Sequence[CellResult],
    *,
    gates: Mapping[Gate, GateLimit] = GATES,
    started: str = "2026-11-16T10:00:00Z",
    device: str = "cpu",
) -> RunInfo:
    return RunInfo(
        name=name,
        profile="quick",
        runtime="venv",
        executor="local",
        device=device,
        cells=tuple(cell.cell for cell in cells),
        gates=dict(gates),
        production_profile="quick",
        production_workloads=("quick",),
        git_revision="0123456789abcdef",
        started=started,
        finished=started,
    )
