"""A user's CSV: what is read, and what is said about what cannot be."""

import os
from pathlib import Path
from time import process_time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from toto_compat.contract import csv_file
from toto_compat.contract.csv_file import CsvColumns, columns_of, read_csv, read_table
from toto_compat.contract.request import CsvSeries
from toto_compat.errors import InputError


def read(tmp_path: Path, text: str | bytes, *columns: str, time: str = "time") -> CsvColumns:
    path = tmp_path / "series.csv"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_csv(CsvSeries(path=str(path), time_column=time, value_columns=columns or ("price",)))


def test_iso_times_epoch_seconds_and_gaps_are_read(tmp_path: Path) -> None:
    columns = read(tmp_path, "time,price\n2025-10-30T09:00:00+00:00,1.5\n2025-10-30 09:01:00,\n1761814920,NaN\n")
    assert columns.timestamps == (1761814800, 1761814860, 1761814920)
    assert columns.interval_seconds == 60
    assert columns.values == ((1.5, None, None),)
    assert columns.notes == ()


def test_a_byte_order_mark_and_several_columns_are_fine(tmp_path: Path) -> None:
    columns = read(tmp_path, "\ufefftime,bid,ask\n1,2,3\n2,4,5\n", "ask", "bid")
    assert columns.values == ((3.0, 5.0), (2.0, 4.0))


@pytest.mark.parametrize(
    ("text", "time", "value"),
    [
        (
            "timestamp,open,high,low,close,volume\n2025-10-29,1,1,1,2.5,9\n2025-10-30,1,1,1,3.5,9\n",
            "timestamp",
            "close",
        ),
        ("Date,Close\n2025-10-29,2.5\n2025-10-30,3.5\n", "Date", "Close"),
        ("Date;Close\n2025-10-29;2.5\n2025-10-30;3.5\n", "Date", "Close"),
        ("Date\tClose\r\n2025-10-29\t2.5\r\n2025-10-30\t3.5\r\n", "Date", "Close"),
        ("sep=;\nDate;Close\n2025-10-29;2.5\n2025-10-30;3.5\n", "Date", "Close"),
        ('"Date","Close"\r\n"2025-10-29","2.5"\r\n"2025-10-30","3.5"\r\n', "Date", "Close"),
        (" Date , Close \n 2025-10-29 , 2.5 \n\n 2025-10-30 , 3.5 \n\n", "Date", "Close"),
        ("Date,Close\n2025-10-30,3.5\n2025-10-29,2.5\n", "Date", "Close"),
        ("Date,Close\n20251029,2.5\n20251030,3.5\n", "Date", "Close"),
        ("t,v\n1761696000,2.5\n1761782400,3.5\n", "t", "v"),
        ("t,v\n1761696000000,2.5\n1761782400000,3.5\n", "t", "v"),
        ("t,v\n1761696000000000000,2.5\n1761782400000000000,3.5\n", "t", "v"),
        ("t,v\n2025-10-29T02:00:00+02:00,2.5\n2025-10-30T00:00:00Z,3.5\n", "t", "v"),
        ("t,v\n2025-10-28 20:00:00-04:00,2.5\n2025-10-30 00:00:00 UTC,3.5\n", "t", "v"),
        ("t,v,\n2025-10-29,2.5,\n2025-10-30,3.5,\n", "t", "v"),
    ],
)
def test_the_formats_people_have_read_the_same(tmp_path: Path, text: str, time: str, value: str) -> None:
    columns = read(tmp_path, text, value, time=time)
    assert columns.timestamps == (1761696000, 1761782400)
    assert columns.interval_seconds == 86400
    assert columns.values == ((2.5, 3.5),)


def test_newest_first_is_put_in_order_with_a_note(tmp_path: Path) -> None:
    columns = read(tmp_path, "time,price\n3,30\n2,20\n1,10\n")
    assert (columns.timestamps, columns.values) == ((1, 2, 3), ((10.0, 20.0, 30.0),))
    assert columns.notes == ("newest first: put in order",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("when,price\n1,2\n2,3\n", "series.csv:1: no column 'time'"),
        ("time,price\n1,2\n", "1 data rows"),
        ("time,price\n", "0 data rows"),
        ("time,price\n1,2\nyesterday,3\n", "series.csv:3: time: 'yesterday' is no time"),
        ("time,price\n1,2\n30.10.2025,3\n", "series.csv:3: time: '30.10.2025' is no time"),
        ("time,price\n1,2\n10/30/2025,3\n", "series.csv:3: time: '10/30/2025' is no time"),
        ("time,price\n1,2\n2,cheap\n", "series.csv:3: price: 'cheap' is no number"),
        ("time,price\n1,2\n2,$3\n", "series.csv:3: price: '$3' is no number"),
        ("time,price\n2,2\n3,3\n1,3\n4,3\n", "series.csv:4: time: time does not advance"),
        ("time,price\n1,2\n2\n3,\n2,1\n", "time does not advance"),
        ("time,price\n4,2\n3,3\n5,3\n1,3\n", "series.csv:4: time: time does not go back"),
        ("time,price\n1,2\n2,3\n2,4\n", "series.csv:4: time: the time of the row before, a second time"),
        ("time,price,price\n1,2,3\n2,3,4\n", "2 columns are called 'price'"),
        ("", "is empty"),
        ("\n \n\n", "is empty"),
        ("price\n1\n2\n", "series.csv:1: has one column, 'price'"),
        ("1761696000,2.5\n1761782400,3.5\n", "series.csv:1: the first line is no header"),
        ("2025-10-29,2.5\n2025-10-30,3.5\n", "series.csv:1: the first line is no header"),
        ("time,price\n1,2\n2,inf\n", "series.csv:3: price: 'inf' is too large"),
        ("time,price\n1,2\n2,1e39\n", "series.csv:3: price: '1e39' is too large"),
        ('time,price\n1,"2\n2,3\n', "not CSV"),
        (b"\xff\xfet\x00", "it is UTF-16"),
        (b"PK\x03\x04", "it is a spreadsheet or archive"),
        (b"time,price\n1,2\n2,\xe9\n", "series.csv:3: cannot be read: not UTF-8"),
        (b"time,price\n1,2\n2,\0\n", "series.csv:3: cannot be read: it holds zero bytes"),
        ("time,price\n1,2\n2," + "9" * 200_000 + "\n", "not CSV: field larger than field limit"),
    ],
)
def test_a_mistake_names_file_line_and_column(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(InputError) as caught:
        read(tmp_path, text)
    assert message in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize(
    "number",
    [
        *("1,234.5", "1.234,5", "1,5", "-1,5", "1 234", "1\u00a0234.5", "1'234", "1_234"),
        *("1.234.567", "1\u2009234", "1\u2019234", "1_0e3", "1,5e3"),
    ],
)
def test_what_can_be_read_in_two_ways_is_refused(tmp_path: Path, number: str) -> None:
    for text in (f'time,price\n1,2\n2,"{number}"\n', f"time;price\n1;2\n2;{number}\n"):
        with pytest.raises(InputError, match="thousands separator or a decimal comma") as caught:
            read(tmp_path, text)
        assert f"series.csv:3: price: {number!r}" in str(caught.value)
        assert "write 1234.5" in caught.value.hint


@pytest.mark.parametrize("number", ["1.234", "1234.567", "1e3", "-2.5E-3", ".5", "1.", "+7", "0.000123456"])
def test_what_can_be_read_in_one_way_is_a_number(tmp_path: Path, number: str) -> None:
    assert read(tmp_path, f"time,price\n1,2\n2,{number}\n").values == ((2.0, float(number)),)


@pytest.mark.parametrize(("before", "line"), [("", 1), ("\n\n", 3), ("sep=,\n", 2)])
def test_a_column_that_is_not_there_is_told_with_the_line_of_the_header(tmp_path: Path, before: str, line: int) -> None:
    with pytest.raises(InputError, match=rf"series.csv:{line}: no column 'price'"):
        read(tmp_path, f"{before}time,close\n1,2\n2,3\n")


def test_an_hour_that_comes_twice_is_told_with_what_to_do(tmp_path: Path) -> None:
    twice = "time,price\n2025-10-26T01:00,1\n2025-10-26T02:00,2\n2025-10-26T02:00,3\n"
    with pytest.raises(InputError, match=r"series.csv:4: time: the time of the row before") as caught:
        read(tmp_path, twice)
    assert "needs its zone" in caught.value.hint
    zoned = "time,price\n2025-10-26T02:00+02:00,2\n2025-10-26T02:00+01:00,3\n"
    assert read(tmp_path, zoned).interval_seconds == 3600


def test_a_long_number_is_refused_in_no_time(tmp_path: Path) -> None:
    start = process_time()
    with pytest.raises(InputError, match="is no number"):
        read(tmp_path, f"time;price\n1;2\n2;{'1,' * 50_000}x\n")
    assert process_time() - start < 5


def test_a_thousands_separator_without_quotes_is_a_field_too_much(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"series.csv:3: has 3 fields, the header has 2") as caught:
        read(tmp_path, "time,price\n1,2\n2,1,234\n")
    assert "thousands separator" in caught.value.hint


def test_a_file_that_is_not_there_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_csv(CsvSeries(path=str(tmp_path / "none.csv"), time_column="time", value_columns=("price",)))


def test_neither_a_folder_nor_a_pipe_is_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.csv")
    for path in (tmp_path, tmp_path / "pipe.csv"):
        with pytest.raises(InputError, match="not a file"):
            read_table(path)


def test_a_huge_file_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "huge.csv"
    with path.open("wb") as file:
        file.truncate(csv_file.LARGEST_FILE + 1)
    monkeypatch.setattr(Path, "read_bytes", lambda _path: pytest.fail("it was read"))
    with pytest.raises(InputError, match="at most 256 MB are read"):
        read_table(path)


@given(content=st.binary(max_size=200))
@example(content=b"a,b\n1,2\n\xef\xbb\xbf2,3")
@example(content=b'a,b\n"')
@example(content=b",")
@example(content=b"a,b\n1e999,2\n2,3")
@example(content=b"a,b\n0001-01-01,1\n9999-12-31T23:59:59.999999-23:59,2")
@example(content=b"a,b\n-62135596801,1\n99999999999999999999999,2")
def test_whatever_is_in_a_file_it_is_numbers_or_an_error_of_ours(
    content: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("any") / "any.csv"
    path.write_bytes(content)
    try:
        table = read_table(path)
        columns = columns_of(table, table.header[0], table.header[1:2])
    except InputError:
        return
    assert list(columns.timestamps) == sorted(columns.timestamps)
