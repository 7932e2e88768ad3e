"""Secrets that a program shows: in tables and columns, below a line of code as by loguru, in pydantic's errors."""

import re

from toto_compat.repro.redaction.assigned import emptied
from toto_compat.repro.redaction.names import is_secret_in_prose, is_secret_name
from toto_compat.repro.redaction.parts import NAME, QUOTED, REDACTED
from toto_compat.repro.redaction.shapes import is_random

_BAR = r"[|\u2502\u2503\u2551]"
_TITLE = rf"(?P<key>{NAME}(?: {NAME}){{0,2}}+)"  # of a row: API key
# | api_key | x |, as tabulate and rich write it
_CELL = re.compile(
    rf"(?P<name>{_BAR}[ \t]*+[\"']?{_TITLE}[\"']?[ \t]*+{_BAR}[ \t]*+)"
    rf"(?P<value>(?!{REDACTED})[^\s|\u2502\u2503\u2551]++)(?=[ \t]*+{_BAR})"
)
# A line of a name and a value, with the space between them of a column
_COLUMN = re.compile(
    rf"^(?P<name>[ \t]*+{_TITLE}(?:[ ]{{2,}}+|[ ]?\t[ \t]*+))"
    rf"(?P<value>(?!{REDACTED})(?![\d.,]++%?[ \t]*+$)[^\s=:|]\S*+)(?=[ \t]*+$)",
    re.M,
)
# pydantic names the field in a line of its own, and what it was given in the next one
_FIELD = re.compile(
    rf"^(?P<name>[ \t]*+(?P<key>{NAME})\r?\n[ \t]++[^\n]{{0,300}}?\binput_value=)(?P<value>{QUOTED}|[^\s,\]]++)", re.M
)
# What loguru writes below a line of code: bars that lead to names, and the value of one at the end of each line
_VALUE = re.compile(r"^(?P<name>[ \u2502]*+\u2514 )(?P<value>[^\n]++)$", re.M)


def redact_shown(text: str) -> str:
    """Return the text without the secrets that are shown in these ways."""
    text = _COLUMN.sub(_if_secret, text)
    text = _FIELD.sub(_if_secret, text)
    if "|" in text or "\u2502" in text or "\u2503" in text or "\u2551" in text:
        text = _CELL.sub(_if_secret, text)
    return _below_code(text) if "\u2514 " in text else text


def _if_secret(found: re.Match[str]) -> str:
    return f"{found['name']}{emptied(found['value'])}" if is_secret_in_prose(found["key"]) else found[0]


def _below_code(text: str) -> str:
    """Take out the values of secrets' names, which stand in the line of code above at the same column."""
    lines = text.split("\n")
    code = ""
    for at, line in enumerate(lines):
        found = _VALUE.fullmatch(line)
        if found is None:
            code = line
            continue
        name = _name_at(code, found["name"].index("\u2514"))
        if is_secret_name(name) or is_random(found["value"]):
            lines[at] = f"{found['name']}{emptied(found['value'])}"
    return "\n".join(lines)


def _name_at(code: str, column: int) -> str:
    found = re.compile(r"\w*").match(code, column)
    return found[0] if found else ""
