"""`releases --add`: a release becomes an environment of matrix.yaml with its lock, from metadata alone."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from packaging.version import Version
from pydantic import ValidationError

from toto_compat.contract.request import Device, Environment
from toto_compat.environments.locks import Lock, format_lock, lock_path, resolve_base_digest
from toto_compat.environments.package_index import IndexSettings, WheelFile
from toto_compat.environments.release_lock import lock_release
from toto_compat.environments.wheel_facts import WheelFacts, read_architectures, read_facts
from toto_compat.errors import EnvironmentBuildError, SelectionError
from toto_compat.evidence.files import write_atomically
from toto_compat.matrix.add_environment import EditedMatrix, most_similar, with_environment, write_matrix
from toto_compat.matrix.load import load_matrix
from toto_compat.matrix.schema import Matrix
from toto_compat.releases.listing import Channel, TorchRelease, listed, wheel_for
from toto_compat.runtimes.progress import say
from toto_compat.verdict.judge import one_line

_FIRST_WITH_COMPILE = Version("2.0.0")


@dataclass(frozen=True)
class Addition:
    """An environment that could be added: its text and its lock, neither of them written yet."""

    name: str
    environment: Environment
    edited: EditedMatrix
    lock: Lock
    facts: WheelFacts


def channels_of(version: Version, *, pre: bool, nightly: bool) -> list[Channel]:
    """Where a release may be: a nightly build only there, a candidate also on PyTorch's index for those."""
    if nightly or version.is_devrelease:
        return [Channel.NIGHTLY]
    return [Channel.RELEASE, Channel.TEST] if pre else [Channel.RELEASE]


def find_release(
    version: Version,
    settings: IndexSettings,
    channels: Iterable[Channel],
    *,
    pytorch_index: str,
    build: str = "",
) -> TorchRelease:
    """The release of that number; one that is not there or was withdrawn is an error that says so."""
    releases: list[TorchRelease] = []
    for channel in channels:
        found, warnings = listed(settings, channel, pytorch_index=pytorch_index, build=build)
        releases += found
        for warning in warnings:
            say(f"warning: {warning}")
        if any(one.version == version for one in found):
            break
    release = next((one for one in releases if one.version == version), None)
    if release is None:
        near = [str(one.version) for one in releases if one.version.release[:2] == version.release[:2]]
        told = ", ".join(near or [str(one.version) for one in releases[:6]])
        has = f"it has {told}" + ("" if near else " and older ones") if told else "it has none of that build"
        raise SelectionError(
            f"there is no torch {version}{f' of build {build}' if build else ''} on the index",
            hint=f"{has}; --pre and --nightly look elsewhere",
        )
    if release.is_yanked:
        raise EnvironmentBuildError(
            f"torch {version} was withdrawn from the index: {one_line(release.why_yanked)}",
            hint="add the release that replaced it: `toto-compat releases` lists them",
        )
    return release


def prepare_addition(
    path: Path, release: TorchRelease, settings: IndexSettings, *, pytorch_index: str, build: str = ""
) -> Addition:
    """Work out everything about a new environment. Nothing is written, and kilobytes are read of the wheel."""
    if release.version < _FIRST_WITH_COMPILE:
        raise SelectionError(
            f"torch {release.version} has no torch.compile", hint=f"{_FIRST_WITH_COMPILE} is the first"
        )
    matrix = load_matrix(path)
    facts = read_facts(wheel_for(release, None), settings)
    if build and facts.build != build:
        raise SelectionError(
            f"torch {release.version} is on your package index as {facts.build}, not as {build}",
            hint="let pip look where that build is, in this call alone: "
            f"PIP_EXTRA_INDEX_URL={pytorch_index.rstrip('/')}/{build} toto-compat releases --add {release.version}",
        )
    release = replace(release, facts=facts)
    model = most_similar(matrix, release.version, facts.build)
    python = _python(model, release, facts)
    wheel = wheel_for(release, python)
    name = f"torch-{release.version}-{facts.build}"
    if name in matrix.environments:
        raise SelectionError(f"{path} has {name} already", hint=f"`toto-compat matrix '{name}/*'` runs it")
    environment, remarks = _environment(model, release, facts, python=python, wheel=wheel, settings=settings)
    if release.channel is not Channel.RELEASE:
        index = f"{pytorch_index.rstrip('/')}/{release.channel.value}/{facts.build}"
        environment = environment.model_copy(update={"index": index})
    edited = with_environment(path, name, environment, remarks=remarks)
    lock = lock_release(name, environment, wheel, facts, matrix.environments)
    return Addition(name, environment, edited, lock, facts)


def write_addition(addition: Addition) -> None:
    """Write the lock, then the matrix: a lock too many harms nobody, an environment without one cannot be built."""
    path = lock_path(addition.name)
    before = path.read_text(encoding="utf-8") if path.exists() else None
    write_atomically(path, format_lock(addition.lock))
    try:
        write_matrix(addition.edited)
    except BaseException:
        if before is None:
            path.unlink(missing_ok=True)
        else:
            write_atomically(path, before)
        raise
    resolve_base_digest(addition.environment.base_image, say)


def _python(model: Environment, release: TorchRelease, facts: WheelFacts) -> str:
    """The Python of the environment that it resembles where the release has it, else the nearest one below."""
    usable = [one for one in release.pythons if facts.compiles_on(one)]
    if model.python in usable or not any(wheel.pythons for wheel in release.wheels):
        return model.python
    lower = [one for one in usable if Version(one) < Version(model.python)]
    if not usable:
        raise EnvironmentBuildError(f"torch {release.version} has no wheel for a Python that it compiles on")
    return lower[-1] if lower else usable[0]


def tried_environment(release: TorchRelease, matrix: Matrix) -> tuple[str, Environment]:
    """A release as an environment to look at once: what only containers and GPUs ask for is left out."""
    facts = release.facts
    assert facts is not None
    model = most_similar(matrix, release.version, facts.build)
    environment = _valid(
        release,
        build=facts.build,
        python=_python(model, release, facts),
        toto_ts=model.toto_ts,
        pins=model.pins,
    )
    return f"torch-{release.version}-{facts.build}", environment


def _valid(release: TorchRelease, **fields: Any) -> Environment:
    """The environment of a release, if it is one that a matrix file may hold."""
    try:
        return Environment(torch=str(release.version), **fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        raise EnvironmentBuildError(
            f"torch {release.version} cannot be an environment of matrix.yaml: {key}: {first['input']!r} is not of its "
            "form",
            hint=f"`toto-compat schema` describes {key}; releases such as 2.14.1, 2.16.0rc1 and 2.16.0.dev20261116 fit",
        ) from error


def _environment(
    model: Environment,
    release: TorchRelease,
    facts: WheelFacts,
    *,
    python: str,
    wheel: WheelFile,
    settings: IndexSettings,
) -> tuple[Environment, tuple[str, ...]]:
    remarks: list[str] = []
    architectures = read_architectures(wheel, settings) if facts.cuda else ()
    if facts.cuda and not architectures:
        architectures = model.gpu_architectures if model.build == facts.build else ()
        told = f"those of {model.build} in another release" if architectures else "left out"
        remarks.append(f"The wheel does not say its gpu_architectures: {told}.")
    base = model.base_image
    if f"python:{model.python}" in base:
        base = base.replace(f"python:{model.python}", f"python:{python}")
    elif model.python != python:
        remarks.append(f"Check base_image: it is of an environment with Python {model.python}.")
    # a build's own index holds for releases of that build; the default wheel is on the user's
    keeps_index = model.build == facts.build and model.device is Device.CPU
    environment = _valid(
        release,
        build=facts.build,
        python=python,
        toto_ts=model.toto_ts,
        pins=model.pins,
        gpu_architectures=architectures,
        base_image=base,
        index=model.index if keeps_index else None,
    )
    return environment, tuple(remarks)


def added_lines(addition: Addition, matrix: Matrix) -> str:
    """Say what was added, and that the plans that nobody asked about stay as they are."""
    packages, gigabytes = len(addition.lock.packages), addition.lock.download_bytes / 1e9
    production = f", production stays {matrix.production}" if matrix.production else ""
    return (
        f"{addition.name}: Python {addition.environment.python}, CUDA {addition.facts.cuda or 'none'}, "
        f"{packages} packages locked, {gigabytes:.2f} GB to download when it is built{production}"
    )
