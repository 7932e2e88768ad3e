"""The arithmetic behind the figures, free of torch: percentiles, intervals, break-even, the null of quantiles."""

import math
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

# Below this many timed forecasts a 95th percentile is one or two observations: not a figure to decide on.
FEWEST_TIMED_FORECASTS = 30
# A 99th percentile of fewer is the two or three slowest forecasts.
FEWEST_FOR_P99 = 300
_READINGS_AT_AN_END = 5

_Contestant = TypeVar("_Contestant")


def taking_turns(contestants: Sequence[_Contestant], rounds: int) -> Iterator[_Contestant]:
    """Everybody once a round. Each round starts with another one: none always follows the same one."""
    for number in range(rounds):
        first = number % len(contestants)
        yield from (*contestants[first:], *contestants[:first])


@dataclass(frozen=True)
class Interval:
    """A point estimate with the ends of its 95 % interval."""

    value: float
    low: float
    high: float


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie, interpolated linearly between neighbours."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def relative_spread(values: Sequence[float]) -> float:
    """Sigma over mean; 0 for values that are all the same, even when they are all zero."""
    mean = statistics.fmean(values)
    sigma = statistics.stdev(values) if len(values) > 1 else 0.0
    if sigma == 0.0:
        return 0.0
    return sigma / abs(mean) if mean else math.inf


def ratio_of_medians(
    numerator: Sequence[float], denominator: Sequence[float], *, resamples: int = 2000, seed: int = 1
) -> Interval:
    """Give median(numerator) / median(denominator) with a 95 % interval by a paired block bootstrap.

    The values of one round were taken right after each other: so rounds are resampled whole.
    """
    if len(numerator) != len(denominator):
        raise ValueError("values were not taken in rounds: there is not one of each")
    generator = random.Random(seed)  # noqa: S311 - resampling, no secret
    ratios = []
    for _ in range(resamples):
        drawn = _drawn_in_blocks(len(numerator), generator)
        ratios.append(statistics.median(numerator[i] for i in drawn) / statistics.median(denominator[i] for i in drawn))
    ratios.sort()
    return Interval(
        value=statistics.median(numerator) / statistics.median(denominator),
        low=percentile(ratios, 0.025),
        high=percentile(ratios, 0.975),
    )


def ratio_to_few(few: Sequence[float], many: Sequence[float], *, resamples: int = 2000, seed: int = 1) -> Interval:
    """Give median(few) / median(many) where there are too few of one for an interval of their own: their whole range,
    over the ends of the 95 % interval of the others' median (block bootstrap)."""
    generator = random.Random(seed)  # noqa: S311 - resampling, no secret
    medians = []
    for _ in range(resamples):
        medians.append(statistics.median(many[i] for i in _drawn_in_blocks(len(many), generator)))
    medians.sort()
    return Interval(
        value=statistics.median(few) / statistics.median(many),
        low=min(few) / percentile(medians, 0.975),
        high=max(few) / percentile(medians, 0.025),
    )


def ratio_of_widths(
    numerator: Sequence[float], denominator: Sequence[float], *, least: float, resamples: int = 2000, seed: int = 1
) -> Interval:
    """Give the ratio of the two middle ranges with a 95 % interval by a block bootstrap, paired where there is one of
    each in a round. Of the denominator no less than `least` counts: a machine can be too quiet to measure."""
    generator = random.Random(seed)  # noqa: S311 - resampling, no secret
    paired = len(numerator) == len(denominator)

    def ratio(one: Sequence[float], other: Sequence[float]) -> float:
        return middle_range(one) / max(middle_range(other), least)

    ratios = []
    for _ in range(resamples):
        drawn = _drawn_in_blocks(len(numerator), generator)
        beside = drawn if paired else _drawn_in_blocks(len(denominator), generator)
        ratios.append(ratio([numerator[i] for i in drawn], [denominator[i] for i in beside]))
    value = ratio(numerator, denominator)
    # resamples hold fewer of the extremes than what was taken: the middle ranges of all of them may lie on one side
    return Interval(value=value, low=min(value, percentile(ratios, 0.025)), high=max(value, percentile(ratios, 0.975)))


def _drawn_in_blocks(rounds: int, generator: random.Random) -> list[int]:
    """Resample rounds in blocks of neighbours, which share the machine's mood."""
    block = max(1, round(rounds**0.5))
    starts = (generator.randrange(rounds) for _ in range(-(-rounds // block)))
    return [(start + offset) % rounds for start in starts for offset in range(block)][:rounds]


def middle_range(values: Sequence[float]) -> float:
    """The width of the middle four fifths: two outliers in thirty do not decide it."""
    return percentile(values, 0.90) - percentile(values, 0.10)


def growth_per_reading(readings: Sequence[float]) -> Interval:
    """Tell how much a series of readings grows from one to the next: the larger of two estimates.

    Theil and Sen's, the median over the slopes of all pairs, is moved by no outlier, but a single burst leaves it at 0;
    the rise from the first five to the last five sees every burst. The ends are those of Sen's 95 % interval.
    """
    count = len(readings)
    if count < 2 * _READINGS_AT_AN_END:
        raise ValueError(f"growth needs at least {2 * _READINGS_AT_AN_END} readings")
    slopes = sorted(
        (readings[later] - readings[earlier]) / (later - earlier)
        for earlier in range(count)
        for later in range(earlier + 1, count)
    )
    # Sen 1968: 1.96 standard deviations of Kendall's S, counted in ranks of the slopes
    reach = 1.96 * math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    low = slopes[max(0, math.floor((len(slopes) - reach) / 2))]
    high = slopes[min(len(slopes) - 1, math.ceil((len(slopes) + reach) / 2))]
    first, last = readings[:_READINGS_AT_AN_END], readings[-_READINGS_AT_AN_END:]
    rise = (statistics.median(last) - statistics.median(first)) / (count - _READINGS_AT_AN_END)
    value = max(statistics.median(slopes), rise)
    return Interval(value=value, low=min(low, value), high=max(high, value))


def break_even(compile_seconds: float, eager_ms: float, compiled_ms: float) -> int | None:
    """Tell how many forecasts it takes until the compile time is paid back; None when compiled is not faster."""
    saved_seconds = (eager_ms - compiled_ms) / 1000.0
    return math.ceil(compile_seconds / saved_seconds) if saved_seconds > 0 else None


def ratio_to_limit(error: float, limit: float) -> float:
    """error / limit; what is not finite in either is the worst there is, and 0 / 0 is no error at all."""
    if not (math.isfinite(error) and math.isfinite(limit)):
        return math.inf
    if error == 0.0:
        return 0.0
    return error / limit if limit > 0.0 else math.inf
