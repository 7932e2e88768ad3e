"""A GPU or driver that an environment's wheel cannot use is an error of the environment that names its fix."""

import pytest

from toto_compat.contract.request import Device, Environment
from toto_compat.errors import EnvironmentBuildError
from toto_compat.runtimes.gpu import check_gpus, wheel_runs_on
from toto_compat.runtimes.machine import Gpu

CUDA = Environment(torch="2.9.0", build="cu128", gpu_architectures=("sm_80", "sm_86", "sm_90", "sm_120"))
CUDA_13 = Environment(torch="2.13.0", build="cu130", gpu_architectures=("sm_75", "sm_120"))


def test_a_driver_too_old_names_the_one_needed() -> None:
    old = Gpu("0", "NVIDIA GeForce RTX 5090", "570.86.16", "sm_120")
    with pytest.raises(EnvironmentBuildError, match=r"driver 570\.86\.16 is too old for cu130: CUDA 13 needs 580"):
        check_gpus("torch-2.13.0-cu130", CUDA_13, Device.CUDA, [old])


def test_the_same_driver_is_new_enough_for_cuda_12() -> None:
    check_gpus("e", CUDA, Device.CUDA, [Gpu("0", "NVIDIA GeForce RTX 5090", "570.86.16", "sm_120")])


def test_a_gpu_the_wheel_has_no_kernels_for_is_an_environment_error() -> None:
    volta = Gpu("0", "Tesla V100", "581.10", "sm_70")
    with pytest.raises(EnvironmentBuildError, match="no kernels for Tesla V100") as caught:
        check_gpus("torch-2.13.0-cu130", CUDA_13, Device.CUDA, [volta])
    assert "says nothing about any cache" in caught.value.hint


def test_a_gpu_asked_for_and_none_there() -> None:
    with pytest.raises(EnvironmentBuildError, match="no NVIDIA GPU answers"):
        check_gpus("e", CUDA, Device.CUDA, [])


def test_a_cuda_build_on_the_cpu_needs_no_gpu() -> None:
    check_gpus("e", CUDA, Device.CPU, [])


@pytest.mark.parametrize(
    ("gpu", "runs"), [("sm_86", True), ("sm_89", True), ("sm_75", False), ("sm_120", True), ("sm_100", False)]
)
def test_kernels_run_on_their_own_major_version_from_their_minor_up(gpu: str, runs: bool) -> None:
    assert wheel_runs_on(gpu, CUDA.gpu_architectures) is runs


@pytest.mark.parametrize(("build", "device"), [("cpu", Device.CPU), ("cu128", Device.CUDA)])
def test_a_cpu_wheel_runs_on_the_cpu_whatever_is_wanted(build: str, device: Device) -> None:
    assert Environment(torch="2.9.0", build=build).runs_on(Device.CUDA) is device
