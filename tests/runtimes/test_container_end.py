"""What only the engine knows of a cell's end spoils the result, and is never evidence against a cache."""

from typing import Literal

import pytest

from tests.verdict.sample_cells import GATES, cell_request
from toto_compat.contract.request import CellRequest
from toto_compat.contract.result import CellResult, Failure, Outcome, Provenance, SuiteEvidence
from toto_compat.contract.suites import Suite
from toto_compat.runtimes.cell_process import ProcessEnd
from toto_compat.runtimes.container_end import ContainerEnd, judge_end
from toto_compat.verdict.judge import Status, judge


def result_of(request: CellRequest, failure: Failure | None = None) -> CellResult:
    return CellResult(cell=request.cell, request=request, provenance=Provenance(), failure=failure)


def test_a_child_killed_for_memory_spoils_a_cell_that_went_on() -> None:
    request = cell_request(suites=(Suite.RECOMPILE,))
    judged = judge_end(result_of(request), ContainerEnd(ProcessEnd(code=0), out_of_memory=True), request)
    assert judged.failure is not None
    assert judged.failure.kind == "out_of_memory"
    assert "limits.memory" in judged.failure.message


def test_a_hang_after_a_child_was_killed_for_memory_is_told_as_out_of_memory() -> None:
    request = cell_request(suites=(Suite.RECOMPILE,))
    hang = result_of(request, Failure(kind="timeout", message="no end after 30 minutes"))
    judged = judge_end(hang, ContainerEnd(ProcessEnd(code=137, timed_out=True), out_of_memory=True), request)
    assert judged.failure is not None
    assert judged.failure.kind == "out_of_memory"
    assert "no end after 30 minutes" in judged.failure.message


@pytest.mark.parametrize("kind", ["out_of_memory", "interrupted"])
def test_what_is_already_known_about_the_end_is_kept(kind: Literal["out_of_memory", "interrupted"]) -> None:
    request = cell_request(suites=(Suite.RECOMPILE,))
    own = Failure(kind=kind, message="as the cell said")
    judged = judge_end(result_of(request, own), ContainerEnd(ProcessEnd(code=137), out_of_memory=True), request)
    assert judged.failure == own


def test_a_forecast_that_raised_after_a_child_was_killed_for_memory_decides_nothing() -> None:
    request = cell_request(suites=(Suite.RECOMPILE,))
    raised = SuiteEvidence(
        suite=Suite.RECOMPILE,
        outcome=Outcome.MODEL_FAILED,
        failure=Failure(kind="exception", message="A compilation subprocess exited unexpectedly"),
    )
    result = result_of(request).model_copy(update={"evidence": {Suite.RECOMPILE: raised}})
    assert judge(result, GATES).verdict is Status.FAIL
    judged = judge_end(result, ContainerEnd(ProcessEnd(code=0), out_of_memory=True), request)
    found = judged.evidence[Suite.RECOMPILE]
    assert found.outcome is Outcome.ERROR
    assert found.failure is not None
    assert found.failure.kind == "out_of_memory"
    assert "exited unexpectedly" in found.failure.message
    assert judge(judged, GATES).verdict is Status.INCONCLUSIVE
    assert judge_end(result, ContainerEnd(ProcessEnd(code=0)), request) == result


def test_a_lost_engine_is_an_error_of_the_environment() -> None:
    request = cell_request(suites=(Suite.RECOMPILE,))
    judged = judge_end(result_of(request), ContainerEnd(ProcessEnd(code=-1), lost="the engine went away"), request)
    assert judged.failure is not None
    assert judged.failure.kind == "environment"
