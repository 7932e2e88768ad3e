"""The sabotages of the acceptance: one or more of each gate that a GPU decides, and what counts as caught."""

import ast

import pytest

from tests.acceptance.gpu_cells import checked, sabotaged
from tests.verdict.sample_cells import with_suite
from tests.verdict.stored_runs import judged_run
from toto_compat.acceptance.campaign import Ended
from toto_compat.acceptance.sabotages import ALL, Sabotage, caught, sabotaged_caches
from toto_compat.contract.result import Failure, Outcome, SuiteEvidence
from toto_compat.matrix.gates import Gate
from toto_compat.verdict.judge import JudgedCell, Status


def cell_of(sabotage: Sabotage, environment: str = "torch-2.9.0-cu128", *, wrong: bool = True) -> JudgedCell:
    name = f"{environment}/{sabotage.cache}/reduce-overhead"
    [cell] = judged_run(sabotaged(name) if wrong else checked(name)).cells
    return cell


def test_every_kind_of_gate_has_one() -> None:
    gates = {one.gate for one in ALL}
    assert gates >= {Gate.EQUIVALENCE, Gate.RECOMPILES, Gate.COMPILE_ACTIVE, Gate.CUDAGRAPHS, Gate.SPEEDUP}
    assert gates >= {Gate.MEMORY, Gate.MEMORY_GROWTH}
    assert len({one.cache for one in ALL}) == len(ALL)


def test_the_file_has_a_class_for_each() -> None:
    classes = {node.name for node in ast.parse(sabotaged_caches()).body if isinstance(node, ast.ClassDef)}
    assert {one.class_name for one in ALL} <= classes


@pytest.mark.parametrize("sabotage", ALL, ids=lambda one: one.name)
def test_one_is_caught_if_its_own_gate_fails_it_and_not_if_that_stays_green(sabotage: Sabotage) -> None:
    assert caught(sabotage, cell_of(sabotage))[0] is Ended.HELD
    ended, told = caught(sabotage, cell_of(sabotage, wrong=False))
    assert ended is Ended.BROKEN
    assert "NOT caught" in told


@pytest.mark.parametrize("sabotage", ALL, ids=lambda one: one.name)
def test_one_that_raised_was_caught_only_if_that_is_how_torch_refuses_it(sabotage: Sabotage) -> None:
    """An error turns every gate red, also one that would see nothing."""
    cell, suite = cell_of(sabotage).result, sabotage.gate.rule.suite
    failure = Failure(kind="exception", message="no kernel image is available")
    raised = SuiteEvidence(suite=suite, outcome=Outcome.MODEL_FAILED, failure=failure)
    [judged] = judged_run(with_suite(cell, suite, raised)).cells
    assert judged.gates[sabotage.gate].status is Status.FAIL
    ended, told = caught(sabotage, judged)
    assert ended is (Ended.HELD if sabotage.of_graphs else Ended.NOT_SHOWN)
    assert "no kernel image is available" in told


def test_on_a_cpu_a_gate_of_cuda_graphs_shows_nothing_but_its_prediction() -> None:
    [sabotage] = [one for one in ALL if one.name == "writes_an_input"]
    ended, told = caught(sabotage, cell_of(sabotage, "torch-2.13.0-cpu"))
    assert ended is Ended.NOT_SHOWN
    assert "predicted 9" in told
