"""Samples judged by upstream eager: each drawn point's place in the distribution that eager gives it.

Eager is fed the candidate's own draws and says, point by point, from which distribution the next one must come. The
probability below each drawn point is then uniform and independent, whatever the seed, if and only if the candidate
draws from eager's distributions. Neither a seed nor the candidate's own `teacher_forced` is needed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from scipy import special, stats
from torch import Tensor

from toto_compat.model.bound import WholeModel
from toto_compat.model.series import Series

# One false alarm in a million cells, over all tests of a cell. This project's choice.
FALSE_ALARMS = 1e-6
_AT_ONCE = 64  # rows that eager is asked
_TAILS = (0.01, 0.001)
_FEWEST_POINTS = 8  # of a row, to say whether it resembles another
_LEAST_CHANCE = 1e-300  # that a number can hold


@dataclass(frozen=True)
class Finding:
    """One test of the drawn points: its statistic over what chance allows. Above 1 is no chance."""

    test: str
    ratio: float
    told: str


def places(eager: WholeModel, series: Series, samples: Tensor, *, most_rows: int = _AT_ONCE) -> Tensor:
    """The probability below every drawn point: [row, variate, time], rows being samples times series, in turn."""
    batch, variates, steps, count = samples.shape
    fed_back = steps > eager.patch_size
    kept = min(count, max(1, most_rows // batch)) if fed_back else count
    # spread over all rounds of sampling, not the first rows of the first one
    chosen = torch.linspace(0, count - 1, kept).round().long()
    drawn = samples[..., chosen].permute(3, 0, 1, 2).reshape(kept * batch, variates, steps).to(series.inputs.dtype)
    if fed_back:
        at_once = max(1, _AT_ONCE // batch) * batch
        return torch.cat(
            [
                _below(eager, eager.predictive(_repeated(series, len(rows) // batch), rows), rows)
                for rows in drawn.split(at_once)
            ]
        )
    # all samples of a series have one distribution
    predicted = [
        {name: value.repeat(kept, *[1] * (value.dim() - 1)) for name, value in predicted.items()}
        for predicted in eager.predictive(series, drawn[:batch])
    ]
    return _below(eager, predicted, drawn)


def _below(eager: WholeModel, predictions: Sequence[Mapping[str, Tensor]], drawn: Tensor) -> Tensor:
    """The probability that each predicted distribution gives to what is below the point drawn from it."""
    below = []
    for step, whole_patch in enumerate(predictions):
        points = drawn[..., step * eager.patch_size : (step + 1) * eager.patch_size].double()
        # the last patch may have been asked for in part
        predicted = {name: value[:, :, : points.shape[-1]] for name, value in whole_patch.items()}
        scaled = (points - predicted["affine_loc"].double()) / predicted["affine_scale"].double()
        df, loc, scale = (predicted[name].double() for name in ("df", "loc", "scale"))
        if "probs" in predicted:
            each = special.stdtr(df.cpu().numpy(), ((scaled.unsqueeze(-1) - loc) / scale).cpu().numpy())
            below.append((torch.from_numpy(each) * predicted["probs"].double().cpu()).sum(-1))
        else:
            below.append(torch.from_numpy(special.stdtr(df.cpu().numpy(), ((scaled - loc) / scale).cpu().numpy())))
    return torch.cat(below, dim=-1)


def _repeated(series: Series, times: int) -> Series:
    return Series(**{name: value.repeat(times, *[1] * (value.dim() - 1)) for name, value in vars(series).items()})


def scores(below: Tensor) -> Tensor:
    """Places as a standard normal distribution has them."""
    # a point at the very end of its distribution is possible, infinity is not a number to reckon with
    return torch.from_numpy(special.ndtri(below.clamp(1e-12, 1 - 1e-12).numpy()))


def folded_scores(below: Tensor) -> Tensor:
    """How far from the middle of its distribution each point lies, as a standard normal distribution has it.

    Draws that share this and differ by their sign are not independent, and do not correlate.
    """
    return scores((2.0 * below - 1.0).abs())


def findings(
    below: Tensor, *, patch_size: int, series: int = 1, round_rows: int = 0, drawings: int = 1
) -> list[Finding]:
    """Test that places are uniform and independent over points, patches, variates, rows and rounds; what must be
    independent also by its distance from the middle alone.

    `series` is how many series stand behind the rows, in turn; `round_rows` how many rows a round of sampling has, 0
    if not all of them are here; `drawings` how many of these are made of a cell.
    """
    rows, variates, steps = below.shape
    normal, folded = scores(below), folded_scores(below)
    patches = normal.split(patch_size, dim=-1)
    of_each_series = [normal[number::series, variate] for number in range(series) for variate in range(variates)]
    places_ = {" of a patch": patches, " of a series and variate": of_each_series}
    # a point of a series with all its draws: what is off one way here and the other way there is level on the whole
    points = normal.unflatten(0, (-1, series)).permute(1, 2, 3, 0).reshape(series * variates * steps, -1)
    scored = [
        *_as_a_whole(below, normal),
        *(_location(f"location{where}", part) for where, parts in places_.items() for part in parts),
        *(_spread(f"spread{where}", part) for where, parts in places_.items() for part in parts),
        _locations("locations of points", points),
        _spreads("spreads of points", points),
        _spreads("spreads of rows", normal.reshape(rows, -1)),
        *_of_each_row_of_a_round(normal.reshape(rows, -1), round_rows),
        *_apart(normal, patch_size, ""),
        *_apart(folded, patch_size, ", either side"),
    ]
    found = _worst_of_each(scored, drawings)
    if rows > 1 and variates * steps >= _FEWEST_POINTS:
        pairs = rows * (rows - 1) // 2
        for scored_, side in ((normal, ""), (folded, ", either side")):
            found.append(_found(_rows_apart(scored_.reshape(rows, -1), side), drawings * 2 * pairs))
    return found


def findings_over_all(below: Sequence[Tensor], *, drawings: int) -> list[Finding]:
    """Test all draws of a cell in one: what is a little off everywhere is seen here first."""
    together = torch.cat([one.flatten() for one in below])
    return _worst_of_each(_as_a_whole(together, scores(together)), drawings)


def seen_from(points: int, tests: int, *, missed: float = 1e-3) -> tuple[float, float]:
    """The smallest share by which the spread of this many scores may be off, and the smallest shift in spreads, that
    are missed no more often than `missed`."""
    sure = _critical(tests) + float(stats.norm.isf(missed))
    return sure / (2.0 * points) ** 0.5, sure / points**0.5


def number_of_tests(drawings: int) -> int:
    """How many tests share the false alarms with one that is made over all draws."""
    return drawings * len(_as_a_whole(torch.full((4,), 0.5), torch.zeros(4)))


def drawn_closer(below: Tensor, share: float) -> Tensor:
    """The same places as if every point had been drawn closer to the middle of its distribution, by a share."""
    return torch.special.ndtr((1.0 - share) * scores(below))


def _worst_of_each(scored: "Sequence[_Scored]", drawings: int) -> list[Finding]:
    worst: dict[str, _Scored] = {}
    for one in scored:
        if one.test not in worst or one.chance < worst[one.test].chance:
            worst[one.test] = one
    return [_found(one, drawings * len(scored)) for one in worst.values()]


def _critical(tests: int) -> float:
    """The score that chance exceeds once in a million cells, by any of so many tests.

    Half of the false alarms are for these, half for the many pairs of rows: they would make the others blind.
    """
    return float(stats.norm.isf(FALSE_ALARMS / 2.0 / tests / 2.0))


def _found(one: "_Scored", tests: int) -> Finding:
    score = float(stats.norm.isf(max(one.chance, _LEAST_CHANCE) / 2.0))
    return Finding(one.test, score / _critical(tests), one.told)


@dataclass(frozen=True)
class _Scored:
    test: str
    chance: float  # of something as odd or odder, on either side
    told: str


def _either_side(below: float, above: float) -> float:
    return min(1.0, 2.0 * min(below, above))


def _as_a_whole(below: Tensor, normal: Tensor) -> list[_Scored]:
    return [
        _uniform(below.flatten()),
        tail_weighted(below.flatten()),
        farthest(below.flatten()),
        *(_count(f"below the lowest {share:g}", below < share, share) for share in _TAILS),
        *(_count(f"above the highest {share:g}", below > 1 - share, share) for share in _TAILS),
        _location("location", normal),
        _spread("spread", normal),
    ]


def _uniform(places_: Tensor) -> _Scored:
    """Kolmogorov-Smirnov: the largest gap between the places and a uniform distribution."""
    tested = stats.kstest(places_.numpy(), "uniform")
    told = f"largest gap {float(tested.statistic):.3f} over {places_.numel()} points"
    return _Scored("uniform", float(tested.pvalue), told)


def tail_weighted(places_: Tensor) -> _Scored:
    """Anderson-Darling: all gaps, those in the tails with the more weight.

    Its distribution is that of a sum of chi-squares over j (j + 1). Far out the first one alone decides, and the
    product of the others' parts is the square root of 3; near the middle this chance is too large, which alarms nobody.
    """
    ordered = places_.clamp(1e-12, 1 - 1e-12).sort().values
    count = ordered.numel()
    weights = 2.0 * torch.arange(1, count + 1, dtype=torch.float64) - 1.0
    statistic = -count - float((weights * (ordered.log() + (-ordered.flip(0)).log1p())).mean())
    chance = min(1.0, 3.0**0.5 * float(stats.chi2.sf(2.0 * max(0.0, statistic), 1)))
    return _Scored("uniform in the tails", chance, f"Anderson-Darling {statistic:.1f}")


def farthest(places_: Tensor) -> _Scored:
    """See where the farthest points lie: draws that are cut off stop short of the ends."""
    count = places_.numel()
    ends = 1.0 - float(places_.min()), float(places_.max())
    chance = min(1.0, 2.0 * min(end**count for end in ends))
    return _Scored("farthest points", chance, f"from {1.0 - ends[0]:.2g} to 1 - {1.0 - ends[1]:.2g}")


def _count(where: str, seen: Tensor, share: float) -> _Scored:
    count, of_all = int(seen.sum()), seen.numel()
    chance = _either_side(stats.binom.cdf(count, of_all, share), stats.binom.sf(count - 1, of_all, share))
    return _Scored(where, chance, f"{count} points, {of_all * share:.0f} expected")


def _location(test: str, normal: Tensor) -> _Scored:
    score = float(normal.mean()) * normal.numel() ** 0.5
    return _Scored(test, 2.0 * float(stats.norm.sf(abs(score))), f"{score:+.1f} standard errors")


def _spread(test: str, normal: Tensor) -> _Scored:
    squares, count = float(normal.square().sum()), normal.numel()
    chance = _either_side(stats.chi2.cdf(squares, count), stats.chi2.sf(squares, count))
    return _Scored(test, chance, f"{(squares / count) ** 0.5:.3f} of the right one")


def _locations(test: str, groups: Tensor) -> _Scored:
    """All groups' locations in one: the sum of their squares."""
    count, each = groups.shape
    squares = groups.mean(dim=1).square() * each
    told = f"the farthest {float(squares.max()) ** 0.5:.1f} standard errors, over {count}"
    total = float(squares.sum())
    return _Scored(test, _either_side(stats.chi2.cdf(total, count), stats.chi2.sf(total, count)), told)


def _spreads(test: str, groups: Tensor) -> _Scored:
    """The same for their spreads: each one's place among what chance gives, as a normal score."""
    count, each = groups.shape
    squares = groups.square().sum(dim=1).numpy()
    below = torch.from_numpy(stats.chi2.cdf(squares, each))
    # from the other side where that is the smaller: 1 - 1e-20 is 1
    above = torch.from_numpy(stats.chi2.sf(squares, each))
    smaller = torch.minimum(below, above).clamp_min(_LEAST_CHANCE)
    far = torch.from_numpy(special.ndtri(smaller.numpy())).square()
    told = f"the farthest {float(far.max()) ** 0.5:.1f} standard errors, over {count}"
    return _Scored(test, float(stats.chi2.sf(float(far.sum()), count)), told)


def _of_each_row_of_a_round(rows: Tensor, round_rows: int) -> list[_Scored]:
    """A row of the sampled batch over all rounds: one that is always off is one of many in each of them."""
    if round_rows < 2 or len(rows) % round_rows:
        return []
    of_each = rows.unflatten(0, (-1, round_rows)).transpose(0, 1).flatten(1)
    return [_locations("locations of a batch's rows", of_each), _spreads("spreads of a batch's rows", of_each)]


def _together(test: str, one: Tensor, other: Tensor) -> _Scored:
    """What must not follow each other: points next to each other, patches, variates."""
    count = one.numel()
    if count < _FEWEST_POINTS:
        return _Scored(test, 1.0, "too few points")
    correlation = float(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1])
    return _Scored(test, _chance_of_correlation(correlation, count), f"correlation {correlation:+.3f}")


def _apart(normal: Tensor, patch_size: int, side: str) -> list[_Scored]:
    """Points next to each other, patches and variates, none of which may follow another."""
    whole = [patch for patch in normal.split(patch_size, dim=-1) if patch.shape[-1] == patch_size]
    variates = normal.unbind(dim=1)
    return [
        _together(f"neighbouring points{side}", normal[..., 1:], normal[..., :-1]),
        # noise that comes again from step to step, as a random state that a graph replays would give
        *(_together(f"patches{side}", one, other) for one, other in combinations(whole, 2)),
        *(_together(f"variates{side}", one, other) for one, other in combinations(variates, 2)),
    ]


def _chance_of_correlation(correlation: float, points: int) -> float:
    """Of two rows of normal scores that know nothing of each other: Student's t, exactly."""
    size = min(abs(correlation), 1 - 1e-12)
    return 2.0 * float(stats.t.sf(size * ((points - 2) / (1 - size**2)) ** 0.5, points - 2))


def _rows_apart(vectors: Tensor, side: str = "") -> _Scored:
    """No two rows, of one round, of two or of two seeds, may know of each other."""
    worst = float(torch.corrcoef(vectors).fill_diagonal_(0.0).abs().max())
    return _Scored(
        f"rows and rounds{side}", _chance_of_correlation(worst, vectors.shape[1]), f"largest correlation {worst:.3f}"
    )
