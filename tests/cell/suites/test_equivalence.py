"""Equivalence on the real tiny model: limits that eager itself sets, faults that show, false alarms that do not."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.cell.small_trials import UNLOWERED, WORKLOAD, trial_of
from toto_compat.cell.session import Session
from toto_compat.cell.suites import equivalence
from toto_compat.cell.suites.equivalence import (
    Comparison,
    Errors,
    Reference,
    Scenario,
    compare,
    compare_samples,
    equivalence_figure,
    errors_between,
    numerics,
    quantile_distance,
    quantities,
    reference_on,
    run_determinism,
    run_equivalence,
    scenarios_of,
)
from toto_compat.cell.trial import Trial
from toto_compat.contract.request import CellProfile, Workload
from toto_compat.model.bound import BoundModel

pytestmark = pytest.mark.cell

SCENARIO = Scenario("small", context=4, horizon=3, batch=2, variates=2, groups=2)


def ratio_of(ratio: float) -> Comparison:
    return Comparison(scenario="s", quantity="q", error=ratio, limit=1.0, ratio=ratio)


def test_lengths_and_mixed_shapes_are_all_there_with_eight_decode_steps() -> None:
    scenarios = scenarios_of(Workload())
    assert [scenario.context for scenario in scenarios[:4]] == [16, 32, 48, 64]
    mixes = {(scenario.batch, scenario.variates) for scenario in scenarios[4:]}
    assert len(mixes) == 4
    assert any(scenario.groups > 1 for scenario in scenarios)
    assert all(scenario.horizon >= 9 for scenario in scenarios)


def test_a_control_that_passes_makes_the_figure_missing() -> None:
    figure = equivalence_figure([ratio_of(0.2)], [ratio_of(0.9)])
    assert figure.value is None
    assert "positive control" in figure.missing


def test_the_worst_comparison_is_the_figure() -> None:
    assert equivalence_figure([ratio_of(0.2), ratio_of(0.7)], [ratio_of(50.0)]).value == 0.7


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
def test_a_reference_that_is_not_finite_decides_nothing(monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    monkeypatch.setattr(equivalence, "scenarios_of", lambda _workload: [SCENARIO])
    trial, finite = trial_of("upstream"), Trial.eager
    candidate = trial.eager()
    monkeypatch.setattr(Trial, "eager", lambda *given, **options: Overflowing(finite(*given, **options), value))
    figures = run_equivalence(Session(trial, CellProfile(iterations=2), candidate)).figures
    assert {name: figure.value for name, figure in figures.items()} == dict.fromkeys(
        ("equivalence", "equivalence_control", "mae_sigma", "mae")
    )
    assert figures["equivalence"].missing == "upstream eager is not finite on small; context 4, samples"
    determinism = run_determinism(Session(trial, CellProfile(iterations=1), candidate)).figures["determinism"]
    assert (determinism.value, determinism.missing) == (None, "upstream eager is not finite on context 4")


@pytest.mark.parametrize("part", ["exact", "eager", "nudged"])
def test_every_part_of_a_reference_has_to_be_finite(part: str) -> None:
    fine, broken = {"loc": torch.ones(2)}, {"loc": torch.tensor([1.0, math.inf])}
    series = trial_of("upstream").series(32, 2, 1)
    parts: dict[str, Any] = {"exact": fine, "eager": fine, "nudged": (fine, fine)}
    assert Reference(series, torch.ones(2), **parts).finite
    parts[part] = (fine, broken) if part == "nudged" else broken
    assert not Reference(series, torch.ones(2), **parts).finite


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
    worst = {
        c.quantity: c.ratio for c in compare("small", quantities(broken, reference.series, reference.truth), reference)
    }
    assert all(worst[f"forward.{name}"] > 1.0 for name in ("df", "loc", "scale", "probs"))
    assert all(worst[f"decode.{name}"] > 1.0 for name in ("df", "loc", "scale", "probs"))


def test_a_shifted_random_stream_is_no_false_alarm() -> None:
    """What one flipped draw does to a faithful model: other draws from the same distribution."""
    trial = trial_of("upstream", workload=WORKLOAD.model_copy(update={"samples": 32, "samples_per_batch": 16}))
    eager = trial.eager()

    class Shifted:
        patch_size = eager.patch_size

        def generate_samples(self, *arguments: object, **options: object) -> torch.Tensor:
            torch.rand(1)
            return eager.generate_samples(*arguments, **options)  # type: ignore[arg-type]

    comparison = compare_samples(trial, eager, Shifted())  # type: ignore[arg-type]
    assert 0.0 < comparison.ratio <= 1.0


def test_samples_of_another_distribution_are_seen() -> None:
    trial = trial_of("upstream", workload=WORKLOAD.model_copy(update={"samples": 32, "samples_per_batch": 16}))
    eager = trial.eager()

    class Wider:
        patch_size = eager.patch_size

        def generate_samples(self, *arguments: object, **options: object) -> torch.Tensor:
            samples = eager.generate_samples(*arguments, **options)  # type: ignore[arg-type]
            return samples.mean(dim=-1, keepdim=True) + 3.0 * (samples - samples.mean(dim=-1, keepdim=True))

    assert compare_samples(trial, eager, Wider()).ratio > 1.0  # type: ignore[arg-type]


def test_equal_samples_have_no_distance() -> None:
    samples = torch.randn(2, 1, 5, 16, dtype=torch.float64)
    assert quantile_distance(samples, samples) == 0.0


def test_upstream_unlowered_is_equivalent_and_the_control_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite's shortest scenario; the graphs run as traced, so that only dynamo can be wrong."""
    monkeypatch.setattr(equivalence, "scenarios_of", lambda workload: scenarios_of(workload)[:1])
    workload = WORKLOAD.model_copy(update={"context_patches": (4, 6)})
    trial = replace(trial_of("upstream", workload=workload), settings=UNLOWERED)
    evidence = run_equivalence(Session(trial, CellProfile(iterations=3)))
    figure = evidence.figures["equivalence"]
    assert figure.value is not None
    assert figure.value <= 1.0, figure.method
    control = evidence.figures["equivalence_control"].value
    assert control is not None and control > 1.0
    assert evidence.figures["mae_sigma"].value == 0.0
    assert {"mae", "rmse", "mape", "max"} <= evidence.details["comparisons"][0]["to_eager"].keys()


def test_eager_is_deterministic_on_a_cpu() -> None:
    trial = trial_of("upstream")
    assert run_determinism(Session(trial, CellProfile(iterations=1), trial.eager())).figures["determinism"].value == 0.0


def test_a_forecast_that_depends_on_history_is_not_deterministic() -> None:
    trial = trial_of("upstream")
    eager = trial.eager()
    calls = iter(range(100))

    class Drifting:
        patch_size = eager.patch_size

        def generate_mean(self, *arguments: object) -> torch.Tensor:
            return eager.generate_mean(*arguments) + 1e-3 * next(calls)  # type: ignore[arg-type]

        def generate_samples(self, *arguments: object, **options: object) -> torch.Tensor:
            return eager.generate_samples(*arguments, **options)  # type: ignore[arg-type]

    value = run_determinism(Session(trial, CellProfile(iterations=1), Drifting())).figures["determinism"].value  # type: ignore[arg-type]
    assert value is not None and value > 0.0


def test_the_switches_that_change_rounding_are_recorded() -> None:
    assert {"tf32_matmul", "tf32_cudnn", "sdpa", "float32_matmul_precision"} <= numerics().keys()
