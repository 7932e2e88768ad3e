"""The second count: by the text of a log alone, the same as the observer's, and different where the cell's is wrong."""

import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from tests.verdict.sample_cells import good_result, with_figures
from tests.verdict.stored_runs import stored
from toto_compat.cli import cli
from toto_compat.contract.result import Figure, Outcome
from toto_compat.contract.suites import Suite
from toto_compat.errors import EnvironmentBuildError, ExitCode
from toto_compat.evidence.store import StoredCell, cell_path, read_cell, write_cell
from toto_compat.matrix.gates import Gate
from toto_compat.matrix.load import load_matrix
from toto_compat.reference.kept import keep
from toto_compat.reference.logged_forecasts import log_branches
from toto_compat.reference.plan import planned_rows, read_plan
from toto_compat.reference.torch_logs import (
    add_count,
    count_lines,
    counted,
    counts_table,
    is_counted,
    read_counts,
    why_not_counted,
)

ROOT = Path(__file__).parent.parent.parent
REFERENCE = ROOT / "results" / "reference"
LOGS = ROOT / "tests" / "fixtures" / "logs"
RELEASES = ("2.5.1", "2.9.0", "2.13.0", "2.15.0")
LOG = """== forecast mean
[__recompiles] Recompiling function f in a.py:1
[__graph_breaks] Graph break in user code at b:2
"""


def cell_that_counted(recompiles: float, breaks: float) -> StoredCell:
    cell = with_figures(good_result(cache="upstream"), {Gate.GRAPH_BREAKS: breaks})
    evidence = cell.evidence[Suite.RECOMPILE]
    figures = {**evidence.figures, "recompiles_logged": Figure(value=recompiles)}
    measured = evidence.model_copy(update={"figures": figures})
    return stored(cell.model_copy(update={"evidence": {**cell.evidence, Suite.RECOMPILE: measured}}), "2026-11-16")


@pytest.mark.parametrize("release", RELEASES)
def test_the_text_of_a_release_has_as_many_as_the_observer_counted_beside_it(release: str) -> None:
    events = json.loads((LOGS / f"events-{release}.json").read_text(encoding="utf-8"))["events"]
    text = (LOGS / f"events-{release}.log").read_text(encoding="utf-8")
    assert count_lines(text) == (events["recompile"], events["graph_break"])


def test_a_break_that_is_told_in_short_counts_and_its_reason_does_not() -> None:
    text = (
        "V1 [0/0] [__graph_breaks] Graph break (user stack suppressed due to duplicate graph break) in user code at\n"
        "V1 [0/0] [__graph_breaks] Graph Break Reason: Unsupported Tensor.item() call\n"
        "V1 [0/0] [__recompiles]     triggered by the following guard failure(s):\n"
    )
    assert count_lines(text) == (0, 1)


def test_counts_that_agree_and_counts_that_do_not() -> None:
    assert counted(cell_that_counted(1, 1), LOG, 0).agree
    assert not counted(cell_that_counted(0, 1), LOG, 0).agree
    assert not counted(cell_that_counted(1, 2), LOG, 0).agree


def test_a_cell_without_a_figure_does_not_agree_by_having_none() -> None:
    cell = with_figures(good_result(), {Gate.GRAPH_BREAKS: None})
    count = counted(stored(cell, "2026-11-16"), LOG, 0)
    assert count.graph_breaks.by_cell is None
    assert not count.agree


def test_a_process_that_took_no_forecast_counts_nothing() -> None:
    with pytest.raises(EnvironmentBuildError, match="No module named"):
        counted(cell_that_counted(0, 0), "ModuleNotFoundError: No module named 'toto'\n", 1)


def test_a_forecast_that_raised_is_told_beside_the_count() -> None:
    assert counted(cell_that_counted(1, 1), f"{LOG}IndexError: list index\n", 1).raised == "IndexError: list index"


def test_a_count_belongs_to_one_result_of_its_cell(tmp_path: Path) -> None:
    cell = cell_that_counted(1, 1)
    add_count(tmp_path, counted(cell, LOG, 0))
    assert is_counted(tmp_path, cell)
    assert not is_counted(tmp_path, cell.model_copy(update={"stored": "2026-12-24"}))
    add_count(tmp_path, counted(cell, LOG, 0))
    assert len(read_counts(tmp_path).counts) == 1
    assert "1 / 1" in counts_table(read_counts(tmp_path).counts)


def test_the_process_that_is_counted_uses_no_observer() -> None:
    source = (Path(__file__).parent.parent.parent / "toto_compat" / "reference" / "logged_forecasts.py").read_text(
        "utf-8"
    )
    assert "cell.live" not in source
    assert "suites.recompile import" not in source


def test_every_release_that_is_committed_has_a_second_count_which_agrees() -> None:
    """One whose forecast raised has none, nor has 2.3.1: before 2.4 there is nothing that it could be held against."""
    plan, matrix = read_plan(REFERENCE / "plan.yaml"), load_matrix(ROOT / "matrix.yaml")
    rows = [row for release in plan.releases for row in planned_rows(plan, matrix, release)]
    there = [row for row in rows if row.counted_by_torch_logs and cell_path(REFERENCE / row.run, row.cell).exists()]
    assert there
    for row in there:
        assert why_not_counted(REFERENCE / row.run, row.cell) == "", row.cell
        stored_cell = read_cell(cell_path(REFERENCE / row.run, row.cell))
        raised = stored_cell.evidence[Suite.RECOMPILE].outcome is Outcome.MODEL_FAILED
        assert is_counted(REFERENCE / row.run, stored_cell) or raised or row.release == "2.3.1", row.cell


def test_a_count_that_is_missing_of_another_result_or_differs_is_told(tmp_path: Path) -> None:
    cell = cell_that_counted(1, 1)
    write_cell(tmp_path, cell)
    assert why_not_counted(tmp_path, cell.cell) == "was not counted a second time"
    add_count(tmp_path, counted(cell, LOG, 0))
    assert why_not_counted(tmp_path, cell.cell) == ""
    write_cell(tmp_path, cell.model_copy(update={"stored": "2026-12-24"}))
    assert why_not_counted(tmp_path, cell.cell) == "was not counted a second time"
    other = cell_that_counted(2, 1)
    write_cell(tmp_path, other)
    add_count(tmp_path, counted(other, LOG, 0))
    assert why_not_counted(tmp_path, cell.cell) == "the two counts differ"


def test_counts_that_differ_change_the_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plan = {"schema": 1, "releases": ["2.13.0"], "runs": {"cpu": {"profile": "quick", "rows": ["upstream/default"]}}}
    (tmp_path / "plan.yaml").write_text(json.dumps(plan), encoding="utf-8")
    cell = read_cell(cell_path(REFERENCE / "cpu", "torch-2.13.0-cpu/upstream/default"))
    keep(tmp_path, "cpu", load_matrix(ROOT / "matrix.yaml"), profile="quick", cells=[cell], revision="")
    command = ["reference", "--show-only", "--plan", "plan.yaml", "--matrix", str(ROOT / "matrix.yaml")]
    assert CliRunner().invoke(cli, command).exit_code == ExitCode.OK
    add_count(tmp_path / "cpu", counted(cell, LOG, 0))
    result = CliRunner().invoke(cli, command)
    assert "the two counts differ: torch-2.13.0-cpu/upstream/default" in result.stderr
    assert result.exit_code == ExitCode.FINDINGS


@pytest.mark.parametrize(("release", "written"), [((2, 5, 1), True), ((2, 6, 0), False)])
def test_branches_on_tensors_are_written_where_torch_does_not(
    release: tuple[int, ...], written: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__version__=release))
    log = logging.getLogger("torch._dynamo.symbolic_convert")
    before = log.level, list(log.handlers), list(log.filters)
    try:
        log_branches()
        log.debug("TRACE LOAD_FAST x")
        log.debug("generic_jump triggered compile")
    finally:
        log.level, log.handlers, log.filters = before
        log.setLevel(before[0])
    told = capsys.readouterr().err
    assert count_lines(told) == (0, int(written))
    assert told.count("\n") == int(written)
