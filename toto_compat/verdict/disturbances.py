"""What disturbed a timing: the machine's conditions before and after it in, reasons to time it again out.

A disturbed timing decides nothing, whichever way it came out. What the cell itself did is no disturbance, and what a
machine or an older run does not tell is none either: load averages, clocks, and a GPU at its power cap are kept as
evidence and not judged.

The limits are this project's choice: far above what a machine does for itself, well below what would turn a verdict.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FOREIGN_CPU = 0.15  # of the cores that the cell may use
WAITED_FOR_A_CORE = 0.05  # of the time, while others computed
STOLEN = 0.05  # of the CPU time that the machine asked its hypervisor for
THROTTLED = 0.02  # of the time, by a CPU quota or by heat
MEMORY_PRESSURE = 0.05  # of the time that some process stood still for want of memory
SWAPPED_IN_MB_A_SECOND = 1.0
FOREIGN_GPU_PERCENT = 5
# The kernel counts in hundredths of a second and each core apart: less than this tells nothing.
_SHORTEST_S = 0.5
_GPU_HELD_BACK = ("hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown")

_QUIET = "run it again on a quiet machine"
_STOP_IT = "stop it and run it again"


@dataclass(frozen=True)
class Disturbance:
    """One thing that went on while forecasts were timed, and what to do about it."""

    what: str
    remedy: str


@dataclass(frozen=True)
class _Loop:
    """One timing loop: the snapshots around it, of which any part may be missing or wrong."""

    before: Mapping[str, Any]
    after: Mapping[str, Any]

    @property
    def seconds(self) -> float | None:
        seconds = self.spent("clock_s")
        return seconds if seconds is not None and seconds >= _SHORTEST_S else None

    def spent(self, *keys: str) -> float | None:
        """Return how far a counter went on; None where it was not read, or went back."""
        before, after = _number(self.before, keys), _number(self.after, keys)
        return after - before if before is not None and after is not None and 0 <= before <= after else None

    def share(self, *keys: str) -> float:
        """Divide a counter of seconds by the seconds that passed; 0 where nothing is known."""
        spent, seconds = self.spent(*keys), self.seconds
        return spent / seconds if spent is not None and seconds is not None else 0.0

    @property
    def foreign_cores(self) -> float:
        """Count the cores that others kept busy; 0 where that is not known, as where the cell seems idle itself."""
        busy, own, seconds = self.spent("busy_s"), self.spent("own_cpu_s"), self.seconds
        return max(0.0, busy - own) / seconds if busy is not None and own and seconds is not None else 0.0


def disturbances(conditions: Any, neighbours: Any = ()) -> tuple[Disturbance, ...]:
    """Name what disturbed any of these timing loops, each kind once, by the first that it disturbed.

    `neighbours` were on the GPU before the cell or after it. They count where the loops do not tell who computed.
    """
    found: dict[str, Disturbance] = {}
    loops = list(_loops(conditions))
    for loop in loops:
        for kind in _KINDS:
            for one in kind(loop):
                found.setdefault(kind.__name__, one)
    if neighbours and isinstance(neighbours, list) and not any(map(_tells_own_from_foreign, loops)):
        told = f"{', '.join(map(str, neighbours))} used the GPU before or after and perhaps"
        found["neighbours"] = Disturbance(told, _STOP_IT)
    return tuple(found.values())


def disturbed_by(conditions: Any, neighbours: Any = ()) -> str:
    """Say in one line what disturbed these timing loops, what shares a remedy together; '' if nothing did."""
    by_remedy: dict[str, list[str]] = {}
    for one in disturbances(conditions, neighbours):
        by_remedy.setdefault(one.remedy, []).append(one.what)
    return "; ".join(f"{', '.join(what)} while it was timed: {remedy}" for remedy, what in by_remedy.items())


def _foreign_processes(loop: _Loop) -> Iterator[Disturbance]:
    cores = _number(loop.after, ("cores",))
    if cores and loop.foreign_cores / cores > FOREIGN_CPU:
        yield Disturbance(f"foreign processes used {_of_a_core(loop.foreign_cores)}", _QUIET)


def _waiting(loop: _Loop) -> Iterator[Disturbance]:
    # threads of the cell that wait for each other are its own affair
    waited = min(loop.share("waited_for_a_core_s"), loop.foreign_cores)
    if waited > WAITED_FOR_A_CORE:
        yield Disturbance(f"the forecasts waited {waited:.0%} of the time for a core that others used", _QUIET)


def _stolen(loop: _Loop) -> Iterator[Disturbance]:
    stolen, busy = loop.spent("stolen_s"), loop.spent("busy_s")
    if loop.seconds is not None and stolen and busy is not None and stolen / (busy + stolen) > STOLEN:
        share = stolen / (busy + stolen)
        yield Disturbance(f"the hypervisor kept {share:.0%} of the CPU time", "run it on a machine of its own")


def _quota(loop: _Loop) -> Iterator[Disturbance]:
    held = loop.share("throttled_s")
    if held > THROTTLED:
        yield Disturbance(
            f"a CPU quota held its control group back for {held:.0%} of the time", "raise the quota or ask for less"
        )


def _heat(loop: _Loop) -> Iterator[Disturbance]:
    held = loop.share("too_hot_s")
    if held > THROTTLED:
        yield Disturbance(f"the CPU was too hot for {held:.0%} of the time", "run it again once it is cool")


def _memory(loop: _Loop) -> Iterator[Disturbance]:
    short, swapped = loop.share("pressure_s", "memory"), loop.share("swapped_in_mb")
    if short > MEMORY_PRESSURE or swapped > SWAPPED_IN_MB_A_SECOND:
        told = f"{short:.0%} of the time something stood still for want of memory, {swapped:.1f} MB/s were swapped in"
        yield Disturbance(told, "run it again with more memory free")


def _gpu_throttling(loop: _Loop) -> Iterator[Disturbance]:
    gpu = loop.after.get("gpu")
    reasons = gpu.get("throttled_by") if isinstance(gpu, Mapping) else None
    held = [one for one in _GPU_HELD_BACK if isinstance(reasons, list) and one in reasons]
    if held:
        yield Disturbance(f"the GPU held its clocks back ({', '.join(held)})", "run it again once it is cool")


def _foreign_gpu_processes(loop: _Loop) -> Iterator[Disturbance]:
    """Find others that computed on the GPU at the end: at the start a cell may just have made way."""
    if not _tells_own_from_foreign(loop):
        return
    for one in _gpu_processes(loop):
        used = _number(one, ("gpu_percent",))
        if one.get("own") is not True and used is not None and used >= FOREIGN_GPU_PERCENT:
            name = f"{one.get('name') or 'a process'} (pid {one.get('pid')})"
            yield Disturbance(f"{name} used {used:.0f} % of the GPU", _STOP_IT)


def _tells_own_from_foreign(loop: _Loop) -> bool:
    """Tell if this cell is among them: else they have the numbers of another namespace, and one of them is the cell."""
    return any(one.get("own") is True for one in _gpu_processes(loop))


def _gpu_processes(loop: _Loop) -> list[Mapping[str, Any]]:
    listed = loop.after.get("gpu_processes")
    return [one for one in listed if isinstance(one, Mapping)] if isinstance(listed, list) else []


_KINDS: Sequence[Callable[[_Loop], Iterator[Disturbance]]] = (
    _foreign_processes,
    _waiting,
    _stolen,
    _quota,
    _heat,
    _memory,
    _gpu_throttling,
    _foreign_gpu_processes,
)


def _loops(conditions: Any) -> Iterator[_Loop]:
    for one in conditions if isinstance(conditions, list) else [conditions]:
        before, after = (one.get("before"), one.get("after")) if isinstance(one, Mapping) else (None, None)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield _Loop(before, after)


def _number(data: Mapping[str, Any], keys: Sequence[str]) -> float | None:
    value: Any = data
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if abs(value) < 1e300 and math.isfinite(value) else None


def _of_a_core(cores: float) -> str:
    return f"{100 * cores:.0f} % of a core" if cores < 1 else f"{cores:.1f} cores"
