"""Were the forecasts right that were timed? Looked at after the clock has stopped, where no candidate was imported.

A few, drawn when it is too late to know them, are held to equivalence's own rule. All of them are held against upstream
eager's forecast of the same series, by a limit that those few gave: who answers with another series' forecast, or with
something cheaper, is off by orders of magnitude more.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from toto_compat.cell.suites.equivalence.compare import compare, errors_between
from toto_compat.cell.suites.equivalence.reference import NUDGES, Reference
from toto_compat.cell.suites.equivalence.samples import findings, places
from toto_compat.cell.trial import Trial
from toto_compat.contract.request import TimedShape, sampling_of
from toto_compat.contract.statistics import ratio_to_limit
from toto_compat.model.bound import BoundModel, WholeModel
from toto_compat.model.series import Series

LOOKED_AT_CLOSELY = 3  # of the timed forecasts: each takes upstream eager five forecasts
# Times the largest error allowed in those: over 60 series the farthest was off by 7 times, a wrong one by a million
OF_THE_CLOSE_LOOK = 100.0
# Of samples: rows of a round, and rounds where eager has to be fed with what was drawn, patch by patch
ROWS_OF_A_ROUND, LOOKED_AT_IF_FED_BACK = 48, 8
OF_THEIR_OWN = 0.9  # of a round's samples of one point, in single precision


@dataclass(frozen=True)
class TimedForecast:
    """One round's series, and what upstream eager and the candidate made of it while they were timed."""

    series: Series
    eager: Tensor
    candidate: Tensor


@dataclass(frozen=True)
class TimedRound:
    """One round of a contest; upstream eager need not have taken part in it."""

    series: Series
    eager: Tensor | None
    candidate: Tensor


def worst_of_timed(trial: Trial, shape: TimedShape, rounds: Sequence[TimedRound], *, contests: int = 1) -> float:
    """The largest error over what is allowed; above 1 a timed forecast was not upstream's.

    Upstream eager is asked now what it was not asked in the contest: who knew which rounds it took no part in could
    answer those otherwise.
    """
    if shape.samples:
        return worst_of_samples(trial, shape, rounds, contests=contests)
    eager, exact = trial.eager(), trial.eager(dtype=torch.float64)
    timed = [
        TimedForecast(
            one.series,
            one.eager if one.eager is not None else eager.generate_mean(one.series, shape.horizon or 1).cpu(),
            one.candidate,
        )
        for one in rounds
    ]
    return worst_ratio_to(eager, exact, timed)


def worst_of_samples(trial: Trial, shape: TimedShape, rounds: Sequence[TimedRound], *, contests: int) -> float:
    """Samples, by their places in the distributions that upstream eager gives them, of all rounds at once.

    Rows are drawn of every round when it is too late to know them. Samples that are the same again and again are cheap:
    those of a point must be numbers of their own, but for chance.
    """
    eager = trial.eager()
    assert isinstance(eager, WholeModel)
    samples, _ = sampling_of(shape.samples or "")
    for one in rounds:
        wanted = (*one.series.inputs.shape[:2], shape.horizon, samples)
        if one.candidate.shape != wanted or not bool(one.candidate.isfinite().all()):
            return math.inf
        if not trial.workload.in_half_precision and one.candidate[0, 0, 0].unique().numel() < OF_THEIR_OWN * samples:
            return math.inf
    chance = random.SystemRandom()
    fed_back = (shape.horizon or 1) > eager.patch_size
    looked_at = chance.sample(list(rounds), min(len(rounds), LOOKED_AT_IF_FED_BACK)) if fed_back else rounds
    below = []
    for one in looked_at:
        rows = torch.tensor(sorted(chance.sample(range(samples), min(samples, ROWS_OF_A_ROUND))))
        below.append(places(eager, one.series, one.candidate[..., rows].to(one.series.inputs.device)))
    series = rounds[0].series.inputs.shape[0]
    found = findings(torch.cat(below), patch_size=eager.patch_size, series=series, drawings=contests)
    return max(finding.ratio for finding in found)


def worst_ratio_to(eager: BoundModel, exact: BoundModel, timed: Sequence[TimedForecast]) -> float:
    """Hold mean forecasts against upstream eager in the cell's precision and in double precision."""
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
