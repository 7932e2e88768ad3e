"""A bundle from elsewhere run again: unpacked, looked at for what it would reach or bring, and compared afterwards."""

import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from toto_compat.contract.request import Environment
from toto_compat.contract.result import CellResult
from toto_compat.environments.locks import lock_path, own_lock_path, parse_lock, stale_because
from toto_compat.errors import BundleError, EnvironmentBuildError, InputError, MatrixFileError
from toto_compat.evidence.files import cache_folder, write_atomically
from toto_compat.matrix.document import read_document
from toto_compat.matrix.load import load_matrix
from toto_compat.matrix.schema import Matrix
from toto_compat.matrix.toto_source import is_release
from toto_compat.matrix.user_cache import BUILTIN
from toto_compat.repro.archive import WHEELS, Manifest, unpack
from toto_compat.repro.contents import INCIDENT, LOCK, MATRIX, PACKAGES
from toto_compat.repro.incident import Incident, check_names, check_size, load_incident
from toto_compat.repro.pins import Pins
from toto_compat.repro.redaction.text import redact
from toto_compat.runtimes.progress import say
from toto_compat.verdict.judge import one_line

# Keys whose value names a file or folder; of a cache's source the part before the class.
_PLACES = frozenset({"log", "freeze", "path", "checkpoint", "source", "toto_ts", "index"})
_OF_THIS_MACHINE = re.compile(r"~|(\w+\+)?file:", re.I)
_LONGEST_NAME = 255  # bytes, of a file or folder
_ANOTHER = "ask whoever made the bundle for another one"


@dataclass(frozen=True)
class ToRun:
    """An incident to run: a file, the matrix that comes with it, and the bundle that it is from."""

    incident_file: Path
    matrix_file: Path | None
    manifest: Manifest | None = None
    packages: tuple[str, ...] = ()


@contextmanager
def replayed(path: Path) -> Iterator[ToRun]:
    """Unpack a bundle that holds what it says, and let its wheels stand in for the package index while it is run."""
    with tempfile.TemporaryDirectory(prefix="bundle-", dir=cache_folder()) as scratch:
        folder = Path(scratch)
        manifest = unpack(path, folder)
        for needed in (INCIDENT, MATRIX):
            if not (folder / needed).is_file():
                raise BundleError(f"{path}: no {needed} in it", hint="it is no bundle of an incident or a cell")
        shows = one_line(manifest.shows)[:200]
        say(f"{path.name}: {len(manifest.files)} files, every hash as in its manifest; it showed {shows}")
        with _mistakes_of(path, folder):
            for needed in (INCIDENT, MATRIX):
                check_size(folder / needed)
            check_places(path, folder)
            incident, matrix = load_incident(folder / INCIDENT), load_matrix(folder / MATRIX)
            check_names(folder / INCIDENT, matrix)
            for line in brought_along(incident, matrix, with_wheels=(folder / WHEELS).is_dir()):
                say(line)
            with _own_lock(folder, incident, matrix), _only_these_wheels(folder / WHEELS.rstrip("/")):
                yield ToRun(folder / INCIDENT, folder / MATRIX, manifest, _packages(path, folder))


@contextmanager
def _mistakes_of(path: Path, folder: Path) -> Iterator[None]:
    """Tell what is wrong with a file of the bundle as that, since the folder that it lies in is gone afterwards."""
    try:
        yield
    except (InputError, MatrixFileError) as error:
        if str(folder) not in error.message:
            raise
        told = error.message.replace(f"{folder.resolve()}/", f"{path}: ").replace(f"{folder}/", f"{path}: ")
        raise BundleError(told, hint=_ANOTHER) from error


def _packages(path: Path, folder: Path) -> tuple[str, ...]:
    listed = folder / PACKAGES
    try:
        return tuple(listed.read_text(encoding="utf-8").split()) if listed.is_file() else ()
    except UnicodeDecodeError:
        raise BundleError(f"{path}: {PACKAGES} is no text", hint=_ANOTHER) from None


def check_places(path: Path, folder: Path) -> None:
    """Refuse a bundle that names files outside of itself: a replay would read them, and a new bundle hand them on."""
    for member in (INCIDENT, MATRIX):
        data = read_document(folder / member).data
        # where an incident was seen is no file
        plain = {key: value for key, value in data.items() if key != "source"} if isinstance(data, Mapping) else data
        for key, value in _places(plain):
            place = PurePosixPath(value)
            too_long = any(len(part.encode(errors="surrogatepass")) > _LONGEST_NAME for part in place.parts)
            if place.is_absolute() or ".." in place.parts or _OF_THIS_MACHINE.match(value) or too_long:
                raise BundleError(
                    f"{path}: {member} names {key} {one_line(value)[:100]!r}, which is not in the bundle",
                    hint="unpack it, put your own file in its place in the incident, and run that",
                )


def _places(data: Any) -> Iterator[tuple[str, str]]:
    if isinstance(data, Mapping):
        for key, value in data.items():
            if key in _PLACES and isinstance(value, str):
                yield str(key), value
            yield from _places(value)
    elif isinstance(data, list):
        for value in data:
            yield from _places(value)


def brought_along(incident: Incident, matrix: Matrix, *, with_wheels: bool) -> list[str]:
    """Say what code a replay would use because the bundle says so, and which package index unless wheels come along."""
    told = [
        f"it brings code of its own: the cache {name} ({one_line(cache.source)}) is run as it is"
        for name, cache in matrix.caches.items()
        if cache.source != BUILTIN
    ]
    stacks: list[Environment | Pins] = [*matrix.environments.values(), *([incident.pins] if incident.pins else [])]
    for stack in stacks:
        if stack.toto_ts is not None and not is_release(stack.toto_ts):
            told.append(f"it runs a toto-ts of its own: {one_line(redact(stack.toto_ts))}")
        if isinstance(stack, Environment) and stack.base_image != f"python:{stack.python}-slim":
            told.append(f"its container is built on {one_line(stack.base_image)}")
        if stack.index is not None and not with_wheels:
            told.append(f"torch is asked for at {one_line(redact(stack.index))}")
    return list(dict.fromkeys(told))


@contextmanager
def _own_lock(folder: Path, incident: Incident, matrix: Matrix) -> Iterator[None]:
    """Let the bundle's lock hold for its environment while it is run, unless there is one here or it does not fit."""
    name = incident.environment
    environment, target = matrix.environments.get(name), own_lock_path(name)
    locked = folder / LOCK
    if environment is None or not locked.is_file() or lock_path(name).exists() or target.exists():
        yield
        return
    try:
        text = locked.read_text(encoding="utf-8")
        differences = stale_because(parse_lock(text, target), environment)
    except (EnvironmentBuildError, UnicodeDecodeError):
        differences = ["it cannot be read"]
    if differences:
        say(f"the bundle's lock is not used: {one_line('; '.join(differences))[:300]}")
        yield
        return
    write_atomically(target, text)
    try:
        yield
    finally:
        target.unlink(missing_ok=True)


@contextmanager
def _only_these_wheels(folder: Path) -> Iterator[None]:
    """Make pip take wheels from the folder and from nowhere else; without such a folder pip's own settings hold."""
    if not folder.is_dir():
        yield
        return
    say(f"{len(list(folder.iterdir()))} wheels come with it: no package index is asked")
    # an address and not a path: pip takes a variable apart at its spaces
    wanted = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": folder.resolve().as_uri()}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def compared_with_bundle(to_run: ToRun, result: CellResult) -> list[str]:
    """Say whether the replay ran with the bundle's packages, and which differ."""
    if to_run.manifest is None:
        return []
    before = dict(one.partition("==")[::2] for one in to_run.packages)
    here: Mapping[str, str] = result.provenance.packages
    differing = [
        f"{name} {before.get(name, 'absent')} there, {here.get(name, 'absent')} here"
        for name in sorted({*before, *here})
        if before.get(name) != here.get(name)
    ]
    if not here or not before:
        return ["  packages  not compared: one side does not list them"]
    if not differing:
        return [f"  packages  the bundle's own, all {len(before)}"]
    return [f"  packages  {len(differing)} differ from the bundle's: {'; '.join(differing[:6])}"]
