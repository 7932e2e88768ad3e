"""A user's CSV as numbers: read without torch, so that a mistake in it is told before any cell runs."""

import csv
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

from toto_compat.contract.request import CsvSeries
from toto_compat.errors import InputError

_MISSING = {"", "na", "nan", "null", "none"}


@dataclass(frozen=True)
class CsvColumns:
    """`values[column][row]`, None where the file has nothing; rows in order of time."""

    timestamps: tuple[int, ...]
    interval_seconds: int
    values: tuple[tuple[float | None, ...], ...]


def read_csv(spec: CsvSeries) -> CsvColumns:
    """Read the time column and the value columns, or say which line and column cannot be used."""
    path = Path(spec.path)
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            reader = csv.DictReader(stream)
            header = reader.fieldnames or []
            for wanted in (spec.time_column, *spec.value_columns):
                if wanted not in header:
                    raise InputError(
                        f"{path}:1: no column {wanted!r}", hint=f"columns found: {', '.join(header) or 'none'}"
                    )
            rows = [(reader.line_num, row) for row in reader]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}", hint="give the path of a CSV file in UTF-8") from error
    if len(rows) < 2:
        raise InputError(f"{path}: has {len(rows)} data rows", hint="a series needs at least two rows")
    timestamps = tuple(_timestamp(row[spec.time_column], path, line, spec.time_column) for line, row in rows)
    for (line, _), earlier, later in zip(rows[1:], timestamps, timestamps[1:], strict=False):
        if later <= earlier:
            raise InputError(f"{path}:{line}: time does not advance", hint=f"sort the rows by {spec.time_column}")
    steps = sorted(later - earlier for earlier, later in pairwise(timestamps))
    values = tuple(
        tuple(_value(row[column], path, line, column) for line, row in rows) for column in spec.value_columns
    )
    return CsvColumns(timestamps=timestamps, interval_seconds=steps[len(steps) // 2], values=values)


def _timestamp(text: str | None, path: Path, line: int, column: str) -> int:
    text = (text or "").strip()
    try:
        return int(float(text))
    except ValueError:
        pass
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise InputError(
            f"{path}:{line}: {column}: {text!r} is no time", hint="accepted: ISO 8601 or seconds since 1970"
        ) from None
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp())


def _value(text: str | None, path: Path, line: int, column: str) -> float | None:
    text = (text or "").strip()
    if text.lower() in _MISSING:
        return None
    try:
        return float(text)
    except ValueError:
        raise InputError(f"{path}:{line}: {column}: {text!r} is no number", hint="leave missing values empty") from None
