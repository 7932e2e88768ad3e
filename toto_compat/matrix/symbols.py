"""The user's own series, named by `--data`: which files they are, which columns, and what is wrong with them.

All of it is read before anything runs. A file's name without its ending is its symbol.
"""

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from toto_compat.contract.csv_file import CsvColumns, CsvTable, columns_of, read_table
from toto_compat.contract.request import CsvSeries, SymbolSeries, Workload
from toto_compat.contract.symbols import check_windows, what_stands_out, windows_of
from toto_compat.errors import InputError, SelectionError
from toto_compat.matrix.document import nearest_name

_MOST_NOTED = 20  # lines of a plan
MOST_SYMBOLS = 200  # each is forecast ten times and more in every cell
_TIME_NAMES = (
    "timestamp",
    "datetime",
    "date",
    "time",
    "date time",
    "date_time",
    "day",
    "ts",
    "unix",
    "open time",
    "open_time",
    "",
)
_VALUE_NAMES = ("close",)


@dataclass(frozen=True)
class ReadSymbol:
    """A symbol and what is in its file."""

    series: SymbolSeries
    columns: CsvColumns


def read_symbols(data: Path, column: str | None, wanted: Sequence[str]) -> tuple[ReadSymbol, ...]:
    """Read every series that `--data`, `--column` and `--symbols` name; InputError says what cannot be used."""
    files = _wanted_files(_files_by_symbol(data), wanted, data)
    if len(files) > MOST_SYMBOLS:
        raise InputError(
            f"{data}: {len(files)} symbols, at most {MOST_SYMBOLS} are forecast in one run",
            hint="take those that matter: matrix has --symbols A,B for it",
        )
    return tuple(_read_symbol(name, path, column) for name, path in files.items())


def fit_to_workload(symbols: Sequence[ReadSymbol], workload_name: str, workload: Workload) -> tuple[SymbolSeries, ...]:
    """Give the symbols as a cell gets them, with what stands out in each; a series that is too short is an error."""
    fitted = []
    for one in symbols:
        name = one.series.series.path
        windows = windows_of(name, len(one.columns.timestamps), workload_name, workload, len(symbols))
        check_windows(name, one.columns, windows)
        notes = what_stands_out(one.columns, windows, workload)
        fitted.append(one.series.model_copy(update={"notes": notes}))
    return tuple(fitted)


def told_of(by_workload: Mapping[str, Sequence[SymbolSeries]]) -> list[str]:
    """Say which series will be forecast and what stands out in them, for the plan: file names made fit for a line."""
    series = {one.name: one for symbols in by_workload.values() for one in symbols}
    if not series:
        return []
    told = [f"{len(series)} series of yours: {_shortened([shown(name) for name in series])}"]
    noted = dict.fromkeys(
        f"{shown(one.name)} ({shown(one.series.value_columns[0])}): {note}"
        for symbols in by_workload.values()
        for one in symbols
        for note in one.notes
    )
    more = len(noted) - _MOST_NOTED
    return told + list(noted)[:_MOST_NOTED] + ([f"{more} more notes on them, in the report"] if more > 0 else [])


def shown(name: str) -> str:
    """Give a name from a file as one line that a terminal obeys nothing of."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in name).split())


def _files_by_symbol(data: Path) -> dict[str, Path]:
    """Find the CSV files; of a folder its own, not those of folders in it."""
    if data.is_dir():
        try:
            entries = sorted(data.iterdir())
        except OSError as error:
            raise InputError(f"{data}: cannot be read: {error.strerror}", hint="check its permissions") from error
        files = [path for path in entries if path.suffix.lower() == ".csv" and not path.name.startswith(".")]
        if not files:
            deeper = next((path.parent for path in sorted(data.glob("*/*.csv"))), None)
            hint = f"there are some in {deeper}" if deeper else "give a folder with files such as AAPL.csv, or one CSV"
            raise InputError(f"{data}: no CSV file in there", hint=hint)
    elif data.exists():
        files = [data]
    else:
        raise InputError(f"{data}: no such file or folder", hint="give a CSV, or a folder with one per symbol")
    by_symbol: dict[str, Path] = {}
    known: dict[str, Path] = {}
    for path in files:
        name = path.name[: -len(path.suffix)] if path.suffix else path.name
        try:
            name.encode("utf-8")
        except UnicodeEncodeError:
            raise InputError(f"{data}: a file name is not UTF-8: {path.name!r}", hint="rename it") from None
        if _plain(name) in known:
            raise InputError(
                f"{data}: two files for one symbol: {known[_plain(name)].name} and {path.name}",
                hint="keep one of them there",
            )
        known[_plain(name)] = by_symbol[name] = path
    return by_symbol


def _wanted_files(files: Mapping[str, Path], wanted: Sequence[str], data: Path) -> dict[str, Path]:
    """Pick what --symbols names, in its order; a name may hold a comma."""
    names: list[str] = []
    for text in wanted:
        names += [text] if text in files else [part.strip() for part in text.split(",") if part.strip()]
    if wanted and not names:
        raise SelectionError("--symbols names no symbol", hint=f"there are: {_listed(files)}")
    by_plain = {_plain(name): name for name in files}
    picked: dict[str, Path] = {}
    for name in names:
        known = name if name in files else by_plain.get(_plain(name))
        if known is None:
            near = nearest_name(name, list(files))
            raise SelectionError(
                f"--symbols: {name!r} is not in {data}",
                hint=f"did you mean {near}?" if near else f"there are: {_listed(files)}",
            )
        picked[known] = files[known]
    return picked or dict(files)


def _listed(files: Mapping[str, Path]) -> str:
    return _shortened([shown(name) for name in sorted(files)])


def _shortened(names: Sequence[str]) -> str:
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")


def _read_symbol(name: str, path: Path, column: str | None) -> ReadSymbol:
    table = read_table(path)
    time_column = _time_column(table)
    value_column = _value_column(table, column, time_column)
    columns = columns_of(table, time_column, (value_column,))
    series = CsvSeries(path=str(path.resolve()), time_column=time_column, value_columns=(value_column,))
    return ReadSymbol(SymbolSeries(name=name, series=series, content=table.content), columns)


def _time_column(table: CsvTable) -> str:
    by_name = _by_plain_name(table)
    # an index that was written without a name stands first
    found = [name for name in _TIME_NAMES if name in by_name and (name or table.header[0] == "")]
    if not found:
        raise InputError(
            f"{table.place}: no column of times", hint=f"call it timestamp or date; found: {', '.join(table.header)}"
        )
    return _one_of(table, by_name[found[0]])


def _value_column(table: CsvTable, asked: str | None, time_column: str) -> str:
    by_name = _by_plain_name(table)
    if asked is not None:
        if asked in table.header:
            return asked
        if _plain(asked) in by_name:
            return _one_of(table, by_name[_plain(asked)])
        near = nearest_name(asked, list(table.header))
        raise InputError(
            f"{table.place}: no column {asked!r}",
            hint=f"did you mean {near}?" if near else f"columns found: {', '.join(table.header)}",
        )
    others = [name for name in table.header if name != time_column]
    found = next((by_name[name] for name in _VALUE_NAMES if name in by_name), None)
    if found is not None:
        return _one_of(table, found)
    if len(others) == 1:
        return others[0]
    raise InputError(
        f"{table.place}: no column 'close', and several others", hint=f"name one with --column: {', '.join(others)}"
    )


def _one_of(table: CsvTable, title: str) -> str:
    """Give a title that was not named letter by letter; one that differs in case alone may be what was meant."""
    alike = [one for one in dict.fromkeys(table.header) if _plain(one) == _plain(title)]
    if len(alike) > 1:
        raise InputError(
            f"{table.place}: the columns {' and '.join(map(repr, alike))} differ in case alone",
            hint="rename one of them; a column of values can also be named as it is written: --column NAME",
        )
    return title


def _by_plain_name(table: CsvTable) -> dict[str, str]:
    """Map header names by how they compare; the first of several that compare the same stands for all."""
    names: dict[str, str] = {}
    for title in table.header:
        names.setdefault(_plain(title), title)
    return names


def _plain(name: str) -> str:
    """A name as it compares: whatever its case, and however its accents are written."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name.strip()).casefold())
