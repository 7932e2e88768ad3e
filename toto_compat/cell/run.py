"""Runs a cell: one fresh process per suite group, and one result of all that they leave.

This process imports no torch: whatever a group does to itself - crash, hang, run out of memory - is a result here.
"""

import contextlib
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from toto_compat.cell.gathering import gathered_evidence
from toto_compat.cell.group import GroupResult
from toto_compat.cell.group_process import (
    Collected,
    GroupCommand,
    GroupRun,
    Starter,
    end_group,
    finish_group,
    group_command,
    start_group,
    suites_asked_of,
)
from toto_compat.cell.kept import KeptFromTheCandidate
from toto_compat.cell.provenance import collect_provenance, complete_provenance
from toto_compat.cell.quiet import QuietLock
from toto_compat.contract.demands import broken_demand
from toto_compat.contract.files import utc_now
from toto_compat.contract.references import References, UnusableReferencesError
from toto_compat.contract.request import CellRequest, Device
from toto_compat.contract.result import CellResult, Failure, Outcome, Provenance
from toto_compat.contract.suites import SUITE_LINE, Group, Suite

# The runtime kills the cell at the profile's timeout: stop before that, with a result.
_SHARE_OF_TIMEOUT = 0.95
_SHARES_OF_MEMORY = 3  # two processes, and one share that neither of them has asked for yet
_PREDICTORS = tuple(group.value for group in Group if group.rule.beside)
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class InterruptedCellError(Exception):
    """The cell was told to stop (SIGTERM or SIGINT)."""


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
