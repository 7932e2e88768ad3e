"""The GPUs of this machine against what an environment's wheel can use, told before an hour is lost.

Every problem found here is one of the environment or the machine, never evidence against a cache.
"""

import re
import shutil
from collections.abc import Iterator, Sequence

from toto_compat.contract.request import Device, Environment
from toto_compat.errors import EnvironmentBuildError
from toto_compat.runtimes.nvidia_smi import (
    LEAST_FREE_MB,
    VISIBLE,
    Gpu,
    capability,
    find_gpus,
    gpus_left_out,
    gpus_without_slices,
    lacking_slices,
    programs_on,
    why_none,
)

# From NVIDIA's table of minor version compatibility: a newer minor release of CUDA runs on the same driver.
_MINIMUM_DRIVER = {11: 450, 12: 525, 13: 580}


def check_gpus(name: str, environment: Environment, device: Device, gpus: Sequence[Gpu]) -> None:
    """Refuse a missing GPU, a driver too old, a GPU the wheel has no kernels for and one that is full."""
    if device is not Device.CUDA:
        return
    if not gpus:
        raise EnvironmentBuildError(
            f"{name}: no NVIDIA GPU answers on this machine", hint="check `nvidia-smi`; or run with --device cpu"
        )
    check_can_run(name, environment, gpus)
    for gpu in gpus:
        check_free(name, gpu)


def check_can_run(name: str, environment: Environment, gpus: Sequence[Gpu]) -> None:
    """Refuse what no waiting changes: the driver and the kind of GPU against the wheel."""
    cuda_major = int(environment.build[2:-1])
    minimum = _MINIMUM_DRIVER.get(cuda_major, 0)
    for gpu in gpus:
        major = re.match(r"[0-9]{1,6}(?=\.)", gpu.driver)
        if major and int(major[0]) < minimum:  # a driver that does not say its version is left to the probe
            raise EnvironmentBuildError(
                f"{name}: driver {gpu.driver} is too old for {environment.build}: CUDA {cuda_major} needs {minimum}",
                hint=f"update the NVIDIA driver to {minimum} or later, or take an environment with an older CUDA",
            )
        if environment.gpu_architectures:
            check_kernels(name, gpu.name, gpu.architecture, environment.gpu_architectures)


def why_not_runnable(name: str, environment: Environment) -> str:
    """Say why this machine's GPUs cannot run an environment, in one line; '' if they can."""
    try:
        check_can_run(name, environment, find_gpus())
    except EnvironmentBuildError as error:
        return error.message.removeprefix(f"{name}: ")
    return ""


def check_kernels(name: str, gpu: str, architecture: str, wheel: Sequence[str]) -> None:
    """Refuse a GPU that the wheel has no kernels for: every forecast on it would fail, whatever the cache."""
    if wheel_runs_on(architecture, wheel):
        return
    own = capability(architecture) or (0, 0)
    newest = max((found for one in wheel if (found := capability(one))), default=(0, 0))
    newer_or_older = "it is too new, take a later release" if own > newest else "it is too old, take an earlier release"
    raise EnvironmentBuildError(
        f"{name}: the wheel has no kernels for {gpu} ({architecture}), only for {', '.join(wheel)}",
        hint=f"{newer_or_older}: an environment whose gpu_architectures cover this GPU; this says nothing about any"
        " cache",
    )


def wheel_runs_on(gpu: str, wheel: Sequence[str]) -> bool:
    """Tell if a GPU runs the wheel's kernels: those of its own major version with the same or a lower minor one.

    Or those that its driver makes of PTX (`compute_120`), which is for that version and everything newer.
    """
    own = capability(gpu)
    if own is None:  # nvidia-smi did not say: the probe will see
        return True
    return any(_runs_on(own, one) for one in wheel)


def _runs_on(own: tuple[int, int], built_for: str) -> bool:
    kind, _, version = built_for.partition("_")
    found = capability(f"sm_{version}")
    if found is None:
        return False
    if version.endswith("a"):  # it uses what that version alone has
        return found == own
    if kind == "compute" and version.isdigit():
        return found <= own
    return found[0] == own[0] and found[1] <= own[1]


def check_free(name: str, gpu: Gpu) -> None:
    """Refuse a GPU that others have filled, or that is too small."""
    if gpu.is_full:
        free = gpu.memory_mb - gpu.used_mb
        held_by = ", ".join(programs_on([gpu]).get(gpu, ()))
        way_out = f"set {VISIBLE} to the UUID of another GPU (`nvidia-smi -L` lists them)"
        hint = (
            f"it is too small for any cell: {way_out}, or run with --device cpu"
            if gpu.memory_mb < LEAST_FREE_MB
            else f"end what uses it, or {way_out}"
        )
        raise EnvironmentBuildError(
            f"{name}: GPU {gpu.index} ({gpu.name}) has {free} of {gpu.memory_mb} MB free and a cell needs about"
            f" {LEAST_FREE_MB}" + (f"; used by {held_by}" if held_by else ""),
            hint=hint,
        )


def gpu_notes() -> Iterator[str]:
    """Say which GPUs are used, which are not and why, and who else computes on those that are."""
    gpus = find_gpus()
    used = {gpu.name for gpu in gpus}
    for gpu in gpus_left_out():
        yield (
            f"GPU {gpu.index} ({gpu.name}) is left out: it has {gpu.memory_mb - gpu.used_mb} of {gpu.memory_mb} MB"
            f" free and a cell needs about {LEAST_FREE_MB}; end what uses it to have it used as well"
            if gpu.name in used
            else f"GPU {gpu.index} ({gpu.name}) is left out: the cells of a run are on one kind of GPU;"
            f" {VISIBLE}={gpu.uuid} takes it instead"
        )
    yield from map(lacking_slices, gpus_without_slices())
    for gpu, programs in programs_on(gpus).items():
        yield (
            f"GPU {gpu.index} ({gpu.name}) is busy: {', '.join(programs)}; timings beside it are INCONCLUSIVE, end it"
            f" first or set {VISIBLE} to the UUID of another GPU"
        )


def why_on_the_cpu() -> str:
    """Say why a machine with nvidia-smi runs on the CPU where nobody asked for that; '' if it is no surprise."""
    return why_none() if shutil.which("nvidia-smi") and not find_gpus() else ""


def check_there_is_one(asked: str) -> None:
    """Refuse CUDA where no GPU is there for this user, and say why none is."""
    if not find_gpus():
        raise EnvironmentBuildError(
            f"{asked}: no NVIDIA GPU answers here: {why_none()}",
            hint="`toto-compat doctor` says what is missing; --device cpu runs a CUDA build on the CPU",
        )


def first_gpu() -> str:
    """Return the UUID of the first GPU in use; of an engine on another machine, whose GPUs nobody listed, the first."""
    return next((gpu.uuid for gpu in find_gpus()), "0")
