"""Samples that are a few hundredths off are seen, by how many are drawn; right ones raise no alarm."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.cell.small_trials import TWO_LAYERS
from tests.cell.suites.equivalence.bindings import nearly_right, samples
from tests.cell.suites.equivalence.bindings.honest import Honest
from tests.cell.suites.equivalence.remembered import remember_eager
from tests.cell.suites.equivalence.test_wrong_bindings import PROFILE, trial_of_binding
from toto_compat.cell.session import Session
from toto_compat.cell.suites.equivalence.candidate import CandidateAsked, draw_samples, samples_file
from toto_compat.cell.suites.equivalence.comparison import Comparison
from toto_compat.cell.suites.equivalence.drawn import compare_samples, eagers_own
from toto_compat.cell.suites.equivalence.exchange import save_tensors
from toto_compat.cell.suites.equivalence.scenarios import drawings_of
from toto_compat.contract.result import Figure
from toto_compat.model.backbone import SHAPES
from toto_compat.model.bound import WholeModel

pytestmark = pytest.mark.cell


@pytest.fixture(scope="module", autouse=True)
def two_layers() -> Iterator[None]:
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SHAPES, "tiny", TWO_LAYERS)
        remember_eager(patch)
        yield


def judged(binding: type[Honest], work: Path) -> tuple[list[Comparison], list[Comparison], dict[str, Figure]]:
    session = Session(trial_of_binding(binding), PROFILE, work=work)
    drawings = drawings_of(session.trial, PROFILE.iterations)
    save_tensors(samples_file(work), draw_samples(session.trial, session.candidate, drawings))
    eager = session.trial.eager()
    assert isinstance(eager, WholeModel)
    own = eagers_own(session.trial, drawings[0], eager)
    asked = CandidateAsked(draws=session.candidate.draws)
    return compare_samples(session, eager, asked, drawings, own_of_the_first=own)


@pytest.mark.parametrize(
    ("binding", "seen_by"),
    [
        (nearly_right.DrawsTwoPercentTooClose, "all samples samples: spread"),
        (nearly_right.ScalesALittleTooSmall, "many samples of three patches samples: spread of a patch"),
        (nearly_right.ShiftsALittle, "all samples samples: location"),
        (nearly_right.ShiftsToAndFro, "many samples of a patch samples: locations of points"),
        (nearly_right.TailsALittleTooLight, "all samples samples: spread"),
        (nearly_right.FavoursTheLikeliest, "samples: locations of points"),
        (samples.CutsTheTails, "samples: farthest points"),
        (samples.SharesTheDistributionOut, "samples: locations of points"),
        (nearly_right.OneRowOfABatchTooClose, "many samples of a patch samples: spreads of a batch's rows"),
    ],
)
def test_a_fault_of_a_few_hundredths_is_seen(tmp_path: Path, binding: type[Honest], seen_by: str) -> None:
    compared, _, _ = judged(binding, tmp_path)
    red = [f"{one.scenario} {one.quantity}" for one in compared if one.ratio > 1.0]
    assert any(seen_by in where for where in red), sorted(
        (round(one.ratio, 2), one.scenario, one.quantity, one.told) for one in compared
    )[-8:]


def test_right_draws_of_ones_own_raise_no_alarm_and_what_would_is_told(tmp_path: Path) -> None:
    compared, control, seen = judged(nearly_right.DrawsByParameters, tmp_path)
    assert max(one.ratio for one in compared) <= 1.0
    assert max(one.ratio for one in control) > 1.0
    spread = seen["samples_spread_seen"].value
    assert spread is not None and spread < 0.02
