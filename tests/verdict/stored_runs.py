"""Runs on disk, written with the project's own store."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.verdict.sample_cells import GATES
from toto_compat.evidence.schema import CellResult
from toto_compat.evidence.store import RunInfo, StoredCell, write_cell, write_run_info
from toto_compat.matrix.schema import Gate, GateLimit


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
    info = RunInfo(
        name=name,
        profile="quick",
        runtime="venv",
        executor="local",
        device=device,
        cells=tuple(cell.cell for cell in cells),
        gates=dict(gates),
        git_revision="0123456789abcdef",
        started=started,
        finished=started,
    )
    write_run_info(folder, info)
    for cell in cells:
        write_cell(folder, StoredCell.model_validate({**dict(cell), "stored": started, "seconds": 12.0}))
    return folder
