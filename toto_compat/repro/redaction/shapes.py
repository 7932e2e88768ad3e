"""Secrets that are known by their shape, wherever they stand: tokens, private keys, the words of a wallet."""

import math
import re
from collections import Counter

from toto_compat.repro.redaction.parts import REDACTED

_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY[A-Z ]*-----.*?(?:-----END [A-Z0-9 ]*-----|\Z)", re.S)
# The words of a wallet, twelve to twenty-four of three to eight letters, behind what they are called.
_PHRASE = re.compile(
    r"(?P<name>(?<![a-z])"
    r"(?i:mnemonic|seed(?=[\"']?[ ]?[:=])|(?:seed|recovery|backup|secret|wallet)[ _-]?(?:phrase|words?))(?![a-z])"
    r"[^\n]{0,40}?)"
    r"(?P<value>\b(?:[a-z]{3,8}[ ,]{1,3}){11,23}[a-z]{3,8}\b)"
)
_SHAPES = re.compile(
    r"(?<![A-Za-z0-9_])(?:"
    r"(?:AKIA|ASIA|AGPA|AIDA|AROA)[A-Z0-9]{16}"  # AWS
    r"|hf_[A-Za-z0-9]{16,}|api_org_[A-Za-z0-9]{16,}"  # Hugging Face
    r"|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_[A-Za-z0-9_]{20,}"  # GitHub
    r"|glpat-[\w-]{16,}|npm_[A-Za-z0-9]{20,}|pypi-[\w-]{20,}|dckr_pat_[\w-]{16,}"
    r"|xox[abeoprs]-[\w-]{10,}|xapp-[\w-]{10,}|hooks\.slack\.com/(?:services|workflows|triggers)/[\w/-]+"  # Slack
    r"|(?:bot)?\d{6,12}:AA[\w-]{20,}"  # Telegram
    r"|(?:discord|discordapp)\.com/api/(?:v\d+/)?webhooks/[\w/-]+"
    r"|sk-[\w-]{16,}|[sr]k_(?:live|test)_[A-Za-z0-9]{10,}|SG\.[\w-]{10,}\.[\w-]{10,}"
    r"|glsa_\w{20,}|hv[sb]\.[\w-]{20,}|key-[0-9a-f]{32}(?!\w)"  # Grafana, Vault, Mailgun
    # of exchanges: letters of both kinds and digits, which no hash has; shorter ones in quotes
    r"|(?=[a-z0-9]*+[A-Z])(?=[A-Z0-9]*+[a-z])(?=(?:[A-Za-z]*+\d){3})"
    r"(?:[A-Za-z0-9]{64}(?!\w)|(?<=[\"'])[A-Za-z0-9]{32,128}(?=[\"']))"
    r"|[MNO][\w-]{23,27}\.[\w-]{6}\.[\w-]{27,40}(?![\w.])"  # Discord
    # of anybody else: a short word in small letters, and behind it a long one of both kinds of letters with digits
    r"|(?<!-)(?<!sha256=)(?:[a-z]{2,8}|[a-z]\d)(?:[_-][a-z0-9]{1,8}){0,3}[_-](?=[a-z0-9]*+[A-Z])(?=[A-Z0-9]*+[a-z])"
    r"(?=(?:[A-Za-z]*+\d){3})[A-Za-z0-9]{24,200}(?![A-Za-z0-9])[\w-]{0,200}"
    r"|shp(?:at|ca|pa|ss)_[0-9a-fA-F]{32}|NRAK-[A-Z0-9]{20,}|AGE-SECRET-KEY-1[A-Z0-9]{40,}|rpa_[A-Z0-9]{30,}"
    r"|tskey-[\w-]{16,}|dp\.(?:st|pt|ct|sa)\.[\w.-]{20,}|ATATT3[\w=-]{20,}"
    r"|[APC]K(?=(?:[A-Z]*+\d){2})[A-Z0-9]{18}(?!\w)"  # Alpaca
    r"|AIza[\w-]{30,}|ya29\.[\w-]{20,}|dop_v1_[0-9a-f]{32,}|dapi[0-9a-f]{32}"
    r"|(?<!-)eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"  # JSON web token
    # of wallets: Ethereum, hierarchical ones, Bitcoin, Solana
    r"|0x[0-9a-fA-F]{64}(?!\w)|[xyzt]prv[1-9A-HJ-NP-Za-km-z]{90,}"
    r"|(?:[KL][1-9A-HJ-NP-Za-km-z]{51}|5[HJK][1-9A-HJ-NP-Za-km-z]{49})(?!\w)|[1-9A-HJ-NP-Za-km-z]{87,88}(?!\w)"
    r")"
)
_BITS = 3.5  # per character, in 20 characters and more: words and paths stay below it, random ones do not
_BITS_WITH_SLASH = 4.0
_OF_A_CACHE = re.compile(r"[a-z][a-z2-7]{51}")  # a key of the compiler's caches: the hash of a graph or of code


def redact_private_keys(text: str) -> str:
    """Return the text without private keys, with all of their lines."""
    return _PRIVATE_KEY.sub(REDACTED, text)


def redact_shapes(text: str) -> str:
    """Return the text without what only a secret looks like."""
    text = _PHRASE.sub(rf"\g<name>{REDACTED}", text)
    return _SHAPES.sub(REDACTED, text)


def is_random(value: str) -> bool:
    """Tell whether a value looks drawn at random: long, of one word, letters and digits evenly used."""
    bare = value.strip("\"'`,;")
    if _OF_A_CACHE.fullmatch(bare):
        return False
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
