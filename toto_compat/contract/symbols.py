"""Which parts of a user's series are forecast and held out: the same on the host, which checks, and in a cell."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from toto_compat.contract.csv_file import CsvColumns
from toto_compat.contract.request import Workload
from toto_compat.contract.statistics import FEWEST_TIMED_FORECASTS
from toto_compat.errors import InputError

FEWEST_WINDOWS = 5  # of each symbol, however many there are: a median of fewer is one forecast
# A value this many times the median one: its neighbours are lost in single precision. This project's choice.
_EXPLODING = 1e4


@dataclass(frozen=True)
class Windows:
    """The newest rows of a series, cut `count` times, each time one row earlier: no two forecasts are the same.

    `context` rows are given and the `horizon` after them held out. A context that is no multiple of the patch is padded
    on the left, as toto-ts's `forecast()` does.
    """

    context: int
    horizon: int
    count: int
    rows: int

    @property
    def starts(self) -> tuple[int, ...]:
        """The first row of each window, the newest window first."""
        newest = self.rows - self.context - self.horizon
        return tuple(newest - shift for shift in range(self.count))

    @property
    def first(self) -> int:
        """The first row of all that is looked at."""
        return self.starts[-1]


def lengths_of(workload: Workload) -> tuple[int, int]:
    """Context and horizon in points: those that the workload times."""
    return workload.context[0], workload.horizon[0]


def windows_of(name: str, rows: int, workload_name: str, workload: Workload, symbols: int) -> Windows:
    """Cut the series of a symbol for a workload, or say that it is too short."""
    (context, horizon), patch = lengths_of(workload), workload.patch_size
    least = patch + horizon + FEWEST_WINDOWS - 1
    if rows < least:
        raise InputError(
            f"{name}: has {rows} rows, the workload {workload_name} needs {least}: {horizon} that are held out, one "
            f"patch of {patch} before them, and {FEWEST_WINDOWS - 1} to move by",
            hint="give a longer series, leave it out with --symbols, or take a profile with a shorter horizon",
        )
    wanted = max(FEWEST_WINDOWS, math.ceil(FEWEST_TIMED_FORECASTS / symbols))
    count = min(wanted, rows - horizon - patch + 1)
    return Windows(min(context, rows - horizon - (count - 1)), horizon, count, rows)


def check_windows(name: str, columns: CsvColumns, windows: Windows) -> None:
    """Refuse a series with nothing to forecast from, or nothing to hold a forecast against, in any of its windows."""
    [values] = columns.values
    for start in windows.starts:
        held_out = start + windows.context
        if all(value is None for value in values[start:held_out]):
            what = "there is no value to forecast from"
        elif all(value is None for value in values[held_out : held_out + windows.horizon]):
            what = "there is no value to hold the forecast against"
        else:
            continue
        raise InputError(
            f"{name}: all values of rows {start + 1} to {held_out + windows.horizon} by time are looked at, and {what}",
            hint="fill in the missing values, or leave it out with --symbols",
        )


def what_stands_out(columns: CsvColumns, windows: Windows, workload: Workload) -> tuple[str, ...]:
    """Name what explains an odd figure: padding, missing values, a constant or exploding series."""
    [values] = columns.values
    used = values[windows.first :]
    present = [value for value in used if value is not None]
    notes = list(columns.notes)
    if windows.context < lengths_of(workload)[0]:
        padding = -windows.context % workload.patch_size
        notes.append(f"short: {windows.context} rows of context, {padding} padded on the left")
    if len(present) < len(used):
        notes.append(f"{len(used) - len(present)} of {len(used)} values are missing")
    if len(set(present)) == 1:
        notes.append(f"constant: every value is {present[0]:g}")
    elif _explodes(present):
        notes.append(f"exploding: from {min(present, key=abs):g} to {max(present, key=abs):g}")
    return tuple(notes)


def _explodes(values: Sequence[float]) -> bool:
    sizes = sorted(abs(value) for value in values)
    middle = sizes[len(sizes) // 2]
    return sizes[-1] > _EXPLODING * middle if middle > 0 else sizes[-1] > _EXPLODING
