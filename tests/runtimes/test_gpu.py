"""A GPU or driver that an environment's wheel cannot use is an error of the environment that names its fix."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runtimes.nvidia import smi
from toto_compat.contract.request import Device, Environment
from toto_compat.errors import EnvironmentBuildError
from toto_compat.runtimes.gpu import check_gpus, check_kernels, gpu_notes, wheel_runs_on, why_not_runnable
from toto_compat.runtimes.gpu_refusals import advice_on_refusal
from toto_compat.runtimes.nvidia_smi import Gpu, find_gpus

CUDA = Environment(torch="2.9.0", build="cu128", gpu_architectures=("sm_80", "sm_86", "sm_90", "sm_120"))
CUDA_13 = Environment(torch="2.13.0", build="cu130", gpu_architectures=("sm_75", "sm_120"))


@pytest.fixture(autouse=True)
def ask_anew() -> Iterator[None]:
    yield
    smi.forget()


def test_a_driver_too_old_names_the_one_needed() -> None:
    old = Gpu("0", "NVIDIA GeForce RTX 5090", "570.86.16", "sm_120", "GPU-0")
    with pytest.raises(EnvironmentBuildError, match=r"driver 570\.86\.16 is too old for cu130: CUDA 13 needs 580"):
        check_gpus("torch-2.13.0-cu130", CUDA_13, Device.CUDA, [old])


def test_the_same_driver_is_new_enough_for_cuda_12() -> None:
    check_gpus("e", CUDA, Device.CUDA, [Gpu("0", "NVIDIA GeForce RTX 5090", "570.86.16", "sm_120", "GPU-0")])


def test_a_gpu_the_wheel_has_no_kernels_for_is_an_environment_error() -> None:
    volta = Gpu("0", "Tesla V100", "581.10", "sm_70", "GPU-0")
    with pytest.raises(EnvironmentBuildError, match="no kernels for Tesla V100") as caught:
        check_gpus("torch-2.13.0-cu130", CUDA_13, Device.CUDA, [volta])
    assert "says nothing about any cache" in caught.value.hint


@pytest.mark.parametrize(
    ("architecture", "advice"), [("sm_130", "too new, take a later"), ("sm_61", "too old, take an earlier")]
)
def test_a_card_too_new_or_too_old_is_told_which_way_to_go(architecture: str, advice: str) -> None:
    card = Gpu("0", "a card", "600.10", architecture, "GPU-0")
    with pytest.raises(EnvironmentBuildError, match=rf"no kernels for a card \({architecture}\)") as caught:
        check_gpus("e", CUDA, Device.CUDA, [card])
    assert advice in caught.value.hint


def test_a_full_card_names_who_fills_it_and_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = {**smi.gpu(), "memory.used": "80000"}
    smi.install(tmp_path, monkeypatch, [full], processes=[smi.process(full, pid=77, name="vllm", memory=79900)])
    with pytest.raises(
        EnvironmentBuildError, match=r"1559 of 81559 MB free .* used by vllm \(pid 77, 79900 MB\)"
    ) as caught:
        check_gpus("e", CUDA, Device.CUDA, find_gpus())
    assert "CUDA_VISIBLE_DEVICES" in caught.value.hint


def test_a_card_that_is_too_small_is_told_as_that_and_not_as_one_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi.install(tmp_path, monkeypatch, [smi.gpu(0, "NVIDIA T400", "7.5", **{"memory.total": "2048"})])
    with pytest.raises(EnvironmentBuildError, match="has 2044 of 2048 MB free") as caught:
        check_gpus("e", CUDA_13, Device.CUDA, find_gpus())
    assert "too small" in caught.value.hint
    assert "end what uses it" not in caught.value.hint
    assert "--device cpu" in caught.value.hint


def test_a_busy_card_and_one_of_another_kind_are_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    display, card = smi.TWO_GENERATIONS
    smi.install(tmp_path, monkeypatch, smi.TWO_GENERATIONS, processes=[smi.process(card, pid=5, name="train.py")])
    left_out, busy = gpu_notes()
    assert "Quadro K620" in left_out
    assert f"CUDA_VISIBLE_DEVICES={display['uuid']}" in left_out
    assert "train.py (pid 5, 0 MB); timings beside it are INCONCLUSIVE" in busy


def test_a_full_card_beside_free_ones_of_its_kind_is_noted_and_vetoes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi.install(tmp_path, monkeypatch, [smi.gpu(0), {**smi.gpu(1), "memory.used": "80000"}])
    check_gpus("e", CUDA, Device.CUDA, find_gpus())
    [note] = gpu_notes()
    assert "GPU 1 (NVIDIA H100 80GB HBM3) is left out: it has 1559 of 81559 MB free" in note


def test_an_old_display_card_vetoes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi.install(tmp_path, monkeypatch, smi.TWO_GENERATIONS)
    check_gpus("e", CUDA, Device.CUDA, find_gpus())
    assert why_not_runnable("e", CUDA) == ""
    smi.install(tmp_path, monkeypatch, [smi.DISPLAY])
    assert why_not_runnable("e", CUDA).startswith("the wheel has no kernels for Quadro K620")


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        ('could not select device driver "" with capabilities: [[gpu]]', "restart the engine"),
        ("nvidia-container-cli: requirement error: unsatisfied condition: cuda>=13.2, please update", "base_image"),
        ("nvidia-container-cli: device error: GPU-5c: unknown device", "nvidia-smi -L"),
        ("nvidia-container-cli: initialization error: nvml error: driver not loaded", "is not loaded"),
        ("nvidia-container-cli: initialization error: load library failed: libnvidia-ml.so.1: cannot", "install it"),
        (
            "Auto-detected mode as 'legacy'\nnvidia-container-cli: mount error: failed to add device rules: unable to"
            " find any existing device filters attached to the cgroup: bpf_prog_query(BPF_CGROUP_DEVICE) failed",
            "no-cgroups=true",
        ),
        ("nvidia-container-cli: initialization error: nvml error: insufficient permissions", "/dev/nvidia*"),
        (
            "Using requested mode 'cdi'\ninvoking the NVIDIA Container Runtime Hook directly (e.g. specifying the"
            " docker --gpus flag) is not supported",
            "mode=legacy",
        ),
        ("CDI device injection failed: unresolvable CDI devices nvidia.com/gpu=0", "nvidia-ctk cdi generate"),
    ],
)
def test_a_refusal_is_told_with_what_to_do(said: str, advice: str) -> None:
    assert advice in advice_on_refusal(said)
    assert "--runtime venv" in advice_on_refusal(said)
    assert advice_on_refusal("the engine has no memory left") == ""


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


@pytest.mark.parametrize(
    ("gpu", "runs"), [("sm_75", True), ("sm_121", True), ("sm_130", True), ("sm_110", False), ("sm_70", False)]
)
def test_ptx_runs_on_everything_from_its_version_on(gpu: str, runs: bool) -> None:
    """As torch.cuda.get_arch_list() tells it of a wheel."""
    assert wheel_runs_on(gpu, ["sm_75", "compute_120"]) is runs


@pytest.mark.parametrize(
    ("gpu", "built_for", "runs"),
    [
        ("sm_90", "sm_90a", True),
        ("sm_103", "sm_100a", False),
        ("sm_120", "compute_90a", False),
        ("sm_103", "sm_100f", True),
        ("sm_103", "compute_100f", True),
        ("sm_120", "compute_100f", False),
    ],
)
def test_kernels_of_one_version_or_one_family_run_nowhere_else(gpu: str, built_for: str, runs: bool) -> None:
    """With `a` they use what that version alone has, with `f` what its major version has."""
    assert wheel_runs_on(gpu, [built_for]) is runs


def test_a_wheel_whose_architectures_nobody_knows_is_no_traceback() -> None:
    with pytest.raises(EnvironmentBuildError, match="no kernels for a card"):
        check_kernels("e", "a card", "sm_90", ["gfx90a"])


@pytest.mark.parametrize(("build", "device"), [("cpu", Device.CPU), ("cu128", Device.CUDA)])
def test_a_cpu_wheel_runs_on_the_cpu_whatever_is_wanted(build: str, device: Device) -> None:
    assert Environment(torch="2.9.0", build=build).runs_on(Device.CUDA) is device
