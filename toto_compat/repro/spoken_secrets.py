"""Secrets that a sentence tells: 'the password is hunter2', 'logged in with password hunter2'.

Most sentences about a password tell none: 'the password is wrong', 'token is None'. What is told is taken for a secret
only if it is no word: quoted, or with a digit, a sign or a capital within it. 'the password is swordfish' is not found.
"""

import re

from toto_compat.repro.secret_names import is_secret_name
from toto_compat.repro.secret_shapes import REDACTED

_OF_TWO = r"(?:(?:api|access|private|signing|account|shared|encryption|license|secret|master|deploy|ssh|auth)[ ])?"
_BECOMES = (
    r"(?:(?:is|was|were|be|been|being|has been)[ ]++)?(?:(?:now|not)[ ]++)?(?:set|changed|reset|updated|equal)[ ]++to"
)
_SAYS = rf"(?:{_BECOMES}|(?:is|was|equals|becomes)(?:[ ]++now)?):?"
_SAID = re.compile(
    rf"(?P<name>(?<![\w.-])(?P<key>{_OF_TWO}[\w.-]++)[\"'`]?[ ]++{_SAYS}[ ]++)"
    r"(?P<value>\"[^\"\n]++\"|'[^'\n]++'|`[^`\n]++`|[^\s\"'`]\S*+)",
    re.I,
)
_WITH = re.compile(
    rf"(?P<name>(?<![\w.-])(?:with|using|and)[ ]++(?:the[ ]++|its[ ]++)?(?P<key>{_OF_TWO}[\w.-]++)[ ]++)"
    r"(?P<value>\"[^\"\n]++\"|'[^'\n]++'|`[^`\n]++`|[^\s\"'`]\S*+)",
    re.I,
)
_CODE = re.compile(r"v?\d++(\.\d++)*+|0x[0-9a-f]++|[a-z_]\w*+(\.[a-z_]\w*+|\[[^\]]*+\]|\([^)]*+\))++", re.I)
_PASSWORD = re.compile(r"pass|secret|cred", re.I)
_END = ".,;:!?)]}\"'`"
_NONE = re.compile(rf"none|null|nil|true|false|\{{.*|{REDACTED}", re.I)


def redact_spoken(text: str) -> str:
    """Return the text without the secrets that its sentences tell."""
    text = _SAID.sub(_if_told, text)
    return _WITH.sub(_if_given, text)


def _if_told(found: re.Match[str]) -> str:
    value = found["value"]
    return _without(found) if _is_of_a_secret(found["key"]) and _is_no_word(value, found["key"]) else found[0]


def _if_given(found: re.Match[str]) -> str:
    """Tell 'with password hunter2' from 'with password authentication': a letter and a digit, or quotes."""
    value = found["value"]
    mixed = re.search(r"\d", value) and re.search(r"[A-Za-z]", value) and len(value) >= 6
    told = (value[0] in "\"'`" and not _NONE.fullmatch(value[1:-1])) or (
        mixed and not re.match(r"0x|v?\d+\.\d|[./~$<*({\[]", value)
    )
    return _without(found) if told and _is_of_a_secret(found["key"]) else found[0]


def _is_of_a_secret(key: str) -> bool:
    # a pass of the compiler is spoken of more often than a password by that name
    return key.lower() not in ("pass", "pw") and is_secret_name(key)


def _is_no_word(value: str, key: str) -> bool:
    if value[0] in "\"'`":
        return not _NONE.fullmatch(value[1:-1])
    bare = value.rstrip(_END)
    if len(bare) < 4 or bare[0] in "$<*/~({[" or bare.startswith(("./", "../")):
        return False
    # of a token more is said than of a password: its number, its type, what holds it
    if not _PASSWORD.search(key) and (_CODE.fullmatch(bare) or _CODE.fullmatch(value)):
        return False
    plain = re.fullmatch(r"[A-Za-z]?[a-z]*(?:[-_'/.][a-z]+)*|[A-Z_-]+", bare)
    return plain is None


def _without(found: re.Match[str]) -> str:
    value = found["value"]
    if value[0] in "\"'`":
        return f"{found['name']}{value[0]}{REDACTED}{value[-1]}"
    return f"{found['name']}{REDACTED}{value[len(value.rstrip(_END)) :]}"
