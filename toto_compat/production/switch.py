"""What the switch says: the TOTO_* variables of an env file and of the process, read before every forecast.

Precedence, from the top:

1. `TOTO_DISABLE_COMPILE` that is on, in the file or in the environment: eager.
2. An env file that was named and cannot be read: eager.
3. For every other variable the file's value, else the process's.

A value that is not understood never switches anything on.
"""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from toto_compat.errors import InputError
from toto_compat.production import env_file
from toto_compat.verdict.switch_lines import BACKEND, COMPILE, DISABLE, FORCE, MODE

VARIABLES = (DISABLE, COMPILE, MODE, BACKEND, FORCE)
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_ON = frozenset({"1", "true", "yes", "on"})
_OFF = frozenset({"", "0", "false", "no", "off"})
# Some file systems tell times in whole seconds: what was written less than this before it was read is read again.
_SETTLED_NS = 2_000_000_000


@dataclass(frozen=True)
class Switch:
    """Says what the variables ask for and which of them, where, decided it."""

    eager_because: str  # '' if they do not ask for eager
    compile: bool | None  # None: not said, the verdict decides
    mode: str | None
    backend: str | None
    forced: str  # the reason given for compiling without a verdict
    decided_by: Mapping[str, str]  # variable -> where its value comes from
    values: Mapping[str, str]  # variable -> the value that holds


class SwitchReader:
    """Reads the switch again only when the file or the environment changed: a few microseconds a forecast."""

    def __init__(self, file: Path | None = None, environment: Mapping[str, str] | None = None) -> None:
        self.file = file
        self._environment = os.environ if environment is None else environment
        # what was seen, when it was read, and what it meant: one value, since threads share this
        self._held: tuple[tuple[object, ...], int, Switch] | None = None

    def read(self) -> Switch:
        get = self._environment.get
        values = (get(DISABLE), get(COMPILE), get(MODE), get(BACKEND), get(FORCE))
        seen: tuple[object, ...] = values
        changed_at = 0
        if self.file is not None:
            try:
                found = os.stat(self.file)  # noqa: PTH116 - a third of the time of Path.stat
                changed_at = found.st_mtime_ns
                seen = (*values, changed_at, found.st_size, found.st_ino, found.st_ctime_ns)
            except OSError as error:
                seen = (*values, error.errno)
        held = self._held
        if held is None or held[0] != seen or held[1] - changed_at < _SETTLED_NS:
            read_at = time.time_ns()
            held = self._held = (seen, read_at, read_switch(self.file, dict(zip(VARIABLES, values, strict=True))))
        return held[2]


def read_switch(file: Path | None, environment: Mapping[str, str | None]) -> Switch:
    """Read both sides and say what holds."""
    held: dict[str, tuple[str | None, str]] = {}
    unreadable = ""
    if file is not None:
        try:
            parsed = env_file.read(file)
            for name in VARIABLES:
                found = parsed.assigned(name)
                if found is not None:
                    held[name] = (found.value, f"{file}:{found.line}")
        except InputError as error:
            unreadable = f"{error.message}; without its switch nothing is compiled"
    own = {name: (value, "the environment") for name, value in environment.items() if value is not None}
    values = {**own, **held}
    for source in (held, own):
        if DISABLE in source and not _is(source[DISABLE][0], _OFF):
            values[DISABLE] = source[DISABLE]
            value, where = source[DISABLE]
            return _eager(f"{DISABLE}={_shown(value)} in {where}", values)
    if unreadable:
        return _eager(unreadable, values)
    mode, where = values.get(MODE, ("", ""))
    if mode is None or (mode.strip() and mode.strip() not in MODES):
        return _eager(f"{MODE}={_shown(mode)} in {where} is no mode (known: {', '.join(MODES)})", values)
    backend, where = values.get(BACKEND, ("", ""))
    if backend is None:
        return _eager(f"{BACKEND} in {where} is no plain value", values)
    forced, _ = values.get(FORCE, ("", ""))
    asked = None
    if COMPILE in values and values[COMPILE][0] != "":
        asked = _is(values[COMPILE][0], _ON)
    return Switch(
        eager_because="",
        compile=asked,
        mode=mode.strip() or None,
        backend=backend.strip() or None,
        forced=(forced or "").strip(),
        **_told(values),
    )


_Values = Mapping[str, tuple[str | None, str]]


def _eager(why: str, values: _Values) -> Switch:
    return Switch(eager_because=why, compile=False, mode=None, backend=None, forced="", **_told(values))


def _told(values: _Values) -> dict[str, dict[str, str]]:
    return {
        "decided_by": {name: where for name, (_, where) in values.items()},
        "values": {name: _shown(value) for name, (value, _) in values.items()},
    }


def _is(value: str | None, words: frozenset[str]) -> bool:
    # sourcing a file with Windows line ends leaves a carriage return in the value
    return value is not None and value.strip().lower() in words


def _shown(value: str | None) -> str:
    return "a value that the shell computes" if value is None else repr(value)[1:-1]
