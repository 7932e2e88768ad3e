"""Takes secrets out of text and data before it is written: tokens, keys, passwords, URLs with credentials, headers.

It errs on the side of taking out too much; what the compiler says passes unchanged, since no pattern fits it. All of it
takes time in proportion to the text.
"""

import re
from collections.abc import Mapping
from typing import Any

from toto_compat.repro.redaction.addresses import redact_addresses
from toto_compat.repro.redaction.assigned import hints_at_a_secret, redact_assigned
from toto_compat.repro.redaction.encoded import redact_encoded
from toto_compat.repro.redaction.handed import redact_handed
from toto_compat.repro.redaction.names import is_secret_name
from toto_compat.repro.redaction.parts import REDACTED
from toto_compat.repro.redaction.shapes import is_random, redact_private_keys, redact_shapes
from toto_compat.repro.redaction.shown import redact_shown
from toto_compat.repro.redaction.spoken import redact_spoken

_COLOUR = re.compile(r"\x1b+(?:\[[0-9;?]*+[A-Za-z])?")
_NAMING = frozenset({"name", "key", "variable", "var", "field", "option", "id"})
# Under these keys names are those of packages, whatever they say.
_PACKAGES = frozenset({"pins", "packages", "system_packages"})


def redact(text: str) -> str:
    """Return the text without its secrets, colours and zeros; everything else, line breaks too, is as it was.

    Zeros stand between the letters where UTF-16 was read as UTF-8, and would hide every name and shape.
    """
    text = _COLOUR.sub("", text.replace("\0", ""))
    text = redact_private_keys(text)
    text = redact_addresses(text)
    text = redact_encoded(text)
    text = redact_handed(text)
    text = redact_shown(text)
    text = redact_assigned(text)
    text = redact_spoken(text)
    return redact_shapes(text)


def redact_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return variables without secret values: by their names, and by what their values look like."""
    kept = {}
    for name, value in sorted(variables.items()):
        secret = is_secret_name(name) or (hints_at_a_secret(name) and is_random(value))
        kept[name] = REDACTED if secret and value else redact(value)
    return kept


def redact_data(data: Any, key: str = "") -> Any:
    """Take secrets out of data: by the names of its keys, and by what its texts look like."""
    if isinstance(data, Mapping):
        if is_secret_name(key):
            return {name: redact_data(value, key) for name, value in data.items()}
        if key in _PACKAGES:
            return {name: redact_data(value) for name, value in data.items()}
        told = _name_beside(data)
        return {
            name: redact_data(value, told if told and str(name).lower() == "value" else str(name))
            for name, value in data.items()
        }
    if isinstance(data, list | tuple):
        return [redact_data(value, key) for value in data]
    if isinstance(data, str):
        return REDACTED if data and is_secret_name(key) else redact(data)
    return data


def _name_beside(data: Mapping[Any, Any]) -> str:
    """Return the secret's name that a field beside its value tells; '' where none does."""
    fields = (value for name, value in data.items() if str(name).lower() in _NAMING and isinstance(value, str))
    return next(filter(is_secret_name, fields), "")
