"""Who is faster: contestants take turns, and each round is about a series that none of them has met."""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from toto_compat.contract.statistics import taking_turns

if TYPE_CHECKING:
    from torch import Tensor

    from toto_compat.model.series import Series


class TakesPart(Protocol):
    """What a contest needs of a contestant: see `cell.contestant`."""

    name: str

    def forecast(self, series: bytes, horizon_steps: int) -> "Tensor": ...

    def cpu_seconds(self) -> float: ...


class Contest:
    """Takes the time of contestants on series that none of them has met."""

    def __init__(
        self,
        contestants: Sequence[TakesPart],
        new_series: Callable[[], tuple["Series", bytes]],
        horizon_steps: int,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._contestants = contestants
        self._new_series = new_series
        self._horizon_steps = horizon_steps
        self._clock = clock

    def one(self, contestant: TakesPart, series: bytes) -> tuple[float, "Tensor"]:
        """Return the seconds and the forecast of one contestant."""
        start = self._clock()
        forecast = contestant.forecast(series, self._horizon_steps)
        return self._clock() - start, forecast

    def first(self, contestant: TakesPart) -> float:
        """The seconds of a forecast outside of any round."""
        return self.one(contestant, self._new_series()[1])[0]

    def rounds(self, count: int) -> tuple[dict[str, list[float]], list[tuple["Series", dict[str, "Tensor"]]]]:
        """Everybody once a round; returns the milliseconds of each, and each round's series with its forecasts."""
        timings: dict[str, list[float]] = {contestant.name: [] for contestant in self._contestants}
        forecasts: list[tuple[Series, dict[str, Tensor]]] = []
        for number, contestant in enumerate(taking_turns(self._contestants, count)):
            if number % len(self._contestants) == 0:
                series, as_bytes = self._new_series()
                forecasts.append((series, {}))
            seconds, forecast = self.one(contestant, as_bytes)
            timings[contestant.name].append(seconds * 1000.0)
            forecasts[-1][1][contestant.name] = forecast
        return timings, forecasts
