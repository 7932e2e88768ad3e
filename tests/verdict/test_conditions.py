"""The conditions of the decision record are ticked by measurements alone."""

import pytest

from tests.verdict.sample_cells import (
    GATES,
    good_result,
    production_incident,
    speed_of,
    speed_run,
    with_figures,
    with_suite,
)
from toto_compat.contract.request import Device
from toto_compat.contract.result import CellResult, Figure
from toto_compat.contract.suites import Suite
from toto_compat.matrix.gates import Gate
from toto_compat.verdict.conditions import conditions
from toto_compat.verdict.decision import DecisionRules, decide
from toto_compat.verdict.judge import judge

KV_CACHE, SHAPES, TOTAL, SPEED = range(4)


def met(*results: CellResult, device: Device = Device.CPU) -> list[bool | None]:
    decision = decide([judge(result, GATES) for result in results], DecisionRules())
    return [condition.met for condition in conditions(decision.devices[device])]


def in_three_processes(result: CellResult, *, compiled_ms: float = 21.0) -> CellResult:
    runs = [speed_run(upstream_ms=52.0, cache_ms=40.0, compiled_ms=compiled_ms, seed=seed) for seed in range(3)]
    return with_suite(result, Suite.SPEED, speed_of(*runs))


def test_a_good_row_in_three_processes_meets_all_four() -> None:
    assert met(in_three_processes(good_result())) == [True] * 4


def test_one_process_does_not_show_consistency() -> None:
    assert met(good_result())[SPEED] is None


def test_a_slow_row_is_not_consistently_twice_as_fast() -> None:
    assert met(in_three_processes(good_result(), compiled_ms=45.0))[SPEED] is False


def test_the_production_incident_meets_none_that_is_about_recompiles() -> None:
    assert met(production_incident())[:3] == [False, False, False]


@pytest.mark.parametrize(("total", "expected"), [(9.0, True), (10.0, False)])
def test_the_total_is_judged_by_the_users_own_limit_whatever_the_gates(total: float, expected: bool) -> None:
    assert met(with_figures(good_result(), {Gate.RECOMPILES_TOTAL: total}))[TOTAL] is expected


def test_nothing_is_ticked_that_was_not_measured() -> None:
    unmeasured = {gate: Figure(value=None, missing="no") for gate in (Gate.RECOMPILES, Gate.RECOMPILES_TOTAL)}
    assert met(with_figures(good_result(), unmeasured))[:3] == [None, None, None]
    assert met(good_result(), device=Device.CUDA) == [None] * 4
