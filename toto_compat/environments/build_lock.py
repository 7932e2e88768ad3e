"""One builder of an environment at a time, and how a builder says what it does."""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

OnLine = Callable[[str], None]


@contextmanager
def build_lock(path: Path, environment_name: str, say: OnLine) -> Iterator[None]:
    """Hold a lock while an environment is built; the kernel frees it however the builder ends.

    A link in its place is not followed, and nothing is done to what is there but to lock it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o644), "rb+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"{environment_name}: another run is building it, waiting for that")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
