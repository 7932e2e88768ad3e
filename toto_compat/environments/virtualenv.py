"""One virtualenv per environment, in the user's cache folder: built once, checked, and never half there."""

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name
from pydantic import ValidationError

from toto_compat.contract.files import utc_now
from toto_compat.contract.request import Environment
from toto_compat.contract.strict_model import StrictModel
from toto_compat.environments.build_lock import OnLine, build_lock
from toto_compat.environments.fork import fork_wheel
from toto_compat.environments.indexes import index_answers, no_index_is_asked
from toto_compat.environments.pythons import Interpreter, find_compiler, find_python
from toto_compat.environments.requirements import requirements_of
from toto_compat.errors import EnvironmentBuildError
from toto_compat.evidence.files import cache_folder, write_atomically, write_model
from toto_compat.evidence.makers import made_on_another_machine, made_on_this_machine
from toto_compat.matrix.toto_source import is_release, without_password

_GIGABYTE = 10**9
_MARKER = "toto-compat.json"

# Run by the new virtualenv's python: what was really installed, and that it works together.
_CHECK = """
import importlib.metadata, json
import torch, numpy
torch.zeros(2).numpy()
import toto.model.toto, toto.inference.forecaster
print(json.dumps({
    "torch": torch.__version__,
    "cuda": torch.version.cuda,
    "versions": {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()},
}))
"""


class BuiltEnvironment(StrictModel):
    """Holds what a finished virtualenv says about itself."""

    name: str
    environment: Environment
    python: str
    torch: str
    cuda: str | None
    distributions: tuple[str, ...]  # names of the dist-info folders: a cheap check that nobody changed it since
    lock: str
    built: str


@dataclass(frozen=True)
class Virtualenv:
    """A virtualenv that is there."""

    folder: Path
    lock: str  # hash of its exact packages

    @property
    def python(self) -> str:
        return str(venv_python(self.folder))


# --- where ----------------------------------------------------------------------------------------------------------


def specification_hash(environment: Environment) -> str:
    """Hash everything that decides what is installed."""
    wanted = requirements_of(environment)
    facts = [environment.python, environment.build, environment.index, wanted.torch, wanted.others]
    return hashlib.sha256(json.dumps([*facts, wanted.without_dependencies]).encode()).hexdigest()


def venv_folder(environment_name: str, environment: Environment, cache: Path | None = None) -> Path:
    return (cache or cache_folder()) / "venvs" / f"{environment_name}-{specification_hash(environment)[:10]}"


def venv_log(environment_name: str, environment: Environment) -> Path:
    """Name the file that the build of a virtualenv is logged in: it lies beside it."""
    folder = venv_folder(environment_name, environment)
    return folder.with_name(f"{folder.name}.log")


def venv_python(folder: Path) -> Path:
    return folder / "bin" / "python"


def read_built(folder: Path) -> BuiltEnvironment | None:
    """Read about the environment in this folder; None unless it is whole and unchanged since it was built."""
    marker = folder / _MARKER
    if not marker.exists() or not venv_python(folder).exists():
        return None
    try:
        built = BuiltEnvironment.model_validate_json(marker.read_bytes())
    except (OSError, ValidationError):
        return None
    return built if built.distributions == _distributions(folder) else None


def _distributions(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(path.name for path in folder.glob("lib/python*/site-packages/*.dist-info")))


# --- building -------------------------------------------------------------------------------------------------------


def build_venv(environment_name: str, environment: Environment, say: OnLine) -> Virtualenv:
    """Return the virtualenv of an environment, built if it is not there. Two builders at once: the second waits."""
    find_compiler()
    folder = venv_folder(environment_name, environment)
    built = read_built(folder)
    if built is None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with build_lock(folder.parent / f"{folder.name}.lock", environment_name, say):
            # another run may have built it while this one waited
            built = read_built(folder) or _build(folder, environment_name, environment, say)
    os.utime(folder)
    return Virtualenv(folder, built.lock)


def _build(folder: Path, environment_name: str, environment: Environment, say: OnLine) -> BuiltEnvironment:
    _check_disk(folder.parent, environment_name, environment)
    interpreter = find_python(environment.python)
    for leftover in folder.parent.glob(f".building-{folder.name}-*"):
        # of a builder that was killed: nobody else on this machine can be building while the lock is ours
        if not made_on_another_machine(leftover.name):
            shutil.rmtree(leftover, ignore_errors=True)
    if folder.exists():
        say(f"{environment_name}: the virtualenv was changed or is damaged, building it anew")
        shutil.rmtree(folder)
    log = venv_log(environment_name, environment)
    log.unlink(missing_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".building-{folder.name}{made_on_this_machine()}", dir=folder.parent))
    started = time.monotonic()
    try:
        built = _install(building, environment_name, environment, interpreter=interpreter, log=log, say=say)
        _rewrite_paths(building, folder)
        write_model(building / _MARKER, built)
        building.chmod(0o755)
        try:
            building.rename(folder)
        except OSError:
            # another machine that shares this folder and not its locks was quicker
            if (others := read_built(folder)) is None:
                raise
            built = others
    finally:
        shutil.rmtree(building, ignore_errors=True)
    say(f"{environment_name}: torch {built.torch} ready in {time.monotonic() - started:.0f} s")
    return built


def _install(
    building: Path, name: str, environment: Environment, *, interpreter: Interpreter, log: Path, say: OnLine
) -> BuiltEnvironment:
    wanted = requirements_of(environment)
    say(f"{name}: new virtualenv with Python {interpreter.version}")
    _run([interpreter.executable, "-I", "-m", "venv", str(building)], name, "making the virtualenv", log)
    pip = [str(venv_python(building)), "-I", "-m", "pip", "install", "--no-input", "--progress-bar=off", "--no-compile"]
    say(f"{name}: installing {wanted.torch} ({environment.build}); output in {log}")
    _install_torch(pip, name, environment, log, say)

    constraint = building / "torch-stays.txt"
    write_atomically(constraint, f"{wanted.torch}\n")
    say(f"{name}: installing toto-ts {environment.toto_ts} and what it needs")
    _run([*pip, "-c", str(constraint), *wanted.others], name, "installing what toto-ts needs", log)
    bare = [*pip, "-c", str(constraint), "--no-deps", *wanted.without_dependencies_by(fork_wheel(environment, say))]
    _run(bare, name, f"installing {' and '.join(wanted.without_dependencies)}", log)

    check = _run([str(venv_python(building)), "-I", "-c", _CHECK], name, "importing torch and toto", log)
    facts = json.loads(check[-1])
    _check_versions(name, environment, facts, log)
    freeze = _run([str(venv_python(building)), "-I", "-m", "pip", "freeze", "--all"], name, "pip freeze", log)
    lock_text = "\n".join([f"# python {interpreter.version}", *sorted(line for line in freeze if line.strip())]) + "\n"
    write_atomically(building / "lock.txt", lock_text)
    return BuiltEnvironment(
        name=name,
        environment=environment,
        python=interpreter.version,
        torch=facts["torch"],
        cuda=facts["cuda"],
        distributions=_distributions(building),
        lock=hashlib.sha256(lock_text.encode()).hexdigest(),
        built=utc_now(),
    )


def _install_torch(pip: list[str], name: str, environment: Environment, log: Path, say: OnLine) -> None:
    """Install torch from the environment's own index where it answers, else from the user's."""
    torch = requirements_of(environment).torch
    if environment.index:
        shown = without_password(environment.index)
        if index_answers(environment.index):
            try:
                _run([*pip, "--extra-index-url", environment.index, torch], name, f"installing {torch}", log)
            except EnvironmentBuildError:
                say(f"{name}: {shown} answers but does not deliver, taking your own pip index")
            else:
                return
        elif not no_index_is_asked():
            say(f"{name}: {shown} does not answer, taking your own pip index")
    _run([*pip, torch], name, f"installing {torch}", log)


def _check_versions(name: str, environment: Environment, facts: dict[str, object], log: Path) -> None:
    """Refuse another torch than the one asked for, one for another CUDA, and any pin that does not hold."""
    torch, cuda, versions = str(facts["torch"]), facts["cuda"], facts["versions"]
    assert isinstance(versions, dict)
    if torch.split("+", maxsplit=1)[0] != environment.torch:
        raise EnvironmentBuildError(
            f"{name}: asked for torch {environment.torch}, but {torch} is installed",
            hint=f"a pin in matrix.yaml pulls in another torch; see {log}",
        )
    if environment.build != "cpu":
        # cu128 -> 12.8
        wanted_cuda = f"{environment.build[2:-1]}.{environment.build[-1]}"
        if cuda != wanted_cuda:
            raise EnvironmentBuildError(
                f"{name}: asked for the {environment.build} build of torch {environment.torch}, "
                f"the index gave one for CUDA {cuda or 'none (a CPU build)'}",
                hint="set the environment's `index` in matrix.yaml to the wheel index of that CUDA release",
            )
    installed = {canonicalize_name(package): str(version) for package, version in versions.items()}
    pins = dict(environment.pins)
    if is_release(environment.toto_ts):
        pins["toto-ts"] = environment.toto_ts
    if environment.xformers:
        pins["xformers"] = environment.xformers
    for package, version in pins.items():
        there = installed.get(canonicalize_name(package), "nothing")
        if there.split("+")[0] != version.split("+")[0]:
            raise EnvironmentBuildError(
                f"{name}: asked for {package} {version}, but {there} is installed", hint=f"see {log}"
            )


def _check_disk(folder: Path, name: str, environment: Environment) -> None:
    needed = disk_needed(environment)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise EnvironmentBuildError(
            f"{name}: needs about {needed / _GIGABYTE:.0f} GB, {folder} has {free / _GIGABYTE:.1f} GB free",
            hint="free space, run `toto-compat prune`, or set TOTO_COMPAT_CACHE to a folder on another disk",
        )


def disk_needed(environment: Environment) -> int:
    """Estimate the bytes a virtualenv takes while it is built; CUDA wheels carry their own CUDA."""
    return (2 if environment.build == "cpu" else 8) * _GIGABYTE


def download_size(environment: Environment) -> int:
    """Estimate the bytes that pip fetches for an environment."""
    return 400 * 10**6 if environment.build == "cpu" else 4 * _GIGABYTE


def _run(command: list[str], name: str, doing: str, log: Path) -> list[str]:
    """Run one step of a build; all output goes to the log, its end into the error."""
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    # a user-wide `--user` or `--target` in pip's settings would put packages beside the virtualenv
    env |= {"PIP_USER": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONNOUSERSITE": "1"}
    env.pop("PIP_TARGET", None)
    env.pop("PIP_PREFIX", None)
    lines: list[str] = []
    last: deque[str] = deque(maxlen=15)
    with log.open("a", encoding="utf-8") as file:
        words = [without_password(part) for part in command if len(part) < 200]
        file.write(f"$ {' '.join(words)}\n")
        file.flush()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=env,
            cwd=log.parent,
        )
        try:
            assert process.stdout is not None
            for line in process.stdout:
                file.write(line)
                lines.append(line.rstrip("\n"))
                last.append(line.rstrip("\n"))
            code = process.wait()
        except BaseException:
            process.kill()
            process.wait()
            raise
    if code != 0:
        shown = "\n".join(f"    {line}" for line in last)
        raise EnvironmentBuildError(
            f"{name}: {doing} failed (exit code {code}):\n{shown}",
            hint=f"the whole output is in {log}",
        )
    return lines


def _rewrite_paths(building: Path, final: Path) -> None:
    """Make scripts in bin/ name the final folder instead of the one they were installed in."""
    old, new = str(building).encode(), str(final).encode()
    for path in (building / "bin").iterdir():
        if path.is_file() and not path.is_symlink():
            content = path.read_bytes()
            if old in content:
                path.write_bytes(content.replace(old, new))
