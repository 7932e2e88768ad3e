"""A table of a suite that is not what the host takes it for is told as damage where it comes in, and ends nothing."""

from pathlib import Path
from typing import Any

import pytest

from tests.verdict.sample_cells import good_result, with_suite
from tests.verdict.stored_runs import store_run
from toto_compat.contract.result import CellResult, Outcome, Provenance, SuiteEvidence
from toto_compat.contract.suites import Suite
from toto_compat.errors import StorageError
from toto_compat.evidence.store import CellStore, cell_path, load_run
from toto_compat.report.html import render_page
from toto_compat.runtimes.cell_process import RESULT_FILE, ProcessEnd, collect_result
from toto_compat.runtimes.local import FinishedCell
from toto_compat.runtimes.run import keep_cell
from toto_compat.verdict.judged_run import judge_run

HOSTILE: list[tuple[Suite, dict[str, Any]]] = [
    (Suite.SPEED, {"timings": "x"}),
    (Suite.SPEED, {"timings": {"compiled": ["x"]}}),
    (Suite.SPEED, {"timings": {"compiled": [10**400]}}),
    (Suite.CUDA_LOWERING, {"architectures": [None]}),
    (Suite.CUDA_LOWERING, {"architectures": [{"architecture": "sm_90"}]}),
    (Suite.CUDA_LOWERING, {"graphs": [{"partitions": [1]}]}),
    (Suite.CUDAGRAPH, {"partitions": 3}),
    (Suite.RECOMPILE, {"reasons": [{"count": "many"}]}),
    (Suite.SYMBOLS, {"symbols": ["BTC"]}),
]
CELL = "torch-2.13.0-cpu/fixed_size/default"


def with_details(suite: Suite, details: dict[str, Any]) -> CellResult:
    evidence = SuiteEvidence(suite=suite, outcome=Outcome.MEASURED, details=details)
    return with_suite(good_result(), suite, evidence)


@pytest.mark.parametrize(("suite", "details"), HOSTILE)
def test_a_stored_cell_with_a_damaged_table_is_named(tmp_path: Path, suite: Suite, details: dict[str, Any]) -> None:
    folder = store_run(tmp_path, "run", [good_result()])
    result = with_details(suite, details)
    cell_path(folder, CELL).write_text(result.model_dump_json(by_alias=True), encoding="utf-8")
    with pytest.raises(StorageError, match=rf"default\.json.*evidence\.{suite.value}\.details\.{next(iter(details))}"):
        load_run(folder)


@pytest.mark.parametrize(("suite", "details"), HOSTILE)
def test_a_cell_that_leaves_a_damaged_table_costs_itself_alone(
    tmp_path: Path, suite: Suite, details: dict[str, Any]
) -> None:
    result = with_details(suite, details)
    (tmp_path / RESULT_FILE).write_text(result.model_dump_json(by_alias=True), encoding="utf-8")
    collected = collect_result(result.request, tmp_path, ProcessEnd(code=0), Provenance())
    assert collected.failure is not None
    assert f"its result file is not valid: evidence.{suite.value}.details" in collected.failure.message


@pytest.mark.parametrize("partitions", [[None, None], [1, 3], [[True, False]], []])
def test_graphs_that_torch_splits_or_does_not_split_are_no_damage(tmp_path: Path, partitions: list[Any]) -> None:
    """Before torch 2.9 Inductor splits no graph, and the suite says None of each."""
    result = with_details(Suite.CUDAGRAPH, {"partitions": partitions})
    (tmp_path / RESULT_FILE).write_text(result.model_dump_json(by_alias=True), encoding="utf-8")
    assert collect_result(result.request, tmp_path, ProcessEnd(code=0), Provenance()).failure is None


def test_a_result_with_a_damaged_table_is_kept_as_a_cell_that_could_not_be_run(tmp_path: Path) -> None:
    """As one that came from a node does: nobody has looked into it on the way."""
    folder = store_run(tmp_path, "run", [good_result()])
    done = FinishedCell(with_details(Suite.SPEED, {"timings": "x"}), 1.0)
    keep_cell(done, "ab12", folder, CellStore(tmp_path / "store"), lambda _: None)
    judged = judge_run(load_run(folder))
    assert judged.run.cells[0].failure is not None
    assert "details.timings" in judged.run.cells[0].failure.message
    assert "details.timings" in judged.cells[0].reason
    assert render_page(judged, {})
