"""An incident run again: one cell in production's environment, its result held against what production showed."""

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from toto_compat.contract.caches import SABOTAGE_PREFIX, SABOTAGES
from toto_compat.contract.cell_name import CellName
from toto_compat.contract.gate_limit import GateLimit
from toto_compat.contract.request import CellProfile, CellRequest, Device
from toto_compat.environments.locks import lock_on_the_spot
from toto_compat.errors import SelectionError
from toto_compat.evidence.files import cache_folder
from toto_compat.evidence.store import CellStore, StoredCell
from toto_compat.matrix.checkpoint import resolve_checkpoint
from toto_compat.matrix.document import nearest_name
from toto_compat.matrix.gates import Gate
from toto_compat.matrix.request import cell_request
from toto_compat.matrix.schema import CacheSource, Matrix
from toto_compat.matrix.selection import check_series
from toto_compat.matrix.user_cache import BUILTIN
from toto_compat.repro.incident import Incident
from toto_compat.repro.outcome import Reproduction, look_at, suites_of
from toto_compat.repro.pins import is_pinned, with_pins
from toto_compat.repro.variables import checked_variables
from toto_compat.runtimes.inputs import staged
from toto_compat.runtimes.local import FinishedCell, ReadyCell, run_cells
from toto_compat.runtimes.nvidia_smi import find_gpus
from toto_compat.runtimes.open import RuntimeName, open_runtime
from toto_compat.runtimes.plan import key_of
from toto_compat.runtimes.prepare import with_named_sources
from toto_compat.runtimes.progress import progress_for, say
from toto_compat.runtimes.references import shared_references
from toto_compat.runtimes.run import stored_cell
from toto_compat.runtimes.seam import Runtime

PROFILE_NAME = "repro"
_TIMED = frozenset(gate.rule.suite for gate in Gate if gate.rule.is_a_time)


def incident_request(
    incident: Incident,
    incident_folder: Path,
    matrix: Matrix,
    matrix_path: Path,
    *,
    cache: str | None = None,
    environment: str | None = None,
    device: Device = Device.CPU,
    timeout_minutes: float = 45.0,
) -> CellRequest:
    """Make the one cell that shows the incident: with the suites that show what was seen.

    Its checkpoint, series and freeze are relative to the incident's own file.
    """
    pinned = incident.pins if environment is None else None
    matrix, pinned_name = with_pins(with_sabotaged_caches(matrix), pinned, incident_folder)
    environment_name = known_name(
        environment or pinned_name or incident.environment, matrix.environments, "environment"
    )
    cache_name = known_name(cache or incident.cache, matrix.caches, "cache")
    stack = matrix.environments[environment_name]
    suites = suites_of(incident, stack, stack.runs_on(device))
    workload = incident.workload
    check_series(workload, incident_folder)
    checkpoint = workload.checkpoint
    request = cell_request(
        matrix,
        matrix_path,
        CellName.of(environment_name, cache_name, incident.mode, "incident"),
        settings=incident.settings,
        profile_name=PROFILE_NAME,
        profile=CellProfile(
            iterations=incident.iterations if _TIMED & set(suites) else 1,
            forecasts_per_iteration=10,
            suites=suites,
            unannounced_shapes=False,
            timeout_minutes=timeout_minutes,
        ),
        workload_name=PROFILE_NAME,
        workload=workload,
        workload_folder=incident_folder,
        device=device,
        checkpoint_folder=str(resolve_checkpoint(checkpoint, relative_to=incident_folder)) if checkpoint else None,
        quiet_lock=str(cache_folder() / "quiet.lock"),
    )
    variables = {**request.variables, **checked_variables(incident.variables)}
    return request.model_copy(update={"variables": variables})


def with_sabotaged_caches(matrix: Matrix) -> Matrix:
    """Add the caches that are broken on purpose: one may stand in for a fault that was never found."""
    sabotaged = {f"{SABOTAGE_PREFIX}{name}": CacheSource(source=BUILTIN) for name in SABOTAGES}
    return matrix.model_copy(update={"caches": {**sabotaged, **matrix.caches}})


def known_name(name: str, names: Any, what: str) -> str:
    if name not in names:
        near = nearest_name(name, names)
        shown = [one for one in names if not one.startswith(SABOTAGE_PREFIX)]
        hint = f"did you mean {near}?" if near else f"there are {', '.join(shown)}"
        raise SelectionError(f"matrix.yaml has no {what} {name!r}", hint=hint)
    return name


def limits_of(matrix: Matrix) -> Mapping[Gate, GateLimit]:
    """Return the limits of matrix.yaml, whatever the profile; a gate that is off has none."""
    limits = {gate: matrix.gates.get(gate, gate.rule.default) for gate in Gate}
    return {gate: limit for gate, limit in limits.items() if limit is not None}


def reproduce(
    incident: Incident, request: CellRequest, runtime_name: RuntimeName, matrix: Matrix, *, stored_first: bool = False
) -> Reproduction:
    """Build the environment, run the cell, hold its result against the incident.

    With `stored_first` a cell that ran before is not run again. What is run here is kept for that.
    """
    runtime = open_runtime(runtime_name, limits=matrix.limits, device=request.device, say=say)
    store = CellStore(cache_folder() / "evidence")
    return reproduce_in(runtime, store, incident, request, matrix, stored_first=stored_first)


def reproduce_in(
    runtime: Runtime,
    store: CellStore,
    incident: Incident,
    request: CellRequest,
    matrix: Matrix,
    *,
    stored_first: bool = False,
) -> Reproduction:
    """Do the same in a runtime that is open, with a store of finished cells."""
    name = request.cell.environment
    if runtime.name == "docker" and is_pinned(name):
        lock_on_the_spot(name, request.environment, say)
    prepared = runtime.prepare(name, request.environment, say)
    request = staged(with_named_sources(request))
    key = key_of(request, prepared.lock, runtime.source.hash)
    stored = store.get(key) if stored_first else None
    if stored is None:
        say(f"running {request.cell} in {runtime.name}: {', '.join(request.profile.suites)}; this takes minutes")
        stored, fresh = _run(runtime, ReadyCell(request, prepared, key)), True
        store.put(stored)
    else:
        fresh = False
    reproduction = look_at(incident, stored, limits_of(matrix))
    log = log_of(key)
    return replace(
        reproduction,
        log=str(log) if log.is_file() else "",
        stored="" if fresh else stored.stored,
        seconds=stored.seconds,
    )


def log_of(key: str) -> Path:
    """Name the file in which the log of an incident's cell is kept."""
    return cache_folder() / "repro" / f"{key[:16]}.log"


def _run(runtime: Runtime, cell: ReadyCell) -> StoredCell:
    finished: list[FinishedCell] = []

    def keep_log(_: str, log: Path) -> None:
        kept = log_of(cell.key)
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(log, kept)

    with progress_for(1) as progress:
        run_cells(
            [cell],
            runtime,
            jobs=1,
            gpus=[gpu.uuid for gpu in find_gpus()] if cell.request.device is Device.CUDA else [],
            scratch=cache_folder() / "s",
            keep_log=keep_log,
            progress=progress,
            on_finished=lambda _, done: finished.append(done),
            references=shared_references(runtime.source, fresh=False),
        )
    (done,) = finished
    return stored_cell(done.result, key=cell.key, seconds=done.seconds, run=PROFILE_NAME)
