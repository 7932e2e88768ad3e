"""What the bench says about timings it is given."""

from dataclasses import asdict

from toto_compat.bench.command import contest_table, figure_table
from toto_compat.bench.contest import ContestResult
from toto_compat.bench.figures import compared, compared_with_few, one_run


def test_a_ratio_of_many_values_comes_with_an_interval_around_it() -> None:
    slow = tuple(10.0 + number / 10 for number in range(10))
    figure = compared("x", slow, (2.0, 2.1) * 5, ">= 4")
    assert figure.spread is not None
    assert figure.spread[0] <= figure.value <= figure.spread[1]
    assert figure.value == round(10.45 / 2.05, 3)
    assert figure.spread_is == "95 % interval"
    assert "10 forecasts" in figure.method


def test_a_ratio_of_few_values_comes_with_the_range_of_their_ratios_and_says_so() -> None:
    figure = compared("x", (10.0, 11.0, 12.0), (2.0, 2.5, 2.0), "")
    assert (figure.value, figure.spread, figure.spread_is) == (5.5, (4.4, 6.0), "range of 3")
    assert "bootstrap" not in figure.method
    assert asdict(figure)["spread_is"] == "range of 3"
    _, _, row = figure_table([figure]).splitlines()
    assert "4.4-6.0 (range of 3)" in row


def test_one_run_has_no_spread() -> None:
    assert "one run" in figure_table([one_run("share", 0.12345, "", "", "how")])


def test_the_table_compares_with_upstream_eager_and_shows_the_first_forecast_of_compiled_rows_only() -> None:
    result = ContestResult(
        timings={"upstream eager": (100.0, 100.0), "fixed_size compiled": (25.0, 25.0)},
        first_forecast_s={"upstream eager": 0.2, "fixed_size compiled": 12.0},
        kernels_ms={"upstream eager": (0.0, 0.0), "fixed_size compiled": (15.0, 15.0)},
        peak_rss_bytes=1,
    )
    _, _, eager, compiled = contest_table("tiny.mean", result).splitlines()
    assert [cell.strip() for cell in compiled.split("|")[1:-1]] == [
        "fixed_size compiled",
        "25.0",
        "25.0-25.0",
        "4.00x",
        "15.0",
        "12.0",
    ]
    assert [cell.strip() for cell in eager.split("|")[1:-1]][-2:] == ["", ""]


def test_a_slow_side_timed_less_often_is_compared_with_what_was_taken_around_it() -> None:
    figure = compared_with_few("x", (100.0, 120.0), (1.0, 1.0, 2.0, 2.0), ">= 80", what="a forecast")
    assert (figure.value, figure.spread, figure.spread_is) == (round(110 / 1.5, 3), (60.0, 100.0), "range of 2")
    assert "2 and 4 forecasts" in figure.method
