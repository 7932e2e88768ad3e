"""The identity of the code that a cell runs: a verdict names it, and a service compares its own with it."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent

# The boundary is a folder: these cross it, everything else is the host's and no cell ever sees it.
CELL_FOLDERS = ("contract", "caches", "model", "cell")
_CELL_FILES = ("__init__.py", "errors.py")


def source_files(package: Path = PACKAGE) -> list[Path]:
    """The files of the package that can change what a cell does, in a fixed order."""
    inside = (path for folder in CELL_FOLDERS for path in (package / folder).rglob("*.py"))
    return sorted([*(package / name for name in _CELL_FILES), *inside])


def read_source(package: Path = PACKAGE) -> dict[str, bytes]:
    """Read the package's cell side, by the path of each file in a staged copy."""
    inside = {path: path.relative_to(package).as_posix() for path in source_files(package)}
    return {f"{package.name}/{name}": path.read_bytes() for path, name in inside.items()}


def hash_contents(contents: Mapping[str, bytes]) -> str:
    """Hash names and contents."""
    digest = hashlib.sha256()
    for name, content in contents.items():
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()
