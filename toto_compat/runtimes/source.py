"""The part of this package that cells run, and the copy of it that they import.

A cell imports a staged copy: edits made during a run change nothing in it, and the host's own site-packages never come
along on PYTHONPATH.
"""

import os
import shutil
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from toto_compat.contract.source_hash import CELL_FOLDERS, PACKAGE, hash_contents, read_source, source_files
from toto_compat.errors import StorageError
from toto_compat.evidence.files import cache_folder
from toto_compat.evidence.makers import made_by_this_process

__all__ = [
    "CELL_FOLDERS",
    "PACKAGE",
    "CellSource",
    "hash_contents",
    "read_source",
    "source_files",
    "stage",
    "staged_name",
]


class CellSource:
    """The cell's side of this package as it was when this was made: edits during a run change nothing in it.

    It is read at once and written where cells can see it when the first of them needs that.
    """

    def __init__(self, package: Path = PACKAGE) -> None:
        self._contents = read_source(package)
        self._guard = threading.Lock()
        self._folder: Path | None = None
        self.hash = hash_contents(self._contents)

    @property
    def name(self) -> str:
        """Return its short name, for folders in the cache that are of this source and no other."""
        return staged_name(self._contents)

    @property
    def folder(self) -> Path:
        """Return the staged copy, for PYTHONPATH."""
        with self._guard:
            if self._folder is None:
                self._folder = stage(self._contents, cache_folder() / "sources")
            return self._folder


def staged_name(contents: Mapping[str, bytes]) -> str:
    """Name the folder that these contents are staged in."""
    return hash_contents(contents)[:16]


def stage(contents: Mapping[str, bytes], below: Path) -> Path:
    """Write these contents (path -> bytes) into a folder below `below` that is named by them; what is there stays.

    What is there is looked at: after a loss of power a file may be empty, whatever its folder's name says."""
    staged = below / staged_name(contents)
    try:
        if _holds(staged, contents):
            os.utime(staged)
            return staged
        below.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=f".staging{made_by_this_process()}", dir=below))
        try:
            new = building / "new"
            new.mkdir()
            for name, content in contents.items():
                (new / name).parent.mkdir(parents=True, exist_ok=True)
                (new / name).write_bytes(content)
            # other users (a container's uid) read it too
            new.chmod(0o755)
            with suppress(FileNotFoundError):
                staged.rename(building / "damaged")
            try:
                new.rename(staged)
            except OSError:
                if not _holds(staged, contents):
                    raise
        finally:
            shutil.rmtree(building, ignore_errors=True)
    except OSError as error:
        raise StorageError(
            f"{staged}: files cannot be staged for the cells: {error.strerror}",
            hint="free space there, or set TOTO_COMPAT_CACHE to another folder",
        ) from error
    return staged


def _holds(staged: Path, contents: Mapping[str, bytes]) -> bool:
    """Tell if these files are there, whole; what a cell left beside them says nothing."""
    try:
        return all((staged / name).read_bytes() == content for name, content in contents.items())
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return False
