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

_MADE_ON = re.compile(r"-(?P<host>[0-9a-f]{8})\.(?P<boot>[0-9a-f]{8})-")
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


def made_on_this_machine() -> str:
    """Give a part of a name, or of a lock, that says on which machine it was made, and since which start of it."""
    return f"-{_short(platform.node())}.{_short(_boot())}-"


def without_machine(name: str) -> str:
    """Give a name without the part that says on which machine it was made."""
    return _MADE_ON.sub("-", name)


def made_on_another_machine(text: str) -> bool:
    """Tell if something was made elsewhere, where a lock may be held that is not seen here: some shared file systems
    hold it on one machine alone. A container has another name than its machine, a restarted machine another boot."""
    made = _MADE_ON.search(text)
    return made is not None and made["host"] != _short(platform.node()) and made["boot"] != _short(_boot())


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
    return _short("\0".join((platform.node(), _boot(), pid_namespace())))


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
