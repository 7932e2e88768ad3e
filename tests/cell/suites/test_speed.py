"""Speed without a model: the order of the calls, and what figures the timings become."""

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from toto_compat.cell.contest import Contest
from toto_compat.cell.suites.speed_figures import (
    SpeedRun,
    SpeedRuns,
    _largest,
    all_shapes,
    speed_evidence,
    unfair_turns,
)
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


class StandIn:
    """Takes part without a process: notes when it was asked and what."""

    def __init__(self, name: str, asked: list[tuple[str, bytes]], takes: Callable[[], None] = lambda: None) -> None:
        self.name = name
        self._asked = asked
        self._takes = takes

    def forecast(self, series: bytes, horizon_steps: int, samples: int = 0, per_batch: int = 0) -> Any:
        self._asked.append((self.name, series))
        self._takes()
        return f"{self.name} {horizon_steps}" + (f" {samples}/{per_batch}" if samples else "")

    def cpu_seconds(self) -> float:
        return 0.0


def contest_of(contestants: Sequence[StandIn], clock: Callable[[], float] = lambda: 0.0) -> Contest:
    numbers = itertools.count()

    def new_series() -> tuple[Any, bytes]:
        number = next(numbers)
        return number, str(number).encode()

    return Contest(contestants, new_series, 64, clock=clock)


def test_contestants_take_turns_and_each_round_starts_with_another() -> None:
    asked: list[tuple[str, bytes]] = []
    contest_of([StandIn(name, asked) for name in "abc"]).rounds(4)
    assert "".join(name for name, _ in asked) == "abc" + "bca" + "cab" + "abc"


def test_every_round_is_about_a_series_of_its_own_and_everybody_gets_it() -> None:
    asked: list[tuple[str, bytes]] = []
    contest = contest_of([StandIn(name, asked) for name in "ab"])
    forecasts: list[Any] = contest.rounds(3)[1]
    assert [series for _, series in asked] == [b"0", b"0", b"1", b"1", b"2", b"2"]
    assert forecasts == [(number, {"a": "a 64", "b": "b 64"}) for number in range(3)]
    contest.rounds(1)
    assert asked[-1][1] == b"3"


def test_a_timing_is_the_time_of_its_own_forecast_in_milliseconds() -> None:
    now = [0.0]

    def takes(seconds: float) -> StandIn:
        def pass_time() -> None:
            now[0] += seconds

        return StandIn(f"{seconds}", [], pass_time)

    timings, _ = contest_of([takes(0.5), takes(2.0)], clock=lambda: now[0]).rounds(2)
    assert timings == {"0.5": [500.0, 500.0], "2.0": [2000.0, 2000.0]}


def test_who_works_in_the_others_turns_is_named() -> None:
    timings = {"upstream_eager": [1000.0] * 10, "compiled": [200.0] * 10}
    assert unfair_turns(timings, [10.0, 2.0], threads=1) == ()
    assert unfair_turns(timings, [20.0, 4.0], threads=2) == ()
    (told,) = unfair_turns(timings, [10.0, 9.0], threads=1)
    assert told == "compiled used 9.0 s of processor time, its own turns took 2.0 s"


def test_who_is_kept_from_its_own_turns_is_named() -> None:
    timings = {"upstream_eager": [1000.0] * 10, "compiled": [200.0] * 10}
    (told,) = unfair_turns(timings, [4.0, 2.0], threads=1)
    assert told == "upstream_eager used 4.0 s of processor time, its own turns took 10.0 s"


def test_stalls_now_and_then_count_although_a_median_is_blind_to_them() -> None:
    calm = run_of(100, 80, 25, count=30)
    stalling = (*calm.timings["compiled"][:-2], 5000.0, 5000.0)
    stalls = calm.model_copy(update={"timings": calm.timings | {"compiled": stalling}})
    hiccup = calm.model_copy(update={"timings": calm.timings | {"compiled": (*calm.timings["compiled"][:-1], 5000.0)}})
    speedups = [speed_evidence([run], cold_compile_s=COLD).figures["speedup"].value for run in (calm, hiccup, stalls)]
    assert speedups[0] is not None and speedups[0] > 3.5
    assert speedups[1] is not None and speedups[1] > 3.5
    assert speedups[2] is not None and speedups[2] < 1.0


def test_a_contestant_that_works_in_the_others_turns_leaves_no_speedup() -> None:
    busy = run_of(100, 80, 25).model_copy(update={"unfair_turns": ("compiled used 9 s",)})
    figures = speed_evidence([run_of(100, 80, 25), busy], cold_compile_s=COLD).figures
    for name in ("speedup", "speedup_same_cache", "latency_stability"):
        assert figures[name].value is None
        assert "compiled used 9 s" in figures[name].missing


def test_the_worst_of_the_timed_forecasts_counts_and_none_may_be_unseen() -> None:
    def figure(*ratios: float | None) -> Figure:
        runs = [run_of(100, 80, 25).model_copy(update={"timed_forecasts": ratio}) for ratio in ratios]
        return speed_evidence(runs, cold_compile_s=COLD).figures["timed_forecasts"]

    assert figure(0.4, 3.0, 0.5).value == 3.0
    assert figure(0.4, None).value is None


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


def noisy(width: float, seed: int) -> list[float]:
    generator = random.Random(seed)  # noqa: S311 - times, no secret
    return [100.0 + width * generator.random() ** 4 for _ in range(30)]


def test_how_little_thirty_forecasts_say_of_a_width_is_told_with_it() -> None:
    alarms = 0
    for seed in range(40):
        figure = stability_of(noisy(40.0, 2 * seed), noisy(40.0, 2 * seed + 1))
        assert figure.value is not None and figure.low is not None and figure.high is not None
        assert figure.low <= figure.value <= figure.high
        assert figure.low <= 2.0  # eager against itself: nobody may say that it varies twice as much
        alarms += figure.value > 2.0
    assert alarms  # the value alone would have said so


def test_a_forecast_that_varies_ten_times_as_much_as_eager_is_shown_to() -> None:
    lows = [stability_of(noisy(10.0, 2 * seed), noisy(100.0, 2 * seed + 1)).low for seed in range(20)]
    assert sum(low is not None and low > 2.0 for low in lows) >= 18


def test_what_is_shown_of_one_timed_forecast_is_shown_whichever_varies_most() -> None:
    wide, shown = Figure(value=3.0, low=0.4, high=6.0), Figure(value=2.5, low=2.2, high=2.9)
    worst = _largest([wide, shown, Figure(value=1.0, low=0.5, high=1.5)])
    assert (worst.value, worst.low, worst.high) == (3.0, 2.2, 6.0)


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


def test_who_is_slow_takes_part_in_fewer_rounds_evenly_spread_and_in_the_last() -> None:
    asked: list[tuple[str, bytes]] = []
    contest = contest_of([StandIn(name, asked) for name in "abc"])
    timings, forecasts = contest.rounds(12, {"a": 3})
    assert {name: len(values) for name, values in timings.items()} == {"a": 3, "b": 12, "c": 12}
    with_a = [number for number, (_, answers) in enumerate(forecasts) if "a" in answers]
    assert with_a == [3, 7, 11]


def test_three_values_give_their_whole_range_and_it_is_said() -> None:
    many = run_of(100, 80, 25)
    few = many.model_copy(update={"timings": {**many.timings, "upstream_eager": (90.0, 100.0, 120.0)}})
    figure = speed_evidence([few], cold_compile_s=COLD).figures["speedup"]
    assert figure.low is not None and figure.low <= 90.0 / 25.0
    assert figure.high is not None and figure.high > 120.0 / 25.2
    assert "range of 3" in figure.method


def test_of_several_timed_forecasts_the_smallest_gain_decides_and_all_are_shown() -> None:
    runs = [
        run_of(100, 80, compiled).model_copy(update={"shape": shape, "timed_forecasts": ratio})
        for shape, compiled, ratio in (("mean", 10, 0.9), ("256/128 samples", 40, 0.1))
    ]
    figures = all_shapes([SpeedRuns(runs=tuple(runs))] * 3, cold_compile_s=COLD).figures
    assert figures["speedup"].value == figures["speedup [256/128 samples]"].value
    assert figures["speedup"].value is not None and figures["speedup"].value < 3.0
    assert figures["speedup [mean]"].value is not None and figures["speedup [mean]"].value > 8.0
    assert figures["timed_forecasts"].value == 0.9


def test_one_timed_forecast_without_a_figure_leaves_none_for_the_cell() -> None:
    good, few = run_of(100, 80, 10), run_of(100, 80, 10, count=5)
    runs = (good.model_copy(update={"shape": "mean"}), few.model_copy(update={"shape": "samples"}))
    figure = all_shapes([SpeedRuns(runs=runs)], cold_compile_s=COLD).figures["speedup"]
    assert figure.value is None
    assert "5 timed forecasts" in figure.missing


def test_a_forecast_that_was_not_timed_is_told_with_its_reason() -> None:
    runs = (run_of(100, 80, 120).model_copy(update={"shape": "mean"}),)
    why = "32/16 samples not timed: recompiles is 22, limit <= 0, so that this cell cannot PASS"
    evidence = all_shapes([SpeedRuns(runs=runs, left_out=why)], cold_compile_s=COLD)
    assert evidence.skipped == why
    assert evidence.figures["speedup"].value is not None
