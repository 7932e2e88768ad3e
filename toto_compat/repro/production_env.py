"""The env file of production, for an incident from its log: what it sets, and what only a shell could say."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from toto_compat.errors import InputError
from toto_compat.production import env_file

_HINT = "give the service's env file: lines of NAME=value"
_SAYS_NOTHING = re.compile(r"\s*(#|$|set\s+[-+]|export(\s+[A-Za-z_]\w*)+\s*$)")


@dataclass(frozen=True)
class ProductionEnv:
    """An env file: its variables, those whose value the shell computes, and lines that set nothing that is known."""

    values: Mapping[str, str] = field(default_factory=dict)
    computed: Mapping[str, int] = field(default_factory=dict)  # by name, the line
    unread: tuple[int, ...] = ()


def read_env(path: Path | None) -> ProductionEnv:
    """Read the file as a shell would, as far as that can be told without one."""
    if path is None:
        return ProductionEnv()
    try:
        if not path.is_file():
            raise InputError(f"{path}: {'no regular file' if path.exists() else 'there is no such file'}", hint=_HINT)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}", hint=_HINT) from error
    statements = env_file.read(path)
    # what is no UTF-8 comes as surrogates
    if re.search(r"[\0\ud800-\udfff]", statements.text):
        raise InputError(f"{path}: this is no env file: it is no text in UTF-8", hint=_HINT)
    last = {one.name: one for one in statements if one.name}
    if not last:
        raise InputError(f"{path}: no line of it is NAME=value", hint=_HINT)
    return ProductionEnv(
        values={name: one.value for name, one in last.items() if one.value is not None},
        computed={name: one.line for name, one in last.items() if one.value is None},
        unread=tuple(one.line for one in statements if not one.name and not _SAYS_NOTHING.match(one.text)),
    )
