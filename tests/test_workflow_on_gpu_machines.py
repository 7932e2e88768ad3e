"""The first command on a GPU machine: what a first-time user reads, with nvidia-smi a program that answers as told."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.runtimes.nvidia import smi
from toto_compat.cli import cli
from toto_compat.errors import EnvironmentBuildError, ExitCode, TotoCompatError
from toto_compat.runtimes import nvidia_smi

MATRIX = Path(__file__).parents[1] / "matrix.yaml"
PRODUCTION, NEWEST = "torch-2.9.0-cu128", "torch-2.15.0-cu132"
RTX_5090 = smi.gpu(0, "NVIDIA GeForce RTX 5090", "12.0", driver_version="570.86.16")


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TOTO_COMPAT_CACHE", str(tmp_path / "cache"))
    yield
    smi.forget()


def plan(*arguments: str) -> str:
    """What `toto-compat matrix --dry-run` prints, in virtualenvs; an error as the command line prints it."""
    words = ["matrix", "--dry-run", "--runtime", "venv", "--matrix", str(MATRIX), *arguments]
    done = CliRunner().invoke(cli, words)
    if isinstance(done.exception, TotoCompatError):
        raise done.exception
    assert done.exit_code == ExitCode.OK, done.output
    return done.output


def environments(text: str) -> list[str]:
    lines = [line for line in text.splitlines() if line.startswith("  torch-") and "to run" in line]
    return [line.split()[0] for line in lines]


def test_one_gpu_gets_production_and_the_newest_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi.install(tmp_path, monkeypatch, smi.ONE)
    text = plan()
    assert environments(text) == [PRODUCTION, NEWEST]
    assert "device cuda, 1 at a time" in text
    assert "is not in the default plan" not in text


def test_productions_own_card_reads_nothing_of_releases_that_nobody_would_run_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wheels before 2.8 have no kernels for it, and none of them would have been in the plan."""
    smi.install(tmp_path, monkeypatch, [{**RTX_5090, "driver_version": "580.95.05"}])
    assert environments(text := plan()) == [PRODUCTION, NEWEST]
    assert "is not in the default plan" not in text


def test_eight_gpus_run_eight_cells_at_a_time_and_three_of_them_three(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi.install(tmp_path, monkeypatch, smi.EIGHT)
    assert "device cuda, 8 at a time" in plan()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,5,6")
    assert "device cuda, 3 at a time" in plan()


def test_an_old_driver_gets_what_it_can_run_and_reads_what_it_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi.install(tmp_path, monkeypatch, [RTX_5090])
    text = plan()
    assert environments(text) == [PRODUCTION, "torch-2.10.0-cu128"], "the newest of CUDA 12"
    assert f"{NEWEST} is not in the default plan: driver 570.86.16 is too old for cu132: CUDA 13 needs 580" in text
    assert "torch-2.7.0-cu126 is not" not in text


def test_a_driver_too_old_for_everything_is_one_error_with_every_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = smi.gpu(driver_version="470.256.02")
    smi.install(tmp_path, monkeypatch, [old], unknown_fields=["compute_cap"])
    with pytest.raises(EnvironmentBuildError, match="no cuda environment of the matrix runs on this machine") as caught:
        plan()
    assert f"{PRODUCTION}: driver 470.256.02 is too old for cu128: CUDA 12 needs 525" in caught.value.message
    assert "update the driver" in caught.value.hint
    assert "device cpu" in plan("--device", "cpu")


def test_a_card_too_old_for_production_gets_the_release_that_has_its_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi.install(tmp_path, monkeypatch, [smi.gpu(0, "NVIDIA GeForce GTX 1080", "6.1")])
    text = plan()
    assert environments(text) == ["torch-2.7.0-cu126"]
    assert f"{PRODUCTION} is not in the default plan: the wheel has no kernels for NVIDIA GeForce GTX 1080" in text


def test_a_card_too_new_for_every_release_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi.install(tmp_path, monkeypatch, [smi.gpu(0, "NVIDIA R100", "13.0")])
    with pytest.raises(EnvironmentBuildError, match=r"no kernels for NVIDIA R100 \(sm_130\)"):
        plan()


def test_a_card_that_a_named_environment_cannot_use_is_in_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi.install(tmp_path, monkeypatch, [RTX_5090])
    text = plan(NEWEST)
    assert "cannot" in text
    assert "update the NVIDIA driver to 580 or later" in text


def test_a_busy_card_is_named_with_who_is_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_it = smi.process(smi.ONE[0], pid=4711, name="/usr/bin/train", memory=21504)
    smi.install(tmp_path, monkeypatch, smi.ONE, processes=[on_it])
    assert "is busy: train (pid 4711, 21504 MB); timings beside it are INCONCLUSIVE, end it first" in plan()


def test_a_full_card_is_an_obstacle_before_anything_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi.install(tmp_path, monkeypatch, [{**smi.gpu(), "memory.used": "80000"}])
    assert "has 1559 of 81559 MB free and a cell needs about" in plan()


def test_slices_are_used_one_cell_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi.install(tmp_path, monkeypatch, smi.SPLIT)
    assert "device cuda, 2 at a time" in plan()


def test_a_display_card_beside_is_left_out_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi.install(tmp_path, monkeypatch, smi.TWO_GENERATIONS)
    text = plan()
    assert environments(text) == [PRODUCTION, NEWEST]
    assert "GPU 0 (Quadro K620) is left out: the cells of a run are on one kind of GPU" in text


def test_a_machine_that_has_nvidia_smi_and_runs_on_the_cpu_reads_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi.install(tmp_path, monkeypatch)
    assert "no GPU is used: nvidia-smi finds no GPU" in plan()
    assert "no GPU is used" not in plan("--device", "cpu")
    smi.install(tmp_path, monkeypatch, smi.ONE)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert "no GPU is used: CUDA_VISIBLE_DEVICES='-1' hides every GPU" in plan()
    smi.install(tmp_path, monkeypatch, [{**smi.SPLIT[0], "slices": []}])
    assert "no GPU is used: GPU 0 (NVIDIA A100-SXM4-40GB) is split by MIG and has no slice; `nvidia-smi mig" in plan()


@pytest.mark.parametrize("visible", [None, "9"])
def test_what_the_login_node_of_a_cluster_says_of_gpus_keeps_nobody_from_its_nodes(
    visible: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi.install(tmp_path, monkeypatch, smi.ONE if visible else (), says=None if visible else "no driver\n", code=9)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert "device cuda" in plan("--executor", "slurm")


def test_a_driver_that_hangs_is_an_error_and_no_cpu_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia_smi, "ANSWER_SECONDS", 0.2)
    smi.install(tmp_path, monkeypatch, hangs=True)
    with pytest.raises(EnvironmentBuildError, match="nvidia-smi does not answer") as caught:
        plan()
    assert caught.value.code is ExitCode.ENVIRONMENT
    assert "device cpu" in plan("--device", "cpu")
