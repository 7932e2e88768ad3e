"""Lines of a log -> events. One streaming pass, constant memory."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from re import Match
from typing import Protocol

from toto_compat.contract.events import Event
from toto_compat.contract.failure_messages import FailureParser
from toto_compat.contract.log_line import LogLine, printable
from toto_compat.contract.torch_messages import CONTINUATION
from toto_compat.logs.lines import (
    LONGEST_JSON,
    place_in_prefix,
    process_in_prefix,
    read_line,
    read_row,
    without_prefix,
)
from toto_compat.logs.scan import Scanner, scanner
from toto_compat.logs.times import time_in
from toto_compat.logs.wrapped import CUT_HEADS, may_be_cut, mended, width_of

# A line without any of these cannot begin an event. Wherever a beginning is wrapped, one of its literals stays whole.
LITERALS = (
    "hit config.",
    "_limit (",
    "Recompil",
    "ing function",
    "Graph break",
    "user code at",
    "annot properly resume",
    "from `Tensor.item",
    "cudagr",
    "aphs due to",
    "partition due to",
    "graph partitions:",
    "_maybe_guard_rel",
    "non-relation expression",
    "Using torch.com",
    "pile for",
    "decode step",
    "context pass",
    "patch draws",
    "of at most",
    "convert_frame.py:",
    # failures
    "Traceback (most recent",
    "output of CUDAGraphs",
    "has been overwritten",
    "ut of memory",
    "OutOfMemoryError",
    "_dynamo.exc.",
    "_inductor.exc.",
    "triton.compiler.",
    "triton.runtime.",
    "Triton Error [",
    "Triton compilation",
    "invalid value",
    "returned nan values",
    "contains either `inf`",
    "All-NaN",
    " NaN",
    "NaN in ",
)
BYTE_LITERALS = tuple(literal.encode() for literal in LITERALS)
_MAY_BEGIN = re.compile("|".join(map(re.escape, LITERALS)))
# What a line must hold to be more to an unfinished event than a line that passes; colours may cut any word.
_MAY_GO_ON = re.compile(
    rb"function: '|last reason:|triggered by|- |File \"|Reason: |Traceback|torch\._dynamo\.exc\.|reason="
    rb"|To log |To diag|from user code:|direct cause of the|During handling of"
    rb"|[VDIWEC]\d{4} \d\d:\d\d:\d\d|\\n|\"|\x1b|\r"
)
_CUT_HEADS = tuple(head.encode() for head in CUT_HEADS)
_LONGEST_PREFIX = 200  # behind it a time is part of the message
_BLOCK = 1 << 18  # what is scanned and then counted is still in the processor's cache


@cache
def _quickest_scanner() -> Scanner:
    return scanner(BYTE_LITERALS)


def parse_lines(lines: Iterable[str], source: str) -> Iterator[Event]:
    """Yield the events in these lines, each as soon as it is complete. `source` is a file name."""
    parser = LogParser(source)
    for number, raw in enumerate(lines, start=1):
        yield from parser.feed(raw, number)
    yield from parser.close()


class Readable(Protocol):
    """Gives bytes: a file, unpacked or not, or a pipe."""

    def readinto(self, buffer: memoryview, /) -> int | None:
        """Fill the buffer as far as there is something; 0 at the end."""


def parse_stream(stream: Readable, source: str) -> Iterator[Event]:
    """Yield the same from bytes, many times as quick."""
    parser = BlockParser(source)
    yield from parser.read(stream)
    yield from parser.close()


class BlockParser:
    """Parses the lines around what a scan finds, and only counts the others: for big logs, and logs that grow."""

    def __init__(self, source: str, scan: Scanner | None = None, block: int = _BLOCK) -> None:
        self._lines = LogParser(source)
        self._scan = scan or _quickest_scanner()
        self._number = 0  # lines taken so far
        # One buffer for all of the log: fresh memory for each block costs as much as the scan.
        self._buffer = bytearray(LONGEST_JSON + block)
        self._held = 0  # bytes at its beginning, of a line whose end has not come yet
        self._block = block

    def read(self, stream: Readable) -> Iterator[Event]:
        """Take all that the stream has now; the rest of an unfinished line may come with a later one."""
        buffer, view = self._buffer, memoryview(self._buffer)
        while got := stream.readinto(view[self._held : self._held + self._block]):
            length = self._without_zeros(self._held + got)
            end = buffer.rfind(b"\n", self._held, length)
            if end < 0:
                self._held = length
                if length < LONGEST_JSON:
                    continue
                end = length  # no log has such a line, but a parser must not hold all of what has
            yield from self._take_lines(end)
            self._held = max(0, length - end - 1)
            buffer[: self._held] = buffer[end + 1 : length]

    def settle(self) -> Iterator[Event]:
        """Tell what is unfinished as it is: nothing more has come for a while."""
        yield from self._lines.close()

    def _without_zeros(self, length: int) -> int:
        """Take zero bytes out of what was read: the holes of a cut log, and every other byte of UTF-16."""
        if self._buffer.find(0, self._held, length) < 0:
            return length
        cleaned = self._buffer[self._held : length].replace(b"\x00", b"")
        self._buffer[self._held : self._held + len(cleaned)] = cleaned
        return self._held + len(cleaned)

    def close(self) -> Iterator[Event]:
        """Yield what only the end of the log completes."""
        if self._held:
            yield from self._take_lines(self._held)
            self._held = 0
        yield from self._lines.close()

    def _take_lines(self, end: int) -> Iterator[Event]:
        """Take the lines in the buffer up to `end`, where the newline of the last one stands."""
        parser, block, number = self._lines, self._buffer, self._number
        scan = self._scan(block, end)
        begins = 0  # of the next line
        while begins <= end:
            hit = scan.next_at(begins)
            if parser.idle:
                line = block.rfind(b"\n", begins, hit) + 1 if hit >= 0 else end + 1
                if line > begins:
                    number += block.count(b"\n", begins, line - 1) + 1
                    # An event may have been wrapped after the last of the lines that are only counted.
                    last = max(block.rfind(b"\n", begins, line - 1) + 1, begins, line - LONGEST_JSON)
                    parser.skip(bytes(block[last : line - 1]))
                    begins = line
                if hit < 0:
                    break
            ends = block.find(b"\n", begins, end)
            if ends < 0:
                ends = end
            raw = bytes(block[begins:ends])
            number += 1
            if not begins <= hit < ends and parser.only_waits and not _may_go_on(raw):
                yield from parser.pass_by(raw)
            else:
                yield from parser.feed(raw.decode("utf-8", "replace"), number)
            begins = ends + 1
        self._number = number


class LogParser(FailureParser):
    """Reads the prefixes of a log, and mends events that its lines were wrapped in."""

    def __init__(self, source: str) -> None:
        super().__init__(source, without_prefix)
        self._expects_rest = False  # the last line looked like the first half of a wrapped beginning
        self._used = False  # the last line began an event or went into one
        self._raw = ""
        self._in_field = False  # the last line left the field of a CSV export open
        self._held: tuple[str, int, int] | None = None  # a line that may be cut, its number, the width of its pieces
        self.previous = ""
        self.previous_bytes: bytes | None = None  # decoded only if it is needed

    @property
    def idle(self) -> bool:
        """Say whether nothing is unfinished: a line that begins nothing can then be skipped unseen."""
        return not self._open and not self._tracebacks and not self._expects_rest and self._held is None

    @property
    def only_waits(self) -> bool:
        """Tell whether only a line that says so itself can belong to what is unfinished."""
        if self._expects_rest or self._tracebacks or self._held is not None:
            return False
        return not any(block.awaits_reason or block.awaits_location or block.exception_due for block in self._open)

    def skip(self, raw: bytes) -> None:
        """Note the last of the lines that were skipped."""
        self.previous_bytes = raw

    def pass_by(self, raw: bytes) -> Iterator[Event]:
        """Take one physical line that can neither begin an event nor belong to one."""
        self.previous_bytes = raw
        yield from self._wait()

    def feed(self, raw: str, number: int) -> Iterator[Event]:
        """Take one physical line."""
        if self.previous_bytes is not None:
            self.previous, self.previous_bytes = self.previous_bytes.decode("utf-8", "replace"), None
        raw = self._unquoted(raw.replace("\x00", ""))
        width = 0
        if self._held is not None:
            (head, first, width), self._held = self._held, None
            whole = mended(head, raw, width)
            if whole is None:
                width = 0
                yield from self._read(head, first)
        else:
            whole, first = None, number - 1
            if self.previous and (_may_begin(raw) or (not self.idle and CONTINUATION.search(raw))):
                whole = mended(self.previous, raw)
                width = width_of(self.previous) if whole is not None else 0
        if whole is not None:
            raw, number = self._unquoted(whole), first
        if may_be_cut(raw) and self._is_awaited(raw):
            self._held = raw, number, width or width_of(raw)
        else:
            yield from self._read(raw, number)

    def close(self) -> Iterator[Event]:
        """Take the last line as it is."""
        if self._held is not None:
            (head, number, _), self._held = self._held, None
            yield from self._read(head, number)
        yield from super().close()

    def _unquoted(self, raw: str) -> str:
        if '"' not in raw:
            return raw
        inside = self._in_field and not self.idle
        raw, self._in_field = read_row(raw, _is_message, inside=inside)
        return raw

    def _is_awaited(self, raw: str) -> bool:
        """Tell whether a line would be read if all others were passed by: only such a one can wait for its rest."""
        return (not self.idle and _may_go_on(raw.encode("utf-8", "replace"))) or _may_begin(raw)

    def _read(self, raw: str, number: int) -> Iterator[Event]:
        self._expects_rest = False
        self._used = False
        self._raw = raw
        for line in read_line(raw, number):
            yield from self.take(line)
        # A line that said something is complete: only one that did not can be the first half of a wrapped beginning.
        self.previous = "" if self._used else raw

    def _beginning(self, line: LogLine) -> tuple[LogLine, Match[str] | None]:
        """Find where an event begins in this line, or in this and the previous one where a beginning was wrapped."""
        begins = self._search(line)
        if begins:
            self._used = True
            prefix = "" if line.torch_prefix else line.text[: begins.start()]
            line = LogLine(
                line.number,
                line.text,
                line.process or (process_in_prefix(prefix) if prefix else ""),
                line.torch_prefix,
                line.logged_from or (place_in_prefix(prefix) if prefix else ""),
                line.compile_id,
                line.time or _time_in_prefix(self._raw),
            )
            return line, begins
        wrapped = self._wrapped_beginning(line)
        if wrapped is not None:
            self._used = True
            return wrapped
        self._expects_rest = _may_begin(line.text)
        return line, None

    def _wrapped_beginning(self, line: LogLine) -> tuple[LogLine, Match[str]] | None:
        if not self.previous or not _may_begin(f"{self.previous[-200:]} {line.text[:200]}"):
            return None
        earlier = list(read_line(self.previous, line.number))[-1]
        head = earlier.text.rstrip()
        # A terminal cuts anywhere, a formatter at a space: that the words fit without one is tried first.
        for glue in (" ", "") if head.endswith(",") else ("", " "):
            whole = LogLine(
                line.number - 1,
                f"{head}{glue}{without_prefix(line.text).lstrip()}",
                earlier.process or line.process,
                earlier.torch_prefix,
                earlier.logged_from or line.logged_from,
                earlier.compile_id or line.compile_id,
                earlier.time or line.time or _time_in_prefix(self.previous),
            )
            begins = self._search(whole)
            if begins and begins.start() < len(head) < begins.end():
                return whole, begins
        return None

    def _continue(self, line: LogLine) -> bool:
        if not line.torch_prefix and not line.process and (goes_on := CONTINUATION.search(line.text)):
            line = replace(line, process=process_in_prefix(line.text[: goes_on.start()]))
        belongs = super()._continue(line)
        self._used = self._used or belongs
        return belongs


def _time_in_prefix(raw: str) -> str:
    """Find the time in a prefix, which colours may stand in and before."""
    text = raw[: 2 * _LONGEST_PREFIX]
    return time_in((printable(text) if "\x1b" in text else text)[:_LONGEST_PREFIX])


def _may_go_on(raw: bytes) -> bool:
    return _MAY_GO_ON.search(raw) is not None or (b"  " in raw and raw.rstrip().endswith(_CUT_HEADS))


def _is_message(text: str) -> bool:
    return _may_begin(text) or CONTINUATION.search(text) is not None


def _may_begin(text: str) -> bool:
    return _MAY_BEGIN.search(text) is not None
