"""Preparing a run: environments built, the checkpoint fetched, and every cell ready, stored or known to fail."""

from dataclasses import dataclass
from pathlib import Path

from toto_compat.contract.request import CellRequest
from toto_compat.errors import EnvironmentBuildError
from toto_compat.evidence.store import CellStore, StoredCell
from toto_compat.matrix.asked import Asked
from toto_compat.matrix.checkpoint import checkpoint_name, resolve_checkpoint
from toto_compat.matrix.selection import Selection
from toto_compat.matrix.toto_source import toto_source
from toto_compat.runtimes.inputs import staged
from toto_compat.runtimes.local import ReadyCell
from toto_compat.runtimes.plan import Plan, key_of, machine_of
from toto_compat.runtimes.progress import Progress, say
from toto_compat.runtimes.seam import PreparedEnvironment, Runtime


@dataclass(frozen=True)
class PreparedRun:
    """Sorts the planned cells: those with a result, those to run, those whose environment cannot be used."""

    stored: tuple[StoredCell, ...]
    ready: tuple[ReadyCell, ...]
    failed: tuple[tuple[CellRequest, EnvironmentBuildError], ...]


def prepare_run(
    plan: Plan, selection: Selection, *, runtime: Runtime, store: CellStore, asked: Asked, progress: Progress
) -> PreparedRun:
    """Build what is missing. One environment that cannot be built does not stop the others; none at all is an error."""
    checkpoints = fetch_checkpoints(selection) if plan.to_run else {}
    environments: dict[str, PreparedEnvironment] = {}
    errors: dict[str, EnvironmentBuildError] = {}
    for name, environment in {c.request.cell.environment: c.request.environment for c in plan.to_run}.items():
        try:
            environments[name] = runtime.prepare(name, environment, progress.note)
        except EnvironmentBuildError as error:
            errors[name] = error
            log = runtime.build_log(name, environment)
            progress.note(f"{name}: cannot be used, its cells are not run" + (f"; see {log}" if log.exists() else ""))
    if errors and not environments and not plan.reused:
        first, *others = errors.values()
        for other in others:
            say(f"error: {other}")
        raise first
    stored: list[StoredCell] = []
    ready: list[ReadyCell] = []
    failed: list[tuple[CellRequest, EnvironmentBuildError]] = []
    for cell in plan.cells:
        name = cell.request.cell.environment
        if cell.stored is not None:
            stored.append(cell.stored)
        elif name in errors:
            failed.append((cell.request, errors[name]))
        else:
            checkpoint = cell.request.workload.checkpoint
            folder = str(checkpoints[checkpoint]) if checkpoint else None
            request = cell.request.model_copy(update={"checkpoint_folder": folder})
            # from here on the cell's own copies count, and they are what its key is of
            request, prepared = staged(with_named_sources(request)), environments[name]
            key = key_of(request, prepared.lock, runtime.source.hash, machine_of(runtime, request.device))
            # of an environment that was just built, or a checkpoint just fetched, the key was not known before
            earlier = None if asked.fresh else store.get(key, request.demands)
            if earlier is not None:
                stored.append(earlier)
            else:
                if damage := store.set_aside(key):
                    progress.note(f"{request.cell}: {damage}")
                ready.append(ReadyCell(request, prepared, key))
    return PreparedRun(tuple(stored), tuple(ready), tuple(failed))


def with_named_sources(request: CellRequest) -> CellRequest:
    """Tell the cell whose weights it gets and which fork of toto-ts, for its provenance."""
    known: dict[str, str] = {}
    if request.checkpoint_folder is not None and request.workload.checkpoint is not None:
        known["checkpoint"] = checkpoint_name(request.workload.checkpoint, Path(request.checkpoint_folder))
    fork = toto_source(request.environment.toto_ts)
    if fork is not None:
        known["toto_fork"] = fork.identity
    return request.model_copy(update={"origin": request.origin.model_copy(update=known)})


def fetch_checkpoints(selection: Selection) -> dict[str, Path]:
    """Fetch the weights that a user named, before any cell runs: cells have no network."""
    beside = selection.matrix_path.resolve().parent
    return {one: resolve_checkpoint(one, relative_to=beside) for one in selection.checkpoints}
