"""Equivalence and determinism: does the compiled cell forecast what upstream eager forecasts?

Every comparison has its own limit, measured in the same process: upstream eager's distance to a float64 reference, and
how far eager moves when its inputs move by one unit in the last place. The figure is the worst error over its limit.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from toto_compat.cell.session import Session
from toto_compat.cell.trial import Trial, blaming_the_candidate
from toto_compat.contract.request import CacheRequest, Workload
from toto_compat.contract.result import Figure, Kind, Outcome, SuiteEvidence
from toto_compat.contract.statistics import null_limit, ratio_to_limit, relative_spread
from toto_compat.contract.suites import Suite
from toto_compat.model.bound import BoundModel
from toto_compat.model.series import Series

METHOD = (
    "distribution parameters under teacher forcing (upstream eager's own forecast fed to all), the free-running mean "
    "forecast, and quantiles of samples against a null of perturbed eager; RMSE to a float64 upstream-eager reference "
    "over max(2x eager's own error, error of eager with inputs moved by one ulp); worst ratio; NaN is infinite"
)
CONTROL = CacheRequest(name="sabotaged:position_off_by_one", source="builtin")
# Another seed each: a null of one draw would be as good as luck.
NUDGES = (0, 1, 2)
QUANTILES = (0.1, 0.5, 0.9)
NULL_RUNS = 5


@dataclass(frozen=True)
class Scenario:
    """One shape that is forecast. Lengths in patches."""

    name: str
    context: int
    horizon: int
    batch: int
    variates: int
    groups: int


@dataclass(frozen=True)
class Errors:
    mae: float
    rmse: float
    mape: float
    max: float


@dataclass(frozen=True)
class Comparison:
    """One thing compared. `ratio` above 1 means that the candidate is worse than eager's own noise allows."""

    scenario: str
    quantity: str
    error: float
    limit: float
    ratio: float
    to_eager: Errors | None = None
    elements: int = 0


def scenarios_of(workload: Workload) -> tuple[Scenario, ...]:
    """Every context length at the workload's own shape, then four mixes of batch, variates and id groups.

    The mixes are short, and in an order in which one size changes at a time: the compiler makes it dynamic then, and
    the shapes after it cost no compilation.
    """
    horizon = max(9, workload.horizon_patches[0])  # a prefill and at least eight decode steps
    lengths = [
        Scenario(f"context {context}", context, horizon, workload.batch, workload.variates, workload.groups)
        for context in workload.context_patches
    ]
    shortest = workload.context_patches[0]
    mixes = [
        Scenario(f"batch {batch}, {variates} variates in {groups}", shortest, horizon, batch, variates, groups)
        for batch, variates, groups in ((3, 1, 1), (3, 3, 2), (2, 3, 1), (2, 1, 1))
    ]
    return (*lengths, *mixes)


@dataclass(frozen=True)
class Reference:
    """Upstream eager on one scenario: its float64 truth, its own forecast, and itself on nudged inputs."""

    series: Series
    truth: Tensor  # eager's own mean forecast: the values fed to everybody under teacher forcing
    exact: Mapping[str, Tensor]
    eager: Mapping[str, Tensor]
    nudged: tuple[Mapping[str, Tensor], ...]

    @property
    def finite(self) -> bool:
        """Tell whether there is something to compare with: a limit that is not finite would decide by itself."""
        return all(
            bool(tensor.isfinite().all())
            for tensors in (self.exact, self.eager, *self.nudged)
            for tensor in tensors.values()
        )


def quantities(model: BoundModel, series: Series, truth: Tensor) -> dict[str, Tensor]:
    """All that is compared on one scenario: parameters of the first forward and of the decode steps, the forecast."""
    steps = model.teacher_forced(series, truth)
    compared: dict[str, Tensor] = {}
    for name in steps[0]:
        compared[f"forward.{name}"] = steps[0][name].double()
        if len(steps) > 1:
            compared[f"decode.{name}"] = torch.stack([step[name] for step in steps[1:]]).double()
    compared["mean_forecast"] = model.generate_mean(series, truth.shape[-1]).double()
    return compared


class NotFiniteError(Exception):
    """Upstream eager itself is not finite there: no fault of the candidate, and nothing to compare it with."""


def reference_on(trial: Trial, eager: BoundModel, exact: BoundModel, scenario: Scenario) -> Reference:
    shape = {"batch": scenario.batch, "variates": scenario.variates, "groups": scenario.groups}
    series = trial.series(eager.patch_size, scenario.context, scenario.horizon, **shape)
    exact_series = series.to(dtype=torch.float64)
    truth = eager.generate_mean(series, scenario.horizon * eager.patch_size)
    if not truth.isfinite().all():  # fed back, it would make torch's distributions raise
        raise NotFiniteError(scenario.name)
    reference = Reference(
        series=series,
        truth=truth,
        exact=quantities(exact, exact_series, truth.double()),
        eager=quantities(eager, series, truth),
        nudged=tuple(quantities(eager, series.nudged(1, seed=seed), truth) for seed in NUDGES),
    )
    if not reference.finite:
        raise NotFiniteError(scenario.name)
    return reference


def compare(scenario: str, candidate: Mapping[str, Tensor], reference: Reference) -> list[Comparison]:
    """Each quantity's error to the float64 reference over what eager's own noise allows."""
    return [_compared(scenario, name, candidate[name], reference) for name in reference.exact]


def _compared(scenario: str, name: str, candidate: Tensor, reference: Reference) -> Comparison:
    exact = reference.exact[name]

    def distance(other: Tensor) -> float:
        # RMSE: the largest of thousands of rounding errors swings by itself, and a wrong value shows here all the same
        return errors_between(other, exact).rmse

    error = distance(candidate)
    limit = max(2.0 * distance(reference.eager[name]), *(distance(nudged[name]) for nudged in reference.nudged))
    return Comparison(
        scenario=scenario,
        quantity=name,
        error=error,
        limit=limit,
        ratio=ratio_to_limit(error, limit),
        to_eager=errors_between(candidate, reference.eager[name]),
        elements=exact.numel(),
    )


def errors_between(values: Tensor, reference: Tensor) -> Errors:
    """Not a number anywhere is not a number everywhere, and counts as infinite later."""
    if values.shape != reference.shape:
        return Errors(math.inf, math.inf, math.inf, math.inf)
    difference = (values.double() - reference.double()).abs()
    magnitude = reference.double().abs().clamp_min(torch.finfo(torch.float32).tiny)
    return Errors(
        mae=float(difference.mean()),
        rmse=float(difference.square().mean().sqrt()),
        mape=float((difference / magnitude).mean()),
        max=float(difference.max()),
    )


def sampled(model: BoundModel, series: Series, trial: Trial, *, seed: int) -> Tensor:
    """Samples of the first horizon, shape batch, variate, time, samples; one seed gives one stream of draws."""
    torch.manual_seed(seed)
    steps = trial.workload.horizon_patches[0] * model.patch_size
    return model.generate_samples(
        series, steps, num_samples=trial.workload.samples, samples_per_batch=trial.workload.samples_per_batch
    ).double()


def quantile_distance(samples: Tensor, others: Tensor) -> float:
    """Mean distance of the quantiles in units of the samples' own spread."""
    at = torch.tensor(QUANTILES, dtype=torch.float64, device=samples.device)
    spread = others.std(dim=-1).mean().clamp_min(torch.finfo(torch.float64).tiny)
    return float((samples.quantile(at, dim=-1) - others.quantile(at, dim=-1)).abs().mean() / spread)


def compare_samples(trial: Trial, eager: BoundModel, candidate: BoundModel) -> Comparison:
    """Quantiles under one seed, against a null of eager on nudged inputs with other seeds.

    One flipped mixture draw shifts the whole random stream after it: then a faithful candidate is as far from eager as
    eager is from itself with another seed, so the null has to contain that.
    """
    workload = trial.workload
    series = trial.series(eager.patch_size, workload.context_patches[0], workload.horizon_patches[0])
    reference = sampled(eager, series, trial, seed=workload.seed)
    null = [
        quantile_distance(sampled(eager, series.nudged(1, seed=run), trial, seed=workload.seed + 1 + run), reference)
        for run in range(NULL_RUNS)
    ]
    if not all(map(math.isfinite, null)):
        raise NotFiniteError(f"{_shortest(trial)}, samples")
    with blaming_the_candidate():
        samples = sampled(candidate, series, trial, seed=workload.seed)
    error, limit = quantile_distance(samples, reference), null_limit(null)
    return Comparison(
        scenario=_shortest(trial),
        quantity="sample_quantiles",
        error=error,
        limit=limit,
        ratio=ratio_to_limit(error, limit),
        elements=samples.numel(),
    )


def _shortest(trial: Trial) -> str:
    return f"context {trial.workload.context_patches[0]}"


def run_equivalence(session: Session) -> SuiteEvidence:
    """Compare all scenarios, the samples, the positive control, and the spread of the forecast's error over runs."""
    trial, candidate = session.trial, session.candidate_told_nothing
    eager, exact = trial.eager(), trial.eager(dtype=torch.float64)
    scenarios = scenarios_of(trial.workload)
    comparisons: list[Comparison] = []
    control: list[Comparison] = []
    not_finite: list[str] = []
    for scenario in scenarios:
        try:
            reference = reference_on(trial, eager, exact, scenario)
        except NotFiniteError as error:
            not_finite.append(str(error))
            continue
        with blaming_the_candidate():
            compiled = quantities(candidate, reference.series, reference.truth)
        comparisons += compare(scenario.name, compiled, reference)
        if not control:
            sabotaged = quantities(trial.eager(CONTROL), reference.series, reference.truth)
            control = compare(scenario.name, sabotaged, reference)
        trial.quiet.give_way()
    try:
        comparisons.append(compare_samples(trial, eager, candidate))
    except NotFiniteError as error:
        not_finite.append(str(error))
    trial.quiet.give_way()
    series = _shortest_series(trial, eager)
    eager_mae = _forecast_mae(eager, series)
    with blaming_the_candidate():
        maes = [_forecast_mae(candidate, series) for _ in range(session.profile.iterations)]
    return SuiteEvidence(
        suite=Suite.EQUIVALENCE,
        outcome=Outcome.MEASURED,
        method=METHOD,
        figures={
            "equivalence": equivalence_figure(comparisons, control, not_finite),
            "equivalence_control": Figure(
                value=_worst_ratio(control),
                kind=Kind.MEASURED,
                method=f"the same for {CONTROL.name}, eager: must exceed 1",
            )
            if control
            else _missing_reference(not_finite),
            **_mae_figures(maes, eager_mae, _shortest(trial)),
        },
        details={
            "comparisons": [asdict(comparison) for comparison in comparisons],
            "control": [asdict(comparison) for comparison in control],
            "maes": maes,
            "numerics": numerics(),
        },
    )


def equivalence_figure(
    comparisons: Sequence[Comparison], control: Sequence[Comparison], not_finite: Sequence[str] = ()
) -> Figure:
    """The worst ratio; nothing without a reference, nor when a sabotage passed: then the comparison cannot see."""
    if not_finite:
        return _missing_reference(not_finite)
    control_ratio = _worst_ratio(control)
    if not control_ratio > 1.0:
        return Figure(
            value=None,
            missing=f"the positive control {CONTROL.name} stayed within the limit ({control_ratio:.3g}): "
            "this comparison cannot tell a wrong forecast from a right one here",
        )
    worst = max(comparisons, key=lambda comparison: comparison.ratio)
    return Figure(
        value=worst.ratio,
        method=f"worst of {len(comparisons)} comparisons: {worst.quantity}, {worst.scenario}; "
        f"error {worst.error:.3g}, limit {worst.limit:.3g}",
    )


def _missing_reference(scenarios: Sequence[str]) -> Figure:
    return Figure(value=None, missing=f"upstream eager is not finite on {'; '.join(scenarios)}")


def _mae_figures(maes: Sequence[float], eager_mae: float, scenario: str) -> dict[str, Figure]:
    if not math.isfinite(eager_mae):
        return dict.fromkeys(("mae_sigma", "mae"), _missing_reference([scenario]))
    return {
        "mae_sigma": Figure(
            value=relative_spread(maes) if all(map(math.isfinite, maes)) else math.inf,
            method=f"sigma / mean of the mean forecast's MAE against the held-out truth, {len(maes)} runs",
        )
        if len(maes) > 1
        else Figure(value=None, missing="one run has no sigma: raise iterations of the profile"),
        "mae": Figure(value=statistics.fmean(maes), method="of the mean forecast against the held-out truth"),
    }


def _worst_ratio(comparisons: Sequence[Comparison]) -> float:
    return max((comparison.ratio for comparison in comparisons), default=0.0)


def _shortest_series(trial: Trial, model: BoundModel) -> Series:
    return trial.series(model.patch_size, trial.workload.context_patches[0], trial.workload.horizon_patches[0])


def _forecast_mae(model: BoundModel, series: Series) -> float:
    forecast = model.generate_mean(series, series.truth.shape[-1])
    return float((forecast.double() - series.truth.double()).abs().mean())


def run_determinism(session: Session) -> SuiteEvidence:
    """Find the largest difference between two runs of one seed in one process; nothing where eager differs itself."""
    trial, candidate = session.trial, session.candidate_told_nothing
    model = trial.eager()
    series = _shortest_series(trial, model)
    eager = _difference_of_two_runs(trial, model, series)
    with blaming_the_candidate():
        compiled = _difference_of_two_runs(trial, candidate, series)
    if not math.isfinite(eager):
        figure = _missing_reference([_shortest(trial)])
    elif eager != 0.0:
        figure = Figure(value=None, missing=f"upstream eager differs from itself by {eager:.3g} on this device")
    else:
        method = "largest absolute difference, mean forecast and samples, two runs with one seed"
        figure = Figure(value=compiled, method=method)
    return SuiteEvidence(
        suite=Suite.DETERMINISM,
        outcome=Outcome.MEASURED,
        method="two runs, one seed, one process",
        figures={"determinism": figure},
        details={"largest_difference": {"eager": eager, "compiled": compiled}},
    )


def _difference_of_two_runs(trial: Trial, model: BoundModel, series: Series) -> float:
    def once() -> Iterator[Tensor]:
        yield model.generate_mean(series, series.truth.shape[-1])
        yield sampled(model, series, trial, seed=trial.workload.seed)

    differences = [float((first - second).abs().max()) for first, second in zip(once(), once(), strict=True)]
    return math.inf if any(map(math.isnan, differences)) else max(differences)


def numerics() -> dict[str, Any]:
    """The process-wide switches that change rounding. One process runs both sides, so they are equal on both."""
    return {
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "tf32_matmul": bool(torch.backends.cuda.matmul.allow_tf32),
        "tf32_cudnn": bool(torch.backends.cudnn.allow_tf32),
        "sdpa": {
            "flash": torch.backends.cuda.flash_sdp_enabled(),
            "memory_efficient": torch.backends.cuda.mem_efficient_sdp_enabled(),
            "math": torch.backends.cuda.math_sdp_enabled(),
        },
        "threads": torch.get_num_threads(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
    }
