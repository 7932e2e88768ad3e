"""What torch's loggers say about compilation -> events. One grammar for live records and for any log.

Knows the messages and nothing of how a log wraps them: a line comes here with its prefix already read.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from toto_compat.contract.events import Event, EventKind, Severity
from toto_compat.contract.log_line import LogLine, normalise_reason, shorten_path, without_its_source

LIVE = "live"
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
    EventKind.CUDAGRAPH_OVERWRITTEN: Severity.ERROR,
    EventKind.OUT_OF_MEMORY: Severity.ERROR,
    EventKind.BACKEND_ERROR: Severity.ERROR,
    EventKind.TRITON_ERROR: Severity.ERROR,
    EventKind.DYNAMO_ERROR: Severity.ERROR,
    EventKind.NOT_A_NUMBER: Severity.WARNING,  # an error where a forecast could not be drawn from it
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
    r"|File \"|Traceback \(|(?:Graph Break )?Reason: |torch\._dynamo\.exc\."
)
_FUNCTION = re.compile(r"function: '(?P<name>[^']*)'(?:\s*\((?P<file>.+?):(?P<line>\d{1,9})\))?")
_LOCATION = re.compile(r"\(?(?P<file>[^\s()]{1,300}\.\w{1,9}):(?P<line>\d{1,9})\)")
_LAST_REASON = re.compile(r"last reason:\s*(?P<reason>.*)")
_LIMIT_END = re.compile(r"To (?:log all recompilation reasons|diagnose recompilation issues)")
_NUMBERED_GUARD = re.compile(r"- (?P<guard>\d+/\d+(?:_\d+)?: .*)")
_PLAIN_GUARD = re.compile(r"^\s*- (?P<guard>(?!User stack trace)\S.*)")
_BREAK_REASON = re.compile(r"(?:Graph Break )?Reason: (?P<reason>.*)")
_EXCEPTION = re.compile(r"torch\._dynamo\.exc\.\w+: (?P<reason>.*)")
FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d{1,9}), in (?P<function>\S+)')
TRACEBACK = re.compile(r"Traceback \(most recent call last\)")
_PARTITION_REASON = re.compile(r"\breason=(?P<reason>[^,]*)")
_INSTANCES = re.compile(r"\((\d{1,9}) instances?\)")

_UNFINISHED = re.compile(r"(?:==|!=|<=|>=|[<>,(\[{+*/&|]|\b(?:and|or|is|not|in))$")

# How many lines that are not its own an unfinished event outlives, and how many may be unfinished at once.
PATIENCE = 40
_MOST_OPEN = 64
_MOST_REASONS = 16
MOST_FRAMES = 64


@dataclass(slots=True)
class Block:
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
    exception_due: bool = False  # the record ends with the exception of the traceback in it
    chained: bool = False  # another traceback of the same failure follows
    in_user_code: bool = False  # dynamo's own word for which frames are the user's
    complete: bool = False  # nothing that comes can belong to it
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
            time=self.first.time,
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
        self._open: list[Block] = []

    def take(self, line: LogLine) -> Iterator[Event]:
        """Take one line; give the events that it completes."""
        line, begins = self._beginning(line)
        if begins is None:
            if not self._continue(line):
                yield from self._age(line)
                if "convert_frame.py:" in line.logged_from and _LIMIT_REMAINDER.match(line.text):
                    self._open.append(Block(EventKind.RECOMPILE_LIMIT, line))
                    self._continue(line)
            return
        block = self._begin(line, begins)
        if self._is_within_scalar_advice(block) or (block.kind is EventKind.CUDAGRAPH_PARTITION and block.count == 0):
            return
        if self._open:
            yield from self._close_of_process(block)
        if _is_single_line(block):
            yield self._event(block)
            return
        self._open.append(block)
        rest = line.text[begins.end() :]
        if rest and not rest.isspace():
            self._absorb(block, replace(line, text=rest))
        while len(self._open) > _MOST_OPEN:
            yield self._event(self._open.pop(0))

    def close(self) -> Iterator[Event]:
        """The end of the log: what is open is as complete as it will get."""
        for block in self._open:
            yield self._event(block)
        self._open.clear()

    def _beginning(self, line: LogLine) -> tuple[LogLine, re.Match[str] | None]:
        """Find where an event begins in this line, if one does."""
        return line, self._search(line)

    def _search(self, line: LogLine) -> re.Match[str] | None:
        return BEGINNING.search(line.text)

    def _begin(self, line: LogLine, begins: re.Match[str]) -> Block:
        return _begin(line, begins)

    def _event(self, block: Block) -> Event:
        return block.event(self._source)

    def _is_within_scalar_advice(self, new: Block) -> bool:
        """Torch's advice on Tensor.item() has a line 'Graph break: from user code at:' of its own: no second break."""
        return new.kind is EventKind.GRAPH_BREAK and any(
            block.scalar_warning and not block.stack and may_belong(block.first, new.first) for block in self._open
        )

    def _close_of_process(self, new: Block) -> Iterator[Event]:
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
                yield self._event(block)

    def _continue(self, line: LogLine) -> bool:
        """Tell whether the line belongs to an event that is open."""
        for block in reversed(self._open):
            if may_belong(block.first, line) and self._absorb(block, line):
                block.idle = 0
                return True
        return False

    def _age(self, line: LogLine) -> Iterator[Event]:
        """Close what this line ends: its process went on to something else, or patience ran out."""
        for block in list(self._open):
            block.idle += 1
            finished = _LIMIT_END.search(line.text) and may_belong(block.first, line)
            moved_on = (
                line.torch_prefix
                and block.first.torch_prefix
                and line.process == block.first.process
                and bool(line.logged_from)
                and line.logged_from != block.first.logged_from
            )
            if finished or moved_on or block.idle > PATIENCE:
                self._open.remove(block)
                yield self._event(block)

    def _wait(self) -> Iterator[Event]:
        """Let a line of something else pass."""
        for block in list(self._open):
            block.idle += 1
            if block.idle > PATIENCE:
                self._open.remove(block)
                yield self._event(block)

    def _absorb(self, block: Block, line: LogLine) -> bool:
        """Take from a line what belongs to the block. False: the line is not part of it."""
        text = line.text
        frame = FRAME.search(text)
        if frame and self._may_take_frame(block):
            # Of several failed guards the stack of the first is kept, as its reason is.
            of_first_reason = block.kind is not EventKind.RECOMPILE or len(block.reasons) <= 1
            if of_first_reason and not block.in_traceback and len(block.stack) < MOST_FRAMES:
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
                return self._absorb_other(block, line)

    def _may_take_frame(self, _block: Block) -> bool:
        return True

    def _absorb_other(self, _block: Block, _line: LogLine) -> bool:
        """Take what belongs to an event of a kind that is not torch's."""
        return False

    def _absorb_limit(self, block: Block, line: LogLine) -> bool:
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

    def _absorb_recompile(self, block: Block, line: LogLine) -> bool:
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

    def _absorb_graph_break(self, block: Block, line: LogLine) -> bool:
        text = line.text
        if TRACEBACK.search(text):
            block.in_traceback = block.exception_due = True
            return True
        said = _BREAK_REASON.search(text) or (_EXCEPTION.search(text) if not block.reasons else None)
        if _EXCEPTION.search(text):
            block.exception_due = False
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


def _begin(line: LogLine, begins: re.Match[str]) -> Block:  # noqa: PLR0911 - one return per wording
    if begins["limit"]:
        return Block(EventKind.RECOMPILE_LIMIT, line, limit=int(begins["limit"]), limit_name=begins["limit_name"])
    if begins["recompiled"]:
        return Block(
            EventKind.RECOMPILE,
            line,
            function=begins["recompiled"],
            file=shorten_path(begins["recompiled_in"]),
            line=int(begins["recompiled_line"]),
        )
    if begins["break_in"]:
        place = shorten_path(begins["break_in"])
        return Block(EventKind.GRAPH_BREAK, line, file=place, line=int(begins["break_line"]))
    if begins["scalar"]:
        return Block(EventKind.GRAPH_BREAK, line, reasons=[begins["scalar"]], scalar_warning=True)
    if (reason := begins["skip"]) is not None:
        instances = _INSTANCES.search(reason)
        block = Block(EventKind.CUDAGRAPH_SKIP, line, count=int(instances.group(1)) if instances else 1)
        block.reasons = [without_its_source(reason)]
        block.guards_follow = "Found from" in reason
        return block
    if (reason := begins["partition"]) is not None:
        return Block(EventKind.CUDAGRAPH_PARTITION, line, reasons=[without_its_source(reason)])
    if begins["partitions"]:
        return Block(EventKind.CUDAGRAPH_PARTITION, line, count=int(begins["kept_out"]), guards_follow=True)
    if (reason := begins["expression"]) is not None:
        return Block(EventKind.DYNAMIC_SHAPE, line, reasons=[reason.strip()])
    if begins["compiled"]:
        return Block(EventKind.COMPILE_SETTING, line, function=begins["compiled"], reasons=[begins["setting"]])
    if begins["bucket"]:
        return _begin_bucket(line, begins)
    return Block(EventKind.GRAPH_BREAK, line)


def _begin_bucket(line: LogLine, begins: re.Match[str]) -> Block:
    compiling, unannounced = begins["bucket"] == "compiling", begins["unannounced"] is not None
    return Block(
        EventKind.BUCKET_COMPILE if compiling else EventKind.BUCKET_DROP,
        line,
        function=begins["compiled_part"].replace(" ", "_"),
        reasons=[begins["shape"] + (", not announced" if unannounced else "")],
        limit=int(begins["most_buckets"]),
        limit_name="max_buckets",
        severity=Severity.WARNING if unannounced else None,
    )


def _is_single_line(block: Block) -> bool:
    match block.kind:
        case EventKind.DYNAMIC_SHAPE | EventKind.COMPILE_SETTING | EventKind.BUCKET_COMPILE | EventKind.BUCKET_DROP:
            return True
        case EventKind.CUDAGRAPH_SKIP | EventKind.CUDAGRAPH_PARTITION:
            return not block.guards_follow
        case _:
            return False


def may_belong(first: LogLine, line: LogLine) -> bool:
    """Tell whether nothing in the two prefixes says that they are of different records."""
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
