"""One file that holds what was compiled for one key: files of inductor's cache folder, with a hash over everything."""

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

_MAGIC = b"toto-compat artifacts 1\n"
_LENGTH = struct.Struct("<Q")
_HASH_BYTES = hashlib.sha256().digest_size


class DamagedError(ValueError):
    """The bytes are not what this package wrote."""


@dataclass(frozen=True)
class ArtifactFile:
    """Holds the key that something was compiled for, and inductor's files by their path in its cache folder."""

    key: Mapping[str, str]
    files: Mapping[str, bytes]

    def to_bytes(self) -> bytes:
        sizes = {name: len(content) for name, content in self.files.items()}
        header = json.dumps({"key": dict(self.key), "files": sizes}).encode()
        body = b"".join([_MAGIC, _LENGTH.pack(len(header)), header, *self.files.values()])
        return body + hashlib.sha256(body).digest()

    @classmethod
    def from_bytes(cls, content: bytes) -> "ArtifactFile":
        """Read it, or say what is wrong with it; nothing is looked at before the hash is right."""
        if not content.startswith(_MAGIC):
            raise DamagedError("it is not a file of this version of toto-compat")
        body, written = content[:-_HASH_BYTES], content[-_HASH_BYTES:]
        if hashlib.sha256(body).digest() != written:
            raise DamagedError("its hash is wrong: it is cut off or was changed")
        try:
            return cls._from_body(body)
        except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
            raise DamagedError(f"its list of files cannot be read: {error}") from error

    @classmethod
    def _from_body(cls, body: bytes) -> "ArtifactFile":
        begin = len(_MAGIC) + _LENGTH.size
        (length,) = _LENGTH.unpack(body[len(_MAGIC) : begin])
        header: Any = json.loads(body[begin : begin + length])
        key = {str(name): str(value) for name, value in header["key"].items()}
        files, position = {}, begin + length
        for name, size in header["files"].items():
            if not _is_inside(name) or not isinstance(size, int) or size < 0:
                raise ValueError(f"{name!r} of {size!r} bytes")
            files[name] = body[position : position + size]
            position += size
        if position != len(body):
            raise ValueError("the sizes do not add up")
        return cls(key, files)

    def unpack(self, folder: Path) -> None:
        """Write the files into an empty folder of this process's own."""
        for name, content in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("xb") as file:
                file.write(content)
            path.chmod(0o700 if path.suffix == ".so" else 0o600)


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in name
