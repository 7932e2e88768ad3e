"""Secrets that a sentence tells: 'the password is hunter2', 'password for me: hunter2', 'with password hunter2'.

Most sentences about a password tell none: 'the password is wrong', 'token is None'. What is told is taken for a secret
only if it is no word: quoted, or with a digit, a sign or a capital within it. 'the password is swordfish' is not found.
"""

import re

from toto_compat.repro.redaction.names import is_secret_in_prose
from toto_compat.repro.redaction.parts import REDACTED

# Bearer x, Basic x: how it is shown at a door, in a header or in a sentence
_SCHEME = re.compile(r"(?P<name>\b(?:bearer|basic|digest|token)[ \t]++)[A-Za-z0-9._~+/=-]{12,}", re.I)
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
# What an error echoes: Invalid API key X, API key [X] accepted, token loaded (X)
_ECHOED = re.compile(
    rf"(?P<name>(?<![\w.-])(?P<key>{_OF_TWO}[\w-]++(?:(?<=key)|(?<=token)|(?<=secret)|(?<=password)|(?<=passphrase)))"
    r"[ ]++(?:(?:loaded|found|set|provided|accepted)[ ]++)?[\[(<]?)"
    r"(?P<value>\"[\w+/=-]{12,200}+\"|'[\w+/=-]{12,200}+'|`[\w+/=-]{12,200}+`|[\w+/=-]{12,200}+)(?![\w./])",
    re.I,
)
_WHO = r"(?:\"[^\"\n]++\"|'[^'\n]++'|[\w.@\\/-]++)"
_OF_SOMEBODY = re.compile(
    rf"(?P<name>(?<![\w.-])(?P<key>{_OF_TWO}[\w.-]++)[ ]++(?:for|of)[ ]++(?:(?:user|role|account)[ ]++)?{_WHO}"
    rf"(?:[ ]*+[:=][ ]*+|[ ]++{_SAYS}[ ]++))"
    r"(?P<value>\"[^\"\n]++\"|'[^'\n]++'|`[^`\n]++`|[^\s\"'`]\S*+)",
    re.I,
)
_HEADER = re.compile(
    r"(?P<name>(?<![\w.-])(?P<key>x-[\w-]++)[ \t]++)(?P<value>\"[^\"\n]++\"|'[^'\n]++'|`[^`\n]++`|[^\s\"'`]\S*+)", re.I
)
_CODE = re.compile(r"v?\d++(\.\d++)*+|0x[0-9a-f]++|[a-z_]\w*+(\.[a-z_]\w*+|\[[^\]]*+\]|\([^)]*+\))++", re.I)
_PASSWORD = re.compile(r"pass|secret|cred", re.I)
_END = ".,;:!?)]}\"'`"
_NONE = re.compile(rf"none|null|nil|true|false|\{{.*|{REDACTED}", re.I)


def redact_spoken(text: str) -> str:
    """Return the text without the secrets that its sentences tell."""
    text = _SCHEME.sub(rf"\g<name>{REDACTED}", text)
    text = _SAID.sub(_if_told, text)
    text = _OF_SOMEBODY.sub(_if_told, text)
    text = _WITH.sub(_if_given, text)
    text = _ECHOED.sub(_if_drawn, text)
    return _HEADER.sub(_if_given, text)


def _if_told(found: re.Match[str]) -> str:
    value = found["value"]
    return _without(found) if is_secret_in_prose(found["key"]) and _is_no_word(value, found["key"]) else found[0]


def _if_given(found: re.Match[str]) -> str:
    """Tell 'with password hunter2' from 'with password authentication': a letter and a digit, or quotes."""
    value = found["value"]
    mixed = re.search(r"\d", value) and re.search(r"[A-Za-z]", value) and len(value) >= 6
    told = (value[0] in "\"'`" and not _NONE.fullmatch(value[1:-1])) or (
        mixed and not re.match(r"0x|v?\d+\.\d|[./~$<*({\[]", value)
    )
    return _without(found) if told and is_secret_in_prose(found["key"]) else found[0]


def _if_drawn(found: re.Match[str]) -> str:
    """Tell a token from a word of code: letters of both kinds with digits, or digits and letters of a hash."""
    bare = found["value"].strip("\"'`")
    mixed = all(re.search(kind, bare) for kind in ("[a-z]", "[A-Z]", r"\d"))
    hashed = len(bare) >= 32 and re.fullmatch(r"[0-9a-f-]+", bare)
    return _without(found) if (mixed or hashed) and is_secret_in_prose(found["key"]) else found[0]


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
