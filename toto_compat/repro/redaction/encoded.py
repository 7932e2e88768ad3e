"""Secrets in addresses and pages: percent-encoded, once or more often, as HTML's entities, or between XML's marks."""

import re

from toto_compat.repro.redaction.names import is_secret_name
from toto_compat.repro.redaction.parts import REDACTED

_PERCENT = r"%(?:25)*+"
_QUOTE = rf"(?:{_PERCENT}2[27]|&(?:quot|apos|#0*+3[49]|#x0*+2[27]);)"
_SPACE = rf"(?:{_PERCENT}20|&nbsp;|&#0*+32;|[ \t])*+"
_IS = rf"(?:{_PERCENT}3[AD]|&(?:equals|colon|#0*+(?:58|61)|#x0*+3[AD]);)"
# A name with a separator, or with quotes around it, that is encoded. It may begin behind an encoded sign.
_HEAD = re.compile(
    r"(?:(?<![\w.%-])|(?<=%[0-9A-F][0-9A-F]))(?P<key>[\w.-]++)"
    rf"(?:{_QUOTE}{_SPACE}(?:{_IS}|[=:])|{_SPACE}{_IS}){_SPACE}",
    re.I,
)
_OPEN = re.compile(_QUOTE, re.I)
_QUOTED = re.compile(rf"(?:(?!{_QUOTE})[^\s<>\"'])++", re.I)
# Up to the next parameter or quote; an entity of another kind is part of it.
_BARE = re.compile(
    rf"(?:(?!{_QUOTE}|{_PERCENT}(?:26|0[AD])|&amp;|&(?!#?\w{{1,8}};))[^\s<>\"'])++",
    re.I,
)
_URL = re.compile(
    rf"(?P<name>(?<![\w+.-])[a-z][a-z0-9+.-]{{0,30}}{_PERCENT}3A{_PERCENT}2F{_PERCENT}2F)(?!{REDACTED})"
    rf"(?:(?!{_PERCENT}(?:2F|40))[^\s<>\"'&]){{1,300}}+(?={_PERCENT}40)",
    re.I,
)
_HEADERS = re.compile(r"(?:proxy-)?authorization|(?:set-)?cookie", re.I)
_ELEMENT = re.compile(
    r"(?P<name>(?:<|&lt;)(?P<key>[\w.-]++)(?:>|&gt;))(?P<value>(?:(?!&lt;)[^<\n])++)(?=(?:<|&lt;)/)", re.I
)
_ATTRIBUTE = re.compile(
    r"(?P<name>(?<![\w.-])(?:key|name|id)=(?P<quote>[\"'])(?P<key>[\w.-]++)(?P=quote)[ \t]++value=)"
    r"(?P<value>\"[^\"\n]*+\"|'[^'\n]*+')",
    re.I,
)


def redact_encoded(text: str) -> str:
    """Return the text without secrets that are written in these ways."""
    if "%" in text:
        text = _URL.sub(rf"\g<name>{REDACTED}", text)
    if "%" in text or "&" in text:
        text = _without_assigned(text)
    if "<" in text or "&lt;" in text:
        text = _ELEMENT.sub(_if_secret, text)
        text = _ATTRIBUTE.sub(_if_secret, text)
    return text


def _without_assigned(text: str) -> str:
    pieces, at = [], 0
    for head in _HEAD.finditer(text):
        if head.start() < at or not (is_secret_name(head["key"]) or _HEADERS.fullmatch(head["key"])):
            continue
        opened = _OPEN.match(text, head.end())
        value = _QUOTED.match(text, opened.end()) if opened else _BARE.match(text, head.end())
        if value is not None:
            pieces += [text[at : value.start()], REDACTED]
            at = value.end()
    return "".join([*pieces, text[at:]])


def _if_secret(found: re.Match[str]) -> str:
    value = found["value"]
    if not is_secret_name(found["key"]) or value.strip("\"'") in ("", REDACTED):
        return found[0]
    quote = value[0] if value[0] in "\"'" else ""
    return f"{found['name']}{quote}{REDACTED}{quote}"
