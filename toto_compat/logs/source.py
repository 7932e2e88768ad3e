"""The bytes of a log, whatever it is packed or encoded in. What comes out is text as UTF-8, as far as it is text."""

import codecs
import gzip
import io
import re
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from toto_compat.errors import InputError

STANDARD_INPUT = "standard input"
_UTF_16 = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}


@contextmanager
def opened_log(path: str, name: str) -> Iterator[io.BufferedReader]:
    """Open a log as bytes of UTF-8; '-' is standard input. What is not a readable log is an InputError."""
    with explained(name), _opened(path) as stream:
        head = stream.peek(8192)[:8192]
        encoding = _UTF_16.get(head[:2])
        if encoding is None and _is_binary(head):
            raise InputError(
                f"{name} is not a log: it holds binary data",
                hint="Give the text log of the application (plain or .gz), not a core dump, trace or database file.",
            )
        yield io.BufferedReader(_Utf8(stream, encoding)) if encoding else stream


class _Utf8(io.RawIOBase):
    """Reads UTF-16 as UTF-8."""

    def __init__(self, stream: io.BufferedReader, encoding: str) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder(encoding)("replace")
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "memoryview") -> int:  # type: ignore[override]
        while not self._ready:
            chunk = self._stream.read(1 << 16)
            # surrogatepass: what only half of a pair encodes is replaced when the line is read
            self._ready = self._decoder.decode(chunk, final=not chunk).encode("utf-8", "surrogatepass")
            if not chunk:
                break
        taken, self._ready = self._ready[: len(buffer)], self._ready[len(buffer) :]
        buffer[: len(taken)] = taken
        return len(taken)


@contextmanager
def _opened(path: str) -> Iterator[io.BufferedReader]:
    if path == "-":
        yield _unpacked(io.BufferedReader(cast(io.RawIOBase, sys.stdin.buffer)))
        return
    with Path(path).open("rb") as file:
        yield _unpacked(file)


def _unpacked(stream: io.BufferedReader) -> io.BufferedReader:
    if stream.peek(2)[:2] == b"\x1f\x8b":
        return io.BufferedReader(cast(io.RawIOBase, gzip.GzipFile(fileobj=stream)))
    return stream


@contextmanager
def explained(name: str) -> Iterator[None]:
    """Turn what can be wrong with a file into what to do about it, whichever command reads it."""
    try:
        yield
    except FileNotFoundError:
        raise InputError(f"{name}: there is no such file", hint="Check the path; '-' reads standard input.") from None
    except IsADirectoryError:
        raise InputError(f"{name} is a folder", hint=f"Name a log in it instead: {name}/*.log") from None
    except PermissionError:
        raise InputError(
            f"{name}: no permission to read it",
            hint="Read it as its owner and pipe it, with - as the name of the log",
        ) from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(
            f"{name}: the gzip data is damaged or cut off ({error})",
            hint="Unpack what is left with zcat into a file, and give that as the log.",
        ) from None
    except OSError as error:
        raise InputError(
            f"{name} cannot be read: {error.strerror or error}", hint="Copy the log to a local disk and try again."
        ) from None


# Text as UTF-16 without a mark, as Windows' shell appends it to any file; and the hole that a log begins with which was
# cut while its writer kept its position.
_ZEROS_IN_TEXT = re.compile(rb"(?:[\t-~]\x00){4,}|(?:\x00[\t-~]){4,}|\x00{16,}")


def _is_binary(head: bytes) -> bool:
    text = _ZEROS_IN_TEXT.sub(b"", head)
    if not text:
        return head == b"\x00" * len(head) and bool(head)
    return text.count(0) > 8 or sum(byte < 9 or 13 < byte < 27 for byte in text) > max(8, len(text) // 10)
