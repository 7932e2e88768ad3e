"""The device that a run is on."""

from toto_compat.contract.request import Device
from toto_compat.runtimes.gpu import check_there_is_one
from toto_compat.runtimes.nvidia_smi import find_gpus


def choose_device(asked: str) -> Device:
    """CUDA where a GPU answers unless told otherwise; a GPU that was asked for and does not answer is an error.

    So is an nvidia-smi that gives no answer: a CPU run would look like one that nobody has to think about.
    """
    if asked == "auto":
        return Device.CUDA if find_gpus() else Device.CPU
    if asked == "cuda":
        check_there_is_one("--device cuda")
    return Device(asked)
