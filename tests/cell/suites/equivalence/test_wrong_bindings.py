"""Wrong bindings are seen, by what is wrong with them; honest ones raise no alarm."""

import inspect
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.cell.small_trials import TWO_LAYERS, UNLOWERED, trial_of
from tests.cell.suites.equivalence.bindings import announced, callers, entry, histories, kinds, samples, two_models
from tests.cell.suites.equivalence.bindings.honest import Honest
from tests.cell.suites.equivalence.remembered import remember_eager
from toto_compat.cell.group import GroupResult
from toto_compat.cell.session import Session
from toto_compat.cell.suites.equivalence import candidate, scenarios
from toto_compat.cell.suites.equivalence.candidate import run_candidate
from toto_compat.cell.suites.equivalence.compare import run_compare
from toto_compat.cell.suites.equivalence.determinism import run_determinism
from toto_compat.cell.suites.equivalence.reference import run_reference
from toto_compat.cell.suites.equivalence.scenarios import all_scenarios
from toto_compat.cell.trial import CandidateError, Trial
from toto_compat.contract.request import CacheRequest, CellProfile, Workload
from toto_compat.contract.result import SuiteEvidence
from toto_compat.contract.suites import Suite
from toto_compat.model.backbone import SHAPES

pytestmark = pytest.mark.cell

WORKLOAD = Workload(context=(128, 192), horizon=(128,), batches=(1, 2), sampling=("32/16",), missing=0.05)
PROFILE = CellProfile(iterations=2)
OF_NAN = {"nan under the mask", "nan under the mask, as announced"}


@pytest.fixture(scope="module", autouse=True)
def two_layers() -> Iterator[None]:
    """A right or wrong binding shows on two layers as on twelve, in a sixth of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SHAPES, "tiny", TWO_LAYERS)
        patch.setattr(scenarios, "MANY_ROWS", 256)  # of nearly right samples there is a test of their own
        patch.setattr(candidate, "FEWEST_FORECASTS", 100)
        patch.setattr(candidate, "FORECASTS_AN_ITERATION", 10)
        # as in a process where nothing was compiled before: dynamo switches the distributions' own checks off
        patch.setattr(torch.distributions.Distribution, "_validate_args", True)
        remember_eager(patch)
        yield


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    work = tmp_path_factory.mktemp("reference")
    run_reference(Session(trial_of("upstream", workload=WORKLOAD), PROFILE, work=work))
    return work


@dataclass(frozen=True)
class Judged:
    """A binding's evidence, and the folder that its processes would share."""

    evidence: SuiteEvidence
    session: Session


Judge = Callable[[type[Honest]], Judged]


def trial_of_binding(binding: type[Honest]) -> Trial:
    """As a user's file: it is imported anew and binds itself."""
    source = f"{inspect.getfile(binding)}:{binding.__name__}"
    return Trial(workload=WORKLOAD, cache=CacheRequest(name=binding.__name__, source=source))


def compared(session: Session) -> SuiteEvidence:
    asked = run_candidate(session)
    left = GroupResult(measurements={Suite.EQUIVALENCE: asked.model_dump()})
    (session.work / "candidate.json").write_text(left.model_dump_json(), encoding="utf-8")
    return run_compare(session)


@pytest.fixture(scope="module")
def judge(reference: Path, tmp_path_factory: pytest.TempPathFactory) -> Judge:
    """Put a binding on trial, each one once."""

    known: dict[type[Honest], Judged] = {}

    def judged(binding: type[Honest]) -> Judged:
        if binding in known:
            return known[binding]
        work = tmp_path_factory.mktemp(binding.__name__)
        shutil.copytree(reference, work, dirs_exist_ok=True)
        session = Session(trial_of_binding(binding), PROFILE, work=work)
        return known.setdefault(binding, Judged(compared(session), session))

    return judged


def worst(evidence: SuiteEvidence) -> tuple[float, str]:
    figure = evidence.figures["equivalence"]
    assert figure.value is not None, figure.missing
    return figure.value, figure.method


def red_in(evidence: SuiteEvidence) -> list[str]:
    return [f"{one['scenario']} {one['quantity']}" for one in evidence.details["comparisons"] if one["ratio"] > 1.0]


@pytest.mark.parametrize(
    "binding",
    [
        Honest,
        entry.WithAForecaster,
        histories.RefusesAThread,
        announced.RefusesWhatIsLonger,
        kinds.FillsGapsWithZeros,
        kinds.AnswersGapsWithNan,
        kinds.AnswersNanAsEagerUnchecked,
        kinds.AnswersNanWithNan,
        samples.DrawsOtherwise,
        samples.DrawsItself,
    ],
)
def test_an_honest_binding_is_equivalent(judge: Judge, binding: type[Honest]) -> None:
    value, method = worst(judge(binding).evidence)
    assert value <= 1.0, method


@pytest.mark.parametrize(
    ("binding", "seen_in"),
    [
        (announced.WrongOnceAnnounced, "context 4 mean_forecast"),
        (announced.WrongUnlessAnnounced, "mean_forecast_told_nothing"),
        (announced.CutsALongContext, "context past the announced"),
        (announced.WrapsALongHorizon, "horizon past the announced"),
        (announced.WrongOnMoreThreads, "on one thread more"),
        (announced.WrongAtTheRowsOfSamples, "batch 16, 1 variates in 1 decode.df"),
        (announced.WrongInAForecastOfOnePatch, "horizon 1 mean_forecast"),
        (announced.WrongWithinAPatch, "again_half_a_patch_less"),
        (announced.SwapsRowsAfterALongContext, "every announced slot mean_forecast"),
        (samples.SamplesOneValueAfterALongContext, "samples after the longest context"),
        (samples.SamplesOneSeriesPastAFewPatches, "samples of 2 series"),
        (kinds.OddSeriesWrongWhereAnnounced, "one spike, as announced"),
        (kinds.OddSeriesWrongWhereAnnounced, "left padded, as announced"),
        (histories.AnswersByShape, "another series"),
        (histories.RemembersTheLast, "again"),
        (histories.SpoiltByAnException, "again_after_an_exception"),
        (histories.SpoiltByABreak, "again_after_a_break"),
        (histories.WrongAfterSixtyForecasts, "again_after_many_forecasts"),
        (histories.WrongNowAndThen, "many_forecasts"),
        (histories.WrongAfterSampling, "again_after_samples"),
        (histories.WrongAfterAnHour, "again_another_day"),
        (histories.RightInContinuousIntegration, "again_another_day"),
        (histories.WrongInAThread, "again_in_a_thread"),
        (callers.ReusesItsMean, "held_while_another_was_forecast"),
        (callers.ReusesItsSamples, "samples: held"),
        (callers.KnowsASeriesByItsTensor, "another series again_in_the_tensors_of_another"),
        (callers.NotForTwoAtOnce, "two_at_once"),
        (callers.RemembersWhatItWasFed, "context 4 mean_forecast"),
        (callers.DrawsTheSameWithoutASeed, "samples: without a seed"),
        (kinds.SamplesOddSeriesWrong, "samples, large samples"),
        (entry.ForecastsByOneStepLess, "forecast().mean"),
        (entry.TakesTheMedianForTheMean, "forecast() samples: mean"),
        (entry.RepeatsSamplesByDefault, "forecast() samples: rows and rounds"),
        (samples.DrawsTooClose, "samples: spread"),
        (samples.DrawsALittleTooClose, "samples: spread"),
        (samples.DrawsTheLastPatchTooClose, "samples: spread of a patch"),
        (samples.DrawsAVariateTooClose, "samples: spread of a series and variate"),
        (samples.DrawsNormally, "samples: uniform"),
        (samples.CopiesARound, "samples: rows and rounds"),
        (samples.DrawsTheSameAgain, "samples: rows and rounds"),
        (samples.SwapsSeries, "samples of 2 series samples: uniform"),
        (samples.SwapsVariates, "3 variates in 2 samples: uniform"),
        (samples.SamplesOfTheFirstSeries, "another series samples"),
        (samples.RightInTheFirstPatch, "samples: location of a patch"),
        (samples.OneNoiseForARow, "samples: neighbouring points"),
        (samples.OneNoiseForAllPatches, "samples: patches"),
        (samples.OneNoiseForAllVariates, "samples: variates"),
        (samples.SamplesTheMean, "samples"),
        (samples.ClaimsTotosDraws, "samples: seed for seed"),
    ],
)
def test_a_wrong_binding_is_seen_where_it_is_wrong(judge: Judge, binding: type[Honest], seen_in: str) -> None:
    evidence = judge(binding).evidence
    value, _ = worst(evidence)
    assert value > 1.0
    assert any(seen_in in where for where in red_in(evidence)), red_in(evidence)


@pytest.mark.parametrize(
    ("binding", "only"),
    [
        (kinds.GroupsOfTheFirstRow, "rows with groups of their own"),
        (kinds.TwoGroupsAtMost, "rows with groups of their own"),
        (kinds.GroupsLieTogether, "rows with groups of their own"),
        (kinds.TakesPaddingForValues, ("left padded", "gaps")),
        (kinds.NewestValueIsThere, "gaps"),
        (kinds.EmptyPatchesOnlyBefore, "gaps"),
        (kinds.ReadsMasksAsTheyLie, "not contiguous"),
        (kinds.FloorsTheScale, "constant"),
        (kinds.CutsLargeValues, ("large", "level", "of many sizes")),
        (kinds.LosesSmallValues, "small"),
        (kinds.CutsASpike, "one spike"),
        (kinds.ReadsMemoryAsItLies, "not contiguous"),
        (kinds.FillsGapsWithTheMean, ("nan under the mask", "one NaN, not masked")),
        (two_models.KeepsModelsByShape, ("other weights mean_forecast", "samples of other weights")),
        (two_models.SamplesByTheFirstModel, "samples of other weights"),
        (two_models.MeansByTheNewestModel, "context 4 again_beside_another_model"),
        (two_models.SamplesWrongBeforeAMean, "samples of other weights"),
        (kinds.TakesNanForZero, ("nothing but NaN, not masked mean", "one NaN, not masked mean")),
        (kinds.BridgesANan, "one NaN, not masked mean"),
        (kinds.SamplesNanAsZero, ("nothing but NaN, not masked samples", "one NaN, not masked samples")),
        (kinds.SmallBesideLargeIsWrong, "of many sizes"),
        (kinds.SmallRowBesideALargeOneIsWrong, "of many sizes"),
    ],
)
def test_a_series_of_a_kind_is_the_only_place_where_it_is_seen(
    judge: Judge, binding: type[Honest], only: str | tuple[str, ...]
) -> None:
    red = red_in(judge(binding).evidence)
    assert red
    assert all(where.startswith(only) for where in red), red


@pytest.mark.parametrize(
    ("binding", "seen_by"),
    [
        (samples.OneDistanceForTwoRows, "rows and rounds, either side"),
        (samples.OneDistanceForNeighbours, "neighbouring points, either side"),
    ],
)
def test_what_draws_share_but_for_the_sign_is_seen_by_nothing_else(
    judge: Judge, binding: type[Honest], seen_by: str
) -> None:
    red = red_in(judge(binding).evidence)
    assert any(where.endswith(seen_by) for where in red)
    assert all(where.endswith("either side") for where in red), red


@pytest.mark.parametrize(
    ("binding", "said"),
    [
        (callers.SeedsInTheMean, "changed the random state"),
        (callers.ScalesTheCallersSeries, "wrote to the series that it was given: inputs"),
        (callers.ScalesTheCallersSeriesWhenSampling, "wrote to the series that it was given: inputs, padding_mask"),
    ],
)
def test_a_binding_that_changes_what_is_the_callers_is_to_blame(judge: Judge, binding: type[Honest], said: str) -> None:
    with pytest.raises(CandidateError, match=said):
        judge(binding)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("cache", ["upstream", "fixed_size"])
def test_a_right_cache_raises_no_alarm_whatever_the_seed(tmp_path: Path, cache: str, seed: int) -> None:
    """Upstream eager against itself, and the static model, traced and not lowered."""
    torch._dynamo.reset()
    trial = trial_of(cache, settings=UNLOWERED, workload=WORKLOAD.model_copy(update={"seed": seed}))
    session = Session(trial, PROFILE, trial.eager() if cache == "upstream" else None, work=tmp_path)
    run_reference(session)
    evidence = compared(session)
    value, method = worst(evidence)
    assert value <= 1.0, method
    assert run_determinism(session).figures["determinism"].value == 0.0
    assert set(evidence.details["refused"]) <= OF_NAN  # the static model grows with what it is asked


def test_what_was_refused_is_told(judge: Judge) -> None:
    of_nan = judge(Honest).evidence.details["nan_refused"]
    assert of_nan.keys() == {
        f"{which} NaN, not masked, {what}" for which in ("nothing but", "one") for what in ("mean", "samples")
    }
    assert "from the thread that made me" in judge(histories.RefusesAThread).evidence.details["thread_refused"]
    refused = judge(announced.RefusesWhatIsLonger).evidence.details["refused"]
    assert "more than the 10 announced" in refused["context past the announced"]
    assert "more than the 10 announced" in refused["horizon past the announced"]


def test_what_was_announced_may_not_be_refused(judge: Judge) -> None:
    with pytest.raises(CandidateError, match="too long for me"):
        judge(announced.RefusesTheWorkload)


def test_a_binding_without_a_forecaster_is_told(judge: Judge) -> None:
    assert "no forecaster" in judge(Honest).evidence.details["forecast_entry_point"]
    assert judge(entry.WithAForecaster).evidence.details["forecast_entry_point"] == "tried"


def test_the_threads_are_as_many_afterwards(judge: Judge) -> None:
    judge(Honest)
    assert torch.get_num_threads() == 1


def test_everything_has_a_reference_and_is_compared(judge: Judge) -> None:
    evidence = judge(entry.WithAForecaster).evidence
    assert evidence.details["without_a_reference"] == []
    tried = {one["scenario"] for one in evidence.details["comparisons"]}
    # eager raises on NaN under the mask: nothing is left to compare
    assert {scenario.name for scenario in all_scenarios(trial_of_binding(Honest))} - tried == OF_NAN
    assert "nan under the mask" in evidence.details["refused"]


def test_both_controls_are_seen(judge: Judge) -> None:
    figures = judge(Honest).evidence.figures
    for name in ("equivalence_control", "samples_control"):
        control = figures[name].value
        assert control is not None and control > 1.0


def test_eager_is_deterministic_and_a_forecast_with_a_memory_is_not(judge: Judge) -> None:
    for binding, exact in ((Honest, True), (histories.RemembersTheLast, False)):
        value = run_determinism(judge(binding).session).figures["determinism"].value
        assert value is not None
        assert (value == 0.0) is exact


def test_the_users_own_criteria_are_figures(judge: Judge) -> None:
    figures = judge(Honest).evidence.figures
    assert (figures["mae_delta"].value, figures["mae_to_eager"].value, figures["mae_sigma"].value) == (0.0, 0.0, 0.0)
    spoilt = judge(histories.AnswersByShape).evidence.figures
    assert spoilt["mae"].value is not None
