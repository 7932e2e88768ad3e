"""Two runs of the same thing raise no alarm; a real 20 % slowdown does."""

import pytest

from tests.verdict.sample_cells import (
    GATES,
    good_result,
    production_incident,
    speed_of,
    speed_run,
    suite_error,
    with_figures,
    with_suite,
)
from toto_compat.contract.request import Device
from toto_compat.contract.result import CellResult, Figure, Outcome
from toto_compat.contract.suites import Suite
from toto_compat.matrix.gates import Gate
from toto_compat.verdict.comparison import Change, RowChange, compare
from toto_compat.verdict.judge import Status, judge


def compared(before: CellResult | None, after: CellResult | None) -> RowChange:
    rows = compare(*([judge(result, GATES)] if result else [] for result in (before, after)))
    assert len(rows) == 1
    return rows[0]


def timed(compiled_ms: float, *, seed: int, machine: float = 1.0) -> CellResult:
    run = speed_run(upstream_ms=52.0 * machine, cache_ms=40.0 * machine, compiled_ms=compiled_ms * machine, seed=seed)
    return with_suite(good_result(), Suite.SPEED, speed_of(run))


@pytest.mark.parametrize("seed", range(10))
def test_two_runs_of_the_same_thing_raise_no_alarm(seed: int) -> None:
    assert compared(timed(21.0, seed=seed), timed(21.0, seed=seed + 100)).change is Change.SAME


@pytest.mark.parametrize("seed", range(10))
def test_a_slowdown_of_twenty_per_cent_is_seen(seed: int) -> None:
    row = compared(timed(21.0, seed=seed), timed(21.0 * 1.2, seed=seed + 100))
    assert row.change is Change.REGRESSED
    assert "speedup" in row.text
    back = compared(timed(21.0 * 1.2, seed=seed), timed(21.0, seed=seed + 100))
    assert back.change is Change.IMPROVED


def test_a_slower_machine_is_not_a_slower_compile() -> None:
    assert compared(timed(21.0, seed=1), timed(21.0, seed=2, machine=1.5)).change is Change.SAME


def test_a_verdict_that_flips_inside_the_noise_is_the_same_and_says_so() -> None:
    before = with_figures(good_result(), {Gate.SPEEDUP: Figure(value=2.01, low=2.01, high=2.15)})
    after = with_figures(good_result(), {Gate.SPEEDUP: Figure(value=1.98, low=1.98, high=2.12)})
    row = compared(before, after)
    assert (row.change, row.before, row.after) == (Change.SAME, Status.PASS, Status.FAIL)
    assert "within noise" in row.text


def test_a_count_that_rose_is_a_regression_even_within_its_limit() -> None:
    row = compared(good_result(), with_figures(good_result(), {Gate.RECOMPILES_TOTAL: 3.0}))
    assert row.change is Change.REGRESSED
    assert "recompiles_total 0 before, 3 now" in row.text


def test_a_row_that_fails_now_is_regressed_and_one_that_passes_now_improved() -> None:
    broken = with_figures(good_result(), {Gate.EQUIVALENCE: 40.0})
    assert compared(good_result(), broken).change is Change.REGRESSED
    assert compared(broken, good_result()).change is Change.IMPROVED


def test_a_forecast_that_raises_now_is_regressed() -> None:
    raised = suite_error(Suite.RECOMPILE, Outcome.MODEL_FAILED, "Unsupported: x")
    row = compared(good_result(), with_suite(good_result(), Suite.RECOMPILE, raised))
    assert row.change is Change.REGRESSED
    assert "Unsupported: x" in row.text


def test_evidence_that_is_gone_is_missing_and_says_why() -> None:
    gone = with_suite(good_result(), Suite.SPEED, suite_error(Suite.SPEED, Outcome.ERROR, "out of memory"))
    row = compared(good_result(), gone)
    assert row.change is Change.MISSING
    assert "out of memory" in row.text


def test_rows_of_one_run_only_are_new_or_missing() -> None:
    assert compared(None, good_result()).change is Change.NEW
    assert compared(good_result(), None).change is Change.MISSING


def test_a_predicted_count_that_rose_is_told_as_predicted() -> None:
    row = compared(good_result(cache="list_index"), production_incident())
    assert any("cudagraphs 0 before, 8 now (predicted)" in gate.text for gate in row.gates)


def test_small_changes_of_memory_are_noise_and_large_ones_are_not() -> None:
    near = with_figures(good_result(), {Gate.MEMORY: 1.25})
    far = with_figures(good_result(), {Gate.MEMORY: 1.45})
    assert compared(good_result(), near).change is Change.SAME
    assert compared(good_result(), far).change is Change.REGRESSED


def test_one_environment_on_two_devices_is_two_rows() -> None:
    gpu = good_result(build="cu128", mode="reduce-overhead")
    cpu = good_result(build="cu128", mode="reduce-overhead", device=Device.CPU)
    rows = compare([judge(gpu, GATES)], [judge(cpu, GATES)])
    assert [row.change for row in rows] == [Change.MISSING, Change.NEW]


@pytest.mark.parametrize(
    ("before", "after", "change"), [(0.5, 0.99, "regressed"), (0.5, 0.6, "same"), (0.9, 0.4, "improved")]
)
def test_an_equivalence_ratio_that_drifts_below_its_limit_is_noticed(before: float, after: float, change: str) -> None:
    old, new = (judge(with_figures(good_result(), {Gate.EQUIVALENCE: ratio}), GATES) for ratio in (before, after))
    [row] = compare([old], [new])
    assert row.change.value == change
    assert ("equivalence" in row.text) is (change != "same")
