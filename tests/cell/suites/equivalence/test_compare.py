"""The comparison on the real tiny model: limits that eager itself sets, faults that show."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cell.small_trials import trial_of
from toto_compat.cell.session import Session
from toto_compat.cell.suites.equivalence.candidate import drawn_by
from toto_compat.cell.suites.equivalence.compare import (
    ALIKE_ERRORS,
    EAGERS_OWN_BY_LUCK,
    EAGERS_OWN_ERRORS,
    allowed_beside,
    compare,
    compared_under_nan,
    equivalence_figure,
    errors_between,
)
from toto_compat.cell.suites.equivalence.comparison import Comparison, Errors, sizes_of
from toto_compat.cell.suites.equivalence.drawn import judged_draws, places_of
from toto_compat.cell.suites.equivalence.kinds import SIZES
from toto_compat.cell.suites.equivalence.other_weights import OtherWeights
from toto_compat.cell.suites.equivalence.reference import NUDGES, Reference, quantities, reference_on, run_reference
from toto_compat.cell.suites.equivalence.scenarios import (
    Scenario,
    drawing_of_other_weights,
    pair_of,
    scenarios_of,
    series_of,
)
from toto_compat.cell.switches import numerics
from toto_compat.cell.trial import Trial
from toto_compat.contract.request import CellProfile, Workload
from toto_compat.model.bound import BoundModel, WholeModel

pytestmark = pytest.mark.cell

SCENARIO = Scenario("small", context=4, horizon=3, batch=2, variates=2, groups=2)


def ratio_of(ratio: float) -> Comparison:
    return Comparison(scenario="s", quantity="q", error=ratio, limit=1.0, ratio=ratio)


def test_lengths_mixed_shapes_and_rows_of_samples_are_all_there_with_eight_decode_steps() -> None:
    scenarios = [one for one in scenarios_of(Workload(), (1, 2, 16, 128)) if one.kind == "ordinary"]
    assert [scenario.context for scenario in scenarios[:4]] == [16, 32, 48, 64]
    assert {scenario.batch for scenario in scenarios[4:]} == {1, 2, 3, 16, 128}
    assert any(scenario.groups > 1 for scenario in scenarios)
    short = {scenario.name for scenario in scenarios if scenario.horizon < 9}
    assert short == {"horizon 5", "horizon 1"}
    (slots,) = [scenario for scenario in scenarios if scenario.name == "every announced slot"]
    assert (slots.context, slots.horizon, slots.batch) == (64, 12, 2)


def test_two_series_of_one_shape_have_other_values() -> None:
    trial = trial_of("upstream")
    first, second = (series_of(trial, scenario, 32) for scenario in pair_of(trial.workload))
    assert first.inputs.shape == second.inputs.shape
    assert not torch.equal(first.inputs, second.inputs)


def test_a_control_that_passes_makes_the_figure_missing() -> None:
    for controls in ([[ratio_of(0.9)], [ratio_of(9.0)]], [[ratio_of(9.0)], [ratio_of(0.9)]], [[ratio_of(9.0)], []]):
        figure = equivalence_figure([ratio_of(0.2)], controls)
        assert figure.value is None
        assert "positive control" in figure.missing


def test_the_worst_comparison_is_the_figure() -> None:
    assert equivalence_figure([ratio_of(0.2), ratio_of(0.7)], [[ratio_of(50.0)]]).value == 0.7


def test_a_candidate_that_gives_no_answer_is_infinitely_wrong() -> None:
    exact = {"mean_forecast": torch.ones(2)}
    [compared] = compare("s", {}, Reference(torch.ones(2), exact, exact, (exact,)))
    assert compared.ratio == math.inf


def test_errors_that_agree_allow_twice_the_largest_and_those_of_luck_four_times() -> None:
    assert allowed_beside([1.0, 1.1, 1.15]) == pytest.approx(2.3)
    assert allowed_beside([1.0, 1.1, 1.3]) == pytest.approx(5.2)
    assert allowed_beside([0.0, 0.0]) == 0.0


@pytest.mark.parametrize(("roundings", "at_most"), [(1, 1e-3), (2, 5e-5), (5, 5e-5), (50, 0.0)])
def test_chance_hardly_ever_calls_a_right_candidate_wrong(roundings: int, at_most: float) -> None:
    """A right error is one more draw of what eager's six are draws of, however few roundings decide them."""
    runs = 200_000
    generator = torch.Generator().manual_seed(20251030)
    drawn = torch.randn(runs, len(NUDGES) + 2, roundings, generator=generator).square().mean(-1).sqrt()
    candidate, eagers_own = drawn[:, 0], drawn[:, 1:]
    largest, smallest = eagers_own.amax(-1), eagers_own.amin(-1)
    limits = torch.where(largest <= ALIKE_ERRORS * smallest, EAGERS_OWN_ERRORS, EAGERS_OWN_BY_LUCK) * largest
    assert limits[:5].tolist() == pytest.approx([allowed_beside(own.tolist()) for own in eagers_own[:5]])
    assert float((candidate > limits).double().mean()) <= at_most


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ([math.nan, math.nan, math.nan], True),
        ([1.0, 2.0, 3.0], True),  # of zeros under the mask
        ([0.0, 0.0, math.nan], True),  # what eager makes of it without torch's checks
        ([1.0, math.nan, math.nan], True),
        ([0.0, math.nan, math.nan], False),
        ([1.0, 2.0, 4.0], False),
        ([0.0, 0.0, 0.0], False),
    ],
)
def test_of_nan_under_the_mask_a_number_has_to_be_one_of_eagers(answer: list[float], right: bool) -> None:
    exact = {"mean_forecast": torch.tensor([1.0, 2.0, 3.0])}
    nudged = {"mean_forecast": exact["mean_forecast"] + 1e-6}
    unchecked = {"mean_forecast": torch.tensor([0.0, 0.0, math.nan])}
    reference = Reference(torch.ones(3), exact, exact, (nudged,), unchecked)
    compared = compared_under_nan("s", "mean_forecast", torch.tensor(answer), reference)
    assert (compared.ratio <= 1.0) is right


class Overflowing:
    """Upstream eager, but with one value of every forecast and sample set to what is not finite."""

    def __init__(self, eager: BoundModel, value: float) -> None:
        self.patch_size = eager.patch_size
        self._eager = eager
        self._value = value

    def _spoilt(self, values: torch.Tensor) -> torch.Tensor:
        values = values.contiguous()
        values.view(-1)[0] = self._value
        return values

    def teacher_forced(self, *arguments: object) -> object:
        return self._eager.teacher_forced(*arguments)  # type: ignore[arg-type]

    def generate_mean(self, *arguments: object) -> torch.Tensor:
        return self._spoilt(self._eager.generate_mean(*arguments))  # type: ignore[arg-type]

    def generate_samples(self, *arguments: object, **options: object) -> torch.Tensor:
        return self._spoilt(self._eager.generate_samples(*arguments, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_reference_that_is_not_finite_is_no_reference(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: float
) -> None:
    trial, finite = trial_of("upstream"), Trial.eager
    monkeypatch.setattr(Trial, "eager", lambda *given, **options: Overflowing(finite(*given, **options), value))
    made = run_reference(Session(trial, CellProfile(iterations=2), work=tmp_path))
    assert made.scenarios == ()
    assert "context 4" in made.not_finite
    figure = equivalence_figure([], [], made.not_finite)
    assert figure.value is None
    assert figure.missing.startswith("upstream eager is not finite on context 4")


@pytest.mark.parametrize("part", ["exact", "eager", "nudged"])
def test_every_part_of_a_reference_has_to_be_finite(part: str) -> None:
    fine, broken = {"loc": torch.ones(2)}, {"loc": torch.tensor([1.0, math.inf])}
    parts: dict[str, Any] = {"exact": fine, "eager": fine, "nudged": (fine, fine)}
    assert Reference(torch.ones(2), **parts).finite
    parts[part] = (fine, broken) if part == "nudged" else broken
    assert not Reference(torch.ones(2), **parts).finite


def test_not_a_number_is_infinitely_wrong() -> None:
    trial = trial_of("upstream")
    reference = reference_on(trial, trial.eager(), trial.eager(dtype=torch.float64), SCENARIO)
    broken = {name: value.clone() for name, value in reference.eager.items()}
    broken["decode.loc"].view(-1)[3] = math.nan
    ratios = {c.quantity: c.ratio for c in compare("small", broken, reference)}
    assert ratios["decode.loc"] == math.inf
    assert ratios["forward.loc"] <= 1.0


def test_another_shape_is_infinitely_wrong() -> None:
    assert errors_between(torch.zeros(2, 3), torch.zeros(3, 2)).max == math.inf


@pytest.mark.parametrize("name", ["mean_forecast", "forecast().mean"])
def test_a_small_variate_beside_a_large_one_counts_as_much(name: str) -> None:
    exact = {name: torch.tensor([[[1.0, 2.0], [1e7, 2e7], [0.0, 0.0]]], dtype=torch.float64)}
    nudged = {name: exact[name] * (1 + 1e-6)}
    reference = Reference(torch.ones(1), exact, nudged, (nudged,))
    for factor, right in ((1 + 1.9e-6, True), (1.1, False)):
        for variate in (0, 1):
            answer = {name: exact[name].clone()}
            answer[name][:, variate] *= factor
            [compared] = compare("s", answer, reference)
            assert (compared.ratio <= 1.0) is right


def test_parameters_are_those_of_scaled_values_whatever_the_size_of_a_variate() -> None:
    """They need not be divided by anything: a variate of 1e7 has parameters as large as one of 1."""
    trial = trial_of("upstream")
    (scenario,) = [one for one in scenarios_of(trial.workload) if one.kind == SIZES]
    eager = trial.eager()
    asked = scenario, replace(scenario, kind="ordinary")
    found = [series_of(trial, one, eager.patch_size) for one in asked]
    [one], [ordinary] = (eager.teacher_forced(series, series.truth[..., :32]) for series in found)
    assert float(found[0].inputs.abs().max()) > 1e6 * float(found[1].inputs.abs().max())
    for name in ("df", "loc", "scale"):
        assert 0.5 < float(sizes_of(one[name]).mean() / sizes_of(ordinary[name]).mean()) < 2.0


def test_errors_are_what_they_are_called() -> None:
    found = errors_between(torch.tensor([1.0, 4.0]), torch.tensor([2.0, 2.0]))
    assert found == Errors(mae=1.5, rmse=found.rmse, mape=0.75, max=2.0)
    assert found.rmse == pytest.approx(math.sqrt(2.5))


def test_parameters_of_the_transformer_are_compared_and_not_the_scaler() -> None:
    """A model whose last layer is off must show in every parameter: the scaler's outputs would not move."""
    trial = trial_of("upstream")
    eager = trial.eager()
    reference = reference_on(trial, eager, trial.eager(dtype=torch.float64), SCENARIO)
    broken = trial.eager()
    with torch.no_grad():
        broken.model.unembed.weight.mul_(1.001)  # type: ignore[attr-defined]
    series = series_of(trial, SCENARIO, eager.patch_size)
    worst = {
        c.quantity: c.ratio for c in compare("small", quantities(broken, SCENARIO, series, reference.truth), reference)
    }
    assert all(worst[f"forward.{name}"] > 1.0 for name in ("df", "loc", "scale", "probs"))
    assert all(worst[f"decode.{name}"] > 1.0 for name in ("df", "loc", "scale", "probs"))


def test_the_switches_that_change_rounding_are_recorded() -> None:
    assert {"tf32_matmul", "tf32_cudnn", "sdpa_flash", "float32_matmul_precision"} <= numerics().keys()


def test_samples_tell_a_model_from_the_one_of_other_weights() -> None:
    """Of the real tiny model: the second one's draws are right by its own weights and wrong by the first one's."""
    torch.set_num_threads(1)
    trial = trial_of("upstream", workload=Workload(context=(256, 512), horizon=(192, 96), sampling=("16/1",)))
    (drawing,) = drawing_of_other_weights(trial)
    first, other = trial.eager(), OtherWeights.of_trial(trial).eager()
    assert isinstance(first, WholeModel) and isinstance(other, WholeModel)
    drawn = drawn_by(other, trial, drawing, seed=drawing.first_seed)
    for eager, right in ((other, True), (first, False)):
        below = places_of(trial, drawing, eager, drawn)
        worst = max(one.ratio for one in judged_draws(drawing, eager.patch_size, below, drawings=25))
        assert (worst <= 1.0) is right


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_weights_are_others_and_the_same_in_every_precision(dtype: torch.dtype) -> None:
    trial = trial_of("upstream")
    of_trial, single = (one.eager().model for one in (trial, OtherWeights.of_trial(trial)))  # type: ignore[attr-defined]
    model = OtherWeights.of_trial(trial).eager(dtype=dtype).model  # type: ignore[attr-defined]
    for own, expected, found in zip(*(one.parameters() for one in (of_trial, single, model)), strict=True):
        assert torch.equal(expected.to(dtype), found)
        assert found.numel() == 1 or not torch.equal(own.to(dtype), found)
