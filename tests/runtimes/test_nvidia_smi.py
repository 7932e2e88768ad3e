"""nvidia-smi is asked for real, by a program on PATH that answers as it does on machines that this one is not."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runtimes.nvidia import smi
from toto_compat.contract.request import Device
from toto_compat.errors import EnvironmentBuildError
from toto_compat.runtimes import nvidia_smi
from toto_compat.runtimes.device import choose_device
from toto_compat.runtimes.gpu import gpu_notes
from toto_compat.runtimes.nvidia_smi import all_gpus, find_gpus, gpus_left_out, programs_on, visible_gpus, why_none

ROW = f"0, {smi.ONE[0]['uuid']}, NVIDIA H100, 580.95.05, 81559, 4, Disabled, 9.0\n"
HANDLE = "Unable to determine the device handle for GPU1: 0000:41:00.0: Unknown Error"
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
    smi.without_devices(tmp_path, monkeypatch)
    assert all_gpus() == ()
    assert choose_device("auto") is Device.CPU
    with pytest.raises(EnvironmentBuildError, match="there is no nvidia-smi on PATH"):
        choose_device("cuda")


def test_a_gpu_without_nvidia_smi_is_an_error_and_never_a_cpu_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container that got the GPU and not NVIDIA's utilities."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(nvidia_smi, "_DEVICES", tmp_path)
    (tmp_path / "nvidia0").touch()
    for asked in ("auto", "cuda"):
        with pytest.raises(EnvironmentBuildError, match=r"there is a GPU \(.*nvidia0\) and no nvidia-smi") as caught:
            choose_device(asked)
        assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in caught.value.hint
    assert choose_device("cpu") is Device.CPU


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
        (f"{ROW}1, GPU-5c89852c-d268", 0, "no list of GPUs: 1, GPU-5c89852c-d268", "--device cpu"),
        (f"{ROW}{HANDLE}\n", 0, f"no list of GPUs: {HANDLE}", "fell off the bus"),
        (f"{ROW}{HANDLE}\n", 15, f"exit code 15: {HANDLE}", "fell off the bus"),
        (f"No devices were found\n{ROW}", 0, "no list of GPUs: No devices were found", "--device cpu"),
        ("Failed to initialize NVML: Unknown Error\n", 255, "exit code 255", "start it anew"),
        ("NVIDIA-SMI couldn't find libnvidia-ml.so library in your system\n", 12, "exit code 12", "install the driver"),
        ("x" * 200_000, 0, "no list of GPUs: xxx", "--device cpu"),
    ],
    ids=[
        *("updated driver", "no driver", "lost", "silent", "columns missing", "binary", "crash", "cut off"),
        *("one lost after one that is not", "one lost, by exit code", "none, and one", "lost container", "no library"),
        "a long line",
    ],
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


@pytest.mark.parametrize("dead", ["[GPU is lost]", "[Unknown Error]", "[GPU requires reset]", "ERR!"])
def test_a_gpu_that_is_listed_and_does_not_work_is_named_with_the_way_round_it(
    dead: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = {**smi.gpu(1), "memory.total": dead, "memory.used": dead}
    smi.install(tmp_path, monkeypatch, [smi.gpu(0), lost])
    with pytest.raises(EnvironmentBuildError, match=r"GPU 1 \(NVIDIA H100 80GB HBM3, GPU-.*\) does not work") as caught:
        choose_device("auto")
    assert dead in caught.value.message
    assert f"CUDA_VISIBLE_DEVICES={smi.gpu(0)['uuid']};" in caught.value.hint
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert [gpu.index for gpu in find_gpus()] == ["0"], "one that is not in use vetoes nothing"


@pytest.mark.parametrize("code", [0, 14])
def test_a_warning_beside_the_list_keeps_nobody_from_it(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A corrupted infoROM: the GPU computes as any other, the program ends with an exit code of its own."""
    warned = f"\n{ROW}WARNING: infoROM is corrupted at gpu 0000:01:00.0\n"
    smi.install(tmp_path, monkeypatch, says=warned, code=code)
    assert [gpu.index for gpu in find_gpus()] == ["0"]


@pytest.mark.parametrize("odd", ["8\u00b2", "9" * 5000, "[N/A]", "81.559", "81559 MiB", "-1"])
def test_what_is_no_number_is_not_known_and_no_traceback(
    odd: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi.install(tmp_path, monkeypatch, [{**smi.gpu(), "memory.total": odd, "memory.used": odd}])
    assert [(gpu.memory_mb, gpu.used_mb, gpu.is_full) for gpu in find_gpus()] == [(0, 0, False)]


def test_a_gpu_that_is_listed_twice_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi.install(tmp_path, monkeypatch, [smi.gpu(), smi.gpu()])
    assert len(find_gpus()) == 1


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


@pytest.mark.parametrize("visible", ["0", str(smi.SPLIT[0]["uuid"]), str(smi.SPLIT[0]["uuid"])[:12]])
@pytest.mark.parametrize("size", ["3g.20gb", "1g.5gb"], ids=["alike", "of two sizes"])
def test_of_a_split_gpu_that_is_named_whole_the_first_slice_is_taken_as_cuda_does(
    visible: str, size: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slices = [("3g.20gb", "MIG-1"), (size, "MIG-2")]
    smi.install(tmp_path, monkeypatch, [{**smi.SPLIT[0], "slices": slices}])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.uuid for gpu in find_gpus()] == ["MIG-1"]


def test_a_split_gpu_without_slices_is_none_and_says_what_makes_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = {**smi.SPLIT[0], "slices": []}
    smi.install(tmp_path, monkeypatch, [without])
    assert find_gpus() == ()
    assert why_none() == (
        "GPU 0 (NVIDIA A100-SXM4-40GB) is split by MIG and has no slice; `nvidia-smi mig -i 0 -cgi 0 -C` makes one of"
        " all of it, `nvidia-smi -i 0 -mig 0` ends the split"
    )
    smi.install(tmp_path, monkeypatch, [without, smi.gpu(1)])
    assert [gpu.index for gpu in find_gpus()] == ["1"]
    assert any("is split by MIG and has no slice" in note for note in gpu_notes())


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
        ("2,-1,1", "2"),
        ("2,", "2"),
        ("3,3", "3"),
        ("3,GPU-5c89852c-d268-c3f3-1b07-000000000003", "3"),
        ("03", "3"),
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


@pytest.mark.parametrize(
    ("visible", "named"),
    [("8", "no GPU"), ("GPU-5c8", "8 GPUs"), ("first", "no GPU"), ("MIG-1", "no GPU"), ("1,9", "no GPU")],
)
def test_a_choice_that_names_no_gpu_or_several_is_an_error(
    visible: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi.install(tmp_path, monkeypatch, smi.EIGHT)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(EnvironmentBuildError, match=f"names {named} of this machine"):
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


def test_of_slices_the_largest_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slices = [("1g.5gb", "MIG-1"), ("3g.20gb", "MIG-2"), ("1c.3g.20gb", "MIG-3")]
    smi.install(tmp_path, monkeypatch, [{**smi.SPLIT[0], "slices": slices}])
    assert [gpu.uuid for gpu in find_gpus()] == ["MIG-2"]


def test_a_newer_card_that_is_too_small_for_any_cell_does_not_keep_a_run_from_the_larger_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = smi.gpu(0, "NVIDIA T400", "7.5", **{"memory.total": "2048"})
    smi.install(tmp_path, monkeypatch, [small, smi.gpu(1, "Tesla V100", "7.0")])
    assert [gpu.name for gpu in find_gpus()] == ["Tesla V100"]


def test_of_eight_one_that_others_have_filled_is_left_out_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = [*smi.EIGHT[:3], {**smi.gpu(3), "memory.used": "80000"}, *smi.EIGHT[4:]]
    smi.install(tmp_path, monkeypatch, gpus)
    assert "".join(gpu.index for gpu in find_gpus()) == "0124567"
    assert [gpu.index for gpu in gpus_left_out()] == ["3"]


def test_a_programs_name_for_itself_is_shown_and_not_obeyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = smi.process(smi.ONE[0], pid=7, name="/opt/train --sizes 1,2\x1b[2J", memory=5)
    smi.install(tmp_path, monkeypatch, smi.ONE, processes=[odd])
    [[told]] = programs_on(all_gpus()).values()
    assert told == "train --sizes 1, 2 (pid 7, 5 MB)"


def test_programs_on_a_gpu_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    busy = smi.process(smi.EIGHT[1], pid=4711, name="/usr/bin/python3", memory=21504)
    smi.install(tmp_path, monkeypatch, smi.EIGHT, processes=[busy])
    gpus = all_gpus()
    assert programs_on(gpus) == {gpus[1]: ["python3 (pid 4711, 21504 MB)"]}
