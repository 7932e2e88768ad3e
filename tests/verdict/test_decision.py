"""The answer per device, and that CPU rows never speak for CUDA."""

from dataclasses import replace
from typing import Any

import pytest

from tests.verdict.sample_cells import (
    GATES,
    good_result,
    production_incident,
    provenance,
    speed_of,
    speed_run,
    with_figures,
    with_suite,
)
from toto_compat.contract.cell_name import CellName
from toto_compat.contract.gate_limit import GateLimit
from toto_compat.contract.request import CompileSettings, Device
from toto_compat.contract.result import CellResult
from toto_compat.contract.suites import Suite
from toto_compat.matrix.gates import Gate
from toto_compat.verdict.decision import Answer, Decision, DecisionRules, DeviceDecision, decide
from toto_compat.verdict.judge import judge
from toto_compat.verdict.verdict_rows import settings_to_copy

RULES = DecisionRules(production_profile="quick", production_workloads=("quick",))  # what the sample cells ran


def decided(*results: CellResult, rules: DecisionRules = RULES) -> Decision:
    return decide([judge(result, GATES) for result in results], rules)


def in_processes(count: int, result: CellResult) -> CellResult:
    """The same result, timed in so many processes."""
    runs = [speed_run(upstream_ms=52.0, cache_ms=40.0, compiled_ms=21.0, seed=seed) for seed in range(count)]
    return with_suite(result, Suite.SPEED, speed_of(*runs))


def on_gpu(**changes: Any) -> CellResult:
    return good_result(**{"build": "cu128", "mode": "reduce-overhead", "torch": "2.9.0", **changes})


def test_a_cpu_row_that_passes_leaves_cuda_unknown() -> None:
    decision = decided(good_result())
    assert decision.devices[Device.CPU].answer is Answer.ENABLE
    assert decision.devices[Device.CUDA].answer is Answer.NOT_ENOUGH_EVIDENCE
    assert decision.devices[Device.CUDA].next_commands == ("nox -s matrix -- --device cuda",)
    assert decision.sentence.startswith("On CUDA it is not known whether compile can go back on")
    assert "This says nothing about CUDA." in decision.sentence


def test_a_cuda_wheel_on_the_cpu_speaks_for_the_cpu_only() -> None:
    decision = decided(good_result(build="cu128", device=Device.CPU))
    assert decision.devices[Device.CUDA].answer is Answer.NOT_ENOUGH_EVIDENCE


def test_enable_names_environment_cache_mode_releases_and_break_even() -> None:
    decision = decided(on_gpu(), on_gpu(torch="2.8.0"), production_incident(build="cu128"))
    found = decision.devices[Device.CUDA]
    assert found.answer is Answer.ENABLE
    assert found.environments == ("torch-2.8.0-cu128", "torch-2.9.0-cu128")
    assert found.contender is not None
    assert found.contender.history.text == "good in 2.8.0 and 2.9.0 (not tried: 2.13.0 after)"
    for part in ("torch-2.9.0-cu128", "fixed_size", "reduce-overhead", "good in 2.8.0 and 2.9.0"):
        assert part in found.sentence
    assert found.break_even_cold is not None and found.break_even_cold.value
    assert live_lines(found) == [
        "export TOTO_DISABLE_COMPILE=0",
        "export TOTO_COMPILE=1",
        "export TOTO_COMPILE_MODE=reduce-overhead",
        "export TOTO_COMPILE_BACKEND=inductor",
    ]
    assert [cell.result.cell.environment for cell in found.allowed] == ["torch-2.9.0-cu128", "torch-2.8.0-cu128"]


@pytest.mark.parametrize("slower_release", ["2.8.0", "2.9.0"])
def test_the_gain_that_is_promised_holds_in_every_environment_named(slower_release: str) -> None:
    faster_release = "2.9.0" if slower_release == "2.8.0" else "2.8.0"
    decision = decided(
        with_figures(in_processes(3, on_gpu(torch=slower_release)), {Gate.SPEEDUP: 2.1}),
        with_figures(in_processes(3, on_gpu(torch=faster_release)), {Gate.SPEEDUP: 4.3}),
    )
    found = decision.devices[Device.CUDA]
    assert found.environments == ("torch-2.8.0-cu128", "torch-2.9.0-cu128")
    assert "at least 2.10x faster" in found.sentence


def test_no_gain_is_promised_where_an_environment_named_was_not_timed() -> None:
    gates: dict[Gate, GateLimit] = {gate: limit for gate, limit in GATES.items() if gate is not Gate.SPEEDUP}
    untimed = with_figures(on_gpu(torch="2.8.0"), {Gate.SPEEDUP: None})
    found = decide([judge(result, gates) for result in (untimed, on_gpu())], RULES).devices[Device.CUDA]
    assert found.environments == ("torch-2.8.0-cu128", "torch-2.9.0-cu128")
    assert "at least" not in found.sentence


def test_settings_that_were_needed_are_part_of_the_answer() -> None:
    settings = CompileSettings(capture_scalar_outputs=True, recompile_limit=256)
    decision = decided(
        on_gpu(cache="compile_friendly", settings_name="production", settings=settings),
        production_incident(build="cu128"),
    )
    found = decision.devices[Device.CUDA]
    assert found.answer is Answer.ENABLE_WITH_SETTINGS
    assert "# forecaster() also applies: capture_scalar_outputs=True, recompile_limit=256" in settings_to_copy(found)


def test_stock_settings_are_preferred_where_both_pass() -> None:
    decision = decided(on_gpu(settings_name="production", seed=2), on_gpu())
    contender = decision.devices[Device.CUDA].contender
    assert contender is not None and contender.settings == "stock"


def test_only_failures_keep_compile_off_and_name_the_closest_row() -> None:
    slow = with_suite(on_gpu(), Suite.SPEED, speed_of(speed_run(upstream_ms=52.0, cache_ms=50.0, compiled_ms=40.0)))
    decision = decided(production_incident(build="cu128"), slow)
    found = decision.devices[Device.CUDA]
    assert (found.answer, found.decided_by) == (Answer.KEEP_OFF, Gate.SPEEDUP)
    assert "fixed_size/reduce-overhead" in found.sentence
    assert settings_to_copy(found) == ("export TOTO_DISABLE_COMPILE=1",)


def test_of_rows_with_one_failure_the_one_stopped_last_is_closest() -> None:
    breaks = with_figures(on_gpu(cache="compile_friendly"), {Gate.GRAPH_BREAKS: 12.0})
    heavy = with_figures(on_gpu(), {Gate.MEMORY: 1.9})
    assert "closest is torch-2.9.0-cu128/fixed_size" in decided(heavy, breaks).sentence
    assert "closest is torch-2.9.0-cu128/fixed_size" in decided(breaks, heavy).sentence


def test_one_undecided_row_among_failures_is_not_enough_evidence() -> None:
    undecided = with_figures(on_gpu(), {Gate.MEMORY: None})
    decision = decided(production_incident(build="cu128"), undecided)
    found = decision.devices[Device.CUDA]
    assert (found.answer, found.decided_by) == (Answer.NOT_ENOUGH_EVIDENCE, Gate.MEMORY)
    assert found.next_commands == (
        "toto-compat matrix 'torch-2.9.0-cu128/fixed_size/reduce-overhead' --profile quick --device cuda --fresh",
    )


def test_a_cache_that_gains_alone_leaves_compile_off() -> None:
    by_itself = speed_of(speed_run(upstream_ms=90.0, cache_ms=30.0, compiled_ms=30.0))
    decision = decided(with_suite(on_gpu(), Suite.SPEED, by_itself))
    found = decision.devices[Device.CUDA]
    assert found.answer is Answer.KEEP_OFF
    assert found.take_cache_only
    assert "take the cache fixed_size, leave compile off" in found.sentence
    assert found.reason.endswith("includes 1")


def test_a_compile_that_is_slower_than_its_own_cache_is_told_as_slower() -> None:
    slower = speed_of(speed_run(upstream_ms=90.0, cache_ms=20.0, compiled_ms=30.0))
    found = decided(with_suite(on_gpu(), Suite.SPEED, slower)).devices[Device.CUDA]
    assert found.take_cache_only
    assert found.reason.endswith("is below 1: compile makes it slower")
    assert "includes 1" not in found.sentence


def test_a_cache_to_take_alone_comes_with_the_lines_that_use_it_without_compile() -> None:
    by_itself = speed_of(speed_run(upstream_ms=90.0, cache_ms=30.0, compiled_ms=30.0))
    found = decided(with_suite(on_gpu(), Suite.SPEED, by_itself)).devices[Device.CUDA]
    assert any("the cache fixed_size, nothing compiled" in line for line in settings_to_copy(found))
    assert live_lines(found) == ["export TOTO_DISABLE_COMPILE=0", "export TOTO_COMPILE=0"]


def test_a_cache_that_was_not_measured_as_production_runs_it_is_not_taken_either() -> None:
    by_itself = speed_of(speed_run(upstream_ms=90.0, cache_ms=30.0, compiled_ms=30.0))
    rules = DecisionRules(production_profile="production-check", production_workloads=("base",))
    found = decided(with_suite(on_gpu(), Suite.SPEED, by_itself), rules=rules).devices[Device.CUDA]
    assert found.take_cache_only
    assert live_lines(found) == ["export TOTO_DISABLE_COMPILE=1"]


def test_a_stale_decision_allows_nothing() -> None:
    rules = replace(RULES, review_by="2026-11-16", today="2026-11-17")
    assert live_lines(decided(on_gpu(), rules=rules).devices[Device.CUDA]) == ["export TOTO_DISABLE_COMPILE=1"]
    rules = replace(rules, today="2026-11-16")
    assert "export TOTO_COMPILE=1" in live_lines(decided(on_gpu(), rules=rules).devices[Device.CUDA])


def live_lines(found: DeviceDecision) -> list[str]:
    return [line for line in settings_to_copy(found) if not line.startswith("#")]


def test_a_cache_that_gains_alone_is_named_even_where_compile_fails() -> None:
    by_itself = speed_of(speed_run(upstream_ms=50.0, cache_ms=30.0, compiled_ms=30.0))
    decision = decided(with_suite(on_gpu(), Suite.SPEED, by_itself))
    assert "take the cache fixed_size, leave compile off" in decision.sentence


def test_a_gpu_row_without_a_gpu_gives_no_answer() -> None:
    result = on_gpu()
    blind = result.model_copy(update={"provenance": provenance(result.request, gpu=None)})
    assert decided(blind).devices[Device.CUDA].answer is Answer.NOT_ENOUGH_EVIDENCE


def test_nothing_at_all_is_answered_with_what_to_run() -> None:
    decision = decided()
    assert "run nox -s matrix -- --device cuda on a machine with an NVIDIA GPU" in decision.sentence
    assert list(decision.devices) == [Device.CUDA]


@pytest.mark.parametrize(
    ("profile", "workload"), [("quick", "base"), ("production-check", "quick"), ("production-check", "")]
)
def test_a_run_that_is_not_productions_says_no_more_than_worth_a_check(profile: str, workload: str) -> None:
    rules = DecisionRules(production_profile=profile, production_workloads=(workload,) if workload else ())
    found = decided(good_result(), rules=rules).devices[Device.CPU]
    assert found.answer is Answer.WORTH_A_PRODUCTION_CHECK
    assert "compile can be re-enabled" not in found.sentence
    assert found.next_commands[0] == (
        f"nox -s matrix -- 'torch-2.13.0-cpu/fixed_size/default' --profile {profile} --device cpu"
    )
    assert found.next_commands[0] in found.sentence
    assert settings_to_copy(found) == ("export TOTO_DISABLE_COMPILE=1",)


def test_at_least_is_said_of_three_processes_and_about_of_fewer() -> None:
    for count, said in ((1, "about 2.5x"), (2, "about 2.5x"), (3, "at least 2.")):
        sentence = decided(in_processes(count, good_result())).devices[Device.CPU].sentence
        assert said in sentence, count
        assert ("at least" in sentence) is (count >= 3)


def test_the_sentence_names_the_caches_part_and_compiles_part_of_the_gain() -> None:
    sentence = decided(good_result()).devices[Device.CPU].sentence
    assert "(1.3x from the cache, 1.9x more from compile)" in sentence


def test_the_parts_of_a_users_file_are_said_to_be_by_its_own_eager_side() -> None:
    good = good_result()
    cache = good.request.cache.model_copy(update={"source": "mine.py:Cache"})
    own = good.model_copy(update={"request": good.request.model_copy(update={"cache": cache})})
    sentence = decided(own).devices[Device.CPU].sentence
    assert "(1.3x from the cache, 1.9x more from compile, the parts by its own eager side)" in sentence


def test_an_eager_side_that_sleeps_does_not_add_to_what_compile_gains() -> None:
    sleepy = with_suite(good_result(), Suite.SPEED, speed_of(speed_run(upstream_ms=100, cache_ms=900, compiled_ms=40)))
    sentence = decided(sleepy).devices[Device.CPU].sentence
    assert "0.1x from the cache, 2.5x more from compile" in sentence


def test_seeded_weights_are_said_so() -> None:
    seeded = good_result()
    trained = seeded.model_copy(update={"request": seeded.request.model_copy(update={"checkpoint_folder": "weights"})})
    assert "with seeded weights" in decided(seeded).devices[Device.CPU].sentence
    assert "with a checkpoint's weights" in decided(trained).devices[Device.CPU].sentence
    named = trained.provenance.model_copy(update={"checkpoint": "Datadog/Toto-Open-Base-1.0@0123abc"})
    trained = trained.model_copy(update={"provenance": named})
    assert "with the weights of Datadog/Toto-Open-Base-1.0@0123abc" in decided(trained).devices[Device.CPU].sentence


def test_releases_of_the_matrix_that_were_not_run_are_named() -> None:
    rules = DecisionRules(production_profile="quick", production_workloads=("quick",), releases=("2.9.0", "2.15.0"))
    assert "not tried: 2.9.0 before, 2.15.0 after" in decided(good_result(), rules=rules).sentence


@pytest.mark.parametrize(("today", "stale"), [("2026-11-17", False), ("2027-02-14", False), ("2027-02-15", True)])
def test_a_decision_is_stale_the_day_after_its_review_date(today: str, stale: bool) -> None:
    decision = decided(good_result(), rules=DecisionRules(review_by="2027-02-14", today=today))
    assert decision.stale is stale
    assert decision.sentence.startswith("STALE") is stale


def on_workload(name: str, result: CellResult) -> CellResult:
    """The same result as the row of one of several workloads."""
    cell = CellName(f"{result.cell}@{name}")
    request = result.request.model_copy(update={"cell": cell, "workload_name": name})
    return result.model_copy(update={"cell": cell, "request": request})


TWO = DecisionRules(production_profile="quick", production_workloads=("one", "two"))


def test_production_needs_the_rows_of_all_its_workloads() -> None:
    both = [on_workload(name, good_result()) for name in ("one", "two")]
    decision = decided(*both, rules=TWO).devices[Device.CPU]
    assert decision.answer is Answer.ENABLE
    assert decision.environments == ("torch-2.13.0-cpu",)
    assert len(decision.allowed) == 1
    alone = decided(both[0], rules=TWO).devices[Device.CPU]
    assert alone.answer is Answer.WORTH_A_PRODUCTION_CHECK
    assert "'torch-2.13.0-cpu/fixed_size/default' --profile quick" in alone.next_commands[0]
    assert "holds a part of quick, one, and lacks two" in alone.sentence
    other_profile = decided(both[0], rules=replace(TWO, production_profile="full")).devices[Device.CPU]
    assert "is worth a production check" in other_profile.sentence


def test_one_workload_that_fails_or_is_undecided_keeps_compile_off() -> None:
    good = on_workload("one", good_result())
    failing = on_workload("two", with_figures(good_result(), {Gate.RECOMPILES: 3.0}))
    undecided = on_workload("two", with_suite(good_result(), Suite.SPEED, None))
    assert decided(good, failing, rules=TWO).devices[Device.CPU].answer is Answer.KEEP_OFF
    assert decided(good, undecided, rules=TWO).devices[Device.CPU].answer is Answer.NOT_ENOUGH_EVIDENCE


def test_the_workload_that_gains_least_speaks_for_the_others() -> None:
    slower = speed_of(speed_run(upstream_ms=52.0, cache_ms=40.0, compiled_ms=24.0))
    rows = [on_workload("one", good_result()), on_workload("two", with_suite(good_result(), Suite.SPEED, slower))]
    speaks_of = decided(*rows, rules=TWO).devices[Device.CPU].speaks_of
    assert speaks_of is not None
    assert speaks_of.result.cell.workload == "two"
