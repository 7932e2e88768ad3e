"""A cache of the user's own, `path/to/file.py:Class`: the files it consists of, found without importing any of them."""

import ast
import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

from toto_compat.errors import InputError

BUILTIN = "builtin"


def split_source(source: str) -> tuple[Path, str]:
    """'path/to/file.py:Class' -> the file and the name of the class."""
    file, _, class_name = source.rpartition(":")
    return Path(file), class_name


def user_cache_identity(source: str) -> str:
    """Return what a cache's source stands for: 'builtin', or the content of its files and the class in them."""
    if source == BUILTIN:
        return source
    file, class_name = split_source(source)
    digest = hashlib.sha256()
    for name, path in user_cache_files(file).items():
        content = _read(path)
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return f"{digest.hexdigest()}:{class_name}"


def user_cache_files(file: Path) -> dict[str, Path]:
    """The file and every file of its own folder that it imports, directly or not, by their path in that folder.

    Only `import` statements are followed. A package is taken whole. A module that is named like one of Python's own is
    Python's.
    """
    folder = file.parent
    files: dict[str, Path] = {}
    queue = [file]
    while queue:
        path = queue.pop()
        name = path.relative_to(folder).as_posix()
        if name in files:
            continue
        files[name] = path
        for module in _imported(path):
            queue += _files_of_module(folder, module)
    return dict(sorted(files.items()))


def _imported(path: Path) -> Iterator[str]:
    """Top-level names that a file imports; relative imports stay inside a package, which is taken whole."""
    try:
        tree = ast.parse(_read(path), filename=str(path))
    except (SyntaxError, ValueError) as error:
        raise InputError(f"{path}: not readable Python: {error}") from error
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0]


def _files_of_module(folder: Path, module: str) -> list[Path]:
    if module in sys.stdlib_module_names:
        return []
    package = folder / module
    if (package / "__init__.py").is_file():
        return sorted(path for path in package.rglob("*.py") if path.is_file())
    single = folder / f"{module}.py"
    return [single] if single.is_file() else []


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}", hint="check `source` in matrix.yaml") from error
