"""Equivalence on forecasts of one patch: wrong there alone is wrong, and the honest twin passes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.cell.small_trials import TWO_LAYERS, trial_of
from tests.cell.suites.equivalence import wrong_one_patch_bindings as wrong
from tests.cell.suites.equivalence.remembered import remember_eager
from toto_compat.cell.group import GroupResult
from toto_compat.cell.session import Session
from toto_compat.cell.suites.equivalence.candidate import run_candidate
from toto_compat.cell.suites.equivalence.compare import run_compare
from toto_compat.cell.suites.equivalence.determinism import run_determinism
from toto_compat.cell.suites.equivalence.reference import run_reference
from toto_compat.cell.suites.equivalence.scenarios import all_scenarios, drawings_of
from toto_compat.cell.trial import Trial
from toto_compat.contract.request import CacheRequest, CellProfile, Workload
from toto_compat.contract.result import SuiteEvidence
from toto_compat.contract.suites import Suite
from toto_compat.model.backbone import SHAPES

pytestmark = pytest.mark.cell

WORKLOAD = Workload(context=(128, 192), horizon=(8, 1), batches=(1,), sampling=("64/32", "384/48", "32/16"))
PROFILE = CellProfile(iterations=2)


@pytest.fixture(scope="module", autouse=True)
def two_layers() -> Iterator[None]:
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SHAPES, "tiny", TWO_LAYERS)
        remember_eager(patch)
        yield


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("reference")
    run_reference(Session(trial_of("upstream", workload=WORKLOAD), PROFILE, work=work))
    return work


def judged(binding: type[wrong.Honest], work: Path, workload: Workload = WORKLOAD) -> SuiteEvidence:
    source = f"{wrong.__file__}:{binding.__name__}"
    trial = Trial(workload=workload, cache=CacheRequest(name=binding.__name__, source=source))
    session = Session(trial, PROFILE, work=work)
    left = GroupResult(measurements={Suite.EQUIVALENCE: run_candidate(session).model_dump()})
    (work / "candidate.json").write_text(left.model_dump_json(), encoding="utf-8")
    return run_compare(session)


def test_an_honest_binding_passes(reference: Path) -> None:
    figure = judged(wrong.Honest, reference).figures["equivalence"]
    assert figure.value is not None and figure.value <= 1.0, figure.method


@pytest.mark.parametrize(
    ("binding", "told"),
    [
        (wrong.WrongMeanOfOnePatch, "mean_forecast"),
        (wrong.WrongInPartOfAPatch, "mean_forecast, 8 points after context"),
        (wrong.PaddedWronglyInBetween, "after context 5"),
        (wrong.WrongForManySamples, "384 samples in batches of 48"),
    ],
)
def test_wrong_in_forecasts_of_one_patch_alone_is_wrong(
    binding: type[wrong.Honest], told: str, reference: Path
) -> None:
    evidence = judged(binding, reference)
    value = evidence.figures["equivalence"].value
    assert value is not None and value > 1.0
    wrong_ones = [
        f"{one['quantity']}, {one['scenario']}" for one in evidence.details["comparisons"] if one["ratio"] > 1
    ]
    assert any(told in one for one in wrong_ones), wrong_ones


def test_every_context_from_the_shortest_to_the_longest_and_every_batch_of_samples_is_asked_for() -> None:
    trial = trial_of("upstream", workload=WORKLOAD)
    assert {one.context for one in all_scenarios(trial) if one.asked == 8} == {4, 5, 6}
    asked = {(one.samples, one.per_batch) for one in drawings_of(trial, 2) if one.scenario.asked == 8}
    assert asked == {(64, 32), (384, 48), (32, 16)}


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_where_upstream_eager_cannot_draw_means_and_parameters_decide_and_torch_is_quoted(
    precision: str, tmp_path: Path
) -> None:
    under = WORKLOAD.model_copy(update={"autocast": precision})
    why = trial_of("upstream", workload=under).why_upstream_cannot_draw()
    assert "gamma_cpu" in why
    without = under.without_samples
    source = f"{wrong.__file__}:Honest"
    trial = Trial(workload=without, cache=CacheRequest(name="Honest", source=source))
    session = Session(trial, PROFILE, work=tmp_path, no_samples=why)
    run_reference(Session(trial_of("upstream", workload=without), PROFILE, work=tmp_path, no_samples=why))
    left = GroupResult(measurements={Suite.EQUIVALENCE: run_candidate(session).model_dump()})
    (tmp_path / "candidate.json").write_text(left.model_dump_json(), encoding="utf-8")
    figures = run_compare(session).figures
    value = figures["equivalence"].value
    assert value is not None and value <= 1.0, figures["equivalence"]
    assert "gamma_cpu" in figures["equivalence"].method
    assert "gamma_cpu" in figures["mae_sigma"].does_not_apply
    assert run_determinism(session).figures["determinism"].value == 0.0


def test_a_trial_under_autocast_asks_every_model_under_it_but_the_double_precision_one() -> None:
    trial = trial_of("upstream", workload=WORKLOAD.model_copy(update={"autocast": "bfloat16"}))
    series = trial.series(32, 4, 1)
    rounded, exact = trial.eager(), trial.eager(dtype=torch.float64)
    assert rounded.teacher_forced(series, series.truth)[0]["loc"].dtype is torch.bfloat16
    precise = series.to(dtype=torch.float64)
    assert exact.teacher_forced(precise, precise.truth)[0]["loc"].dtype is torch.float64
