"""A folder whose files are code: nobody but its owner and root may be able to put anything into it."""

import os
import stat
import tempfile
from pathlib import Path

from toto_compat.errors import InputError

_MOST_LINKS = 40  # as many as Linux follows
_OTHERS = stat.S_IWGRP | stat.S_IWOTH  # with an access list, the group's bit is the most that anybody on it may


class UntrustedError(InputError):
    """Somebody else could change what is loaded from there."""


def trust_folder(folder: Path) -> Path:
    """Give the folder without links in its path; refuse it if others own it or can write to it or to what leads there.

    A parent with the sticky bit (as /tmp) lets others add files but not replace ours; the folder itself must not.
    """
    where = _trusted_path(folder)
    _refuse_writable(where, where.lstat(), what="folder")
    return where


def make_trusted_folder(folder: Path) -> Path:
    """Make the folder, for this user alone, if it is not there; the parents that are there are looked at first."""
    folder = folder.absolute()
    if not folder.is_dir():
        there = next(parent for parent in folder.parents if parent.exists())
        _trusted_path(there)
        missing = [folder, *(parent for parent in folder.parents if not parent.exists())]
        for one in reversed(missing):
            one.mkdir(mode=0o700, exist_ok=True)
    return trust_folder(folder)


def read_trusted(path: Path) -> bytes:
    """Read a file of a trusted folder; refuse a link, what is no file, and what others own or can write to."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(file.fileno())  # of what was opened, whatever has the name by now
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{path.name} is not a file")
        _refuse_owner(path, status)
        _refuse_writable(path, status, what="file")
        return file.read()


def write_trusted(path: Path, content: bytes) -> None:
    """Write a file for this user alone, whole or not at all, also when the power fails."""
    handle, temporary = tempfile.mkstemp(prefix=".writing-", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _trusted_path(folder: Path) -> Path:
    """Follow the path part by part, links too, and look at everything that decides where it leads."""
    current, links = Path("/"), 0
    parts = list(reversed(folder.absolute().parts[1:]))
    _look_at(current)
    while parts:
        part = parts.pop()
        if part == "..":
            current = current.parent
            continue
        current /= part
        status = _look_at(current)
        if stat.S_ISLNK(status.st_mode):
            links += 1
            if links > _MOST_LINKS:
                raise InputError(f"{folder}: too many links, one after the other")
            target = current.readlink()
            current = Path("/") if target.is_absolute() else current.parent
            parts += [one for one in reversed(target.parts) if one != "/"]
        elif not stat.S_ISDIR(status.st_mode):
            raise InputError(f"{current} is not a folder", hint="cache_dir is a folder")
    return current


def _look_at(path: Path) -> os.stat_result:
    try:
        status = path.lstat()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}", hint="cache_dir is a folder that this user can read") from error
    _refuse_owner(path, status)
    if stat.S_ISDIR(status.st_mode) and not status.st_mode & stat.S_ISVTX:
        _refuse_writable(path, status, what="folder")
    return status


def _refuse_owner(path: Path, status: os.stat_result) -> None:
    if status.st_uid not in (0, os.geteuid()):  # root can change anything anyway
        raise UntrustedError(
            f"{path} belongs to user {status.st_uid}, not to this one ({os.geteuid()}) or root: what is loaded from "
            "there is code",
            hint="choose a cache_dir of your own",
        )


def _refuse_writable(path: Path, status: os.stat_result, *, what: str) -> None:
    if status.st_mode & _OTHERS:
        raise UntrustedError(
            f"others can write to the {what} {path} (mode {stat.S_IMODE(status.st_mode):04o}): what is loaded from "
            "there is code",
            hint=f"chmod go-w {path}, if you know what is in it; or choose another cache_dir",
        )
