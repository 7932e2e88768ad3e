"""One suite group in one fresh process: `python -m toto_compat.cell.group <request.json> <group> <output.json>`.

dynamo, inductor and CUDA keep state per process, so suites that would disturb each other never share one.
"""

import ctypes
import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from toto_compat.cell.provenance import torch_facts
from toto_compat.cell.quiet import QuietLock
from toto_compat.contract.files import write_atomically
from toto_compat.contract.request import CellRequest
from toto_compat.contract.result import Failure, Outcome, SuiteEvidence
from toto_compat.contract.strict_model import StrictModel
from toto_compat.contract.suites import Group, Suite, suites_of

LAST_LINES = 25
_SUITES = "toto_compat.cell.suites"


class GroupResult(StrictModel):
    """Holds what a group leaves behind: finished evidence, and measurements that become evidence with other groups'."""

    evidence: dict[Suite, SuiteEvidence] = Field(default={})
    measurements: dict[Suite, dict[str, Any]] = Field(default={})
    cache_class: str = ""
    changed: tuple[str, ...] = ()  # switches of torch that the candidate changed beyond the cell's settings
    facts: dict[str, Any] = Field(default={})  # of torch, for the provenance

    def tells_of(self, suite: Suite) -> bool:
        """Say whether the suite was finished, be it with an error."""
        return suite in self.evidence or suite in self.measurements


def suite_function(place: str) -> Callable[..., Any]:
    """The function that a row of the suite table names: 'memory:combine'."""
    module, _, name = place.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(f"{_SUITES}.{module}"), name)
    return function


def run_group(request: CellRequest, group: Group, save: Callable[[GroupResult], None]) -> None:
    """Run the group's suites and save after each what there is so far.

    What a suite raises becomes its evidence; a crash of the process loses only the suite that it happens in.
    """
    quiet = QuietLock(request.quiet_lock)
    with quiet.working():
        # torch, imported here and not above: the imports are work too, and this lock says so to a timing loop beside
        import torch

        from toto_compat.cell.session import Session
        from toto_compat.cell.tampering import watching_the_candidate

        torch.set_num_threads(request.limits.threads)
        session = Session.of(request, quiet)
        for suite in _asked_of(request, group):
            suite_function(suite.rule.runners[group])  # imported before any candidate is
        with watching_the_candidate(request.settings) as touched_by_it:
            for result in _results(session, request, group):
                touched = touched_by_it() if group.rule.imports_the_candidate else ()
                touched += session.changed_elsewhere
                known = {"cache_class": session.cache_class, "changed": touched, "facts": torch_facts()}
                save(result.model_copy(update=known))


def _asked_of(request: CellRequest, group: Group) -> list[Suite]:
    return [suite for suite in suites_of(group) if suite in request.profile.suites]


def _results(session: Any, request: CellRequest, group: Group) -> Iterator[GroupResult]:
    """Return what there is after each suite of the group that was asked for."""
    evidence: dict[Suite, SuiteEvidence] = {}
    measurements: dict[Suite, dict[str, Any]] = {}
    for suite in _asked_of(request, group):
        outcome = measured(suite, partial(_run_suite, suite.rule.runners[group], session))
        if isinstance(outcome, SuiteEvidence):
            evidence[suite] = outcome
        else:
            measurements[suite] = outcome
        yield GroupResult(evidence=dict(evidence), measurements=dict(measurements))


def _run_suite(runner: str, session: Any) -> SuiteEvidence | StrictModel:
    outcome: SuiteEvidence | StrictModel = suite_function(runner)(session)
    return outcome


def measured(suite: Suite, run: Callable[[], SuiteEvidence | StrictModel]) -> SuiteEvidence | dict[str, Any]:
    """Run a suite and time it; an exception becomes evidence against the cell or an error of the harness."""
    # torch comes with it, which the process that only starts groups does without
    from toto_compat.cell.trial import CandidateError

    start = time.perf_counter()
    try:
        outcome = run()
    except CandidateError as error:
        outcome = SuiteEvidence(suite=suite, outcome=Outcome.MODEL_FAILED, failure=failure_of(error.cause))
    except Exception as error:
        outcome = SuiteEvidence(suite=suite, outcome=Outcome.ERROR, failure=failure_of(error))
    if not isinstance(outcome, SuiteEvidence):
        return outcome.model_dump(mode="json")
    seconds = round(time.perf_counter() - start, 3)
    return outcome.model_copy(update={"seconds": seconds, "version": suite.rule.version})


def failure_of(error: BaseException) -> Failure:
    """The first meaningful line of what was raised, and the end of its traceback."""
    # torch comes with it, see above
    from toto_compat.cell.trial import fault_of_the_machine, is_out_of_memory, telling_line

    lines = "".join(traceback.format_exception(error)).splitlines()
    advice = fault_of_the_machine(error)
    kind: Literal["out_of_memory", "environment", "exception"] = "environment" if advice else "exception"
    return Failure(
        kind="out_of_memory" if is_out_of_memory(error) else kind,
        message=f"{telling_line(error)}; {advice}" if advice else telling_line(error),
        last_lines=tuple(lines[-LAST_LINES:]),
    )


def die_with_the_orchestrator() -> None:
    """A killed orchestrator must not leave a compiling process behind."""
    if sys.platform == "linux":
        parent_death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None, use_errno=True).prctl(parent_death_signal, signal.SIGKILL)


def main(arguments: list[str]) -> int:
    request_path, group, output_path = arguments
    die_with_the_orchestrator()
    request = CellRequest.model_validate_json(Path(request_path).read_text(encoding="utf-8"))
    output = Path(output_path)
    run_group(request, Group(group), lambda result: write_atomically(output, result.model_dump_json(by_alias=True)))
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # Taking dynamo's graphs down took five seconds after a large lowering, without the lock: the timing loop of a cell
    # beside it was disturbed. What is left behind is on disk; a fork ends like this, too.
    os._exit(code)
