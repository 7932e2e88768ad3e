"""The campaign of false alarms: what it runs, how it counts, and that it goes on where it was broken off."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from tests.verdict.sample_cells import good_result, suite_error, with_figures, with_suite
from tests.verdict.stored_runs import info_of_run, judged_run, store_run
from toto_compat import false_alarms
from toto_compat.contract.cell_name import CellName
from toto_compat.contract.request import Device
from toto_compat.contract.result import CellResult, Failure, Figure, Outcome
from toto_compat.contract.suites import Suite
from toto_compat.errors import ExitCode, SelectionError
from toto_compat.evidence.store import cell_key, write_run_info
from toto_compat.false_alarms import (
    CANDIDATES,
    UPSTREAM_EAGER,
    asked_of,
    false_alarms_command,
    matrix_of,
    seeded_workloads,
    seeds_of,
    table,
    take_runs,
    tallies,
)
from toto_compat.matrix.asked import Asked
from toto_compat.matrix.gates import Gate
from toto_compat.matrix.load import load_matrix
from toto_compat.matrix.request import matrix_request
from toto_compat.matrix.selection import Selection, select_cells

ROOT = Path(__file__).parent.parent
DOCUMENT: dict[str, Any] = yaml.safe_load((ROOT / "matrix.yaml").read_text(encoding="utf-8"))
ENVIRONMENT = "torch-2.13.0-cpu"


def selected(folder: Path, candidate: str, seeds: Sequence[int], document: dict[str, Any] = DOCUMENT) -> Selection:
    """What the matrix makes of the file of one candidate."""
    workloads = seeded_workloads(document, seeds)
    (folder / "upstream_eager.py").write_text(false_alarms.EAGER_FILE, encoding="utf-8")
    matrix = yaml.safe_dump(matrix_of(document, candidate, workloads))
    (folder / f"{candidate}.yaml").write_text(matrix, encoding="utf-8")
    return select_cells(asked_of(ENVIRONMENT, candidate, workloads, folder), lambda: Device.CPU)


def keys(selection: Selection) -> dict[str, str]:
    """Under what the store keeps each cell."""
    return {
        cell: cell_key(
            matrix_request(selection.matrix, selection.matrix_path, cell, "smoke", Device.CPU),
            lock="lock",
            source_hash="source",
            machine="machine",
        )
        for cell in selection.cells
    }


def cell_of(name: str, result: CellResult | None = None) -> CellResult:
    """A good result, or another one, as that of a cell of this name."""
    cell = CellName(name)
    found = result or good_result(cache=cell.cache)
    request = found.request.model_copy(update={"cell": cell})
    return found.model_copy(update={"cell": cell, "request": request})


def matrix_that_finds(results: dict[str, CellResult]) -> Callable[[Asked], ExitCode]:
    """A run of the matrix whose cells are all good, but for these."""

    def run(asked: Asked) -> ExitCode:
        cells = [cell_of(name, results.get(name)) for name in asked.selectors]
        store_run(asked.results, str(asked.run), cells)
        return ExitCode.OK

    return run


@pytest.mark.parametrize("candidate", CANDIDATES)
def test_the_matrix_of_a_candidate_has_a_cell_for_each_seed(tmp_path: Path, candidate: str) -> None:
    selection = selected(tmp_path, candidate, (1001, 1002))
    name = f"{ENVIRONMENT}/{candidate}/default"
    assert selection.cells == (f"{name}@seed-1001", f"{name}@seed-1002")
    own = selection.matrix.workloads["smoke"]
    for seed in (1001, 1002):
        assert selection.matrix.workloads[f"seed-{seed}"] == own.model_copy(update={"seed": seed})
    gates = selection.matrix.gates
    assert (gates[Gate.COMPILE_ACTIVE].min == 0.0) is (candidate == UPSTREAM_EAGER)
    assert (gates[Gate.SPEEDUP].min == 0.0) is (candidate == UPSTREAM_EAGER)


def test_of_a_profile_with_several_workloads_each_is_tried_under_every_seed(tmp_path: Path) -> None:
    smoke = {**DOCUMENT["profiles"]["smoke"], "workloads": ["smoke", "quick"]}
    document = {**DOCUMENT, "profiles": {**DOCUMENT["profiles"], "smoke": smoke}}
    cells = selected(tmp_path, "fixed_size", (1001, 1002), document).cells
    assert [cell.workload for cell in cells] == [
        "smoke-seed-1001",
        "quick-seed-1001",
        "smoke-seed-1002",
        "quick-seed-1002",
    ]


@pytest.mark.parametrize("candidate", CANDIDATES)
def test_the_cells_of_one_run_are_found_in_the_store_when_more_are_asked_for(tmp_path: Path, candidate: str) -> None:
    fewer = keys(selected(tmp_path, candidate, seeds_of(1)))
    more = keys(selected(tmp_path, candidate, seeds_of(3)))
    assert len(fewer) == 1
    assert fewer.items() <= more.items()
    assert len(set(more.values())) == 3


def test_a_matrix_without_the_profile_is_told() -> None:
    with pytest.raises(SelectionError, match="smoke"):
        seeded_workloads({**DOCUMENT, "profiles": {}}, (1,))


def test_failures_are_alarms_and_what_is_missing_is_undecided_with_its_reason() -> None:
    good = good_result()
    wrong = with_figures(good, {Gate.EQUIVALENCE: 1.5})
    missing = with_figures(good, {Gate.EQUIVALENCE: Figure(value=None, missing="the machine was busy")})
    cells = [cell for result in (good, wrong, missing) for cell in judged_run(result).cells]
    told = tallies(cells)["fixed_size", Gate.EQUIVALENCE]
    assert (told.runs, told.alarms, told.worst) == (3, 1, 1.5)
    assert ["the machine was busy" in why for why in told.undecided] == [True]
    shown = table(tallies(cells))
    assert "equivalence" in shown
    assert "1x" in shown


def test_a_lower_limit_is_a_ratio_the_other_way_round() -> None:
    (cell,) = judged_run(with_figures(good_result(), {Gate.COMPILE_ACTIVE: 0.9})).cells
    assert tallies([cell])["fixed_size", Gate.COMPILE_ACTIVE].worst == pytest.approx(0.8 / 0.9)


def test_each_candidate_is_one_run_with_as_many_jobs_as_the_matrix_takes(tmp_path: Path) -> None:
    asked: list[Asked] = []

    def run(this: Asked) -> None:
        asked.append(this)
        matrix_that_finds({})(this)

    runs = take_runs(DOCUMENT, ENVIRONMENT, seeds_of(2), tmp_path, run)
    assert [(one.run, one.jobs, len(one.selectors)) for one in asked] == [
        ("upstream_eager", None, 2),
        ("fixed_size", None, 2),
    ]
    for one in asked:
        assert one.matrix_file is not None
        assert set(seeded_workloads(DOCUMENT, seeds_of(2))) <= set(load_matrix(one.matrix_file).workloads)
    assert [len(judged.cells) for judged in runs.values()] == [2, 2]


def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[[Asked], object]) -> tuple[int, str, str]:
    """Exit code, stdout and table.md of the command, over what `run` leaves of the matrix."""
    monkeypatch.setattr(false_alarms, "run_matrix", run)
    arguments = ["--runs", "3", "--results", str(tmp_path), "--matrix", str(ROOT / "matrix.yaml")]
    done = CliRunner().invoke(false_alarms_command, arguments)
    return done.exit_code, done.output, (tmp_path / "table.md").read_text(encoding="utf-8")


def row_of(text: str, candidate: str) -> list[str]:
    """The first row of a candidate: cells, PASS, INCONCLUSIVE, FAIL, not run."""
    row = next(line for line in text.splitlines() if line.startswith(f"| {candidate} "))
    return [entry.strip() for entry in row.split("|")[2:-1]]


def test_a_campaign_without_alarm_ends_well_and_says_what_it_was_measured_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, output, kept = ended(tmp_path, monkeypatch, matrix_that_finds({}))
    assert code == ExitCode.OK
    assert row_of(output, "upstream_eager") == row_of(kept, "fixed_size") == ["3", "3", "0", "0", "0"]
    assert "torch 2.13.0+cpu; CPUs: 2; source hash: 0a1b2c3d" in kept
    assert "No alarm." in kept


def test_an_alarm_in_one_cell_of_many_is_found_with_its_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"{ENVIRONMENT}/fixed_size/default@seed-1002"
    wrong = with_figures(good_result(), {Gate.EQUIVALENCE: 1.5})
    code, output, kept = ended(tmp_path, monkeypatch, matrix_that_finds({name: wrong}))
    assert code == ExitCode.FINDINGS
    assert row_of(output, "fixed_size") == ["3", "2", "0", "1", "0"]
    assert f"\nALARM {name} equivalence: 1.5" in output
    assert output.count("ALARM") == 2  # when its candidate is done, and at the end
    assert f"- ALARM {name} equivalence: 1.5, limit &lt;= 1" in kept


@pytest.mark.parametrize(
    "broken",
    [
        good_result().model_copy(update={"evidence": {}, "failure": Failure(kind="crash", message="no memory")}),
        with_suite(good_result(), Suite.MEMORY, suite_error(Suite.MEMORY, Outcome.ERROR, "no memory")),
    ],
    ids=["cell", "suite"],
)
def test_a_cell_that_could_not_be_run_is_not_taken_for_one_without_alarm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: CellResult
) -> None:
    name = f"{ENVIRONMENT}/fixed_size/default@seed-1003"
    code, output, kept = ended(tmp_path, monkeypatch, matrix_that_finds({name: broken}))
    assert code == ExitCode.CELL_NOT_RUN
    assert row_of(output, "fixed_size") == row_of(kept, "fixed_size") == ["3", "2", "0", "0", "1"]
    assert f"NOT RUN {name}: " in output
    assert "no memory" in kept


def test_a_planned_cell_without_a_file_is_not_run_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(asked: Asked) -> None:
        cells = [cell_of(name) for name in asked.selectors]
        folder = store_run(asked.results, str(asked.run), cells[1:])
        write_run_info(folder, info_of_run(str(asked.run), cells))

    code, output, _ = ended(tmp_path, monkeypatch, run)
    assert code == ExitCode.CELL_NOT_RUN
    assert row_of(output, "fixed_size") == ["3", "2", "0", "0", "1"]
    assert f"NOT RUN {ENVIRONMENT}/fixed_size/default@seed-1001: it has no result" in output


def test_an_alarm_is_told_before_a_cell_that_could_not_be_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"{ENVIRONMENT}/upstream_eager/default@seed-100"
    crashed = Failure(kind="crash", message="no memory")
    eager = good_result(cache=UPSTREAM_EAGER)
    found = {
        f"{name}1": with_figures(eager, {Gate.EQUIVALENCE: 1.5}),
        f"{name}2": eager.model_copy(update={"evidence": {}, "failure": crashed}),
    }
    code, output, _ = ended(tmp_path, monkeypatch, matrix_that_finds(found))
    assert code == ExitCode.FINDINGS
    assert row_of(output, "upstream_eager") == ["3", "1", "0", "1", "1"]
