"""Cells of one environment run outside of a matrix run: for a look of bisect, for the check of a release."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from toto_compat.contract.cell_name import CellName
from toto_compat.contract.request import Device
from toto_compat.environments.virtualenv import venv_folder
from toto_compat.evidence.store import CellStore, Run, load_run
from toto_compat.matrix.asked import Asked
from toto_compat.matrix.schema import Matrix
from toto_compat.matrix.selection import Selection
from toto_compat.runtimes.plan import plan_run, plan_text
from toto_compat.runtimes.prepare import prepare_run
from toto_compat.runtimes.progress import progress_for, say
from toto_compat.runtimes.prune import remove
from toto_compat.runtimes.run import run_prepared
from toto_compat.runtimes.seam import Runtime

_NO_CACHE = "PIP_NO_CACHE_DIR"


def run_cells(
    matrix: Matrix,
    matrix_path: Path,
    cells: Sequence[CellName],
    asked: Asked,
    *,
    device: Device,
    runtime: Runtime,
    store: CellStore,
) -> Run:
    """Plan, prepare and run these cells as `matrix` does; the matrix may have more in it than its file."""
    profile = matrix.profiles[asked.profile]
    workloads = {name: matrix.workloads[name] for name in profile.workloads}
    selection = Selection(matrix, matrix_path, tuple(cells), (), device, workloads)
    plan = plan_run(selection, runtime, store, asked)
    say(plan_text(plan))
    with progress_for(len(plan.to_run)) as progress:
        prepared = prepare_run(plan, selection, runtime=runtime, store=store, asked=asked, progress=progress)
        folder = run_prepared(prepared, plan, selection, runtime=runtime, store=store, asked=asked, progress=progress)
    return load_run(folder)


@contextmanager
def pruned_after(matrix: Matrix, name: str, runtime: Runtime, *, keep: bool) -> Iterator[None]:
    """Remove the virtualenv of an environment if the block had it built: 5 to 7 GB, and no more than one at a time."""
    environment = matrix.environments[name]
    built_here = runtime.lock_of(name, environment) is None and not keep
    sets_no_cache = built_here and _NO_CACHE not in os.environ
    if sets_no_cache:
        os.environ[_NO_CACHE] = "1"  # else pip keeps the gigabytes that are removed below
    try:
        yield
    finally:
        if sets_no_cache:
            del os.environ[_NO_CACHE]
        folder = venv_folder(name, environment)
        if built_here and folder.exists():
            started = time.monotonic()
            remove(folder)
            say(f"{name}: its virtualenv is removed ({time.monotonic() - started:.0f} s)")
