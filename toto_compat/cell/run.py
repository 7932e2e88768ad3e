"""Runs a cell: one fresh process per suite group, and one result of all that they leave.

This process imports no torch: whatever a group does to itself - crash, hang, run out of memory - is a result here.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from pydantic import ValidationError

from toto_compat.cell.fork_server import ForkServer
from toto_compat.cell.group import LAST_LINES, GroupResult, suite_function
from toto_compat.cell.kept import KeptFromTheCandidate
from toto_compat.cell.process_tree import OUT_OF_MEMORY_TEXTS
from toto_compat.cell.provenance import collect_provenance, complete_provenance
from toto_compat.cell.quiet import QuietLock
from toto_compat.contract.demands import broken_demand
from toto_compat.contract.files import utc_now
from toto_compat.contract.machine_faults import what_the_machine_lacks
from toto_compat.contract.references import References, UnusableReferencesError
from toto_compat.contract.request import CellRequest, Device
from toto_compat.contract.result import CellResult, Failure, Outcome, Provenance, SuiteEvidence, blameless
from toto_compat.contract.suites import SUITE_LINE, Group, Suite, suites_of

# The runtime kills the cell at the profile's timeout: stop before that, with a result.
_SHARE_OF_TIMEOUT = 0.95
_SHARES_OF_MEMORY = 3  # two processes, and one share that neither of them has asked for yet
_PREDICTORS = tuple(group.value for group in Group if group.rule.beside)
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class InterruptedCellError(Exception):
    """The cell was told to stop (SIGTERM or SIGINT)."""


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


def plan_groups(request: CellRequest) -> list[GroupRun]:
    """Return the processes of this cell: the first sees the cold compile, the predictor is last or `group_beside`."""
    if request.only_references:
        return [GroupRun(Group.REFERENCE)]
    runs: list[GroupRun] = []
    for group in Group:
        asked = suites_asked_of(request, group)
        if asked:
            over_repeats = group.rule.repeated and any(suite.rule.over_repeats for suite in asked)
            repeats = request.profile.repeats if over_repeats else 1
            runs += [GroupRun(group, number) for number in range(1, repeats + 1)]
    return runs


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


def run_cell(request: CellRequest, request_path: Path, *, command: GroupCommand = group_command) -> CellResult:
    """Run every group and put the result together, whatever happens to them."""
    started = utc_now()
    collected = Collected()
    deadline = time.monotonic() + request.profile.timeout_minutes * 60 * _SHARE_OF_TIMEOUT
    runs = plan_groups(request)
    starter = Starter(request, request_path, command)
    kept = KeptFromTheCandidate(Path(request.work_folder))
    interrupted: Failure | None = None
    provenance = Provenance(**request.origin.model_dump(), started=started)
    try:
        # now rather than at the end: who stops a cell does not wait long for its result; under the lock, since asking
        # is work too, and it disturbed the timing loop of a cell beside this one
        with QuietLock(request.quiet_lock).working():
            provenance = collect_provenance(request.origin, started=started)
        given = take_given(request, kept)
        waiting = list(runs)
        while waiting:
            run = waiting.pop(0)
            if run.group is Group.REFERENCE and given is not None:
                collected.results[run.name] = as_if_computed_here(request, given)
                continue
            say_suites(request, run, "start")
            reason = reason_not_to_run(request, run, collected)
            if reason is not None:
                collected.failures[run.name] = reason
            else:
                companion = group_beside(request, run, waiting, collected)
                waiting = [one for one in waiting if one is not companion]
                kept.before(run.group)
                end = time.monotonic() + seconds_allowed(deadline - time.monotonic(), groups_left=len(waiting) + 1)
                with running_beside(request, companion, collected, end=end, last=not waiting, starter=starter):
                    finish_group(request, start_group(request, run, starter), collected, end=end)
                kept.after(run.group)
            say_suites(request, run, "done")
        ignore_further_stops()
    except InterruptedCellError:
        interrupted = Failure(kind="interrupted", message="the cell was told to stop before it had finished")
    finally:
        starter.close()
    results = list(collected.results.values())
    made = what_was_made(collected)
    references = kept.references(made) if made is not None else None
    if request.only_references and references is not None:
        kept.hand_over()
    return CellResult(
        cell=request.cell,
        request=request,
        provenance=complete_provenance(
            provenance,
            cache_class=next((result.cache_class for result in results if result.cache_class), ""),
            facts=next((result.facts for result in results if result.facts), {}),
            references=references,
        ),
        evidence=gathered_evidence(request, collected, runs),
        failure=interrupted,
    )


def take_given(request: CellRequest, kept: KeptFromTheCandidate) -> References | None:
    """The references that this cell was given, if they can be used; else it computes them."""
    if request.references is None:
        return None
    try:
        kept.take_given(request.references)
    except UnusableReferencesError as error:
        print(f"references that were given are not used: {error}", flush=True)  # noqa: T201 - for the cell's log
        return None
    return request.references


def as_if_computed_here(request: CellRequest, given: References) -> GroupResult:
    return GroupResult(measurements=dict.fromkeys(suites_asked_of(request, Group.REFERENCE), given.made))


def what_was_made(collected: Collected) -> dict[str, Any] | None:
    """Return what the process that computed the references said of them; None if it did not get that far."""
    left = collected.results.get(Group.REFERENCE.value)
    return next(iter(left.measurements.values()), None) if left is not None else None


def seconds_allowed(remaining: float, *, groups_left: int) -> float:
    """Half of what is left, all of it for the last: a group that hangs leaves time for the others to say something."""
    return max(0.0, remaining if groups_left == 1 else remaining / 2)


def reason_not_to_run(request: CellRequest, run: GroupRun, collected: Collected) -> Failure | None:
    """Say why a group would only find out again what is known: without what it works on, or without a forecast; or why
    nothing that it finds out could save the cell."""
    for name in run.group.rule.after:
        left = collected.results.get(name)
        if left is None or name in collected.failures or not left.measurements:
            return Failure(kind="pointless", message=f"the {name} group left nothing to go on with")
    if run.group.rule.pointless_if_forecast_raised and (raised := what_the_forecast_raised(collected)):
        return raised
    could_be_spared = run.group.rule.only_while_it_can_pass or run.number > 1
    if could_be_spared and (broken := demand_broken_so_far(request, collected)):
        return Failure(kind="skipped", message=f"{broken}, so that this cell cannot PASS")
    return None


def demand_broken_so_far(request: CellRequest, collected: Collected) -> str:
    """Name the limit that a finished suite broke. Figures that will be taken back break none."""
    results = collected.results.values()
    if any(result.changed for result in results):
        return ""
    return broken_demand(request.demands, {suite: one for result in results for suite, one in result.evidence.items()})


def what_the_forecast_raised(collected: Collected) -> Failure | None:
    """Say which suite the compiled forecast raised in; a predictor compiles in its own way and is not asked."""
    for name, result in collected.results.items():
        for evidence in () if name in _PREDICTORS else result.evidence.values():
            if evidence.outcome is Outcome.MODEL_FAILED and evidence.failure is not None:
                return Failure(
                    kind="pointless",
                    message=f"the compiled forecast raised in the {evidence.suite.value} suite: "
                    f"{evidence.failure.message}",
                )
    return None


@dataclass(frozen=True)
class StartedGroup:
    """A group whose process is running."""

    run: GroupRun
    process: GroupProcess
    output: Path
    log: Path
    since: float
    kills_before: int


def group_beside(
    request: CellRequest, run: GroupRun, waiting: Iterable[GroupRun], collected: Collected
) -> GroupRun | None:
    """Return the group that runs next to this one; none on a GPU, whose memory is one, or without room for it.

    Where code is compiled for CUDA, the CUDA-graph predictor waits for what that says.
    """
    for_cuda = any(suite.rule.without_gpu for suite in request.profile.suites)
    if request.device is not Device.CPU or for_cuda or not has_room_for_two(request, collected):
        return None
    beside = (one for one in waiting if one.group.rule.beside == run.group.value)
    return next((one for one in beside if reason_not_to_run(request, one, collected) is None), None)


def has_room_for_two(request: CellRequest, collected: Collected) -> bool:
    """Tell whether a core is free, and memory by what the cold compile took: a limit is the cell's, not a process's."""
    observed = collected.results.get(Group.OBSERVE.value)
    figures = observed.evidence[Suite.RECOMPILE].figures if observed and Suite.RECOMPILE in observed.evidence else {}
    peak = figures["compile_peak_bytes"].value if "compile_peak_bytes" in figures else None
    enough_memory = peak is not None and peak <= request.limits.memory_bytes / _SHARES_OF_MEMORY
    return enough_memory and request.limits.cpus > request.limits.threads


@contextlib.contextmanager
def running_beside(
    request: CellRequest, run: GroupRun | None, collected: Collected, *, end: float, last: bool, starter: Starter
) -> Iterator[None]:
    """Run a group next to what happens inside; none of its processes is left, also if the cell is told to stop."""
    if run is None:
        yield
        return
    say_suites(request, run, "start")
    # not a fork: the server has one at a time
    started = start_group(request, run, starter, may_fork=False)
    try:
        yield
    except BaseException:
        end_group(started, collected)
        raise
    now = time.monotonic()
    finish_group(request, started, collected, end=now + seconds_allowed(end - now, groups_left=1 if last else 2))
    say_suites(request, run, "done")


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


def gathered_evidence(request: CellRequest, collected: Collected, runs: list[GroupRun]) -> dict[Suite, SuiteEvidence]:
    """The evidence of every suite that was asked for; what several processes measured comes last, made of the rest."""
    evidence = {
        suite: evidence_of(suite, collected, runs) for suite in request.profile.suites if not suite.rule.combine
    }
    for suite in (suite for suite in request.profile.suites if suite.rule.combine):
        evidence[suite] = evidence_of(suite, collected, runs, of_others=evidence)
    touched = dict.fromkeys(one for result in collected.results.values() for one in result.changed)
    return {suite: without_value(evidence[suite], touched) for suite in request.profile.suites}


def without_value(evidence: SuiteEvidence, touched: Iterable[str]) -> SuiteEvidence:
    """Take the figures back where the candidate changed switches of torch: they are of settings nobody asked for."""
    told = "; ".join(touched)
    if not told:
        return evidence
    why = f"the candidate changed what the cell's settings leave alone: {told}"
    figures = {
        name: figure.model_copy(update={"value": None, "low": None, "high": None, "missing": why})
        for name, figure in evidence.figures.items()
    }
    return evidence.model_copy(update={"figures": figures, "details": {**evidence.details, "changed_switches": told}})


def evidence_of(
    suite: Suite, collected: Collected, runs: list[GroupRun], of_others: dict[Suite, SuiteEvidence] | None = None
) -> SuiteEvidence:
    """One suite's evidence from the processes that took part in it."""
    own = [run for run in runs if run.group in suite.rule.runners and (run.number == 1 or suite.rule.over_repeats)]
    repeats_skipped = {
        run.name: failure.message
        for run in own
        if run.number > 1 and (failure := collected.failures.get(run.name)) and failure.kind == "skipped"
    }
    planned, own = len(own), [run for run in own if run.name not in repeats_skipped]
    last_of_group = {group: suites_of(group)[-1] for group in suite.rule.runners}
    # a process that two suites share counts for the one it is there for: the last
    spent = [collected.seconds.get(run.name, 0.0) for run in own if last_of_group[run.group] is suite]
    seconds = round(sum(spent), 3)
    for run in own:
        left = collected.results.get(run.name)
        if left is not None and suite in left.evidence and may_tell(run.group, left.evidence[suite]):
            evidence = left.evidence[suite]
            return evidence if evidence.seconds else evidence.model_copy(update={"seconds": seconds})
        if left is not None and left.tells_of(suite):
            continue
        failure = collected.failures.get(run.name)
        if failure is None:
            failure = Failure(kind="interrupted", message=f"the {run.name} group was not reached or not finished")
            return SuiteEvidence(suite=suite, outcome=Outcome.NOT_RUN, failure=failure)
        outcome = Outcome.NOT_RUN if failure.kind in ("pointless", "skipped") else Outcome.ERROR
        return SuiteEvidence(suite=suite, outcome=outcome, failure=failure, seconds=seconds)
    if not suite.rule.combine:  # nothing but its references was asked for
        return SuiteEvidence(suite=suite, outcome=Outcome.NOT_RUN, seconds=seconds)
    measurements: dict[Group, list[dict[str, Any]]] = {}
    for run in own:
        measurements.setdefault(run.group, []).append(collected.results[run.name].measurements[suite])
    combined: SuiteEvidence = suite_function(suite.rule.combine)(measurements, of_others or {})
    repeats = next((f"{len(own)} of {planned} processes: {why}" for why in repeats_skipped.values()), "")
    skipped = "; ".join(filter(None, (repeats, combined.skipped)))
    return combined.model_copy(update={"seconds": seconds, "version": suite.rule.version, "skipped": skipped})


def may_tell(group: Group, evidence: SuiteEvidence) -> bool:
    """Say whether a group's evidence of a suite is its to give.

    All may tell that it went wrong there; what was measured comes from the last one that takes part, and from nobody
    where it is put together here: a candidate's process hands over what it was asked for, and no verdict on itself.
    """
    rule = evidence.suite.rule
    return evidence.outcome is not Outcome.MEASURED or (not rule.combine and group is list(rule.runners)[-1])


def say_suites(request: CellRequest, run: GroupRun, what: str) -> None:
    """Progress for whoever started the cell."""
    for suite in suites_asked_of(request, run.group):
        print(f"{SUITE_LINE}{suite.value} {what}", flush=True)  # noqa: T201 - this line is the protocol


def ignore_further_stops() -> None:
    """Once it is clear what the result will be, it is written: nothing may come between."""
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is stop:
            signal.signal(number, signal.SIG_IGN)


def stop(_signal: int, _frame: FrameType | None) -> None:
    ignore_further_stops()
    raise InterruptedCellError
