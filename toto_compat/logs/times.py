"""When a log line was written, as far as it says: one form of the times of many formats.

'2025-11-04T10:14:14.409+00:00', without the offset where the log gives none, and '--11-04T10:14:14' (ISO 8601)
where it gives no year, as torch's own prefix and syslog do.
"""

import re
from datetime import UTC, datetime, timedelta

_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_CLOCK = r"(\d\d:\d\d:\d\d)(?:[.,](\d{1,9}))?"
_TIME = re.compile(
    rf"(?<!\d)(?P<date>\d{{4}}-\d\d-\d\d)[T ]{_CLOCK}(?P<offset>Z|[+-]\d\d:?\d\d)?"
    rf"|(?<![A-Za-z0-9])[VDIWEC](?P<monthday>\d{{4}}) {_CLOCK}"
    rf"|(?<![A-Za-z])(?P<month>{'|'.join(_MONTHS)}) {{1,2}}(?P<day>\d{{1,2}}) {_CLOCK}"
)
_LEAP_YEAR = 1972  # so that 29 February is a day of a log without years
_HALF_A_YEAR = timedelta(days=183).total_seconds()


def time_in(text: str) -> str:
    """Find the first time that a text names, '' if none."""
    found = _TIME.search(text)
    if not found:
        return ""
    clock, fraction = next((found[group], found[group + 1]) for group in (2, 6, 10) if found[group])
    digits = f".{fraction[:6]}" if fraction else ""
    if found["date"]:
        offset = (found["offset"] or "").replace("Z", "+00:00")
        date = found["date"]
    else:
        offset = ""
        date = (
            f"--{found['monthday'][:2]}-{found['monthday'][2:]}"
            if found["monthday"]
            else f"--{_MONTHS.index(found['month']) + 1:02}-{int(found['day']):02}"
        )
    time = f"{date}T{clock}{digits}{offset}"
    return time if seconds_of(time) is not None else ""


def time_of_epoch(number: float) -> str:
    """Write seconds, milliseconds, microseconds or nanoseconds since 1970 as a time; '' for other numbers."""
    for unit in (1, 10**3, 10**6, 10**9):
        if 10**8 * unit <= number < 10**10 * unit:
            return datetime.fromtimestamp(number / unit, UTC).isoformat()
    return ""


def seconds_of(time: str, after: float | None = None) -> float | None:
    """Turn a time into seconds, to be compared with others of the same log; None for what is no time.

    A time without a year is taken for the first one that does not lie half a year before `after`.
    """
    try:
        if not time.startswith("--"):
            read = datetime.fromisoformat(time)
            return (read if read.tzinfo else read.replace(tzinfo=UTC)).timestamp()
        year = _LEAP_YEAR if after is None else datetime.fromtimestamp(after, UTC).year
        for candidate in (year, year + 1):
            seconds = datetime.fromisoformat(f"{candidate}-{time[2:]}+00:00").timestamp()
            if after is None or seconds > after - _HALF_A_YEAR:
                return seconds
    except (ValueError, OverflowError, OSError):
        return None
    return None


def years_between(earlier: float, later: float) -> int:
    """Tell how many calendar years lie between two moments."""
    return datetime.fromtimestamp(later, UTC).year - datetime.fromtimestamp(earlier, UTC).year


def in_seconds(moment: float, years: int) -> float:
    """Count the seconds from a moment to the same day and hour so many years later."""
    read = datetime.fromtimestamp(moment, UTC)
    day = min(read.day, 28) if read.month == 2 else read.day  # not every year has a 29 February
    return read.replace(year=max(1, read.year + years), day=day).timestamp() - moment
