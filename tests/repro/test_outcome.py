"""Every part of an incident is held, not held, not judged or not looked for; the verdict follows from them."""

from pathlib import Path
from typing import Any

import pytest

from toto_compat.contract.events import Event, EventKind, Severity
from toto_compat.contract.gate_limit import GateLimit
from toto_compat.contract.request import Device
from toto_compat.contract.result import CellResult, Failure, Figure, Kind, Outcome, Provenance, SuiteEvidence
from toto_compat.contract.suites import Suite
from toto_compat.errors import ExitCode
from toto_compat.matrix.gates import Gate
from toto_compat.matrix.load import load_matrix
from toto_compat.repro.command import as_text, exit_code
from toto_compat.repro.explain import Variant, judged_row
from toto_compat.repro.incident import ExpectedEvent, FailedGate, Incident, RaisedForecast, load_incident
from toto_compat.repro.outcome import Reproduction, Verdict, look_at, place_of, symptom_left
from toto_compat.repro.reproduce import incident_request, limits_of

ROOT = Path(__file__).parents[2]
MATRIX = load_matrix(ROOT / "matrix.yaml")
SKIP = Event(kind=EventKind.CUDAGRAPH_SKIP, severity=Severity.WARNING, reason="mutated inputs (3 instances)", count=2)
SKIPPED = ExpectedEvent(kind=EventKind.CUDAGRAPH_SKIP, reason_like="mutated inputs (*")
PREDICTABLE = SKIPPED.model_copy(update={"predicted_by": ("cuda_lowering", "cudagraph")})


def incident(*, events: tuple[ExpectedEvent, ...] = (), gates: tuple[FailedGate, ...] = (), **fields: Any) -> Incident:
    return Incident(
        schema=1,
        title="t",
        date="2026-01-01",
        environment="torch-2.9.0-cu128",
        cache="compile_friendly",
        mode="reduce-overhead",
        expect=events,
        gates=gates,
        **fields,
    )


def evidence(suite: Suite, *events: Event, **figures: Figure) -> SuiteEvidence:
    return SuiteEvidence(suite=suite, outcome=Outcome.MEASURED, events=events, figures=figures)


def looked_at(
    about: Incident, *found: SuiteEvidence, device: Device = Device.CPU, environment: str | None = None
) -> Reproduction:
    request = incident_request(about, ROOT, MATRIX, ROOT / "matrix.yaml", device=device, environment=environment)
    gpu = "NVIDIA GeForce RTX 5090" if device is Device.CUDA else None
    result = CellResult(
        cell=request.cell,
        request=request,
        provenance=Provenance(torch=request.environment.torch, runtime="venv", gpu=gpu),
        evidence={one.suite: one for one in found},
    )
    return look_at(about, result, limits_of(MATRIX))


def test_what_needs_a_gpu_is_not_looked_for_without_one_and_says_so() -> None:
    gates = (FailedGate(gate=Gate.LATENCY_STABILITY, needs="cuda"), FailedGate(gate=Gate.RECOMPILES_TOTAL))
    found = evidence(Suite.RECOMPILE, recompiles_total=Figure(value=52))
    reproduction = looked_at(incident(gates=gates), found)
    assert reproduction.verdict is Verdict.REPRODUCED
    assert "not looked for     gate latency_stability FAIL: needs a GPU" in as_text(reproduction)
    assert as_text(reproduction).endswith("REPRODUCED (as far as it shows here: 1 more need a GPU)")
    assert Suite.SPEED not in reproduction.result.request.profile.suites


def test_an_incident_that_only_a_gpu_shows_is_not_reproduced_without_one() -> None:
    reproduction = looked_at(incident(gates=(FailedGate(gate=Gate.SPEEDUP, needs="cuda"),)))
    assert as_text(reproduction).endswith("NOT REPRODUCED: nothing was looked for, all of it needs a GPU")
    assert exit_code(reproduction) is ExitCode.NOT_REPRODUCED
    assert not reproduction.ended


def test_skipped_cuda_graphs_are_never_taken_from_a_cpu_unless_the_incident_says_so() -> None:
    cuda, cpu = MATRIX.environments["torch-2.9.0-cu128"], MATRIX.environments["torch-2.13.0-cpu"]
    assert place_of(SKIPPED, cuda, Device.CPU).suite is None
    assert place_of(SKIPPED, cuda, Device.CUDA).suite is Suite.CUDAGRAPH
    assert place_of(PREDICTABLE, cuda, Device.CPU).suite is Suite.CUDA_LOWERING
    assert place_of(PREDICTABLE, cpu, Device.CPU).suite is Suite.CUDAGRAPH
    only_lowering = PREDICTABLE.model_copy(update={"predicted_by": ("cuda_lowering",)})
    assert "a CUDA build of torch" in place_of(only_lowering, cpu, Device.CPU).why_not


def test_a_prediction_is_told_as_one() -> None:
    gate = FailedGate(gate=Gate.CUDAGRAPHS, predicted_by=("cuda_lowering",))
    figure = Figure(value=2, kind=Kind.PREDICTED)
    found = evidence(Suite.CUDA_LOWERING, SKIP, cudagraphs=figure)
    reproduction = looked_at(incident(events=(PREDICTABLE,), gates=(gate,)), found)
    assert reproduction.verdict is Verdict.REPRODUCED
    told = as_text(reproduction)
    assert "predicted          cudagraph_skip: reason like 'mutated inputs (*'" in told
    assert "2 predicted, limit <= 0 here" in told
    assert "as in production" not in told
    assert told.endswith("REPRODUCED (2 of 2 predicted)")


def test_a_mode_without_cuda_graphs_neither_has_skipped_ones_nor_ends_them() -> None:
    figure = Figure(value=2, kind=Kind.PREDICTED)
    found = evidence(Suite.CUDA_LOWERING, SKIP, cudagraphs=figure, compilations=Figure(value=3))
    whole = incident(events=(PREDICTABLE,), gates=(FailedGate(gate=Gate.CUDAGRAPHS, predicted_by=("cuda_lowering",)),))
    base = looked_at(whole, found)
    for mode, ends, told in (
        ("default", None, "not judged: mode default has no CUDA graphs that could be skipped"),
        ("max-autotune", False, "the same; 2 predicted, limit <= 0"),
    ):
        changed = whole.model_copy(update={"mode": mode})
        row = judged_row(Variant("mode", f"mode {mode}", changed), base, looked_at(changed, found))
        assert (row.ends, row.told) == (ends, told)


def test_in_a_mode_without_cuda_graphs_nothing_of_them_is_reproduced() -> None:
    gate = FailedGate(gate=Gate.CUDAGRAPHS, predicted_by=("cuda_lowering",))
    whole = incident(events=(PREDICTABLE,), gates=(gate,)).model_copy(update={"mode": "default"})
    found = looked_at(whole, evidence(Suite.CUDA_LOWERING, SKIP, cudagraphs=Figure(value=2, kind=Kind.PREDICTED)))
    assert found.verdict is Verdict.NOT_JUDGED
    assert "mode default has no CUDA graphs that could be skipped" in as_text(found)


def test_where_no_graph_was_there_to_look_at_no_skip_is_gone() -> None:
    unknown = Figure(value=None, kind=Kind.PREDICTED, missing="nothing reached Inductor")
    found = looked_at(incident(events=(PREDICTABLE,)), evidence(Suite.CUDA_LOWERING, cudagraphs=unknown))
    assert found.verdict is Verdict.NOT_JUDGED and not found.ended
    assert "nothing reached Inductor" in as_text(found)


def test_what_another_predictor_does_not_see_is_not_gone() -> None:
    partition = ExpectedEvent(
        kind=EventKind.CUDAGRAPH_PARTITION, needs="cuda", predicted_by=("cuda_lowering", "cudagraph")
    )
    split = SKIP.model_copy(update={"kind": EventKind.CUDAGRAPH_PARTITION})
    whole, figure = incident(events=(partition,)), Figure(value=2, kind=Kind.PREDICTED)
    base = looked_at(whole, evidence(Suite.CUDA_LOWERING, split, cudagraphs=figure))
    changed = whole.model_copy(update={"environment": "torch-2.13.0-cpu"})
    tried = looked_at(changed, evidence(Suite.CUDAGRAPH, cudagraphs=Figure(value=0, kind=Kind.PREDICTED)))
    row = judged_row(Variant("release", "environment torch-2.13.0-cpu", changed), base, tried)
    assert row.ends is None and row.told.startswith("looked for in another way than in the incident: ")


def test_what_a_cell_left_out_is_not_gone_unless_the_incident_was_seen_without_it() -> None:
    event = Event(kind=EventKind.GRAPH_BREAK, severity=Severity.WARNING, reason="r")
    whole = incident(events=(ExpectedEvent(kind=EventKind.GRAPH_BREAK),))
    figures = {"compilations": Figure(value=3)}
    told = "series of other kinds: announced shapes compile"
    entire, part = (
        looked_at(whole, evidence(Suite.RECOMPILE, event, **figures).model_copy(update={"skipped": skipped}))
        for skipped in ("", told)
    )
    without = looked_at(whole, evidence(Suite.RECOMPILE, **figures).model_copy(update={"skipped": told}))
    variant = Variant("cache", "cache upstream", whole)
    assert judged_row(variant, entire, without).told == f"not looked at as the incident was: without {told}"
    assert judged_row(variant, part, without).ends
    assert without.verdict is Verdict.NOT_REPRODUCED and not without.ended
    assert as_text(without).endswith(f"NOT REPRODUCED; left out: {told}")


def test_that_something_stays_away_is_no_symptom() -> None:
    event = Event(kind=EventKind.RECOMPILE_LIMIT, severity=Severity.WARNING, reason="r")
    absent = ExpectedEvent(kind=EventKind.GRAPH_BREAK, at_least=0, at_most=0)
    whole = incident(events=(ExpectedEvent(kind=EventKind.RECOMPILE_LIMIT), absent))
    base = looked_at(whole, evidence(Suite.RECOMPILE, event, compilations=Figure(value=3)))
    tried = looked_at(whole, evidence(Suite.RECOMPILE, compilations=Figure(value=3)))
    assert base.verdict is Verdict.REPRODUCED
    assert judged_row(Variant("cache", "cache fixed_size", whole), base, tried).ends
    assert tried.verdict is Verdict.NOT_REPRODUCED and tried.ended


def test_what_compiles_nothing_shows_no_absence_either() -> None:
    absent = incident(events=(ExpectedEvent(kind=EventKind.GRAPH_BREAK, at_least=0, at_most=0),))
    for compilations, verdict in ((3, Verdict.REPRODUCED), (0, Verdict.NOT_JUDGED)):
        found = looked_at(absent, evidence(Suite.RECOMPILE, compilations=Figure(value=compilations)))
        assert found.verdict is verdict


def test_a_prediction_that_could_not_be_made_judges_nothing() -> None:
    gate = FailedGate(gate=Gate.CUDAGRAPHS, predicted_by=("cudagraph",))
    unknown = Figure(value=None, kind=Kind.PREDICTED, missing="stray CPU tensors cannot be ruled out")
    reproduction = looked_at(incident(gates=(gate,)), evidence(Suite.CUDAGRAPH, cudagraphs=unknown))
    assert reproduction.verdict is Verdict.NOT_JUDGED
    assert exit_code(reproduction) is ExitCode.CELL_NOT_RUN
    assert not reproduction.ended


@pytest.mark.parametrize(
    ("value", "verdict", "ended"),
    [(52, Verdict.REPRODUCED, False), (12, Verdict.NOT_REPRODUCED, False), (3, Verdict.NOT_REPRODUCED, True)],
)
def test_a_gate_must_fail_again_with_its_figure_where_it_was(value: float, verdict: Verdict, ended: bool) -> None:
    about = incident(gates=(FailedGate(gate=Gate.RECOMPILES_TOTAL, figure=GateLimit(min=40)),))
    reproduction = looked_at(about, evidence(Suite.RECOMPILE, recompiles_total=Figure(value=value)))
    assert (reproduction.verdict, reproduction.ended) == (verdict, ended)


def test_a_limit_of_the_incident_stands_before_that_of_the_matrix() -> None:
    found = evidence(Suite.RECOMPILE, recompiles_total=Figure(value=5))
    strict = FailedGate(gate=Gate.RECOMPILES_TOTAL, limit=GateLimit(max=2))
    assert looked_at(incident(gates=(strict,)), found).verdict is Verdict.REPRODUCED
    assert looked_at(incident(gates=(FailedGate(gate=Gate.RECOMPILES_TOTAL),)), found).verdict is not Verdict.REPRODUCED


def test_a_time_that_the_machine_disturbed_is_not_judged() -> None:
    slow = SuiteEvidence(
        suite=Suite.SPEED,
        outcome=Outcome.MEASURED,
        figures={"speedup": Figure(value=None, missing="other processes took a third of the time")},
    )
    reproduction = looked_at(incident(gates=(FailedGate(gate=Gate.SPEEDUP),)), slow)
    assert reproduction.verdict is Verdict.NOT_JUDGED
    assert "other processes took a third" in as_text(reproduction)


def test_some_of_it_is_partly_and_names_both_sides() -> None:
    events = (ExpectedEvent(kind=EventKind.RECOMPILE_LIMIT), ExpectedEvent(kind=EventKind.GRAPH_BREAK))
    hit = Event(kind=EventKind.RECOMPILE_LIMIT, severity=Severity.ERROR)
    reproduction = looked_at(incident(events=events), evidence(Suite.RECOMPILE, hit))
    assert as_text(reproduction).endswith("PARTLY: recompile_limit; but not: graph_break")
    assert exit_code(reproduction) is ExitCode.NOT_REPRODUCED


def test_more_than_at_most_is_not_what_was_seen() -> None:
    event = Event(kind=EventKind.RECOMPILE, severity=Severity.WARNING)
    few = ExpectedEvent(kind=EventKind.RECOMPILE, at_most=2)
    reproduction = looked_at(incident(events=(few,)), evidence(Suite.RECOMPILE, event, event, event))
    assert "too many           recompile, at most 2 times" in as_text(reproduction)


def test_at_most_is_not_judged_by_a_cell_that_dropped_events() -> None:
    few = ExpectedEvent(kind=EventKind.RECOMPILE, at_most=2)
    event = Event(kind=EventKind.RECOMPILE, severity=Severity.WARNING)
    kept = evidence(Suite.RECOMPILE, event).model_copy(update={"details": {"events_seen": 400}})
    assert looked_at(incident(events=(few,)), kept).verdict is Verdict.NOT_JUDGED


def test_what_is_missing_is_not_judged_by_a_cell_that_dropped_events_unless_it_keeps_all_of_that_kind() -> None:
    event = Event(kind=EventKind.RECOMPILE, severity=Severity.WARNING, function="forward")
    kept = evidence(Suite.RECOMPILE, event).model_copy(update={"details": {"events_seen": 400}})
    for expected, verdict in (
        (ExpectedEvent(kind=EventKind.RECOMPILE, function="rope"), Verdict.NOT_JUDGED),
        (ExpectedEvent(kind=EventKind.RECOMPILE, at_least=50), Verdict.NOT_JUDGED),
        (ExpectedEvent(kind=EventKind.RECOMPILE_LIMIT), Verdict.NOT_REPRODUCED),
    ):
        reproduction = looked_at(incident(events=(expected,)), kept)
        assert reproduction.verdict is verdict
        assert "NOT RUN" not in as_text(reproduction)


def test_at_most_is_not_judged_by_a_forecast_that_raised() -> None:
    failure = Failure(kind="exception", message="IndexError: index 3 is out of bounds")
    raised = SuiteEvidence(suite=Suite.RECOMPILE, outcome=Outcome.MODEL_FAILED, failure=failure)
    none = ExpectedEvent(kind=EventKind.RECOMPILE, at_least=0, at_most=0)
    reproduction = looked_at(incident(events=(none,)), raised)
    assert reproduction.verdict is Verdict.NOT_JUDGED
    assert "the compiled forecast raised: there may have been more" in as_text(reproduction)


def test_an_error_of_the_compiled_forecast_is_the_event_that_a_log_would_show() -> None:
    failure = Failure(kind="exception", message="torch._inductor.exc.InductorError: LoweringException: no such op")
    raised = SuiteEvidence(suite=Suite.RECOMPILE, outcome=Outcome.MODEL_FAILED, failure=failure)
    expected = ExpectedEvent(kind=EventKind.BACKEND_ERROR, reason_like="*LoweringException*")
    assert looked_at(incident(events=(expected,)), raised).verdict is Verdict.REPRODUCED


def test_a_forecast_that_raised_is_not_taken_for_a_gate_that_failed_as_in_production() -> None:
    failure = Failure(kind="exception", message="IndexError: index 3 is out of bounds")
    raised = SuiteEvidence(suite=Suite.RECOMPILE, outcome=Outcome.MODEL_FAILED, failure=failure)
    reproduction = looked_at(incident(gates=(FailedGate(gate=Gate.RECOMPILES_TOTAL),)), raised)
    assert reproduction.verdict is Verdict.NOT_JUDGED
    assert "the compiled forecast raised: IndexError" in as_text(reproduction)


def raised(message: str, suite: Suite = Suite.RECOMPILE) -> SuiteEvidence:
    failure = Failure(kind="exception", message=message)
    return SuiteEvidence(suite=suite, outcome=Outcome.MODEL_FAILED, failure=failure)


@pytest.mark.parametrize(
    ("found", "verdict", "told", "left"),
    [
        (raised("IndexError: 3"), Verdict.REPRODUCED, "raised IndexError: 3 here", "the same"),
        (raised("TypeError: 3"), Verdict.NOT_REPRODUCED, "raised TypeError: 3 here", "raised TypeError: 3"),
        (evidence(Suite.RECOMPILE), Verdict.NOT_REPRODUCED, "it raised nothing here", ""),
        (SuiteEvidence(suite=Suite.RECOMPILE, outcome=Outcome.ERROR), Verdict.NOT_JUDGED, "NOT RUN: error", None),
    ],
)
def test_an_error_of_the_forecast_can_be_expected_and_shown_again(
    found: SuiteEvidence, verdict: Verdict, told: str, left: str | None
) -> None:
    about = incident(raised=(RaisedForecast(error_like="IndexError: *"),))
    reproduction = looked_at(about, found)
    assert reproduction.verdict is verdict
    assert told in as_text(reproduction)
    assert symptom_left(about.raised[0], reproduction) == left
    assert reproduction.ended is (left == "")


def test_an_error_of_a_gpu_is_not_looked_for_without_one() -> None:
    about = incident(raised=(RaisedForecast(error_like="*", needs="cuda", suite=Suite.EQUIVALENCE),))
    assert "needs a GPU" in as_text(looked_at(about))
    request = incident_request(about, ROOT, MATRIX, ROOT / "matrix.yaml", device=Device.CUDA)
    assert Suite.EQUIVALENCE in request.profile.suites


def test_any_suite_can_be_asked_for() -> None:
    about = incident(gates=(FailedGate(gate=Gate.RECOMPILES),), suites=(Suite.MEMORY, Suite.EQUIVALENCE))
    request = incident_request(about, ROOT, MATRIX, ROOT / "matrix.yaml")
    assert set(request.profile.suites) == {Suite.RECOMPILE, Suite.MEMORY, Suite.EQUIVALENCE}
    assert request.demands == ()  # nothing is skipped because something else is broken


@pytest.mark.parametrize("gate", [gate for gate in Gate if not gate.rule.suite.rule.needs_symbols])
def test_every_gate_can_be_expected_and_asks_for_its_suite(gate: Gate) -> None:
    about = incident(gates=(FailedGate(gate=gate, limit=GateLimit(max=0)),))
    request = incident_request(about, ROOT, MATRIX, ROOT / "matrix.yaml", device=Device.CUDA)
    assert gate.rule.suite in request.profile.suites


def test_what_each_shipped_incident_shows_without_a_gpu_is_something_and_the_rest_says_that_it_needs_one() -> None:
    for path in sorted((ROOT / "incidents").glob("*.yaml")):
        about = load_incident(path)
        environment = MATRIX.environments[about.environment]
        places = [place_of(one, environment, Device.CPU) for one in (*about.expect, *about.gates)]
        assert any(place.suite for place in places), path
        assert all(place.suite or "needs a GPU" in place.why_not for place in places), path
