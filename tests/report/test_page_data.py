"""What the page shows, before it is a page: grid, details and grouped events."""

import json
from typing import Any

import pytest

from tests.verdict.sample_cells import (
    GATES,
    good_result,
    production_incident,
    suite_error,
    with_figures,
    with_suite,
)
from tests.verdict.stored_runs import stored
from toto_compat.contract.events import Event, EventKind, Severity
from toto_compat.contract.request import Device
from toto_compat.contract.result import CellResult, Failure, Figure, Kind, Outcome, SuiteEvidence
from toto_compat.contract.suites import Suite
from toto_compat.matrix.gates import Gate
from toto_compat.report.page_data import (
    Column,
    PastRow,
    cell_details,
    grid_of,
    grouped_events,
    provenance_facts,
)
from toto_compat.verdict.judge import JudgedCell, judge


def judged(result: CellResult) -> JudgedCell:
    return judge(result, GATES)


# --- the grid ---------------------------------------------------------------------------------------------------------


def test_all_modes_of_a_cache_stand_together_whatever_order_they_come_in() -> None:
    names = [("upstream", "default"), ("fixed_size", "default"), ("upstream", "max-autotune")]
    grid = grid_of([judged(good_result(cache=cache, mode=mode)) for cache, mode in names])
    assert [(row.cache, row.mode) for row in grid.rows] == [
        ("upstream", "default"),
        ("upstream", "max-autotune"),
        ("fixed_size", "default"),
    ]


def test_settings_are_rows_of_their_own() -> None:
    grid = grid_of([judged(good_result(settings_name=name)) for name in ("stock", "production")])
    assert [(row.mode, row.settings) for row in grid.rows] == [("default", "stock"), ("default", "production")]


def test_environments_of_one_release_are_columns_of_their_own_in_the_order_of_their_names() -> None:
    grid = grid_of([judged(good_result(torch="2.9.0", build=build)) for build in ("cu130", "cu128")])
    assert grid.columns == (
        Column("torch-2.9.0-cu128", "2.9.0", "cuda"),
        Column("torch-2.9.0-cu130", "2.9.0", "cuda"),
    )


def test_a_cuda_build_that_ran_on_the_cpu_stands_with_the_cpu() -> None:
    newest = judged(good_result(torch="2.15.0", build="cu132", device=Device.CPU))
    grid = grid_of([judged(good_result(torch="2.9.0", build="cu128")), newest])
    assert grid.columns[0] == Column("torch-2.15.0-cu132", "2.15.0", "cpu")


def test_a_cell_in_the_grid_has_the_number_of_its_details() -> None:
    cells = [judged(good_result(torch=torch)) for torch in ("2.9.0", "2.13.0")]
    [row] = grid_of(cells).rows
    found = [cell for cell in row.cells if cell]
    assert [(one.number, one.cell) for one in found] == [(1, cells[1]), (0, cells[0])]


@pytest.mark.parametrize(("speedup", "shown"), [(2.345, "2.35x"), (10.0, "10.00x"), (None, "")])
def test_the_grid_shows_a_speedup_where_there_is_one(speedup: float | None, shown: str) -> None:
    [row] = grid_of([judged(with_figures(good_result(), {Gate.SPEEDUP: speedup}))]).rows
    assert row.cells[0] is not None
    assert row.cells[0].speedup == shown


@pytest.mark.parametrize(
    ("figure", "shown"),
    [
        (Figure(value=0.0, kind=Kind.PREDICTED), "no graph skips"),
        (Figure(value=8.0, kind=Kind.PREDICTED), "8 graphs skipped or split"),
        (Figure(value=1.0, kind=Kind.PREDICTED), "1 graph skipped or split"),
        (Figure(value=8.0, kind=Kind.MEASURED), ""),
        (Figure(value=None, kind=Kind.PREDICTED), ""),
        (None, ""),
    ],
)
def test_the_grid_says_of_graphs_what_is_only_predicted(figure: Figure | None, shown: str) -> None:
    [row] = grid_of([judged(with_figures(good_result(), {Gate.CUDAGRAPHS: figure}))]).rows
    assert row.cells[0] is not None
    assert row.cells[0].predicted == shown


# --- details of a cell ------------------------------------------------------------------------------------------------


def details_of(result: CellResult) -> dict[str, Any]:
    return cell_details(judged(result), [], 0)


def with_held(result: CellResult, suite: Suite, **changes: Any) -> CellResult:
    return with_suite(result, suite, result.evidence[suite].model_copy(update=changes))


def test_details_name_the_cell_its_verdict_and_how_to_get_it_again() -> None:
    found = cell_details(judged(production_incident()), [], 4)
    name = "torch-2.13.0-cpu/list_index/default"
    assert (found["name"], found["device"], found["provenance"]) == (name, "cpu", 4)
    assert (found["verdict"], found["decidedBy"]) == ("FAIL", "recompile_limit")
    assert found["reason"] == next(gate["reason"] for gate in found["gates"] if gate["gate"] == "recompile_limit")
    assert found["rerun"] == f"toto-compat matrix '{name}' --profile quick --device cpu --fresh"
    assert found["files"] == [f"cells/{name}.json", f"logs/{name}.log"]
    assert found["started"] == "2026-11-16T10:00:00Z"


def test_a_cell_that_passes_was_decided_by_nothing() -> None:
    found = details_of(good_result())
    assert (found["verdict"], found["decidedBy"], found["reason"]) == ("PASS", "", "")


def gate_of(result: CellResult, gate: Gate) -> dict[str, Any]:
    found: dict[str, Any] = next(shown for shown in details_of(result)["gates"] if shown["gate"] == gate)
    return found


def test_a_gate_shows_its_figure_with_unit_interval_limit_and_method() -> None:
    figure = Figure(value=2.34567, unit="x", method="paired", low=2.1234, high=2.5678)
    shown = gate_of(with_figures(good_result(), {Gate.SPEEDUP: figure}), Gate.SPEEDUP)
    told = {name: shown[name] for name in ("status", "value", "unit", "interval", "limit", "kind", "method", "next")}
    assert told == {
        "status": "PASS",
        "value": "2.346",
        "unit": "x",
        "interval": "2.12 to 2.57",
        "limit": ">= 2",
        "kind": "measured",
        "method": "paired",
        "next": "",
    }


@pytest.mark.parametrize("ends", [{"low": 1.0}, {"high": 1.0}, {}])
def test_half_an_interval_is_none(ends: dict[str, Any]) -> None:
    result = with_figures(good_result(), {Gate.SPEEDUP: Figure(value=2.4, **ends)})
    assert gate_of(result, Gate.SPEEDUP)["interval"] == ""


def test_a_gate_without_a_figure_shows_what_to_run_next() -> None:
    result = with_figures(good_result(), {Gate.MEMORY: None})
    shown = gate_of(result, Gate.MEMORY)
    assert (shown["status"], shown["value"], shown["kind"], shown["unit"]) == ("INCONCLUSIVE", "?", "", "")
    assert shown["next"] == details_of(result)["rerun"]


def test_gates_stand_in_the_order_in_which_they_decide() -> None:
    assert [gate["gate"] for gate in details_of(good_result())["gates"]] == [
        gate.value for gate in Gate if gate in GATES
    ]


@pytest.mark.parametrize(
    ("figure", "shown"),
    [
        (Figure(value=1234.5678, unit="ms"), "1235 ms"),
        (Figure(value=0.25), "0.25"),
        (Figure(value=2.4, low=2.0, high=3.0), "2.4 (2 to 3)"),
        (Figure(value=1536 * 2.0**20, unit="bytes"), "1,536 MiB"),
        (Figure(value=None, missing="no GPU"), "no GPU"),
        (Figure(value=None, low=1.0, high=2.0), "not measured"),
    ],
)
def test_a_figure_that_no_gate_judges_is_shown_with_its_unit_or_why_it_is_missing(figure: Figure, shown: str) -> None:
    result = with_held(good_result(), Suite.MEMORY, figures={"peak": figure.model_copy(update={"method": "RSS"})})
    rows = [row for row in details_of(result)["figures"] if row[0] == "memory"]
    assert rows == [["memory", "peak", shown, "measured", "RSS"]]


def test_a_figure_that_a_gate_judges_is_not_shown_a_second_time() -> None:
    names = {(suite, name) for suite, name, *_ in details_of(good_result())["figures"]}
    assert names.isdisjoint({(gate.rule.suite.value, gate.figure) for gate in Gate})
    assert ("speed", "eager_p50_ms") in names


def test_a_figure_of_a_gates_name_in_another_suite_is_shown() -> None:
    result = with_held(good_result(), Suite.EQUIVALENCE, figures={"speedup": Figure(value=1.0)})
    assert ["equivalence", "speedup", "1", "measured", ""] in details_of(result)["figures"]


def test_timings_keep_four_digits_and_are_not_told_twice() -> None:
    timings = {"compiled": (21.23456, 0.000123456, 123456.0)}
    found = details_of(with_held(good_result(), Suite.SPEED, details={"timings": timings, "rounds": 3}))
    assert found["timings"] == {"compiled": [21.23, 0.0001235, 123500.0]}
    assert next(suite["details"] for suite in found["suites"] if suite["suite"] == "speed") == "rounds:\n  3"


def test_a_cell_without_speed_evidence_has_no_timings() -> None:
    assert details_of(with_suite(good_result(), Suite.SPEED, None))["timings"] == {}


def suite_shown(result: CellResult, suite: Suite) -> dict[str, Any]:
    found: dict[str, Any] = next(shown for shown in details_of(result)["suites"] if shown["suite"] == suite)
    return found


def test_a_table_of_a_suite_is_shown_one_row_a_line() -> None:
    tables = {"comparisons": [{"horizon": 10}, {"horizon": 5}], "seed": 7}
    shown = suite_shown(with_held(good_result(), Suite.EQUIVALENCE, details=tables), Suite.EQUIVALENCE)
    assert shown["details"].splitlines() == ["comparisons:", '  {"horizon": 10}', '  {"horizon": 5}', "seed:", "  7"]


def test_a_long_table_is_cut_and_the_reader_sent_to_the_file() -> None:
    rows = ["x" * 100] * 100
    shown = suite_shown(with_held(good_result(), Suite.EQUIVALENCE, details={"rows": rows}), Suite.EQUIVALENCE)
    text, _, last = shown["details"].rpartition("\n")
    assert len(text) == 6000
    assert last == "... the rest is in the cell's file"


def test_a_suite_shows_its_outcome_its_time_and_its_failure() -> None:
    failure = Failure(kind="exception", message="no memory left", last_lines=("Traceback",))
    error = suite_error(Suite.MEMORY, Outcome.ERROR, "").model_copy(update={"seconds": 1.26, "failure": failure})
    shown = suite_shown(with_suite(good_result(), Suite.MEMORY, error), Suite.MEMORY)
    assert (shown["outcome"], shown["seconds"]) == ("error", 1.3)
    assert shown["failure"] == {"kind": "exception", "message": "no memory left", "lastLines": ["Traceback"]}
    assert suite_shown(good_result(), Suite.MEMORY)["failure"] is None


def test_a_cell_that_could_not_be_run_shows_its_last_lines() -> None:
    failure = Failure(kind="crash", message="died of SIGSEGV", last_lines=("one", "two"))
    found = details_of(good_result().model_copy(update={"failure": failure, "evidence": {}}))
    assert found["failure"] == {"kind": "crash", "message": "died of SIGSEGV", "lastLines": ["one", "two"]}
    assert (found["suites"], found["figures"], found["events"]) == ([], [], [])
    assert details_of(good_result())["failure"] is None


def test_events_of_all_suites_are_shown_together() -> None:
    kinds = {event["kind"] for event in details_of(production_incident())["events"]}
    assert kinds == {"recompile", "graph_break", "recompile_limit", "cudagraph_skip"}


def test_events_that_were_not_kept_are_added_up_over_the_suites() -> None:
    result = production_incident()  # keeps ten events of the recompile suite and one of the other
    result = with_held(result, Suite.RECOMPILE, details={"events_seen": 30})
    assert details_of(result)["eventsNotKept"] == 20
    result = with_held(result, Suite.CUDAGRAPH, details={"events_seen": 4})
    assert details_of(result)["eventsNotKept"] == 20 + 3


@pytest.mark.parametrize("seen", [10, 2, "many", None])
def test_a_suite_that_did_not_see_more_than_it_kept_misses_no_events(seen: Any) -> None:
    result = with_held(production_incident(), Suite.RECOMPILE, details={"events_seen": seen})
    assert details_of(result)["eventsNotKept"] == 0


@pytest.mark.parametrize(("reused", "shown"), [(True, "first"), (False, "")])
def test_only_a_reused_cell_names_the_run_that_measured_it(reused: bool, shown: str) -> None:
    cell = stored(good_result(), "2026-11-16T10:00:00Z").model_copy(update={"ran_in": "first", "reused": reused})
    assert details_of(cell)["reusedFrom"] == shown


def test_details_end_with_the_rows_of_earlier_runs() -> None:
    past = [PastRow("one", "2026-01-01", "FAIL", None, 43.0), PastRow("two", "2026-02-01", "PASS", 2.4, 0.0)]
    assert cell_details(judged(good_result()), past, 0)["history"] == [
        ["one", "2026-01-01", "FAIL", None, 43.0],
        ["two", "2026-02-01", "PASS", 2.4, 0.0],
    ]


def test_details_are_json() -> None:
    found = details_of(production_incident())
    assert json.loads(json.dumps(found, allow_nan=False)) == found


# --- provenance -------------------------------------------------------------------------------------------------------


def provenance_of(**changes: Any) -> dict[str, Any]:
    result = good_result()
    return provenance_facts(
        judged(result.model_copy(update={"provenance": result.provenance.model_copy(update=changes)}))
    )


def test_cells_that_ran_at_different_times_share_their_provenance() -> None:
    assert provenance_of(started="yesterday", finished="today") == provenance_of()
    assert provenance_of(host="another") != provenance_of()


def test_what_is_not_known_is_no_fact() -> None:
    facts = provenance_of(gpu=None, compiler="", memory_bytes=0, cores=2)["facts"]
    assert {"gpu", "compiler", "memory_bytes"}.isdisjoint(facts)
    assert facts["cores"] == 2


def test_packages_stand_apart_from_the_facts() -> None:
    found = provenance_of(packages={"numpy": "1.26.4"}, system_packages={"g++": "12.2.0"})
    assert (found["packages"], found["system"]) == ({"numpy": "1.26.4"}, {"g++": "12.2.0"})
    assert {"packages", "system_packages"}.isdisjoint(found["facts"])


# --- grouped events ---------------------------------------------------------------------------------------------------


def event(kind: EventKind = EventKind.RECOMPILE, **changes: Any) -> Event:
    return Event(kind=kind, severity=Severity.WARNING, **changes)


@pytest.mark.parametrize(
    "other",
    [
        {"kind": EventKind.GRAPH_BREAK},
        {"function": "append"},
        {"file": "other.py"},
        {"line": 106},
        {"normalised_reason": "size mismatch"},
    ],
)
def test_events_that_differ_in_kind_function_line_or_reason_are_groups_of_their_own(other: dict[str, Any]) -> None:
    one = event(function="forward", file="attention.py", line=105, normalised_reason="x == N", reason="x == 3")
    assert len(grouped_events([one, one])) == 1
    assert len(grouped_events([one, one.model_copy(update=other)])) == 2


def test_groups_come_by_kind_and_then_the_largest_first() -> None:
    reasons = [(EventKind.GRAPH_BREAK, "many", 9), (EventKind.RECOMPILE, "few", 1), (EventKind.RECOMPILE, "more", 2)]
    groups = grouped_events(event(kind, reason=reason, count=count) for kind, reason, count in reasons)
    assert [(group["reason"], group["count"]) for group in groups] == [("more", 2), ("few", 1), ("many", 9)]


def test_counts_of_a_group_are_added_up() -> None:
    [group] = grouped_events([event(reason="x", count=2), event(reason="x", count=130)])
    assert group["count"] == 132


@pytest.mark.parametrize(
    ("place", "where"),
    [
        ({"file": "a.py", "line": 3}, "a.py:3"),
        ({"file": "a.py", "line": 0}, "a.py:0"),
        ({"file": "a.py"}, "a.py"),
        ({"line": 3}, ""),
    ],
)
def test_a_group_says_where_as_far_as_that_is_known(place: dict[str, Any], where: str) -> None:
    assert grouped_events([event(**place)])[0]["where"] == where


def test_a_group_gives_the_last_reason_in_torchs_own_words_as_an_example() -> None:
    [group] = grouped_events(event(reason=f"x == {n}", normalised_reason="x == N") for n in range(3))
    assert (group["reason"], group["example"]) == ("x == N", "x == 2")


def test_a_reason_that_is_shown_already_is_no_example() -> None:
    [group] = grouped_events([event(reason="x == 3")])
    assert (group["reason"], group["example"]) == ("x == 3", "")


def test_a_group_has_the_stack_of_its_first_event_and_the_limit_of_its_last() -> None:
    first, last = event(stack=("a.py:1 in f", "b.py:2 in g"), limit=8), event(stack=("c.py:3 in h",), limit=16)
    [group] = grouped_events([first, last])
    assert (group["stack"], group["limit"]) == (["a.py:1 in f", "b.py:2 in g"], 16)


def test_what_was_compiled_for_cuda_without_a_gpu_is_a_block_of_its_own() -> None:
    row = {
        "architecture": "sm_90",
        "card": "H100",
        "graphs": 3,
        "lowered": 3,
        "captured_whole": 2,
        "partitions": 4,
        "captured_partitions": 3,
        "kernels": 30,
        "most_registers": 134,
        "spilling_kernels": 1,
        "library_calls": {"extern_kernels.mm": 6},
        "values_on_cpu": 0,
        "seconds": 84.2,
        "errors": {},
    }
    lowered = SuiteEvidence(
        suite=Suite.CUDA_LOWERING, outcome=Outcome.MEASURED, details={"architectures": [row]}, version=1
    )
    result = good_result(build="cu132", device=Device.CPU)
    without = with_suite(result, Suite.CUDA_LOWERING, None)
    block = cell_details(judged(with_suite(result, Suite.CUDA_LOWERING, lowered)), (), 0)["lowered"]
    assert "compiled for sm_90 without a GPU, CUDA graphs would take 2 of 3 graphs whole" in block["told"]
    assert block["rows"] == [
        ["sm_90 (H100)", "3 of 3", "2 of 3", "3 of 4", 30, 134, 1, "extern_kernels.mm 6", 0, 84.2, ""]
    ]
    assert cell_details(judged(without), (), 0)["lowered"] is None
