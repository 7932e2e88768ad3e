"""Were the forecasts right that were timed? Looked at after the clock has stopped, where no candidate was imported.

A few, drawn when it is too late to know them, are held to equivalence's own rule. All of them are held against upstream
eager's forecast of the same series, by a limit that those few gave: who answers with another series' forecast, or with
something cheaper, is off by orders of magnitude more.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from toto_compat.cell.suites.equivalence.compare import compare, errors_between
from toto_compat.cell.suites.equivalence.reference import NUDGES, Reference
from toto_compat.cell.trial import Trial
from toto_compat.contract.statistics import ratio_to_limit
from toto_compat.model.bound import BoundModel
from toto_compat.model.series import Series

LOOKED_AT_CLOSELY = 3  # of the timed forecasts: each takes upstream eager five forecasts
# Times the largest error allowed in those: over 60 series the farthest was off by 7 times, a wrong one by a million
OF_THE_CLOSE_LOOK = 100.0


@dataclass(frozen=True)
class TimedForecast:
    """One round's series, and what upstream eager and the candidate made of it while they were timed."""

    series: Series
    eager: Tensor
    candidate: Tensor


def worst_ratio(trial: Trial, timed: Sequence[TimedForecast]) -> float:
    """The largest error over what is allowed; above 1 a timed forecast was not upstream's."""
    return worst_ratio_to(trial.eager(), trial.eager(dtype=torch.float64), timed)


def worst_ratio_to(eager: BoundModel, exact: BoundModel, timed: Sequence[TimedForecast]) -> float:
    """The same by upstream eager in the cell's precision and in double precision."""
    ratios: list[float] = []
    allowed = 0.0
    for one in random.SystemRandom().sample(timed, min(LOOKED_AT_CLOSELY, len(timed))):
        series, steps = one.series, one.eager.shape[-1]
        reference = Reference(
            truth=one.eager,
            exact=_forecast(exact.generate_mean(series.to(dtype=torch.float64), steps)),
            eager=_forecast(one.eager),
            nudged=tuple(_forecast(eager.generate_mean(series.nudged(1, seed=seed), steps)) for seed in NUDGES),
        )
        (compared,) = compare("timed", _forecast(one.candidate), reference)
        ratios.append(compared.ratio)
        own = errors_between(one.eager, reference.exact["forecast"]).rmse
        allowed = max(allowed, (compared.limit + own) / _size(one.eager))
    for one in timed:
        distance = errors_between(one.candidate, one.eager).rmse / _size(one.eager)
        ratios.append(ratio_to_limit(distance, OF_THE_CLOSE_LOOK * allowed))
    return max(ratios)


def _forecast(values: Tensor) -> dict[str, Tensor]:
    return {"forecast": values.detach().cpu().double()}


def _size(forecast: Tensor) -> float:
    return float(forecast.double().square().mean().sqrt().clamp_min(torch.finfo(torch.float32).tiny))
