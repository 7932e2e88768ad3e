"""The process of a suite group: started, waited for, ended with all that it started, and what it left or died of."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from pydantic import ValidationError

from toto_compat.cell.fork_server import ForkServer
from toto_compat.cell.group import LAST_LINES, GroupResult
from toto_compat.cell.process_tree import OUT_OF_MEMORY_TEXTS
from toto_compat.contract.machine_faults import what_the_machine_lacks
from toto_compat.contract.request import CellRequest, Device
from toto_compat.contract.result import Failure, blameless
from toto_compat.contract.suites import Group, Suite, suites_of


@dataclass(frozen=True)
class GroupRun:
    """One process to start: `number` tells the repeats of the speed group apart."""

    group: Group
    number: int = 1

    @property
    def name(self) -> str:
        return self.group.value if self.number == 1 else f"{self.group.value}-{self.number}"


@dataclass
class Collected:
    """Holds what the groups have left so far."""

    results: dict[str, GroupResult] = field(default_factory=dict)
    failures: dict[str, Failure] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


class GroupProcess(Protocol):
    """A process started for a group, or a fork of one that has imported already."""

    @property
    def pid(self) -> int: ...

    def wait(self, timeout: float | None = None) -> int: ...


GroupCommand = Callable[[Path, GroupRun, Path], list[str]]


def group_command(request_path: Path, run: GroupRun, output: Path) -> list[str]:
    return [sys.executable, "-m", "toto_compat.cell.group", *group_arguments(request_path, run, output)]


def group_arguments(request_path: Path, run: GroupRun, output: Path) -> list[str]:
    return [str(request_path), run.group.value, str(output)]


class Starter:
    """Starts the process of a group."""

    def __init__(self, request: CellRequest, request_path: Path, command: GroupCommand) -> None:
        self._request = request
        self._request_path = request_path
        self._command = command
        self._server: ForkServer | None = None
        self._may_fork = command is group_command and request.device is Device.CPU

    def start(self, run: GroupRun, output: Path, log: Path, *, may_fork: bool = True) -> GroupProcess:
        log.write_bytes(b"")
        # a fork has imported torch already: variables of the group's own would come too late
        server = self._fork_server() if may_fork and not run.group.rule.variables else None
        forked = server.start(group_arguments(self._request_path, run, output), log) if server is not None else None
        if forked is not None:
            return forked
        with log.open("ab") as sink:
            return subprocess.Popen(
                self._command(self._request_path, run, output),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=group_environment(self._request, run.group),
                start_new_session=True,
            )

    def _fork_server(self) -> ForkServer | None:
        if self._server is None and self._may_fork:
            environment = group_environment(self._request, Group.OBSERVE)
            log = Path(self._request.work_folder) / "fork_server.log"
            self._server = ForkServer(environment, log, self._request.quiet_lock)
            if not self._server.is_ready():
                self.close()
                self._may_fork = False
        return self._server

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None


def suites_asked_of(request: CellRequest, group: Group) -> list[Suite]:
    return [suite for suite in suites_of(group) if suite in request.profile.suites]


def group_environment(request: CellRequest, group: Group) -> dict[str, str]:
    """The variables of a group's process: the request's, compiler caches that start empty with the cell, its own."""
    work = Path(request.work_folder)
    folders = {
        # not `triton`: a folder of that name in the working directory would be imported instead of the package
        "TORCHINDUCTOR_CACHE_DIR": work / "inductor-cache",
        "TRITON_CACHE_DIR": work / "triton-cache",
        "TMPDIR": work / "tmp",
    }
    for folder in folders.values():
        folder.mkdir(parents=True, exist_ok=True)
    here = str(Path(__file__).parent.parent.parent)
    environment = {
        **os.environ,
        **request.variables,
        **{name: str(folder) for name, folder in folders.items()},
        "PYTHONSAFEPATH": "1",  # the working directory is no place to import from
        "PYTHONPATH": os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH", "")))),
    }
    for name in ("TORCH_LOGS", "TORCH_TRACE", "TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"):
        environment.pop(name, None)
    return {**environment, **({} if request.device is Device.CUDA else group.rule.variables)}


@dataclass(frozen=True)
class StartedGroup:
    """A group whose process is running."""

    run: GroupRun
    process: GroupProcess
    output: Path
    log: Path
    since: float
    kills_before: int


def start_group(request: CellRequest, run: GroupRun, starter: Starter, *, may_fork: bool = True) -> StartedGroup:
    work = Path(request.work_folder)
    output, log = work / f"{run.name}.json", work / f"{run.name}.log"
    output.unlink(missing_ok=True)
    kills_before, since = out_of_memory_kills(), time.monotonic()
    return StartedGroup(run, starter.start(run, output, log, may_fork=may_fork), output, log, since, kills_before)


def finish_group(request: CellRequest, started: StartedGroup, collected: Collected, *, end: float) -> None:
    """Wait for the process and keep what it left; of suites that it left nothing of, what became of it."""
    run, allowance = started.run, max(0.0, end - time.monotonic())
    timed_out = False
    try:
        started.process.wait(timeout=allowance)
    except subprocess.TimeoutExpired:
        timed_out = True
    finally:
        # also when the cell is told to stop meanwhile: the suites that were finished by then are
        returncode, killed_for_memory = end_group(started, collected)
    result = collected.results.get(run.name)
    if result is not None and all(result.tells_of(suite) for suite in suites_asked_of(request, run.group)):
        return
    tail = last_lines(started.log)
    if timed_out:
        waited = end - started.since
        collected.failures[run.name] = Failure(
            kind="timeout",
            message=f"the {run.name} group did not finish within {waited:.0f} s; raise timeout_minutes of the profile",
            last_lines=tail,
        )
    else:
        collected.failures[run.name] = failure_of_process(run, returncode, tail, killed_for_memory=killed_for_memory)


def end_group(started: StartedGroup, collected: Collected) -> tuple[int, bool]:
    """End the process and keep what it left. Its exit code, and whether one was killed for memory meanwhile."""
    returncode = kill_group(started.process)
    name = started.run.name
    collected.seconds[name] = round(time.monotonic() - started.since, 3)
    killed_for_memory = out_of_memory_kills() > started.kills_before
    result = read_result(started.output)
    if result is not None:
        collected.results[name] = without_blame(result) if killed_for_memory else result
    return returncode, killed_for_memory


def read_result(output: Path) -> GroupResult | None:
    try:
        return GroupResult.model_validate_json(output.read_text(encoding="utf-8"))
    except (OSError, ValidationError):
        return None


def without_blame(result: GroupResult) -> GroupResult:
    why = "a process was killed: out of memory; raise limits.memory or shrink the workload"
    return result.model_copy(
        update={"evidence": {suite: blameless(one, why) for suite, one in result.evidence.items()}}
    )


def failure_of_process(run: GroupRun, returncode: int, tail: tuple[str, ...], *, killed_for_memory: bool) -> Failure:
    """Return what a process died of that left no result, or not of every suite."""
    if returncode < 0:
        ended = f"was killed by {signal.Signals(-returncode).name}"
    elif returncode > 0:
        ended = f"ended with exit code {returncode}"
    else:
        ended = "left no readable result"
    said_so = any(text in line for line in tail for text in OUT_OF_MEMORY_TEXTS)
    if killed_for_memory or said_so:
        return Failure(
            kind="out_of_memory",
            message=f"the {run.name} group {ended}: out of memory; raise limits.memory or shrink the workload",
            last_lines=tail,
        )
    if advice := what_the_machine_lacks("\n".join(tail)):
        return Failure(kind="environment", message=f"the {run.name} group {ended}: {advice}", last_lines=tail)
    return Failure(kind="crash", message=f"the {run.name} group {ended}", last_lines=tail)


def kill_group(process: GroupProcess) -> int:
    """End the process and what it started: compile workers outlive a parent that was killed. Its exit code."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def last_lines(log: Path) -> tuple[str, ...]:
    text = log.read_bytes()[-20_000:].decode("utf-8", errors="replace")
    return tuple(line[:500] for line in text.splitlines()[-LAST_LINES:])


def out_of_memory_kills() -> int:
    """Tell how many processes the kernel has killed for memory in this control group; 0 where it does not say."""
    for file in ("memory.events", "memory/memory.oom_control"):  # control groups version 2, version 1
        try:
            events = Path("/sys/fs/cgroup", file).read_text(encoding="ascii")
        except OSError:
            continue
        return sum(int(line.split()[1]) for line in events.splitlines() if line.startswith("oom_kill "))
    return 0
