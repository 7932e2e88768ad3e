"""What torch's loggers say about compilation -> events. One grammar for live records and for any log.

Knows the messages and nothing of how a log wraps them: a line comes here with its prefix already read.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache

from toto_compat.contract.events import Event, EventKind, Severity

LIVE = "live"
# A log line is data from outside: longer than this is cut before any regular expression sees it.
LONGEST_LINE = 16_000

_TERMINAL_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]P^_X][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-~])")
# C0, DEL and C1 controls, and the invisible characters that reorder or hide text in a terminal.
_CONTROLS = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")

SEVERITIES = {
    EventKind.RECOMPILE: Severity.WARNING,
    EventKind.GRAPH_BREAK: Severity.WARNING,
    EventKind.RECOMPILE_LIMIT: Severity.ERROR,
    EventKind.CUDAGRAPH_SKIP: Severity.WARNING,
    EventKind.CUDAGRAPH_PARTITION: Severity.INFO,
    EventKind.DYNAMIC_SHAPE: Severity.WARNING,
    EventKind.COMPILE_SETTING: Severity.INFO,
    EventKind.BUCKET_COMPILE: Severity.INFO,  # a warning where nobody announced the shape
    EventKind.BUCKET_DROP: Severity.WARNING,
}


BEGINNING = re.compile(
    r"hit config\.(?P<limit_name>(?:accumulated_)?(?:recompile|cache_size)_limit) \((?P<limit>\d{1,9})\)"
    r"|Recompiling function (?P<recompiled>\S+) in (?P<recompiled_in>\S.*?):(?P<recompiled_line>\d{1,9})(?!\S*:\d)"
    r"|Graph break(?: \([^)]*\))? in user code at (?P<break_in>\S.*?):(?P<break_line>\d{1,9})(?!\S*:\d)"
    r"|Graph break: (?:(?P<skipped>skip: )?from user code at:|(?P<not_resumed>torch\.compile cannot properly resume))"
    r"|Graph break from `(?P<scalar>Tensor\.item\(\))`"
    r"|(?:skipping cudagraphs due to |disabling cudagraphs (?:for backward )?due to )+(?P<skip>\S.*)"
    r"|cudagraph partition due to (?P<partition>\S.*)"
    r"|Created (?P<partitions>\d{1,9}) graph partitions: \d+ cudagraphable, (?P<kept_out>\d{1,9}) non-cudagraphable"
    r"|_maybe_guard_rel\(\) was called on non-relation expression (?P<expression>\S.*)"
    r"|Using torch\.compile for (?P<compiled>\S.*?) \((?P<setting>[^)]*)\)"
    # ours, not torch's: contract/bucket_messages.py
    r"|(?P<bucket>compiling|dropping) (?P<compiled_part>decode step|context pass|patch draws) for (?P<shape>(?:batch "
    r"\d{1,9}, variates \d{1,9}, capacity \d{1,9}|variates \d{1,9}|\d{1,9} patches, variates \d{1,9}, "
    r"series \d{1,9}(?:, predicting all)?)(?:, autocast \w{1,9})?)"
    r" \([^)]*?of at most (?P<most_buckets>\d{1,9})(?P<unannounced>, not announced)?\)"
)
# The rest of a limit warning whose first line is missing (a log cut by rotation).
_LIMIT_REMAINDER = re.compile(r"^\s*(?:function: '|last reason: )")

CONTINUATION = re.compile(
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


@dataclass(frozen=True, slots=True)
class LogLine:
    """A message and what its prefix said. Empty string: it did not say."""

    number: int
    text: str
    process: str = ""
    torch_prefix: bool = False
    logged_from: str = ""
    compile_id: str = ""


def printable(text: str) -> str:
    """Text without anything that a terminal would obey instead of show."""
    if text.isascii() and text.isprintable():
        return text
    return _CONTROLS.sub("", _TERMINAL_ESCAPES.sub("", text).replace("\t", " "))


@lru_cache(1024)
def shorten_path(path: str) -> str:
    """A source file from its package on: '/venv/lib/python3.11/site-packages/toto/model/x.py' -> 'toto/model/x.py'."""
    path = path.strip().replace("\\", "/")
    for folder in ("site-packages/", "dist-packages/"):
        if folder in path:
            return path.rpartition(folder)[2]
    for package in ("toto_compat", "toto", "torch"):
        head, slash, tail = path.rpartition(f"/{package}/")
        if slash and (head or path.startswith("/")):
            return f"{package}/{tail}"
        if path.startswith(f"{package}/"):
            return path
    return "/".join(part for part in path.split("/") if part not in ("", ".", "..", "..."))[-200:].rpartition("/")[2]


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
    severity: Severity | None = None  # the kind's own unless the message says more
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
            severity=self.severity or SEVERITIES[self.kind],
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


def parse_messages(lines: Iterable[LogLine], source: str) -> Iterator[Event]:
    """The events in these lines, each as soon as it is complete. `source` is a file name, or LIVE."""
    parser = MessageParser(source)
    for line in lines:
        yield from parser.take(line)
    yield from parser.close()


class MessageParser:
    """The state between lines: events that may still grow, per process."""

    def __init__(self, source: str, unprefixed: Callable[[str], str] = str) -> None:
        """`unprefixed` takes off what a log puts before a line that goes on from the one before it."""
        self._source = source
        self._unprefixed = unprefixed
        self._open: list[_Block] = []

    def take(self, line: LogLine) -> Iterator[Event]:
        """Take one line; give the events that it completes."""
        line, begins = self._beginning(line)
        if begins is None:
            if not self._continue(line):
                yield from self._age(line)
                if "convert_frame.py:" in line.logged_from and _LIMIT_REMAINDER.match(line.text):
                    self._open.append(_Block(EventKind.RECOMPILE_LIMIT, line))
                    self._continue(line)
            return
        block = _begin(line, begins)
        if self._is_within_scalar_advice(block) or (block.kind is EventKind.CUDAGRAPH_PARTITION and block.count == 0):
            return
        if self._open:
            yield from self._close_of_process(block)
        if _is_single_line(block):
            yield block.event(self._source)
            return
        self._open.append(block)
        rest = line.text[begins.end() :]
        if rest and not rest.isspace():
            self._absorb(block, replace(line, text=rest))
        while len(self._open) > _MOST_OPEN:
            yield self._open.pop(0).event(self._source)

    def close(self) -> Iterator[Event]:
        """The end of the log: what is open is as complete as it will get."""
        for block in self._open:
            yield block.event(self._source)
        self._open.clear()

    def _beginning(self, line: LogLine) -> tuple[LogLine, re.Match[str] | None]:
        """Find where an event begins in this line, if one does."""
        return line, BEGINNING.search(line.text)

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
        """Tell whether the line belongs to an event that is open."""
        for block in reversed(self._open):
            if _may_belong(block, line) and self._absorb(block, line):
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

    def _wait(self) -> Iterator[Event]:
        """Let a line of something else pass."""
        for block in list(self._open):
            block.idle += 1
            if block.idle > _PATIENCE:
                self._open.remove(block)
                yield block.event(self._source)

    def _absorb(self, block: _Block, line: LogLine) -> bool:
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
                return self._absorb_limit(block, line)
            case EventKind.RECOMPILE:
                return self._absorb_recompile(block, line)
            case EventKind.GRAPH_BREAK:
                return self._absorb_graph_break(block, line)
            case EventKind.CUDAGRAPH_PARTITION:
                named = _PARTITION_REASON.search(text)
                if named and named["reason"] not in block.reasons:
                    block.add_reason(named["reason"])
                return named is not None
            case _:
                return False

    def _absorb_limit(self, block: _Block, line: LogLine) -> bool:
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
            block.continue_reason(self._unprefixed(text))
            return True
        return False

    def _absorb_recompile(self, block: _Block, line: LogLine) -> bool:
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
            block.continue_reason(self._unprefixed(text))
            return True
        # The rest of a record with the same prefix: source lines of a user stack.
        return line.torch_prefix and line.logged_from == block.first.logged_from and bool(line.logged_from)

    def _absorb_graph_break(self, block: _Block, line: LogLine) -> bool:
        text = line.text
        if _TRACEBACK.search(text):
            block.in_traceback = True
            return True
        said = _BREAK_REASON.search(text) or (_EXCEPTION.search(text) if not block.reasons else None)
        if said:
            if not block.reasons:
                block.reasons.append(said["reason"].strip())
                # From 2.10 on the first line says what dynamo was doing and ends in a colon; the cause comes after it.
                block.awaits_reason = not block.reasons[0] or block.reasons[0].endswith(":")
            return True
        if block.awaits_reason and text.strip():
            block.reasons[-1] = self._unprefixed(text).strip()
            block.awaits_reason = False
            return True
        return line.torch_prefix and line.logged_from == block.first.logged_from and bool(line.logged_from)


@lru_cache(1024)  # a log says the same thing over and over
def normalise_reason(reason: str) -> str:
    """A reason with what varies between two hits of the same cause replaced, for grouping."""
    text = re.sub(r"^\d+/\d+(?:_\d+)?:\s*", "", reason.strip())
    text = re.sub(r"0x[0-9a-fA-F]+", "ADDRESS", text)
    text = re.sub(r"(?:[\w.~-]*/)+[\w.-]+\.py(?::\d+)?", "PATH", text)
    text = re.sub(r"(?<=_at_)\d+|(?<=__compiled_fn_)\d+(?:_\w+)?", "N", text)
    text = re.sub(r"\b([suz])\d+\b", r"\1N", text)
    text = re.sub(r"(?<![\w.])-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?\b", "N", text)
    return re.sub(r"\s+", " ", text).strip()


def _begin(line: LogLine, begins: re.Match[str]) -> _Block:  # noqa: PLR0911 - one return per wording
    if begins["limit"]:
        return _Block(EventKind.RECOMPILE_LIMIT, line, limit=int(begins["limit"]), limit_name=begins["limit_name"])
    if begins["recompiled"]:
        return _Block(
            EventKind.RECOMPILE,
            line,
            function=begins["recompiled"],
            file=shorten_path(begins["recompiled_in"]),
            line=int(begins["recompiled_line"]),
        )
    if begins["break_in"]:
        place = shorten_path(begins["break_in"])
        return _Block(EventKind.GRAPH_BREAK, line, file=place, line=int(begins["break_line"]))
    if begins["scalar"]:
        return _Block(EventKind.GRAPH_BREAK, line, reasons=[begins["scalar"]], scalar_warning=True)
    if (reason := begins["skip"]) is not None:
        instances = _INSTANCES.search(reason)
        block = _Block(EventKind.CUDAGRAPH_SKIP, line, count=int(instances.group(1)) if instances else 1)
        block.reasons = [reason.partition(". Found from")[0].strip()]
        block.guards_follow = "Found from" in reason
        return block
    if (reason := begins["partition"]) is not None:
        return _Block(EventKind.CUDAGRAPH_PARTITION, line, reasons=[reason.partition(". Found from")[0].strip()])
    if begins["partitions"]:
        return _Block(EventKind.CUDAGRAPH_PARTITION, line, count=int(begins["kept_out"]), guards_follow=True)
    if (reason := begins["expression"]) is not None:
        return _Block(EventKind.DYNAMIC_SHAPE, line, reasons=[reason.strip()])
    if begins["compiled"]:
        return _Block(EventKind.COMPILE_SETTING, line, function=begins["compiled"], reasons=[begins["setting"]])
    if begins["bucket"]:
        return _begin_bucket(line, begins)
    return _Block(EventKind.GRAPH_BREAK, line)


def _begin_bucket(line: LogLine, begins: re.Match[str]) -> _Block:
    compiling, unannounced = begins["bucket"] == "compiling", begins["unannounced"] is not None
    return _Block(
        EventKind.BUCKET_COMPILE if compiling else EventKind.BUCKET_DROP,
        line,
        function=begins["compiled_part"].replace(" ", "_"),
        reasons=[begins["shape"] + (", not announced" if unannounced else "")],
        limit=int(begins["most_buckets"]),
        limit_name="max_buckets",
        severity=Severity.WARNING if unannounced else None,
    )


def _is_single_line(block: _Block) -> bool:
    match block.kind:
        case EventKind.DYNAMIC_SHAPE | EventKind.COMPILE_SETTING | EventKind.BUCKET_COMPILE | EventKind.BUCKET_DROP:
            return True
        case EventKind.CUDAGRAPH_SKIP | EventKind.CUDAGRAPH_PARTITION:
            return not block.guards_follow
        case _:
            return False


def _may_belong(block: _Block, line: LogLine) -> bool:
    """Tell whether nothing in the two prefixes says that they are of different records."""
    first = block.first
    return (
        _may_be_same(first.process, line.process)
        and _may_be_same(first.compile_id, line.compile_id)
        and _may_be_same(first.logged_from, line.logged_from)
    )


def _may_be_same(mine: str, its: str) -> bool:
    return not mine or not its or mine == its or f"{mine}:".startswith(f"{its}:") or f"{its}:".startswith(f"{mine}:")


def _without_source_comment(reason: str) -> str:
    """A guard without the source line and the hints that torch appends behind '  # '."""
    return re.split(r"\s{2,}#\s|\s+\(HINT: ", reason, maxsplit=1)[0].strip()


def _is_unfinished(reason: str) -> bool:
    """Tell whether a reason was visibly cut by a line wrap: an open bracket, or an operator at its end."""
    bare = re.sub(r"'[^']*'|\"[^\"]*\"", "", reason)
    opened = sum(bare.count(bracket) for bracket in "([{") - sum(bare.count(bracket) for bracket in ")]}")
    return opened > 0 or bool(_UNFINISHED.search(bare.rstrip()))
