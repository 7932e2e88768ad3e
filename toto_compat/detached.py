"""`toto-compat status` and `cancel`: runs that were left to Slurm, or whose runner is gone."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import click

from toto_compat.contract.files import utc_now
from toto_compat.errors import ExitCode, StorageError
from toto_compat.evidence.files import cache_folder
from toto_compat.evidence.store import CellStore, claimed_run, find_run, load_run, write_run_info
from toto_compat.report.publish import closing_lines, exit_code, publish
from toto_compat.runtimes.interrupt import sigterm_as_interrupt
from toto_compat.runtimes.local import FinishedCell
from toto_compat.runtimes.progress import Progress, print_out, progress_for, say
from toto_compat.runtimes.run import keep_cell, keep_log
from toto_compat.runtimes.slurm.cluster import QueuedJob, queue
from toto_compat.runtimes.slurm.exchange import Submission, exchange_of
from toto_compat.runtimes.slurm.seal import check_own, is_own
from toto_compat.runtimes.slurm.watch import Watch
from toto_compat.verdict.judged_run import judge_run


def watch_again(run_folder: Path, progress: Progress) -> Watch:
    """Take up a run where its files say it is: what arrives goes where its own runner would have put it."""
    exchange, store = exchange_of(run_folder), CellStore(cache_folder() / "evidence")
    submitted, run = exchange.read_submitted(), load_run(run_folder)
    own = is_own(submitted)
    if unknown := {task.cell for task in submitted.cells} - set(run.info.cells):
        raise StorageError(f"{run_folder}: {min(unknown)!r} is no cell of this run", hint="run the matrix again")

    def hand_over(task: Submission, done: FinishedCell) -> None:
        # what was measured elsewhere is shown, and never taken for a result of this machine's
        keep_cell(done, task.key if own else "", run_folder, store, progress.note)

    return Watch(
        exchange,
        submitted,
        progress=progress,
        keep_log=lambda cell, log: keep_log(cell, log, run_folder, progress),
        hand_over=hand_over,
        ended=frozenset(cell.cell for cell in run.cells),
    )


def finish(run_folder: Path) -> ExitCode:
    """Judge a run whose last cell has ended, as its own runner would have."""
    run = load_run(run_folder)
    if not run.info.finished:
        write_run_info(run_folder, run.info.model_copy(update={"finished": utc_now()}))
    judged = judge_run(load_run(run_folder))
    publish(judged)
    for line in closing_lines(judged, ()):
        say(line)
    say(f"run: {run_folder}")
    return exit_code(judged, (), environment_failed=False)


def status_lines(watch: Watch, jobs: dict[str, QueuedJob] | None) -> Iterator[str]:
    """Tell of every cell that has not ended what its job does, as far as Slurm says."""
    cells, waiting = watch.submitted.cells, watch.waiting_for
    yield f"{len(cells) - len(waiting)} of {len(cells)} cells have ended" + (
        ", the run was cancelled" if watch.submitted.cancelled else ""
    )
    if waiting and jobs is None:
        yield "Slurm does not answer: what the jobs do is not known"
        return
    for task in waiting:
        yield f"  {task.cell}: {_state(task, jobs or {})}"


def _state(task: Submission, jobs: dict[str, QueuedJob]) -> str:
    if not task.jobs:
        return "not submitted"
    job, tries = task.jobs[-1], f", try {len(task.jobs)}" if len(task.jobs) > 1 else ""
    queued = jobs.get(job)
    if queued is not None and queued.held:
        return f"job {job} is held ({queued.held}), to release it: `scontrol release {job}`{tries}"
    if queued is None or not queued.is_coming:
        state = queued.state.lower() if queued is not None else "not known to Slurm any more"
        return f"job {job} left no result ({state}){tries}"
    if queued.state == "PENDING":
        return f"job {job} is pending ({queued.reason}){tries}"
    return f"job {job} is {queued.state.lower()} on {queued.node}{tries}"


_RESULTS = click.option(
    "--results", type=click.Path(path_type=Path), default=Path("results"), show_default=True, help="Folder of the runs."
)


@click.command("status")
@click.argument("run", default="latest")
@click.option("--wait", is_flag=True, help="Wait for the end, try again what left no result, and print the table.")
@_RESULTS
def status_command(run: str, wait: bool, results: Path) -> None:
    """Say how far a run on Slurm is, and take in what has arrived.

    Once every cell has ended the table is printed. With --wait, Ctrl-C leaves the jobs running."""
    folder = find_run(run, results)
    total = len(exchange_of(folder).read_submitted().cells)
    with held(folder, or_fail=wait) as alone, sigterm_as_interrupt():
        with progress_for(total) as progress:
            watch = watch_again(folder, progress)
            if alone:
                watch.look(retry=False)
            if wait and watch.waiting_for and not watch.submitted.cancelled:
                check_own(watch.exchange, watch.submitted)
                watch.submit_rest()
                watch.to_the_end()
        if alone and not watch.waiting_for:
            sys.exit(finish(folder))
    for line in status_lines(watch, queue()):
        print_out(line)
    if not alone:
        say("its runner is there and takes in what arrives")
    elif watch.submitted.cancelled:
        say("the same `matrix` command again runs the rest")


@click.command("cancel")
@click.argument("run")
@_RESULTS
def cancel_command(run: str, results: Path) -> None:
    """Cancel the jobs of a run on Slurm. What has finished stays, and the same `matrix` command runs the rest."""
    folder = find_run(run, results)
    with held(folder) as alone, progress_for(0) as progress:
        watch = watch_again(folder, progress)
        check_own(watch.exchange, watch.submitted)
        if alone:
            watch.look(retry=False)
            taken = watch.cancel()
        else:
            taken = watch.cancel_jobs()
            progress.note("its runner is there: it tells these cells as interrupted")
    cells = watch.submitted.cells
    done = f"{len(cells) - len(watch.waiting_for)} of {len(cells)} cells had finished and are kept in {folder}"
    print_out(done)
    if not taken:
        sys.exit(ExitCode.SLURM)


@contextmanager
def held(folder: Path, *, or_fail: bool = False) -> Iterator[bool]:
    """Hold a run as its runner does; give False where somebody else does: then it is only looked at."""
    with ExitStack() as stack:
        try:
            stack.enter_context(claimed_run(folder.parent, folder.name, ""))
            alone = True
        except StorageError:
            if or_fail:
                raise
            alone = False
        yield alone
