"""A user's CSV as numbers: read without torch, so that a mistake in it is told before any cell runs.

Read are UTF-8 with or without a byte order mark, any line ending, columns apart by comma, semicolon, tab or bar, oldest
or newest first. What can be read in two ways is refused with its file, line and column: nothing here guesses.
"""

import csv
import hashlib
import io
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

from toto_compat.contract.request import CsvSeries
from toto_compat.errors import InputError

LARGEST_FILE = 256 * 2**20  # bytes: five years of minutes with six columns are half of it
_LARGEST_VALUE = 3.4e38  # of single precision, which the model computes in
_DELIMITERS = (",", ";", "\t", "|")
_MISSING = {"", "na", "n/a", "#n/a", "nan", "null", "none", "-"}
_WRONG_ENCODINGS = {
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
    b"PK": "a spreadsheet or archive",
    b"\x1f\x8b": "gzip",
}
# 1,234.5, 1'234, 1 234 with any space, 1.234.567, 1_0e3: digits with something else than one point between them
_SEPARATORS = r",'\u2019 \u00a0\u2007\u2009\u202f_"
_OF_DIGITS = re.compile(rf"[+-]?[\d.{_SEPARATORS}]++(e[+-]?\d++)?", re.IGNORECASE)
_SEPARATED = re.compile(rf"\d[{_SEPARATORS}]\d|\d\.\d{{3}}\.\d")
# Seconds since 1970 have at most eleven digits until the year 5138, so that more digits are a finer unit.
_EPOCH_UNITS = ((1e11, 1.0), (1e14, 1e3), (1e17, 1e6), (math.inf, 1e9))
_TIME_HINT = "accepted: ISO 8601 such as 2025-10-30 or 2025-10-30T09:00:00+01:00, seconds or milliseconds since 1970"


@dataclass(frozen=True)
class CsvColumns:
    """`values[column][row]`, None where the file has nothing; rows in order of time."""

    timestamps: tuple[int, ...]
    interval_seconds: int
    values: tuple[tuple[float | None, ...], ...]
    notes: tuple[str, ...] = ()  # what a reader of the figures should know of the file


@dataclass(frozen=True)
class CsvTable:
    """The text of a file: its header, and its rows with the line that each ends in."""

    path: Path
    header: tuple[str, ...]
    rows: tuple[tuple[int, tuple[str, ...]], ...]
    content: str = ""  # SHA-256 of the file
    header_line: int = 1

    @property
    def place(self) -> str:
        """Where the names of the columns stand."""
        return f"{self.path}:{self.header_line}"

    def column(self, name: str) -> int:
        """Say where a column stands; one that is not there or twice there is an error."""
        found = [index for index, title in enumerate(self.header) if title == name]
        if len(found) == 1:
            return found[0]
        columns = ", ".join(title or "(no name)" for title in self.header)
        if found:
            raise InputError(
                f"{self.place}: {len(found)} columns are called {name!r}", hint=f"rename one of them; found: {columns}"
            )
        raise InputError(f"{self.place}: no column {name!r}", hint=f"columns found: {columns}")


def read_csv(spec: CsvSeries) -> CsvColumns:
    """Read the time column and the value columns, or say which line and column cannot be used."""
    return columns_of(read_table(Path(spec.path)), spec.time_column, spec.value_columns)


def columns_of(table: CsvTable, time_column: str, value_columns: Sequence[str]) -> CsvColumns:
    """Make numbers of these columns of a table."""
    path, time = table.path, table.column(time_column)
    places = [(name, table.column(name)) for name in value_columns]
    if len(table.rows) < 2:
        raise InputError(f"{path}: has {len(table.rows)} data rows", hint="a series needs at least two rows")
    moments = [_moment(row[time], path, line, time_column) for line, row in table.rows]
    lines = [line for line, _ in table.rows]
    newest_first = moments[0] > moments[-1]
    _check_order(path, time_column, lines, moments, newest_first=newest_first)
    values = [[_value(row[place], path, line, name) for line, row in table.rows] for name, place in places]
    if newest_first:
        moments.reverse()
        for column in values:
            column.reverse()
    steps = sorted(later - earlier for earlier, later in pairwise(moments))
    return CsvColumns(
        timestamps=tuple(int(moment) for moment in moments),
        interval_seconds=max(1, round(steps[len(steps) // 2])),
        values=tuple(tuple(column) for column in values),
        notes=("newest first: put in order",) if newest_first else (),
    )


def check_rows(spec: CsvSeries, columns: CsvColumns, needed: int) -> None:
    """Refuse a series with fewer rows than a workload looks at."""
    if len(columns.timestamps) < needed:
        raise InputError(
            f"{spec.path}: has {len(columns.timestamps)} rows, the workload needs {needed}",
            hint="shorten the workload's context or horizon, or give a longer series",
        )


def read_table(path: Path) -> CsvTable:
    """Read a file as text in columns; InputError says what is wrong with it as a whole, or with a line."""
    content = _content_of(path)
    text = _text_of(path, content)
    skipped = 0
    if re.match(r"sep=.\r?\n", text):  # what a spreadsheet writes for itself
        text, skipped = text.partition("\n")[2], 1
    first_line = next((line for line in text.splitlines() if line.strip()), "")
    delimiter = max(_DELIMITERS, key=lambda mark: len(next(csv.reader([first_line], delimiter=mark), [])))
    rows = list(_rows(text, delimiter, path, skipped))
    if not rows:
        raise InputError(f"{path}: is empty", hint="give a CSV with a header line, such as timestamp,close")
    header = tuple(title.strip() for title in rows[0][1])
    if len(header) < 2:
        raise InputError(
            f"{path}:{rows[0][0]}: has one column, {header[0][:60]!r}",
            hint="a series needs a column of times and one of values, apart by comma, semicolon or tab",
        )
    if all(_is_number_or_time(title) for title in header):
        raise InputError(
            f"{path}:{rows[0][0]}: the first line is no header: {first_line[:60]!r}",
            hint="name the columns in the first line, such as timestamp,close",
        )
    fitted = tuple((line, _fitted(row, header, path, line)) for line, row in rows[1:])
    return CsvTable(path, header, fitted, hashlib.sha256(content).hexdigest(), rows[0][0])


def _content_of(path: Path) -> bytes:
    hint = "give the path of a CSV file in UTF-8"
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for, a device never ends
            raise InputError(f"{path}: cannot be read: not a file", hint=hint)
        size = path.stat().st_size
        if size > LARGEST_FILE:
            raise InputError(
                f"{path}: has {size / 2**20:,.0f} MB, at most {LARGEST_FILE // 2**20} MB are read",
                hint="keep the newest rows and the columns that are needed in a file of their own",
            )
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}", hint=hint) from error


def _text_of(path: Path, content: bytes) -> str:
    for mark, name in _WRONG_ENCODINGS.items():
        if content.startswith(mark):
            raise InputError(f"{path}: cannot be read: it is {name}", hint="save it as CSV in UTF-8")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputError(f"{path}:{line}: cannot be read: not UTF-8", hint="save it as CSV in UTF-8") from error
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise InputError(f"{path}:{line}: cannot be read: it holds zero bytes", hint="save it as CSV in UTF-8")
    return text


def _rows(text: str, delimiter: str, path: Path, skipped: int) -> Iterator[tuple[int, list[str]]]:
    """The rows that hold anything, each with its line in the file."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        for row in reader:
            if any(field.strip() for field in row):
                yield reader.line_num + skipped, row
    except csv.Error as error:
        raise InputError(
            f"{path}:{reader.line_num + skipped}: not CSV: {error}", hint="look for a quote that is never closed"
        ) from error


def _fitted(row: list[str], header: tuple[str, ...], path: Path, line: int) -> tuple[str, ...]:
    """A row with one field per column: what is missing at its end is missing, what is too much is a mistake."""
    extra = row[len(header) :]
    if any(field.strip() for field in extra):
        raise InputError(
            f"{path}:{line}: has {len(row)} fields, the header has {len(header)}",
            hint="is there a thousands separator or a decimal comma? Write 1234.5, with a point and nothing else",
        )
    return (*row[: len(header)], *[""] * (len(header) - len(row)))


def _check_order(
    path: Path, column: str, lines: Sequence[int], moments: Sequence[float], *, newest_first: bool
) -> None:
    for (earlier, later), (_, line) in zip(pairwise(moments), pairwise(lines), strict=True):
        if later == earlier:
            raise InputError(
                f"{path}:{line}: {column}: the time of the row before, a second time",
                hint="keep one row per time: a file with several symbols has to be one file per symbol, and an hour "
                "that clocks going back bring twice needs its zone, as in 2025-10-26T02:00:00+01:00",
            )
        if (later < earlier) is not newest_first:
            raise InputError(
                f"{path}:{line}: {column}: time does not {'go back' if newest_first else 'advance'} as in the rows "
                "before",
                hint=f"sort the rows by {column}",
            )


def _is_number_or_time(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return _parsed_moment(text) is not None
    return True


def _moment(text: str, path: Path, line: int, column: str) -> float:
    moment = _parsed_moment(text.strip())
    if moment is None:
        raise InputError(f"{path}:{line}: {column}: {text.strip()[:60]!r} is no time", hint=_TIME_HINT)
    return moment


def _parsed_moment(text: str) -> float | None:
    """Seconds since 1970. A time without a zone is UTC: only distances matter to a forecast."""
    if re.fullmatch(r"[+-]?\d+(\.\d*)?(e[+-]?\d+)?", text, re.IGNORECASE) and not _is_compact_date(text):
        number = float(text)
        unit = next(unit for bound, unit in _EPOCH_UNITS if abs(number) < bound or bound is math.inf)
        return number / unit if math.isfinite(number) else None
    try:
        moment = datetime.fromisoformat(re.sub(r" ?(UTC|GMT)$", "+00:00", text))
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None


def _is_compact_date(text: str) -> bool:
    """20251030: as seconds it would be a day of August 1970."""
    return re.fullmatch(r"(19|20)\d\d(0[1-9]|1[0-2])(0[1-9]|[12]\d|3[01])", text) is not None


def _value(text: str, path: Path, line: int, column: str) -> float | None:
    text = text.strip()
    if text.lower() in _MISSING:
        return None
    where, shown = f"{path}:{line}: {column}", repr(text[:60])
    if _OF_DIGITS.fullmatch(text) and _SEPARATED.search(text):
        raise InputError(
            f"{where}: {shown} has a thousands separator or a decimal comma",
            hint="it can be read in two ways: write 1234.5, with a point and nothing else",
        )
    try:
        value = float(text)
    except ValueError:
        raise InputError(f"{where}: {shown} is no number", hint="leave missing values empty") from None
    if math.isnan(value):
        return None
    if abs(value) > _LARGEST_VALUE:
        raise InputError(
            f"{where}: {shown} is too large for a forecast", hint="single precision ends at 3.4e38; leave it empty"
        )
    return value
