"""The machine while forecasts are timed: a snapshot before the loop and one after it.

Counters are kept as they are read. Which differences between two snapshots are too much is the host's to say
(`verdict/disturbances.py`), so that a stored run can be judged again by other limits.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from toto_compat.cell.process_tree import tree_cpu_seconds, tree_of

_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_MB = 1 << 20
_FIRST_CPU = Path("/sys/devices/system/cpu/cpu0")
_CONTROL_GROUPS = Path("/sys/fs/cgroup")

# What drivers call it, the newest name first: 535 renamed it.
_HELD_BACK = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
_FIRST_NAMESPACE = "pid:[4026531836]"  # of processes: the machine's own, by the number that Linux gives it

# Its bits, as NVML numbers them.
GPU_THROTTLE_REASONS = {
    0x001: "gpu_idle",
    0x002: "applications_clocks_setting",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}


def machine_conditions() -> Mapping[str, Any]:
    """Read what can disturb a timing. What this machine does not tell is left out."""
    readers: tuple[Callable[[], dict[str, Any]], ...] = (_processors, _own_share, _clocks, _throttling, _memory, _gpu)
    conditions: dict[str, Any] = {"clock_s": time.monotonic(), "load_average": list(os.getloadavg())}
    for read in readers:
        try:
            conditions |= read()
        except (OSError, ValueError, IndexError, KeyError):
            continue
    return conditions


def _processors() -> dict[str, Any]:
    """Seconds that the cores open to this process were busy, for whomever, and those that a hypervisor kept."""
    lines = _lines("/proc/stat")
    cores = os.sched_getaffinity(0)
    busy = stolen = 0
    for line in lines:
        name, *fields = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cores:
            user, nice, system, _idle, _waiting, interrupts, soft_interrupts, steal = map(int, fields[:8])
            busy += user + nice + system + interrupts + soft_interrupts
            stolen += steal
    runnable = _lines("/proc/loadavg")[0].split()[3].partition("/")[0]
    return {
        "runnable": int(runnable),
        "cores": len(cores),
        "busy_s": busy / _TICKS_A_SECOND,
        "stolen_s": stolen / _TICKS_A_SECOND,
    }


def _own_share() -> dict[str, Any]:
    """Seconds that this process and what it started have computed, and that its thread has waited for a core."""
    own = {"own_cpu_s": tree_cpu_seconds(os.getpid())}
    schedule = Path("/proc/thread-self/schedstat")
    if schedule.is_file():
        own["waited_for_a_core_s"] = int(schedule.read_text().split()[1]) / 1e9
    return own


def _clocks() -> dict[str, Any]:
    read: dict[str, Any] = {}
    frequency = _FIRST_CPU / "cpufreq/scaling_cur_freq"
    if frequency.is_file():
        read["cpu_mhz"] = int(frequency.read_text()) / 1000.0
    too_hot = _FIRST_CPU / "thermal_throttle/package_throttle_total_time_ms"
    if too_hot.is_file():
        read["too_hot_s"] = int(too_hot.read_text()) / 1000.0
    return read


def _throttling() -> dict[str, Any]:
    """Seconds that a CPU quota held this process's control group back, or one that it lies in."""
    found = []
    for line in _lines("/proc/self/cgroup"):
        _number, controllers, place = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        # version 2 has one tree, version 1 one per set of controllers; in a container the path may be the host's
        for root in (_CONTROL_GROUPS / controllers, _CONTROL_GROUPS / "cpu", _CONTROL_GROUPS / "unified"):
            folder = root / place.lstrip("/")
            found += [_throttled(one / "cpu.stat") for one in (folder, *folder.parents) if one.is_relative_to(root)]
    known = [seconds for seconds in found if seconds is not None]
    return {"throttled_s": max(known)} if known else {}


def _throttled(statistics: Path) -> float | None:
    if not statistics.is_file():
        return None
    fields = dict(line.split() for line in statistics.read_text().splitlines())
    if "throttled_usec" in fields:
        return int(fields["throttled_usec"]) / 1e6
    return int(fields["throttled_time"]) / 1e9 if "throttled_time" in fields else None


def _memory() -> dict[str, Any]:
    """Seconds that someone stood still for want of a core, the disk or memory; and what was swapped."""
    read: dict[str, Any] = {"pressure_s": {}}
    for what in ("cpu", "io", "memory"):
        file = Path("/proc/pressure", what)
        if file.is_file():
            some = file.read_text().splitlines()[0]
            read["pressure_s"][what] = int(some.rpartition("total=")[2]) / 1e6
    held = {line.split(":")[0]: int(line.split()[1]) for line in _lines("/proc/meminfo")}
    read["swap_used_mb"] = (held["SwapTotal"] - held["SwapFree"]) / 1024
    swapped = dict(line.split() for line in _lines("/proc/vmstat") if line.startswith("pswpin "))
    if swapped:
        read["swapped_in_mb"] = int(swapped["pswpin"]) * _PAGE / _MB
    return read


def _gpu() -> dict[str, Any]:
    """Clocks and throttling of the GPU of this cell, and who computes on it."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0].strip()
    if not visible or not shutil.which("nvidia-smi"):
        return {}
    for held_back in _HELD_BACK:
        names = ("clocks.sm", "clocks.mem", held_back, "temperature.gpu", "utilization.gpu")
        answer = _nvidia_smi(f"--id={visible}", f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits")
        if answer:
            break
    else:
        return {}
    read = dict(zip(names, (part.strip() for part in answer.splitlines()[0].split(",")), strict=True))
    reasons = int(read[held_back], 16)
    return {
        "gpu": {**read, "throttled_by": [name for bit, name in GPU_THROTTLE_REASONS.items() if reasons & bit]},
        "gpu_processes": _gpu_processes(_nvidia_smi("pmon", f"--id={visible}", "-c", "1", "-s", "u")),
    }


def _gpu_processes(table: str) -> list[dict[str, Any]]:
    """The processes of `nvidia-smi pmon`, whose first line names the columns."""
    headings, *lines = table.splitlines() or [""]
    columns = headings.lstrip("# ").split()
    # in a container processes have other numbers than the driver, which counts on the machine, knows them by
    own = tree_of(os.getpid()) if _sees_the_machines_processes() else None
    found = []
    for line in lines:
        row = dict(zip(columns, line.split(maxsplit=max(0, len(columns) - 1)), strict=False))
        if row.get("pid", "").isdigit():
            share = row.get("sm", "")
            found.append(
                {
                    "pid": int(row["pid"]),
                    "name": row.get("command", "").strip(),
                    "gpu_percent": int(share) if share.isdigit() else None,
                    "own": int(row["pid"]) in own if own is not None else None,
                }
            )
    return found


def _sees_the_machines_processes() -> bool:
    try:
        return str(Path("/proc/self/ns/pid").readlink()) == _FIRST_NAMESPACE
    except OSError:
        return False


def _nvidia_smi(*arguments: str) -> str:
    try:
        finished = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return finished.stdout.strip() if finished.returncode == 0 else ""


def _lines(path: str) -> list[str]:
    return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
