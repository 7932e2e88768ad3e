"""A verdict does not depend on who asked upstream eager: given references are as good as the cell's own, to the bit."""

import shutil
from pathlib import Path

import pytest

from tests.cell.suites.equivalence.bindings.honest import Honest
from tests.cell.suites.equivalence.test_wrong_bindings import PROFILE, compared, reference, trial_of_binding, two_layers
from toto_compat.cell.kept import KeptFromTheCandidate
from toto_compat.cell.session import Session
from toto_compat.cell.suites.equivalence import candidate
from toto_compat.cell.suites.equivalence.reference import load_references
from toto_compat.contract.references import REFERENCES_FOLDER, read_references
from toto_compat.contract.suites import Group

__all__ = ["reference", "two_layers"]

pytestmark = pytest.mark.cell


def test_evidence_is_the_same_with_given_references_as_with_own(
    reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidate, "FORECASTS_AN_ITERATION", 0)  # else the number of forecasts is drawn each time
    maker = KeptFromTheCandidate(reference)
    maker.after(Group.REFERENCE)
    maker.hand_over()
    told = maker.references({})
    assert told is not None
    work = tmp_path / "work"
    work.mkdir()
    shutil.move(reference / REFERENCES_FOLDER, work)
    assert read_references(work / REFERENCES_FOLDER, told)
    kept = KeptFromTheCandidate(work)
    kept.take_given(told)
    kept.before(Group.COMPARE)
    trial = trial_of_binding(Honest)
    own, given = (compared(Session(trial, PROFILE, work=folder)) for folder in (reference, work))
    assert given == own
    assert given.figures["equivalence"].value is not None


def test_answers_come_back_in_double_precision_whatever_room_they_took(reference: Path) -> None:
    for one in load_references(reference).values():
        for named in (one.exact, one.eager, *one.nudged):
            assert {str(values.dtype) for values in named.values()} == {"torch.float64"}
