"""Runs on Slurm taken up and ended: no job is lost or run twice, whatever becomes of whoever submits."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.runtimes.slurm.emulated import ROOT
from tests.runtimes.slurm.small_slurm import TWO_ARRAYS, SmallSlurm
from tests.runtimes.stub_runtime import MATRIX_TEXT
from toto_compat.detached import watch_again
from toto_compat.errors import ExitCode, SelectionError, StorageError
from toto_compat.evidence.store import claimed_run, load_run
from toto_compat.runtimes import plan
from toto_compat.runtimes.progress import PlainProgress
from toto_compat.runtimes.slurm import watch as watch_module
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


@pytest.mark.parametrize(
    ("state", "kind", "tries"),
    [
        ("CANCELLED", "interrupted", 1),
        ("TIMEOUT", "timeout", 1),
        ("DEADLINE", "timeout", 1),
        ("OUT_OF_MEMORY", "out_of_memory", 2),
        ("NODE_FAIL", "crash", 2),
    ],
)
def test_a_job_that_ends_without_a_result_is_told_by_the_state_it_ended_in(
    slurm: SmallSlurm, state: str, kind: str, tries: int
) -> None:
    slurm.submit()
    for _ in range(tries):
        slurm.order("queue", "\n".join(slurm.lines("queue")).replace("PENDING", state) + "\n")
        slurm.watch().look()
    cells = load_run(slurm.run).cells
    assert [cell.failure.kind if cell.failure else "" for cell in cells] == [kind] * 4
    assert {len(task.jobs) for task in slurm.submitted.cells} == {tries}


def test_a_cell_waits_for_its_references_once_and_for_no_job_that_slurm_has_forgotten(slurm: SmallSlurm) -> None:
    slurm.submit()
    slurm.end_jobs()
    slurm.watch().look()
    waiting = [number for number, script in enumerate(slurm.scripts) if "#SBATCH --dependency=afterany:" in script]
    assert len(slurm.scripts) == 6
    assert waiting == [2, 3]  # after those of two references, and before those that are tried again


# --- resuming ---------------------------------------------------------------------------------------------------------


def test_what_was_measured_is_found_again_from_another_machine(
    slurm: SmallSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.submit()
    slurm.leave_all_results()
    slurm.call("status", "one")
    words = ("matrix", "--executor", "slurm", "--device", "cpu", "--dry-run", "torch-2.1*/*")
    assert slurm.call(*words).output.count("0 to run, 2 from the store") == 2
    before = len(slurm.scripts)
    monkeypatch.setattr(plan, "machine_identity", lambda _: "another login node")
    again = slurm.call(*words[:-2], "--run", "two", words[-1])
    assert len(load_run(slurm.run.with_name("two")).cells) == 4, again.output
    assert len(slurm.scripts) == before


# --- jobs that are held -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", ["launch_failed_requeued_held", "launch failed requeued held", "JobHoldMaxRequeue"])
def test_a_job_that_slurm_holds_is_replaced_and_ends_as_an_error(slurm: SmallSlurm, reason: str) -> None:
    slurm.submit()
    first = [task.jobs[-1] for task in slurm.submitted.cells]
    said: list[str] = []
    watch = slurm.watch(said)
    slurm.hold_jobs(reason)
    watch.look()
    assert set(first) <= set(slurm.lines("cancelled"))
    assert all(len(task.jobs) == 2 for task in slurm.submitted.cells)
    slurm.hold_jobs(reason)
    watch.to_the_end()
    failures = [cell.failure for cell in load_run(slurm.run).cells]
    held = reason.replace(" ", "_")
    assert [(one.kind, one.message.rpartition("; ")[2]) for one in failures if one] == [
        ("environment", f"the last one: held: {held}")
    ] * 4
    assert {job for task in slurm.submitted.cells for job in task.jobs} <= set(slurm.lines("cancelled"))
    (told,) = [line for line in said if f"scontrol release {','.join(first)}`" in line]
    assert f"4 jobs are held ({held})" in told


def test_what_an_admin_holds_is_not_submitted_anew(slurm: SmallSlurm) -> None:
    slurm.submit()
    slurm.hold_jobs("JobHeldAdmin")
    slurm.watch().to_the_end()
    failures = [cell.failure for cell in load_run(slurm.run).cells]
    assert [failure.kind if failure else "" for failure in failures] == ["interrupted"] * 4
    assert all("held by the cluster's admins" in failure.message for failure in failures if failure)
    assert {len(task.jobs) for task in slurm.submitted.tasks} == {1}
    assert sorted(set(slurm.lines("cancelled"))) == sorted(slurm.queued)


def test_a_user_who_holds_a_job_is_told_how_to_release_it_and_is_waited_for(slurm: SmallSlurm) -> None:
    slurm.submit()
    slurm.hold_jobs("JobHeldUser")
    said: list[str] = []
    watch = slurm.watch(said)
    for _ in range(3):
        watch.look()
    assert len(watch.waiting_for) == 4
    assert [line for line in said if "scontrol release" in line] == [
        line for line in said if "4 jobs are held (JobHeldUser)" in line
    ]
    assert slurm.lines("cancelled") == []
    assert "is held (JobHeldUser), to release it: `scontrol release " in slurm.call("status", "one").output


def test_cells_do_not_wait_for_references_that_are_held(slurm: SmallSlurm) -> None:
    slurm.submit()
    references = [task.jobs[-1] for task in slurm.submitted.tasks if task.kind == "references"]
    queue = (slurm.folder / "queue").read_text().splitlines()
    held = [line.replace("Resources", "JobHeldAdmin") if line.split("|")[0] in references else line for line in queue]
    slurm.order("queue", "\n".join(held))
    slurm.watch().look()
    assert slurm.lines("cancelled") == references


# --- results that are late --------------------------------------------------------------------------------------------


def test_a_result_may_show_some_time_after_the_end_of_its_job(slurm: SmallSlurm) -> None:
    slurm.configure(TWO_ARRAYS.replace("result_grace_seconds: 0", "result_grace_seconds: 90"))
    slurm.submit()
    slurm.end_jobs()
    now, before = [0.0], len(slurm.scripts)
    watch = slurm.watch()
    watch.clock = lambda: now[0]
    first, *others = slurm.submitted.cells
    for seconds in (0.0, 80.0):
        now[0] = seconds
        watch.look()
    assert len(slurm.scripts) == before
    slurm.leave_result(first.number)
    now[0] = 91.0
    watch.look()
    assert [cell.cell for cell in load_run(slurm.run).cells] == [first.cell]
    again = {task.cell for task in slurm.submitted.cells if len(task.jobs) == 2}
    assert again == {task.cell for task in others}


# --- a shared folder that goes away -----------------------------------------------------------------------------------


class Comes(PlainProgress):
    """Brings the shared folder back after the runner has looked in vain a few times."""

    def __init__(self, back: Callable[[], object]) -> None:
        self.said: list[str] = []
        super().__init__(4, write=self.said.append)
        self._back, self._looks = back, 0

    def heartbeat(self) -> None:
        self._looks += 1
        if self._looks == 3:
            self._back()


def test_results_that_nobody_can_see_for_a_while_are_not_taken_for_lost(slurm: SmallSlurm, tmp_path: Path) -> None:
    slurm.submit()
    slurm.leave_all_results()
    slurm.end_jobs()
    results = slurm.exchange.folder / "results"
    progress = Comes(lambda: (tmp_path / "away").rename(results))
    watch = watch_again(slurm.run, progress)
    results.rename(tmp_path / "away")
    before = len(slurm.scripts)
    watch.to_the_end()
    assert [cell.failure for cell in load_run(slurm.run).cells] == [None] * 4
    assert len(slurm.scripts) == before
    assert [line.partition(": ")[2] for line in progress.said if "jobs go on" in line]
    assert any("can be used again" in line for line in progress.said)


def test_a_cell_that_cannot_be_written_for_a_while_is_written_later(slurm: SmallSlurm) -> None:
    slurm.submit()
    slurm.leave_all_results()
    slurm.end_jobs()
    cells = slurm.run / "cells"
    cells.touch()  # in the place of a folder that cannot be made
    watch_again(slurm.run, Comes(cells.unlink)).to_the_end()
    assert [cell.failure for cell in load_run(slurm.run).cells] == [None] * 4
    assert slurm.lines("cancelled") == []


def test_a_folder_that_stays_away_cancels_no_job_and_the_run_can_be_taken_up(
    slurm: SmallSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_module, "AWAY_SECONDS", 0.0)
    slurm.configure(ONE_ARRAY, MATRIX_TEXT.replace(", equivalence", ""))  # one array: sbatch is called once
    results = slurm.exchange.folder / "results"
    slurm.order("lose_results", str(results))
    words = ("matrix", "--executor", "slurm", "--device", "cpu", "--run", "one", "torch-2.13.0-cpu/*")
    result = slurm.call(*words)
    assert isinstance(result.exception, StorageError), result.output
    assert slurm.lines("cancelled") == []
    assert "`toto-compat status one --wait`" in result.output
    (slurm.folder / "away").rename(results)
    slurm.leave_all_results()
    slurm.call("status", "one", "--wait")
    assert [cell.failure for cell in load_run(slurm.run).cells] == [None] * 2


def test_a_result_that_cannot_be_read_now_is_read_later_and_its_cell_not_run_again(
    slurm: SmallSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.submit()
    slurm.leave_all_results()
    slurm.end_jobs()
    said: list[str] = []
    watch, before = slurm.watch(said), len(slurm.scripts)

    def away(path: Path, *_: object, **__: object) -> bytes:
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(watch_module, "read_left_file", away)  # of a file server, which no test has
        for _ in range(3):
            watch.look()
    assert len(watch.waiting_for) == 4
    assert len([line for line in said if "cannot be read now" in line]) == 4
    watch.to_the_end()
    assert [cell.failure for cell in load_run(slurm.run).cells] == [None] * 4
    assert len(slurm.scripts) == before


# --- what an earlier run left -----------------------------------------------------------------------------------------


def test_what_lies_in_the_place_of_a_result_is_put_aside_each_time(slurm: SmallSlurm) -> None:
    slurm.submit()
    number = slurm.submitted.cells[0].number
    path = slurm.exchange.result(number)
    for _ in range(2):
        (path / "folder").mkdir(parents=True)
        slurm.watch().look(retry=False)
        assert path.with_suffix(".unusable").is_dir()
        assert not path.exists()
    path.write_text("{")
    slurm.watch().look(retry=False)
    assert path.with_suffix(".unusable").read_text() == "{"


def test_a_link_in_the_place_of_the_exchange_is_not_followed(slurm: SmallSlurm, tmp_path: Path) -> None:
    (tmp_path / "old" / "results").mkdir(parents=True)
    slurm.run.mkdir(parents=True)
    (slurm.run / "slurm").symlink_to(tmp_path / "old")
    result = slurm.submit("--fresh")
    assert isinstance(result.exception, StorageError)
    assert "a link" in str(result.exception)
    assert slurm.scripts == []


def test_a_cell_of_an_earlier_run_of_the_same_name_is_none_of_this_ones(slurm: SmallSlurm) -> None:
    slurm.submit()
    slurm.leave_all_results()
    slurm.end_jobs()
    slurm.call("status", "one")
    assert len(load_run(slurm.run).cells) == 4
    slurm.submit("--fresh")
    assert load_run(slurm.run).cells == ()


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


@pytest.mark.parametrize(
    "answer",
    [
        "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
        "<html><body>502 Bad Gateway</body></html>",
        "||||",
        "999|PENDING||Resources|another\n203_0|PEND",
    ],
)
def test_what_is_no_answer_of_squeues_costs_no_job(slurm: SmallSlurm, answer: str) -> None:
    slurm.submit()
    before, said = len(slurm.scripts), list[str]()
    watch = slurm.watch(said)
    slurm.order("queue", answer)
    for _ in range(3):
        watch.look()
    assert len(watch.waiting_for) == 4
    assert len(slurm.scripts) == before
    assert any("Slurm does not answer" in line for line in said)


def test_a_line_break_in_the_name_of_another_job_hides_none(slurm: SmallSlurm) -> None:
    slurm.submit()
    queue = (slurm.folder / "queue").read_text(encoding="utf-8")
    slurm.order("queue", f"9|RUNNING|n1|None|two\nlines|of it\n{queue}")
    watch, before = slurm.watch(), len(slurm.scripts)
    for _ in range(3):
        watch.look()
    assert len(slurm.scripts) == before
    assert "is pending (Resources)" in slurm.call("status", "one").output


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
