"""Processes of a cell that nobody stands over any more: its supervisor was killed, and maybe its runner as well."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_DYING_SECONDS = 20.0


def end_processes_of(folder: Path) -> int:
    """Kill every process whose home is in a cell's folder, which is nobody else's; return how many there were.

    A process may fork between the listing and the kill, so it is looked again until none is there."""
    ended: set[int] = set()
    deadline = time.monotonic() + _DYING_SECONDS
    while (alive := list(_processes_of(folder))) and time.monotonic() < deadline:
        for pid in alive:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        ended.update(alive)
        time.sleep(0.01)
    return len(ended)


def _processes_of(folder: Path) -> Iterator[int]:
    wanted = b"HOME=" + os.fsencode(folder.absolute() / "home")
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if wanted not in (entry / "environ").read_bytes().split(b"\0"):
                continue
            state = (entry / "stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            continue
        if state != "Z":
            yield int(entry.name)
