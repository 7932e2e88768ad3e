"""What a log says when compiled code, or the compiler itself, fails -> events, with the traceback around them.

The live observer does not need this: there the exception itself arrives.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from toto_compat.contract.events import Event, EventKind, Severity
from toto_compat.contract.log_line import LogLine, shorten_path
from toto_compat.contract.torch_messages import (
    BEGINNING,
    FRAME,
    MOST_FRAMES,
    PATIENCE,
    TRACEBACK,
    Block,
    MessageParser,
    may_belong,
)

FAILURE_KINDS = frozenset(
    {
        EventKind.CUDAGRAPH_OVERWRITTEN,
        EventKind.OUT_OF_MEMORY,
        EventKind.BACKEND_ERROR,
        EventKind.TRITON_ERROR,
        EventKind.DYNAMO_ERROR,
        EventKind.NOT_A_NUMBER,
    }
)

FAILURE = re.compile(
    r"accessing (?P<overwritten>(?:gradient )?tensor output) of CUDAGraphs that has been overwritten"
    r"|(?:torch\.(?:cuda\.)?OutOfMemoryError: )?(?:CUDA|HIP|XPU) (?:error: )?out of memory(?P<memory>.*)"
    r"|torch\.(?:cuda\.)?OutOfMemoryError: (?P<other_memory>.*)"
    r"|Out of memory: Killed process \d{1,9} \((?P<killed>[^)]{1,40})\)"
    r"|torch\._(?P<part>dynamo|inductor)\.exc\.(?P<torch_error>\w+)(?:: (?P<torch_said>.*)|:?\s*$)"
    r"|triton(?:\.\w{1,40}){1,4}\.(?P<triton_error>[A-Z]\w+)(?:: (?P<triton_said>.*)|:?\s*$)"
    r"|Triton (?:Error \[(?P<driver>\w+)\]|(?P<compilation>compilation failed)): (?P<kernel>.*)"
    r"|Expected (?P<parameter>parameter \w+ .{0,400}?)to satisfy the constraint .{0,200}?, but found invalid values"
    r"|(?P<backward>Function '\w+' returned nan values in its \d+th output)"
    r"|(?P<probabilities>probability tensor contains either `inf`, `nan` or element < 0)"
    r"|(?P<numpy>invalid value encountered in \w+|All-NaN (?:slice|axis) encountered)"
    r"|(?P<nan>(?:contains?|produced|returned|found|got|is|are|has|have|all) (?:only |all |\d{1,9} )?NaNs?\b"
    r"|NaNs? (?:values? )?(?:in|detected|found|encountered)\b)"
)
# Exceptions of Triton keep their name where inductor passes them on: 'InductorError: CompilationError: at 2:16:'.
_OF_TRITON = re.compile(r"\b(?:CompilationError|OutOfResources|PTXASError|CompileTimeAssertionFailure|[Tt]riton)\b")
_ENDS_TRACEBACK = re.compile(
    r"(?:^|\s)(?:[A-Za-z_]\w{0,60}\.){0,8}[A-Z]\w{0,60}"
    r"(?:Error|Exception|Interrupt|Exit|Iteration|Failed|Failure|Exceeded|Hit|Warning)(?::\s|$)"
)
_CHAIN = re.compile(r"direct cause of the following exception|During handling of the above exception")
_OWN_CODE = re.compile(r"^(?!(?:torch|triton|numpy|logging|concurrent|asyncio|threading)/|<frozen|contextlib\.py)")
_RAISED = re.compile(r"raised:\s*$")


@dataclass(slots=True)
class _Traceback:
    """A traceback whose exception has not come yet."""

    first: LogLine
    stack: list[str] = field(default_factory=list)
    idle: int = 0


class FailureParser(MessageParser):
    """Knows failures besides what torch's loggers say, and keeps the traceback that leads to one."""

    def __init__(self, source: str, unprefixed: Callable[[str], str] = str) -> None:
        super().__init__(source, unprefixed)
        self._tracebacks: list[_Traceback] = []

    def close(self) -> Iterator[Event]:
        """The end of the log: a traceback without its exception is none of ours."""
        self._tracebacks.clear()
        yield from super().close()

    def _search(self, line: LogLine) -> re.Match[str] | None:
        found = BEGINNING.search(line.text)
        if found:
            return found
        found = FAILURE.search(line.text)
        # A graph break may be logged with the exception that dynamo left the code by, or the failure be one of a chain.
        return None if found and any(self._tells_again(block, line) for block in self._open) else found

    def _tells_again(self, block: Block, line: LogLine) -> bool:
        return block.exception_due and may_belong(block.first, line)

    def _begin(self, line: LogLine, begins: re.Match[str]) -> Block:
        if begins.re is not FAILURE:
            return super()._begin(line, begins)
        block = _begin_failure(line, begins)
        for traceback in [one for one in self._tracebacks if may_belong(one.first, line)]:
            self._tracebacks.remove(traceback)
            block.stack = traceback.stack
        return block

    def _continue(self, line: LogLine) -> bool:
        return super()._continue(line) or self._follow_traceback(line)

    def _event(self, block: Block) -> Event:
        if block.kind in FAILURE_KINDS and (blamed := frame_to_blame(block.stack, in_user_code=block.in_user_code)):
            where, _, block.function = blamed.partition(" in ")
            block.file, _, line = where.rpartition(":")
            block.line = int(line)
        return super()._event(block)

    def _follow_traceback(self, line: LogLine) -> bool:
        """Tell whether the line is of a traceback, known or new, that belongs to no event yet."""
        if TRACEBACK.search(line.text):
            self._tracebacks = [one for one in self._tracebacks if not _same_process(one, line)][-7:]
            self._tracebacks.append(_Traceback(line))
            return True
        frame = FRAME.search(line.text)
        ends = None if frame else _ENDS_TRACEBACK.search(line.text)
        for traceback in reversed(self._tracebacks):
            if not may_belong(traceback.first, line):
                continue
            if frame:
                add_frame(traceback.stack, frame)
                traceback.idle = 0
                return True
            if ends and traceback.stack:
                self._tracebacks.remove(traceback)  # of an exception that is none of ours
                return True
        return False

    def _age(self, line: LogLine) -> Iterator[Event]:
        for traceback in list(self._tracebacks):
            traceback.idle += 1
            if traceback.idle > PATIENCE:
                self._tracebacks.remove(traceback)
        yield from super()._age(line)

    def _may_take_frame(self, block: Block) -> bool:
        if block.kind not in FAILURE_KINDS:
            return True
        leads_to_it = block.exception_due or block.kind is EventKind.CUDAGRAPH_OVERWRITTEN
        return not block.complete and (block.in_user_code or leads_to_it)

    def _absorb_other(self, block: Block, line: LogLine) -> bool:  # noqa: PLR0911 - one return per part of a record
        if block.kind not in FAILURE_KINDS:
            return super()._absorb_other(block, line)
        text = line.text
        if block.complete:
            return False
        if _CHAIN.search(text):
            block.chained = True
            return True
        if TRACEBACK.search(text):
            block.exception_due, block.complete, block.chained = block.chained, not block.chained, False
            return block.exception_due
        if block.exception_due:
            told_again = FAILURE.search(text) or _ENDS_TRACEBACK.search(text)
            block.exception_due = not told_again
            return told_again is not None
        if "from user code:" in text:
            block.in_user_code = True
            return True
        if block.awaits_reason and text.strip():
            block.reasons[-1] = f"{block.reasons[-1]} {self._unprefixed(text).strip()}".strip()[:2000]
            block.awaits_reason = False
            if block.kind is EventKind.BACKEND_ERROR and _OF_TRITON.search(block.reasons[-1]):
                block.kind = EventKind.TRITON_ERROR
            return True
        return False


def add_frame(stack: list[str], frame: re.Match[str]) -> None:
    """Note a frame; of a deep stack the outermost and the innermost frames."""
    if len(stack) >= MOST_FRAMES:
        del stack[MOST_FRAMES // 2]
    stack.append(f"{shorten_path(frame['file'])}:{frame['line']} in {frame['function']}")


def frame_to_blame(stack: list[str], *, in_user_code: bool) -> str:
    """The frame that an event is told of: the innermost one of the application's own code, '' if none."""
    if in_user_code and stack:
        return stack[-1]
    return next((frame for frame in reversed(stack) if _OWN_CODE.match(frame)), "")


def _same_process(traceback: _Traceback, line: LogLine) -> bool:
    return traceback.first.process == line.process


def _begin_failure(line: LogLine, begins: re.Match[str]) -> Block:
    kind, reason = _kind_and_reason(begins)
    block = Block(kind, line, reasons=[reason.strip()])
    block.awaits_reason = bool(_RAISED.search(reason))  # what the backend raised stands on the next line
    if begins["parameter"] or begins["probabilities"]:
        block.severity = Severity.ERROR
    return block


def _named(error: str, said: str | None) -> str:
    return f"{error}: {said}" if said else error


def _kind_and_reason(begins: re.Match[str]) -> tuple[EventKind, str]:  # noqa: PLR0911 - one return per wording
    if begins["overwritten"]:
        return EventKind.CUDAGRAPH_OVERWRITTEN, f"{begins['overwritten']} of CUDAGraphs overwritten by a subsequent run"
    if begins["killed"]:
        return EventKind.OUT_OF_MEMORY, "killed by the kernel: the machine's memory ran out"
    memory = begins["memory"] if begins["memory"] is not None else begins["other_memory"]
    if memory is not None:
        return EventKind.OUT_OF_MEMORY, re.split(r"\.\s", memory.lstrip(". "), maxsplit=1)[0] or "out of memory"
    if begins["torch_error"]:
        said = _named(begins["torch_error"], begins["torch_said"])
        if begins["part"] == "dynamo" and begins["torch_error"] != "BackendCompilerFailed":
            return EventKind.DYNAMO_ERROR, said
        return EventKind.TRITON_ERROR if _OF_TRITON.search(said) else EventKind.BACKEND_ERROR, said
    if begins["triton_error"]:
        return EventKind.TRITON_ERROR, _named(begins["triton_error"], begins["triton_said"])
    if begins["kernel"] is not None:
        return EventKind.TRITON_ERROR, f"{begins['driver'] or begins['compilation']}: {begins['kernel']}"
    if begins["parameter"]:
        return EventKind.NOT_A_NUMBER, f"invalid {begins['parameter']}"
    said = begins["backward"] or begins["probabilities"] or begins["numpy"] or begins["nan"]
    return EventKind.NOT_A_NUMBER, said
