"""The `pip freeze` of production, for an incident from its log: what it pins, and what it names without a release."""

import codecs
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name

from toto_compat.errors import InputError
from toto_compat.repro.pins import build_of_freeze, is_version, package_of
from toto_compat.repro.redaction.text import redact

_FROZEN = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)={2,3}([A-Za-z0-9][A-Za-z0-9.!+_-]*)$")
_INCLUDED = re.compile(r"(?:-r|--requirement|-c|--constraint)[ =]*(\S.*)")
_LARGEST_FREEZE = 1_000_000


@dataclass(frozen=True)
class Freeze:
    """A `pip freeze`: what it pins exactly, and the packages whose lines name no release."""

    pinned: Mapping[str, str]  # canonical name -> version
    left_out: tuple[str, ...]
    options: tuple[str, ...] = ()  # lines for pip itself, fit to be shown
    includes: tuple[str, ...] = ()  # files that they say to read: -r base.txt

    @property
    def torch(self) -> str:
        return self.pinned.get("torch", "").partition("+")[0]

    @property
    def build(self) -> str:
        """Tell its build by torch's local version, else by the CUDA runtime beside it."""
        return build_of_freeze(self.pinned) or ""

    @property
    def other_build(self) -> str:
        """Name the build in torch's local version, if it is neither for the CPU nor for CUDA: rocm6.4."""
        local = self.pinned.get("torch", "").partition("+")[2]
        return "" if re.fullmatch(r"cpu|cu\d{3}", local) else local


def read_freeze(path: Path) -> Freeze:
    """Read the output of `pip freeze`; a line that is no exact pin names a package to leave out."""
    try:
        if path.exists() and not path.is_file():
            raise InputError(f"{path}: no regular file", hint="give the output of pip freeze")  # a pipe is waited for
        with path.open("rb") as file:
            content = file.read(_LARGEST_FREEZE + 1)
    except OSError as error:
        told = f"{path}: cannot be read: {error.strerror or error}"
        raise InputError(told, hint="give the output of pip freeze") from error
    if content[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):  # as Windows' shell writes it
        content = content.decode("utf-16", "replace").encode()
    if len(content) > _LARGEST_FREEZE or b"\0" in content:
        raise InputError(f"{path}: this is no output of pip freeze", hint="python -m pip freeze > freeze.txt")
    pinned: dict[str, str] = {}
    left_out: list[str] = []
    options: list[str] = []
    includes: list[str] = []
    for number, raw in enumerate(content.decode("utf-8-sig", "replace").splitlines(), 1):
        line = re.split(r"(?:^|\s)#", raw.strip(), maxsplit=1)[0].strip()
        if not line:
            continue
        exact = _FROZEN.match(line)
        if exact and is_version(exact[2]):
            name = canonicalize_name(exact[1])
            if pinned.setdefault(name, exact[2]) != exact[2]:
                raise InputError(
                    f"{path}:{number}: {name} is {exact[2]} here and {pinned[name]} above",
                    hint="give the freeze of one environment",
                )
        elif line.startswith(("-e", "--editable")) or re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*\s*@", line):
            left_out.append(package_of(line) or "one that is not named")
        elif line.startswith("-"):
            options.append(redact(line)[:100])
            includes += [redact(file[1])[:100] for file in [_INCLUDED.match(line)] if file]
        else:
            raise InputError(
                f"{path}:{number}: {redact(line)[:100]!r} is no line of pip freeze",
                hint="accepted name==version, and name @ address, which is left out",
            )
    if not pinned:
        raise InputError(
            f"{path}: it pins nothing", hint="python -m pip freeze > freeze.txt, with the service's python"
        )
    return Freeze(pinned, *(tuple(dict.fromkeys(listed)) for listed in (left_out, options, includes)))
