"""What a run will do, worked out and shown before anything starts."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from toto_compat.contract.cell_name import CellName
from toto_compat.contract.request import CellRequest, Device, Environment
from toto_compat.contract.suites import Suite
from toto_compat.evidence.files import cache_folder
from toto_compat.evidence.store import CellStore, StoredCell, cell_key, timing_name
from toto_compat.matrix.asked import Asked
from toto_compat.matrix.checkpoint import find_checkpoint
from toto_compat.matrix.expand import is_whole_model
from toto_compat.matrix.request import matrix_request
from toto_compat.matrix.selection import Selection
from toto_compat.matrix.symbols import told_of
from toto_compat.runtimes.gpu import gpu_notes, why_on_the_cpu
from toto_compat.runtimes.machine import core_count, machine_identity
from toto_compat.runtimes.nvidia_smi import find_gpus
from toto_compat.runtimes.seam import BuildNeeds, Runtime

# Quick cells of the tiny model, two at a time on two cores, took 250 to 410 s; the base model and more iterations more.
_GUESSED_CELL_SECONDS = 330.0
_GUESSED_SECONDS_PER_ITERATION = {"tiny": 10.0, "base": 120.0}
# Nothing was timed on a GPU yet. Eight processes import torch (80 s); fixed_size lowers for CUDA in 20 s a batch, the
# 70 graphs of a whole model in 2 to 3 s each; autotuning tries some twenty kernels for each product.
_GUESSED_CUDA_SECONDS = {False: 200.0, True: 320.0}  # of a step of its own, of a whole model
_GUESSED_AUTOTUNE_SECONDS = {False: 180.0, True: 1500.0}
_GUESSED_CUDA_SECONDS_PER_ITERATION = {"tiny": 3.0, "base": 15.0}
# Compiling for CUDA alone took 25 to 90 s for each described card on two cores, interpreting the code 5 to 10 minutes.
_GUESSED_LOWERING_SECONDS = {False: 60.0, True: 120.0}  # of a step of its own, of a whole model
_GUESSED_INTERPRETING_SECONDS = 450.0


@dataclass(frozen=True)
class PlannedCell:
    """One cell of the run; `stored` is its result if an earlier run has it already."""

    request: CellRequest
    key: str  # empty while something that is part of it, an environment or a checkpoint, is not here
    stored: StoredCell | None


@dataclass(frozen=True)
class Plan:
    """Holds what will be done, and what that takes."""

    cells: tuple[PlannedCell, ...]
    to_build: dict[str, Environment]
    obstacles: dict[str, str]  # of the environments, by name: why cells of it will not run
    needs: BuildNeeds  # of all that is to be built
    to_download: str | None  # a checkpoint that is not here yet
    seconds: float
    based_on: str
    jobs: int
    runtime: str
    device: Device
    notes: tuple[str, ...] = ()  # what this machine makes of what was asked

    @property
    def to_run(self) -> tuple[PlannedCell, ...]:
        return tuple(cell for cell in self.cells if cell.stored is None)

    @property
    def reused(self) -> tuple[PlannedCell, ...]:
        return tuple(cell for cell in self.cells if cell.stored is not None)


def plan_run(selection: Selection, runtime: Runtime, store: CellStore, asked: Asked) -> Plan:
    """Work out what is to be run, built and fetched. Nothing is changed, on this machine or elsewhere."""
    beside = selection.matrix_path.resolve().parent
    folders = {one: find_checkpoint(one, relative_to=beside) for one in selection.checkpoints}
    requests = [
        matrix_request(
            selection.matrix,
            selection.matrix_path,
            cell,
            asked.profile,
            selection.device,
            checkpoint_folder=_folder_of(selection, cell, folders),
            quiet_lock=str(cache_folder() / "quiet.lock"),
            symbols=selection.symbols_of(cell),
            lower_only=asked.lower_only,
            architectures=asked.architectures,
        )
        for cell in selection.cells
    ]
    to_download = ", ".join(one for one, folder in folders.items() if folder is None) or None
    cells = plan_cells(requests, runtime, store, fresh=asked.fresh)
    if to_download is not None:  # its content is part of the key
        cells = [PlannedCell(cell.request, key="", stored=None) for cell in cells]
    jobs, notes = jobs_of(asked, selection.device, len(requests))
    notes += told_of(selection.symbols)
    notes += [f"{name} is not in the default plan: {why}" for name, why in selection.left_out.items()]
    plan = make_plan(cells, runtime, store, jobs=jobs, device=selection.device, to_download=to_download)
    return replace(plan, notes=tuple(notes))


def jobs_of(asked: Asked, device: Device, cells: int) -> tuple[int, list[str]]:
    """Say how many cells run at a time, and what there is to say about the GPUs that they run on."""
    if asked.executor == "slurm":  # the cluster has the GPUs, and spreads the cells over them
        return asked.jobs or max(1, cells), []
    if device is Device.CPU:
        why = why_on_the_cpu() if asked.device == "auto" and not asked.lower_only else ""
        return asked.jobs or min(2, core_count()), [f"no GPU is used: {why}"] if why else []
    gpus, notes = max(1, len(find_gpus())), list(gpu_notes())
    if asked.jobs is not None and asked.jobs > gpus:
        notes.append(f"--jobs {asked.jobs}: one cell at a time on each of {gpus}, two on one GPU disturb each other")
    return min(asked.jobs or gpus, gpus), notes


def _folder_of(selection: Selection, cell: CellName, folders: Mapping[str, Path | None]) -> str | None:
    """Find the folder of the checkpoint that a cell's workload names, if it is here."""
    workloads = selection.workloads
    checkpoint = workloads[cell.workload or next(iter(workloads))].checkpoint
    folder = folders[checkpoint] if checkpoint else None
    return str(folder) if folder else None


def plan_cells(
    requests: Sequence[CellRequest], runtime: Runtime, store: CellStore, *, fresh: bool
) -> list[PlannedCell]:
    """Look every cell up in the store, as far as its environment's lock is known."""
    environments = {request.cell.environment: request.environment for request in requests}
    locks = {name: runtime.lock_of(name, environment) for name, environment in environments.items()}
    machines = {device: machine_of(runtime, device) for device in {request.device for request in requests}}
    planned = []
    for request in requests:
        lock = locks[request.cell.environment]
        key = "" if lock is None else key_of(request, lock, runtime.source.hash, machines[request.device])
        stored = store.get(key, request.demands) if key and not fresh else None
        planned.append(PlannedCell(request, key, stored))
    return planned


def key_of(request: CellRequest, lock: str, source_hash: str, machine: str | None = None) -> str:
    machine = machine_identity(request.device) if machine is None else machine
    return cell_key(request, lock=lock, source_hash=source_hash, machine=machine)


def machine_of(runtime: Runtime, device: Device) -> str:
    """Name what cells run on, for their keys. Whoever only asks others to run them is none of it."""
    return "" if runtime.elsewhere else machine_identity(device)


def make_plan(
    cells: Sequence[PlannedCell],
    runtime: Runtime,
    store: CellStore,
    *,
    jobs: int,
    device: Device,
    to_download: str | None = None,
) -> Plan:
    needed = {cell.request.cell.environment: cell.request.environment for cell in cells if cell.stored is None}
    to_build = {name: env for name, env in needed.items() if runtime.lock_of(name, env) is None}
    needs = [runtime.needs(name, environment) for name, environment in to_build.items()]
    seconds, based_on = estimate([cell.request for cell in cells if cell.stored is None], store, jobs=jobs)
    whole = BuildNeeds(
        download_bytes=sum(one.download_bytes for one in needs),
        disk_bytes=sum(one.disk_bytes for one in needs),
        seconds=sum(one.seconds for one in needs),
    )
    return Plan(
        cells=tuple(cells),
        to_build=to_build,
        obstacles={name: why for name, env in needed.items() if (why := runtime.obstacle(name, env))},
        needs=whole,
        to_download=to_download,
        seconds=seconds + whole.seconds,
        based_on=based_on,
        jobs=jobs,
        runtime=runtime.name,
        device=device,
    )


def estimate(requests: Sequence[CellRequest], store: CellStore, *, jobs: int) -> tuple[float, str]:
    """Estimate the seconds for these cells, and say what that figure rests on."""
    if not requests:
        return 0.0, "nothing to run"
    known = store.known_seconds()
    profile = f" {requests[0].profile_name} {requests[0].device.value}"
    similar = {name: seconds for name, seconds in known.items() if name.endswith(profile)}
    exact = sum(timing_name(request) in known for request in requests)
    total = sum(known.get(timing_name(request)) or _typical(request, similar) for request in requests)
    if exact == len(requests):
        based_on = "what these cells took last time"
    elif similar:
        based_on = f"what {len(similar)} cells of this profile took here"
    else:
        based_on = "a rule of thumb, nothing was timed here yet"
    return total / max(1, min(jobs, len(requests))), based_on


def _typical(request: CellRequest, similar: Mapping[str, float]) -> float:
    """Say what cells of this profile took here; of a GPU's only those of its mode, where autotuning takes most."""
    counted = [
        seconds
        for name, seconds in similar.items()
        if request.device is Device.CPU or f"/{request.cell.mode_and_settings} " in name
    ]
    return statistics.median(counted) if counted else _guess(request)


def _guess(request: CellRequest) -> float:
    rounds = request.profile.iterations * request.profile.repeats
    if request.lower_only:
        interpreted = Suite.CUDA_EQUIVALENCE in request.profile.suites
        lowering = _GUESSED_LOWERING_SECONDS[is_whole_model(request.cell)] * len(request.profile.architectures)
        return lowering + (_GUESSED_INTERPRETING_SECONDS if interpreted else 0.0)
    if request.device is Device.CPU:
        return _GUESSED_CELL_SECONDS + _GUESSED_SECONDS_PER_ITERATION[request.workload.model] * rounds
    whole = is_whole_model(request.cell)
    autotuned = _GUESSED_AUTOTUNE_SECONDS[whole] if request.cell.mode == "max-autotune" else 0.0
    per_iteration = _GUESSED_CUDA_SECONDS_PER_ITERATION[request.workload.model]
    return _GUESSED_CUDA_SECONDS[whole] + autotuned + per_iteration * rounds


def plan_text(plan: Plan) -> str:
    """Write the plan as it is printed."""
    lines = [f"{_cells(len(plan.cells))}, runtime {plan.runtime}, device {plan.device.value}, {plan.jobs} at a time"]
    environments = dict.fromkeys(cell.request.cell.environment for cell in plan.cells)
    for name in environments:
        own = [cell for cell in plan.cells if cell.request.cell.environment == name]
        kept = sum(cell.stored is not None for cell in own)
        build = name in plan.to_build
        stopped = "cannot be built" if build else "cannot run"
        state = stopped if name in plan.obstacles else "to be built" if build else "ready"
        on_cpu = own[0].request.environment.device is Device.CUDA and own[0].request.device is Device.CPU
        note = ", its CUDA build on the CPU" if on_cpu else ""
        lines.append(f"  {name} ({state}{note}): {len(own) - kept} to run, {kept} from the store")
        lines += [f"    {line.strip()}" for line in plan.obstacles.get(name, "").splitlines()]
        lines += [f"    {cell.request.cell}{_when(cell)}" for cell in own]
    lines += [f"  {note}" for note in plan.notes]
    if plan.to_download:
        lines.append(f"  downloads the checkpoint {plan.to_download}")
    if plan.to_build:
        downloads, disk = _gigabytes(plan.needs.download_bytes), _gigabytes(plan.needs.disk_bytes)
        lines.append(f"  downloads about {downloads}, disk about {disk} at most")
    if plan.to_run:
        lines.append(f"  estimated {_duration(plan.seconds)}, from {plan.based_on}")
    return "\n".join(lines)


def plan_as_json(plan: Plan) -> dict[str, Any]:
    return {
        "cells": [
            {"cell": cell.request.cell, "reused": cell.stored is not None, "key": cell.key} for cell in plan.cells
        ],
        "runtime": plan.runtime,
        "device": plan.device.value,
        "jobs": plan.jobs,
        "environments_to_build": list(plan.to_build),
        "obstacles": plan.obstacles,
        "notes": plan.notes,
        "checkpoint_to_download": plan.to_download,
        "download_bytes": plan.needs.download_bytes,
        "disk_bytes": plan.needs.disk_bytes,
        "estimated_seconds": round(plan.seconds),
        "estimate_based_on": plan.based_on,
    }


def _when(cell: PlannedCell) -> str:
    return f"  unchanged since {cell.stored.stored}" if cell.stored else ""


def _cells(count: int) -> str:
    return f"{count} cell{'' if count == 1 else 's'}"


def _gigabytes(size: int) -> str:
    return f"{size / 10**9:.1f} GB"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
