"""Takes secrets out of text before it is written: tokens, keys, passwords, URLs with credentials, headers.

It errs on the side of taking out too much; what the compiler says passes unchanged, since no pattern fits it. All of it
takes time in proportion to the text: no pattern goes back over what it has read.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from toto_compat.repro.encoded_secrets import redact_encoded
from toto_compat.repro.secret_names import is_secret_name
from toto_compat.repro.secret_shapes import (
    ARGUMENT,
    ASSIGNED,
    BLOCK_MARK,
    BRACKET,
    COLOUR,
    COMMAND,
    CONTINUED,
    ESCAPED,
    HEADER,
    HINT,
    LONG_QUOTED,
    NETRC,
    OPTION,
    PAIR,
    PARAMETER,
    PHRASE,
    PRIVATE_KEY,
    QUOTED_VALUE,
    RECORD,
    REDACTED,
    SCHEME,
    SHAPES,
    SPOKEN,
    STANDS,
    URL,
    URL_WITH_SLASH,
    USER,
    WORD,
)
from toto_compat.repro.spoken_secrets import redact_spoken

__all__ = ["REDACTED", "is_random", "is_secret_name", "redact", "redact_data", "redact_variables"]

_BITS = 3.5  # per character, in 20 characters and more: words and paths stay below it, random ones do not
_BITS_WITH_SLASH = 4.0
_MOST_LINES = 40  # of a value in brackets or in a block
_OF_SEVERAL_WORDS = re.compile(r"pass|secret|cred|pw", re.I)
_A_PHRASE = re.compile(r"mnemonic|phrase|seed_?words|(?:recovery|backup)_?words", re.I)  # words, also behind a bare `=`
_WEB = re.compile(r"(?:https?|ssh|git|file|svn|hg|bzr)$|.*\+(?:https?|ssh|git|file)$", re.I)
_ARROWS = ("->", "\N{RIGHTWARDS ARROW}")
# Under these keys names are those of packages, whatever they say.
_PACKAGES = frozenset({"pins", "packages", "system_packages"})


def redact(text: str) -> str:
    """Return the text without its secrets and without colours; everything else, line breaks too, is as it was."""
    text = COLOUR.sub("", text)
    text = PRIVATE_KEY.sub(REDACTED, text)
    text = URL.sub(rf"\g<name>{REDACTED}@", text)
    text = URL_WITH_SLASH.sub(_url_without_password, text)
    text = redact_encoded(text)
    for pattern in (PARAMETER, HEADER, USER, COMMAND, NETRC, PHRASE):
        text = pattern.sub(_without_value, text)
    for pattern in (OPTION, ARGUMENT, PAIR):
        text = pattern.sub(_if_secret, text)
    text = _without_assigned(text)
    text = SCHEME.sub(_without_value, text)
    text = redact_spoken(text)
    return SHAPES.sub(REDACTED, text)


def redact_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return variables without secret values: by their names, and by what their values look like."""
    kept = {}
    for name, value in sorted(variables.items()):
        secret = is_secret_name(name) or (HINT.search(name) and is_random(value))
        kept[name] = REDACTED if secret and value else redact(value)
    return kept


def redact_data(data: Any, key: str = "") -> Any:
    """Take secrets out of data: by the names of its keys, and by what its texts look like."""
    if isinstance(data, Mapping):
        secret, packages = is_secret_name(key), key in _PACKAGES
        return {
            name: redact_data(value, key if secret else "" if packages else str(name)) for name, value in data.items()
        }
    if isinstance(data, list | tuple):
        return [redact_data(value, key) for value in data]
    if isinstance(data, str):
        return REDACTED if data and is_secret_name(key) else redact(data)
    return data


def is_random(value: str) -> bool:
    """Tell whether a value looks drawn at random: long, of one word, letters and digits evenly used."""
    bare = value.strip("\"'`,;")
    if (
        len(bare) < 20
        or re.search(r"[\s\\()\[\]{}<>,\"']", bare)
        or not re.search(r"\d", bare)
        or not re.search(r"[A-Za-z]", bare)
    ):
        return False
    counts = Counter(bare)
    bits = -sum(count / len(bare) * math.log2(count / len(bare)) for count in counts.values())
    if "/" in bare:  # a path, unless it is all of base64 and more mixed than any path
        mixed = re.search(r"[a-z]", bare) and re.search(r"[A-Z]", bare)
        return bool(mixed and re.fullmatch(r"[A-Za-z0-9+][A-Za-z0-9+/]*=*", bare)) and bits >= _BITS_WITH_SLASH
    return bits >= _BITS or (len(bare) >= 32 and bool(re.fullmatch(r"[0-9a-fA-F-]+", bare)))


# --- the parts --------------------------------------------------------------------------------------------------------


def _without_value(found: re.Match[str]) -> str:
    return f"{found['name']}{_emptied(found['value'])}"


def _if_secret(found: re.Match[str]) -> str:
    return _without_value(found) if is_secret_name(found["key"]) else found[0]


def _emptied(value: str) -> str:
    """Write what stands for a value: in its own quotes where all of it is quoted."""
    quoted = QUOTED_VALUE.fullmatch(value) or ESCAPED.fullmatch(value) or LONG_QUOTED.fullmatch(value)
    return f"{quoted['open']}{REDACTED}{quoted['close']}" if quoted else REDACTED


def _url_without_password(found: re.Match[str]) -> str:
    """A port and a path with an @ look like a password with a slash; only where no web address stands is it one."""
    if _WEB.match(found["scheme"]) and re.match(r"\d{1,5}[/?#]", found["value"]):
        return found[0]
    return f"{found['scheme']}://{REDACTED}@"


def _without_assigned(text: str) -> str:
    """Take out what is assigned to a secret's name, or to one that hints at a secret and looks random."""
    pieces, at, looked_at = [], 0, 0
    for head in ASSIGNED.finditer(text):
        if head.start() < at or STANDS.match(text, head.end()):
            continue
        if is_secret_name(head["name"]) and not _is_spoken_of(text, head):
            start, end = _extent(text, head)
        elif head.start() >= looked_at and HINT.search(head["name"]) and (value := _one_value(text, head.end())):
            looked_at = value.end()
            start, end = value.span() if is_random(value[0]) else (at, at)
        else:
            continue
        if start < end:
            pieces += [text[at:start], _emptied(text[start:end])]
            at = end
    return "".join([*pieces, text[at:]])


def _is_spoken_of(text: str, head: re.Match[str]) -> bool:
    """Tell of `First pass: ...` in a sentence, which is no password; one stands at the beginning of its line."""
    gap = head["gap"].strip()
    if head["name"].lower() not in ("pass", "pw") or not gap.startswith((":", *_ARROWS)):
        return False
    if gap.startswith(_ARROWS):
        return True
    return bool(text[max(0, head.start() - 200) : head.start()].rpartition("\n")[2].strip(" \t-"))


def _extent(text: str, head: re.Match[str]) -> tuple[int, int]:
    """Find where a secret value begins and ends: quoted, in brackets, in lines below, or of several words."""
    at = head.end()
    quoted = QUOTED_VALUE.match(text, at) or ESCAPED.match(text, at)
    if quoted:
        return quoted.span()
    quoted = LONG_QUOTED.match(text, at)
    if quoted and quoted["inside"].count("\n") <= _MOST_LINES and not RECORD.search(quoted["inside"]):
        return quoted.span()
    if BRACKET.match(text, at):
        end = _end_of_brackets(text, at)
        more = WORD.match(text, end) if text[end : end + 1] not in _AFTER_BRACKETS else None
        return at, more.end() if more else end
    if below := BLOCK_MARK.match(text, at):
        return _lines_below(text, head.start(), below.end())
    spoken = head["gap"][-1].isspace() and "'" not in head["gap"] and '"' not in head["gap"]
    several = _A_PHRASE.search(head["name"]) or (spoken and _OF_SEVERAL_WORDS.search(head["name"]))
    value = (SPOKEN if several else WORD).match(text, at)
    return (at, _end_of_continued(text, value.end())) if value else (at, at)


def _end_of_continued(text: str, end: int) -> int:
    """Where a value ends that goes on in the next line, since a backslash is the last of this one."""
    for _ in range(_MOST_LINES):
        below = CONTINUED.match(text, end)
        more = WORD.match(text, below.end()) if below else None
        if more is None:
            break
        end = more.end()
    return end


def _one_value(text: str, at: int) -> re.Match[str] | None:
    return QUOTED_VALUE.match(text, at) or WORD.match(text, at)


_AFTER_BRACKETS = tuple(",;)}]&>\"'")
_BRACKETS = re.compile(r"[(\[{)\]}]|\\.|\"(?:[^\"\\\n]|\\.)*+\"|'(?:[^'\\\n]|\\.)*+'|\n")


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
