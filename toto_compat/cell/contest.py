"""Who is faster: contestants take turns, and each round is about a series that none of them has met."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from toto_compat.contract.statistics import taking_turns

if TYPE_CHECKING:
    from torch import Tensor

    from toto_compat.model.series import Series


class TakesPart(Protocol):
    """What a contest needs of a contestant: see `cell.contestant`."""

    name: str

    def forecast(self, series: bytes, horizon_steps: int, samples: int = 0, per_batch: int = 0) -> "Tensor": ...

    def cpu_seconds(self) -> float: ...


def takes_part(number: int, rounds: int, of_all: int) -> bool:
    """Tell whether who has `rounds` of all rounds takes part in this one: they are spread evenly, the last included."""
    return (number + 1) * rounds // of_all > number * rounds // of_all


class Contest:
    """Takes the time of contestants on series that none of them has met."""

    def __init__(
        self,
        contestants: Sequence[TakesPart],
        new_series: Callable[[], tuple["Series", bytes]],
        horizon_steps: int,
        *,
        sampling: tuple[int, int] = (0, 0),  # samples and their batch size; none: mean forecasts
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._contestants = contestants
        self._new_series = new_series
        self._horizon_steps = horizon_steps
        self._sampling = sampling
        self._clock = clock

    def one(self, contestant: TakesPart, series: bytes) -> tuple[float, "Tensor"]:
        """Return the seconds and the forecast of one contestant."""
        start = self._clock()
        forecast = contestant.forecast(series, self._horizon_steps, *self._sampling)
        return self._clock() - start, forecast

    def first(self, contestant: TakesPart) -> float:
        """The seconds of a forecast outside of any round."""
        return self.one(contestant, self._new_series()[1])[0]

    def rounds(
        self, count: int, fewer: Mapping[str, int] | None = None
    ) -> tuple[dict[str, list[float]], list[tuple["Series", dict[str, "Tensor"]]]]:
        """Everybody once a round; returns the milliseconds of each, and each round's series with its forecasts.

        Who is in `fewer` takes part in so many rounds only, spread evenly over all of them.
        """
        timings: dict[str, list[float]] = {contestant.name: [] for contestant in self._contestants}
        forecasts: list[tuple[Series, dict[str, Tensor]]] = []
        for number, contestant in enumerate(taking_turns(self._contestants, count)):
            this_round, place = divmod(number, len(self._contestants))
            if place == 0:
                series, as_bytes = self._new_series()
                forecasts.append((series, {}))
            if not takes_part(this_round, (fewer or {}).get(contestant.name, count), count):
                continue
            seconds, forecast = self.one(contestant, as_bytes)
            timings[contestant.name].append(seconds * 1000.0)
            forecasts[-1][1][contestant.name] = forecast
        return timings, forecasts
