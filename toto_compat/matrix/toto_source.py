"""Which toto-ts an environment has: a release of the package index, or a user's own fork.

A fork is a wheel, a checkout or a commit of a git repository. Its content is part of the environment's identity.
"""

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from packaging.version import Version

from toto_compat.errors import EnvironmentBuildError

ACCEPTED = (
    "a release such as 0.2.0, the path of a checkout or wheel, or git+https://host/fork@<the 40 digits of a commit>"
)
_GIT = re.compile(r"git\+(?P<url>(https?|ssh|file)://\S+)@(?P<commit>[0-9a-f]{40})")
_NOT_SOURCE = frozenset({"__pycache__", "build", "dist", "venv", "node_modules"})


def without_password(address: str) -> str:
    """Take out the name and password that may stand in an address, before it is shown, logged or stored."""
    return re.sub(r"//[^/@\s]*@", "//", address)


@dataclass(frozen=True)
class TotoSource:
    """A fork. `place` is a path or a repository's address, `commit` that of a git repository."""

    kind: Literal["wheel", "checkout", "git"]
    place: str
    commit: str = ""

    @property
    def shown(self) -> str:
        """Write the place as it may be shown: an address without the name and password that may stand in it."""
        return without_password(self.place) if self.kind == "git" else self.place

    @property
    def identity(self) -> str:
        """Say what is in it, wherever it lies; EnvironmentBuildError if it cannot be read."""
        if self.kind == "git":
            return f"git commit {self.commit}"
        path = Path(self.place)
        try:
            if self.kind == "wheel":
                return f"wheel sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}"
            digest = hashlib.sha256()
            for name, file in source_files(path).items():
                content = file.read_bytes()
                digest.update(f"{name}\0{len(content)}\0".encode() + content)
        except OSError as error:
            raise EnvironmentBuildError(
                f"toto_ts {path}: cannot be read: {error.strerror}", hint="check the path in matrix.yaml"
            ) from error
        return f"checkout sha256 {digest.hexdigest()}"


def source_files(checkout: Path) -> dict[str, Path]:
    """List by name the files of a checkout that make up a wheel; nothing hidden, built or compiled."""
    files = {}
    for folder, folders, names in os.walk(checkout):
        folders[:] = sorted(one for one in folders if _is_source(one))
        for name in sorted(one for one in names if _is_source(one)):
            path = Path(folder, name)
            files[path.relative_to(checkout).as_posix()] = path
    return files


def _is_source(name: str) -> bool:
    return name not in _NOT_SOURCE and not name.startswith(".") and not name.endswith((".egg-info", ".pyc"))


def toto_source(text: str) -> TotoSource | None:
    """Read `toto_ts:` of an environment; None for a release. ValueError says what is wrong with it."""
    if is_release(text):
        return None
    if text.startswith("git+"):
        match = _GIT.fullmatch(text)
        if match is None:
            raise ValueError("it names no whole commit: a branch or tag moves, `git ls-remote` says where it is")
        return TotoSource("git", match["url"], match["commit"])
    path = Path(text).expanduser()
    try:
        if path.suffix == ".whl" and path.is_file():
            return TotoSource("wheel", str(path))
        if path.is_dir() and any((path / name).is_file() for name in ("pyproject.toml", "setup.py")):
            return TotoSource("checkout", str(path))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    raise ValueError(f"there is no wheel and no checkout with a pyproject.toml at {path}")


def is_release(text: str) -> bool:
    try:
        Version(text)
    except ValueError:  # of a number that is too long for Python, too
        return False
    return True


def absolute(text: str, folder: Path) -> str:
    """Make its path independent of the working directory: `folder` is the matrix file's."""
    if is_release(text) or text.startswith("git+"):
        return text
    return str((folder / Path(text).expanduser()).resolve())
