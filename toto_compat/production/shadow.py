"""Shadow checks over days: what compiled and eager differ by, kept per day, and whether it rises."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from toto_compat.contract.files import write_atomically

_MOST_DAYS = 90
_DAYS_FOR_A_TREND = 5
_RISE = 2.0  # the last day over the first
_SIGNIFICANCE = 0.01


@dataclass
class Day:
    checks: int = 0
    total: float = 0.0
    largest: float = 0.0

    @property
    def mean(self) -> float:
        return self.total / self.checks if self.checks else 0.0


@dataclass
class ShadowHistory:
    """The daily MAE, over its limit. In a file it outlives the service; one that cannot be read begins anew."""

    file: Path | None = None
    days: dict[str, Day] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.file is None or not self.file.is_file():
            return
        try:
            held = json.loads(self.file.read_text(encoding="utf-8"))["days"]
            self.days = {str(day): Day(int(one[0]), float(one[1]), float(one[2])) for day, one in held.items()}
        except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
            self.days = {}

    def add(self, day: str, mae: float) -> None:
        held = self.days.setdefault(day, Day())
        held.checks += 1
        held.total += mae
        held.largest = max(held.largest, mae)
        for oldest in sorted(self.days)[:-_MOST_DAYS]:
            del self.days[oldest]
        if self.file is not None:
            days = {day: [one.checks, one.total, one.largest] for day, one in sorted(self.days.items())}
            write_atomically(self.file, json.dumps({"schema": 1, "days": days}) + "\n")

    @property
    def rises(self) -> bool:
        return rises([self.days[day].mean for day in sorted(self.days)])


def rises(daily: Sequence[float]) -> bool:
    """Tell whether daily means go up: at least doubled, and a Mann-Kendall test that chance seldom passes."""
    count = len(daily)
    if count < _DAYS_FOR_A_TREND or not all(math.isfinite(one) for one in daily):
        return False
    score = sum((later > earlier) - (later < earlier) for at, earlier in enumerate(daily) for later in daily[at + 1 :])
    deviation = math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    chance = 0.5 * math.erfc((score - 1) / deviation / math.sqrt(2))
    return chance < _SIGNIFICANCE and daily[-1] >= _RISE * daily[0]
