"""What this machine is, as far as it can change a measurement or decide what can be run."""

import os
import platform
from pathlib import Path

from toto_compat.contract.request import Device
from toto_compat.environments.pythons import compiler_version, find_compiler
from toto_compat.errors import EnvironmentBuildError
from toto_compat.runtimes.nvidia_smi import find_gpus


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
        try:
            gpus = find_gpus()
        except EnvironmentBuildError:
            gpus = ()  # the login node of a cluster, whose nodes have the GPUs: cells here are refused before
        # of one kind, all that are used: how many of them there are changes no result
        parts += dict.fromkeys(f"{gpu.name} {gpu.driver}" for gpu in gpus)
    return " | ".join(parts)
