"""The campaign of false alarms: what it runs, how it counts, and that it goes on where it was broken off."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.verdict.sample_cells import good_result, with_figures
from tests.verdict.stored_runs import judged_run
from toto_compat import false_alarms
from toto_compat.contract.result import Figure
from toto_compat.errors import SelectionError
from toto_compat.false_alarms import CANDIDATES, UPSTREAM_EAGER, matrix_of, table, take_runs, tallies
from toto_compat.matrix.asked import Asked
from toto_compat.matrix.gates import Gate
from toto_compat.matrix.load import load_matrix

ROOT = Path(__file__).parent.parent
DOCUMENT: dict[str, Any] = yaml.safe_load((ROOT / "matrix.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("candidate", CANDIDATES)
def test_each_run_has_a_matrix_with_its_own_seed(tmp_path: Path, candidate: str) -> None:
    (tmp_path / "upstream_eager.py").write_text(false_alarms.EAGER_FILE, encoding="utf-8")
    file = tmp_path / "matrix.yaml"
    file.write_text(yaml.safe_dump(matrix_of(DOCUMENT, candidate, 7)), encoding="utf-8")
    matrix = load_matrix(file)
    assert candidate in matrix.caches
    assert {workload.seed for workload in matrix.workloads.values()} == {7}
    lowered = Gate.COMPILE_ACTIVE in matrix.gates and matrix.gates[Gate.COMPILE_ACTIVE].min == 0.0
    assert lowered is (candidate == UPSTREAM_EAGER)


def test_a_matrix_without_the_profile_is_told() -> None:
    with pytest.raises(SelectionError, match="smoke"):
        matrix_of({**DOCUMENT, "profiles": {}}, "fixed_size", 1)


def test_failures_are_alarms_and_what_is_missing_is_undecided_with_its_reason() -> None:
    good = good_result()
    wrong = with_figures(good, {Gate.EQUIVALENCE: 1.5})
    missing = with_figures(good, {Gate.EQUIVALENCE: Figure(value=None, missing="the machine was busy")})
    cells = [cell for result in (good, wrong, missing) for cell in judged_run(result).cells]
    told = tallies(cells)["fixed_size", Gate.EQUIVALENCE]
    assert (told.runs, len(told.alarms), told.worst) == (3, 1, 1.5)
    assert ["the machine was busy" in why for why in told.undecided] == [True]
    shown = table(tallies(cells))
    assert "equivalence" in shown
    assert "1x" in shown


def test_a_lower_limit_is_a_ratio_the_other_way_round() -> None:
    (cell,) = judged_run(with_figures(good_result(), {Gate.COMPILE_ACTIVE: 0.9})).cells
    assert tallies([cell])["fixed_size", Gate.COMPILE_ACTIVE].worst == pytest.approx(0.8 / 0.9)


def test_runs_that_have_a_result_are_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished = {"fixed_size-1"}
    asked: list[str | None] = []

    def run(this: Asked) -> None:
        asked.append(this.run)
        finished.add(str(this.run))

    monkeypatch.setattr(false_alarms, "is_finished", lambda folder: folder.name in finished)
    monkeypatch.setattr(false_alarms, "load_run", lambda folder: folder)
    monkeypatch.setattr(false_alarms, "judge_run", lambda _run: judged_run(good_result()))
    cells = take_runs(DOCUMENT, "torch-2.13.0-cpu", (1, 2), tmp_path, run)
    assert asked == ["upstream_eager-1", "upstream_eager-2", "fixed_size-2"]
    assert len(cells) == 4
