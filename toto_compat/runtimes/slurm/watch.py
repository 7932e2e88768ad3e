"""Waits for what was submitted: a result on the shared folder ends a cell; the queue only says if one can come."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from toto_compat.contract.result import CellResult, Failure, Provenance
from toto_compat.errors import StorageError
from toto_compat.evidence.files import checked, set_aside, storage_errors
from toto_compat.evidence.layouts import refuse_later
from toto_compat.evidence.left_file import is_damage, read_left_file
from toto_compat.runtimes.cell_log import LAST_LINES, LONGEST_LINE
from toto_compat.runtimes.local import FinishedCell
from toto_compat.runtimes.progress import Progress
from toto_compat.runtimes.slurm.cluster import QueuedJob, SlurmError, cancel_jobs, queue
from toto_compat.runtimes.slurm.exchange import AWAY_SECONDS, LAYOUT, Exchange, NodeResult, Submission, Submitted
from toto_compat.runtimes.slurm.seal import own_task
from toto_compat.runtimes.slurm.submission import submit, taken_over

_LOOK_SECONDS = 0.5  # between two listings of the results
_LOG_END = 20_000  # bytes of a job's output that are looked at
_LARGEST_PROGRESS = 1_000_000  # bytes: a line per suite
_LARGEST_RESULT = 200_000_000  # bytes
_UNREADABLE_SECONDS = 600.0  # that one result may be, while others can be read
_LONGEST_TOLD = 4000  # letters of what a node says in one line
_NAMED_JOBS = 20  # in one line

_Died = Literal["out_of_memory", "environment", "crash"]
HandOver = Callable[[Submission, FinishedCell], None]


class _UnusableError(Exception):
    """A result that says nothing about its cell."""


@dataclass
class _Open:
    """A cell whose result has not arrived."""

    gone_since: float | None = None  # when its job was first seen to have ended
    read: int = 0  # bytes of its progress
    job: str = ""  # that its progress told of last
    held: str = ""  # why its job does not run, as it was told
    unreadable_since: float | None = None  # there is a result, and the system does not give it


@dataclass
class Watch:
    """Goes on with a run from what is on disk: in the process that submitted it, or in a later one."""

    exchange: Exchange
    submitted: Submitted
    progress: Progress
    keep_log: Callable[[str, Path], None]
    hand_over: HandOver
    ended: frozenset[str] = frozenset()  # cells that an earlier process has handed over
    clock: Callable[[], float] = time.monotonic
    _open: dict[int, _Open] = field(default_factory=dict)
    _asked: float | None = None  # when the queue was last asked
    _silent: bool = False  # it gave no answer then
    _away_since: float | None = None  # the run's folder
    _queued: str = ""  # what was last told of jobs that nothing runs beside
    _refusal: str = ""  # what Slurm said when it last did not take a job again

    def __post_init__(self) -> None:
        self._open = {task.number: _Open() for task in self.submitted.cells if task.cell not in self.ended}

    def submit_rest(self) -> None:
        """Submit every task that has no job yet, and that nobody has done."""
        arrived = self.exchange.arrived()
        rest = [task for task in self.submitted.tasks if not task.jobs and task.number not in arrived]
        if not rest or not self._open:
            return
        before = {task.number for task in rest}
        submit(self.exchange, self.submitted, rest, self._keep)
        arrays = {task.jobs[-1].partition("_")[0] for task in self.submitted.tasks if task.number in before}
        self.progress.note(f"submitted {len(rest)} jobs to Slurm: {', '.join(sorted(arrays, key=int))}")

    def to_the_end(self) -> None:
        """Wait until every cell has ended one way or the other, also for a shared folder that is away for a while."""
        while self._open:
            try:
                self.look()
            except StorageError as error:
                self._wait_for_folder(error)
            else:
                self._folder_is_there()
            self.progress.heartbeat()
            if self._open:
                time.sleep(min(_LOOK_SECONDS, self.submitted.settings.poll_seconds))

    def look(self, *, retry: bool = True) -> None:
        """Hand over what has arrived; now and then ask the queue which jobs can still bring something."""
        self._collect()
        now, pause = self.clock(), self.submitted.settings.poll_seconds
        if not self._open or (self._asked is not None and now - self._asked < pause):
            return
        self._asked = now
        jobs = queue()
        self._say_if_silent(jobs is None)
        if jobs is None:
            return  # nobody knows what has become of the jobs: results are still collected
        over = list(self._over(jobs, now))
        self._tell_queued(jobs)
        self._tell_held(jobs)
        # a result may have come between the listing and the answer
        self._collect()
        died = [(task, queued) for task, queued in over if task.number in self._open]
        if retry:
            self._drop_held_references(jobs)
        if retry and died:
            self._bury_or_retry(died)

    def cancel(self) -> bool:
        """Cancel every job that has left no result; cells that have one by now are still handed over."""
        taken = self.cancel_jobs()
        try:
            self._keep(self.submitted.model_copy(update={"cancelled": True}))
            self._collect(only_good=True)
        except StorageError as error:
            self.progress.note(str(error))
        if taken:
            self.exchange.remove_tasks()
        return taken

    def cancel_jobs(self) -> bool:
        """Have Slurm cancel every job that has left no result and tell so; nothing on disk is changed."""
        try:
            self.submitted, taken = taken_over(self.submitted), True
        except SlurmError:
            taken = False
        arrived: set[int] = set()
        with suppress(StorageError):  # what has ended by now may be cancelled as well
            arrived = self.exchange.arrived()
        jobs = [task.jobs[-1] for task in self.submitted.tasks if task.jobs and task.number not in arrived]
        try:
            taken = cancel_jobs(jobs) and taken
        except SlurmError:
            taken = False
        not_taken = f"Slurm did not take it: `toto-compat cancel {self.exchange.run}`"
        self.progress.note(f"cancelled {len(jobs)} jobs" if taken else not_taken)
        return taken

    def _keep(self, submitted: Submitted) -> None:
        """Have it on disk, and go on from it: what was submitted is known whatever happens next."""
        self.submitted = submitted
        self.exchange.write_submitted(submitted)

    @property
    def all_submitted(self) -> bool:
        return all(task.jobs for task in self.submitted.tasks)

    @property
    def waiting_for(self) -> tuple[Submission, ...]:
        return tuple(task for task in self.submitted.cells if task.number in self._open)

    def _collect(self, *, only_good: bool = False) -> None:
        arrived = self.exchange.arrived()
        for task in [task for task in self.waiting_for if task.number in arrived]:
            done = self._read(task)
            if done is None or (only_good and done.result.failure is not None):
                continue
            self._tell(task)
            self._finish(task, done.result, done.seconds)

    def _read(self, task: Submission) -> NodeResult | None:
        """Read a result; a damaged one is put aside, and its cell is as if it had left none.

        One that the system does not give just now is neither: it is tried again, and its cell is not run again."""
        path, state = self.exchange.result(task.number), self._open[task.number]
        try:
            content = read_left_file(path, _LARGEST_RESULT)
            refuse_later(path, content, newest=LAYOUT)
            done = self._checked(task, path, content)
        except FileNotFoundError:
            done = None  # somebody has just put it aside
        except (OSError, _UnusableError) as error:
            if isinstance(error, OSError) and not is_damage(error) and self._may_be_read_later(task, error):
                return None
            self.progress.note(f"{task.cell}: its result cannot be used and is put aside: {error}")
            set_aside(path, path.with_suffix(".unusable"))
            done = None
        state.unreadable_since = None
        return done

    def _may_be_read_later(self, task: Submission, error: OSError) -> bool:
        state, now = self._open[task.number], self.clock()
        if state.unreadable_since is None:
            state.unreadable_since = now
            self.progress.note(f"{task.cell}: its result cannot be read now, which is tried again: {error}")
        return now - state.unreadable_since < _UNREADABLE_SECONDS

    def _checked(self, task: Submission, path: Path, content: bytes) -> NodeResult:
        try:
            done = checked(path, NodeResult, content)
        except StorageError as error:
            raise _UnusableError(error.message) from error
        if done.result.cell != task.cell:
            raise _UnusableError(f"it is of {done.result.cell}")
        if done.nonce != self.submitted.nonce:
            raise _UnusableError("it is of an earlier run")
        return done

    def _finish(self, task: Submission, result: CellResult, seconds: float) -> None:
        with storage_errors(self.exchange.folder.parent, "written"):
            self.hand_over(task, FinishedCell(result, seconds))
            log = self.exchange.log(task.number)
            if log.is_file() and not log.is_symlink():
                self.keep_log(task.cell, log)
        # only now: an interrupt before this hands it over once more, after it the cell is kept and told as finished
        del self._open[task.number]
        self.progress.finished(task.cell, result.failure, seconds)
        if not self._open:
            self.exchange.remove_tasks()

    def _over(self, jobs: dict[str, QueuedJob], now: float) -> Iterator[tuple[Submission, QueuedJob | None]]:
        """Find the cells whose job has ended long enough ago for a result to have shown."""
        for task in self.waiting_for:
            state = self._open[task.number]
            queued = jobs.get(task.jobs[-1]) if task.jobs else None
            if state.unreadable_since is not None:
                state.gone_since = None
                continue
            if queued is not None and queued.is_coming:
                state.gone_since = None
                if queued.state in ("RUNNING", "COMPLETING"):
                    self._tell(task)
                continue
            state.gone_since = now if state.gone_since is None else state.gone_since
            if now - state.gone_since >= self.submitted.settings.result_grace_seconds:
                yield task, queued

    def _bury_or_retry(self, died: Sequence[tuple[Submission, QueuedJob | None]]) -> None:
        with suppress(SlurmError):  # a held one would run one day, if it is released
            cancel_jobs([task.jobs[-1] for task, queued in died if queued is not None])
        again = []
        for task, queued in died:
            failure = self._final_failure(task, queued)
            if failure is None:
                again.append(task)
                continue
            self._tell(task)
            request = own_task(self.exchange, task).request
            result = CellResult(cell=task.cell, request=request, provenance=Provenance(), failure=failure)
            self._finish(task, result, 0.0)
        if not again:
            return
        tries = self.submitted.settings.retries + 1
        try:
            submit(self.exchange, self.submitted, again, self._keep)
        except SlurmError as error:
            self._count_refused(again, error.message)
        jobs = {task.number: len(task.jobs) for task in self.submitted.tasks}
        for task in again:
            self._open[task.number].gone_since = None
            if jobs[task.number] > len(task.jobs):
                lost = f"job {task.jobs[-1]} left no result" if task.jobs else "it had no job"
                self.progress.note(f"{task.cell}: {lost}, submitted again (try {task.tries + 1} of {tries})")

    def _drop_held_references(self, jobs: dict[str, QueuedJob]) -> None:
        """Cancel jobs of references that do not run: cells wait for their end, and can compute their own."""
        last = [task.jobs[-1] for task in self.submitted.tasks if task.kind == "references" and task.jobs]
        if held := [job for job in last if job in jobs and jobs[job].held and not jobs[job].is_coming]:
            self.progress.note(f"cancelled {', '.join(held)}: held, and cells wait for these references")
            with suppress(SlurmError):
                cancel_jobs(held)

    def _count_refused(self, asked: Sequence[Submission], why: str) -> None:
        """Count what Slurm does not take as a try: what it refuses once it mostly refuses for ever."""
        jobs = {task.number: len(task.jobs) for task in self.submitted.tasks}
        refused = {task.number for task in asked if jobs[task.number] == len(task.jobs)}
        self._refusal = why
        self._keep(self.submitted.with_refused(refused))
        self.progress.note(f"{len(refused)} jobs left no result and cannot be submitted now: {why}")

    def _final_failure(self, task: Submission, queued: QueuedJob | None) -> Failure | None:
        """Say what is wrong with a cell whose job is over without a result; None if it is tried again."""
        state = queued.state if queued is not None else "no longer known to Slurm"
        job = task.jobs[-1] if task.jobs else "none"
        lines = self._last_lines(task)
        if state.startswith("CANCELLED"):
            message = f"its job {job} was cancelled; the same command again runs it"
            return Failure(kind="interrupted", message=message, last_lines=lines)
        if queued is not None and queued.held:
            state = f"held: {queued.held}"
            if not queued.may_be_replaced:
                message = (
                    f"its job {job} was held by the cluster's admins and is cancelled; the same command again runs it"
                )
                return Failure(kind="interrupted", message=message, last_lines=lines)
        if state in ("TIMEOUT", "DEADLINE"):
            message = f"its job {job} was ended by Slurm at its time limit: raise slurm.minutes in matrix.yaml"
            return Failure(kind="timeout", message=message, last_lines=lines)
        if task.tries <= self.submitted.settings.retries:
            return None
        kinds: dict[str, _Died] = {"OUT_OF_MEMORY": "out_of_memory", "held": "environment"}
        times = "once" if len(task.jobs) == 1 else f"{len(task.jobs)} times"
        message = f"its job left no result {times} ({', '.join(task.jobs)}); the last one: {state}"
        if task.refused:
            message += f"; Slurm refused {task.refused} more: {self._refusal}"
        return Failure(kind=kinds.get(state.partition(":")[0], "crash"), message=message, last_lines=lines)

    def _last_lines(self, task: Submission) -> tuple[str, ...]:
        """Take the end of the cell's log where it left one, else of what its last job printed."""
        job = task.jobs[-1] if task.jobs else ""
        names = [f"{job}_0_log.out", f"{job}_0_log.err"]
        printed = [line for name in names for line in _end_of(self.exchange.jobs / name)]
        lines = list(_end_of(self.exchange.log(task.number))) or printed
        return tuple(line[:LONGEST_LINE] for line in lines[-LAST_LINES:])

    def _tell(self, task: Submission) -> None:
        """Pass on what a node has said of its cell since the last time."""
        state = self._open[task.number]
        try:
            said = read_left_file(self.exchange.progress(task.number), _LARGEST_PROGRESS)[state.read :]
        except OSError:
            return
        whole = said[: said.rfind(b"\n") + 1]
        state.read += len(whole)
        for line in whole.decode(errors="replace").splitlines():
            what, _, text = line[:_LONGEST_TOLD].partition(" ")
            if what == "job":
                self._tell_job(task, state, text)
            elif what == "line":
                self.progress.line(task.cell, text)
            elif what == "note":
                self.progress.note(text)

    def _tell_job(self, task: Submission, state: _Open, text: str) -> None:
        job, _, node = text.partition(" ")
        if state.job:
            self.progress.note(f"{task.cell}: begins again as job {job} on {node}")
        else:
            self.progress.started(task.cell)
        state.job = job

    def _tell_queued(self, jobs: dict[str, QueuedJob]) -> None:
        """Say why nothing happens while every job still waits for its turn, once for each reason."""
        own = [jobs[task.jobs[-1]] for task in self.waiting_for if task.jobs and task.jobs[-1] in jobs]
        waiting = own if all(job.state == "PENDING" for job in own) else []
        reasons = ", ".join(sorted({job.reason for job in waiting if not job.held} - {"None", "Dependency"}))
        if reasons and reasons != self._queued:
            self.progress.note(f"{len(waiting)} cells wait in Slurm's queue: {reasons}")
        self._queued = reasons

    def _tell_held(self, jobs: dict[str, QueuedJob]) -> None:
        """Say which jobs wait for somebody to release them, once for each of them."""
        held: defaultdict[str, list[str]] = defaultdict(list)
        for task in self.waiting_for:
            queued = jobs.get(task.jobs[-1]) if task.jobs else None
            why, state = queued.held if queued is not None else "", self._open[task.number]
            if why and why != state.held:
                held[why].append(task.jobs[-1])
            state.held = why
        for why, names in held.items():
            shown = ",".join(names[:_NAMED_JOBS]) + (",..." if len(names) > _NAMED_JOBS else "")
            self.progress.note(f"{len(names)} jobs are held ({why}), to release them: `scontrol release {shown}`")

    def _wait_for_folder(self, error: StorageError) -> None:
        """Let a folder be away or full for a while: jobs go on, and what nobody can see is not taken for dead."""
        if not isinstance(error.__cause__, OSError):
            raise error  # a file is not what it should be, and stays so
        now = self.clock()
        if self._away_since is None:
            self._away_since = now
            self.progress.note(f"{error.message}; jobs go on, and it is tried again")
        for state in self._open.values():
            state.gone_since = None
        if now - self._away_since >= AWAY_SECONDS:
            raise error

    def _folder_is_there(self) -> None:
        if self._away_since is not None:
            self._away_since = None
            self.progress.note("the run's folder can be used again")

    def _say_if_silent(self, silent: bool) -> None:
        if silent != self._silent:
            self._silent = silent
            said = "does not answer: jobs are not asked after, results are still collected" if silent else "answers"
            self.progress.note(f"Slurm {said}")


def _end_of(path: Path) -> list[str]:
    try:
        end = read_left_file(path, _LOG_END, end_only=True)
    except OSError:
        return []
    return [line for line in end.decode(errors="replace").splitlines() if line.strip()]
