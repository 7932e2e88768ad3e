"""What a run will do, worked out and shown before anything starts."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from toto_compat.evidence.schema import CellRequest
from toto_compat.evidence.store import CellStore, StoredCell, cell_key, timing_name
from toto_compat.matrix.schema import Device, Environment
from toto_compat.runtimes.machine import machine_identity
from toto_compat.runtimes.seam import Runtime
from toto_compat.runtimes.venv import disk_needed, download_size

_BUILD_SECONDS = {Device.CPU: 90.0, Device.CUDA: 240.0}  # measured on two cores and a fast index
# Quick cells of the tiny model, two at a time on two cores, took 250 to 410 s; the base model and more iterations more.
_GUESSED_CELL_SECONDS = 330.0
_GUESSED_SECONDS_PER_ITERATION = {"tiny": 10.0, "base": 120.0}


@dataclass(frozen=True)
class PlannedCell:
    """One cell of the run; `stored` is its result if an earlier run has it already."""

    request: CellRequest
    key: str  # empty while the environment is not built: its lock is part of the key
    stored: StoredCell | None


@dataclass(frozen=True)
class Plan:
    cells: tuple[PlannedCell, ...]
    to_build: dict[str, Environment]
    obstacles: dict[str, str]  # of those to be built, by name
    download_bytes: int
    disk_bytes: int
    seconds: float
    based_on: str
    jobs: int
    runtime: str
    device: Device

    @property
    def to_run(self) -> tuple[PlannedCell, ...]:
        return tuple(cell for cell in self.cells if cell.stored is None)

    @property
    def reused(self) -> tuple[PlannedCell, ...]:
        return tuple(cell for cell in self.cells if cell.stored is not None)


def plan_cells(
    requests: Sequence[CellRequest], runtime: Runtime, store: CellStore, source_hash: str, *, fresh: bool
) -> list[PlannedCell]:
    """Look every cell up in the store, as far as its environment's lock is known."""
    locks = {request.environment_name: request.environment for request in requests}
    known = {name: runtime.lock_of(name, environment) for name, environment in locks.items()}
    machines = {device: machine_identity(device) for device in {request.device for request in requests}}
    planned = []
    for request in requests:
        lock = known[request.environment_name]
        key = "" if lock is None else key_of(request, lock, source_hash, machines[request.device])
        stored = store.get(key) if key and not fresh else None
        planned.append(PlannedCell(request, key, stored))
    return planned


def key_of(request: CellRequest, lock: str, source_hash: str, machine: str | None = None) -> str:
    return cell_key(request, lock=lock, source_hash=source_hash, machine=machine or machine_identity(request.device))


def make_plan(cells: Sequence[PlannedCell], runtime: Runtime, store: CellStore, *, jobs: int, device: Device) -> Plan:
    needed = {cell.request.environment_name: cell.request.environment for cell in cells if cell.stored is None}
    to_build = {name: env for name, env in needed.items() if runtime.lock_of(name, env) is None}
    seconds, based_on = estimate([cell.request for cell in cells if cell.stored is None], store, jobs=jobs)
    return Plan(
        cells=tuple(cells),
        to_build=to_build,
        obstacles={name: found for name, env in to_build.items() if (found := runtime.obstacle(name, env))},
        download_bytes=sum(download_size(environment) for environment in to_build.values()),
        disk_bytes=sum(disk_needed(environment) for environment in to_build.values()),
        seconds=seconds + sum(_BUILD_SECONDS[environment.device] for environment in to_build.values()),
        based_on=based_on,
        jobs=jobs,
        runtime=runtime.name,
        device=device,
    )


def estimate(requests: Sequence[CellRequest], store: CellStore, *, jobs: int) -> tuple[float, str]:
    """Seconds for these cells, and what that figure rests on."""
    if not requests:
        return 0.0, "nothing to run"
    known = store.known_seconds()
    profile = f" {requests[0].profile_name} {requests[0].device.value}"
    similar = [seconds for name, seconds in known.items() if name.endswith(profile)]
    exact = sum(timing_name(request) in known for request in requests)
    typical = statistics.median(similar) if similar else None
    total = sum(known.get(timing_name(request)) or typical or _guess(request) for request in requests)
    if exact == len(requests):
        based_on = "what these cells took last time"
    elif similar:
        based_on = f"what {len(similar)} cells of this profile took here"
    else:
        based_on = "a rule of thumb, nothing was timed here yet"
    return total / max(1, min(jobs, len(requests))), based_on


def _guess(request: CellRequest) -> float:
    per_iteration = _GUESSED_SECONDS_PER_ITERATION[request.workload.model]
    return _GUESSED_CELL_SECONDS + per_iteration * request.profile.iterations * request.profile.repeats


def plan_text(plan: Plan) -> str:
    """The plan as it is printed."""
    lines = [f"{_cells(len(plan.cells))}, runtime {plan.runtime}, device {plan.device.value}, {plan.jobs} at a time"]
    environments = dict.fromkeys(cell.request.environment_name for cell in plan.cells)
    for name in environments:
        own = [cell for cell in plan.cells if cell.request.environment_name == name]
        kept = sum(cell.stored is not None for cell in own)
        state = "cannot be built" if name in plan.obstacles else "to be built" if name in plan.to_build else "ready"
        on_cpu = own[0].request.environment.device is Device.CUDA and own[0].request.device is Device.CPU
        note = ", its CUDA build on the CPU" if on_cpu else ""
        lines.append(f"  {name} ({state}{note}): {len(own) - kept} to run, {kept} from the store")
        lines += [f"    {line.strip()}" for line in plan.obstacles.get(name, "").splitlines()]
        lines += [f"    {cell.request.cell}{_when(cell)}" for cell in own]
    if plan.to_build:
        lines.append(
            f"  downloads about {_gigabytes(plan.download_bytes)}, disk about {_gigabytes(plan.disk_bytes)} at most"
        )
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
        "download_bytes": plan.download_bytes,
        "disk_bytes": plan.disk_bytes,
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
