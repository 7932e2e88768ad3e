"""Samples judged by upstream eager: each drawn point's place in the distribution that eager gives it.

Eager is fed the candidate's own draws and says, point by point, from which distribution the next one must come. The
probability below each drawn point is then uniform and independent, whatever the seed, if and only if the candidate
draws from eager's distributions. Neither a seed nor the candidate's own `teacher_forced` is needed.
"""

from dataclasses import dataclass
from itertools import combinations

import torch
from scipy import special, stats
from torch import Tensor

from toto_compat.model.bound import WholeModel
from toto_compat.model.series import Series

# One false alarm in a million cells, over all tests of a cell. This project's choice.
FALSE_ALARMS = 1e-6
_MOST_ROWS = 64  # of a sample batch that are held against eager: more only cost time
_TAIL = 0.01
_FEWEST_POINTS = 8  # of a row, to say whether it resembles another
_LEAST_CHANCE = 1e-300  # that a number can hold


@dataclass(frozen=True)
class Finding:
    """One test of the drawn points: its statistic over what chance allows. Above 1 is no chance."""

    test: str
    ratio: float
    told: str


def places(eager: WholeModel, series: Series, samples: Tensor) -> Tensor:
    """The probability below every drawn point: [row, variate, time], rows being samples times series, in turn."""
    batch, variates, steps, count = samples.shape
    fed_back = steps > eager.patch_size
    kept = min(count, max(1, _MOST_ROWS // batch)) if fed_back else count
    # spread over all rounds of sampling, not the first rows of the first one
    chosen = torch.linspace(0, count - 1, kept).round().long()
    drawn = samples[..., chosen].permute(3, 0, 1, 2).reshape(kept * batch, variates, steps).to(series.inputs.dtype)
    below = []
    if fed_back:
        predictions = eager.predictive(_repeated(series, kept), drawn)
    else:  # all samples of a series have one distribution
        predictions = [
            {name: value.repeat(kept, *[1] * (value.dim() - 1)) for name, value in predicted.items()}
            for predicted in eager.predictive(series, drawn[:batch])
        ]
    for step, predicted in enumerate(predictions):
        points = drawn[..., step * eager.patch_size : (step + 1) * eager.patch_size].double()
        # the last patch may have been asked for in part
        predicted = {name: value[:, :, : points.shape[-1]] for name, value in predicted.items()}  # noqa: PLW2901
        scaled = (points - predicted["affine_loc"].double()) / predicted["affine_scale"].double()
        df, loc, scale = (predicted[name].double() for name in ("df", "loc", "scale"))
        if "probs" in predicted:
            each = stats.t.cdf(((scaled.unsqueeze(-1) - loc) / scale).cpu().numpy(), df.cpu().numpy())
            below.append((torch.from_numpy(each) * predicted["probs"].double().cpu()).sum(-1))
        else:
            below.append(torch.from_numpy(stats.t.cdf(((scaled - loc) / scale).cpu().numpy(), df.cpu().numpy())))
    return torch.cat(below, dim=-1)


def _repeated(series: Series, times: int) -> Series:
    return Series(**{name: value.repeat(times, *[1] * (value.dim() - 1)) for name, value in vars(series).items()})


def findings(below: Tensor, *, patch_size: int, series: int = 1, drawings: int = 1) -> list[Finding]:
    """Test that places are uniform and independent over points, patches, variates, rows and rounds.

    `series` is how many series stand behind the rows, in turn; `drawings` how many of these are made of a cell.
    """
    rows, variates, steps = below.shape
    # a point at the very end of its distribution is possible, infinity is not a number to reckon with
    normal = torch.from_numpy(special.ndtri(below.clamp(1e-12, 1 - 1e-12).numpy()))
    patches = normal.split(patch_size, dim=-1)
    whole = [patch for patch in patches if patch.shape[-1] == patch_size]
    of_each_series = [normal[number::series, variate] for number in range(series) for variate in range(variates)]
    places_ = {"": [normal], " of a patch": patches, " of a series and variate": of_each_series}
    scored = [
        _uniform(below.flatten()),
        _count("below the lowest hundredth", below < _TAIL),
        _count("above the highest hundredth", below > 1 - _TAIL),
        *(_location(f"location{where}", part) for where, parts in places_.items() for part in parts),
        *(_spread(f"spread{where}", part) for where, parts in places_.items() for part in parts),
        _together("neighbouring points", normal[..., 1:], normal[..., :-1]),
        # noise that comes again from step to step, as a random state that a graph replays would give
        *(_together("patches", one, other) for one, other in combinations(whole, 2)),
        *(_together("variates", normal[:, one], normal[:, other]) for one, other in combinations(range(variates), 2)),
    ]
    worst: dict[str, _Scored] = {}
    for one in scored:
        if one.test not in worst or one.chance < worst[one.test].chance:
            worst[one.test] = one
    # half of the false alarms for all of these, half for the many pairs of rows: they would make the others blind
    found = [_found(one, drawings * len(scored)) for one in worst.values()]
    if rows > 1 and variates * steps >= _FEWEST_POINTS:
        found.append(_found(_rows_apart(normal.reshape(rows, -1)), drawings * rows * (rows - 1) // 2))
    return found


def _found(one: "_Scored", tests: int) -> Finding:
    critical = float(stats.norm.isf(FALSE_ALARMS / 2.0 / tests / 2.0))
    return Finding(one.test, float(stats.norm.isf(max(one.chance, _LEAST_CHANCE) / 2.0)) / critical, one.told)


@dataclass(frozen=True)
class _Scored:
    test: str
    chance: float  # of something as odd or odder, on either side
    told: str


def _either_side(below: float, above: float) -> float:
    return min(1.0, 2.0 * min(below, above))


def _uniform(places_: Tensor) -> _Scored:
    """Kolmogorov-Smirnov: the largest gap between the places and a uniform distribution."""
    tested = stats.kstest(places_.numpy(), "uniform")
    told = f"largest gap {float(tested.statistic):.3f} over {places_.numel()} points"
    return _Scored("uniform", float(tested.pvalue), told)


def _count(where: str, seen: Tensor) -> _Scored:
    count, of_all = int(seen.sum()), seen.numel()
    chance = _either_side(stats.binom.cdf(count, of_all, _TAIL), stats.binom.sf(count - 1, of_all, _TAIL))
    return _Scored(where, chance, f"{count} points, {of_all * _TAIL:.0f} expected")


def _location(test: str, normal: Tensor) -> _Scored:
    score = float(normal.mean()) * normal.numel() ** 0.5
    return _Scored(test, 2.0 * float(stats.norm.sf(abs(score))), f"{score:+.1f} standard errors")


def _spread(test: str, normal: Tensor) -> _Scored:
    squares, count = float(normal.square().sum()), normal.numel()
    chance = _either_side(stats.chi2.cdf(squares, count), stats.chi2.sf(squares, count))
    return _Scored(test, chance, f"{(squares / count) ** 0.5:.3f} of the right one")


def _together(test: str, one: Tensor, other: Tensor) -> _Scored:
    """What must not follow each other: points next to each other, patches, variates."""
    product = one * other
    score = float(product.mean()) * product.numel() ** 0.5
    told = f"correlation {float(product.mean()):+.3f}"
    return _Scored(test, 2.0 * float(stats.norm.sf(abs(score))), told)


def _rows_apart(vectors: Tensor) -> _Scored:
    """No two rows, of one round, of two or of two seeds, may know of each other."""
    rows, points = vectors.shape
    correlation = torch.corrcoef(vectors)
    above = correlation[torch.triu_indices(rows, rows, offset=1).unbind()]
    worst = float(above.abs().max().clamp(max=1 - 1e-12))
    chance = 2.0 * float(stats.t.sf(worst * ((points - 2) / (1 - worst**2)) ** 0.5, points - 2))
    return _Scored("rows and rounds", chance, f"largest correlation {worst:.3f}")
