"""`--data`, `--column` and `--symbols`: which series they name, and what is said before anything runs."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from toto_compat.contract.request import Workload
from toto_compat.errors import InputError, SelectionError
from toto_compat.matrix import symbols
from toto_compat.matrix.symbols import fit_to_workload, read_symbols, told_of

PRICES = "timestamp,open,high,low,close,volume\n2025-10-29,1,1,1,2.5,9\n2025-10-30,1,1,1,3.5,9\n"
WORKLOAD = Workload()

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write files of these names into a folder and give it."""

    def files(*names: str, text: str = PRICES) -> Path:
        folder = tmp_path / "data"
        folder.mkdir(exist_ok=True)
        for name in names:
            (folder / name).write_text(text, encoding="utf-8")
        return folder

    return files


def names_in(data: Path, *wanted: str, column: str | None = None) -> list[str]:
    return [one.series.name for one in read_symbols(data, column, wanted)]


def test_every_csv_of_a_folder_is_a_symbol_and_nothing_else_is(write: Write) -> None:
    data = write("AAPL.csv", "BTCUSD.CSV", "notes.txt", ".AAPL.csv.swp", "._AAPL.csv", "BRK.B.csv")
    assert names_in(data) == ["AAPL", "BRK.B", "BTCUSD"]
    assert names_in(data / "AAPL.csv") == ["AAPL"]


def test_symbols_are_taken_as_they_are_named(write: Write) -> None:
    data = write("AAPL.csv", "BTCUSD.csv", "A,B.csv")
    assert names_in(data, "BTCUSD,AAPL") == ["BTCUSD", "AAPL"]
    assert names_in(data, "btcusd") == ["BTCUSD"]
    assert names_in(data, "A,B", "AAPL, BTCUSD") == ["A,B", "AAPL", "BTCUSD"]


@pytest.mark.parametrize(
    ("text", "column", "time", "value"),
    [
        (PRICES, None, "timestamp", "close"),
        (PRICES, "OPEN", "timestamp", "open"),
        ("Date,Close\n2025-10-29,1\n2025-10-30,2\n", None, "Date", "Close"),
        ("Date,Adj Close\n2025-10-29,1\n2025-10-30,2\n", None, "Date", "Adj Close"),
        ("Date;Open;Close\n2025-10-29;1;1\n2025-10-30;2;1\n", "close", "Date", "Close"),
        (",Close\n2025-10-29,1\n2025-10-30,2\n", None, "", "Close"),
    ],
)
def test_columns_are_found_by_their_names(write: Write, text: str, column: str | None, time: str, value: str) -> None:
    [read] = read_symbols(write("A.csv", text=text), column, ())
    assert (read.series.series.time_column, read.series.series.value_columns) == (time, (value,))


@pytest.mark.parametrize(
    ("text", "column", "message", "hint"),
    [
        (PRICES, "closing", "no column 'closing'", "did you mean close?"),
        (PRICES, "zzz", "no column 'zzz'", "columns found: timestamp, open"),
        (
            "Date,Open,High\n2025-10-29,1,1\n2025-10-30,2,2\n",
            None,
            "no column 'close', and several",
            "--column: Open, High",
        ),
        ("when,close\n1,2\n2,3\n", None, "no column of times", "found: when, close"),
        ("close,open\n1,2\n2,3\n", None, "no column of times", "found: close, open"),
    ],
)
def test_a_column_that_is_not_there_is_told_with_the_nearest(
    write: Write, text: str, column: str | None, message: str, hint: str
) -> None:
    with pytest.raises(InputError) as caught:
        read_symbols(write("A.csv", text=text), column, ())
    assert "A.csv:1: " in caught.value.message and message in caught.value.message
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("header", "column", "alike"),
    [
        ("Date,Close,close", None, "'Close' and 'close'"),
        ("Date,Close,close", "CLOSE", "'Close' and 'close'"),
        ("Date,date,Close", None, "'Date' and 'date'"),
    ],
)
def test_columns_that_differ_in_case_alone_are_not_guessed_between(
    write: Write, header: str, column: str | None, alike: str
) -> None:
    data = write("A.csv", text=f"{header}\n2025-10-29,1,2\n2025-10-30,3,4\n")
    with pytest.raises(InputError, match=f"A.csv:1: the columns {alike} differ in case alone"):
        read_symbols(data, column, ())


def test_of_columns_that_differ_in_case_alone_one_can_be_named(write: Write) -> None:
    data = write("A.csv", text="Date,Close,close\n2025-10-29,1,2\n2025-10-30,3,4\n")
    assert [read_symbols(data, name, ())[0].columns.values for name in ("Close", "close")] == [((1, 3),), ((2, 4),)]


def test_a_symbol_that_is_not_there_is_told_with_the_nearest(write: Write) -> None:
    data = write("AAPL.csv", "BTCUSD.csv")
    with pytest.raises(SelectionError, match="'APPL' is not in") as caught:
        read_symbols(data, None, ("APPL",))
    assert caught.value.hint == "did you mean AAPL?"
    with pytest.raises(SelectionError) as caught:
        read_symbols(data, None, ("XYZ",))
    assert caught.value.hint == "there are: AAPL, BTCUSD"
    with pytest.raises(SelectionError, match="names no symbol"):
        read_symbols(data, None, (" , ",))


def test_two_files_for_one_symbol_are_both_named(write: Write) -> None:
    data = write("AAPL.csv", "aapl.CSV")
    with pytest.raises(InputError, match=r"two files for one symbol: AAPL\.csv and aapl\.CSV"):
        read_symbols(data, None, ())


def test_accents_compare_however_they_are_written(write: Write) -> None:
    """Some file systems and keyboards write one letter, others a letter and an accent."""
    one, two = "caf\u00e9", "cafe\u0301"
    assert names_in(write(f"{one}.csv"), two) == [one]
    with pytest.raises(InputError, match="two files for one symbol"):
        read_symbols(write(f"{two}.csv"), None, ())


def test_what_is_no_data_is_told(write: Write, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file or folder"):
        read_symbols(tmp_path / "none", None, ())
    empty = write()
    with pytest.raises(InputError, match="no CSV file in there"):
        read_symbols(empty, None, ())
    (empty / "daily").mkdir()
    (empty / "daily" / "A.csv").write_text(PRICES)
    with pytest.raises(InputError) as caught:
        read_symbols(empty, None, ())
    assert caught.value.hint == f"there are some in {empty / 'daily'}"


def test_a_file_name_that_is_not_utf_8_is_told(write: Write) -> None:
    data = write()
    with Path(os.fsdecode(os.fsencode(data) + b"/\xff.csv")).open("w") as file:
        file.write(PRICES)
    with pytest.raises(InputError, match="not UTF-8") as caught:
        read_symbols(data, None, ())
    str(caught.value).encode("utf-8")


@pytest.mark.parametrize("name", ["^GSPC", "a b", "<script>", "x|y", "новый", "semi;colon", "new\nline", "'quote\""])
def test_odd_names_are_names(write: Write, name: str) -> None:
    assert names_in(write(f"{name}.csv")) == [name]
    assert names_in(write(), name) == [name]


def test_more_symbols_than_can_be_run_are_refused(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symbols, "MOST_SYMBOLS", 2)
    data = write("A.csv", "B.csv", "C.csv")
    with pytest.raises(InputError, match="3 symbols, at most 2"):
        read_symbols(data, None, ())
    assert names_in(data, "A,C") == ["A", "C"]


def test_the_content_is_part_of_a_symbol(write: Write) -> None:
    [before] = read_symbols(write("A.csv"), None, ())
    [after] = read_symbols(write("A.csv", text=PRICES.replace("3.5", "3.6")), None, ())
    assert before.series.content != after.series.content


def test_a_series_too_short_for_the_workload_is_told_with_its_file(write: Write) -> None:
    data = write("A.csv")
    with pytest.raises(InputError, match=r"A\.csv: has 2 rows, the workload quick needs") as caught:
        fit_to_workload(read_symbols(data, None, ()), "quick", WORKLOAD)
    assert str(data / "A.csv") in caught.value.message


def test_the_plan_tells_which_series_are_forecast_and_what_stands_out_in_them(write: Write) -> None:
    days = [f"2025-{month:02}-{day:02}" for month in range(1, 13) for day in range(1, 29)]
    up = "".join(f"{day},{number}\n" for number, day in enumerate(days))
    same = "".join(f"{day},7\n" for day in reversed(days))
    write("UP.csv", text=f"Date,Close\n{up}")
    data = write("S\x1b[31m\nAME.csv", text=f"Date,Close\n{same}")
    read = read_symbols(data, None, ("UP", "S\x1b[31m\nAME"))
    workload = Workload(context=(96, 128), horizon=(32,))
    told = told_of({name: fit_to_workload(read, name, workload) for name in ("quick", "smoke")})
    assert told == [
        "2 series of yours: UP, S [31m AME",
        "S [31m AME (Close): newest first: put in order",
        "S [31m AME (Close): constant: every value is 7",
    ]
    assert told_of({"quick": ()}) == []
