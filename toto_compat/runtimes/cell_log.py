"""A cell's log: everything it prints, up to a length that no disk minds, and its end whatever came before."""

from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

LAST_LINES = 25
LONGEST_LINE = 400  # in a result; the log has more of it
LONGEST_PIECE = 64 * 1024  # characters that are read at once: a line without end must not fill the memory
LONGEST_LOG = 50_000_000  # bytes; a compiler that logs every step writes gigabytes in an hour
_END_LINES = 1000


def copy_to_log(
    lines: Iterable[str],
    log: Path,
    last: "deque[str]",
    on_line: Callable[[str], None],
    *,
    longest: int = LONGEST_LOG,
) -> None:
    """Copy lines, live: to the log, into the last lines, to the display. OSError if the log cannot be written.

    Beyond `longest` bytes only the end is kept, and the log says how much was left out before it."""
    written = left_out = 0
    end: deque[str] = deque(maxlen=_END_LINES)
    with log.open("a", encoding="utf-8") as file:
        try:
            for line in lines:
                size = len(line.encode(errors="replace")) + 1
                if written + size <= longest:
                    written += size
                    file.write(line + "\n")
                    file.flush()
                else:
                    left_out += size
                    end.append(line[:LONGEST_LINE])
                last.append(line[:LONGEST_LINE])
                on_line(line)
        finally:
            if left_out:
                what = f"{left_out / 1e6:.1f} MB left out, a log is kept up to {longest / 1e6:.0f} MB"
                file.write(f"--- {what}; its end, lines cut: ---\n" + "".join(f"{line}\n" for line in end))
