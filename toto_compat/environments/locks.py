"""Locks: every package of an environment with its hash, in docker/locks/<environment>.txt.

A lock is a pip requirements file that is installed with `--no-deps --require-hashes`; comments carry the rest: what was
asked for (so that a stale lock is noticed), the layer a package belongs to, its file and size. No index is named in it.
"""

import hashlib
import http.client
import json
import re
import subprocess
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import click
import yaml
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from toto_compat.contract.request import Environment
from toto_compat.environments.build_lock import OnLine
from toto_compat.environments.fork import fork_wheel
from toto_compat.environments.indexes import index_options
from toto_compat.environments.pythons import find_python
from toto_compat.environments.registry import DIGEST, NoRegistryError, ask_registry
from toto_compat.environments.requirements import FORK, requirements_of
from toto_compat.errors import EnvironmentBuildError, SelectionError
from toto_compat.evidence.files import cache_folder, write_atomically
from toto_compat.matrix.load import find_matrix_file, load_matrix, matrix_option
from toto_compat.matrix.schema import Matrix

DOCKER_FOLDER = Path(__file__).resolve().parent.parent.parent / "docker"  # of a checkout; an installed package has none
BASE_DIGESTS = "base-images.yaml"
LAYERS = ("toto", "torch")  # in the order in which they are installed: what toto-ts needs is the same for every torch

_PACKAGE_LINE = re.compile(
    r"^(?P<name>[A-Za-z0-9._-]+)={2,3}(?P<version>\S+) --hash=sha256:(?P<sha256>[0-9a-f]{64})"
    r"  # (?P<file>[^\s/\\]+\.whl)(?: (?P<size>\d+))?$"
)


@dataclass(frozen=True)
class LockedPackage:
    """One wheel."""

    name: str
    version: str
    sha256: str
    file: str
    size: int = 0  # bytes; 0 where the index did not say
    layer: str = "torch"

    @property
    def requirement(self) -> str:
        # === for torch: == 2.13.0 would also take 2.13.0+cpu from a folder of wheels, which then has the wrong hash
        equals = "===" if self.name == "torch" else "=="
        return f"{self.name}{equals}{self.version} --hash=sha256:{self.sha256}"


@dataclass(frozen=True)
class Lock:
    """The exact packages of one environment."""

    environment_name: str
    python: str
    asked: tuple[str, ...]
    packages: tuple[LockedPackage, ...]

    def layer(self, name: str) -> tuple[LockedPackage, ...]:
        return tuple(package for package in self.packages if package.layer == name)

    @property
    def download_bytes(self) -> int:
        return sum(package.size for package in self.packages)

    def version_of(self, name: str) -> str:
        return next((package.version for package in self.packages if package.name == name), "")

    @property
    def identity(self) -> str:
        """Hash what is installed; a new comment or another order of what was asked changes nothing."""
        lines = [self.python, *(f"{package.layer} {package.requirement}" for package in self.packages)]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def lock_path(environment_name: str, folder: Path | None = None) -> Path:
    return (folder or DOCKER_FOLDER) / "locks" / f"{environment_name}.txt"


def own_lock_path(environment_name: str) -> Path:
    """Name the lock of an environment that is not the project's but one user's: it lies in that user's cache folder."""
    return cache_folder() / "locks" / f"{environment_name}.txt"


def found_lock_path(environment_name: str) -> Path:
    """Name the lock that holds for an environment: the project's, and where it has none the user's own."""
    path, own = lock_path(environment_name), own_lock_path(environment_name)
    return own if not path.exists() and own.exists() else path


def lock_on_the_spot(environment_name: str, environment: Environment, say: Callable[[str], None]) -> None:
    """Lock an environment that matrix.yaml does not have, if that was not done before."""
    try:
        read_lock(environment_name, environment)
    except EnvironmentBuildError:
        say(f"{environment_name}: locking it, which asks your package index for every package")
        write_atomically(own_lock_path(environment_name), format_lock(make_lock(environment_name, environment)))


def asked_of(environment: Environment) -> tuple[str, ...]:
    """List what matrix.yaml asks of an environment, one line each: a lock that was made for other lines is stale."""
    wanted = requirements_of(environment)
    return (
        f"python {environment.python}",
        f"build {environment.build}",
        wanted.torch,
        *wanted.others,
        *(f"{requirement} without dependencies" for requirement in wanted.without_dependencies),
    )


# --- reading and writing ----------------------------------------------------------------------------------------------


def format_lock(lock: Lock) -> str:
    lines = [
        f"# Written by `nox -s lock -- {lock.environment_name}`: edit matrix.yaml, not this file.",
        "# Installed with --no-deps --require-hashes, for Linux on x86_64.",
        f"# environment: {lock.environment_name}",
        f"# python: {lock.python}",
        *(f"# asked: {line}" for line in lock.asked),
    ]
    for layer in LAYERS:
        lines += ["", f"# layer: {layer}"]
        for package in lock.layer(layer):
            size = f" {package.size}" if package.size else ""
            lines.append(f"{package.requirement}  # {package.file}{size}")
    return "\n".join(lines) + "\n"


def parse_lock(text: str, path: Path) -> Lock:
    """Read a lock back; EnvironmentBuildError names the line that does not belong."""
    header: dict[str, list[str]] = {}
    packages: list[LockedPackage] = []
    layer = ""
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("#"):
            key, colon, value = line[1:].strip().partition(": ")
            if colon:
                header.setdefault(key, []).append(value)
            layer = value if key == "layer" else layer
        elif line.strip():
            match = _PACKAGE_LINE.match(line)
            if match is None or layer not in LAYERS:
                raise EnvironmentBuildError(
                    f"{path}:{number}: not a line of a lock: {line[:100]!r}",
                    hint=f"locks are not edited by hand: `nox -s lock -- {path.stem}` writes it anew",
                )
            name, version, sha256, file, size = match.groups()
            packages.append(LockedPackage(name, version, sha256, file, int(size or 0), layer))
    named, python = header.get("environment", [""])[0], header.get("python", [""])[0]
    if not packages or named != path.stem or not python:
        raise EnvironmentBuildError(
            f"{path}: incomplete, or of another environment ({named or 'none named'})",
            hint=f"`nox -s lock -- {path.stem}` writes it anew",
        )
    return Lock(named, python, tuple(header.get("asked", [])), tuple(packages))


def read_lock(environment_name: str, environment: Environment, folder: Path | None = None) -> Lock:
    """Read the lock of an environment as matrix.yaml has it now; a missing or stale one is an error that says so."""
    path = lock_path(environment_name, folder) if folder else found_lock_path(environment_name)
    again = f"`nox -s lock -- {environment_name}` writes it (it needs Python {environment.python} on this machine)"
    try:
        lock = parse_lock(path.read_text(encoding="utf-8"), path)
    except FileNotFoundError:
        raise EnvironmentBuildError(f"{environment_name} has no lock: {path} does not exist", hint=again) from None
    differences = stale_because(lock, environment)
    if differences:
        raise EnvironmentBuildError(f"{path} is stale: {'; '.join(differences)}", hint=again)
    return lock


def stale_because(lock: Lock, environment: Environment) -> list[str]:
    """List how what the lock was made for differs from what is asked for now."""
    now, then = asked_of(environment), lock.asked
    added = [line for line in now if line not in then]
    gone = [line for line in then if line not in now]
    return [f"matrix.yaml asks for {line}" for line in added] + [f"no longer for {line}" for line in gone]


# --- base images ------------------------------------------------------------------------------------------------------


def read_base_digests(folder: Path | None = None) -> dict[str, str]:
    """Read the digests of base images, as far as some machine with a registry has resolved them."""
    path = (folder or DOCKER_FOLDER) / "locks" / BASE_DIGESTS
    try:
        digests = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except FileNotFoundError:
        return {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise EnvironmentBuildError(f"{path}: not valid YAML: {error}", hint="restore the committed file") from error
    if not isinstance(digests, dict):
        raise EnvironmentBuildError(f"{path}: not images with their digests", hint="restore the committed file")
    known = {image: digest for image, digest in digests.items() if digest}
    for image, digest in known.items():
        if not DIGEST.fullmatch(str(digest)):
            raise EnvironmentBuildError(
                f"{path}: {image}: {str(digest)[:80]!r} is no digest",
                hint="delete that line and run `nox -s lock -- --bases`, or restore the committed file",
            )
    return {str(image): str(digest) for image, digest in known.items()}


def record_base_digest(image: str, digest: str, folder: Path | None = None) -> None:
    """Write down what a tag stood for when it was first resolved; from then on the digest is what is used."""
    known = read_base_digests(folder) | {image: digest}
    lines = [
        "# Base images by digest, written by the first machine that could resolve them; delete a line to do it anew.",
        *(f'"{name}": "{value}"' for name, value in sorted(known.items())),
    ]
    write_atomically((folder or DOCKER_FOLDER) / "locks" / BASE_DIGESTS, "\n".join(lines) + "\n")


# --- making -----------------------------------------------------------------------------------------------------------


def make_lock(environment_name: str, environment: Environment) -> Lock:
    """Resolve an environment with its own python and the user's package index; wheels only, nothing is installed."""
    interpreter = find_python(environment.python)
    wanted = requirements_of(environment)
    index = index_options(environment)
    # The default wheel of a release has no local version; a CPU build has one on every index but PyTorch's own.
    torch = wanted.torch.replace("==", "===") if environment.build != "cpu" and not environment.index else wanted.torch
    with tempfile.TemporaryDirectory(prefix="toto-compat-lock-") as scratch:
        python = str(Path(scratch, "venv", "bin", "python"))
        _run([interpreter.executable, "-I", "-m", "venv", str(Path(scratch, "venv"))], environment_name)
        # An old pip downloads gigabytes only to read their metadata.
        _run([python, "-I", "-m", "pip", "install", "-q", "--upgrade", "pip>=24"], environment_name)
        whole = _resolve(python, [*index, torch, *wanted.others], environment_name)
        named = [one for one in wanted.without_dependencies if not one.startswith(FORK)]
        bare = _resolve(python, [*index, "--no-deps", *named], environment_name) if named else []
    toto_names = _reachable(whole, wanted.others) | {canonicalize_name(item["metadata"]["name"]) for item in bare}
    packages = [locked(item, toto_names) for item in (*whole, *bare)]
    fork = fork_wheel(environment, click.echo)
    if fork is not None:
        packages.append(locked_fork(fork))
    lock = Lock(environment_name, environment.python, asked_of(environment), ordered(packages))
    check_torch(lock, environment)
    return lock


def ordered(packages: Iterable[LockedPackage]) -> tuple[LockedPackage, ...]:
    return tuple(sorted(packages, key=lambda package: (LAYERS.index(package.layer), package.name)))


def _resolve(python: str, arguments: Sequence[str], environment_name: str) -> list[dict[str, Any]]:
    """Ask pip what it would install. fast-deps reads metadata out of a wheel without fetching the wheel."""
    with tempfile.TemporaryDirectory(prefix="toto-compat-report-") as folder:
        report = Path(folder, "report.json")
        options = ["--dry-run", "--ignore-installed", "--only-binary", ":all:", "--no-cache-dir", "--no-input", "-q"]
        command = [python, "-I", "-m", "pip", "install", *options, "--use-feature=fast-deps", "--report", str(report)]
        _run([*command, *arguments], environment_name)
        installs: list[dict[str, Any]] = json.loads(report.read_text(encoding="utf-8"))["install"]
    return installs


def _reachable(installs: Sequence[Mapping[str, Any]], roots: Iterable[str]) -> set[str]:
    """Name the packages the roots need, but not what only torch needs: these do not change with the torch release."""
    needs: dict[str, set[str]] = {}
    for item in installs:
        requirements = (_requirement_name(text) for text in item["metadata"].get("requires_dist", []))
        needs[canonicalize_name(item["metadata"]["name"])] = {name for name in requirements if name}
    reached: set[str] = set()
    queue: list[str] = [canonicalize_name(Requirement(root).name) for root in roots]
    while queue:
        name = queue.pop()
        if name in needs and name not in reached and name != "torch":
            reached.add(name)
            queue += needs[name]
    return reached


def _requirement_name(text: str) -> str:
    try:
        requirement = Requirement(text)
    except InvalidRequirement:
        return ""
    return "" if requirement.marker and "extra" in str(requirement.marker) else canonicalize_name(requirement.name)


def locked(item: Mapping[str, Any], toto_names: set[str]) -> LockedPackage:
    name, url = canonicalize_name(item["metadata"]["name"]), item["download_info"]["url"]
    hashes = item["download_info"].get("archive_info", {}).get("hashes", {})
    if "sha256" not in hashes:
        raise EnvironmentBuildError(
            f"the package index gives no sha256 for {name} {item['metadata']['version']}",
            hint="use an index that publishes hashes: a lock without them pins nothing",
        )
    return LockedPackage(
        name=name,
        version=item["metadata"]["version"],
        sha256=hashes["sha256"],
        file=urllib.parse.unquote(urllib.parse.urlsplit(url).path.rpartition("/")[2]),
        size=size_of(url),
        layer="toto" if name in toto_names else "torch",
    )


def locked_fork(wheel: Path) -> LockedPackage:
    """Make the line of a lock for a wheel that is on no index."""
    name, version, _, _ = parse_wheel_filename(wheel.name)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return LockedPackage(str(name), str(version), digest, wheel.name, wheel.stat().st_size, "toto")


def size_of(url: str) -> int:
    """Ask an index for a file's bytes; 0 where it does not say: sizes are for the plan, nothing depends on them."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme == "file":
        return Path(urllib.parse.unquote(parts.path)).stat().st_size
    if parts.scheme not in ("http", "https"):
        return 0
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=10) as answer:  # noqa: S310
            return int(answer.headers.get("Content-Length") or 0)
    except (OSError, ValueError, http.client.HTTPException):
        return 0


def check_torch(lock: Lock, environment: Environment) -> None:
    """Refuse a CPU lock that brings CUDA and a CUDA lock that does not."""
    version = lock.version_of("torch")
    has_cuda = any(package.name.startswith(("nvidia-", "cuda-")) for package in lock.packages)
    release, _, local = version.partition("+")
    right_build = has_cuda == (environment.build != "cpu") and local in ("", environment.build)
    if release != environment.torch or not right_build:
        raise EnvironmentBuildError(
            f"{lock.environment_name}: asked for torch {environment.torch} ({environment.build}),"
            f" the index gives {version} {'with' if has_cuda else 'without'} CUDA",
            hint="set the environment's `index` in matrix.yaml to the wheel index of that build, and check it answers",
        )


def pips_words(text: str) -> str:
    """The end of what pip says, without its warnings and its list of every version that is of another Python."""
    passed_over = ("WARNING", "ERROR: Ignored the following")
    return "\n    ".join([line for line in text.splitlines() if not line.startswith(passed_over)][-8:])


def _run(command: list[str], environment_name: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise EnvironmentBuildError(
            f"{environment_name} cannot be locked:\n    {pips_words(done.stderr or done.stdout)}",
            hint="check the pins in matrix.yaml and the package index pip is set to use",
        )


# --- the command ------------------------------------------------------------------------------------------------------


def named_environments(matrix: Matrix, names: Sequence[str]) -> dict[str, Environment]:
    """Pick the environments that any of the globs match, all of them without one."""
    for name in names:
        if not any(fnmatchcase(known, name) for known in matrix.environments):
            known_names = ", ".join(matrix.environments)
            raise SelectionError(f"there is no environment {name!r}", hint=f"the matrix has {known_names}")
    wanted = [name for name in matrix.environments if not names or any(fnmatchcase(name, glob) for glob in names)]
    return {name: matrix.environments[name] for name in wanted}


@click.command("lock")
@click.argument("environments", nargs=-1)
@click.option("--check", is_flag=True, help="Only say which locks are missing or stale; exit code 5 if any is.")
@click.option("--bases", is_flag=True, help="Only resolve base images: needs a network, no Python and no engine.")
@matrix_option
def lock_command(environments: tuple[str, ...], check: bool, bases: bool, matrix_file: Path | None) -> None:
    """Write docker/locks/ENVIRONMENT.txt: every package with its hash. Without names: all environments.

    The digests of their base images, asked of their registries, go into docker/locks/base-images.yaml."""
    matrix = load_matrix(find_matrix_file(matrix_file))
    named = named_environments(matrix, environments)
    problems = []
    for image in () if check else dict.fromkeys(environment.base_image for environment in named.values()):
        try:
            resolve_base_digest(image)
        except EnvironmentBuildError as error:
            problems.append(str(error))
    for name, environment in () if bases else named.items():
        if check:
            try:
                read_lock(name, environment)
            except EnvironmentBuildError as error:
                problems.append(error.message)
            continue
        try:
            lock = make_lock(name, environment)
        except EnvironmentBuildError as error:
            # one release that the index lacks must not keep the others from being locked
            problems.append(str(error))
            click.echo(f"{name}: not locked", err=True)
            continue
        lock = keep_known_sizes(lock)
        write_atomically(lock_path(name), format_lock(lock))
        click.echo(
            f"{name}: torch {lock.version_of('torch')}, {len(lock.packages)} packages, "
            f"{lock.download_bytes / 1e9:.2f} GB to download"
        )
    if problems:
        raise EnvironmentBuildError("\n".join(problems), hint="" if not check else "`nox -s lock` writes them")


def keep_known_sizes(lock: Lock) -> Lock:
    """Keep the sizes of the lock that is there: an index that is silent today does not erase what it said before."""
    path = lock_path(lock.environment_name)
    try:
        before = {package.sha256: package.size for package in parse_lock(path.read_text(), path).packages}
    except (OSError, EnvironmentBuildError):
        return lock
    kept = (replace(package, size=package.size or before.get(package.sha256, 0)) for package in lock.packages)
    return replace(lock, packages=tuple(kept))


def resolve_base_digest(image: str, say: OnLine = click.echo) -> None:
    """Pin a base image by what a registry says its tag stands for now; elsewhere the first machine that can does it."""
    if image in read_base_digests() or "@sha256:" in image:
        return
    try:
        digest = ask_registry(image)
    except NoRegistryError as error:
        say(f"base image {image}: no registry answers here ({error}), its digest stays open")
        return
    record_base_digest(image, digest)
    say(f"base image {image} is {digest}")
