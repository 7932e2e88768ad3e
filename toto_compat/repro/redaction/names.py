"""Which names are those of secrets: of variables, options, fields and headers, judged word by word."""

import re
import unicodedata
from functools import lru_cache
from itertools import pairwise

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_LONGEST = 120  # characters of a name that are looked at, from its end
# Letters of other scripts that look like those of the words below.
_LOOKS_LIKE = str.maketrans(
    "\u0430\u0435\u043e\u0440\u0441\u0443\u0445\u0456\u0458\u0455\u0501\u051b\u051d\u043a\u043d\u0442\u0410\u0412\u0415\u041a\u041c\u041d\u041e\u0420\u0421\u0422\u0423"
    "\u0425\u0406\u0408\u0405\u03b1\u03b5\u03b9\u03ba\u03bf\u03c1\u03c4\u03c5\u03c7\u03bd\u0391\u0392\u0395\u0396\u0397\u0399\u039a\u039c\u039d\u039f\u03a1\u03a4\u03a5\u03a7",
    "aeopcyxijsdqwkhtABEKMHOPCTYXIJSaeikoptuxvABEZHIKMNOPTYX",
)
# A word that ends in one of these makes a secret, whatever stands around it: PGPASSWORD, API_SECRET_V2.
_ALWAYS = re.compile(
    r".*(passwords?|passwd|passphrase|passcode|secrets?|credentials?|creds|apikey|accesskey|priv(ate)?key|mnemonics?"
    r"|seedphrase|xprv|sess(ion)?id|passwort|kennwort|wachtwoord|contrasena)"
    r"|(ssh|pg|db|sql|mysql|redis|ftp|smtp|mail|root|admin|user|login|proxy)(pass|pwd?)"
)
_PAIRS = re.compile(
    r"(api|access|private|signing|account|shared|encryption|license|secret|master|deploy|ssh|auth|priv|wallet|consumer"
    r"|application|app|exchange|broker|trading) key|api hash"
    r"|(api|access|auth|refresh|bearer) tokens|connection string|session id|access signature"
    r"|(seed|recovery|backup|wallet) (phrase|words)"
    r"|(wallet|master|hd|bip|recovery|account|eth|btc|sol|metamask|ledger) seed"
)
# What is counted or embedded and not shown at a door: eos_token, token_type_ids.
_BEFORE_A_TOKEN = re.compile(r"max|min|num|n|pad|eos|bos|cls|sep|mask|unk|stop|image|special|sos|eot|per|patch")
_AFTER_A_TOKEN = re.compile(
    r"ids?|types?|counts?|embed|embeddings?|emb|dims?|idx|index|len|lengths?|size|mask|num|limit|pos|positions?|shape"
    r"|level|budget|rate|shift|mixer|merge|merging|drop|dropout|spec|usage|range|span|offsets?|start|end|probs?|logits"
    r"|weights?|classification|parallelism"
)
# Words that are only sometimes a secret's: the last of a name, all of it, in capitals, or after what has an account.
_LAST = re.compile(r"auth|jwt|bearer|webhook|cred|pwd|psk")
_ALONE = re.compile(r"dsn|pass|pw")
_IN_CAPITALS = re.compile(r"KEY|PASS|PWD|PW|AUTH|DSN|CERT|PIN|COOKIE|SESSION|SIG|PRIVATE|PRIV|PK|WIF|PHRASE")
_OF_AN_ACCOUNT = re.compile(
    r"(db|database|user|usr|admin|root|login|account|e?mail|smtp|imap|s?ftp|ssh|ldap|http|proxy|auth|redis|pg|postgres"
    r"|mysql|mongo|mariadb|rabbit|amqp|mq|wifi|vpn|bot|api|broker|client|service|server) (pass|pw)"
)
# What may follow without changing what it is: STRIPE_KEY_ID, SMTP_PASS_PROD, MY_KEY_2.
_SUFFIX = re.compile(
    r"\d+|id|prod|production|dev|devel|staging|stage|test|testing|live|old|new|v|primary|secondary|backup|value"
    r"|default|main|url|uri|env|b|base|raw|plain|encoded"
)
_FILE = re.compile(r"pyc?|txt|json|ya?ml|toml|ini|cfg|log|md|html|h|hpp|cc?|cpp|cu|so|pt|zip|gz|whl|csv|sh")


def is_secret_name(name: str) -> bool:
    """Tell whether what has this name is a secret, whatever it looks like."""
    name = name[-_LONGEST:]
    return _is_secret(name if name.isascii() else _plain(name))


def is_secret_in_prose(name: str) -> bool:
    """Tell the same of a name in a sentence or a table: there a pass of the compiler is likelier than a password."""
    return name.lower() not in ("pass", "pw") and is_secret_name(name)


def _plain(name: str) -> str:
    """The name in the letters that it shows: without width, weight, accents, what is not seen, and look-alikes."""
    letters = unicodedata.normalize("NFKD", name)
    seen = "".join(letter for letter in letters if unicodedata.category(letter) not in ("Cf", "Mn"))
    return seen.translate(_LOOKS_LIKE)


@lru_cache(maxsize=4096)
def _is_secret(name: str) -> bool:
    written = _WORDS.findall(_last_part(name))
    words = [word.lower() for word in written]
    if any(_ALWAYS.fullmatch(word) or _is_token(words, at) for at, word in enumerate(words)):
        return True
    if any(_PAIRS.fullmatch(" ".join(pair)) for pair in pairwise(words)):
        return True
    end = len(words)
    while end > 1 and _SUFFIX.fullmatch(words[end - 1]):
        end -= 1
    return end > 0 and (_ends_as_one(written[:end]) or (len(words) == 1 and _ALONE.fullmatch(words[0]) is not None))


def _is_token(words: list[str], at: int) -> bool:
    if words[at] != "token":
        return words[at].endswith("token")
    before, after = words[at - 1] if at else "", words[at + 1] if at + 1 < len(words) else ""
    return not (_BEFORE_A_TOKEN.fullmatch(before) or _AFTER_A_TOKEN.fullmatch(after))


def _ends_as_one(words: list[str]) -> bool:
    last = words[-1].lower()
    if _LAST.fullmatch(last) or len(words) == 1:
        return _LAST.fullmatch(last) is not None
    in_capitals = all(word.isupper() or word.isdigit() for word in words)
    if in_capitals and _IN_CAPITALS.fullmatch(words[-1]):
        return True
    return _OF_AN_ACCOUNT.fullmatch(f"{words[-2].lower()} {last}") is not None


def _last_part(name: str) -> str:
    """Return what follows the last dot (`self.access_token`); nothing of a file's name, all of `password.prod`."""
    head, _, last = name.rpartition(".")
    if _FILE.fullmatch(last.lower()):
        return ""
    return f"{head.rpartition('.')[2]}_{last}" if _SUFFIX.fullmatch(last.lower()) else last
