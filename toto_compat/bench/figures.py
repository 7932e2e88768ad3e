"""A claim with its spread, goal and method."""

from collections.abc import Sequence
from dataclasses import dataclass

from toto_compat.suites.statistics import ratio_of_medians


@dataclass(frozen=True)
class BenchFigure:
    name: str
    value: float
    unit: str
    spread: tuple[float, float] | None  # 95 % interval
    goal: str
    method: str


def compared(
    name: str, slow: Sequence[float], fast: Sequence[float], goal: str, *, method: str | None = None
) -> BenchFigure:
    interval = ratio_of_medians(slow, fast)
    return BenchFigure(
        name,
        round(interval.value, 3),
        "x",
        (round(interval.low, 3), round(interval.high, 3)),
        goal,
        method
        or f"ratio of medians of {len(slow)} forecasts each, interleaved in one process on one thread; bootstrap",
    )
