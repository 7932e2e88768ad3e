"""The part of this package that cells run, and the copy of it that they import.

A cell imports a staged copy: edits made during a run change nothing in it, and the host's own site-packages never come
along on PYTHONPATH.
"""

import os
import shutil
import tempfile
import threading
from collections.abc import Mapping
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
    """Write these contents (path -> bytes) into a folder below `below` that is named by them; what is there stays."""
    staged = below / staged_name(contents)
    if staged.is_dir():
        os.utime(staged)
        return staged
    try:
        below.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=f".staging{made_by_this_process()}", dir=below))
        try:
            for name, content in contents.items():
                (building / name).parent.mkdir(parents=True, exist_ok=True)
                (building / name).write_bytes(content)
            # other users (a container's uid) read it too
            building.chmod(0o755)
            try:
                building.rename(staged)
            except OSError:
                if not staged.exists():
                    raise
        finally:
            shutil.rmtree(building, ignore_errors=True)
    except OSError as error:
        raise StorageError(
            f"{staged}: files cannot be staged for the cells: {error.strerror}",
            hint="free space there, or set TOTO_COMPAT_CACHE to another folder",
        ) from error
    return staged
