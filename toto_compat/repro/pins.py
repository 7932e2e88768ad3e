"""What production had installed, by an incident itself: torch, CUDA, Python, toto-ts and packages, or a freeze."""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from pydantic import Field

from toto_compat.contract.request import TORCH_RELEASE, Environment
from toto_compat.contract.strict_model import StrictModel
from toto_compat.environments.virtualenv import specification_hash
from toto_compat.environments.wheel_facts import cuda_release
from toto_compat.errors import InputError
from toto_compat.matrix.schema import Matrix
from toto_compat.matrix.toto_source import absolute
from toto_compat.repro.redaction.text import redact

# Keys of their own in an environment, not among its other packages.
_KEYS = {"torch": "torch", "toto-ts": "toto_ts", "xformers": "xformers"}
_CUDA = re.compile(r"(?P<cpu>cpu)|cu(?P<tag>\d{3})|(?P<major>\d{2})\.(?P<minor>\d)")
_NEWEST_PYDANTIC_TOO_OLD = Version("2.7")  # what the cell itself needs
_PACKAGE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_PINNED = "-incident-"
_LEAVE_OUT = "leave the package out with pins.leave_out if the forecast does not need it"


class Pins(StrictModel):
    """The software stack of an incident that no environment of matrix.yaml stands for."""

    torch: str | None = Field(
        default=None, description="one exact PyTorch release, such as 2.9.0", pattern=TORCH_RELEASE
    )
    cuda: str | None = Field(
        default=None, description="cpu, or the CUDA release of the torch wheel, such as 12.8 or cu128"
    )
    python: str = Field(description="Python minor version, such as 3.13; a freeze does not say it", pattern=r"^3\.\d+$")
    toto_ts: str | None = Field(default=None, description="toto-ts release, or a fork as in matrix.yaml; null: 0.2.0")
    xformers: str | None = Field(default=None, description="xformers release; null: not installed")
    packages: dict[str, str] = Field(default={}, description="other packages and their exact versions")
    freeze: str | None = Field(default=None, description="the output of pip freeze: a file, relative to this one")
    frozen: tuple[str, ...] = Field(default=(), description="the output of pip freeze as a list of lines")
    leave_out: tuple[str, ...] = Field(
        default=(), description="packages of the freeze that the forecast does not need, such as the service itself"
    )
    index: str | None = Field(
        default=None, description="pip index of the torch wheel; null: that of an environment with the same build"
    )


@dataclass(frozen=True)
class FrozenLine:
    """One line of a freeze that names a package: its place is told with what is wrong with it."""

    place: str  # freeze.txt:12
    name: str
    version: str


@dataclass(frozen=True)
class BadLine:
    """A line of a freeze that no environment can be built from."""

    place: str
    line: str  # fit to be shown: without a password
    why: str


def freeze_lines(text: Iterable[str], name: str, leave_out: Iterable[str] = ()) -> Iterator[FrozenLine | BadLine]:
    """Read a freeze line by line; what is left out is passed over, whatever its line looks like."""
    left_out = {canonicalize_name(one) for one in leave_out}
    for number, raw in enumerate(text, 1):
        line = re.split(r"(?:^|\s)#", raw.strip().lstrip("\ufeff"), maxsplit=1)[0].strip()
        place = f"{name}:{number}"
        if not line or package_of(line) in left_out:
            continue
        shown = redact(line)
        shown = shown if len(shown) <= 120 else f"{shown[:117]}..."
        if line.startswith(("-e", "--editable")) or " @ " in line:
            yield BadLine(place, shown, f"it names a folder or an address, not a release; {_LEAVE_OUT}")
            continue
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            yield BadLine(place, shown, "pip takes no such line; accepted name==version")
            continue
        exact = [one for one in requirement.specifier if one.operator in ("==", "===") and "*" not in one.version]
        if len(requirement.specifier) != 1 or not exact or requirement.extras or requirement.marker:
            yield BadLine(place, shown, "it is no exact version; accepted name==version, as pip freeze writes it")
            continue
        if not is_version(exact[0].version):
            yield BadLine(place, shown, "its version is none that pip knows")
            continue
        yield FrozenLine(place, canonicalize_name(requirement.name), exact[0].version)


def package_of(line: str) -> str:
    """Name the package that a line is about, also one of a folder or an address; '' where it cannot be told."""
    if egg := re.search(r"[#&]egg=([A-Za-z0-9._-]+)", line):
        return canonicalize_name(egg[1])
    if line.startswith(("-e", "--editable")):
        last = re.fullmatch(r"([A-Za-z0-9][A-Za-z0-9._-]*?)(\.git)?(@[\w.-]+)?", line.rstrip("/").rpartition("/")[2])
        return canonicalize_name(last[1]) if last else ""
    named = re.match(r"([A-Za-z0-9][A-Za-z0-9._-]*)\s*(@|==|$)", line)
    return canonicalize_name(named[1]) if named else ""


def read_freeze(pins: Pins, folder: Path) -> list[FrozenLine | BadLine]:
    """Read every line of the incident's freeze, from its file or its list; none where it has no freeze."""
    if pins.freeze is not None:
        text = (folder / pins.freeze).read_text(encoding="utf-8").splitlines()
        return list(freeze_lines(text, pins.freeze, pins.leave_out))
    return list(freeze_lines(pins.frozen, "pins.frozen", pins.leave_out))


def cuda_build(cuda: str) -> str | None:
    """Tag a torch build: cpu, cu128 for 12.8 and for cu128; None for what is neither."""
    match = _CUDA.fullmatch(cuda.strip())
    if match is None:
        return None
    return "cpu" if match["cpu"] else f"cu{match['tag'] or match['major'] + match['minor']}"


def build_of_freeze(versions: Mapping[str, str]) -> str | None:
    """Tell a freeze's build by torch's own local version, else by the CUDA runtime beside it."""
    local = versions.get("torch", "").partition("+")[2]
    if re.fullmatch(r"cpu|cu\d{3}", local):
        return local
    for name, version in versions.items():
        if re.fullmatch(r"nvidia-cuda-runtime(-cu\d+)?", name) and (cuda := cuda_release(version)):
            return f"cu{cuda.replace('.', '')}"
    return None


def _versions(lines: Iterable[FrozenLine]) -> dict[str, str]:
    return {line.name: line.version for line in lines}


@dataclass(frozen=True)
class Problem:
    """Something in which pins cannot be had or contradict each other; `key` is where in the pins."""

    key: tuple[str | int, ...]
    found: str
    accepted: str


def pins_problems(pins: Pins, frozen: list[FrozenLine | BadLine]) -> Iterator[Problem]:
    """List all that is wrong with the pins as far as that shows without a package index."""
    where: tuple[str | int, ...] = ("freeze",) if pins.freeze is not None else ("frozen",)
    for line in frozen:
        if isinstance(line, BadLine):
            yield Problem(where, f"{line.line!r} in {line.place}", f"only this: {line.why}")
    lines = [line for line in frozen if isinstance(line, FrozenLine)]
    if pins.freeze is not None and pins.frozen:
        yield Problem(("frozen",), "a list beside pins.freeze", "one of the two")
    if pins.leave_out and not (pins.freeze or pins.frozen):
        yield Problem(("leave_out",), "packages", "a freeze to leave them out of")
    if pins.torch is not None and not is_version(pins.torch):
        yield Problem(("torch",), _shown(pins.torch), "one exact PyTorch release, such as 2.9.0")
    yield from _contradictions(pins, lines, where)
    yield from _missing(pins, lines, has_freeze=bool(pins.freeze or pins.frozen))
    for name, version in pins.packages.items():
        if canonicalize_name(name) in _KEYS:
            key = _KEYS[canonicalize_name(name)]
            yield Problem(("packages", name), "a package", f"it as the key pins.{key}, not among the packages")
        elif not _PACKAGE.fullmatch(name):
            yield Problem(("packages", name), "no name of a package", "letters, digits, and -, _ and . between them")
        elif not is_version(version):
            yield Problem(("packages", name), _shown(version), "one exact version, such as 1.26.4")
        elif canonicalize_name(name) == "pydantic" and Version(version) < _NEWEST_PYDANTIC_TOO_OLD:
            yield Problem(("packages", name), repr(version), "2.7 or newer: the cell itself needs it")


def _contradictions(pins: Pins, lines: list[FrozenLine], where: tuple[str | int, ...]) -> Iterator[Problem]:
    first: dict[str, FrozenLine] = {}
    for line in lines:
        before = first.setdefault(line.name, line)
        if before.version != line.version:
            found = f"{line.name} {before.version} in {before.place} and {line.version} in {line.place}"
            yield Problem(where, found, "one version of each package")
    torch = first.get("torch")
    if torch is not None and not re.fullmatch(TORCH_RELEASE, _release(torch.version)):
        yield Problem(where, f"torch {torch.version} in {torch.place}", "one exact PyTorch release, such as 2.9.0")
    named: dict[str, tuple[tuple[str | int, ...], str]] = {
        canonicalize_name(name): (("packages", name), version) for name, version in pins.packages.items()
    }
    for package, key in _KEYS.items():
        if (value := getattr(pins, key)) is not None:
            named[package] = ((key,), value)
    for package, (place, version) in named.items():
        line_of = first.get(package)
        if line_of is not None and _release(line_of.version) != _release(version):
            yield Problem(place, f"{version!r}, and {line_of.version} in {line_of.place}", "the two to agree, or one")
    build = cuda_build(pins.cuda) if pins.cuda is not None else None
    if pins.cuda is not None and build is None:
        yield Problem(("cuda",), repr(pins.cuda), "cpu, or a CUDA release such as 12.8 or cu128")
    in_freeze = build_of_freeze(_versions(lines))
    if build and in_freeze and build != in_freeze:
        yield Problem(("cuda",), f"{pins.cuda!r}, and {in_freeze} by the freeze", "the two to agree, or one")
    old = first.get("pydantic")
    if old is not None and Version(old.version) < _NEWEST_PYDANTIC_TOO_OLD:
        yield Problem(where, f"pydantic {old.version} in {old.place}", "2.7 or newer: the cell itself needs it")


def _missing(pins: Pins, lines: list[FrozenLine], *, has_freeze: bool) -> Iterator[Problem]:
    names = {line.name for line in lines}
    if pins.torch is None and "torch" not in names:
        yield Problem(("torch",), "nothing", "one exact PyTorch release, such as 2.9.0, here or in a freeze")
    elif pins.cuda is None and build_of_freeze(_versions(lines)) is None:
        told = "the freeze does not say it: " if has_freeze else ""
        yield Problem(("cuda",), "nothing", f"{told}cpu, or the CUDA release of the torch wheel, such as 12.8")
    if has_freeze and pins.toto_ts is None and "toto-ts" not in names:
        yield Problem(("toto_ts",), "nothing", "a toto-ts release, such as 0.2.0: it is not in the freeze")


def pinned_environment(pins: Pins, folder: Path, matrix: Matrix) -> tuple[str, Environment]:
    """Return the environment that the pins ask for, and its name: matrix.yaml's where it is the same."""
    frozen = [line for line in read_freeze(pins, folder) if isinstance(line, FrozenLine)]
    versions = {line.name: line.version for line in frozen}
    build = cuda_build(pins.cuda) if pins.cuda is not None else build_of_freeze(_versions(frozen))
    torch = pins.torch or _release(versions.get("torch", ""))
    if not torch or build is None:
        raise InputError("the pins name no torch release and build", hint="say pins.torch and pins.cuda")
    like = [one for one in matrix.environments.values() if one.build == build]
    same_release = [one for one in like if one.torch == torch]
    packages = {name: _without_build(version, build) for name, version in versions.items() if name not in _KEYS}
    packages |= {canonicalize_name(name): version for name, version in pins.packages.items()}
    environment = Environment(
        torch=torch,
        build=build,
        python=pins.python,
        toto_ts=absolute(
            pins.toto_ts or versions.get("toto-ts") or Environment.model_fields["toto_ts"].default, folder
        ),
        xformers=pins.xformers or (_release(versions["xformers"]) if "xformers" in versions else None),
        pins=dict(sorted(packages.items())),
        gpu_architectures=next((one.gpu_architectures for one in (*same_release, *like)), ()),
        base_image=f"python:{pins.python}-slim",
        index=pins.index or next((one.index for one in (*same_release, *like)), None),
    )
    for name, known in matrix.environments.items():
        if specification_hash(known) == specification_hash(environment):
            return name, known
    identity = hashlib.sha256(environment.model_dump_json().encode()).hexdigest()[:8]
    return f"torch-{torch}-{build}{_PINNED}{identity}", environment


def is_pinned(environment_name: str) -> bool:
    """Tell if this is the name of an environment that an incident pinned itself."""
    return _PINNED in environment_name


def with_pins(matrix: Matrix, pins: Pins | None, folder: Path) -> tuple[Matrix, str | None]:
    """Return the matrix with the pinned environment in it, and its name; None where nothing is pinned."""
    if pins is None:
        return matrix, None
    name, environment = pinned_environment(pins, folder, matrix)
    environments: Mapping[str, Environment] = {**matrix.environments, name: environment}
    return matrix.model_copy(update={"environments": dict(environments)}), name


def _without_build(version: str, build: str) -> str:
    """Cut the tag of torch's build, which only PyTorch's own index has, from a version."""
    release, _, local = version.partition("+")
    return release if local in (build, "cpu") else version


def _shown(version: str) -> str:
    return repr(version if len(version) <= 60 else f"{version[:57]}...")


def _release(version: str) -> str:
    return version.partition("+")[0]


def is_version(text: str) -> bool:
    """Tell if this is one version as pip knows them; none with a number that is too long for Python is."""
    try:
        Version(text)
    except ValueError:
        return False
    return True
