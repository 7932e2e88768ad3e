"""One suite group in one fresh process: `python -m toto_compat.suites.group <request.json> <group> <output.json>`.

dynamo, inductor and CUDA keep state per process, so suites that would disturb each other never share one.
"""

import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import Field

from toto_compat.evidence.provenance import torch_facts
from toto_compat.evidence.schema import CellRequest, Failure, Outcome, SuiteEvidence
from toto_compat.matrix.schema import Suite
from toto_compat.strict_model import StrictModel
from toto_compat.suites.memory import MemoryRun, run_memory, watching_the_tree
from toto_compat.suites.quiet import QuietLock
from toto_compat.suites.speed import SpeedRun, first_forecast_seconds, run_speed

LAST_LINES = 25


class Group(StrEnum):
    """What runs together in one process, in the order of the cell."""

    OBSERVE = "observe"
    EQUIVALENCE = "equivalence"
    SPEED = "speed"
    MEMORY_REFERENCE = "memory_reference"
    CUDAGRAPH = "cudagraph"


SUITES_OF_GROUP: dict[Group, tuple[Suite, ...]] = {
    Group.OBSERVE: (Suite.RECOMPILE,),
    Group.EQUIVALENCE: (Suite.EQUIVALENCE, Suite.DETERMINISM),
    Group.SPEED: (Suite.MEMORY, Suite.SPEED),  # memory first, while the compiled model is all the process holds
    Group.MEMORY_REFERENCE: (Suite.MEMORY,),
    Group.CUDAGRAPH: (Suite.CUDAGRAPH,),
}


class GroupResult(StrictModel):
    """What a group leaves behind: finished evidence, or raw measurements that become evidence with other groups'."""

    evidence: dict[Suite, SuiteEvidence] = Field(default={})
    speed: SpeedRun | None = None
    memory: MemoryRun | None = None
    compile_peak_bytes: int | None = None
    cache_class: str = ""
    facts: dict[str, Any] = Field(default={})  # of torch, for the provenance

    def tells_of(self, suite: Suite) -> bool:
        """Whether the suite was finished, be it with an error."""
        measurements = {Suite.SPEED: self.speed, Suite.MEMORY: self.memory}
        return suite in self.evidence or measurements.get(suite) is not None


def run_group(request: CellRequest, group: Group, save: Callable[[GroupResult], None]) -> None:
    """Run the group's suites and save after each what there is so far.

    What a suite raises becomes its evidence; a crash of the process loses only the suite that it happens in.
    """
    quiet = QuietLock(request.quiet_lock)
    with quiet.working():  # the imports are work too
        import torch

        from toto_compat.suites.trial import Trial

        torch.set_num_threads(request.limits.threads)
        for result in _RUNNERS[group](Trial.of(request, quiet), request):
            save(result.model_copy(update={"facts": torch_facts()}))


def _observe(trial: Any, _request: CellRequest) -> Iterator[GroupResult]:
    from toto_compat.suites.recompile import run_recompile

    classes: list[str] = []

    def recompile() -> SuiteEvidence:
        model = trial.compiled(batch_sizes=trial.batch_sizes)
        classes.append(model.cache_class)
        return run_recompile(trial, model)

    with watching_the_tree() as tree:
        evidence = measured(Suite.RECOMPILE, recompile)
    yield GroupResult(
        evidence={Suite.RECOMPILE: evidence}, compile_peak_bytes=tree.peak, cache_class=next(iter(classes), "")
    )


def _equivalence(trial: Any, request: CellRequest) -> Iterator[GroupResult]:
    from toto_compat.suites.equivalence import run_determinism, run_equivalence

    candidates: list[Any] = []

    def candidate() -> Any:
        if not candidates:
            candidates.append(trial.compiled())
        return candidates[0]

    runners: dict[Suite, Callable[[], SuiteEvidence]] = {
        Suite.EQUIVALENCE: lambda: run_equivalence(trial, request.profile, candidate()),
        Suite.DETERMINISM: lambda: run_determinism(trial, candidate()),
    }
    evidence: dict[Suite, SuiteEvidence] = {}
    for suite in (suite for suite in runners if suite in request.profile.suites):
        evidence[suite] = measured(suite, runners[suite])
        yield GroupResult(evidence=dict(evidence), cache_class=candidates[0].cache_class if candidates else "")


def _speed(trial: Any, request: CellRequest) -> Iterator[GroupResult]:
    speeds: list[SpeedRun] = []
    memories: list[MemoryRun] = []
    started: list[tuple[Any, float]] = []

    def candidate() -> tuple[Any, float]:
        if not started:
            # told the same as the model of the cold compile, or a warm start would be one of something else
            model = trial.compiled(batch_sizes=trial.batch_sizes)
            started.append((model, first_forecast_seconds(trial, model)))
        return started[0]

    def memory() -> SuiteEvidence:
        memories.append(run_memory(trial, candidate()[0]))
        return SuiteEvidence(suite=Suite.MEMORY, outcome=Outcome.MEASURED)

    def speed() -> SuiteEvidence:
        speeds.append(run_speed(trial, request.profile, *candidate()))
        return SuiteEvidence(suite=Suite.SPEED, outcome=Outcome.MEASURED)

    runners = {Suite.MEMORY: memory, Suite.SPEED: speed}
    evidence: dict[Suite, SuiteEvidence] = {}
    for suite in (suite for suite in runners if suite in request.profile.suites):
        evidence[suite] = measured(suite, runners[suite])
        yield GroupResult(
            # what was measured becomes evidence only together with what other processes measured
            evidence={suite: found for suite, found in evidence.items() if found.outcome is not Outcome.MEASURED},
            speed=next(iter(speeds), None),
            memory=next(iter(memories), None),
        )


def _memory_reference(trial: Any, _request: CellRequest) -> Iterator[GroupResult]:
    runs: list[MemoryRun] = []

    def memory() -> SuiteEvidence:
        runs.append(run_memory(trial, trial.eager()))
        return SuiteEvidence(suite=Suite.MEMORY, outcome=Outcome.MEASURED)

    evidence = measured(Suite.MEMORY, memory)
    yield GroupResult(memory=runs[0]) if runs else GroupResult(evidence={Suite.MEMORY: evidence})


def _cudagraph(trial: Any, _request: CellRequest) -> Iterator[GroupResult]:
    from toto_compat.suites.cudagraph import run_cudagraph

    yield GroupResult(evidence={Suite.CUDAGRAPH: measured(Suite.CUDAGRAPH, lambda: run_cudagraph(trial))})


# Each yields after every suite what the group has so far.
_RUNNERS: dict[Group, Callable[[Any, CellRequest], Iterator[GroupResult]]] = {
    Group.OBSERVE: _observe,
    Group.EQUIVALENCE: _equivalence,
    Group.SPEED: _speed,
    Group.MEMORY_REFERENCE: _memory_reference,
    Group.CUDAGRAPH: _cudagraph,
}


def measured(suite: Suite, run: Callable[[], SuiteEvidence]) -> SuiteEvidence:
    """Run a suite and time it; an exception becomes evidence against the cell or an error of the harness."""
    from toto_compat.suites.trial import CandidateError

    start = time.perf_counter()
    try:
        evidence = run()
    except CandidateError as error:
        evidence = SuiteEvidence(suite=suite, outcome=Outcome.MODEL_FAILED, failure=failure_of(error.cause))
    except Exception as error:
        evidence = SuiteEvidence(suite=suite, outcome=Outcome.ERROR, failure=failure_of(error))
    return evidence.model_copy(update={"seconds": round(time.perf_counter() - start, 3)})


def failure_of(error: BaseException) -> Failure:
    """The first meaningful line of what was raised, and the end of its traceback."""
    from toto_compat.suites.trial import is_out_of_memory, telling_line

    lines = "".join(traceback.format_exception(error)).splitlines()
    return Failure(
        kind="out_of_memory" if is_out_of_memory(error) else "exception",
        message=telling_line(error),
        last_lines=tuple(lines[-LAST_LINES:]),
    )


def write_atomically(path: Path, text: str) -> None:
    """Readers see the old file or the whole new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


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
    sys.exit(main(sys.argv[1:]))
