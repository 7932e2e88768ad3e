"""Timing needs a quiet machine: cells that run at the same time share a lock that a timing loop takes for itself.

Two files: everything holds the lock shared while it works, a timing loop holds it exclusively. The turnstile beside it
is held by a timing loop from the moment it starts to wait, so that a stream of sharers cannot starve it. Nobody waits
for the turnstile or for the exclusive lock while holding the shared one, so nobody can wait in a circle.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class QuietLock:
    """One process's view of the lock. Without a path every call is free: a cell that runs alone needs no lock."""

    def __init__(self, path: str | None) -> None:
        self._lock: int | None = None
        self._turnstile: int | None = None
        if path is not None:
            self._lock = _open_lock_file(Path(path))
            self._turnstile = _open_lock_file(Path(f"{path}.turnstile"))

    @contextmanager
    def working(self) -> Iterator[None]:
        """Hold the lock shared."""
        self._share()
        try:
            yield
        finally:
            self._release()

    def give_way(self) -> None:
        """Between two pieces of work: let a waiting timing loop of another cell go first."""
        if self._lock is None or self._turnstile is None:
            return
        try:
            fcntl.flock(self._turnstile, fcntl.LOCK_SH | fcntl.LOCK_NB)
            fcntl.flock(self._turnstile, fcntl.LOCK_UN)
        except BlockingIOError:
            self._release()
            self._share()

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Hold the lock exclusively; called while it is held shared, and returns to that."""
        if self._lock is None or self._turnstile is None:
            yield
            return
        self._release()
        fcntl.flock(self._turnstile, fcntl.LOCK_EX)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)
            fcntl.flock(self._turnstile, fcntl.LOCK_UN)
            self._share()

    def _share(self) -> None:
        if self._lock is None or self._turnstile is None:
            return
        fcntl.flock(self._turnstile, fcntl.LOCK_SH)
        fcntl.flock(self._turnstile, fcntl.LOCK_UN)
        fcntl.flock(self._lock, fcntl.LOCK_SH)

    def _release(self) -> None:
        if self._lock is not None:
            # an explicit unlock also frees the lock for descriptors that a forked compile worker inherited
            fcntl.flock(self._lock, fcntl.LOCK_UN)


def _open_lock_file(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError:
        # in a container the runner's lock file is mounted read-only, which is enough for flock
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
