"""The arithmetic of the figures."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toto_compat.contract.statistics import (
    break_even,
    growth_per_reading,
    percentile,
    ratio_of_medians,
    ratio_to_limit,
    relative_spread,
    taking_turns,
)


def test_percentiles_interpolate_between_neighbours() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert percentile(range(101), 0.95) == 95.0
    assert percentile([7.0], 0.99) == 7.0


@given(st.lists(st.floats(min_value=0.1, max_value=1e6), min_size=1, max_size=50), st.floats(min_value=0, max_value=1))
def test_a_percentile_lies_within_the_values(values: list[float], share: float) -> None:
    assert min(values) <= percentile(values, share) <= max(values) * (1 + 1e-12)


def test_equal_values_have_no_spread_even_when_they_are_zero() -> None:
    assert relative_spread([0.0, 0.0, 0.0]) == 0.0
    assert relative_spread([5.0, 5.0]) == 0.0
    assert relative_spread([9.0, 10.0, 11.0]) == pytest.approx(0.1)


@given(st.floats(min_value=-10, max_value=10), st.integers(min_value=10, max_value=60))
def test_readings_on_a_line_grow_by_its_slope(slope: float, count: int) -> None:
    growth = growth_per_reading([7.0 + slope * number for number in range(count)])
    assert (growth.low, growth.value, growth.high) == pytest.approx((slope, slope, slope), abs=1e-9)


def test_noise_and_an_outlier_are_no_growth() -> None:
    noise = random.Random(3)  # noqa: S311
    readings = [100.0 + noise.gauss(0, 0.01) for _ in range(60)]
    readings[57] += 50.0
    growth = growth_per_reading(readings)
    assert abs(growth.value) < 0.001
    assert growth.low <= growth.value <= growth.high


@pytest.mark.parametrize("period", [2, 3, 7, 30])
def test_growth_in_stairs_is_growth(period: int) -> None:
    assert growth_per_reading([float(number // period * period) for number in range(60)]).value > 0.5


@pytest.mark.parametrize("moment", [5, 30, 54])
def test_one_burst_is_growth_wherever_it_comes(moment: int) -> None:
    growth = growth_per_reading([60.0 if number >= moment else 0.0 for number in range(60)])
    assert growth.value >= 60 / 55


def test_growth_needs_two_ends() -> None:
    with pytest.raises(ValueError, match="10 readings"):
        growth_per_reading([1.0] * 9)


def test_the_interval_of_a_ratio_holds_the_ratio_and_is_the_same_each_time() -> None:
    noise = random.Random(5)  # noqa: S311
    eager = [20.0 + noise.gauss(0, 1) for _ in range(40)]
    compiled = [10.0 + noise.gauss(0, 1) for _ in range(40)]
    interval = ratio_of_medians(eager, compiled)
    assert interval.low < interval.value < interval.high
    assert interval.low > 1.8
    assert interval.high < 2.2
    assert ratio_of_medians(eager, compiled) == interval


def test_the_interval_is_wider_for_noisier_timings() -> None:
    noise = random.Random(5)  # noqa: S311
    steady = [20.0] * 40
    quiet = [10.0 + noise.gauss(0, 0.1) for _ in range(40)]
    noisy = [10.0 + noise.gauss(0, 3.0) for _ in range(40)]
    narrow, wide = ratio_of_medians(steady, quiet), ratio_of_medians(steady, noisy)
    assert wide.high - wide.low > narrow.high - narrow.low


def test_what_both_share_does_not_widen_the_interval() -> None:
    noise = random.Random(5)  # noqa: S311
    mood = [1.0 + abs(noise.gauss(0, 0.5)) for _ in range(40)]
    interval = ratio_of_medians([20.0 * one for one in mood], [10.0 * one for one in mood])
    assert [interval.low, interval.high] == pytest.approx([2.0, 2.0])


def test_values_that_are_no_rounds_are_refused() -> None:
    with pytest.raises(ValueError, match="rounds"):
        ratio_of_medians([1.0, 2.0], [1.0])


def test_break_even_counts_whole_forecasts() -> None:
    assert break_even(30.0, eager_ms=200.0, compiled_ms=100.0) == 300
    assert break_even(30.001, eager_ms=200.0, compiled_ms=100.0) == 301


def test_there_is_no_break_even_when_compiled_is_not_faster() -> None:
    assert break_even(30.0, eager_ms=100.0, compiled_ms=100.0) is None
    assert break_even(30.0, eager_ms=100.0, compiled_ms=150.0) is None


@pytest.mark.parametrize(
    ("error", "limit"), [(math.nan, 1.0), (1.0, math.nan), (math.inf, 1.0), (1e-9, 0.0), (1.0, math.inf)]
)
def test_not_a_number_and_an_impossible_limit_are_the_worst_ratio(error: float, limit: float) -> None:
    assert ratio_to_limit(error, limit) == math.inf


def test_no_error_is_within_any_limit() -> None:
    assert ratio_to_limit(0.0, 0.0) == 0.0
    assert ratio_to_limit(2.0, 4.0) == 0.5


def test_everybody_has_a_turn_a_round_and_nobody_always_follows_the_same_one() -> None:
    turns = list(taking_turns(["a", "b", "c"], 3))
    assert [sorted(turns[start : start + 3]) for start in (0, 3, 6)] == [["a", "b", "c"]] * 3
    assert [turns[start] for start in (0, 3, 6)] == ["a", "b", "c"]
