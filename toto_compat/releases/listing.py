"""The torch releases on an index, held against matrix.yaml: known, new, withdrawn, with what their wheels say."""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import StrEnum

from packaging.version import Version

from toto_compat.environments.package_index import HINT, IndexSettings, WheelFile, list_wheels
from toto_compat.environments.wheel_facts import WheelFacts, read_facts
from toto_compat.errors import EnvironmentBuildError
from toto_compat.matrix.schema import Matrix

PYTORCH_INDEX = "https://download.pytorch.org/whl"
_READERS = 8  # requests at a time; a wheel's metadata takes two or three


class Channel(StrEnum):
    """Where releases are published: the user's own index, or one of PyTorch's for what is not released yet."""

    RELEASE = "release"
    TEST = "test"  # release candidates
    NIGHTLY = "nightly"


class State(StrEnum):
    KNOWN = "known"
    NEW = "new"  # newer than everything in the matrix; a release than every release
    BETWEEN = "not in the matrix"  # between two releases that are: may be left out on purpose
    OLDER = "older"
    YANKED = "yanked"


@dataclass(frozen=True)
class TorchRelease:
    """One release of an index, with the wheels for Linux that are its default builds."""

    version: Version  # without a local part
    wheels: tuple[WheelFile, ...]
    channel: Channel = Channel.RELEASE
    state: State = State.OLDER
    environments: tuple[str, ...] = ()  # of the matrix
    facts: WheelFacts | None = None
    unreadable: str = ""  # why there are no facts

    @property
    def is_yanked(self) -> bool:
        return all(wheel.yanked is not None for wheel in self.wheels)

    @property
    def why_yanked(self) -> str:
        return next((wheel.yanked for wheel in self.wheels if wheel.yanked), "no reason given")

    @property
    def pythons(self) -> tuple[str, ...]:
        """The Pythons that it has wheels for, and that it compiles on as far as that is known."""
        named = {python for wheel in self.wheels for python in wheel.pythons}
        return tuple(sorted((one for one in named if self.facts is None or self.facts.compiles_on(one)), key=Version))


def releases_of(wheels: Iterable[WheelFile], channel: Channel = Channel.RELEASE, build: str = "") -> list[TorchRelease]:
    """Group wheels by release, newest first. The default wheel has no local part, and what build it is stands in its
    metadata; of builds that have one, `build` is meant, else the newest CUDA."""
    by_version: dict[Version, list[WheelFile]] = {}
    for wheel in wheels:
        by_version.setdefault(Version(wheel.version.public), []).append(wheel)
    releases = []
    for version, own in by_version.items():
        wanted = _default_wheels(own, build)
        if wanted:
            # of a release that is withdrawn in part, what is left
            left = [wheel for wheel in wanted if wheel.yanked is None]
            releases.append(TorchRelease(version, tuple(left or wanted), channel))
    return sorted(releases, key=lambda one: one.version, reverse=True)


def _default_wheels(wheels: Sequence[WheelFile], build: str) -> list[WheelFile]:
    builds = {wheel.version.local or "" for wheel in wheels}
    if build and (build in builds or "" not in builds):
        chosen = build if build in builds else None
    elif "" in builds:
        chosen = ""
    else:
        cuda = sorted(
            (one for one in builds if one.startswith("cu") and one[2:].isdigit()), key=lambda one: int(one[2:])
        )
        chosen = cuda[-1] if cuda else "cpu" if "cpu" in builds else None
    return [wheel for wheel in wheels if chosen is not None and (wheel.version.local or "") == chosen]


def listed(
    settings: IndexSettings, channel: Channel, *, pytorch_index: str = PYTORCH_INDEX, build: str = ""
) -> tuple[list[TorchRelease], list[str]]:
    """The releases of a channel, newest first, and what to warn of."""
    if channel is not Channel.RELEASE:
        own = replace(settings, indexes=(f"{pytorch_index.rstrip('/')}/{channel.value}",), folders=())
        hint = "check the network; --pytorch-index names another place, such as a mirror"
        wheels, warnings = list_wheels(own, "torch", called="PyTorch's own index", hint=hint)
        if not wheels:
            raise EnvironmentBuildError(f"{own.indexes[0]} lists no torch for Linux", hint="check --pytorch-index")
        return releases_of(wheels, channel, build), warnings
    wheels, warnings = list_wheels(settings, "torch")
    if not wheels:
        raise EnvironmentBuildError("your package index has no torch for Linux on x86_64", hint=HINT)
    return releases_of(wheels, build=build), warnings


def of_build(releases: Iterable[TorchRelease], build: str) -> list[TorchRelease]:
    """Leave out what is another build by its metadata; what cannot be read stays, and is told as that."""
    return [one for one in releases if not build or one.facts is None or one.facts.build == build]


def against(matrix: Matrix, releases: Iterable[TorchRelease]) -> list[TorchRelease]:
    """Say of each release what it is to the matrix."""
    known: dict[Version, list[str]] = {}
    for name, environment in matrix.environments.items():
        known.setdefault(Version(environment.torch), []).append(name)
    return [replace(one, environments=tuple(known.get(one.version, ())), state=_state(one, known)) for one in releases]


def _state(release: TorchRelease, known: Iterable[Version]) -> State:
    versions = list(known)
    if release.version in versions:
        return State.KNOWN
    if release.is_yanked:
        return State.YANKED
    # a nightly of the next release in the matrix does not make this one's patch release an old one
    released = [one for one in versions if not one.is_prerelease]
    if release.version > max(versions if release.version.is_prerelease else released or versions):
        return State.NEW
    return State.BETWEEN if release.version > min(versions) else State.OLDER


def check_complete(matrix: Matrix, releases: Sequence[TorchRelease]) -> None:
    """Refuse the list of an index that lacks what the matrix has: it would hide new releases as well."""
    newest = max(
        (Version(one.torch) for one in matrix.environments.values() if not Version(one.torch).is_prerelease),
        default=None,
    )
    if newest is not None and not any(one.version >= newest for one in releases):
        raise EnvironmentBuildError(
            f"your package index does not list torch {newest}, which the matrix has: it is incomplete", hint=HINT
        )


def with_facts(releases: Sequence[TorchRelease], settings: IndexSettings) -> list[TorchRelease]:
    """Read the metadata of one wheel of each release; one that cannot be read does not hide the others."""
    with ThreadPoolExecutor(_READERS) as pool:
        return list(pool.map(lambda one: _with_facts(one, settings), releases))


def _with_facts(release: TorchRelease, settings: IndexSettings) -> TorchRelease:
    try:
        return replace(release, facts=read_facts(wheel_for(release, None), settings))
    except EnvironmentBuildError as error:
        return replace(release, unreadable=error.message)


def wheel_for(release: TorchRelease, python: str | None) -> WheelFile:
    """The wheel of a release for a Python; without one any, the same each time."""
    fitting = [one for one in release.wheels if python is None or not one.pythons or python in one.pythons]
    if not fitting:
        raise EnvironmentBuildError(
            f"torch {release.version} has no wheel for Python {python}",
            hint=f"it has some for {', '.join(release.pythons) or 'no CPython'}",
        )
    return min(fitting, key=lambda one: one.file)
