"""Memory and time of this process and of everything it started, as the kernel tells them; and the words of those who
lack memory.
"""

import contextlib
import ctypes
import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

# Of Python, torch, the C++ library and compilers; the last two of a compiler that the kernel killed.
OUT_OF_MEMORY_TEXTS = (
    "MemoryError",
    "not enough memory",
    "std::bad_alloc",
    "Cannot allocate memory",
    "can't allocate memory",
    "CUDA out of memory",
    "CUDA error: out of memory",
    "out of memory allocating",
    "Killed signal terminated program",
    "unable to execute command: Killed",
)
_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - it is looked at, nothing is written there
_PR_SET_CHILD_SUBREAPER = 36
_OWN_FIELDS = ("RssAnon:", "RssShmem:", "VmSwap:")


class TreePeak:
    """The largest resident memory seen over this process and everything it started."""

    def __init__(self) -> None:
        self.peak = 0

    def look(self) -> None:
        self.peak = max(self.peak, tree_rss(os.getpid()))


@contextmanager
def watching_the_tree(every_seconds: float = 0.2) -> Iterator[TreePeak]:
    """Compilers run in child processes: sample the whole tree from a thread while the block runs."""
    peak, stop = TreePeak(), threading.Event()

    def sample() -> None:
        while not stop.wait(every_seconds):
            peak.look()

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()
        peak.look()


def resident_bytes(pid: int) -> int:
    """Resident memory of one process; 0 when it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    except (OSError, IndexError, ValueError):
        return 0


def own_bytes(pid: int) -> int:
    """Memory that only ending the process gives back: anonymous and shared, in RAM or swapped out; 0 when it is gone.

    Pages of mapped files are left out: the kernel drops and reads them again as it likes, and a fork has none of its
    parent's until it touches them.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    fields = dict(line.split(":", 1) for line in lines if line.startswith(_OWN_FIELDS))
    return sum(int(value.split()[0]) * 1024 for value in fields.values())


def give_back_what_is_free() -> None:
    """Have the C library return freed memory to the kernel; what one keeps that has no such call stays."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def tree_rss(root: int) -> int:
    """Resident memory of a process and all its descendants."""
    return _over_the_tree(root, resident_bytes)


def tree_own_bytes(root: int) -> int:
    """What a process and all its descendants hold of their own."""
    return _over_the_tree(root, own_bytes)


def tree_file_bytes(root: int) -> int:
    """What lies in files that a process and its descendants hold open or mapped to write to, memfd among them, and in
    those that this user has in shared memory: a process that maps nothing of it has none of it in its own count.
    """
    held: dict[tuple[int, int], int] = {}
    folders = [Path(f"/proc/{pid}/{kind}") for pid in tree_of(root) for kind in ("fd", "map_files")]
    for folder in (*folders, _SHARED_MEMORY):
        with contextlib.suppress(OSError):
            for entry in folder.iterdir():
                _add_file(held, entry)
    return sum(held.values())


def _add_file(held: dict[tuple[int, int], int], entry: Path) -> None:
    """Count a file once however often it is open; libraries are mapped to be read, and the kernel may drop them."""
    try:
        file, writable = entry.stat(), bool(entry.lstat().st_mode & stat.S_IWUSR)
    except OSError:
        return
    if stat.S_ISREG(file.st_mode) and writable and file.st_uid == os.getuid():
        held[file.st_dev, file.st_ino] = file.st_blocks * 512


def keep_orphans() -> None:
    """Have processes whose parent ends become this one's children, so that a daemon stays in the tree."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def tree_cpu_seconds(root: int) -> float:
    """Processor time of a process and all its descendants, ended ones included."""
    return _over_the_tree(root, cpu_ticks) / _TICKS_A_SECOND


def cpu_ticks(pid: int) -> int:
    """Clock ticks of one process and of its children that have ended; 0 when it is gone."""
    try:
        # the command, in parentheses, may hold spaces: user, system, and both of ended children follow it
        return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]))
    except (OSError, ValueError):
        return 0


def _over_the_tree(root: int, measure: Callable[[int], int]) -> int:
    return sum(measure(pid) for pid in tree_of(root))


def tree_of(root: int) -> set[int]:
    """The process and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # the command, in parentheses, may hold spaces: the parent's pid is the second field after it
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError, ValueError):
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found, pending = set(), [root]
    while pending:
        pid = pending.pop()
        found.add(pid)
        pending.extend(children.get(pid, []))
    return found
