"""Lines cut at some width, as a terminal or a copy from one cuts them -> the line that was written.

Nothing marks such a cut: it may go through a word, a number or the prefix. Two lines are joined only where the first
breaks off within something that is known, and the second says nothing by itself but completes it.
"""

import re
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import NamedTuple

from toto_compat.contract.log_line import LONGEST_LINE, printable
from toto_compat.contract.torch_messages import BEGINNING, CONTINUATION, FRAME
from toto_compat.logs.lines import TORCH_PREFIX, begins_record, without_prefix

_RECORD = ("function: '", "last reason: ")
_BEGINNINGS = (
    "torch._dynamo hit config.",
    "Recompiling function ",
    "triggered by the following guard failure(s):",
    "Graph break in user code at ",
    "Graph Break Reason: ",
    "skipping cudagraphs due to ",
    "disabling cudagraphs due to ",
    "cudagraph partition due to ",
    "_maybe_guard_rel() was called on non-relation expression ",
    "Using torch.compile for ",
)
_PARTS = frozenset(text[:end].rstrip() for text in (*_RECORD, *_BEGINNINGS, "- ") for end in range(len(text)))
# What the lines of a warning break off with; the spaces are torch's.
CUT_HEADS = tuple(f"  {text[:end]}" for text in _RECORD for end in range(1, len(text)))
# Long enough to be told from other words behind a prefix that is not known.
_LONG_PARTS = tuple(f" {part}" for part in sorted(_PARTS) if len(part) >= 8)
# The rest of torch's prefix behind its time, '101341 torch/_dynamo/convert_frame.py:1358] [6/8', cut anywhere.
_CUT_PREFIX = re.compile(r"(?:\d+ ?)?(?:\w+/[\w/.-]*(?::\d*\]?)?|\w{0,12})(?: ?\[[^\]\s]{0,40})?")
_SAID = re.compile(
    r"function: '(?P<function>.*)|last reason:(?P<reason>.*)|(?:^|\s)- (?P<guard>\d+/.*|\d*$)"
    r"|cudagraphs?(?: partition| for backward)? due to(?P<skip>.*)"
    r"|_maybe_guard_rel\(\) was called on non-relation expression(?P<expression>.*)"
    r"|File \"(?P<frame>.*)|Reason: (?P<told>.*)"
    r"|(?P<beginning>hit config\.|Recompiling function|Graph break|_maybe_guard_rel\(|Using torch\.com)"
)
_SPACE_FOLLOWS = re.compile(r"(?:,| [=!<>]=| [|&<>])$")
_SPACE_PRECEDES = re.compile(r"(?:[=!<>]=|[|&<>]) ")
_LEADS = frozenset(("", "torch._dynamo", "torch/_dynamo"))  # what a message may have before what tells its kind
_COMMENT = re.compile(r"\s{2,}#")
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"|`[^`]*`")
_OPERATOR_DUE = re.compile(r"(?:[=!<>,(\[{+*/&|'\"`-]|\b(?:and|or|is|not|in))$")
_GUARD = re.compile(r"(?:\d+/\d+(?:_\d+)?:\s+\S|[^\d\s]).*")
_WHOLE_GUARD = re.compile(
    r"^(?:[\d/_]+:\s+)?(?:not )?\w+\(.*\)$|\S (?:[=!<>]=|[<>]|is|is not|in|not in) \S|\b(?:actual|got) \S|deallocated$"
)
_WHOLE_SKIP = re.compile(
    r"(?:mutated inputs \(\d+ instances?\)|incompatible op \S+\.(?:default|Tensor|Scalar)|cpu device \([^()]+\)"
    r"|(?:non gpu|[A-Za-z]+) ops)(?:\.? Found from\s?:)?"
)
# How most lines of interest end: of those nothing more has to be known.
_ENDS_WHOLE = re.compile(r"(?:_limit \(\d+\)|\.py:\d+\)| [=!<>]= \d+| instances?\)|\.default)\s*$")
_LONGEST_END = 16
_NEXT_TERM = re.compile(r"\s?[|&] ")
_PROSE = re.compile(r"\w\s+[\w(]")  # of words beside each other, which an expression has not


class _Grade(IntEnum):
    CUT = 0  # something must follow
    OPEN = 1  # something may follow
    WHOLE = 2


class _Said(NamedTuple):
    kind: str
    grade: _Grade

    @property
    def is_before_message(self) -> bool:
        return self.kind in ("part", "prefix")


def width_of(raw: str) -> int:
    """Count the columns that a line takes."""
    return len(printable(raw[:LONGEST_LINE].rstrip("\r\n")))


def may_be_cut(raw: str) -> bool:
    """Tell whether a line breaks off within something that is known, or may do so."""
    if _ENDS_WHOLE.search(raw, max(0, len(raw) - _LONGEST_END)):
        return False
    if (raw.endswith("'") and raw.count("'") == 2 and "function: '" in raw) or _is_packed(raw):
        return False
    said = _said(*_message(raw))
    return said is not None and said.grade < _Grade.WHOLE


def mended(head: str, rest: str, width: int = 0) -> str | None:
    """Join a line and the next one where they are pieces of one that was cut; None if they are not.

    A line is as wide as its first piece unless that is itself joined of pieces of this width.
    """
    if begins_record(rest):
        return None
    bare = printable(rest[:LONGEST_LINE].rstrip("\r\n"))
    if begins_record(bare) or not bare or len(head) > LONGEST_LINE or _is_packed(head) or _is_packed(rest):
        return None
    head = head.rstrip("\r\n")
    said, width = _said(*_message(head)), width or width_of(head)
    if bare.startswith("  ") and said is not None and not said.is_before_message:  # a formatter indents what it wraps
        rest = bare = f" {bare.strip()}"
    if head.endswith(" ") or bare.startswith(" "):
        glues = [""]
    else:
        # A terminal cuts anywhere, a formatter at a space: what fits best is taken.
        glues = [" ", ""] if _SPACE_FOLLOWS.search(head) or _SPACE_PRECEDES.match(bare) else ["", " "]
    wholes = [(_fit(said, bare, f"{head}{glue}{bare}", width), f"{head}{glue}{rest}") for glue in glues]
    fit, whole = max(wholes, key=lambda one: one[0])
    return whole if fit >= 0 else None


def _is_packed(raw: str) -> bool:
    """Tell of JSON and of several lines in one: those have their own ends."""
    return '{"' in raw or "\\n" in raw or "\r" in raw.rstrip("\r\n")


def _fit(said: _Said | None, rest: str, whole: str, width: int) -> float:
    """Grade the line that two pieces make, of which the first says this; -1 where they are none."""
    text, prefixed = _message(whole)
    now = _said(text, prefixed)
    begins = BEGINNING.search(text)
    grade = (now.grade if now is not None else _Grade.CUT) + (0.5 if begins else 0)
    alone = BEGINNING.search(rest) or CONTINUATION.search(rest)
    if alone:  # only what stands before the message was cut off
        message = text if prefixed else without_prefix(text)
        before = len(message) - len(rest) + alone.start()
        return grade if (prefixed or message != text) and before >= 0 and message[:before].strip() in _LEADS else -1
    if said is None or now is None:
        return grade if begins and begins.start() < len(text) - len(rest) < begins.end() else -1
    if said.kind == "expression" and _PROSE.search(rest):
        fits = False
    elif said.kind == "expression" and _NEXT_TERM.match(rest):
        fits = now.grade is _Grade.OPEN or len(rest) == width
    else:
        begins_now = said.is_before_message and not now.is_before_message
        goes_on = len(rest) == width and now.grade < _Grade.WHOLE  # a piece of three or more
        fits = begins_now or goes_on or now.grade > said.grade
    return grade if fits else -1


def _message(raw: str) -> tuple[str, bool]:
    """Take torch's prefix from a line, and tell whether it had one."""
    text = printable(raw[:LONGEST_LINE].rstrip("\r\n"))
    prefix = TORCH_PREFIX.search(text)
    return (text[prefix.end() :], True) if prefix else (text, False)


def _said(text: str, prefixed: bool) -> _Said | None:
    """Say what a message tells, and whether it is all of it; None for what is not known."""
    found = _SAID.search(text)
    if found:
        kind = str(found.lastgroup)
        if kind in _GRADES:
            return _Said(kind, _GRADES[kind](found[kind]))
        whole = (FRAME if kind == "frame" else BEGINNING).search(text)
        return _Said(kind, _Grade.WHOLE if whole else _Grade.CUT)
    bare = (text if prefixed else without_prefix(text)).strip()
    if bare in _PARTS if bare else prefixed:
        return _Said("part", _Grade.CUT)
    cut_prefix = prefixed and _CUT_PREFIX.fullmatch(bare)
    return _Said("prefix", _Grade.CUT) if cut_prefix or text.rstrip().endswith((*CUT_HEADS, *_LONG_PARTS)) else None


def _grade_function(value: str) -> _Grade:
    _, closed, place = value.partition("'")
    opens = place.lstrip().startswith("(")
    return _Grade.WHOLE if closed and (not opens or place.rstrip().endswith(")")) else _Grade.CUT


def _grade_guard(value: str) -> _Grade:
    guard = _COMMENT.split(value, maxsplit=1)[0].strip()
    if not _GUARD.fullmatch(guard) or _is_open(guard):
        return _Grade.CUT
    return _Grade.WHOLE if _WHOLE_GUARD.search(guard) else _Grade.OPEN


def _grade_skip(value: str) -> _Grade:
    reason = value.rpartition(" due to ")[2].strip()
    if _WHOLE_SKIP.fullmatch(reason):
        return _Grade.WHOLE
    return _Grade.OPEN if reason and not _is_open(reason) else _Grade.CUT


def _grade_expression(value: str) -> _Grade:
    # One that is closed may go on behind an operator.
    return _Grade.OPEN if value.endswith(")") and not _is_open(value) else _Grade.CUT


def _grade_told(value: str) -> _Grade:
    return _Grade.CUT if _is_open(value) else _Grade.WHOLE


def _is_open(text: str) -> bool:
    """Tell whether a bracket or a quote is not closed, or an operator stands at the end."""
    bare = _QUOTED.sub("x", text).rstrip()
    opened = sum(bare.count(bracket) for bracket in "([{") - sum(bare.count(bracket) for bracket in ")]}")
    return opened > 0 or "`" in bare or _OPERATOR_DUE.search(bare) is not None


_GRADES: Mapping[str, Callable[[str], _Grade]] = {
    "function": _grade_function,
    "reason": _grade_guard,
    "guard": _grade_guard,
    "skip": _grade_skip,
    "expression": _grade_expression,
    "told": _grade_told,
}
