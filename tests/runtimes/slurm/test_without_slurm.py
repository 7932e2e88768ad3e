"""What can be said about runs on Slurm where there is none."""

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.runtimes.stub_runtime import MATRIX_TEXT
from toto_compat.cli import cli
from toto_compat.errors import EnvironmentBuildError, SelectionError
from toto_compat.runtimes.slurm.cluster import QueuedJob, SlurmError, check_folder


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "matrix.yaml").write_text(MATRIX_TEXT, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOTO_COMPAT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    return tmp_path


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments)


def test_a_machine_without_slurm_says_what_is_missing_and_submits_nothing() -> None:
    result = call("matrix", "--executor", "slurm", "--device", "cpu", "torch-2.13.0-cpu/*")
    assert isinstance(result.exception, SlurmError)
    assert "there is no Slurm here" in str(result.exception)
    assert "did not take it" not in result.stderr  # nothing was asked for, so there is nothing to cancel


def test_cells_on_a_gpu_that_nobody_asks_for_are_not_submitted() -> None:
    result = call("matrix", "--executor", "slurm", "torch-2.9.0-cu128/*")
    assert isinstance(result.exception, EnvironmentBuildError)
    assert "slurm.gres" in str(result.exception)
    assert "cannot run" in result.stderr


def test_the_plan_of_a_run_on_slurm_says_how_many_at_a_time() -> None:
    result = call("matrix", "--executor", "slurm", "--device", "cpu", "--jobs", "7", "--dry-run")
    assert "7 at a time" in result.stderr


@pytest.mark.parametrize("arguments", [["--detach"], ["--executor", "slurm", "--runtime", "here"]], ids=" ".join)
def test_what_does_not_go_together_is_refused(arguments: list[str]) -> None:
    assert call("matrix", *arguments).exit_code == 2


@pytest.mark.parametrize("command", ["status", "cancel"])
def test_a_run_that_was_not_on_slurm_is_told_as_that(command: str, project: Path) -> None:
    local = project / "results" / "one"
    local.mkdir(parents=True)
    source = Path(__file__).parents[3] / "results/reference/cpu/run.json"
    (local / "run.json").write_bytes(source.read_bytes())
    result = call(command, "one")
    assert isinstance(result.exception, SelectionError)
    assert "not a run on Slurm" in str(result.exception)


@pytest.mark.parametrize("folder", ["/a/%j", "/a/$(id)", "/a/b'c", "/a/b\nc", "/a\n", "/a;b"])
def test_a_folder_whose_name_means_something_to_slurm_or_a_shell_is_refused(folder: str) -> None:
    with pytest.raises(SlurmError, match="--results"):
        check_folder(Path(folder))


@pytest.mark.parametrize(
    ("job", "is_coming"),
    [
        (QueuedJob("PENDING", reason="Resources"), True),
        (QueuedJob("RUNNING", "n1"), True),
        (QueuedJob("REQUEUED"), True),
        (QueuedJob("PENDING", reason="BeginTime"), True),  # put back after its node failed
        (QueuedJob("PENDING", reason="launch failed requeued held"), False),  # for ever, unless somebody releases it
        (QueuedJob("PENDING", reason="launch_failed_requeued_held"), False),
        (QueuedJob("PENDING", reason="user env retrieval failed requeued held"), False),
        (QueuedJob("PENDING", reason="job requeued in held state"), False),
        (QueuedJob("PENDING", reason="job_requeued_in_special_exit_state"), False),
        (QueuedJob("PENDING", reason="JobHoldMaxRequeue"), False),
        (QueuedJob("PENDING", reason="JobHeldAdmin"), False),
        (QueuedJob("REQUEUE_HOLD"), False),
        (QueuedJob("SPECIAL_EXIT"), False),
        (QueuedJob("PENDING", reason="JobHeldUser"), True),  # who holds a job of theirs means to release it
        (QueuedJob("RUNNING", "n1", reason="JobHeldUser"), True),
        (QueuedJob("NODE_FAIL"), False),
        (QueuedJob("COMPLETED"), False),
        (QueuedJob("OUT_OF_MEMORY"), False),
        (QueuedJob("REVOKED"), False),
        (QueuedJob("EXPEDITING"), True),  # of a Slurm later than any that this was written for
    ],
    ids=str,
)
def test_a_job_is_waited_for_as_long_as_it_can_bring_a_result(job: QueuedJob, is_coming: bool) -> None:
    assert job.is_coming is is_coming
