"""Upstream eager's answers as they cross the boundary of a cell: computed once, given to all who are held to them."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import Field

from toto_compat.contract.strict_model import StrictModel

REFERENCES_FOLDER = "references"  # of a work folder: where they lie when a cell starts, or when it has computed them
ANSWERS = "references.safetensors"
TRUTHS = "truths.safetensors"


class References(StrictModel):
    """Says which answers these are, by what is in their files."""

    key: str = ""  # of all that they depend on; empty: computed by the cell that was held to them
    files: dict[str, str]  # name -> SHA-256
    made: dict[str, Any] = Field(default={})  # which scenarios have an answer, as the process that computed them said


class UnusableReferencesError(Exception):
    """They are not what they are said to be: whoever needs them computes them."""


def references_of(contents: dict[str, bytes], made: dict[str, Any], key: str = "") -> References:
    return References(key=key, files={name: _hash(content) for name, content in contents.items()}, made=made)


def read_references(
    folder: Path, told: References, read: Callable[[Path], bytes] = Path.read_bytes
) -> dict[str, bytes]:
    """Read all files of a folder that are told of; UnusableReferencesError unless they are exactly those."""
    if set(told.files) != {ANSWERS, TRUTHS}:
        raise UnusableReferencesError(f"{folder}: told of {', '.join(sorted(told.files)) or 'no file'}")
    contents = {}
    for name, expected in told.files.items():
        try:
            contents[name] = read(folder / name)
        except OSError as error:
            raise UnusableReferencesError(f"{folder / name}: {error.strerror}") from error
        if _hash(contents[name]) != expected:
            raise UnusableReferencesError(f"{folder / name}: not the file that it is said to be")
    return contents


def write_references(folder: Path, contents: dict[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content)


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
