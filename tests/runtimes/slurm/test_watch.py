"""Runs on Slurm taken up and ended: no job is lost or run twice, whatever becomes of whoever submits."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtimes.slurm.emulated import ROOT
from tests.runtimes.slurm.small_slurm import TWO_ARRAYS, SmallSlurm
from tests.runtimes.stub_runtime import MATRIX_TEXT
from toto_compat.errors import ExitCode, SelectionError, StorageError
from toto_compat.evidence.store import claimed_run, load_run
from toto_compat.runtimes.slurm.cluster import SlurmError

ONE_ARRAY = TWO_ARRAYS.replace("partition: b", "partition: a")


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SmallSlurm:
    return SmallSlurm(tmp_path, monkeypatch)


def kill_at(slurm: SmallSlurm, moment: str) -> SmallSlurm:
    """Begin a run of one array whose runner is killed by sbatch."""
    slurm.configure(ONE_ARRAY, MATRIX_TEXT.replace(", equivalence", ""))  # no references, which are an array too
    slurm.order(moment)
    words = ["matrix", "--executor", "slurm", "--device", "cpu", "--run", "one", "torch-2.13.0-cpu/*"]
    variables = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-m", "toto_compat.cli", *words], env=variables, check=False)
    assert done.returncode == -signal.SIGKILL
    (slurm.folder / moment).unlink()
    return slurm


@pytest.fixture
def killed(slurm: SmallSlurm) -> SmallSlurm:
    """A run whose runner is killed right after sbatch has taken its array, before it could write that down."""
    return kill_at(slurm, "kill_whoever_submits")


def jobs_of(slurm: SmallSlurm) -> list[str]:
    return [job for task in slurm.submitted.tasks for job in task.jobs]


# --- whoever submits is stopped ---------------------------------------------------------------------------------------


def test_what_was_taken_before_an_array_was_refused_is_cancelled_and_known(slurm: SmallSlurm) -> None:
    slurm.order("refuse_from", "2")  # references and cells of one release are taken, those of the other are not
    result = slurm.submit()
    assert isinstance(result.exception, SlurmError)
    assert len(slurm.scripts) == 2
    assert sorted(slurm.lines("cancelled")) == sorted(slurm.queued) == sorted(jobs_of(slurm))
    assert slurm.submitted.cancelled


def test_jobs_of_a_runner_that_was_killed_before_it_knew_them_are_taken_over(killed: SmallSlurm) -> None:
    assert jobs_of(killed) == []
    killed.watch().submit_rest()
    assert jobs_of(killed) == killed.queued == ["201_0", "201_1"]  # and none was submitted a second time
    # what the killed one did not come to: without it a job finds nothing to do
    assert all((killed.exchange.jobs / f"{job}_submitted.pkl").exists() for job in killed.queued)


def test_what_slurm_had_not_taken_when_the_runner_was_killed_is_submitted_once(slurm: SmallSlurm) -> None:
    kill_at(slurm, "kill_before_it_is_taken").watch().submit_rest()
    assert jobs_of(slurm) == slurm.queued == ["201_0", "201_1"]
    assert slurm.submitted.unanswered is None


def test_jobs_of_a_killed_runner_are_cancelled_too(killed: SmallSlurm) -> None:
    result = killed.call("cancel", "one")
    assert result.exit_code == ExitCode.OK, result.output
    assert killed.lines("cancelled") == killed.queued


def test_a_run_of_the_same_name_does_not_begin_beside_the_jobs_of_a_killed_runner(killed: SmallSlurm) -> None:
    assert isinstance(killed.submit().exception, SelectionError)


def test_nothing_is_submitted_while_nobody_knows_what_was_taken(killed: SmallSlurm) -> None:
    killed.order("silent")
    with pytest.raises(SlurmError, match="is not known"):
        killed.watch().submit_rest()
    assert len(killed.scripts) == 1


# --- two at once ------------------------------------------------------------------------------------------------------


def test_a_run_that_somebody_else_takes_in_is_only_looked_at(slurm: SmallSlurm) -> None:
    slurm.submit()
    slurm.leave_all_results()
    with claimed_run(slurm.run.parent, "one", ""):
        asked = slurm.call("status", "one")
        assert asked.exit_code == ExitCode.OK, asked.output
        assert "its runner is there" in asked.output
        assert load_run(slurm.run).cells == ()
        assert isinstance(slurm.call("status", "one", "--wait").exception, StorageError)
        before = (slurm.exchange.folder / "submitted.json").read_bytes()
        assert slurm.call("cancel", "one").exit_code == ExitCode.OK
        assert (slurm.exchange.folder / "submitted.json").read_bytes() == before
    slurm.call("status", "one")
    assert len(load_run(slurm.run).cells) == 4


def test_a_result_that_is_gone_before_it_is_put_aside_is_no_error(slurm: SmallSlurm) -> None:
    slurm.submit()
    path = slurm.leave_result(slurm.submitted.cells[0].number)
    path.write_text("{")

    class Quicker(list[str]):
        def append(self, _: str) -> None:
            path.unlink(missing_ok=True)

    slurm.watch(Quicker()).look(retry=False)
    assert not path.with_suffix(".unusable").exists()


# --- tries ------------------------------------------------------------------------------------------------------------


def test_a_retry_that_slurm_refuses_is_a_try_and_not_the_first_of_endless_ones(slurm: SmallSlurm) -> None:
    slurm.submit()
    slurm.end_jobs()
    slurm.order("refuse_from", "0")
    slurm.watch().to_the_end()
    failures = [cell.failure for cell in load_run(slurm.run).cells]
    assert [failure.kind if failure else "" for failure in failures] == ["crash"] * 4
    assert all("Slurm refused 1 more" in failure.message for failure in failures if failure)
    assert all("not this one" in failure.message for failure in failures if failure)


# --- what an earlier run left -----------------------------------------------------------------------------------------


def test_a_link_in_the_place_of_the_exchange_is_not_followed(slurm: SmallSlurm, tmp_path: Path) -> None:
    (tmp_path / "old" / "results").mkdir(parents=True)
    slurm.run.mkdir(parents=True)
    (slurm.run / "slurm").symlink_to(tmp_path / "old")
    result = slurm.submit("--fresh")
    assert isinstance(result.exception, StorageError)
    assert "a link" in str(result.exception)
    assert slurm.scripts == []


def test_a_result_of_an_earlier_run_is_not_taken_for_this_ones(slurm: SmallSlurm) -> None:
    slurm.submit()
    said: list[str] = []
    number = slurm.submitted.cells[0].number
    slurm.leave_result(number, nonce="0" * 32)
    watch = slurm.watch(said)
    watch.look(retry=False)
    assert number in {task.number for task in watch.waiting_for}
    assert any("it is of an earlier run" in line for line in said)


# --- layouts ----------------------------------------------------------------------------------------------------------


def test_a_list_of_jobs_of_a_later_version_is_refused_by_name(slurm: SmallSlurm) -> None:
    slurm.submit()
    slurm.change_submitted('"schema": 2', '"schema": 7')
    assert "a later version of toto-compat (layout 7" in str(slurm.call("status", "one").exception)


def test_a_result_of_a_later_version_is_refused_by_name_and_stays(slurm: SmallSlurm) -> None:
    slurm.submit()
    path = slurm.leave_result(slurm.submitted.cells[0].number)
    path.write_text(path.read_text().replace('"schema": 2', '"schema": 7', 1))
    assert "a later version of toto-compat (layout 7" in str(slurm.call("status", "one").exception)
    assert path.exists()


# --- Slurm's commands -------------------------------------------------------------------------------------------------


def test_cancel_that_slurm_does_not_take_ends_with_its_exit_code(slurm: SmallSlurm) -> None:
    slurm.submit()
    slurm.order("silent")
    assert slurm.call("cancel", "one").exit_code == ExitCode.SLURM


def test_a_users_own_defaults_of_slurms_commands_change_nothing(
    slurm: SmallSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SQUEUE_PARTITION", "SCANCEL_STATE", "SBATCH_EXPORT", "SBATCH_JOB_NAME"):
        monkeypatch.setenv(name, "x")
    slurm.submit()
    slurm.call("cancel", "one")
    assert "SQUEUE_PARTITION" not in slurm.variables("squeue")
    assert "SCANCEL_STATE" not in slurm.variables("scancel")
    assert not {"SBATCH_EXPORT", "SBATCH_JOB_NAME"} & slurm.variables("201")
