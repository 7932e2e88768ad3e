"""The device that a run is on."""

from toto_compat.contract.request import Device
from toto_compat.errors import EnvironmentBuildError
from toto_compat.runtimes.machine import find_gpus


def choose_device(asked: str) -> Device:
    """CUDA where a GPU answers unless told otherwise; a GPU that was asked for and does not answer is an error."""
    if asked == "auto":
        return Device.CUDA if find_gpus() else Device.CPU
    if asked == "cuda" and not find_gpus():
        raise EnvironmentBuildError(
            "--device cuda: no NVIDIA GPU answers here (`nvidia-smi` finds none)",
            hint="`toto-compat doctor` says what is missing; --device cpu runs a CUDA build on the CPU",
        )
    return Device(asked)
