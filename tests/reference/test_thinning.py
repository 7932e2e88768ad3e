"""A thinned cell is small and says the same."""

import json
from pathlib import Path

import pytest

from tests.verdict.sample_cells import GATES, good_result, production_incident, with_figures
from tests.verdict.stored_runs import stored
from toto_compat.contract.events import EventKind
from toto_compat.contract.result import Failure, Outcome, SuiteEvidence
from toto_compat.contract.suites import Suite
from toto_compat.errors import StorageError
from toto_compat.evidence.store import StoredCell, read_cell
from toto_compat.matrix.gates import Gate
from toto_compat.reference.kept import MOST_BYTES
from toto_compat.reference.thinning import as_text, check_same_verdict, thinned
from toto_compat.verdict.judge import Status, judge

ROOT = Path(__file__).parent.parent.parent
# Cells as they were measured, of the layouts of their time: one that recompiles, one that does not, one for CUDA.
WHOLE = [read_cell(path) for path in sorted((ROOT / "tests" / "fixtures" / "cells").glob("*.json"))]


@pytest.mark.parametrize("cell", WHOLE, ids=lambda cell: cell.cell)
def test_a_real_cell_is_so_small_that_ninety_are_under_5_mb_and_every_gate_says_the_same(cell: StoredCell) -> None:
    thin = thinned(cell)
    check_same_verdict(cell, thin, GATES)
    assert len(as_text(thin)) < min(MOST_BYTES / 90, len(cell.model_dump_json()))
    assert thinned(thin) == thin


@pytest.mark.parametrize("cell", [*WHOLE, stored(good_result(), "2026-11-16T10:00:00Z")], ids=lambda cell: cell.cell)
def test_what_a_file_leaves_out_is_read_as_it_was_and_of_the_request_it_leaves_out_nothing(
    cell: StoredCell, tmp_path: Path
) -> None:
    (tmp_path / "cell.json").write_text(as_text(cell), encoding="utf-8")
    assert read_cell(tmp_path / "cell.json") == cell
    assert json.loads(as_text(cell))["request"] == cell.request.model_dump(mode="json", by_alias=True)


def test_origin_and_request_stay() -> None:
    cell = WHOLE[0]
    thin = thinned(cell)
    assert (thin.request, thin.provenance, thin.key, thin.stored) == (
        cell.request,
        cell.provenance,
        cell.key,
        cell.stored,
    )


def test_events_that_say_the_same_become_one_with_their_number() -> None:
    whole = stored(production_incident(), "2026-11-16T10:00:00Z")
    thin = thinned(whole)
    before, after = whole.evidence[Suite.RECOMPILE], thin.evidence[Suite.RECOMPILE]
    assert len(after.events) == 3
    for kind in (EventKind.RECOMPILE, EventKind.RECOMPILE_LIMIT, EventKind.GRAPH_BREAK):
        counts = [sum(one.count for one in each.events if one.kind is kind) for each in (before, after)]
        assert counts[0] == counts[1]
    assert after.details["thinned"]["events"].startswith("3 of 10")


def test_what_is_read_from_another_field_is_not_written_twice() -> None:
    whole = stored(production_incident(), "2026-11-16T10:00:00Z")
    recompile = whole.evidence[Suite.RECOMPILE]
    event = recompile.events[0]
    events = (
        event.model_copy(update={"line": 1, "reasons": (event.reason,), "logged_from": "torch/_dynamo/guards.py:2997"}),
        event.model_copy(update={"line": 2, "reasons": (event.reason, "second"), "normalised_reason": event.reason}),
        event.model_copy(update={"line": 3, "logged_from": "torch/_dynamo/guards.py:2997"}),
    )
    told = recompile.model_copy(update={"events": events})
    thin = thinned(whole.model_copy(update={"evidence": {Suite.RECOMPILE: told}}))
    after = thin.evidence[Suite.RECOMPILE].events
    assert [one.reasons for one in after] == [(), (), ()]
    assert all(one.reason == event.reason for one in after)
    assert [one.normalised_reason for one in after] == [event.normalised_reason, "", event.normalised_reason]
    assert [one.logged_from for one in after] == ["torch/_dynamo/guards.py:2997", event.logged_from, ""]
    assert thinned(thin) == thin


def test_of_a_forecast_that_compiled_nothing_only_its_name_and_time_are_kept() -> None:
    idle = {"name": "mean", "warm_up": False, "seconds": 0.25, "compilations": 0, "recompiles": 0}
    busy = {**idle, "warm_up": True, "recompiles": 2}
    cell = stored(good_result(), "2026-11-16T10:00:00Z")
    recompile = cell.evidence[Suite.RECOMPILE].model_copy(update={"details": {"phases": [busy, *[idle] * 20]}})
    thin = thinned(cell.model_copy(update={"evidence": {**cell.evidence, Suite.RECOMPILE: recompile}}))
    phases = thin.evidence[Suite.RECOMPILE].details["phases"]
    assert phases == [
        {"name": "mean", "warm_up": True, "seconds": 0.25, "recompiles": 2},
        *[{"name": "mean", "seconds": 0.25}] * 20,
    ]


def test_the_rows_nearest_to_their_limit_are_kept() -> None:
    rows = [{"scenario": str(number), "ratio": number / 100} for number in range(100)]
    cell = stored(good_result(), "2026-11-16T10:00:00Z")
    evidence = cell.evidence[Suite.EQUIVALENCE].model_copy(update={"details": {"comparisons": rows}})
    thin = thinned(cell.model_copy(update={"evidence": {**cell.evidence, Suite.EQUIVALENCE: evidence}}))
    kept = thin.evidence[Suite.EQUIVALENCE].details["comparisons"]
    assert [row["ratio"] for row in kept] == [number / 100 for number in range(99, 93, -1)]


@pytest.mark.parametrize("ratio", [None, float("inf"), float("nan"), "Infinity"])
def test_an_answer_that_is_missing_or_not_finite_is_nearest_to_its_limit(ratio: object) -> None:
    """JSON has no infinity: what a cell writes of it comes back as nothing."""
    rows: list[dict[str, object]] = [{"scenario": str(number), "ratio": number / 100} for number in range(100)]
    cell = stored(good_result(), "2026-11-16T10:00:00Z")
    details = {"comparisons": [*rows, {"scenario": "the one that decides", "ratio": ratio}]}
    evidence = cell.evidence[Suite.EQUIVALENCE].model_copy(update={"details": details})
    thin = thinned(cell.model_copy(update={"evidence": {**cell.evidence, Suite.EQUIVALENCE: evidence}}))
    kept = thin.evidence[Suite.EQUIVALENCE].details["comparisons"]
    assert [row["scenario"] for row in kept[:2]] == ["the one that decides", "99"]


def test_the_counters_of_a_machine_that_ran_for_months_decide_as_before() -> None:
    """Foreign processes are a small difference of large numbers, in any of the loops."""
    quiet = {"cores": 2, "clock_s": 8e6, "busy_s": 1.5e7, "own_cpu_s": 6.0}
    calm = {"before": quiet, "after": {**quiet, "clock_s": 8e6 + 5.0, "busy_s": 1.5e7 + 5.0, "own_cpu_s": 11.0}}
    loops = [calm] * 14 + [{"before": quiet, "after": {**calm["after"], "busy_s": 1.5e7 + 8.0}}]
    cell = stored(good_result(), "2026-11-16T10:00:00Z")
    speed = cell.evidence[Suite.SPEED].model_copy(update={"details": {"conditions": loops}})
    disturbed = cell.model_copy(update={"evidence": {**cell.evidence, Suite.SPEED: speed}})
    assert judge(disturbed, GATES).gates[Gate.SPEEDUP].status is Status.INCONCLUSIVE
    check_same_verdict(disturbed, thinned(disturbed), GATES)


def test_thinning_that_touches_what_decides_is_refused() -> None:
    whole = stored(good_result(), "2026-11-16T10:00:00Z")
    broken = with_figures(whole, {Gate.RECOMPILES: None})
    assert isinstance(broken, StoredCell)
    with pytest.raises(StorageError, match="verdict changed"):
        check_same_verdict(whole, broken, GATES)


def test_what_is_committed_of_a_failure_names_no_folder_of_a_machine() -> None:
    """The compiler's words stay, the file of torch that they are about, and the page that torch points to."""
    page = "see https://pytorch.org/docs/stable/logging.html"
    line = "/home/me/venvs/x/lib/python3.12/site-packages/torch/include/vec.h:215:13: error: no such thing"
    raised = Failure(
        kind="exception", message="it raised", last_lines=(line, '  File "/home/me/work/ab.cpp", a / b', page)
    )
    failed = SuiteEvidence(suite=Suite.RECOMPILE, outcome=Outcome.MODEL_FAILED, failure=raised)
    cell = stored(good_result(), "2026-11-16T10:00:00Z")
    failure = thinned(cell.model_copy(update={"evidence": {Suite.RECOMPILE: failed}})).evidence[Suite.RECOMPILE].failure
    assert failure is not None
    assert failure.last_lines == ("torch/include/vec.h:215:13: error: no such thing", '  File "ab.cpp", a / b', page)


def test_what_is_committed_of_a_graph_break_names_no_folder_of_a_machine() -> None:
    whole = stored(production_incident(), "2026-11-16T10:00:00Z")
    recompile = whole.evidence[Suite.RECOMPILE]
    reason = "'skip function wrap in file /home/me/venvs/x/lib/python3.12/site-packages/torch/_dynamo/decorators.py'"
    broke = recompile.events[0].model_copy(update={"reason": reason})
    thin = thinned(
        whole.model_copy(update={"evidence": {Suite.RECOMPILE: recompile.model_copy(update={"events": (broke,)})}})
    )
    assert thin.evidence[Suite.RECOMPILE].events[0].reason == (
        "'skip function wrap in file torch/_dynamo/decorators.py'"
    )
