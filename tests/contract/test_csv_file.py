"""A user's CSV: what is read, and what is said about what cannot be."""

from pathlib import Path

import pytest

from toto_compat.contract.csv_file import CsvColumns, read_csv
from toto_compat.contract.request import CsvSeries
from toto_compat.errors import InputError


def read(tmp_path: Path, text: str, *columns: str) -> CsvColumns:
    path = tmp_path / "series.csv"
    path.write_text(text, encoding="utf-8")
    return read_csv(CsvSeries(path=str(path), time_column="time", value_columns=columns or ("price",)))


def test_iso_times_epoch_seconds_and_gaps_are_read(tmp_path: Path) -> None:
    columns = read(tmp_path, "time,price\n2025-10-30T09:00:00+00:00,1.5\n2025-10-30 09:01:00,\n1761814920,NaN\n")
    assert columns.timestamps == (1761814800, 1761814860, 1761814920)
    assert columns.interval_seconds == 60
    assert columns.values == ((1.5, None, None),)


def test_a_byte_order_mark_and_several_columns_are_fine(tmp_path: Path) -> None:
    columns = read(tmp_path, "\ufefftime,bid,ask\n1,2,3\n2,4,5\n", "ask", "bid")
    assert columns.values == ((3.0, 5.0), (2.0, 4.0))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("when,price\n1,2\n2,3\n", "no column 'time'"),
        ("time,price\n1,2\n", "1 data rows"),
        ("time,price\n1,2\nyesterday,3\n", "series.csv:3: time: 'yesterday' is no time"),
        ("time,price\n1,2\n2,cheap\n", "series.csv:3: price: 'cheap' is no number"),
        ("time,price\n2,2\n1,3\n", "series.csv:3: time does not advance"),
        ("time,price\n1,2\n2\n3,\n2,1\n", "time does not advance"),
    ],
)
def test_a_mistake_names_file_line_and_column(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        read(tmp_path, text)
    assert message in str(caught.value)


def test_a_file_that_is_not_there_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_csv(CsvSeries(path=str(tmp_path / "none.csv"), time_column="time", value_columns=("price",)))
