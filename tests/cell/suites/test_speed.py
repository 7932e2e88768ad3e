"""Speed without a model: the order of the calls, and what figures the timings become."""

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from toto_compat.cell.quiet import QuietLock
from toto_compat.cell.suites.speed import (
    Contestant,
    SpeedRun,
    run_speed,
    speed_evidence,
    time_in_turns,
)
from toto_compat.contract.request import CacheRequest, CellProfile, Workload
from toto_compat.contract.result import Figure, Kind

COLD = Figure(value=40.0, unit="s")


def run_of(eager: float, same_cache: float, compiled: float, count: int = 36) -> SpeedRun:
    jitter = [1.0, 1.01, 0.99, 1.02, 0.98]

    def values(center: float) -> tuple[float, ...]:
        return tuple(center * factor for factor, _ in zip(itertools.cycle(jitter), range(count), strict=False))

    return SpeedRun(
        timings={
            "upstream_eager": values(eager),
            "same_cache_eager": values(same_cache),
            "compiled": values(compiled),
        },
        warm_start_s=8.0,
    )


def test_the_device_is_synchronised_before_each_timestamp() -> None:
    calls: list[str] = []
    ticks = itertools.count()

    def clock() -> float:
        calls.append("clock")
        return next(ticks)

    contestants = [Contestant(name, lambda name=name: calls.append(name)) for name in ("a", "b")]  # type: ignore[misc]
    time_in_turns(contestants, 1, clock=clock, synchronise=lambda: calls.append("sync"))
    assert calls == ["sync", "clock", "a", "sync", "clock", "sync", "clock", "b", "sync", "clock"]


def test_contestants_take_turns_and_each_round_starts_with_another() -> None:
    order: list[str] = []
    contestants = [Contestant(name, lambda name=name: order.append(name)) for name in "abc"]  # type: ignore[misc]
    time_in_turns(contestants, 4, clock=lambda: 0.0, synchronise=lambda: None)
    assert "".join(order) == "abc" + "bca" + "cab" + "abc"


def test_a_timing_is_the_time_of_its_own_forecast_in_milliseconds() -> None:
    now = [0.0]

    def takes(seconds: float) -> Contestant:
        def forecast() -> None:
            now[0] += seconds

        return Contestant(f"{seconds}", forecast)

    timings = time_in_turns([takes(0.5), takes(2.0)], 2, clock=lambda: now[0], synchronise=lambda: None)
    assert timings == {"0.5": [500.0, 500.0], "2.0": [2000.0, 2000.0]}


def test_the_worst_repeat_decides_the_speedup() -> None:
    good, bad = run_of(100, 80, 25), run_of(100, 80, 50)
    figures = speed_evidence([good, bad, good], cold_compile_s=COLD).figures
    speedup = figures["speedup"]
    assert speedup.value is not None and speedup.low is not None and speedup.high is not None
    assert speedup.value == speedup.low <= 2.0 <= speedup.high
    assert figures["speedup_same_cache"].value == pytest.approx(1.6, rel=0.05)


def test_percentiles_are_over_all_repeats() -> None:
    figures = speed_evidence([run_of(100, 80, 25), run_of(100, 80, 50)], cold_compile_s=COLD).figures
    assert values(figures, "p95_ms") == pytest.approx([50.5], abs=0.6)
    assert values(figures, "eager_p50_ms", "same_cache_eager_p50_ms") == pytest.approx([100, 80], rel=0.01)


def values(figures: dict[str, Figure], *names: str) -> Sequence[float | None]:
    return [figures[name].value for name in names]


def test_fewer_than_thirty_forecasts_decide_nothing() -> None:
    figures = speed_evidence([run_of(100, 80, 25, count=29)], cold_compile_s=COLD).figures
    for name in ("speedup", "speedup_same_cache", "latency_stability", "p50_ms", "p95_ms", "p99_ms"):
        assert figures[name].value is None, name
        assert "29" in figures[name].missing


def test_thirty_forecasts_are_enough_but_for_the_hundredth_slowest() -> None:
    for count, told in ((30, False), (299, False), (300, True)):
        figures = speed_evidence([run_of(100, 80, 25, count=count)], cold_compile_s=COLD).figures
        assert figures["p95_ms"].value is not None
        assert (figures["p99_ms"].value is not None) is told


def stability_of(eager: Sequence[float], compiled: Sequence[float]) -> Figure:
    timings = {"upstream_eager": tuple(eager), "same_cache_eager": tuple(eager), "compiled": tuple(compiled)}
    return speed_evidence([SpeedRun(timings=timings, warm_start_s=1.0)], cold_compile_s=COLD).figures[
        "latency_stability"
    ]


EAGER = [100.0 + number % 5 for number in range(30)]


def test_two_outliers_in_thirty_do_not_make_a_forecast_unstable() -> None:
    calm = [25.0 + number % 3 for number in range(30)]
    value = stability_of(EAGER, [*calm[:-2], 90.0, 120.0]).value
    assert value is not None and value <= 1.0


def test_a_forecast_that_varies_more_than_eager_is_unstable() -> None:
    value = stability_of(EAGER, [25.0 if number % 3 else 60.0 for number in range(30)]).value
    assert value is not None and value > 2.0


def test_where_eager_itself_is_unstable_nothing_is_told() -> None:
    figure = stability_of([100.0 if number % 3 else 200.0 for number in range(30)], [25.0] * 30)
    assert figure.value is None
    assert "upstream eager itself varies" in figure.missing


def test_break_even_is_told_for_cold_and_warm_starts() -> None:
    figures = speed_evidence([run_of(100, 80, 60)], cold_compile_s=COLD).figures
    assert figures["break_even_cold"].value == 1000
    assert figures["break_even_warm"].value == 200
    assert figures["break_even_cold"].kind is Kind.REPORTED


def test_a_slower_compile_never_breaks_even() -> None:
    figures = speed_evidence([run_of(100, 80, 120)], cold_compile_s=COLD).figures
    assert figures["break_even_cold"].value is None
    assert "not faster" in figures["break_even_cold"].missing


def test_an_unmeasured_cold_compile_leaves_its_break_even_open() -> None:
    unknown = Figure(value=None, missing="observe crashed")
    figures = speed_evidence([run_of(100, 80, 50)], cold_compile_s=unknown).figures
    assert figures["break_even_cold"].value is None
    assert figures["break_even_warm"].value is not None
    assert figures["cold_compile_s"] == unknown


def test_a_process_that_compiled_cold_has_no_warm_start() -> None:
    figures = speed_evidence([run_of(100, 80, 50)], cold_compile_s=COLD, inductor_cache_filled=False).figures
    assert figures["warm_start_s"].value is None
    assert "recompile suite" in figures["warm_start_s"].missing
    assert figures["break_even_warm"].value is None
    assert figures["break_even_cold"].value is not None


class StandInModel:
    """Forecasts nothing, or raises."""

    patch_size = 32

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def generate_mean(self, *_: object) -> None:
        if self._error is not None:
            raise self._error


def contest(*, eager: StandInModel, compiled: StandInModel) -> SpeedRun:
    trial: Any = SimpleNamespace(
        workload=Workload(),
        device="cpu",
        cache=CacheRequest(name="upstream", source="builtin"),
        quiet=QuietLock(None),
        eager=lambda _cache: eager,
        series=lambda *_: None,
    )
    session: Any = SimpleNamespace(
        trial=trial, profile=CellProfile(iterations=1), candidate=compiled, first_forecast_seconds=lambda: 1.0
    )
    return run_speed(session)


@pytest.mark.cell
def test_only_the_compiled_contestant_is_evidence_against_the_candidate() -> None:
    from toto_compat.cell.trial import CandidateError

    contest(eager=StandInModel(), compiled=StandInModel())
    with pytest.raises(ValueError, match="wrong shape"):
        contest(eager=StandInModel(ValueError("wrong shape")), compiled=StandInModel())
    with pytest.raises(CandidateError, match="wrong shape"):
        contest(eager=StandInModel(), compiled=StandInModel(ValueError("wrong shape")))
