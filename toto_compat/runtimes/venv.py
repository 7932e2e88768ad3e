"""One virtualenv per environment, in the user's cache folder: built once, checked, and never half there."""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import ValidationError

from toto_compat.errors import EnvironmentBuildError
from toto_compat.evidence.provenance import LOCK_VARIABLE, RUNTIME_VARIABLE, SOURCE_HASH_VARIABLE
from toto_compat.evidence.schema import CellRequest, CellResult, Provenance
from toto_compat.evidence.store import utc_now, write_atomically, write_model
from toto_compat.matrix.schema import Device, Environment
from toto_compat.runtimes.cell_process import (
    CELL_COMMAND,
    REQUEST_FILE,
    RESULT_FILE,
    CellProcesses,
    bytes_of,
    collect_result,
)
from toto_compat.runtimes.pythons import Interpreter, find_compiler, find_python
from toto_compat.runtimes.requirements import normalise, requirements_of
from toto_compat.runtimes.seam import OnLine, PreparedEnvironment
from toto_compat.runtimes.source import cache_folder
from toto_compat.strict_model import StrictModel

_GIGABYTE = 10**9
_INDEX_PATIENCE_SECONDS = 3.0
_MARKER = "toto-compat.json"
_LONGEST_TMPDIR = 70  # multiprocessing puts sockets below it, and their paths end at 107 characters

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
    """What a finished virtualenv says about itself."""

    name: str
    environment: Environment
    python: str
    torch: str
    cuda: str | None
    distributions: tuple[str, ...]  # names of the dist-info folders: a cheap check that nobody changed it since
    lock: str
    built: str


# --- where ----------------------------------------------------------------------------------------------------------


def specification_hash(environment: Environment) -> str:
    """Of everything that decides what is installed."""
    wanted = requirements_of(environment)
    facts = [environment.python, environment.build, environment.index, wanted.torch, wanted.others]
    return hashlib.sha256(json.dumps([*facts, wanted.without_dependencies]).encode()).hexdigest()


def venv_folder(environment_name: str, environment: Environment, cache: Path | None = None) -> Path:
    return (cache or cache_folder()) / "venvs" / f"{environment_name}-{specification_hash(environment)[:10]}"


def venv_python(folder: Path) -> Path:
    return folder / "bin" / "python"


def read_built(folder: Path) -> BuiltEnvironment | None:
    """The environment in this folder if it is whole and unchanged since it was built."""
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


def build_venv(environment_name: str, environment: Environment, say: OnLine) -> PreparedEnvironment:
    """The virtualenv of an environment, built if it is not there. Two builders at once: the second waits."""
    find_compiler()
    folder = venv_folder(environment_name, environment)
    built = read_built(folder)
    if built is None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with build_lock(folder.parent / f"{folder.name}.lock", environment_name, say):
            # another run may have built it while this one waited
            built = read_built(folder) or _build(folder, environment_name, environment, say)
    os.utime(folder)
    return PreparedEnvironment(
        name=environment_name,
        environment=environment,
        runtime="venv",
        python=str(venv_python(folder)),
        lock=built.lock,
        folder=folder,
    )


@contextmanager
def build_lock(path: Path, environment_name: str, say: OnLine) -> Iterator[None]:
    """Held while an environment is built; the kernel frees it however the builder ends."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"{environment_name}: another run is building it, waiting for that")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(folder: Path, environment_name: str, environment: Environment, say: OnLine) -> BuiltEnvironment:
    _check_disk(folder.parent, environment_name, environment)
    interpreter = find_python(environment.python)
    for leftover in folder.parent.glob(f".building-{folder.name}-*"):
        # of a builder that was killed: nobody else can be building while the lock is ours
        shutil.rmtree(leftover, ignore_errors=True)
    if folder.exists():
        say(f"{environment_name}: the virtualenv was changed or is damaged, building it anew")
        shutil.rmtree(folder)
    log = folder.parent / f"{folder.name}.log"
    log.unlink(missing_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".building-{folder.name}-", dir=folder.parent))
    started = time.monotonic()
    try:
        built = _install(building, environment_name, environment, interpreter=interpreter, log=log, say=say)
        _rewrite_paths(building, folder)
        write_model(building / _MARKER, built)
        building.chmod(0o755)
        building.rename(folder)
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
    bare = [*pip, "-c", str(constraint), "--no-deps", *wanted.without_dependencies]
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
    """From the environment's own index where it answers, else from the user's."""
    torch = requirements_of(environment).torch
    if environment.index:
        if index_answers(environment.index):
            try:
                _run([*pip, "--extra-index-url", environment.index, torch], name, f"installing {torch}", log)
            except EnvironmentBuildError:
                say(f"{name}: {environment.index} answers but does not deliver, taking your own pip index")
            else:
                return
        else:
            say(f"{name}: {environment.index} does not answer, taking your own pip index")
    _run([*pip, torch], name, f"installing {torch}", log)


def index_answers(index: str, patience: float = _INDEX_PATIENCE_SECONDS) -> bool:
    """Whether a pip index can be reached quickly; any trouble is a no."""
    if not index.startswith(("https://", "http://")):
        return index.startswith("file://")
    try:
        request = urllib.request.Request(index.rstrip("/") + "/torch/", method="HEAD")  # noqa: S310 - http(s), see above
        with urllib.request.urlopen(request, timeout=patience):  # noqa: S310
            return True
    except (OSError, ValueError):
        return False


def _check_versions(name: str, environment: Environment, facts: dict[str, object], log: Path) -> None:
    """Torch is the one asked for, from the CUDA asked for, and every pin holds."""
    found_torch, found_cuda, versions = str(facts["torch"]), facts["cuda"], facts["versions"]
    assert isinstance(versions, dict)
    if found_torch.split("+", maxsplit=1)[0] != environment.torch:
        raise EnvironmentBuildError(
            f"{name}: asked for torch {environment.torch}, but {found_torch} is installed",
            hint=f"a pin in matrix.yaml pulls in another torch; see {log}",
        )
    if environment.build != "cpu":
        # cu128 -> 12.8
        wanted_cuda = f"{environment.build[2:-1]}.{environment.build[-1]}"
        if found_cuda != wanted_cuda:
            raise EnvironmentBuildError(
                f"{name}: asked for the {environment.build} build of torch {environment.torch}, "
                f"the index gave one for CUDA {found_cuda or 'none (a CPU build)'}",
                hint="set the environment's `index` in matrix.yaml to the wheel index of that CUDA release",
            )
    installed = {normalise(package): str(version) for package, version in versions.items()}
    pins = {**environment.pins, "toto-ts": environment.toto_ts}
    if environment.xformers:
        pins["xformers"] = environment.xformers
    for package, version in pins.items():
        found = installed.get(normalise(package), "nothing")
        if found.split("+")[0] != version.split("+")[0]:
            raise EnvironmentBuildError(
                f"{name}: asked for {package} {version}, but {found} is installed", hint=f"see {log}"
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
    """Bytes a virtualenv of this environment takes while it is built; CUDA wheels carry their own CUDA."""
    return (2 if environment.build == "cpu" else 8) * _GIGABYTE


def download_size(environment: Environment) -> int:
    """Bytes pip fetches for it, about."""
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
        file.write(f"$ {' '.join(command[:1] + [part for part in command[1:] if len(part) < 200])}\n")
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
    """Scripts in bin/ name the folder they were installed in; make that the final one."""
    old, new = str(building).encode(), str(final).encode()
    for path in (building / "bin").iterdir():
        if path.is_file() and not path.is_symlink():
            content = path.read_bytes()
            if old in content:
                path.write_bytes(content.replace(old, new))


# --- the runtime ----------------------------------------------------------------------------------------------------


class VenvRuntime:
    """Runs cells as processes of an environment's virtualenv, on this machine."""

    name = "venv"

    def __init__(self, source: Path, source_hash: str, command: tuple[str, ...] = CELL_COMMAND) -> None:
        self._source, self._source_hash = source, source_hash
        self._command = command
        self._processes = CellProcesses()

    def lock_of(self, environment_name: str, environment: Environment) -> str | None:
        built = read_built(venv_folder(environment_name, environment))
        return built.lock if built else None

    def obstacle(self, environment_name: str, environment: Environment) -> str:  # noqa: ARG002 - the protocol's
        try:
            find_python(environment.python)
        except EnvironmentBuildError as error:
            return str(error)
        return ""

    def prepare(self, environment_name: str, environment: Environment, say: OnLine) -> PreparedEnvironment:
        return build_venv(environment_name, environment, say)

    def run_cell(
        self,
        prepared: PreparedEnvironment,
        request: CellRequest,
        folder: Path,
        on_line: OnLine,
        *,
        gpu: str | None = None,
    ) -> CellResult:
        request = request.model_copy(update={"work_folder": str(folder / "work")})
        for name in ("work", "home", "tmp"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        write_model(folder / REQUEST_FILE, request)
        started = utc_now()
        end = self._processes.run(
            [prepared.python, *self._command, str(folder / REQUEST_FILE), str(folder / RESULT_FILE)],
            env=cell_environment(prepared, request, folder, self._source, gpu)
            | {
                LOCK_VARIABLE: prepared.lock,
                RUNTIME_VARIABLE: self.name,
                SOURCE_HASH_VARIABLE: self._source_hash,
            },
            folder=folder,
            timeout=request.profile.timeout_minutes * 60,
            memory=bytes_of(request.limits.memory),
            on_line=on_line,
        )
        known = Provenance(
            torch=prepared.environment.torch,
            lock=prepared.lock,
            runtime=self.name,
            source_hash=self._source_hash,
            started=started,
            finished=utc_now(),
        )
        return collect_result(request, folder, end, known)

    def stop(self) -> None:
        self._processes.stop()


def cell_environment(
    prepared: PreparedEnvironment, request: CellRequest, folder: Path, source: Path, gpu: str | None
) -> dict[str, str]:
    """The whole environment of a cell: nothing of the user's shell but where programs and libraries are."""
    threads = str(request.limits.threads)
    env = {
        "PATH": os.pathsep.join([str(Path(prepared.python).parent), os.environ.get("PATH", os.defpath)]),
        "HOME": str(folder / "home"),
        "USER": "toto-compat",  # inductor names a folder after the user, who may have no name in a container
        "LANG": "C.UTF-8",
        "CXX": find_compiler(),
        "PYTHONPATH": str(source),
        "PYTHONNOUSERSITE": "1",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "TORCHINDUCTOR_COMPILE_THREADS": str(request.limits.cpus),
        # an empty list hides the GPU from a CUDA build that is asked to run on the CPU
        "CUDA_VISIBLE_DEVICES": "",
    }
    temporary = str(folder / "tmp")
    if len(temporary) < _LONGEST_TMPDIR:
        env["TMPDIR"] = temporary
    if request.device is Device.CUDA:
        visible = gpu if gpu is not None else os.environ.get("CUDA_VISIBLE_DEVICES")
        env.pop("CUDA_VISIBLE_DEVICES")
        env |= {"CUDA_VISIBLE_DEVICES": visible} if visible is not None else {}
        env |= {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "CUDA_HOME") if name in os.environ}
    return env
