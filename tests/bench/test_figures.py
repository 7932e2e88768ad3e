"""What the bench says about timings it is given."""

from toto_compat.bench.__main__ import contest_table
from toto_compat.bench.contest import ContestResult
from toto_compat.bench.figures import compared


def test_a_ratio_comes_with_an_interval_around_it() -> None:
    figure = compared("x", (10.0, 11.0, 12.0, 10.5), (2.0, 2.1, 2.2, 1.9), ">= 4")
    assert figure.spread is not None
    assert figure.spread[0] <= figure.value <= figure.spread[1]
    assert figure.value == round(10.75 / 2.05, 3)
    assert "4 forecasts" in figure.method


def test_the_table_compares_with_upstream_eager_and_shows_cold_compile_for_compiled_rows_only() -> None:
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
