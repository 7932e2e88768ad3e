"""How a user's series is cut into windows, and what is said of it."""

import pytest

from toto_compat.contract.csv_file import CsvColumns
from toto_compat.contract.request import Workload
from toto_compat.contract.symbols import FEWEST_WINDOWS, check_windows, lengths_of, what_stands_out, windows_of
from toto_compat.errors import InputError

WORKLOAD = Workload()
CONTEXT, HORIZON = lengths_of(WORKLOAD)
PATCH = WORKLOAD.patch_size
LEAST = PATCH + HORIZON + FEWEST_WINDOWS - 1


def columns(*values: float | None) -> CsvColumns:
    return CsvColumns(tuple(range(len(values))), 1, (values,))


def test_every_window_is_another_one_and_the_newest_ends_with_the_series() -> None:
    windows = windows_of("A", 5000, "quick", WORKLOAD, symbols=10)
    assert (windows.context, windows.horizon, windows.count) == (CONTEXT, HORIZON, FEWEST_WINDOWS)
    assert windows.starts[0] + CONTEXT + HORIZON == 5000
    assert len(set(windows.starts)) == windows.count


def test_a_single_symbol_is_forecast_often_enough_to_be_timed() -> None:
    assert windows_of("A", 5000, "quick", WORKLOAD, symbols=1).count == 30


@pytest.mark.parametrize("rows", [LEAST, LEAST + 1, LEAST + PATCH, CONTEXT + HORIZON])
def test_a_short_series_keeps_to_its_rows(rows: int) -> None:
    windows = windows_of("A", rows, "quick", WORKLOAD, symbols=1)
    assert windows.first >= 0
    assert PATCH <= windows.context <= CONTEXT
    assert windows.count >= FEWEST_WINDOWS


def test_a_series_that_is_too_short_is_told_in_rows() -> None:
    with pytest.raises(InputError) as caught:
        windows_of("data/A.csv", LEAST - 1, "quick", WORKLOAD, symbols=1)
    assert f"data/A.csv: has {LEAST - 1} rows, the workload quick needs {LEAST}" in str(caught.value)
    assert "--symbols" in caught.value.hint


def test_padding_missing_values_and_a_constant_series_are_named() -> None:
    values: list[float | None] = [5.0] * (LEAST + 10)
    values[-1] = None
    windows = windows_of("A", len(values), "quick", WORKLOAD, symbols=10)
    assert what_stands_out(columns(*values), windows, WORKLOAD) == (
        f"short: {PATCH + 10} rows of context, {PATCH - 10} padded on the left",
        f"1 of {len(values)} values are missing",
        "constant: every value is 5",
    )


def test_an_exploding_series_is_named_and_a_usual_one_is_not() -> None:
    usual = [100.0 + 10 * (row % 7) for row in range(2000)]
    windows = windows_of("A", 2000, "quick", WORKLOAD, symbols=10)
    assert what_stands_out(columns(*usual), windows, WORKLOAD) == ()
    [note] = what_stands_out(columns(*usual[:-1], 1e9), windows, WORKLOAD)
    assert note == "exploding: from 100 to 1e+09"


def test_what_was_not_looked_at_is_not_spoken_of() -> None:
    values = [None] * 100 + [1.0, 2.0] * 1000
    windows = windows_of("A", len(values), "quick", WORKLOAD, symbols=10)
    assert what_stands_out(columns(*values), windows, WORKLOAD) == ()


def test_a_window_without_values_is_refused() -> None:
    windows = windows_of("A", 3000, "quick", WORKLOAD, symbols=10)
    with pytest.raises(InputError, match="no value to hold the forecast against"):
        check_windows("A", columns(*[1.0] * (3000 - HORIZON), *[None] * HORIZON), windows)
    with pytest.raises(InputError, match="no value to forecast from"):
        check_windows("A", columns(*[None] * (3000 - HORIZON), *[1.0] * HORIZON), windows)
