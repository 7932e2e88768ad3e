"""The one way in which a file is read that a cell, a node or another machine left. Needs the standard library alone."""

import errno
import os
import stat
from pathlib import Path

# What is wrong with a file itself, which another look finds as well. Any other error may be of the way to it, such as a
# server that is away for a while
_OF_THE_FILE = frozenset({errno.ELOOP, errno.EINVAL, errno.EFBIG, errno.ENXIO, errno.EISDIR, errno.ENAMETOOLONG})


def is_damage(error: OSError) -> bool:
    """Tell if a file that cannot be read is no file of ours; else it may be read later."""
    return error.errno in _OF_THE_FILE


def read_left_file(
    path: str | Path,
    largest: int,
    *,
    in_folder: int | None = None,
    end_only: bool = False,
    follow_links: bool = False,
) -> bytes:
    """Read a file that somebody else left, who may have put anything there: no link is followed, no pipe waited for.

    A file larger than `largest` bytes is an error, or only its end is read. `in_folder` is an open folder that `path`
    lies in.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow_links else os.O_NOFOLLOW)
    try:
        handle = os.open(path, flags, dir_fd=in_folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a link", str(path)) from error
        raise
    try:
        facts = os.fstat(handle)
        if not stat.S_ISREG(facts.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        if facts.st_size > largest and not end_only:
            raise OSError(errno.EFBIG, f"it is larger than {largest / 1e6:.0f} MB", str(path))
        with os.fdopen(handle, "rb", closefd=False) as file:
            file.seek(max(0, facts.st_size - largest))
            # not `largest`: so much would be allocated before anything is read
            return file.read(min(largest, facts.st_size))
    finally:
        os.close(handle)
