"""The defaults of torch's compiler that moved between two releases; of a release that no table has, from its wheel."""

from collections.abc import Mapping
from typing import Any

from packaging.version import Version

from toto_compat.environments.package_index import IndexSettings, index_settings
from toto_compat.environments.torch_sources.defaults import (
    FILES,
    Expression,
    defaults_of,
    older_names,
    torch_defaults,
)
from toto_compat.environments.wheel_sources import sources
from toto_compat.errors import TotoCompatError
from toto_compat.releases.listing import Channel, listed, wheel_for
from toto_compat.releases.upgrade import MovedDefault, moved_defaults


def moved_between(before: str, after: str) -> tuple[MovedDefault, ...] | None:
    """Every default that differs; None where one of the two releases is known to nobody."""
    old, new = defaults_for(before), defaults_for(after)
    return moved_defaults(old, new, older_names(after)) if old is not None and new is not None else None


def defaults_for(release: str) -> Mapping[str, Any] | None:
    """The defaults of a release: from the table, else out of the wheel on the user's index."""
    try:
        return torch_defaults(release)
    except KeyError:
        pass
    try:
        return read_defaults(release, index_settings())
    except (TotoCompatError, OSError, ValueError, SyntaxError, RecursionError):  # of sources that nobody can read
        return None


def read_defaults(release: str, settings: IndexSettings) -> Mapping[str, Any] | None:
    """Read the config modules of a wheel by ranges; None if the index does not have the release."""
    found, _ = listed(settings, Channel.RELEASE)
    version = Version(release)
    own = next((one for one in found if one.version == version), None)
    if own is None:
        return None
    raw = defaults_of(sources(wheel_for(own, None).url, lambda name: name in FILES, settings))
    return {name: _value(raw, name) for name in raw} or None


def _value(raw: Mapping[str, object], name: str) -> object:
    """What a setting is, or the expression that nobody could compute; an older name has the newer one's value."""
    value, followed = raw[name], {name}
    while isinstance(value, dict) and value.keys() == {"alias"}:
        target = str(value["alias"])
        if target not in raw or target in followed:
            return Expression(f"alias of {target}")
        followed.add(target)
        value = raw[target]
    if isinstance(value, dict) and value.keys() == {"expression"}:
        return Expression(str(value["expression"]))
    return value
