"""A claim with its spread, goal and method."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from toto_compat.contract.statistics import ratio_of_medians

# Resampling fewer values than this gives back their extremes at best: no 95 % interval.
FEWEST_FOR_AN_INTERVAL = 10


@dataclass(frozen=True)
class BenchFigure:
    name: str
    value: float
    unit: str
    spread: tuple[float, float] | None
    spread_is: str  # '95 % interval', 'range of 3' (ratios, one per round) or 'one run'
    goal: str
    method: str

    @property
    def spread_text(self) -> str:
        """Write the spread for the table: '4.1-4.4 (95 % interval)'."""
        return f"{self.spread[0]}-{self.spread[1]} ({self.spread_is})" if self.spread else self.spread_is


def one_run(name: str, value: float, unit: str, goal: str, method: str) -> BenchFigure:
    return BenchFigure(name, round(value, 3), unit, None, "one run", goal, method)


def compared(
    name: str, slow: Sequence[float], fast: Sequence[float], goal: str, *, method: str | None = None
) -> BenchFigure:
    """Return the ratio of medians of values taken in turn, with its interval; of few values the rounds' ratios."""
    interval = ratio_of_medians(slow, fast)
    ratios = [one / other for one, other in zip(slow, fast, strict=True)]
    few = len(ratios) < FEWEST_FOR_AN_INTERVAL
    low, high = (min(ratios), max(ratios)) if few else (interval.low, interval.high)
    how = "range of the rounds' ratios" if few else "bootstrap"
    return BenchFigure(
        name,
        round(interval.value, 3),
        "x",
        (round(low, 3), round(high, 3)),
        f"range of {len(ratios)}" if few else "95 % interval",
        goal,
        method or f"ratio of medians of {len(slow)} forecasts each, interleaved in one process on one thread; {how}",
    )


def compared_with_few(name: str, slow: Sequence[float], fast: Sequence[float], goal: str, *, what: str) -> BenchFigure:
    """Return the ratio of medians where the slow side was timed less often: each value over those around it."""
    around = [fast[len(fast) * i // len(slow) : len(fast) * (i + 1) // len(slow)] for i in range(len(slow))]
    ratios = [one / statistics.median(others) for one, others in zip(slow, around, strict=True)]
    return BenchFigure(
        name,
        round(statistics.median(slow) / statistics.median(fast), 3),
        "x",
        (round(min(ratios), 3), round(max(ratios), 3)),
        f"range of {len(ratios)}",
        goal,
        f"{what}; ratio of medians of {len(slow)} and {len(fast)} forecasts, interleaved in one process; range of each "
        "of the fewer over the median of those taken around it",
    )
