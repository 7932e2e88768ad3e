"""nvidia-smi is asked for real, by a program on PATH that answers as it does on machines that this one is not."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runtimes.nvidia import smi
from toto_compat.contract.request import Device
from toto_compat.errors import EnvironmentBuildError
from toto_compat.runtimes import nvidia_smi
from toto_compat.runtimes.device import choose_device
from toto_compat.runtimes.nvidia_smi import all_gpus, find_gpus, gpus_left_out, programs_on, visible_gpus

H100, K620 = "GPU-5c89852c-d268-c3f3-1b07-000000000001", smi.DISPLAY["uuid"]


@pytest.fixture(autouse=True)
def ask_anew() -> Iterator[None]:
    smi.forget()
    yield
    smi.forget()


def test_a_gpu_is_known_by_its_uuid_and_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi.install(tmp_path, monkeypatch, smi.ONE)
    (gpu,) = all_gpus()
    assert (gpu.index, gpu.uuid) == ("0", smi.ONE[0]["uuid"])
    assert (gpu.name, gpu.driver, gpu.architecture) == ("NVIDIA H100 80GB HBM3", "580.95.05", "sm_90")
    assert (gpu.memory_mb, gpu.used_mb) == (81559, 4)
    assert choose_device("auto") is Device.CUDA


def test_eight_are_eight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi.install(tmp_path, monkeypatch, smi.EIGHT)
    assert len({gpu.uuid for gpu in find_gpus()}) == 8


def test_a_machine_without_nvidia_smi_has_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert all_gpus() == ()
    assert choose_device("auto") is Device.CPU
    with pytest.raises(EnvironmentBuildError, match="there is no nvidia-smi on PATH"):
        choose_device("cuda")


def test_an_nvidia_smi_that_finds_none_is_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi.install(tmp_path, monkeypatch)
    assert choose_device("auto") is Device.CPU
    with pytest.raises(EnvironmentBuildError, match="nvidia-smi finds no GPU"):
        choose_device("cuda")


@pytest.mark.parametrize(
    ("says", "code", "message", "hint"),
    [
        ("Failed to initialize NVML: Driver/library version mismatch\n", 18, "exit code 18: Failed", "restart"),
        (
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure\n",
            9,
            "exit code 9: NVIDIA-SMI has failed",
            "the driver is not loaded",
        ),
        (
            "Unable to determine the device handle for GPU 0000:41:00.0: Unknown Error\n",
            0,
            "something that is no list of GPUs",
            "fell off the bus",
        ),
        ("", 0, "something that is no list of GPUs: nothing", "shows the same"),
        ("0, GPU-5c89852c, NVIDIA H100\n", 0, "something that is no list of GPUs: 0, GPU-5c89852c", "--device cpu"),
        ("\x00\x7fELF garbage\n", 0, "something that is no list of GPUs", "--device cpu"),
        ("", -11, "exit code", "--device cpu"),
    ],
    ids=["updated driver", "no driver", "lost", "silent", "columns missing", "binary", "crash"],
)
@pytest.mark.parametrize("asked", ["auto", "cuda"])
def test_no_answer_is_an_error_and_never_a_cpu_run(
    *, asked: str, says: str, code: int, message: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi.install(tmp_path, monkeypatch, says=says, code=code)
    with pytest.raises(EnvironmentBuildError, match=message) as caught:
        choose_device(asked)
    assert hint in caught.value.hint
    assert choose_device("cpu") is Device.CPU


def test_one_that_hangs_is_given_up_and_is_not_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia_smi, "ANSWER_SECONDS", 0.2)
    program = smi.install(tmp_path, monkeypatch, hangs=True)
    with pytest.raises(EnvironmentBuildError, match="does not answer within") as caught:
        choose_device("auto")
    assert "nvidia-smi -pm 1" in caught.value.hint
    program.unlink()
    with pytest.raises(EnvironmentBuildError, match="does not answer within"):
        find_gpus()


def test_a_driver_that_does_not_know_architectures_still_tells_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = smi.gpu(driver_version="470.256.02")
    smi.install(tmp_path, monkeypatch, [old], unknown_fields=["compute_cap"])
    assert [(gpu.driver, gpu.architecture) for gpu in all_gpus()] == [("470.256.02", "")]


def test_a_split_gpu_is_its_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi.install(tmp_path, monkeypatch, smi.SPLIT)
    first, second = all_gpus()
    assert (first.index, first.uuid) == ("0:0", "MIG-c7384736-a75d-5afc-978f-d2f1294409fd")
    assert (second.index, second.name) == ("0:1", "NVIDIA A100-SXM4-40GB MIG 3g.20gb")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", second.uuid)
    assert find_gpus() == (second,)


def test_a_split_gpu_without_slices_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi.install(tmp_path, monkeypatch, [{**smi.SPLIT[0], "slices": []}])
    assert find_gpus() == ()


# --- which of them are used -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        (None, "01234567"),
        ("3", "3"),
        ("5,2", "52"),
        ("GPU-5c89852c-d268-c3f3-1b07-000000000006", "6"),
        ("", ""),
        ("-1", ""),
    ],
)
def test_the_users_own_choice_is_kept_in_its_order(
    visible: str | None, indices: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi.install(tmp_path, monkeypatch, smi.EIGHT)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert "".join(gpu.index for gpu in visible_gpus()) == indices


def test_hidden_gpus_are_named_as_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi.install(tmp_path, monkeypatch, smi.ONE)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert choose_device("auto") is Device.CPU
    with pytest.raises(EnvironmentBuildError, match="hides every GPU"):
        choose_device("cuda")


@pytest.mark.parametrize("visible", ["8", "GPU-5c8", "first", "MIG-1"])
def test_a_choice_that_names_no_gpu_or_several_is_an_error(
    visible: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi.install(tmp_path, monkeypatch, smi.EIGHT)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(EnvironmentBuildError, match="names no GPU of this machine"):
        find_gpus()


def test_a_number_is_ambiguous_where_cuda_counts_in_another_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi.install(tmp_path, monkeypatch, smi.TWO_GENERATIONS)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(EnvironmentBuildError, match="does not say which GPU") as caught:
        find_gpus()
    assert H100 in caught.value.hint
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert [gpu.uuid for gpu in find_gpus()] == [K620]


def test_of_two_generations_the_newer_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi.install(tmp_path, monkeypatch, smi.TWO_GENERATIONS)
    assert [gpu.uuid for gpu in find_gpus()] == [H100]
    assert [gpu.uuid for gpu in gpus_left_out()] == [K620]


def test_programs_on_a_gpu_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    busy = smi.process(smi.EIGHT[1], pid=4711, name="/usr/bin/python3", memory=21504)
    smi.install(tmp_path, monkeypatch, smi.EIGHT, processes=[busy])
    gpus = all_gpus()
    assert programs_on(gpus) == {gpus[1]: ["python3 (pid 4711, 21504 MB)"]}
