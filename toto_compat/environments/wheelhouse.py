"""The wheels of locked environments on this machine, by hash: with them an image is built without any network."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click

from toto_compat.contract.request import Environment
from toto_compat.environments.build_lock import OnLine
from toto_compat.environments.fork import fork_wheel
from toto_compat.environments.indexes import index_options
from toto_compat.environments.locks import Lock, LockedPackage, locked_fork, named_environments, read_lock
from toto_compat.errors import EnvironmentBuildError, StorageError
from toto_compat.evidence.files import cache_folder
from toto_compat.matrix.load import find_matrix_file, load_matrix, matrix_option

# What a wheel for Linux on x86_64 may be tagged as. pip has to be told all of them when it fetches for another python.
_PLATFORMS = (
    "linux_x86_64",
    "manylinux1_x86_64",
    "manylinux2010_x86_64",
    "manylinux2014_x86_64",
    *(f"manylinux_2_{minor}_x86_64" for minor in range(5, 40)),
)


def wheel_path(package: LockedPackage, cache: Path | None = None) -> Path:
    return (cache or cache_folder()) / "wheels" / package.sha256 / package.file


def missing_wheels(lock: Lock) -> list[LockedPackage]:
    return [package for package in lock.packages if not wheel_path(package).is_file()]


def verify_wheels(packages: Sequence[LockedPackage]) -> None:
    """Hash every file; one that does not match its lock is removed and named."""
    for package in packages:
        path = wheel_path(package)
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != package.sha256:
            path.unlink()
            raise EnvironmentBuildError(
                f"{package.file}: the wheel does not match its lock: sha256 {digest}, locked is {package.sha256}",
                hint="the file was removed; `toto-compat fetch` gets it again. If that repeats, the index serves"
                " another file than the one that was locked",
            )


def fetch_wheels(lock: Lock, environment: Environment, say: OnLine) -> None:
    """Download what is missing, with the user's own pip settings; every file is checked against its hash."""
    shelve_fork(lock, environment, say)
    missing = missing_wheels(lock)
    if not missing:
        return
    size = sum(package.size for package in missing)
    say(f"{lock.environment_name}: fetching {len(missing)} wheels{f', {size / 1e9:.2f} GB' if size else ''}")
    shelf = cache_folder() / "wheels"
    try:
        shelf.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(shelf).free
        if free < size * 1.1:
            raise EnvironmentBuildError(
                f"{lock.environment_name}: needs {size / 1e9:.1f} GB of wheels, {shelf} has {free / 1e9:.1f} GB free",
                hint="free space, or set TOTO_COMPAT_CACHE to a folder on another disk",
            )
        with tempfile.TemporaryDirectory(prefix=".fetching-", dir=shelf) as folder:
            _download(missing, lock, environment, Path(folder))
            for package in missing:
                _shelve(Path(folder, package.file), package)
    except OSError as error:
        raise StorageError(
            f"{shelf}: the wheels cannot be stored: {error.strerror}", hint="free space, or set TOTO_COMPAT_CACHE"
        ) from error


def shelve_fork(lock: Lock, environment: Environment, say: OnLine) -> None:
    """Put the wheel of a fork where those of an index lie; it has to be the one that was locked."""
    wheel = fork_wheel(environment, say)
    if wheel is None:
        return
    made = locked_fork(wheel)
    if made not in lock.packages:
        raise EnvironmentBuildError(
            f"{lock.environment_name}: {made.file} of the fork is not the wheel that was locked",
            hint=f"`nox -s lock -- {lock.environment_name}` locks what is there now",
        )
    target = wheel_path(made)
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetching-", dir=target.parent.parent) as folder:
            shutil.copyfile(wheel, Path(folder, made.file)).replace(target)


def _download(packages: Sequence[LockedPackage], lock: Lock, environment: Environment, folder: Path) -> None:
    requirements = folder / "requirements.txt"
    requirements.write_text("".join(f"{package.requirement}\n" for package in packages), encoding="utf-8")
    minor = lock.python.replace(".", "")
    target = ["--implementation", "cp", "--python-version", lock.python]
    target += [word for abi in (f"cp{minor}", "abi3", "none") for word in ("--abi", abi)]
    target += [word for platform in _PLATFORMS for word in ("--platform", platform)]
    options = ["--no-deps", "--require-hashes", "--only-binary", ":all:", "--no-cache-dir", "--no-input", "-q"]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        *options,
        *target,
        *index_options(environment),
        "-d",
        str(folder),
    ]
    variables = os.environ | {"TMPDIR": str(folder), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(
        [*command, "-r", str(requirements)],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        env=variables,
    )
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("WARNING")]
        raise EnvironmentBuildError(
            f"{lock.environment_name}: the wheels of its lock cannot be fetched:\n    " + "\n    ".join(lines[-8:]),
            hint=fetch_hint("\n".join(lines), lock.environment_name),
        )


def fetch_hint(output: str, environment_name: str) -> str:
    """Say what to do about pip's complaint, in a build as well as in a fetch."""
    if "DO NOT MATCH THE HASHES" in output:
        return "the index serves another file than the one that was locked: find out why before locking anew"
    if "No matching distribution" in output or "from versions: none" in output:
        return f"your package index lacks that file; `nox -s lock -- {environment_name}` locks what it has"
    return "check the package index pip is set to use, then run the same command again"


def _shelve(file: Path, package: LockedPackage) -> None:
    target = wheel_path(package)
    if not file.is_file():
        raise EnvironmentBuildError(
            f"{package.name} {package.version}: pip fetched another file than {package.file}",
            hint="the index renamed it; lock the environment anew",
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    file.replace(target)


@click.command("fetch")
@click.argument("environments", nargs=-1, required=True)
@matrix_option
def fetch_command(environments: tuple[str, ...], matrix_file: Path | None) -> None:
    """Download the wheels of ENVIRONMENTS, so that their images can be built with no network at all."""
    matrix = load_matrix(find_matrix_file(matrix_file))
    for name, environment in named_environments(matrix, environments).items():
        lock = read_lock(name, environment)
        fetch_wheels(lock, environment, click.echo)
        verify_wheels(lock.packages)
        total = sum(wheel_path(package).stat().st_size for package in lock.packages)
        click.echo(f"{name}: {len(lock.packages)} wheels, {total / 1e9:.2f} GB, every hash checked")
