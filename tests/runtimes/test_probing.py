"""A probe that does not come out well is an error of the environment that names the check and what to change."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from toto_compat.contract.request import Device, Environment, Limits
from toto_compat.errors import EnvironmentBuildError
from toto_compat.runtimes import probe, probing
from toto_compat.runtimes.cell_process import ProcessEnd
from toto_compat.runtimes.nvidia_smi import Gpu
from toto_compat.runtimes.probing import (
    Answer,
    Probed,
    blame_probe,
    check_answer,
    probe_record,
    probed_once,
    read_answer,
)

CPU = Environment(torch="2.13.0", build="cpu")
CUDA = Environment(torch="2.13.0", build="cu130")


def answer_of(failed: dict[str, str] | None = None, **torch: Any) -> Answer:
    build = {"version": "2.13.0+cpu", "cuda": None, "architectures": [], "cuda_available": False, **torch}
    return Answer(ok={"torch": build}, failed=failed or {})


@pytest.mark.parametrize("runtime", ["docker", "venv"])
def test_a_probe_that_worked_says_nothing(runtime: str) -> None:
    check_answer("e", CPU, Device.CPU, answer_of(), runtime=runtime)


@pytest.mark.parametrize(
    ("runtime", "error", "advice"),
    [
        ("docker", "ImportError: failed to map segment from shared object", "not executable"),
        ("docker", "OSError: [Errno 28] No space left on device", "limits.tmp"),
        ("docker", "RuntimeError: can't start new thread", "limits.pids"),
        ("docker", "RuntimeError: unable to open shared memory object", "limits.shm"),
        ("docker", "ValueError: something new", "toto-compat shell e --runtime docker"),
        ("venv", "OSError: [Errno 28] No space left on device", "TOTO_COMPAT_CACHE"),
        ("venv", "InductorError: InvalidCxxCompiler: No working C++ compiler found", "apt-get install g++"),
        ("venv", "CppCompileError: fatal error: Python.h: No such file or directory", "headers"),
        ("venv", "ValueError: something new", "toto-compat shell e --runtime venv"),
    ],
)
def test_a_failed_check_is_named_with_what_to_change(runtime: str, error: str, advice: str) -> None:
    with pytest.raises(EnvironmentBuildError, match="the check 'compiled kernel' fails") as caught:
        check_answer("e", CPU, Device.CPU, answer_of({"compiled_kernel": error}), runtime=runtime)
    assert advice in caught.value.hint


@pytest.mark.parametrize(("runtime", "fix"), [("docker", "images build --rebuild"), ("venv", "toto-compat prune")])
def test_another_torch_than_the_locked_one_is_noticed(runtime: str, fix: str) -> None:
    with pytest.raises(EnvironmentBuildError, match=r"its torch is 2\.12\.0") as caught:
        check_answer("e", CPU, Device.CPU, answer_of(version="2.12.0"), runtime=runtime)
    assert fix in caught.value.hint


def test_a_gpu_handed_out_but_not_seen_is_no_fault_of_a_cache() -> None:
    with pytest.raises(EnvironmentBuildError, match="sees no GPU"):
        check_answer("e", CUDA, Device.CUDA, answer_of(version="2.13.0", cuda="13.0"), runtime="docker")


def test_a_gpu_without_kernels_in_the_wheel_is_no_fault_of_a_cache() -> None:
    seen: dict[str, Any] = {
        "cuda_available": True,
        "architectures": ["sm_90"],
        "gpus": [{"name": "H100", "architecture": "sm_90"}, {"name": "RTX 5090", "architecture": "sm_120"}],
    }
    # a kernel that fails is what follows from it, and not what is told
    answer = answer_of({"compiled_kernel": "no kernel image is available"}, version="2.13.0", **seen)
    with pytest.raises(EnvironmentBuildError, match="no kernels for RTX 5090") as caught:
        check_answer("e", CUDA, Device.CUDA, answer, runtime="venv")
    assert "says nothing about any cache" in caught.value.hint


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", "nvidia-smi -c DEFAULT"),
        ("CUDA error: uncorrectable ECC error encountered", "restart the machine"),
        ("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate", "end other programs on it"),
    ],
)
@pytest.mark.parametrize("runtime", ["docker", "venv"])
def test_a_gpu_in_trouble_is_told_with_what_to_do(runtime: str, error: str, advice: str) -> None:
    seen: dict[str, Any] = {"cuda_available": True, "architectures": [], "gpus": []}
    answer = answer_of({"captured_graph": error}, version="2.13.0", **seen)
    with pytest.raises(EnvironmentBuildError, match="the check 'captured graph' fails") as caught:
        check_answer("e", CUDA, Device.CUDA, answer, runtime=runtime)
    assert advice in caught.value.hint


def test_a_probe_of_a_gpu_counts_until_card_or_driver_change(monkeypatch: pytest.MonkeyPatch) -> None:
    def record(**changes: Any) -> Path:
        gpu = replace(Gpu("0", "H100", "580.95", "sm_90", "GPU-0", memory_mb=81559, used_mb=4), **changes)
        monkeypatch.setattr(probing, "find_gpus", lambda: (gpu,))
        return probe_record(["image"], Device.CUDA, Limits())

    assert record(used_mb=9000) == record()
    assert record(driver="590.10") != record()
    assert record(uuid="GPU-1") != record()


@pytest.mark.parametrize(
    ("end", "says"),
    [
        (ProcessEnd(137, over_memory=True), "ran out of memory at 8g"),
        (ProcessEnd(137, timed_out=True), "did not finish"),
        (ProcessEnd(130, stopped=True), "was stopped"),
        (ProcessEnd(127, last_lines=("no such file",)), "no such file"),
    ],
)
def test_a_probe_without_an_answer_is_blamed_on_what_ended_it(end: ProcessEnd, says: str) -> None:
    assert says in blame_probe("e", end, Limits(), runtime="docker").message


def test_what_was_probed_is_not_probed_again_until_something_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOTO_COMPAT_CACHE", str(tmp_path))
    probes: list[Probed] = []

    def probe_it() -> Probed:
        probes.append(Probed(answer=answer_of(), copied=True))
        return probes[-1]

    record = probe_record(["image"], Device.CPU, Limits())
    assert probed_once(record, probe_it) == probed_once(record, probe_it)
    assert len(probes) == 1
    others = (
        probe_record(["another image"], Device.CPU, Limits()),
        probe_record(["image"], Device.CUDA, Limits()),
        probe_record(["image"], Device.CPU, Limits(memory="4g")),
    )
    assert len({record, *others}) == 4


def test_a_failed_probe_is_tried_again(tmp_path: Path) -> None:
    def fail() -> Probed:
        raise EnvironmentBuildError("no compiler")

    with pytest.raises(EnvironmentBuildError):
        probed_once(tmp_path / "record.json", fail)
    repaired = Probed(answer=answer_of())
    assert probed_once(tmp_path / "record.json", lambda: repaired) == repaired


@pytest.mark.parametrize("left", ["{ not json", "[]", '{"ok": 3}'])
def test_a_damaged_record_or_answer_is_none(tmp_path: Path, left: str) -> None:
    path = tmp_path / "answer.json"
    path.write_text(left)
    assert read_answer(path) is None
    probed = Probed(answer=answer_of())
    assert probed_once(path, lambda: probed) == probed


def test_every_check_is_tried_and_none_stops_the_others(tmp_path: Path) -> None:
    """The probe itself, by an interpreter without torch."""
    (tmp_path / probe.NONCE_FILE).write_text("42")
    command = [sys.executable, "-I", probe.__file__, probe.ANSWER_FILE, "torch", "compiled_kernel", "nonce"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    answer = read_answer(tmp_path / probe.ANSWER_FILE)
    assert answer is not None
    assert answer.ok == {"nonce": "42"}
    assert set(answer.failed) == {"torch", "compiled_kernel"}
    assert "No module named 'torch'" in answer.failed["torch"]
