"""Lines from torch's loggers, live or from any log -> events. One streaming pass, constant memory, no torch."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import BinaryIO

from toto_compat.observe.events import Event, EventKind, Severity
from toto_compat.observe.log_lines import (
    LONGEST_JSON,
    LogLine,
    place_in_prefix,
    printable,
    process_in_prefix,
    read_line,
    shorten_path,
    without_prefix,
)

LIVE = "live"

SEVERITIES = {
    EventKind.RECOMPILE: Severity.WARNING,
    EventKind.GRAPH_BREAK: Severity.WARNING,
    EventKind.RECOMPILE_LIMIT: Severity.ERROR,
    EventKind.CUDAGRAPH_SKIP: Severity.WARNING,
    EventKind.CUDAGRAPH_PARTITION: Severity.INFO,
    EventKind.DYNAMIC_SHAPE: Severity.WARNING,
    EventKind.COMPILE_SETTING: Severity.INFO,
}

# A line without any of these cannot begin an event. Plain substrings: that is what keeps up with grep.
_TOKENS = (
    "cudagraph",
    "raph break",
    "_limit",
    "Recompiling",
    "_maybe_guard_rel",
    "torch.compile for",
    "convert_frame.py:",
)
_BYTE_TOKENS = tuple(token.encode() for token in _TOKENS)

_BEGINNING = re.compile(
    r"hit config\.(?P<limit_name>(?:accumulated_)?(?:recompile|cache_size)_limit) \((?P<limit>\d{1,9})\)"
    r"|Recompiling function (?P<recompiled>\S+) in (?P<recompiled_in>\S.*?):(?P<recompiled_line>\d{1,9})(?!\S*:\d)"
    r"|Graph break(?: \([^)]*\))? in user code at (?P<break_in>\S.*?):(?P<break_line>\d{1,9})(?!\S*:\d)"
    r"|Graph break: (?:(?P<skipped>skip: )?from user code at:|(?P<not_resumed>torch\.compile cannot properly resume))"
    r"|Graph break from `(?P<scalar>Tensor\.item\(\))`"
    r"|(?:skipping cudagraphs due to |disabling cudagraphs (?:for backward )?due to )+(?P<skip>.*)"
    r"|cudagraph partition due to (?P<partition>.*)"
    r"|Created (?P<partitions>\d{1,9}) graph partitions: \d+ cudagraphable, (?P<kept_out>\d{1,9}) non-cudagraphable"
    r"|_maybe_guard_rel\(\) was called on non-relation expression (?P<expression>.*)"
    r"|Using torch\.compile for (?P<compiled>\S.*?) \((?P<setting>[^)]*)\)"
)
# The rest of a limit warning whose first line is missing (a log cut by rotation).
_LIMIT_REMAINDER = re.compile(r"^\s*(?:function: '|last reason: )")

_CONTINUATION = re.compile(
    r"function: '|last reason:|triggered by the following|- \d+/\d+"
    r"|File \"|(?:Graph Break )?Reason: |torch\._dynamo\.exc\."
)
_FUNCTION = re.compile(r"function: '(?P<name>[^']*)'(?:\s*\((?P<file>.+?):(?P<line>\d{1,9})\))?")
_LOCATION = re.compile(r"\(?(?P<file>[^\s()]+\.\w+):(?P<line>\d{1,9})\)")
_LAST_REASON = re.compile(r"last reason:\s*(?P<reason>.*)")
_LIMIT_END = re.compile(r"To (?:log all recompilation reasons|diagnose recompilation issues)")
_NUMBERED_GUARD = re.compile(r"- (?P<guard>\d+/\d+(?:_\d+)?: .*)")
_PLAIN_GUARD = re.compile(r"^\s*- (?P<guard>(?!User stack trace)\S.*)")
_BREAK_REASON = re.compile(r"(?:Graph Break )?Reason: (?P<reason>.*)")
_EXCEPTION = re.compile(r"torch\._dynamo\.exc\.\w+: (?P<reason>.*)")
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d{1,9}), in (?P<function>\S+)')
_TRACEBACK = re.compile(r"Traceback \(most recent call last\)")
_PARTITION_REASON = re.compile(r"\breason=(?P<reason>[^,]*)")
_INSTANCES = re.compile(r"\((\d{1,9}) instances?\)")

_UNFINISHED = re.compile(r"(?:==|!=|<=|>=|[<>,(\[{+*/&|]|\b(?:and|or|is|not|in))$")

# How many lines that are not its own an unfinished event outlives, and how many may be unfinished at once.
_PATIENCE = 40
_MOST_OPEN = 64
_MOST_REASONS = 16
_MOST_FRAMES = 64
_CHUNK = 1 << 17  # small, since a block in which something begins is looked at line by line


@dataclass(slots=True)
class _Block:
    """An event whose further lines may still come."""

    kind: EventKind
    first: LogLine
    function: str = ""
    file: str = ""
    line: int | None = None
    reasons: list[str] = field(default_factory=list)
    more_reasons: int = 0
    limit: int | None = None
    limit_name: str = ""
    count: int = 1
    stack: list[str] = field(default_factory=list)
    awaits_reason: bool = False  # the reason is on the next line, or goes on there
    awaits_location: bool = False
    guards_follow: bool = False
    in_traceback: bool = False  # torch's own frames from here on
    scalar_warning: bool = False  # torch's advice on Tensor.item(): the graph break itself may be logged right after it
    idle: int = 0

    def add_reason(self, reason: str) -> None:
        reason = _without_source_comment(reason)
        if len(self.reasons) < _MOST_REASONS:
            self.reasons.append(reason)
        else:
            self.more_reasons += 1
        self.awaits_reason = _is_unfinished(reason)

    def continue_reason(self, text: str) -> None:
        joined = _without_source_comment(f"{self.reasons[-1]} {text.strip()}".strip())
        self.reasons[-1] = joined[:2000]
        self.awaits_reason = len(joined) < 2000 and _is_unfinished(joined)

    def event(self, source: str) -> Event:
        if self.kind is EventKind.GRAPH_BREAK and self.stack:
            where, _, function = self.stack[-1].partition(" in ")
            file, _, line = where.rpartition(":")
            self.function = self.function or function
            if not self.file:
                self.file, self.line = file, int(line)
        reason = self.reasons[0] if self.reasons else ""
        reasons = [*self.reasons, f"(and {self.more_reasons} more)"] if self.more_reasons else self.reasons
        return Event(
            kind=self.kind,
            severity=SEVERITIES[self.kind],
            function=self.function,
            file=self.file,
            line=self.line,
            compile_id=self.first.compile_id,
            reason=reason,
            reasons=tuple(reasons) if self.kind is EventKind.RECOMPILE else (),
            normalised_reason=normalise_reason(reason),
            limit=self.limit,
            limit_name=self.limit_name,
            count=self.count,
            stack=tuple(self.stack),
            source=source if source == LIVE else f"{source}:{self.first.number}",
            logged_from=self.first.logged_from,
        )


def parse_lines(lines: Iterable[str], source: str) -> Iterator[Event]:
    """The events in these lines, each as soon as it is complete. `source` is a file name, or LIVE."""
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


class LogParser:
    """The state between lines: events that may still grow, per process."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._open: list[_Block] = []
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
            yield from self._take(line)
        # A line that said something is complete: only one that did not can be the first half of a wrapped beginning.
        self.previous = "" if self._used else raw

    def close(self) -> Iterator[Event]:
        """The end of the log: what is open is as complete as it will get."""
        for block in self._open:
            yield block.event(self._source)
        self._open.clear()

    def _take(self, line: LogLine) -> Iterator[Event]:
        line, found = self._beginning(line)
        if found is None:
            if self._continue(line):
                self._used = True
            else:
                yield from self._age(line)
                if "convert_frame.py:" in line.logged_from and _LIMIT_REMAINDER.match(line.text):
                    self._open.append(_Block(EventKind.RECOMPILE_LIMIT, line))
                    self._continue(line)
            return
        self._used = True
        block = _begin(line, found)
        if self._is_within_scalar_advice(block) or (block.kind is EventKind.CUDAGRAPH_PARTITION and block.count == 0):
            return
        yield from self._close_of_process(block)
        self._open.append(block)
        rest = line.text[found.end() :]
        if rest.strip():
            _absorb(block, replace(line, text=rest))
        if _is_single_line(block):
            self._open.pop()
            yield block.event(self._source)
        while len(self._open) > _MOST_OPEN:
            yield self._open.pop(0).event(self._source)

    def _beginning(self, line: LogLine) -> tuple[LogLine, re.Match[str] | None]:
        """Where an event begins in this line, or in this and the previous one where a beginning was wrapped."""
        found = _BEGINNING.search(line.text)
        if found:
            if not line.torch_prefix:
                prefix = line.text[: found.start()]
                line = LogLine(
                    line.number,
                    line.text,
                    line.process or process_in_prefix(prefix),
                    logged_from=line.logged_from or place_in_prefix(prefix),
                    compile_id=line.compile_id,
                )
            return line, found
        if self.previous and _may_begin(f"{self.previous[-200:]} {line.text[:200]}"):
            earlier = list(read_line(self.previous, line.number))[-1]
            head = earlier.text.rstrip()
            for glue in (" ", ""):
                joined = f"{head}{glue}{without_prefix(line.text).lstrip()}"
                found = _BEGINNING.search(joined)
                if found and found.start() < len(head) < found.end():
                    return (
                        LogLine(
                            line.number - 1,
                            joined,
                            earlier.process or line.process,
                            earlier.torch_prefix,
                            earlier.logged_from or line.logged_from,
                            earlier.compile_id or line.compile_id,
                        ),
                        found,
                    )
        self._expects_rest = _may_begin(line.text)
        return line, None

    def _is_within_scalar_advice(self, new: _Block) -> bool:
        """Torch's advice on Tensor.item() has a line 'Graph break: from user code at:' of its own: no second break."""
        return new.kind is EventKind.GRAPH_BREAK and any(
            block.scalar_warning and not block.stack and _may_belong(block, new.first) for block in self._open
        )

    def _close_of_process(self, new: _Block) -> Iterator[Event]:
        """A process that begins an event has finished its earlier ones."""
        for block in [block for block in self._open if block.first.process == new.first.process]:
            self._open.remove(block)
            # Where graph breaks are logged, the break that the advice was about follows it and says more.
            told_again = (
                block.scalar_warning
                and new.kind is EventKind.GRAPH_BREAK
                and block.first.compile_id == new.first.compile_id
            )
            if not told_again:
                yield block.event(self._source)

    def _continue(self, line: LogLine) -> bool:
        if not self._open:
            return False
        if not line.torch_prefix and not line.process and (found := _CONTINUATION.search(line.text)):
            line = replace(line, process=process_in_prefix(line.text[: found.start()]))
        for block in reversed(self._open):
            if _may_belong(block, line) and _absorb(block, line):
                block.idle = 0
                return True
        return False

    def _age(self, line: LogLine) -> Iterator[Event]:
        """Close what this line ends: its process went on to something else, or patience ran out."""
        for block in list(self._open):
            block.idle += 1
            finished = _LIMIT_END.search(line.text) and _may_belong(block, line)
            moved_on = (
                line.torch_prefix
                and block.first.torch_prefix
                and line.process == block.first.process
                and bool(line.logged_from)
                and line.logged_from != block.first.logged_from
            )
            if finished or moved_on or block.idle > _PATIENCE:
                self._open.remove(block)
                yield block.event(self._source)


def normalise_reason(reason: str) -> str:
    """A reason with what varies between two hits of the same cause replaced, for grouping."""
    text = re.sub(r"^\d+/\d+(?:_\d+)?:\s*", "", reason.strip())
    text = re.sub(r"0x[0-9a-fA-F]+", "ADDRESS", text)
    text = re.sub(r"(?:[\w.~-]*/)+[\w.-]+\.py(?::\d+)?", "PATH", text)
    text = re.sub(r"(?<=_at_)\d+|(?<=__compiled_fn_)\d+(?:_\w+)?", "N", text)
    text = re.sub(r"\b([suz])\d+\b", r"\1N", text)
    text = re.sub(r"(?<![\w.])-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?\b", "N", text)
    return re.sub(r"\s+", " ", text).strip()


def _may_begin(text: str) -> bool:
    return any(token in text for token in _TOKENS)


def _begin(line: LogLine, found: re.Match[str]) -> _Block:  # noqa: PLR0911 - one return per wording
    if found["limit"]:
        return _Block(EventKind.RECOMPILE_LIMIT, line, limit=int(found["limit"]), limit_name=found["limit_name"])
    if found["recompiled"]:
        return _Block(
            EventKind.RECOMPILE,
            line,
            function=found["recompiled"],
            file=shorten_path(found["recompiled_in"]),
            line=int(found["recompiled_line"]),
        )
    if found["break_in"]:
        place = shorten_path(found["break_in"])
        return _Block(EventKind.GRAPH_BREAK, line, file=place, line=int(found["break_line"]))
    if found["scalar"]:
        return _Block(EventKind.GRAPH_BREAK, line, reasons=[found["scalar"]], scalar_warning=True)
    if (reason := found["skip"]) is not None:
        instances = _INSTANCES.search(reason)
        block = _Block(EventKind.CUDAGRAPH_SKIP, line, count=int(instances.group(1)) if instances else 1)
        block.reasons = [reason.partition(". Found from")[0].strip()]
        block.guards_follow = "Found from" in reason
        return block
    if (reason := found["partition"]) is not None:
        return _Block(EventKind.CUDAGRAPH_PARTITION, line, reasons=[reason.partition(". Found from")[0].strip()])
    if found["partitions"]:
        return _Block(EventKind.CUDAGRAPH_PARTITION, line, count=int(found["kept_out"]), guards_follow=True)
    if (reason := found["expression"]) is not None:
        return _Block(EventKind.DYNAMIC_SHAPE, line, reasons=[reason.strip()])
    if found["compiled"]:
        return _Block(EventKind.COMPILE_SETTING, line, function=found["compiled"], reasons=[found["setting"]])
    return _Block(EventKind.GRAPH_BREAK, line)


def _is_single_line(block: _Block) -> bool:
    match block.kind:
        case EventKind.DYNAMIC_SHAPE | EventKind.COMPILE_SETTING:
            return True
        case EventKind.CUDAGRAPH_SKIP | EventKind.CUDAGRAPH_PARTITION:
            return not block.guards_follow
        case _:
            return False


def _may_belong(block: _Block, line: LogLine) -> bool:
    """Whether nothing in the two prefixes says that they are of different records."""
    first = block.first
    pairs = ((first.process, line.process), (first.compile_id, line.compile_id), (first.logged_from, line.logged_from))
    return all(
        not mine or not its or mine == its or f"{mine}:".startswith(f"{its}:") or f"{its}:".startswith(f"{mine}:")
        for mine, its in pairs
    )


def _absorb(block: _Block, line: LogLine) -> bool:
    """Take from a line what belongs to the block. False: the line is not part of it."""
    text = line.text
    frame = _FRAME.search(text)
    if frame:
        # Of several failed guards the stack of the first is kept, as its reason is.
        of_first_reason = block.kind is not EventKind.RECOMPILE or len(block.reasons) <= 1
        if of_first_reason and not block.in_traceback and len(block.stack) < _MOST_FRAMES:
            block.stack.append(f"{shorten_path(frame['file'])}:{frame['line']} in {frame['function']}")
        return True
    match block.kind:
        case EventKind.RECOMPILE_LIMIT:
            return _absorb_limit(block, line)
        case EventKind.RECOMPILE:
            return _absorb_recompile(block, line)
        case EventKind.GRAPH_BREAK:
            return _absorb_graph_break(block, line)
        case EventKind.CUDAGRAPH_PARTITION:
            found = _PARTITION_REASON.search(text)
            if found and found["reason"] not in block.reasons:
                block.add_reason(found["reason"])
            return found is not None
        case _:
            return False


def _absorb_limit(block: _Block, line: LogLine) -> bool:
    text = line.text
    function, reason = _FUNCTION.search(text), _LAST_REASON.search(text)
    taken = False
    if function and not block.function:
        block.function = function["name"]
        block.awaits_location = function["file"] is None
        if function["file"]:
            block.file, block.line = shorten_path(function["file"]), int(function["line"])
        taken = True
    if reason and not block.reasons:
        block.add_reason(reason["reason"])
        block.awaits_reason = block.awaits_reason or not block.reasons[0]
        return True
    if taken or function or reason:
        return taken
    if block.awaits_location and (location := _LOCATION.search(text)):
        block.file, block.line, block.awaits_location = shorten_path(location["file"]), int(location["line"]), False
        return True
    if block.awaits_reason and text.strip() and not _LIMIT_END.search(text):
        block.continue_reason(without_prefix(text))
        return True
    return False


def _absorb_recompile(block: _Block, line: LogLine) -> bool:
    text = line.text
    if "triggered by the following guard failure" in text:
        block.guards_follow = True
        _, _, text = text.partition("guard failure(s):")
        if not text.strip():
            return True
    guard = _NUMBERED_GUARD.search(text)
    if guard is None and block.guards_follow and line.torch_prefix == block.first.torch_prefix:
        guard = _PLAIN_GUARD.search(text)
    if guard:
        block.add_reason(guard["guard"])
        return True
    if block.awaits_reason and block.reasons and text.strip():
        block.continue_reason(without_prefix(text))
        return True
    # The rest of a record with the same prefix: source lines of a user stack.
    return line.torch_prefix and line.logged_from == block.first.logged_from and bool(line.logged_from)


def _absorb_graph_break(block: _Block, line: LogLine) -> bool:
    text = line.text
    if _TRACEBACK.search(text):
        block.in_traceback = True
        return True
    found = _BREAK_REASON.search(text) or (_EXCEPTION.search(text) if not block.reasons else None)
    if found:
        if not block.reasons:
            block.reasons.append(found["reason"].strip())
            # From 2.10 on the first line says what dynamo was doing and ends in a colon; the cause comes after it.
            block.awaits_reason = not block.reasons[0] or block.reasons[0].endswith(":")
        return True
    if block.awaits_reason and text.strip():
        block.reasons[-1] = without_prefix(text).strip()
        block.awaits_reason = False
        return True
    return line.torch_prefix and line.logged_from == block.first.logged_from and bool(line.logged_from)


def _without_source_comment(reason: str) -> str:
    """A guard without the source line and the hints that torch appends behind '  # '."""
    return re.split(r"\s{2,}#\s|\s+\(HINT: ", reason, maxsplit=1)[0].strip()


def _is_unfinished(reason: str) -> bool:
    """Whether a reason was visibly cut by a line wrap: an open bracket, or an operator at its end."""
    bare = re.sub(r"'[^']*'|\"[^\"]*\"", "", reason)
    opened = sum(bare.count(bracket) for bracket in "([{") - sum(bare.count(bracket) for bracket in ")]}")
    return opened > 0 or bool(_UNFINISHED.search(bare.rstrip()))


__all__ = ["LIVE", "SEVERITIES", "LogParser", "normalise_reason", "parse_lines", "parse_stream", "printable"]
