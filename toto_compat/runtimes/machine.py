"""What this machine is, as far as it can change a measurement or decide what can be run."""

import functools
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from toto_compat.contract.request import Device
from toto_compat.environments.pythons import compiler_version, find_compiler
from toto_compat.errors import EnvironmentBuildError


@dataclass(frozen=True)
class Gpu:
    index: str
    name: str
    driver: str
    architecture: str  # sm_120


@functools.cache
def find_gpus() -> tuple[Gpu, ...]:
    """Ask for the NVIDIA GPUs that answer; none where nvidia-smi is missing or has no device."""
    if shutil.which("nvidia-smi") is None:
        return ()
    query = ["nvidia-smi", "--query-gpu=index,name,driver_version,compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    if done.returncode != 0:
        return ()
    rows = [[part.strip() for part in line.split(",")] for line in done.stdout.splitlines()]
    return tuple(Gpu(row[0], row[1], row[2], "sm_" + row[3].replace(".", "")) for row in rows if len(row) == 4)


def cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def core_count() -> int:
    """Count the cores this process may use, which in a container is less than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine_identity(device: Device) -> str:
    """Name this machine for a result's key: one of another processor, compiler, GPU or driver is another result."""
    try:
        compiler = compiler_version(find_compiler())
    except EnvironmentBuildError:
        compiler = ""  # a container brings its own
    parts = [platform.system(), platform.machine(), cpu_model(), str(core_count()), compiler]
    if device is Device.CUDA:
        parts += [f"{gpu.name} {gpu.driver}" for gpu in find_gpus()]
    return " | ".join(parts)
