"""The GPUs of this machine against what an environment's wheel can use, told before an hour is lost.

Every problem found here is one of the environment or the machine, never evidence against a cache.
"""

import re
from collections.abc import Sequence

from toto_compat.contract.request import Device, Environment
from toto_compat.errors import EnvironmentBuildError
from toto_compat.runtimes.machine import Gpu, find_gpus

# From NVIDIA's table of minor version compatibility: a newer minor release of CUDA runs on the same driver.
_MINIMUM_DRIVER = {11: 450, 12: 525, 13: 580}


def check_gpus(name: str, environment: Environment, device: Device, gpus: Sequence[Gpu]) -> None:
    """Refuse a missing GPU, a driver too old and a GPU too old for the wheel, each with its fix."""
    if device is not Device.CUDA:
        return
    if not gpus:
        raise EnvironmentBuildError(
            f"{name}: no NVIDIA GPU answers on this machine", hint="check `nvidia-smi`; or run with --device cpu"
        )
    cuda_major = int(environment.build[2:-1])
    minimum = _MINIMUM_DRIVER.get(cuda_major, 0)
    for gpu in gpus:
        major = gpu.driver.partition(".")[0]
        if major.isdigit() and int(major) < minimum:  # a driver that does not say its version is left to the probe
            raise EnvironmentBuildError(
                f"{name}: driver {gpu.driver} is too old for {environment.build}: CUDA {cuda_major} needs {minimum}",
                hint=f"update the NVIDIA driver to {minimum} or later, or take an environment with an older CUDA",
            )
        if environment.gpu_architectures:
            check_kernels(name, gpu.name, gpu.architecture, environment.gpu_architectures)


def check_kernels(name: str, gpu: str, architecture: str, wheel: Sequence[str]) -> None:
    """Refuse a GPU that the wheel has no kernels for: every forecast on it would fail, whatever the cache."""
    if not wheel_runs_on(architecture, wheel):
        raise EnvironmentBuildError(
            f"{name}: the wheel has no kernels for {gpu} ({architecture}), only for {', '.join(wheel)}",
            hint="take an environment whose gpu_architectures cover this GPU; this says nothing about any cache",
        )


def wheel_runs_on(gpu: str, wheel: Sequence[str]) -> bool:
    """Tell if a GPU runs the wheel's kernels: those of its own major version with the same or a lower minor one."""
    own = _capability(gpu)
    if own is None:  # nvidia-smi did not say: the probe will see
        return True
    built = [capability for architecture in wheel if (capability := _capability(architecture))]
    return any(major == own[0] and minor <= own[1] for major, minor in built)


def _capability(architecture: str) -> tuple[int, int] | None:
    """Read 'sm_86' or 'sm_90a'; None for what is no architecture."""
    match = re.fullmatch(r"sm_(\d+)(\d)[a-z]?", architecture)
    return (int(match[1]), int(match[2])) if match else None


def first_gpu() -> str:
    return next((gpu.index for gpu in find_gpus()), "0")
