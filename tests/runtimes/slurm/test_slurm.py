"""Cells on a real Slurm of two emulated nodes, without accounting: what becomes of them, whatever their jobs do."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.runtimes.slurm.emulated import Emulated, Project, Started, emulated
from tests.runtimes.slurm.stub_node import BUILDS, GATE, GPUS, VARIABLES
from toto_compat.errors import ExitCode
from toto_compat.evidence.store import load_run

pytestmark = pytest.mark.slurm

UPSTREAM = "torch-2.13.0-cpu/upstream/default"
SMALL = ("torch-2.13.0-cpu/upstream/*", "torch-2.13.0-cpu/fixed_size/*")


@pytest.fixture
def project(tmp_path: Path, cluster: Emulated) -> Project:
    return Project(tmp_path, cluster)


@pytest.fixture(scope="module")
def beside() -> Iterator[ThreadPoolExecutor]:
    """Runs what takes Slurm a minute beside the other tests."""
    with ThreadPoolExecutor() as pool:
        yield pool


@pytest.fixture(scope="module", autouse=True)
def over_time(
    cluster: Emulated, beside: ThreadPoolExecutor, tmp_path_factory: pytest.TempPathFactory
) -> Future[tuple[Project, Started]]:
    """A cell that outstays its time limit of a minute, Slurm's shortest."""
    project = Project(tmp_path_factory.mktemp("over_time"), cluster, minutes=1)

    def outstay() -> tuple[Project, Started]:
        started = project.matrix("hang", UPSTREAM)
        started.end()
        return project, started

    return beside.submit(outstay)


@pytest.fixture(scope="module", autouse=True)
def dead_node(
    cluster: Emulated, beside: ThreadPoolExecutor, tmp_path_factory: pytest.TempPathFactory
) -> Future[tuple[Project, Started]]:
    """A cell whose node goes away under it: n2, on which no other test has jobs."""
    project = Project(tmp_path_factory.mktemp("dead_node"), cluster, partition="gpu")

    def lose_the_node() -> tuple[Project, Started]:
        started = project.matrix({"upstream": "hang once"}, UPSTREAM)
        started.until(f"{UPSTREAM}: recompile start")
        cluster.kill_node("n2")
        try:
            started.end()
        finally:
            cluster.daemon("start", "n2")
        return project, started

    return beside.submit(lose_the_node)


@pytest.fixture(scope="module")
def mixed(cluster: Emulated, tmp_path_factory: pytest.TempPathFactory) -> tuple[Project, Started]:
    """One run: a cell that is measured, one that crashes, one whose job dies once, one whose job always dies."""
    project = Project(tmp_path_factory.mktemp("mixed"), cluster)
    behaviour = {"upstream": "segfault", "compile_friendly": "die once", "list_index": "die"}
    started = project.matrix(behaviour, "--profile", "held_to_references")
    started.end()
    return project, started


def test_there_is_no_accounting_to_ask(cluster: Emulated) -> None:
    configured = cluster.command("scontrol", "show", "config")
    assert "AccountingStorageType   = accounting_storage/none" in configured


def test_a_run_on_slurm_leaves_what_a_local_one_leaves(mixed: tuple[Project, Started]) -> None:
    project, started = mixed
    cell = project.cells()["fixed_size"]
    assert cell.failure is None
    assert set(cell.evidence) == {"recompile", "equivalence"}
    run = project.folder / "results" / "one"
    assert "an ordinary line" in (run / "logs" / "torch-2.13.0-cpu/fixed_size/default.log").read_text()
    assert {"compatibility.json", "compatibility.md", "run.json"} <= {path.name for path in run.iterdir()}
    info = load_run(run).info
    assert (info.executor, info.runtime, bool(info.finished)) == ("slurm", "venv", True)
    assert "torch-2.13.0-cpu/fixed_size/default: recompile start" in started.printed
    assert "torch-2.13.0-cpu/fixed_size/default: finished after" in started.printed


def test_a_cell_gets_the_gpu_that_it_asks_for(mixed: tuple[Project, Started]) -> None:
    seen = dict(line.split() for line in mixed[0].lines(GPUS))
    assert set(seen) == {"upstream", "list_index", "compile_friendly", "fixed_size"}
    assert set(seen.values()) <= {"0", "1", "2", "3"}


def test_an_environment_is_prepared_once_for_all_jobs_of_a_node(mixed: tuple[Project, Started]) -> None:
    assert mixed[0].lines(BUILDS) == ["torch-2.13.0-cpu"]


def test_references_are_computed_once_before_the_cells_that_share_them(mixed: tuple[Project, Started]) -> None:
    project, started = mixed
    (references,) = [task for task in project.submitted().tasks if task.kind == "references"]
    assert {task.after for task in project.submitted().cells} == {references.number}
    assert started.printed.count("upstream eager is asked once for all cells") == 0  # no cell had to ask
    stored = [path.parent for path in project.cache.glob("references/*/*/references.json")]
    assert len(stored) == 1


def test_a_cell_that_crashes_is_told_like_a_local_one_and_not_tried_again(mixed: tuple[Project, Started]) -> None:
    failure = mixed[0].cells()["upstream"].failure
    assert failure is not None
    assert (failure.kind, "died of SIGSEGV" in failure.message) == ("crash", True)
    assert len(mixed[0].jobs_of("upstream")) == 1


def test_a_job_that_dies_without_a_result_is_submitted_again(mixed: tuple[Project, Started]) -> None:
    project, started = mixed
    assert project.cells()["compile_friendly"].failure is None
    assert len(project.jobs_of("compile_friendly")) == 2
    assert "left no result, submitted again (try 2 of 2)" in started.printed


def test_a_job_that_always_dies_ends_as_an_error_with_its_last_lines(mixed: tuple[Project, Started]) -> None:
    project, started = mixed
    failure = project.cells()["list_index"].failure
    assert failure is not None
    assert failure.kind == "crash"
    first, second = project.jobs_of("list_index")
    assert f"its job left no result 2 times ({first}, {second})" in failure.message
    assert any("about to die" in line for line in failure.last_lines)
    assert started.process.returncode == ExitCode.CELL_NOT_RUN


def test_the_same_command_again_runs_only_what_did_not_finish(mixed: tuple[Project, Started]) -> None:
    project, _ = mixed
    again = project.matrix("measure", "--profile", "held_to_references", run="two")
    assert again.end() == ExitCode.OK, again.printed
    reused = {cache: cell.reused for cache, cell in project.cells("two").items()}
    assert reused == {"fixed_size": True, "compile_friendly": True, "upstream": False, "list_index": False}


def test_a_job_that_was_cancelled_is_an_error_and_not_tried_again(project: Project) -> None:
    started = project.matrix({"upstream": "hang"}, *SMALL)
    started.until(f"{UPSTREAM}: recompile start")
    (job,) = project.jobs_of("upstream")
    project.cluster.command("scancel", job)
    assert started.end() == ExitCode.CELL_NOT_RUN, started.printed
    cells = project.cells()
    failure = cells["upstream"].failure
    assert failure is not None
    assert (failure.kind, "was cancelled" in failure.message) == ("interrupted", True)
    assert cells["fixed_size"].failure is None
    assert project.jobs_of("upstream") == (job,)


def test_a_job_that_is_put_back_and_held_is_told_and_replaced(project: Project) -> None:
    """As Slurm does itself with a job whose prolog fails."""
    started = project.matrix({"upstream": "hang once"}, UPSTREAM)
    started.until(f"{UPSTREAM}: recompile start")
    job = project.jobs_of("upstream")[-1]
    project.cluster.command("scontrol", "requeuehold", job)
    assert f"`scontrol release {job}`" in started.until("1 jobs are held (job_requeued_in_held_state)")
    assert started.end() == ExitCode.OK, started.printed
    assert project.cells()["upstream"].failure is None
    assert len(project.jobs_of("upstream")) == 2
    assert project.cluster.command("squeue", "--noheader", "-o", "%i", "-j", job, "--states=PD") == ""


def test_a_controller_that_restarts_changes_nothing(project: Project) -> None:
    os.mkfifo(project.cache / GATE)
    started = project.matrix({"upstream": "wait"}, *SMALL)
    started.until(f"{UPSTREAM}: started")
    with project.cluster.alone():
        project.cluster.daemon("stop", "slurmctld")
        started.until("Slurm does not answer")
        project.cluster.daemon("start", "slurmctld")
        started.until("Slurm answers")
    (project.cache / GATE).write_text("go")
    assert started.end() == ExitCode.OK, started.printed
    assert [cell.failure for cell in project.cells().values()] == [None, None]


def test_a_test_that_begins_while_the_controller_is_away_waits_for_it(
    cluster: Emulated, beside: ThreadPoolExecutor
) -> None:
    """It is skipped where no cluster was brought up, and nobody would miss it if it were while another is at work."""

    def begin() -> bool:
        with emulated() as found:
            return found is not None

    with cluster.alone():
        cluster.daemon("stop", "slurmctld")
        begun = beside.submit(begin)
        cluster.daemon("start", "slurmctld")
    assert begun.result()


def test_ctrl_c_cancels_the_jobs_and_says_how_to_go_on(project: Project) -> None:
    started = project.matrix({"upstream": "hang"}, *SMALL)
    started.until("fixed_size/default: finished")
    if f"{UPSTREAM}: recompile" not in started.printed:
        started.until(f"{UPSTREAM}: recompile start")
    started.process.send_signal(signal.SIGINT)
    assert started.end() == ExitCode.INTERRUPTED, started.printed
    assert "cancelled 1 jobs" in started.printed
    assert "1 of 2 cells are kept" in started.printed
    assert "the same command again runs only the rest" in started.printed
    assert is_over(project, "upstream")
    again = project.matrix("measure", *SMALL, "--dry-run", run="two")
    again.end()
    assert "1 to run, 1 from the store" in again.printed


def is_over(project: Project, cache: str) -> bool:
    job = project.jobs_of(cache)[-1]
    state = project.cluster.command("squeue", "--states=all", "--noheader", "-o", "%T", "-j", job)
    return state in ("CANCELLED", "COMPLETING")


def test_a_run_that_was_left_to_slurm_can_be_asked_after_and_waited_for(project: Project) -> None:
    os.mkfifo(project.cache / GATE)
    left = project.matrix({"upstream": "wait"}, "--detach", *SMALL)
    assert left.end() == ExitCode.OK
    assert "`toto-compat status one`" in left.printed
    assert project.submitted().cells[0].jobs
    asked = project.start("measure", "status", "one")
    assert asked.end() == ExitCode.OK
    assert f"{UPSTREAM}: job " in asked.printed
    waiting = project.start("measure", "status", "one", "--wait")
    if "fixed_size/default: job " in asked.printed:  # else it has been taken in already
        waiting.until("fixed_size/default: finished")
    (project.cache / GATE).write_text("go")
    assert waiting.end() == ExitCode.OK, waiting.printed
    assert "recomp." in waiting.printed  # the table
    assert load_run(project.folder / "results/one").info.finished
    assert [cell.failure for cell in project.cells().values()] == [None, None]


def test_a_run_whose_runner_was_killed_is_taken_up_without_running_anything_twice(project: Project) -> None:
    os.mkfifo(project.cache / GATE)
    killed = project.matrix({"upstream": "wait"}, *SMALL)
    killed.until(f"{UPSTREAM}: started")
    killed.process.kill()
    killed.end()
    (project.cache / GATE).write_text("go")
    taken_up = project.start("measure", "status", "one", "--wait")
    assert taken_up.end() == ExitCode.OK, taken_up.printed
    assert [cell.failure for cell in project.cells().values()] == [None, None]
    assert {len(task.jobs) for task in project.submitted().cells} == {1}


def test_a_run_can_be_cancelled_from_elsewhere(project: Project) -> None:
    project.matrix({"upstream": "hang"}, "--detach", UPSTREAM).end()
    same_name = project.matrix("measure", UPSTREAM)
    assert same_name.end() == ExitCode.SELECTION  # its jobs would write into the new run
    assert "toto-compat cancel one" in same_name.printed
    cancelled = project.start("measure", "cancel", "one")
    assert cancelled.end() == ExitCode.OK, cancelled.printed
    assert "0 of 1 cells had finished" in cancelled.printed
    assert is_over(project, "upstream")
    asked = project.start("measure", "status", "one")
    assert asked.end() == ExitCode.OK
    assert "the run was cancelled" in asked.printed


def test_a_run_that_has_ended_is_shown_and_nothing_of_it_is_submitted_again(mixed: tuple[Project, Started]) -> None:
    project, started = mixed
    asked = project.start("measure", "status", "one", "--wait")
    assert asked.end() == started.process.returncode == ExitCode.CELL_NOT_RUN
    assert "submitted again" not in asked.printed
    assert "jobs to Slurm" not in asked.printed
    assert len(project.jobs_of("list_index")) == 2


def test_a_job_gets_what_it_needs_of_the_shell_and_of_its_setup_and_no_tokens(
    tmp_path: Path, cluster: Emulated
) -> None:
    project = Project(tmp_path, cluster, setup=["module load gcc", "export MADE_BY_SETUP=1"])
    shell = {
        "HF_TOKEN": "secret",
        "LC_ALL": "C.UTF-8",
        "SBATCH_EXPORT": "ALL",
        "BASH_FUNC_module%%": "() {  export MADE_BY_MODULE=$2\n}",  # as a login shell has it on a cluster
    }
    started = project.matrix("measure", UPSTREAM, variables=shell)
    assert started.end() == ExitCode.OK, started.printed
    seen = set(project.lines(VARIABLES))
    assert {"PATH", "HOME", "LC_ALL", "MADE_BY_SETUP", "MADE_BY_MODULE", "SLURM_JOB_ID"} <= seen
    assert "HF_TOKEN" not in seen


def test_what_slurm_refuses_is_told_in_its_own_words(tmp_path: Path, cluster: Emulated) -> None:
    project = Project(tmp_path, cluster, partition="nowhere")
    started = project.matrix("measure", UPSTREAM)
    assert started.end() == ExitCode.SLURM, started.printed
    assert "invalid partition specified: nowhere" in started.printed
    assert "Traceback" not in started.printed


def test_a_cell_that_outstays_its_time_limit_says_so(over_time: Future[tuple[Project, Started]]) -> None:
    project, started = over_time.result()
    assert started.process.returncode == ExitCode.CELL_NOT_RUN, started.printed
    failure = project.cells()["upstream"].failure
    assert failure is not None
    assert (failure.kind, "slurm.minutes" in failure.message) == ("timeout", True)
    assert len(project.jobs_of("upstream")) == 1


def test_a_job_whose_node_dies_is_waited_for_and_finishes_elsewhere(
    dead_node: Future[tuple[Project, Started]],
) -> None:
    project, started = dead_node.result()
    assert started.process.returncode == ExitCode.OK, started.printed
    assert project.cells()["upstream"].failure is None
    assert "begins again as job" in started.printed
    assert "on n1" in started.printed
    assert len(project.jobs_of("upstream")) == 1  # Slurm put it back, nobody submitted it twice
