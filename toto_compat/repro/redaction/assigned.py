"""Secrets that are assigned to a name: `token=x`, `"password": "x"`, a block of YAML, a list over several lines."""

import re
from collections.abc import Iterator

from toto_compat.repro.redaction.names import is_secret_name
from toto_compat.repro.redaction.parts import BOUNDARY, IN_NAME, NAME, QUOTE, QUOTED, REDACTED, SPACE
from toto_compat.repro.redaction.shapes import is_random

# A name and what stands between it and its value. `==` is a guard or a pin, unless what follows is quoted.
_ASSIGNED = re.compile(
    rf"(?<!{IN_NAME})(?P<name>{NAME})"
    rf"(?P<gap>{QUOTE}\]?{SPACE}(?:=>|:=|[+?]?=(?!=)|==(?={SPACE}[\"'])|:(?!:)|->|[\u2192\uff1d\uff1a\u2236\ufe55\ufe66]){SPACE})"
)
# It is redacted already, by this or with asterisks, or says that there is none.
_STANDS = re.compile(
    rf"[bru]?\\*+[\"'`]?{REDACTED}"
    r"|(?:None|null|nil|true|false|\"\"|''|[\"']?\*++[\"']?)(?=[)}\]]*+(?:[,;]?\s|[,;]?$))",
    re.I | re.M,
)
# A name that only hints at a key: its value goes if it looks drawn at random.
_HINT = re.compile(r"key|auth|cred|pass|salt|priv|nonce|signature|(?:sig|api)$|(?<![a-z])sign$|[_.-]api[_.-]", re.I)
_WORD_BEFORE = re.compile(r"(?<![\w.-])[A-Za-z]{3,12}+ \Z")
# What has a name beside it in a field of its own: {"name": "DB_PASSWORD", "value": "x"}, in JSON as in YAML.
_NAMED = rf"(?:name|key|variable|var|field|option|id){QUOTE}{SPACE}[:=]{SPACE}{QUOTE}(?P<key>{NAME}){QUOTE}"
_NAMED_BEFORE = re.compile(rf"(?<![\w.-]){_NAMED}\s*+,?\s*+{QUOTE}\Z", re.I)
_NAMED_AFTER = re.compile(rf"\s*+,?\s*+{QUOTE}{_NAMED}", re.I)
# {"key": "x", "secret": "y"}
_WITH_ITS_SECRET = re.compile(r"\s*+,?\s*+[\"']?secret(?![A-Za-z])", re.I)
_LONGEST_FIELD = 300  # of a name that stands before its value
_ARROWS = ("->", "\N{RIGHTWARDS ARROW}")

# --- how far a value goes ---------------------------------------------------------------------------------------------

_QUOTED_VALUE = re.compile(
    r"(?P<open>[bBrRuUfF]{0,2}+(?P<close>[\"'`]))(?!(?P=close))"
    rf"(?:(?<=\")(?:[^\"\\\n]|\\.)*+\"|(?<=')(?:[^'\\\n]|\\.)*+'|(?<=`)[^`\n]*+`){BOUNDARY}",
    re.M,
)
# The same over several lines: what opens it is not closed in its own line.
_LONG_QUOTED = re.compile(
    r"(?P<open>[bBrRuUfF]{0,2}+(?P<close>\"{3}|'{3}|[\"']))"
    rf"(?P<inside>(?:(?!(?P=close))(?:\\.|[^\\])){{1,10000}}+)(?P=close){BOUNDARY}",
    re.M | re.S,
)
# A line that begins as those of loggers do, so that nothing that was opened before goes on in it.
_RECORD = re.compile(
    r"^[ \t]*+[\[(]?(?:[VDIWEF]\d{4} \d\d:|\d{4}-\d\d-\d\d[T ]\d\d:|[A-Z][a-z]{2} [ \d]\d \d\d:)", re.M
)
_CONTINUED = re.compile(r"(?<=\\)\r?\n[ \t]*+")
_ESCAPED = re.compile(r"(?P<open>(?P<close>\\{1,8}+[\"']))(?:(?!(?P=close))[^\n])++(?P=close)")
_BRACKET = re.compile(r"\w{0,40}+[(\[{]")
_BRACKETS = re.compile(r"[(\[{)\]}]|\\.|\"(?:[^\"\\\n]|\\.)*+\"|'(?:[^'\\\n]|\\.)*+'|\n")
_AFTER_BRACKETS = tuple(",;)}]&>\"'")
_WORD = re.compile(rf"(?>{QUOTED}|\\\S|\S)++")
# Words up to the end of the line, a bar, or the next `name=`.
_WORDS = re.compile(rf"(?>{QUOTED}|\\\S|\S)++(?:[ \t]++(?!\||{NAME}[\"']?[=:])\S++)*+")
# The value is in the lines below: nothing more in this one, or the mark of a block of YAML.
_BLOCK_MARK = re.compile(r"(?:[|>][-+0-9]{0,3})?[ \t]*+\r?\n(?=[ \t])")
_MOST_LINES = 40  # of a value in brackets or in a block
_OF_SEVERAL_WORDS = re.compile(r"pass|secret|cred|pw|value$", re.I)
_APP_PASSWORD = re.compile(r"[a-z]{4}(?: [a-z]{4}){3}(?!\w)")  # as mail services make them
_A_PHRASE = re.compile(r"mnemonic|phrase|seed|(?:recovery|backup)_?words", re.I)  # words, also behind a bare `=`


def redact_assigned(text: str) -> str:
    """Take out what is assigned to a secret's name, or to one that hints at a secret and looks random."""
    pieces, at, looked_at = [], 0, 0
    for head in _ASSIGNED.finditer(text):
        if head.start() < at or _STANDS.match(text, head.end()):
            continue
        if _is_a_secrets(text, head) or _is_named_before(text, head):
            start, end = _extent(text, head)
        elif head["name"].lower() == "value" and head.start() >= looked_at:
            value = _ESCAPED.match(text, head.end()) or _one_value(text, head.end())
            looked_at = value.end() if value else looked_at
            start, end = value.span() if value and _is_named_after(text, value) else (at, at)
        elif head.start() >= looked_at and hints_at_a_secret(head["name"]) and (value := _one_value(text, head.end())):
            looked_at = value.end()
            drawn = is_random(value[0]) or (head["name"].lower() == "key" and _WITH_ITS_SECRET.match(text, value.end()))
            start, end = value.span() if drawn else (at, at)
        else:
            continue
        if start < end:
            pieces += [text[at:start], emptied(text[start:end])]
            at = end
    return "".join([*pieces, text[at:]])


def hints_at_a_secret(name: str) -> bool:
    """Tell whether what has this name is a secret if it looks drawn at random."""
    return _HINT.search(name) is not None


def emptied(value: str) -> str:
    """Write what stands for a value: in its own quotes where all of it is quoted."""
    quoted = _QUOTED_VALUE.fullmatch(value) or _ESCAPED.fullmatch(value) or _LONG_QUOTED.fullmatch(value)
    return f"{quoted['open']}{REDACTED}{quoted['close']}" if quoted else REDACTED


def _is_a_secrets(text: str, head: re.Match[str]) -> bool:
    """Judge the name, of `API key: ...` with the word before it."""
    if head["name"].lower() in ("key", "phrase", "seed"):
        before = _WORD_BEFORE.search(text[max(0, head.start() - 20) : head.start()])
        return before is not None and is_secret_name(f"{before[0]}{head['name']}")
    return is_secret_name(head["name"]) and not _is_spoken_of(text, head)


def _is_spoken_of(text: str, head: re.Match[str]) -> bool:
    """Tell of `First pass: ...` in a sentence, which is no password; one stands at the beginning of its line."""
    gap = head["gap"].strip()
    if head["name"].lower() not in ("pass", "pw") or not gap.startswith((":", *_ARROWS)):
        return False
    if gap.startswith(_ARROWS):
        return True
    return bool(text[max(0, head.start() - 200) : head.start()].rpartition("\n")[2].strip(" \t-"))


def _is_named_before(text: str, head: re.Match[str]) -> bool:
    if head["name"].lower() != "value":
        return False
    found = _NAMED_BEFORE.search(text[max(0, head.start() - _LONGEST_FIELD) : head.start()])
    return found is not None and is_secret_name(found["key"])


def _is_named_after(text: str, value: re.Match[str]) -> bool:
    found = _NAMED_AFTER.match(text, value.end())
    return found is not None and is_secret_name(found["key"])


def _extent(text: str, head: re.Match[str]) -> tuple[int, int]:
    """Find where a secret value begins and ends: quoted, in brackets, in lines below, or of several words."""
    at = head.end()
    quoted = _QUOTED_VALUE.match(text, at) or _ESCAPED.match(text, at)
    if quoted:
        return quoted.span()
    quoted = _LONG_QUOTED.match(text, at)
    if quoted and quoted["inside"].count("\n") <= _MOST_LINES and not _RECORD.search(quoted["inside"]):
        return quoted.span()
    if _BRACKET.match(text, at):
        end = _end_of_brackets(text, at)
        more = _WORD.match(text, end) if text[end : end + 1] not in _AFTER_BRACKETS else None
        return at, more.end() if more else end
    if below := _BLOCK_MARK.match(text, at):
        return _lines_below(text, head.start(), below.end())
    spoken = head["gap"][-1].isspace() and "'" not in head["gap"] and '"' not in head["gap"]
    if app := _APP_PASSWORD.match(text, at):
        return app.span()
    several = _A_PHRASE.search(head["name"]) or (spoken and _OF_SEVERAL_WORDS.search(head["name"]))
    value = (_WORDS if several else _WORD).match(text, at)
    return (at, _end_of_continued(text, value.end())) if value else (at, at)


def _end_of_continued(text: str, end: int) -> int:
    """Where a value ends that goes on in the next line, since a backslash is the last of this one."""
    for _ in range(_MOST_LINES):
        below = _CONTINUED.match(text, end)
        more = _WORD.match(text, below.end()) if below else None
        if more is None:
            break
        end = more.end()
    return end


def _one_value(text: str, at: int) -> re.Match[str] | None:
    return _QUOTED_VALUE.match(text, at) or _WORD.match(text, at)


def _end_of_brackets(text: str, start: int) -> int:
    """Find where what is opened here is closed, a few lines below at most; else the line's end."""
    depth = lines = 0
    line_end = -1
    for found in _BRACKETS.finditer(text, start, start + 10_000):
        kind = found[0][:1]
        if kind == "\n":
            line_end = found.start() if line_end < 0 else line_end
            lines += 1
            if lines > _MOST_LINES:
                break
        elif kind in "([{":
            depth += 1
        elif kind in ")]}":
            depth -= 1
            if depth == 0:
                return found.end()
    if line_end < 0:
        line_end = text.find("\n", start)
    return len(text) if line_end < 0 else line_end


def _lines_below(text: str, name_at: int, start: int) -> tuple[int, int]:
    """Find the lines that stand deeper than the one with the name; without the indentation of the first."""
    own = _indentation(text, text.rfind("\n", 0, name_at) + 1)
    end = start
    for line_start, line_end in _lines(text, start):
        if line_start < line_end and _indentation(text, line_start) <= own:
            break
        end = line_end
    first = start + _indentation(text, start)
    return (first, end) if first < end else (start, start)


def _lines(text: str, start: int) -> Iterator[tuple[int, int]]:
    for _ in range(_MOST_LINES):
        if start >= len(text):
            return
        end = text.find("\n", start)
        end = len(text) if end < 0 else end
        yield start, end
        start = end + 1


def _indentation(text: str, start: int) -> int:
    at = start
    while at < len(text) and text[at] in " \t":
        at += 1
    return at - start
