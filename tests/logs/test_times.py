"""Times of many formats in one form, and their order where the log gives no year."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toto_compat.logs.times import seconds_of, time_in, time_of_epoch


@pytest.mark.parametrize(
    ("text", "time"),
    [
        ("W1104 10:14:14.409000 101341 torch/_dynamo/convert_frame.py:1358] x", "--11-04T10:14:14.409000"),
        ("W1107 09:47:09 torch._dynamo hit", "--11-07T09:47:09"),
        ("2025-11-04 10:14:14 | INFO | x", "2025-11-04T10:14:14"),
        ("2025-11-04 10:14:14,123 - root - WARNING", "2025-11-04T10:14:14.123"),
        ("2025-11-04T10:14:14.123456789Z stderr F x", "2025-11-04T10:14:14.123456+00:00"),
        ("2025-11-04T10:14:14+01:00 x", "2025-11-04T10:14:14+01:00"),
        ("Nov  4 10:14:14 host python[4711]: x", "--11-04T10:14:14"),
        ("[rank0]:W1104 10:14:14.409000 7 x", "--11-04T10:14:14.409000"),
        ("bot-1  | 2025-11-04T10:14:14Z W1104 11:14:14 x", "2025-11-04T10:14:14+00:00"),
        ("W1399 10:14:14 there is no such month", ""),
        ("2025-02-30 10:14:14 there is no such day", ""),
        ("forecast done", ""),
    ],
)
def test_the_first_time_in_a_line_is_its_time(text: str, time: str) -> None:
    assert time_in(text) == time


@pytest.mark.parametrize("number", [1762251254, 1762251254_000, 1762251254_000_000, 1762251254_000_000_000])
def test_an_epoch_in_any_unit_is_the_same_time(number: int) -> None:
    assert time_of_epoch(number) == "2025-11-04T10:14:14+00:00"


def test_a_number_that_is_no_epoch_is_no_time() -> None:
    assert time_of_epoch(4711) == time_of_epoch(10**400) == time_of_epoch(float("nan")) == ""


def test_a_log_without_years_goes_on_over_new_year() -> None:
    december = seconds_of("--12-31T23:59:59")
    assert december is not None
    january = seconds_of("--01-01T00:00:01", december)
    assert january == december + 2


def test_a_time_without_a_year_is_of_the_year_that_the_log_gives_elsewhere() -> None:
    known = seconds_of("2025-11-04T10:00:00")
    assert seconds_of("--11-04T10:00:05", known) == seconds_of("2025-11-04T10:00:05")


@given(st.text(max_size=80), st.floats(0, 4e9))
def test_no_text_is_more_than_no_time(text: str, after: float) -> None:
    time_in(text)
    seconds_of(text, after)
    seconds_of(f"--{text}", after)
