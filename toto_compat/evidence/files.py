"""Files of ours: where they are kept, written whole or not at all, and checked when they are read."""

import errno
import hashlib
import lzma
import os
import shutil
import stat
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from platformdirs import user_cache_path
from pydantic import BaseModel, ValidationError

from toto_compat.errors import StorageError
from toto_compat.evidence.left_file import is_damage, read_left_file
from toto_compat.evidence.makers import made_by_this_process

_LARGEST_FILE = 300_000_000  # a cell's file has about 0.4 MB, a series of the user's up to 268

# What zipfile and what it uses raise over a file that is no zip, a broken one, or one of a kind that it does not read.
DAMAGED_ZIP = (
    zipfile.BadZipFile,
    zipfile.LargeZipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    RuntimeError,  # with a password; NotImplementedError is one
    EOFError,
    OverflowError,
    ValueError,
)

_Model = TypeVar("_Model", bound=BaseModel)


def cache_folder() -> Path:
    """Return the user's cache folder of this tool; TOTO_COMPAT_CACHE puts it elsewhere."""
    override = os.environ.get("TOTO_COMPAT_CACHE")
    folder = Path(override).expanduser().absolute() if override else user_cache_path("toto-compat", appauthor=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"{folder}: the cache folder cannot be made: {error.strerror}",
            hint="set TOTO_COMPAT_CACHE to a folder you can write to",
        ) from error
    return folder


@contextmanager
def storage_errors(path: Path, verb: str) -> Iterator[None]:
    """Turn what the system says about a file into an error that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            hint = f"free space on the disk of {path.parent}, then run the same command again: finished cells are kept"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            hint = "make it writable, or choose another folder with --results"
        else:
            hint = "check the folder, or choose another one with --results"
        raise StorageError(f"{path}: cannot be {verb}: {error.strerror or error}", hint=hint) from error


def write_atomically(path: Path, text: str) -> None:
    """Write a file, with its folder if need be: it is whole or not there, also when the disk is full, the process is
    killed or the machine loses power. What a killed process leaves beside it, `remove_abandoned` finds by its name."""
    with storage_errors(path, "written"):
        make_folder(path.parent)
        prefix = f".{path.name[:80]}{made_by_this_process()}"
        handle, temporary = tempfile.mkstemp(prefix=prefix, suffix=".tmp", dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).chmod(0o644)
            Path(temporary).replace(path)
        except BaseException:
            _remove(Path(temporary))
            raise
        sync_folder(path.parent)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, so that they are there after a loss of power as well."""
    if folder.is_dir():
        return
    if folder.parent != folder:
        make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Have the names in a folder written to disk: the content of a file alone does not bring its name with it."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):  # file systems that know no such thing
            raise
    finally:
        os.close(handle)


def sync_files(folder: Path) -> None:
    """Have the files of a folder written to disk, and their names: before the folder gets its own name."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sync_folder(folder)


def _remove(path: Path) -> None:
    """Remove a file where that is possible: the error that led here says more than a second one."""
    with suppress(OSError):
        path.unlink(missing_ok=True)


def set_aside(path: Path, kept: Path) -> None:
    """Move what cannot be used out of the way, to be looked at, whatever it is and whatever lies there already."""
    with storage_errors(kept, "written"), suppress(FileNotFoundError):  # another runner did the same
        kept.parent.mkdir(parents=True, exist_ok=True)
        is_folder = stat.S_ISDIR(path.lstat().st_mode)
        if kept.is_dir() and not kept.is_symlink():
            shutil.rmtree(kept)
        elif is_folder:
            kept.unlink(missing_ok=True)
        path.replace(kept)


def write_model(path: Path, model: BaseModel) -> None:
    write_atomically(path, model.model_dump_json(by_alias=True, indent=1) + "\n")


def append_line(path: Path, line: str) -> None:
    """Add a line to a file; of two processes that do so at once both are kept."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with storage_errors(path, "written"), os.fdopen(os.open(path, flags, 0o644), "w", encoding="utf-8") as file:
        file.write(line + "\n")


def read_bytes(path: Path, *, follow_links: bool = False) -> bytes:
    """Read a file of ours, which may have been changed since; one of the user's own may be a link."""
    with storage_errors(path, "read"):
        return read_left_file(path, _LARGEST_FILE, follow_links=follow_links)


def read_model(path: Path, model: type[_Model]) -> _Model:
    """Read and check a file of ours; a corrupt one is an error that names the file."""
    return checked(path, model, read_bytes(path))


def checked(path: Path, model: type[_Model], content: bytes) -> _Model:
    """Return what a file holds as a model, or an error that names the file and the place in it."""
    try:
        return model.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise StorageError(
            f"{path}: not a valid {model.__name__} file: {where + ': ' if where else ''}{first['msg']}",
            hint="the file is damaged or from another version: restore it, or delete it and run the matrix again",
        ) from error


def may_be_read_later(error: Exception) -> bool:
    """Tell if what stopped a reader is not of the file itself, such as a server that is away for a while."""
    cause = error.__cause__
    return isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError) and not is_damage(cause)


def file_hash(path: Path) -> str:
    """Hash a file of the user's."""
    return hashlib.sha256(read_bytes(path, follow_links=True)).hexdigest()


def check_writable(folder: Path) -> None:
    """Find out before an hour of work whether results can be written at all."""
    probe = folder / f".writable{made_by_this_process()}"
    write_atomically(probe, "")
    with storage_errors(probe, "removed"):
        probe.unlink(missing_ok=True)
