"""What the page shows of several runs and releases: a row's history, and trends."""

from pathlib import Path
from typing import Any

import pytest

from tests.verdict.sample_cells import (
    GATES,
    good_result,
    production_incident,
    with_figures,
    with_suite,
)
from tests.verdict.stored_runs import info_of_run, judged_run, store_run
from toto_compat.contract.request import Device
from toto_compat.contract.result import CellResult, Figure, Kind, Outcome
from toto_compat.contract.suites import Suite
from toto_compat.evidence.store import load_run, write_run_info
from toto_compat.matrix.gates import Gate
from toto_compat.report.compatibility import as_json, compatibility
from toto_compat.report.page_data import (
    PastRow,
    as_past_row,
    cell_name,
    history_of,
    trend_points,
)
from toto_compat.verdict.decision import Contender, contenders_of
from toto_compat.verdict.judge import judge
from toto_compat.verdict.judged_run import JudgedRun, judge_run

ROW = "cpu/torch-2.13.0-cpu/fixed_size/default"


# --- history ----------------------------------------------------------------------------------------------------------


def run_now(results: Path, *cells: CellResult) -> JudgedRun:
    folder = store_run(results, "now", cells or [good_result()], started="2026-12-01T00:00:00Z")
    return judge_run(load_run(folder))


def with_table(folder: Path, **changes: Any) -> Path:
    """The run with its table, as a finished run leaves it; `changes` are made to every row."""
    table = compatibility(judge_run(load_run(folder)))
    table["rows"] = [row | changes for row in table["rows"]]
    (folder / "compatibility.json").write_text(as_json(table), encoding="utf-8")
    return folder


def test_a_row_is_followed_over_several_runs_with_verdict_speedup_and_recompiles(tmp_path: Path) -> None:
    failed = with_figures(good_result(), {Gate.SPEEDUP: 1.5, Gate.RECOMPILES_TOTAL: 43.0})
    passed = with_figures(good_result(), {Gate.SPEEDUP: 2.5, Gate.RECOMPILES_TOTAL: 2.0})
    without = with_suite(passed, Suite.SPEED, None)
    for month, cell in enumerate((failed, passed, without), 1):
        with_table(store_run(tmp_path, f"run-{9 - month}", [cell], started=f"2026-0{month}-01T09:00:00Z"))
    assert history_of(tmp_path, until=run_now(tmp_path)) == {
        ROW: [
            PastRow("run-8", "2026-01-01", "FAIL", 1.5, 43.0),
            PastRow("run-7", "2026-02-01", "PASS", 2.5, 2.0),
            PastRow("run-6", "2026-03-01", "INCONCLUSIVE", None, 2.0),
        ]
    }


def test_an_interrupted_run_without_a_table_is_judged_from_its_cells(tmp_path: Path) -> None:
    slow = with_figures(good_result(), {Gate.SPEEDUP: 1.5})
    folder = store_run(tmp_path, "interrupted", [slow], started="2026-01-01T00:00:00Z")
    planned = [slow, good_result(cache="upstream")]
    write_run_info(folder, info_of_run("interrupted", planned, started="2026-01-01T00:00:00Z"))
    assert not (folder / "compatibility.json").exists()
    assert history_of(tmp_path, until=run_now(tmp_path)) == {
        ROW: [PastRow("interrupted", "2026-01-01", "FAIL", 1.5, 0.0)]
    }


def test_a_run_that_was_stopped_before_its_first_cell_has_no_rows(tmp_path: Path) -> None:
    write_run_info(tmp_path / "stopped", info_of_run("stopped", [good_result()]))
    assert history_of(tmp_path, until=run_now(tmp_path)) == {}


def test_a_table_says_what_was_decided_then_and_is_not_judged_again(tmp_path: Path) -> None:
    with_table(store_run(tmp_path, "earlier", [good_result()]), verdict="FAIL")
    [past] = history_of(tmp_path, until=run_now(tmp_path))[ROW]
    assert past.verdict == "FAIL"


def test_a_run_has_rows_only_for_the_cells_it_had(tmp_path: Path) -> None:
    with_table(store_run(tmp_path, "a", [good_result()], started="2026-01-01T00:00:00Z"))
    both = [good_result(), good_result(cache="upstream", settings_name="production")]
    with_table(store_run(tmp_path, "b", both, started="2026-02-01T00:00:00Z"))
    past = history_of(tmp_path, until=run_now(tmp_path))
    assert {name: [row.run for row in rows] for name, rows in past.items()} == {
        ROW: ["a", "b"],
        "cpu/torch-2.13.0-cpu/upstream/default+production": ["b"],
    }


def test_the_same_cell_on_the_cpu_and_on_a_gpu_has_two_histories(tmp_path: Path) -> None:
    results = {device: good_result(torch="2.9.0", build="cu128", device=device) for device in Device}
    for device, result in results.items():
        with_table(store_run(tmp_path, f"on-{device}", [result], device=device))
    past = history_of(tmp_path, until=run_now(tmp_path))
    assert {cell_name(judge(result, GATES)): [f"on-{device}"] for device, result in results.items()} == {
        name: [row.run for row in rows] for name, rows in past.items()
    }


def test_runs_that_started_together_stand_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b", "a"):
        store_run(tmp_path, name, [good_result()])
    assert [row.run for row in history_of(tmp_path, until=run_now(tmp_path))[ROW]] == ["a", "b"]


def test_reference_runs_are_part_of_the_history_and_latest_is_no_run_of_its_own(tmp_path: Path) -> None:
    store_run(tmp_path, "reference/venv", [good_result()])
    store_run(tmp_path, "earlier", [good_result()])
    (tmp_path / "latest").symlink_to("earlier")
    names = {row.run for row in history_of(tmp_path, until=run_now(tmp_path))[ROW]}
    assert names == {"reference/venv", "earlier"}


def test_a_speedup_that_json_cannot_hold_as_a_number_is_none(tmp_path: Path) -> None:
    endless = with_figures(good_result(), {Gate.SPEEDUP: float("inf")})
    with_table(store_run(tmp_path, "earlier", [endless]))
    [past] = history_of(tmp_path, until=run_now(tmp_path))[ROW]
    assert (past.speedup, past.recompiles_total) == (None, 0.0)


def test_a_first_run_has_no_history(tmp_path: Path) -> None:
    current = run_now(tmp_path)
    assert history_of(tmp_path, until=current) == {}
    assert history_of(tmp_path / "nowhere", until=current) == {}


def test_the_run_that_is_shown_has_the_row_that_its_table_would_give_later(tmp_path: Path) -> None:
    earlier = with_table(store_run(tmp_path, "earlier", [production_incident()], started="2026-01-01T00:00:00Z"))
    run = judge_run(load_run(earlier))
    [past] = history_of(tmp_path, until=run_now(tmp_path))[cell_name(run.cells[0])]
    assert as_past_row(run.cells[0], run.run.info) == past


def test_a_row_without_the_gates_of_the_history_has_none_of_their_figures() -> None:
    cell = judge(good_result(), {Gate.MEMORY: GATES[Gate.MEMORY]})
    past = as_past_row(cell, info_of_run("now", [good_result()], started="2026-12-01T00:00:00Z"))
    assert past == PastRow("now", "2026-12-01", "PASS", None, None)


# --- trends -----------------------------------------------------------------------------------------------------------


def contender_of(*results: CellResult) -> Contender:
    [contender] = contenders_of(Device.CUDA, judged_run(*results).cells)
    return contender


def on_gpu(torch: str, speedup: Figure | float | None, build: str = "cu128") -> CellResult:
    return with_figures(good_result(torch=torch, build=build), {Gate.SPEEDUP: speedup})


def points(*results: CellResult) -> list[tuple[str, float | None]]:
    return [(release, figure.value) for release, figure in trend_points(contender_of(*results), Suite.SPEED, "speedup")]


def test_a_trend_has_a_point_per_release_from_old_to_new() -> None:
    assert points(on_gpu("2.10.0", 2.5), on_gpu("2.9.0", 2.1)) == [("2.9.0", 2.1), ("2.10.0", 2.5)]


def test_the_last_environment_of_a_release_stands_for_it() -> None:
    assert points(on_gpu("2.9.0", 3.0, "cu130"), on_gpu("2.9.0", 2.0, "cu128")) == [("2.9.0", 3.0)]


@pytest.mark.parametrize(
    "figure",
    [
        Figure(value=2.0, kind=Kind.PREDICTED),
        Figure(value=2.0, kind=Kind.REPORTED),
        Figure(value=None, missing="not timed"),
        None,
    ],
)
def test_what_was_not_measured_is_no_point(figure: Figure | None) -> None:
    assert points(on_gpu("2.9.0", figure), on_gpu("2.10.0", 2.5)) == [("2.10.0", 2.5)]


def test_an_environment_that_was_not_measured_hides_no_other_of_its_release() -> None:
    assert points(on_gpu("2.9.0", 2.0, "cu128"), on_gpu("2.9.0", None, "cu130")) == [("2.9.0", 2.0)]


def test_a_suite_that_could_not_finish_gives_no_point() -> None:
    measured = on_gpu("2.9.0", 2.0)
    broken = with_suite(
        measured, Suite.SPEED, measured.evidence[Suite.SPEED].model_copy(update={"outcome": Outcome.ERROR})
    )
    assert points(broken, on_gpu("2.10.0", 2.5)) == [("2.10.0", 2.5)]


def test_a_point_keeps_its_interval() -> None:
    figure = Figure(value=2.4, low=2.2, high=2.6)
    assert trend_points(contender_of(on_gpu("2.9.0", figure)), Suite.SPEED, "speedup") == [("2.9.0", figure)]


def test_a_run_knows_nothing_of_those_after_it(tmp_path: Path) -> None:
    january = store_run(tmp_path, "january", [good_result()], started="2026-01-01T00:00:00Z")
    store_run(tmp_path, "february", [good_result()], started="2026-02-01T00:00:00Z")
    assert history_of(tmp_path, until=judge_run(load_run(january))) == {}
