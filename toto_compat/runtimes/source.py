"""The part of this package that cells run, and the copy of it that they import.

A cell imports a staged copy: edits made during a run change nothing in it, and the host's own site-packages never come
along on PYTHONPATH.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from toto_compat.errors import StorageError
from toto_compat.evidence.files import cache_folder

PACKAGE = Path(__file__).resolve().parent.parent

# The boundary is a folder: these cross it, everything else is the host's and no cell ever sees it.
CELL_FOLDERS = ("contract", "caches", "model", "cell")
_CELL_FILES = ("__init__.py", "errors.py")


def source_files(package: Path = PACKAGE) -> list[Path]:
    """The files of the package that can change what a cell does, in a fixed order."""
    inside = (path for folder in CELL_FOLDERS for path in (package / folder).rglob("*.py"))
    return sorted([*(package / name for name in _CELL_FILES), *inside])


def hash_source(package: Path = PACKAGE) -> str:
    return hash_files({path.relative_to(package).as_posix(): path for path in source_files(package)})


def hash_files(files: Mapping[str, Path]) -> str:
    """A hash of names and contents."""
    digest = hashlib.sha256()
    for name, path in files.items():
        content = path.read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


class CellSource:
    """The cell's side of this package: its hash now, its copy when the first cell needs it."""

    def __init__(self, package: Path = PACKAGE) -> None:
        self._package = package
        self._folder: Path | None = None
        self.hash = hash_source(package)

    @property
    def folder(self) -> Path:
        """The staged copy, for PYTHONPATH. If the package was edited since, what was copied is what counts."""
        if self._folder is None:
            self._folder, self.hash = stage_source(self._package)
        return self._folder


def stage_source(package: Path = PACKAGE, cache: Path | None = None) -> tuple[Path, str]:
    """Copy the package under its own hash; return the folder for PYTHONPATH and the hash."""
    folder = stage_files(_staged_names(package), (cache or cache_folder()) / "sources")
    return folder, hash_source(folder / package.name)


def staged_name(package: Path = PACKAGE) -> str:
    """Name the folder that stage_source copies the package to, as the package is now."""
    return _folder_name(_staged_names(package))


def _staged_names(package: Path) -> dict[str, Path]:
    return {f"{package.name}/{path.relative_to(package).as_posix()}": path for path in source_files(package)}


def _folder_name(files: Mapping[str, Path]) -> str:
    return hash_files(files)[:16]


def stage_files(files: Mapping[str, Path], below: Path) -> Path:
    """A folder below `below` that holds copies of these files (path in it -> file) and is named by their content."""
    staged = below / _folder_name(files)
    if staged.is_dir():
        os.utime(staged)
        return staged
    try:
        below.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=".staging-", dir=below))
        try:
            copies = {name: building / name for name in files}
            for name, path in files.items():
                copies[name].parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copies[name])
            # an edit may have fallen between hashing and copying: what was copied names the folder
            staged = below / _folder_name(copies)
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
