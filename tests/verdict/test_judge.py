"""A gate never guesses: missing, predicted or broken evidence decides nothing, and only measured figures pass."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.verdict.sample_cells import (
    GATES,
    SUITES,
    cell_request,
    good_result,
    production_incident,
    provenance,
    suite_error,
    with_events,
    with_figures,
    with_suite,
)
from toto_compat.contract.events import Event, EventKind, Severity
from toto_compat.contract.gate_limit import GateLimit
from toto_compat.contract.request import Device
from toto_compat.contract.result import CellResult, Failure, Figure, Kind, Outcome, SuiteEvidence
from toto_compat.contract.suites import Suite
from toto_compat.matrix.gates import Gate
from toto_compat.verdict.judge import Status, judge


def test_all_gates_measured_and_within_limits_is_pass() -> None:
    for build in ("cpu", "cu128"):
        judged = judge(good_result(build=build, mode="reduce-overhead"), GATES)
        assert (judged.verdict, judged.decided_by) == (Status.PASS, None), build


def test_the_production_incident_fails_by_its_recompile_limit() -> None:
    judged = judge(production_incident(), GATES)
    assert (judged.verdict, judged.decided_by) == (Status.FAIL, Gate.RECOMPILE_LIMIT)
    assert judged.gates[Gate.RECOMPILES_TOTAL].status is Status.FAIL


def test_the_first_failing_gate_in_order_decides_even_after_an_inconclusive_one() -> None:
    result = with_figures(good_result(), {Gate.EQUIVALENCE: None, Gate.GRAPH_BREAKS: 3.0, Gate.MEMORY: 9.0})
    judged = judge(result, GATES)
    assert (judged.verdict, judged.decided_by) == (Status.FAIL, Gate.GRAPH_BREAKS)


@pytest.mark.parametrize(
    ("mean", "sampled", "status"),
    [(6, 7, Status.PASS), (1, 1, Status.PASS), (6, 0, Status.INCONCLUSIVE), (0, 0, Status.INCONCLUSIVE)],
)
def test_steps_that_nobody_watched_for_replays_are_not_replayed(mean: int, sampled: int, status: Status) -> None:
    result = good_result(build="cu128", mode="reduce-overhead")
    held = result.evidence[Suite.CUDAGRAPH]
    steps = {"steps": [{"index": 1}] * mean, "sampled_steps": [{"index": 1}] * sampled}
    judged = judge(with_suite(result, Suite.CUDAGRAPH, held.model_copy(update={"details": steps})), GATES)
    assert judged.gates[Gate.CUDAGRAPHS].status is status
    assert judged.verdict is status
    if status is Status.INCONCLUSIVE:
        assert f"{mean} steps of a mean forecast were seen, {sampled} of a sampled one" in judged.reason


@pytest.mark.parametrize("gate", [gate for gate in GATES if gate is not Gate.CUDAGRAPHS])
def test_missing_evidence_is_inconclusive_and_says_how_to_get_it(gate: Gate) -> None:
    missing = Figure(value=None, missing="12 timed forecasts; 30 are needed")
    judged = judge(with_figures(good_result(), {gate: missing}), GATES)
    assert (judged.verdict, judged.decided_by) == (Status.INCONCLUSIVE, gate)
    assert "12 timed forecasts" in judged.gates[gate].reason
    assert judged.gates[gate].next_command.startswith("toto-compat matrix 'torch-2.13.0-cpu/fixed_size/default'")


@pytest.mark.parametrize(
    ("low", "status"), [(0.4, Status.INCONCLUSIVE), (2.0, Status.INCONCLUSIVE), (2.1, Status.FAIL), (None, Status.FAIL)]
)
def test_a_latency_is_unstable_only_where_its_whole_interval_says_so(low: float | None, status: Status) -> None:
    figure = Figure(value=3.0, unit="x", low=low, high=None if low is None else 6.0)
    judged = judge(with_figures(good_result(), {Gate.LATENCY_STABILITY: figure}), GATES)
    assert (judged.verdict, judged.decided_by) == (status, Gate.LATENCY_STABILITY)
    if status is Status.INCONCLUSIVE:
        assert f"anything from {low:g} to 6" in judged.reason
        assert judged.gates[Gate.LATENCY_STABILITY].next_command


def test_a_steady_latency_passes_however_wide_its_interval_is() -> None:
    figure = Figure(value=1.9, unit="x", low=0.4, high=6.0)
    assert judge(with_figures(good_result(), {Gate.LATENCY_STABILITY: figure}), GATES).verdict is Status.PASS


def test_an_error_of_the_harness_is_evidence_of_nothing() -> None:
    error = suite_error(Suite.SPEED, Outcome.ERROR, "killed by signal 9")
    judged = judge(with_suite(good_result(), Suite.SPEED, error), GATES)
    assert (judged.verdict, judged.decided_by) == (Status.INCONCLUSIVE, Gate.TIMED_FORECASTS)
    assert "killed by signal 9" in judged.gates[Gate.SPEEDUP].reason


def test_a_forecast_that_raises_fails_and_carries_torchs_line() -> None:
    message = "torch._dynamo.exc.Unsupported: data dependent operator\nfrom user code:\n  line 3"
    raised = suite_error(Suite.EQUIVALENCE, Outcome.MODEL_FAILED, message)
    judged = judge(with_suite(good_result(), Suite.EQUIVALENCE, raised), GATES)
    assert (judged.verdict, judged.decided_by) == (Status.FAIL, Gate.EQUIVALENCE)
    assert "torch._dynamo.exc.Unsupported: data dependent operator" in judged.gates[Gate.EQUIVALENCE].reason
    assert "\n" not in judged.gates[Gate.EQUIVALENCE].reason


def test_a_cell_that_could_not_be_run_is_inconclusive_with_its_failure() -> None:
    request = cell_request()
    failure = Failure(kind="timeout", message="no answer for 30 minutes")
    result = CellResult(cell=request.cell, request=request, provenance=provenance(request), failure=failure)
    judged = judge(result, GATES)
    assert judged.verdict is Status.INCONCLUSIVE
    assert "timeout" in judged.gates[Gate.EQUIVALENCE].reason


def test_a_suite_the_profile_leaves_out_is_inconclusive_and_names_a_profile_that_has_it() -> None:
    result = with_suite(good_result(suites=(Suite.EQUIVALENCE, Suite.RECOMPILE)), Suite.MEMORY, None)
    found = judge(result, GATES).gates[Gate.MEMORY]
    assert found.status is Status.INCONCLUSIVE
    assert "does not run the memory suite" in found.reason
    assert "--profile production-check" in found.next_command


def test_a_predicted_figure_never_decides_on_cuda() -> None:
    predicted = Figure(value=0.0, kind=Kind.PREDICTED)
    result = with_figures(good_result(build="cu128", mode="reduce-overhead"), {Gate.CUDAGRAPHS: predicted})
    judged = judge(result, GATES)
    assert (judged.verdict, judged.decided_by) == (Status.INCONCLUSIVE, Gate.CUDAGRAPHS)


def test_cuda_graphs_on_a_cpu_do_not_apply_and_show_their_prediction() -> None:
    found = judge(production_incident(), GATES).gates[Gate.CUDAGRAPHS]
    assert found.status is Status.NOT_APPLICABLE
    assert "predicted for a GPU: 8 skipped or split" in found.reason


def test_a_graph_that_is_split_fails_with_what_it_was_split_around() -> None:
    split = Event(kind=EventKind.CUDAGRAPH_PARTITION, severity=Severity.WARNING, reason="aten.nonzero.default")
    result = with_figures(good_result(build="cu128", mode="reduce-overhead"), {Gate.CUDAGRAPHS: 1.0})
    found = judge(with_events(result, Suite.CUDAGRAPH, split), GATES).gates[Gate.CUDAGRAPHS]
    assert found.status is Status.FAIL
    assert "aten.nonzero.default" in found.reason


def test_a_cuda_cell_that_saw_no_gpu_decides_nothing() -> None:
    result = good_result(build="cu128", mode="reduce-overhead")
    judged = judge(result.model_copy(update={"provenance": provenance(result.request, gpu=None)}), GATES)
    assert {found.status for found in judged.gates.values()} == {Status.INCONCLUSIVE}
    assert "CPU evidence never decides a CUDA verdict" in judged.gates[Gate.SPEEDUP].reason


def test_a_cuda_build_that_ran_on_the_cpu_is_a_cpu_row() -> None:
    judged = judge(good_result(build="cu128", device=Device.CPU), GATES)
    assert judged.verdict is Status.PASS
    assert judged.gates[Gate.CUDAGRAPHS].status is Status.NOT_APPLICABLE


def test_nan_fails_a_forecast_and_leaves_a_timing_undecided() -> None:
    assert judge(with_figures(good_result(), {Gate.EQUIVALENCE: math.nan}), GATES).verdict is Status.FAIL
    assert judge(with_figures(good_result(), {Gate.SPEEDUP: math.nan}), GATES).verdict is Status.INCONCLUSIVE
    assert judge(with_figures(good_result(), {Gate.EQUIVALENCE: math.inf}), GATES).verdict is Status.FAIL


def test_a_verdict_survives_being_stored() -> None:
    result = with_figures(good_result(), {Gate.EQUIVALENCE: math.nan})
    again = CellResult.model_validate_json(result.model_dump_json(by_alias=True))
    assert judge(again, GATES).gates[Gate.EQUIVALENCE].status is Status.FAIL


def test_no_gates_is_not_a_pass() -> None:
    assert judge(good_result(), {}).verdict is Status.INCONCLUSIVE
    assert judge(good_result(), {Gate.CUDAGRAPHS: GateLimit(max=0)}).verdict is Status.INCONCLUSIVE


def test_limits_are_inclusive_on_both_sides() -> None:
    limit = {Gate.SPEEDUP: GateLimit(min=2.0, max=3.0)}
    statuses = [judge(with_figures(good_result(), {Gate.SPEEDUP: x}), limit).verdict for x in (1.99, 2.0, 3.0, 3.01)]
    assert statuses == [Status.FAIL, Status.PASS, Status.PASS, Status.FAIL]
    assert limit[Gate.SPEEDUP].text == "2 to 3"


def test_a_profiles_limits_replace_the_general_ones() -> None:
    strict = {**GATES, Gate.RECOMPILES_TOTAL: GateLimit(max=2)}
    result = with_figures(good_result(), {Gate.RECOMPILES_TOTAL: 5.0})
    assert judge(result, GATES).verdict is Status.PASS
    assert judge(result, strict).decided_by is Gate.RECOMPILES_TOTAL


suite_states = st.sampled_from(
    ["good", "absent", "error", "not_run", "no_figures", "no_values", "predicted", "reported"]
)


@settings(deadline=None)  # the first example builds the timings
@given(
    states=st.fixed_dictionaries(dict.fromkeys(SUITES, suite_states)),
    dropped=st.sets(st.sampled_from(list(GATES))),
    build=st.sampled_from(["cpu", "cu128"]),
    mode=st.sampled_from(["default", "reduce-overhead", "max-autotune"]),
    demanded=st.sets(st.sampled_from(list(GATES)), min_size=1),
    cell_failed=st.booleans(),
    gpu_seen=st.booleans(),
)
def test_no_combination_of_missing_evidence_passes(
    *,
    states: dict[Suite, str],
    dropped: set[Gate],
    build: str,
    mode: str,
    demanded: set[Gate],
    cell_failed: bool,
    gpu_seen: bool,
) -> None:
    result = good_result(build=build, mode=mode)
    for suite, state in states.items():
        result = with_suite(result, suite, _suite_in_state(result.evidence[suite], state))
    for gate in dropped:
        if gate.rule.suite in result.evidence:
            result = with_figures(result, {gate: None})
    changes: dict[str, object] = {}
    if not gpu_seen:
        changes["provenance"] = provenance(result.request, gpu=None)
    if cell_failed:
        changes["failure"] = Failure(kind="crash", message="segmentation fault")
    result = result.model_copy(update=changes)

    judged = judge(result, {gate: GATES[gate] for gate in demanded})

    on_cuda = build != "cpu"
    graphs_figure = states[Suite.CUDAGRAPH] in ("good", "predicted", "reported") and Gate.CUDAGRAPHS not in dropped
    graphs_apply = on_cuda and (mode != "default" or graphs_figure)
    applies = {gate for gate in demanded if gate is not Gate.CUDAGRAPHS or graphs_apply}
    gpu_missing = on_cuda and not gpu_seen
    measured = {
        gate for gate in applies if states[gate.rule.suite] == "good" and gate not in dropped and not gpu_missing
    }
    everything_is_there = bool(applies) and measured == applies and not cell_failed
    assert (judged.verdict is Status.PASS) is everything_is_there
    for gate in applies - measured:
        assert judged.gates[gate].status is Status.INCONCLUSIVE


def _suite_in_state(evidence: SuiteEvidence, state: str) -> SuiteEvidence | None:
    changed = {
        "good": evidence,
        "absent": None,
        "error": suite_error(evidence.suite, Outcome.ERROR, "out of memory"),
        "not_run": SuiteEvidence(suite=evidence.suite, outcome=Outcome.NOT_RUN),
        "no_figures": evidence.model_copy(update={"figures": {}}),
        "no_values": _with_every_figure(evidence, value=None, missing="not obtained"),
        "predicted": _with_every_figure(evidence, kind=Kind.PREDICTED),
        "reported": _with_every_figure(evidence, kind=Kind.REPORTED),
    }
    return changed[state]


def _with_every_figure(evidence: SuiteEvidence, **changes: object) -> SuiteEvidence:
    figures = {name: figure.model_copy(update=changes) for name, figure in evidence.figures.items()}
    return evidence.model_copy(update={"figures": figures})


def test_reasons_are_one_line_without_control_characters() -> None:
    missing = Figure(value=None, missing="killed\n\x1b[2J\x1b]0;title\x07 by\x00 the kernel")
    reason = judge(with_figures(good_result(), {Gate.MEMORY: missing}), GATES).gates[Gate.MEMORY].reason
    assert reason.isprintable()
    assert "by the kernel" in reason


def test_a_reason_of_megabytes_is_cut() -> None:
    missing = Figure(value=None, missing="C++ compile error " * 100_000)
    reason = judge(with_figures(good_result(), {Gate.MEMORY: missing}), GATES).gates[Gate.MEMORY].reason
    assert len(reason) < 3000
    assert reason.endswith("...")


@pytest.mark.parametrize("gate", [gate for gate in Gate if gate.rule.default is None])
def test_a_gate_without_a_default_judges_only_where_a_limit_is_set(gate: Gate) -> None:
    result = with_figures(good_result(), {gate: 0.2})
    assert gate not in judge(result, GATES).gates
    for limit, status in ((0.1, Status.FAIL), (0.3, Status.PASS)):
        assert judge(result, {**GATES, gate: GateLimit(max=limit)}).gates[gate].status is status


def grown(compiled: float, eager: float) -> CellResult:
    result = with_figures(good_result(), {Gate.MEMORY_GROWTH: compiled})
    evidence = result.evidence[Suite.MEMORY]
    figures = evidence.figures | {"reference_memory_growth": Figure(value=eager, unit="MB a forecast")}
    return with_suite(result, Suite.MEMORY, evidence.model_copy(update={"figures": figures}))


@pytest.mark.parametrize(
    ("compiled", "eager", "status"),
    [
        (0.001, 0.0, Status.PASS),
        (1.0, 0.0, Status.FAIL),
        (1.0, 1.0, Status.INCONCLUSIVE),
        (0.0, 1.0, Status.INCONCLUSIVE),
    ],
)
def test_growth_is_judged_only_where_upstream_eager_does_not_grow(
    compiled: float, eager: float, status: Status
) -> None:
    found = judge(grown(compiled, eager), GATES).gates[Gate.MEMORY_GROWTH]
    assert found.status is status
    if status is Status.INCONCLUSIVE:
        assert "upstream eager itself has 1 MB a forecast" in found.reason


def test_growth_without_eagers_own_decides_nothing() -> None:
    result = good_result()
    evidence = result.evidence[Suite.MEMORY]
    figures = {name: one for name, one in evidence.figures.items() if name != "reference_memory_growth"}
    alone = with_suite(result, Suite.MEMORY, evidence.model_copy(update={"figures": figures}))
    assert judge(alone, GATES).gates[Gate.MEMORY_GROWTH].status is Status.INCONCLUSIVE


def skipping(result: CellResult) -> CellResult:
    """As a cell leaves it that could not PASS: no memory, one of three processes timed, announced shapes alone."""
    why = "recompiles is 22, limit <= 0, so that this cell cannot PASS"
    memory = SuiteEvidence(suite=Suite.MEMORY, outcome=Outcome.NOT_RUN, failure=Failure(kind="skipped", message=why))
    speed = result.evidence[Suite.SPEED].model_copy(update={"skipped": f"1 of 3 processes: {why}"})
    in_part = {"skipped": f"shapes that nobody announced: {why}"}
    left = with_suite(with_suite(result, Suite.MEMORY, memory), Suite.SPEED, speed)
    for suite in (Suite.EQUIVALENCE, Suite.RECOMPILE):
        left = with_suite(left, suite, result.evidence[suite].model_copy(update=in_part))
    return left


def test_what_a_lost_cell_skipped_is_named_and_its_fail_stands() -> None:
    judged = judge(skipping(with_figures(good_result(), {Gate.RECOMPILES: 22.0})), GATES)
    assert (judged.verdict, judged.decided_by) == (Status.FAIL, Gate.RECOMPILES)
    memory = judged.gates[Gate.MEMORY]
    assert (memory.status, memory.next_command) == (Status.INCONCLUSIVE, "")
    assert memory.reason.startswith("the memory suite was skipped when the cell was run: recompiles is 22, limit <= 0")
    assert judged.gates[Gate.SPEEDUP].status is Status.PASS
    assert judged.gates[Gate.EQUIVALENCE].status is Status.PASS


def test_a_forecast_that_was_wrong_in_part_of_the_comparison_is_wrong() -> None:
    wrong = with_figures(good_result(), {Gate.RECOMPILES: 22.0, Gate.EQUIVALENCE: 3.0})
    looser = {**GATES, Gate.RECOMPILES: GateLimit(max=30)}
    for gates in (GATES, looser):
        assert judge(skipping(wrong), gates).gates[Gate.EQUIVALENCE].status is Status.FAIL


def test_looser_limits_ask_for_what_was_skipped() -> None:
    looser = {**GATES, Gate.RECOMPILES: GateLimit(max=30)}
    judged = judge(skipping(with_figures(good_result(), {Gate.RECOMPILES: 22.0})), looser)
    assert (judged.verdict, judged.decided_by) == (Status.INCONCLUSIVE, Gate.EQUIVALENCE)
    timed = (Gate.SPEEDUP, Gate.LATENCY_STABILITY)
    for gate in (Gate.EQUIVALENCE, Gate.RECOMPILES, Gate.COMPILE_ACTIVE, *timed, Gate.MEMORY, Gate.MEMORY_GROWTH):
        assert judged.gates[gate].status is Status.INCONCLUSIVE
        assert "recompiles is 22" in judged.gates[gate].reason
        assert judged.gates[gate].next_command.startswith("toto-compat matrix")


def test_what_upstream_eager_itself_cannot_do_does_not_apply_and_says_why() -> None:
    result = good_result()
    evidence = result.evidence[Suite.EQUIVALENCE]
    refused = Figure(value=None, does_not_apply='upstream eager cannot draw here: "gamma_cpu" not implemented')
    changed = evidence.model_copy(update={"figures": {**evidence.figures, "mae_sigma": refused}})
    judged = judge(with_suite(result, Suite.EQUIVALENCE, changed), GATES)
    assert judged.gates[Gate.MAE_SIGMA].status is Status.NOT_APPLICABLE
    assert "gamma_cpu" in judged.gates[Gate.MAE_SIGMA].reason
    assert judged.verdict is Status.PASS
