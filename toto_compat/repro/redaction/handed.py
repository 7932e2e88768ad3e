"""Secrets that are handed over: in headers, options, commands, settings of a shell and statements of a database."""

import re

from toto_compat.repro.redaction.assigned import emptied, hints_at_a_secret
from toto_compat.repro.redaction.names import is_secret_name
from toto_compat.repro.redaction.parts import BOUNDARY, NAME, QUOTE, QUOTED
from toto_compat.repro.redaction.shapes import is_random

_HEADER = re.compile(
    r"(?P<name>(?<![\w.-])(?:(?:proxy-)?authorization|(?:set-)?cookie"
    rf"|x-(?=[\w-]*?(?:token|key|auth|secret|signature))[\w-]++){QUOTE}"
    rf"(?:[ \t]*+[=:]|(?<=[\"'])[ \t]*+,(?=[ \t]*+b?[\"']))[ \t]*+)"
    rf"(?P<value>(?!b?\\*[\"'`]?<redacted>)(?:b?{QUOTED}{BOUNDARY}|[^\r\n]+))",
    re.I | re.M,
)
# curl -u name:password; two numbers are a user and a group
_USER = re.compile(
    r"(?P<name>(?<![\w-])(?:-u|--user|--proxy-user)(?:[ \t=]++|[\"'][ \t]*+,[ \t]*+)[\"']?(?!\d++:\d++(?!\S))"
    r"[^\s:\"']++:)"
    r"(?P<value>(?!<redacted>)[^\s\"']+)"
)
# Programs whose -p or -a, or the one word behind which, is a password: sshpass -p x, mysql -px, wandb login x
_COMMAND = re.compile(
    r"(?P<name>(?<![\w./-])(?:sshpass|(?:mysql|mariadb)[\w-]{0,20}+|(?:docker|podman|nerdctl|skopeo|oc|az)[ \t]++login)"
    r"(?=[ \t])(?:(?![ \t]-p)[^\n;|&]){0,200}+[ \t]-p[ \t=]*+"
    r"|(?<![\w./-])redis-cli(?=[ \t])(?:(?![ \t]-a[ \t])[^\n;|&]){0,200}+[ \t]-a[ \t]++"
    r"|(?<![\w./-])wandb[ \t]++login[ \t]++(?:--?[\w-]++[ \t]++)*+(?=[\w-]{20}))"
    rf"(?P<value>(?!<redacted>|-)(?>{QUOTED}|\\\S|\S)++)"
)
_NETRC = re.compile(
    r"(?P<name>(?:^[ \t]*+|(?<=\s)login[ \t]++\S++[ \t]++)password[ \t]++)"
    r"(?P<value>(?!<redacted>)[^\s=:]\S*+)(?=[ \t]*+$)",
    re.I | re.M,
)
# IDENTIFIED BY 'x', ALTER USER me PASSWORD 'x'; without quotes only as a database writes it
_SQL = re.compile(
    r"(?P<name>(?<![\w.-])(?:"
    r"(?i:identified[ \t]++(?:with[ \t]++\S++[ \t]++(?:by|as)|by)[ \t]++(?:password[ \t]++)?)(?=[\"'])"
    r"|(?i:(?:user|role)[ \t]++\S++[ \t]++(?:with[ \t]++)?(?:encrypted[ \t]++)?password[ \t]++)(?=[\"'])"
    r"|IDENTIFIED[ \t]++BY[ \t]++(?![\"'])))"
    rf"(?P<value>(?![\"']?<redacted>)(?:{QUOTED}|[^\s;,)\"']++))"
)
# smtp.login("me", "x"), as tracebacks show it
_LOGIN = re.compile(
    rf"(?P<name>(?<=\.)log_?in\([ \t]*+[^\s,()][^,()\n]{{0,100}}+,[ \t]*+)(?P<value>[bru]?{QUOTED})(?=[ \t]*+[,)])"
)
# What a stream of an exchange is sent to log in: {"op": "auth", "args": ["key", 17, "signature"]}
_LOGIN_MESSAGE = re.compile(
    r"(?P<name>[\"'](?:op|method|event|action|type)[\"'][ ]?:[ ]?[\"'](?:auth|authenticate|log_?[io]n)[\"']"
    r"[^\n\[{}]{0,100}?[\"'](?:args|params)[\"'][ ]?:[ ]?)(?P<value>\[(?!<redacted>)[^\]\n]*+\]?)",
    re.I,
)
# '--token x', '-password x', "'--token', 'x'" and "('password', 'x')"
_OPTION = re.compile(rf"(?P<name>(?<!\S)--?(?P<key>{NAME})[ \t]++)(?P<value>(?!<redacted>)(?>{QUOTED}|\\\S|\S)++)")
_ARGUMENT = re.compile(
    rf"(?P<name>(?<=[\"'])--(?P<key>{NAME})[\"'][ \t]*+,\s*+)(?P<value>[bru]?{QUOTED})(?=\s*+[,\])}}]|$)"
)
_PAIR = re.compile(
    rf"(?P<name>\(\s*+[bru]?[\"'](?P<key>{NAME})[\"']\s*+,\s*+)(?P<value>[bru]?{QUOTED})(?=\s*+,?\s*+\))"
)
# A line of a Dockerfile or of a shell that sets a variable without a sign: ENV API_KEY x
_ENV = re.compile(
    rf"(?P<name>(?:^|(?<=\s))(?:ENV|setenv|setx)[ \t]++(?P<key>{NAME})[ \t]++)(?P<value>(?!<redacted>|=)[^\r\n]++)",
    re.M,
)


def redact_handed(text: str) -> str:
    """Return the text without the secrets that are handed over in it."""
    for pattern in (_HEADER, _USER, _COMMAND, _NETRC, _SQL, _LOGIN, _LOGIN_MESSAGE):
        text = pattern.sub(_without_value, text)
    for pattern in (_OPTION, _ARGUMENT, _PAIR, _ENV):
        text = pattern.sub(_if_secret, text)
    return text


def _without_value(found: re.Match[str]) -> str:
    return f"{found['name']}{emptied(found['value'])}"


def _if_secret(found: re.Match[str]) -> str:
    secret = is_secret_name(found["key"]) or (hints_at_a_secret(found["key"]) and is_random(found["value"]))
    return _without_value(found) if secret else found[0]
