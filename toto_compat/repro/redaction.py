"""Takes secrets out of text before it is written: tokens, keys, passwords, URLs with credentials, headers.

It errs on the side of taking out too much; what the compiler says passes unchanged, since no pattern fits it.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping

REDACTED = "<redacted>"

# Names whose value is a secret, whatever it looks like: the words of a variable, an option or a field.
_SUCH_NAMES = (
    r"(?:[\w.-]*(?:token|secret|passw(?:or)?d|passphrase|credentials?|connection[_-]?string|session[_-]?id"
    r"|(?:api|access|private|signing|account|shared|encryption|license)[_-]?key(?:[_-]?id)?|webhook(?:[_-]?url)?)"
    r"|(?-i:[A-Z][A-Z0-9_]*_(?:KEY|KEY_ID|PASS|PWD|PW|AUTH|DSN|CERT|PIN|COOKIE|SESSION|SIG))"
    r"|(?-i:DSN)|pwd|signature|sig)"
)
_QUOTED = r"(?:\"(?:[^\"\\\n]|\\.)*+\"|'(?:[^'\\\n]|\\.)*+'|`[^`\n]*+`)"
# A value in quotes ends with them; any other goes on to the next space, quotes within it too. What is redacted stays.
_VALUE = rf"(?!\\*[\"'`]?{REDACTED})(?:{_QUOTED}(?=[\s,;)}}\]&]|$)|(?>{_QUOTED}|\S)++)"
_QUOTE = r"\\*[\"']?"
_ASSIGNED = re.compile(
    rf"(?<![\w.-])(?P<name>(?:--?)?{_SUCH_NAMES}{_QUOTE})"
    rf"(?P<gap>[ \t]*+(?:=>(?=[ \t])|:=|[=:])[ \t]*+)(?P<value>{_VALUE})",
    re.I | re.M,
)
_OPTION = re.compile(rf"(?<!\S)(?P<name>--{_SUCH_NAMES})(?P<gap>[ \t]++)(?P<value>{_VALUE})", re.I | re.M)
_PARAMETER = re.compile(
    r"(?P<name>[?&][\w.-]{0,64}?(?:token|key|secret|sig|sas|passw|pwd|auth|code|credential)[\w.-]{0,64})(?P<gap>=)"
    rf"(?P<value>(?!{REDACTED})[^&\s#'\"]+)",
    re.I,
)
_HEADER = re.compile(
    r"(?P<name>(?<![\w.-])(?:(?:proxy-)?authorization|(?:set-)?cookie"
    rf"|x-(?=[\w-]*?(?:token|key|auth|secret|signature))[\w-]++){_QUOTE})(?P<gap>[ \t]*+[=:][ \t]*+)"
    rf"(?P<value>(?!\\*[\"'`]?{REDACTED})(?:{_QUOTED}(?=[\s,;)}}\]]|$)|[^\r\n]+))",
    re.I | re.M,
)
_SCHEME = re.compile(r"\b(?P<name>bearer|basic|digest|token)(?P<gap>[ \t]++)(?P<value>[A-Za-z0-9._~+/=-]{12,})", re.I)
_URL = re.compile(r"(?P<name>(?<![\w+.-])[A-Za-z][A-Za-z0-9+.-]{0,30}:)(?P<gap>//)(?P<value>(?!<redacted>)[^\s/?#]+)@")
_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY[A-Z ]*-----.*?(?:-----END [A-Z0-9 ]*-----|\Z)", re.S)
# Tokens that are known by their shape, wherever they stand.
_SHAPES = re.compile(
    r"(?<![A-Za-z0-9_])(?:"
    r"(?:AKIA|ASIA|AGPA|AIDA|AROA)[A-Z0-9]{16}"  # AWS
    r"|hf_[A-Za-z0-9]{16,}|api_org_[A-Za-z0-9]{16,}"  # Hugging Face
    r"|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_[A-Za-z0-9_]{20,}"  # GitHub
    r"|glpat-[\w-]{16,}|npm_[A-Za-z0-9]{20,}|pypi-[\w-]{20,}|dckr_pat_[\w-]{16,}"
    r"|xox[abeoprs]-[\w-]{10,}|xapp-[\w-]{10,}"  # Slack
    r"|sk-[\w-]{16,}|[sr]k_(?:live|test)_[A-Za-z0-9]{10,}|SG\.[\w-]{10,}\.[\w-]{10,}"
    r"|AIza[\w-]{30,}|ya29\.[\w-]{20,}|dop_v1_[0-9a-f]{32,}|dapi[0-9a-f]{32}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"  # JSON web token
    r")"
)
# Any variable whose name only hints at a key: its value goes if it looks drawn at random.
_HINTED = re.compile(
    r"(?<![\w.-])(?P<name>(?=[\w.-]*?(?:key|auth|cred|pass|salt|nonce))[\w.-]++"
    rf"{_QUOTE})(?P<gap>[ \t]*+[=:][ \t]*+)(?P<value>{_VALUE})",
    re.I | re.M,
)
_BITS = 3.5  # per character, in 20 characters and more: words and paths stay below it, random ones do not


def redact(text: str) -> str:
    """Return the text without its secrets; everything else, line breaks too, is as it was."""
    text = _PRIVATE_KEY.sub(REDACTED, text)
    text = _URL.sub(lambda found: f"{found['name']}{found['gap']}{REDACTED}@", text)
    for pattern in (_PARAMETER, _HEADER, _ASSIGNED, _OPTION):
        text = pattern.sub(_without_value, text)
    text = _SCHEME.sub(_without_value, text)
    text = _SHAPES.sub(REDACTED, text)
    return _HINTED.sub(_if_random(_without_value), text)


def is_secret_name(name: str) -> bool:
    """Tell whether what has this name is a secret, whatever it looks like."""
    return re.fullmatch(_SUCH_NAMES, name, re.I) is not None


def redact_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return variables without secret values: by their names, and by what their values look like."""
    kept = {}
    for name, value in sorted(variables.items()):
        secret = is_secret_name(name) or (re.search(r"key|auth|cred|pass|salt", name, re.I) and is_random(value))
        kept[name] = REDACTED if secret and value else redact(value)
    return kept


def is_random(value: str) -> bool:
    """Tell whether a value looks drawn at random: long, of one word, letters and digits evenly used."""
    bare = value.strip("\"'`")
    if len(bare) < 20 or re.search(r"[\s/\\]", bare) or not re.search(r"\d", bare) or not re.search(r"[A-Za-z]", bare):
        return False
    counts = Counter(bare)
    bits = -sum(count / len(bare) * math.log2(count / len(bare)) for count in counts.values())
    return bits >= _BITS or (len(bare) >= 32 and bool(re.fullmatch(r"[0-9a-fA-F-]+", bare)))


def _without_value(found: re.Match[str]) -> str:
    value = found["value"]
    quote = value[0] if value[0] in "\"'`" else ""
    # where only the first part was quoted, all of it went
    return f"{found['name']}{found['gap']}{quote}{REDACTED}{quote}"


def _if_random(replace: Callable[[re.Match[str]], str]) -> Callable[[re.Match[str]], str]:
    return lambda found: replace(found) if is_random(found["value"]) else found[0]
