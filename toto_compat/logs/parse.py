"""Lines of a log -> events. One streaming pass, constant memory."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from re import Match
from typing import BinaryIO

from toto_compat.contract.events import Event
from toto_compat.contract.torch_messages import BEGINNING, CONTINUATION, LogLine, MessageParser
from toto_compat.logs.lines import LONGEST_JSON, place_in_prefix, process_in_prefix, read_line, without_prefix

# A line without any of these cannot begin an event. Plain substrings: that is what keeps up with grep.
_TOKENS = (
    "cudagraph",
    "raph break",
    "_limit",
    "Recompiling",
    "_maybe_guard_rel",
    "torch.compile for",
    "decode step for",
    "convert_frame.py:",
)
_BYTE_TOKENS = tuple(token.encode() for token in _TOKENS)

_CHUNK = 1 << 17  # small, since a block in which something begins is looked at line by line


def parse_lines(lines: Iterable[str], source: str) -> Iterator[Event]:
    """The events in these lines, each as soon as it is complete. `source` is a file name."""
    parser = LogParser(source)
    for number, raw in enumerate(lines, start=1):
        if parser.idle and not _may_begin(raw):
            parser.previous = raw
        else:
            yield from parser.feed(raw, number)
    yield from parser.close()


def parse_stream(stream: BinaryIO, source: str) -> Iterator[Event]:
    """The same for bytes, skipping a whole block of lines at a time where nothing begins: for big logs."""
    parser = LogParser(source)
    number = 0
    rest = b""
    while chunk := stream.read(_CHUNK):
        head, newline, tail = chunk.rpartition(b"\n")
        if not newline and len(rest) < LONGEST_JSON:
            rest += chunk
            continue
        block, rest = (rest + head, tail) if newline else (rest, chunk)
        if parser.idle and not any(token in block for token in _BYTE_TOKENS):
            number += block.count(b"\n") + 1
            parser.previous = block.rpartition(b"\n")[2][-LONGEST_JSON:].decode("utf-8", "replace")
            continue
        for raw_bytes in block.split(b"\n"):
            number += 1
            if parser.idle and not any(token in raw_bytes for token in _BYTE_TOKENS):
                parser.previous_bytes = raw_bytes
                continue
            yield from parser.feed(raw_bytes.decode("utf-8", "replace"), number)
    if rest and not (parser.idle and not any(token in rest for token in _BYTE_TOKENS)):
        yield from parser.feed(rest.decode("utf-8", "replace"), number + 1)
    yield from parser.close()


class LogParser(MessageParser):
    """Reads the prefixes of a log, and mends events that its lines were wrapped in."""

    def __init__(self, source: str) -> None:
        super().__init__(source, without_prefix)
        self._expects_rest = False  # the last line looked like the first half of a wrapped beginning
        self._used = False  # the last line began an event or went into one
        self.previous = ""
        self.previous_bytes: bytes | None = None  # decoded only if it is needed

    @property
    def idle(self) -> bool:
        """Nothing is unfinished: a line that begins nothing can be skipped unseen."""
        return not self._open and not self._expects_rest

    def feed(self, raw: str, number: int) -> Iterator[Event]:
        """Take one physical line."""
        if self.previous_bytes is not None:
            self.previous, self.previous_bytes = self.previous_bytes.decode("utf-8", "replace"), None
        self._expects_rest = False
        self._used = False
        for line in read_line(raw, number):
            yield from self.take(line)
        # A line that said something is complete: only one that did not can be the first half of a wrapped beginning.
        self.previous = "" if self._used else raw

    def _beginning(self, line: LogLine) -> tuple[LogLine, Match[str] | None]:
        """Find where an event begins in this line, or in this and the previous one where a beginning was wrapped."""
        begins = BEGINNING.search(line.text)
        if begins:
            self._used = True
            if not line.torch_prefix:
                prefix = line.text[: begins.start()]
                line = replace(
                    line,
                    process=line.process or process_in_prefix(prefix),
                    logged_from=line.logged_from or place_in_prefix(prefix),
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
        for glue in (" ", ""):
            joined = f"{head}{glue}{without_prefix(line.text).lstrip()}"
            begins = BEGINNING.search(joined)
            if begins and begins.start() < len(head) < begins.end():
                whole = LogLine(
                    line.number - 1,
                    joined,
                    earlier.process or line.process,
                    earlier.torch_prefix,
                    earlier.logged_from or line.logged_from,
                    earlier.compile_id or line.compile_id,
                )
                return whole, begins
        return None

    def _continue(self, line: LogLine) -> bool:
        if not self._open:
            return False
        if not line.torch_prefix and not line.process and (goes_on := CONTINUATION.search(line.text)):
            line = replace(line, process=process_in_prefix(line.text[: goes_on.start()]))
        belongs = super()._continue(line)
        self._used = self._used or belongs
        return belongs


def _may_begin(text: str) -> bool:
    return any(token in text for token in _TOKENS)
