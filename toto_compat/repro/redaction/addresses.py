"""Secrets in addresses: credentials before the host, parameters behind the question mark, keys that end a path."""

import re

from toto_compat.repro.redaction.parts import REDACTED
from toto_compat.repro.redaction.shapes import is_random

_URL = re.compile(r"(?P<name>(?<![\w+.-])[A-Za-z][A-Za-z0-9+.-]{0,30}://)(?!<redacted>)[^\s/?#]+@")
_URL_WITH_SLASH = re.compile(
    r"(?<![\w+.-])(?P<scheme>[A-Za-z][A-Za-z0-9+.-]{0,30})://[^\s/?#@:\"']*+:(?P<value>[^\s@\"'/?#]*+[/?#][^\s\"']{0,300})@"
)
_WEB = re.compile(r"(?:https?|ssh|git|file|svn|hg|bzr)$|.*\+(?:https?|ssh|git|file)$", re.I)
_PARAMETER = re.compile(
    r"(?P<name>[?&][\w.-]{0,64}?(?:token|key|secret|sig|sas|pass|pwd|auth|code|credential|jwt)[\w.-]{0,64}=)"
    r"(?!<redacted>)[^&\s#'\"]+",
    re.I,
)
# user:password@host:port, as proxies are listed
_PROXY = re.compile(r"(?<![\w/.@:+-])(?P<user>[\w.-]{1,64}+:)[^\s:@/\"'<>]{4,128}+@(?=[\w.-]{1,100}+:\d{2,5}(?!\d))")
# Keys of nodes, streams, hooks and channels: https://host/v3/<key>, wss://host/ws/<key>, https://host/t/<key>/x
_PATH = re.compile(
    r"(?P<name>(?:(?:https?|wss?)://[^\s\"'<>?#]|(?<=with url: ))[^\s\"'<>?#]{0,150}?"
    r"(?:/(?:v\d|ws|rpc|hooks?|webhooks?\w{0,8}|t|keys?|tokens?)|\.quiknode\.pro)/)"
    r"(?P<value>[\w-]{20,200}+)(?![\w.@-])",
    re.I,
)


def redact_addresses(text: str) -> str:
    """Return the text without the secrets of its addresses; hosts and paths stay."""
    text = _URL.sub(rf"\g<name>{REDACTED}@", text)
    text = _URL_WITH_SLASH.sub(_without_password, text)
    text = _PROXY.sub(rf"\g<user>{REDACTED}@", text)
    text = _PATH.sub(_without_key, text)
    return _PARAMETER.sub(rf"\g<name>{REDACTED}", text)


def _without_password(found: re.Match[str]) -> str:
    """A port and a path with an @ look like a password with a slash; only where no web address stands is it one."""
    if _WEB.match(found["scheme"]) and re.match(r"\d{1,5}[/?#]", found["value"]):
        return found[0]
    return f"{found['scheme']}://{REDACTED}@"


def _without_key(found: re.Match[str]) -> str:
    return f"{found['name']}{REDACTED}" if is_random(found["value"]) else found[0]
