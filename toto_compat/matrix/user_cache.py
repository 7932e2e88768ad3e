"""A cache of the user's own, `path/to/file.py:Class`: the files it consists of, found without importing any of them."""

import ast
import hashlib
import io
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

from toto_compat.errors import InputError

BUILTIN = "builtin"
_THE_ENVIRONMENTS = frozenset({"toto_compat", "torch", "toto", "numpy"})


def split_source(source: str) -> tuple[Path, str]:
    """Split 'path/to/file.py:Class' into the file and the name of the class."""
    file, _, class_name = source.rpartition(":")
    return Path(file), class_name


def user_cache_identity(source: str) -> str:
    """Return what a cache's source stands for: 'builtin', or the content of its files and the class in them."""
    if source == BUILTIN:
        return source
    file, class_name = split_source(source)
    digest = hashlib.sha256()
    for name, content in user_cache_files(file).items():
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return f"{digest.hexdigest()}:{class_name}"


def user_cache_files(file: Path) -> dict[str, bytes]:
    """Read the file and every file of its own folder that it imports, directly or not, by their path in that folder.

    Only `import` statements are followed, and a package is taken whole. A module that is named like one of Python's
    own, or like what the environment brings, is that one.
    """
    folder = file.parent
    contents: dict[str, bytes] = {}
    queue = [file]
    while queue:
        path = queue.pop()
        name = path.relative_to(folder).as_posix()
        if name in contents:
            continue
        contents[name] = _read(path)
        try:
            modules = list(_imported(contents[name], path))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            if path == file:
                raise InputError(f"{path}: not readable Python: {error}") from error
            continue  # whoever imports it will say so, in the cell
        for module in modules:
            queue += _files_of_module(folder, module)
    return dict(sorted(contents.items()))


def decoded_code(content: bytes) -> tuple[str, str]:
    """Return the text of a Python file and its encoding, which the file may name itself; what is neither is UTF-8."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        return content.decode(encoding), encoding
    except (SyntaxError, UnicodeDecodeError, LookupError):
        return content.decode("utf-8", "replace"), "utf-8"


def _imported(content: bytes, path: Path) -> Iterator[str]:
    """Name what a file imports, at the top level; relative imports stay inside a package, taken whole."""
    for node in ast.walk(ast.parse(content, filename=str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0]


def _files_of_module(folder: Path, module: str) -> list[Path]:
    if module in sys.stdlib_module_names or module in _THE_ENVIRONMENTS:
        return []
    if (folder / module).is_dir():
        return sorted(path for path in (folder / module).rglob("*.py") if path.is_file())
    single = folder / f"{module}.py"
    return [single] if single.is_file() else []


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}", hint="check `source` in matrix.yaml") from error
