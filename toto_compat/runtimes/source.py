"""Where things live on the host, and the copy of this package that cells run.

A cell imports a staged copy: edits made during a run change nothing in it, and the host's own site-packages never
come along on PYTHONPATH.
"""

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from platformdirs import user_cache_path

from toto_compat.errors import StorageError

PACKAGE = Path(__file__).resolve().parent.parent

# Never imported by a cell, so never staged: an edit there must not make stored results look outdated.
_HOST_SIDE = ("runtimes", "verdict", "report", "production", "repro", "bench", "cli.py", "evidence/store.py")
_HOST_SIDE_MATRIX = tuple(f"matrix/{name}.py" for name in ("load", "document", "check", "expand", "releases"))


def cache_folder() -> Path:
    """The user's cache folder of this tool; TOTO_COMPAT_CACHE puts it elsewhere."""
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


def source_files(package: Path = PACKAGE) -> list[Path]:
    """The files of the package that can change what a cell does, in a fixed order."""
    host_side = [package / name for name in _HOST_SIDE + _HOST_SIDE_MATRIX]
    return sorted(
        path
        for path in package.rglob("*.py")
        if "__pycache__" not in path.parts and not any(path.is_relative_to(other) for other in host_side)
    )


def hash_source(package: Path = PACKAGE) -> str:
    digest = hashlib.sha256()
    for path in source_files(package):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def stage_source(package: Path = PACKAGE, cache: Path | None = None) -> tuple[Path, str]:
    """Copy the package under its own hash; return the folder for PYTHONPATH and the hash."""
    cache = cache or cache_folder()
    source_hash = hash_source(package)
    staged = cache / "sources" / source_hash[:16]
    if (staged / package.name / "__init__.py").exists():
        os.utime(staged)
        return staged, source_hash
    try:
        staged.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=".staging-", dir=staged.parent))
        try:
            for path in source_files(package):
                target = building / package.name / path.relative_to(package)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
            # other users (a container's uid) read it too
            building.chmod(0o755)
            if hash_source(building / package.name) != source_hash:
                # an edit fell between hashing and copying: what was copied is what runs, so it names the folder
                source_hash = hash_source(building / package.name)
                staged = cache / "sources" / source_hash[:16]
            try:
                building.rename(staged)
            except OSError:
                if not staged.exists():
                    raise
        finally:
            shutil.rmtree(building, ignore_errors=True)
    except OSError as error:
        raise StorageError(
            f"{staged}: the package cannot be staged for the cells: {error.strerror}",
            hint="free space there, or set TOTO_COMPAT_CACHE to another folder",
        ) from error
    return staged, source_hash
