"""Claims that were only predicted: held, broken, or not shown, and never held without a GPU."""

import math
from dataclasses import replace

import pytest

from tests.acceptance.gpu_cells import (
    CAPTURED,
    MUTATED,
    SPLIT,
    beside_another_program,
    cell_of,
    checked,
    lowered,
    on_device,
    predicted,
    sabotaged,
)
from tests.verdict.sample_cells import with_figures, with_suite
from tests.verdict.stored_runs import judged_run
from toto_compat.acceptance.campaign import About, Campaign, Ended, StepName, StepRecord
from toto_compat.acceptance.claims import Claim, Evidence, claims_of, partitions_text
from toto_compat.acceptance.sabotages import ALL
from toto_compat.acceptance.trials import FIXED_SIZE, WHOLE_MODELS, replay_of
from toto_compat.contract.events import Event, EventKind, Severity
from toto_compat.contract.log_line import normalise_reason
from toto_compat.contract.result import CellResult, Failure, Figure, Kind, Outcome, SuiteEvidence
from toto_compat.contract.suites import Suite
from toto_compat.matrix.gates import Gate

ENVIRONMENT = "torch-2.9.0-cu128"
STATIC = f"{ENVIRONMENT}/{FIXED_SIZE}"
WHOLE = [f"{ENVIRONMENT}/{cell}" for cell in WHOLE_MODELS]


def evidence(
    *,
    without_gpu: CellResult | None = None,
    device: CellResult | None = None,
    row: CellResult | None = None,
    not_caught: str = "",
    sabotages_on: str = ENVIRONMENT,
    rehearsal: bool = False,
) -> Evidence:
    about = About(rehearsal=rehearsal, environments=(ENVIRONMENT,), source_hash="a", matrix_hash="b")
    steps = {StepName.SABOTAGES: StepRecord(ended=Ended.HELD, lines=("what a state says is no evidence",))}
    broken = {one.name: f"{sabotages_on}/{one.cache}/reduce-overhead" for one in ALL}
    interpreted = SuiteEvidence(
        suite=Suite.CUDA_EQUIVALENCE,
        outcome=Outcome.MEASURED,
        figures={"cuda_equivalence": Figure(value=0.4, kind=Kind.INTERPRETED)},
    )
    return Evidence(
        campaign=Campaign(about=about, started="2026-11-17T12:00:00Z", steps=steps),
        lowered=[without_gpu or lowered(STATIC), *(lowered(name, refused=8, partitions=SPLIT) for name in WHOLE)],
        on_device=[device or on_device(STATIC), *(on_device(name, refused=8) for name in WHOLE)],
        production=judged_run(row or checked(STATIC)).cells,
        sabotaged=[
            cell
            for name, of in broken.items()
            for cell in judged_run(checked(of) if name == not_caught else sabotaged(of)).cells
        ],
        interpreted=[cell_of(STATIC, {Suite.CUDA_EQUIVALENCE: interpreted}, on_gpu=False)],
    )


def claim(found: Evidence, words: str) -> Claim:
    [one] = [one for one in claims_of(found) if words in one.claim]
    return one


def test_a_gpu_that_does_as_predicted_holds_every_claim_and_each_says_what_predicted_it() -> None:
    claims = claims_of(evidence())
    assert {one.ended for one in claims} == {Ended.HELD}, claims
    assert len(claims) == 11
    assert all(one.predicted and one.by and one.found for one in claims)


def test_graphs_that_are_not_captured_on_the_device_break_the_prediction_that_they_are() -> None:
    skipped = evidence(device=on_device(STATIC, refused=3))
    assert claim(skipped, "take every graph whole").ended is Ended.BROKEN
    assert claim(skipped, "replays a captured graph").ended is Ended.BROKEN


def test_graphs_that_are_split_otherwise_on_the_device_are_told() -> None:
    split = claim(evidence(device=on_device(STATIC, partitions=(True, False, True))), "splits the graphs")
    assert split.ended is Ended.BROKEN
    assert split.predicted == "captured"
    assert split.found == "captured then kept out then captured"


def test_what_was_predicted_wrongly_is_broken_either_way() -> None:
    refused = lowered(STATIC, refused=1, partitions=SPLIT)
    assert claim(evidence(without_gpu=refused), "take every graph whole").ended is Ended.BROKEN


def test_productions_caches_are_told_with_torchs_reasons_on_both_sides() -> None:
    told = claim(evidence(), "list_index")
    assert MUTATED in told.predicted
    assert MUTATED in told.found
    assert told.ended is Ended.HELD


@pytest.mark.parametrize(
    ("on_the_device", "ended"),
    [
        ("mutated inputs (22 instances)", Ended.HELD),  # as many as that run of torch's log counted
        ("cpu ops", Ended.HELD),  # lowering names the operation, the log does not
        ("non-Tensor inputs", Ended.BROKEN),
    ],
)
def test_the_same_reason_is_the_same_in_both_wordings(on_the_device: str, ended: Ended) -> None:
    def saying(cell: CellResult, suite: Suite, *reasons: str, normalised: bool) -> CellResult:
        events = [
            Event(
                kind=EventKind.CUDAGRAPH_SKIP,
                severity=Severity.WARNING,
                reason=reason,
                normalised_reason=normalise_reason(reason) if normalised else reason,
            )
            for reason in reasons
        ]
        return with_suite(cell, suite, cell.evidence[suite].model_copy(update={"events": tuple(events)}))

    compiled = saying(
        lowered(WHOLE[0], refused=8), Suite.CUDA_LOWERING, MUTATED, "cpu ops (aten.select.int)", normalised=False
    )
    run = saying(on_device(WHOLE[0], refused=8), Suite.CUDAGRAPH, on_the_device, normalised=True)
    found = replace(evidence(), lowered=[compiled], on_device=[run])
    assert claim(found, "list_index").ended is ended


def test_a_forecast_that_waits_for_the_gpu_in_its_steps_breaks_the_claim() -> None:
    in_the_mean = evidence(device=on_device(STATIC, syncs=9))
    assert claim(in_the_mean, "a mean forecast waits for the GPU").ended is Ended.BROKEN
    assert claim(in_the_mean, "a sampled forecast waits for the GPU").ended is Ended.HELD
    drawn = evidence(device=on_device(STATIC, sampled_syncs=9))
    assert claim(drawn, "a mean forecast waits for the GPU").ended is Ended.HELD
    assert claim(drawn, "a sampled forecast waits for the GPU").ended is Ended.BROKEN


def test_a_wrong_forecast_on_the_device_breaks_what_the_interpreter_said() -> None:
    wrong = with_figures(checked(STATIC), {Gate.EQUIVALENCE: 3.0})
    told = claim(evidence(row=wrong), "forecasts as eager")
    assert told.ended is Ended.BROKEN
    assert "0.4 of what eager's own noise allows" in told.predicted


@pytest.mark.parametrize("how", ["raised", "NaN"])
def test_a_forecast_without_a_number_is_worse_than_any_that_has_one(how: str) -> None:
    row = checked(STATIC)
    held = row.evidence[Suite.EQUIVALENCE]
    raised = held.model_copy(
        update={"outcome": Outcome.MODEL_FAILED, "figures": {}, "failure": Failure(kind="exception", message="boom")}
    )
    wrong = (
        with_suite(row, Suite.EQUIVALENCE, raised)
        if how == "raised"
        else with_figures(row, {Gate.EQUIVALENCE: math.nan})
    )
    found = replace(evidence(), production=judged_run(row, wrong).cells)
    told = claim(found, "forecasts as eager")
    assert told.ended is Ended.BROKEN
    assert told.found.endswith("(1 of 2 rows)")
    assert (
        "the compiled forecast raised: exception: boom" if how == "raised" else "the forecast holds NaN"
    ) in told.found


def test_a_gate_that_stays_inconclusive_on_a_gpu_is_named() -> None:
    undecided = with_figures(checked(STATIC), {Gate.MEMORY: Figure(value=None, missing="no counter")})
    told = claim(evidence(row=undecided), "every gate of a row")
    assert told.ended is Ended.BROKEN
    assert "memory" in told.found


@pytest.mark.parametrize("rehearsal", [True, False])
def test_nothing_is_held_where_no_gpu_took_part(rehearsal: bool) -> None:
    """CPU evidence in the place of the GPU's, with or without the word rehearsal on it."""
    on_cpu = ENVIRONMENT.replace("cu128", "cpu")
    row = checked(STATIC.replace(ENVIRONMENT, on_cpu))
    found = evidence(device=predicted(STATIC), row=row, sabotages_on=on_cpu, rehearsal=rehearsal)
    of_static = [
        one for one in claims_of(found) if "list_index" not in one.claim and "compile_friendly" not in one.claim
    ]
    ended = {one.claim: one.ended for one in of_static}
    assert set(ended.values()) == {Ended.NOT_SHOWN}, ended


def test_a_rehearsal_does_not_say_that_anything_was_compiled_for_a_gpu() -> None:
    told = claim(evidence(without_gpu=predicted(STATIC), rehearsal=True), "take every graph whole")
    assert told.by == "Inductor's own checks, on a CPU"
    assert claim(evidence(), "take every graph whole").by == "compiled for this architecture without the GPU"


def test_a_sabotage_that_was_not_caught_breaks_the_claim_whatever_the_state_says() -> None:
    told = claim(evidence(not_caught="slow"), "wrong on purpose")
    assert told.ended is Ended.BROKEN
    assert "slow (" in told.found and "NOT caught" in told.found


def test_sabotages_that_nobody_ran_show_nothing() -> None:
    told = claim(replace(evidence(), sabotaged=()), "wrong on purpose")
    assert told.ended is Ended.NOT_SHOWN
    assert "leaking_mask: no result" in told.found


def test_a_claim_that_held_says_what_is_so() -> None:
    """What was predicted not to be taken, and is not, must not read as if it were."""
    refused = evidence(without_gpu=lowered(STATIC, refused=3, partitions=SPLIT), device=on_device(STATIC, refused=3))
    assert claim(refused, "do not take every graph whole").ended is Ended.HELD
    taken = evidence()
    taken = replace(
        taken,
        lowered=[lowered(STATIC), *(lowered(name) for name in WHOLE)],
        on_device=[on_device(STATIC), *(on_device(name) for name in WHOLE)],
    )
    told = [one for one in claims_of(taken) if one.claim.startswith(tuple(WHOLE))]
    assert [(one.ended, "take it whole" in one.claim) for one in told] == [(Ended.HELD, True)] * 2


def test_another_reason_than_the_predicted_one_breaks_a_claim_about_reasons() -> None:
    found = evidence()
    [event] = found.on_device[1].evidence[Suite.CUDAGRAPH].events
    other = event.model_copy(update={"reason": "cpu device", "normalised_reason": "cpu device"})
    for events in ((other,), ()):
        held = found.on_device[1].evidence[Suite.CUDAGRAPH].model_copy(update={"events": events})
        changed = found.on_device[1].model_copy(update={"evidence": {Suite.CUDAGRAPH: held}})
        told = claim(replace(found, on_device=[found.on_device[0], changed, found.on_device[2]]), "list_index")
        assert told.ended is Ended.BROKEN
    assert "no reason was logged" in told.found


def test_a_time_that_a_busy_machine_left_open_shows_nothing_and_breaks_nothing() -> None:
    undecided = with_figures(checked(STATIC), {Gate.LATENCY_STABILITY: Figure(value=None, missing="too few")})
    told = claim(evidence(row=undecided), "every gate of a row")
    assert told.ended is Ended.NOT_SHOWN
    assert "latency_stability" in told.found


def test_memory_that_others_took_some_of_shows_nothing_and_breaks_nothing() -> None:
    told = claim(evidence(row=beside_another_program(checked(STATIC))), "every gate of a row")
    assert told.ended is Ended.NOT_SHOWN
    assert told.found == "INCONCLUSIVE: memory, memory_growth"


def test_one_witness_is_no_proof_of_a_replay() -> None:
    cell = on_device(STATIC)
    unseen = Figure(value=None, missing="CUPTI is missing: the profiler delivered no event of the CUDA runtime")
    held = cell.evidence[Suite.CUDAGRAPH]
    changed = held.model_copy(update={"figures": {**held.figures, "steps_without_replay": unseen}})
    ended, told = replay_of(cell.model_copy(update={"evidence": {Suite.CUDAGRAPH: changed}}))
    assert (ended, "CUPTI is missing" in told) == (Ended.NOT_SHOWN, True)


def test_steps_of_sampled_forecasts_that_nobody_saw_are_no_replay() -> None:
    """A step that is not observed is counted nowhere, so that none of them failed."""
    cell = on_device(STATIC)
    held = cell.evidence[Suite.CUDAGRAPH]
    unseen = held.model_copy(update={"details": {**held.details, "sampled_steps": []}})
    ended, told = replay_of(cell.model_copy(update={"evidence": {Suite.CUDAGRAPH: unseen}}))
    assert (ended, told) == (Ended.NOT_SHOWN, "6 steps of a mean forecast were seen, 0 of a sampled one")


def test_a_replay_without_a_gpu_is_none() -> None:
    cell = on_device(STATIC)
    blind = cell.model_copy(update={"provenance": cell.provenance.model_copy(update={"gpu": None})})
    assert replay_of(blind) == (Ended.NOT_SHOWN, "no replay was looked for: no GPU was used")


def test_partitions_are_told_in_words() -> None:
    assert partitions_text({(True,), ()}) == "not split; captured"
    assert partitions_text(None) == "not seen"
    assert CAPTURED[0]["captured"]
