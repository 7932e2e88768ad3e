"""Speed without torch: the order of the calls, and what figures the timings become."""

import itertools
from collections.abc import Sequence

import pytest

from toto_compat.evidence.schema import Figure, Kind
from toto_compat.suites.speed import Contestant, SpeedRun, machine_conditions, speed_evidence, time_in_turns

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
    assert speedup.value == speedup.low < 2.0 < speedup.high
    assert figures["speedup_same_cache"].value == pytest.approx(1.6, rel=0.05)


def test_percentiles_are_over_all_repeats() -> None:
    figures = speed_evidence([run_of(100, 80, 25), run_of(100, 80, 50)], cold_compile_s=COLD).figures
    assert values(figures, "p95_ms", "p99_ms") == pytest.approx([50.5, 51.0], abs=0.6)
    assert values(figures, "eager_p50_ms", "same_cache_eager_p50_ms") == pytest.approx([100, 80], rel=0.01)


def values(figures: dict[str, Figure], *names: str) -> Sequence[float | None]:
    return [figures[name].value for name in names]


def test_fewer_than_thirty_forecasts_decide_nothing() -> None:
    figures = speed_evidence([run_of(100, 80, 25, count=29)], cold_compile_s=COLD).figures
    for name in ("speedup", "speedup_same_cache", "latency_stability", "p50_ms", "p95_ms", "p99_ms"):
        assert figures[name].value is None, name
        assert "29" in figures[name].missing


def test_thirty_forecasts_are_enough() -> None:
    assert speed_evidence([run_of(100, 80, 25, count=30)], cold_compile_s=COLD).figures["p99_ms"].value is not None


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


def test_conditions_name_the_load() -> None:
    assert len(machine_conditions()["load_average"]) == 3
