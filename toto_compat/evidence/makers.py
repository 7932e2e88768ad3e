"""Names of temporary files and folders say who makes them, so that those of a killed process can be told and removed.

The name is there from the first moment: there is no gap, as with a lock, in which a new file looks abandoned.
"""

import functools
import hashlib
import os
import platform
import re
import shutil
from pathlib import Path

_MADE_BY = re.compile(r"-(?P<pid>\d+)\.(?P<start>\d+)\.(?P<machine>[0-9a-f]{8})-")


def made_by_this_process() -> str:
    """Give a part of a name that says which process makes it: its number, when it began, and on which machine."""
    return f"-{os.getpid()}.{process_start(os.getpid()) or 0}.{_machine()}-"


def maker_lives(name: str) -> bool:
    """Tell if the process that a name speaks of still runs; assume it of another machine's, and of any other name."""
    made = _MADE_BY.search(name)
    if made is None or made["machine"] != _machine():
        return True
    return process_start(int(made["pid"])) == made["start"]


def remove_abandoned(folder: Path) -> list[Path]:
    """Remove what killed processes left half-made anywhere in a folder; return what was removed."""
    removed: list[Path] = []
    for inside, folders, files in os.walk(folder):
        abandoned = [name for name in (*folders, *files) if "." in name and not maker_lives(name)]
        for name in abandoned:
            path = Path(inside, name)
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
                folders.remove(name)
            else:
                try:
                    path.unlink(missing_ok=True)
                except OSError:
                    continue  # a folder that cannot be written to is told by who writes there
            removed.append(path)
    return removed


def process_start(pid: int) -> str:
    """Return when a process began, as the kernel counts: a number used again by another process has another start."""
    try:
        # the command name may hold spaces and brackets: fields are counted from the last one
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if stat[0] == "Z" else stat[19]


def pid_namespace() -> str:
    """Name what process numbers are counted in: those of another container mean other processes here."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


@functools.cache
def _machine() -> str:
    """Name machine, boot and process namespace: only here do process numbers mean something."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    return hashlib.sha256("\0".join((platform.node(), boot, pid_namespace())).encode()).hexdigest()[:8]
