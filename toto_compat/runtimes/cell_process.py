"""Runs one cell's process and turns whatever happened to it into a result: no cell is ever lost."""

import os
import signal
import subprocess
import sys
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from toto_compat.contract.request import CellRequest, Origin
from toto_compat.contract.result import CellResult, Failure, Provenance, blameless
from toto_compat.errors import EnvironmentBuildError
from toto_compat.evidence.details import mistake_in_details
from toto_compat.evidence.left_file import read_left_file
from toto_compat.runtimes import supervise
from toto_compat.runtimes.cell_log import LAST_LINES, LONGEST_PIECE, copy_to_log
from toto_compat.runtimes.orphans import end_processes_of
from toto_compat.runtimes.seam import OnLine

CELL_COMMAND = ("-m", "toto_compat.cell")
REQUEST_FILE = "request.json"
RESULT_FILE = "result.json"
LOG_FILE = "cell.log"
CGROUP_VARIABLE = "TOTO_COMPAT_CGROUP"  # a control group of the user's in which each cell gets one of its own
INSIDE = "inside"  # of a cell's folder: the part that its container can write to

WORK = "work"  # of the folder that a cell can write to: its work folder

_STOP_PATIENCE_SECONDS = 15.0
_LARGEST_RESULT = 200_000_000


@dataclass(frozen=True)
class ProcessEnd:
    """Says how a cell's process ended. Exit codes above 128 are signals, as a shell counts them."""

    code: int
    timed_out: bool = False
    stopped: bool = False
    over_memory: bool = False
    killed_for_memory: bool = False  # some process of the cell, or of those that share its memory
    last_lines: tuple[str, ...] = ()


class CellProcesses:
    """The cell processes that run now, so that all of them can be stopped from another thread."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._stopping = False

    def run(
        self, command: list[str], *, env: dict[str, str], folder: Path, timeout: float, memory: int, on_line: OnLine
    ) -> ProcessEnd:
        """Run to the end, the timeout, the memory limit or stop(); nothing of it is alive afterwards."""
        limit = "@".join([str(memory), *filter(None, [os.environ.get(CGROUP_VARIABLE)])])
        supervisor = [sys.executable, "-I", "-S", str(Path(supervise.__file__)), limit]
        with self._guard:
            if self._stopping:
                return ProcessEnd(code=128 + signal.SIGINT, stopped=True)
            process = subprocess.Popen(
                [*supervisor, *command],
                env=env,
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                # away from the terminal's Ctrl-C: the runner decides when and how cells end
                start_new_session=True,
            )
            self._running.add(process)
        last: deque[str] = deque(maxlen=LAST_LINES)
        reader = threading.Thread(target=_copy_lines, args=(process, folder / LOG_FILE, last, on_line), daemon=True)
        reader.start()
        timed_out = False
        try:
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                timed_out = True
                _end(process)
            reader.join(_STOP_PATIENCE_SECONDS)
        finally:
            if process.poll() is None:
                _end(process)
            if process.returncode < 0:  # the supervisor itself was killed, and nobody ended what it stood over
                end_processes_of(folder)
            with self._guard:
                self._running.discard(process)
                stopped = self._stopping
            if process.stdin and not process.stdin.closed:
                process.stdin.close()
        lines = tuple(last)
        over_memory = any(line.startswith(supervise.OUT_OF_MEMORY_LINE) for line in lines)
        return ProcessEnd(
            code=process.returncode if process.returncode >= 0 else 128 - process.returncode,
            timed_out=timed_out,
            stopped=stopped and process.returncode != 0 and not timed_out,
            over_memory=over_memory,
            killed_for_memory=over_memory or any(line.startswith(supervise.KILLED_LINE) for line in lines),
            last_lines=tuple(line for line in lines if not line.startswith("::")),
        )

    def stop(self) -> None:
        """End every running cell and let no other start."""
        with self._guard:
            self._stopping = True
            running = list(self._running)
        for process in running:
            _close_stdin(process)


def check_control_group() -> None:
    """Find out before anything is built if cells can have control groups of their own, where the user wants that."""
    named = os.environ.get(CGROUP_VARIABLE)
    if not named:
        return
    try:
        group = supervise.MemoryGroup(Path(named), 2**30)
        try:
            with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
                group.enter(process.pid)
        finally:
            group.remove()
    except OSError as error:
        raise EnvironmentBuildError(
            f"{CGROUP_VARIABLE}={named}: cells cannot have control groups there: {error}",
            hint="name a group that you can write to, with memory in its cgroup.subtree_control (version 2) or of the "
            f"memory controller (version 1); or unset {CGROUP_VARIABLE}: then their memory is looked at",
        ) from error


def _close_stdin(process: subprocess.Popen[str]) -> None:
    """Order the supervisor to end the cell's process tree: it takes a closed stdin as that."""
    assert process.stdin is not None
    try:
        process.stdin.close()
    except OSError:
        return


def _end(process: subprocess.Popen[str]) -> None:
    _close_stdin(process)
    try:
        process.wait(_STOP_PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _copy_lines(process: subprocess.Popen[str], log: Path, last: deque[str], on_line: OnLine) -> None:
    output = process.stdout
    assert output is not None
    pieces = iter(lambda: output.readline(LONGEST_PIECE), "")
    try:
        copy_to_log((piece.rstrip("\n") for piece in pieces), log, last, on_line)
    except OSError as error:
        last.append(f"{log}: {error.strerror}")
        # a pipe that nobody reads would block the cell for ever
        for _ in pieces:
            pass


def work_folders(folder: Path) -> tuple[Path, ...]:
    """Name where the work folder of a cell may be, in a virtualenv or in a container."""
    return folder / WORK, folder / INSIDE / WORK


def collect_result(request: CellRequest, folder: Path, end: ProcessEnd, known: Provenance) -> CellResult:
    """Return the cell's own result where it is whole, else what can be said about how it ended.

    `known` is what the runtime knows of the cell, whatever the cell left.
    """
    written, unreadable = _read_result(folder / RESULT_FILE, request)
    evidence = written.evidence if written else {}
    failure: Failure | None
    if written and written.failure is None and set(request.profile.suites) <= set(evidence):
        failure = None
    elif written and written.failure and not (end.timed_out or end.stopped or end.over_memory):
        failure = written.failure
    else:
        failure = _failure(request, end, unreadable)
    facts = (written.provenance if written else known).model_dump()
    facts |= {field: getattr(known, field) for field in Origin.model_fields}
    for field in ("started", "finished"):
        facts[field] = facts[field] or getattr(known, field)
    result = CellResult(
        cell=request.cell, request=request, provenance=Provenance(**facts), evidence=evidence, failure=failure
    )
    if not end.killed_for_memory:
        return result
    whose = "limits.memory in matrix.yaml" if end.over_memory else "the limit of this session or job"
    return _without_blame(result, f"a process was killed for its memory: raise {whose}, or run with --jobs 1")


def _without_blame(result: CellResult, why: str) -> CellResult:
    """Take back what a cell says of a process that died, or of a forecast that may have missed one, as some were killed
    for their memory. Which ones is not told to us; what neither died nor raised stays as it is."""

    def told(failure: Failure | None) -> Failure | None:
        if failure is None or failure.kind != "crash" or "SIGKILL" not in failure.message:
            return failure
        return failure.model_copy(update={"kind": "out_of_memory", "message": f"{failure.message}: {why}"})

    evidence = {suite: blameless(one, why) for suite, one in result.evidence.items()}
    evidence = {suite: one.model_copy(update={"failure": told(one.failure)}) for suite, one in evidence.items()}
    return result.model_copy(update={"evidence": evidence, "failure": told(result.failure)})


def _read_result(path: Path, request: CellRequest) -> tuple[CellResult | None, str]:
    try:
        result = CellResult.model_validate_json(read_left_file(path, _LARGEST_RESULT))
    except FileNotFoundError:
        return None, "it left no result file"
    except OSError as error:
        return None, f"its result file cannot be read: {error.strerror}"
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        return None, f"its result file is not valid: {where + ': ' if where else ''}{first['msg']}"
    if result.cell != request.cell:
        return None, f"its result file is of another cell: {result.cell}"
    if mistake := mistake_in_details(result.evidence):
        return None, f"its result file is not valid: {mistake}"
    return result, "its result file lacks suites"


def _failure(request: CellRequest, end: ProcessEnd, unreadable: str) -> Failure:
    killed = 128 + signal.SIGKILL
    if end.timed_out:
        minutes = request.profile.timeout_minutes
        message = f"no end after {minutes:g} minutes (timeout_minutes of profile {request.profile_name}): killed"
        return Failure(kind="timeout", message=message, last_lines=end.last_lines)
    if end.stopped:
        return Failure(kind="interrupted", message="the run was stopped", last_lines=end.last_lines)
    if end.over_memory:
        message = f"took more than {request.limits.memory} (limits.memory in matrix.yaml): killed"
        return Failure(kind="out_of_memory", message=message, last_lines=end.last_lines)
    if end.code == killed:
        message = "killed by the system (SIGKILL), most likely out of memory: run with --jobs 1, or see `dmesg`"
        return Failure(kind="out_of_memory", message=message, last_lines=end.last_lines)
    how = f"died of {_signal_name(end.code - 128)}" if end.code > 128 else f"ended with exit code {end.code}"
    return Failure(kind="crash", message=f"the cell {how}, and {unreadable}", last_lines=end.last_lines)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
