"""Asks an environment before its first cell if it can do what cells rely on: the host's side of probe.py.

Every problem found here is one of the environment or the machine, never evidence against a cache.
"""

import hashlib
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field, ValidationError

from toto_compat.contract.machine_faults import what_the_machine_lacks
from toto_compat.contract.request import Device, Environment, Limits
from toto_compat.contract.strict_model import StrictModel
from toto_compat.errors import EnvironmentBuildError
from toto_compat.evidence.files import cache_folder, write_model
from toto_compat.evidence.left_file import read_left_file
from toto_compat.evidence.makers import made_by_this_process
from toto_compat.runtimes.cell_process import ProcessEnd
from toto_compat.runtimes.gpu import check_kernels
from toto_compat.runtimes.nvidia_smi import find_gpus

PROBE_SECONDS = 600.0  # on a loaded machine a first compile takes minutes
_LARGEST_ANSWER = 1_000_000

_Model = TypeVar("_Model", bound=StrictModel)


class Answer(StrictModel):
    """Holds what each check of the probe gave, by its name."""

    ok: dict[str, Any] = Field(default={})
    failed: dict[str, str] = Field(default={})


class Probed(StrictModel):
    """Holds what a probe learnt. It counts until environment, limits, GPUs or this boot of the machine change."""

    answer: Answer
    copied: bool = False  # the engine does not see this machine's files: they are copied in and out


def probed_once(record: Path, probe: Callable[[], Probed]) -> Probed:
    """Return the recorded answer of an earlier probe of the very same thing, else probe and record."""
    probed = _read(record, Probed)
    if probed is None:
        probed = probe()
        write_model(record, probed)
    return probed


def probe_record(environment_facts: Iterable[str], device: Device, limits: Limits) -> Path:
    """Name the file of a probe's answer by everything that could change it."""
    facts = [*environment_facts, device.value, limits.model_dump_json(), _boot()]
    # not how much of their memory is in use, which changes from one minute to the next
    facts += [f"{gpu.uuid} {gpu.name} {gpu.driver}" for gpu in find_gpus()] if device is Device.CUDA else []
    return cache_folder() / "probes" / f"{hashlib.sha256(chr(0).join(facts).encode()).hexdigest()[:24]}.json"


def read_answer(path: Path) -> Answer | None:
    """Read what a probe left; None if that is no answer."""
    return _read(path, Answer)


def _read(path: Path, model: type[_Model]) -> _Model | None:
    try:
        return model.model_validate_json(read_left_file(path, _LARGEST_ANSWER))
    except (OSError, ValidationError):
        return None


def _boot() -> str:
    """Name this boot of the machine: drivers are updated across one."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


@contextmanager
def scratch_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix=f"p{made_by_this_process()}", dir=cache_folder()) as folder:
        yield Path(folder)


# --- what an answer means ---------------------------------------------------------------------------------------------

_REBUILD = {
    "docker": "`toto-compat images build --rebuild` builds it anew",
    "venv": "`toto-compat prune --all` removes it, and the next run builds it anew",
    "here": "it is your own: `pip install` what is missing, or take --runtime venv",
}
# What to do when a check fails, by words in its error.
_ADVICE = {
    "docker": (
        ("failed to map segment", "the temporary folder is not executable: the engine forbids `exec` on tmpfs"),
        ("No space left", "the temporary folder is too small: raise limits.tmp in matrix.yaml"),
        ("Cannot allocate memory", "raise limits.memory in matrix.yaml"),
        ("can't start new thread", "raise limits.pids in matrix.yaml"),
        ("Resource temporarily unavailable", "raise limits.pids in matrix.yaml"),
        ("shared memory", "raise limits.shm in matrix.yaml"),
        ("InvalidCxxCompiler", "the image has no C++ compiler: rebuild it with `toto-compat images build --rebuild`"),
    ),
    "venv": (
        ("failed to map segment", "the cache folder's disk is mounted noexec: set TOTO_COMPAT_CACHE to another one"),
        ("No space left", "free space, or set TOTO_COMPAT_CACHE to a folder on another disk"),
        ("Cannot allocate memory", "the machine is out of memory: end other programs"),
        ("can't start new thread", "the machine has too many processes: end other programs, or raise `ulimit -u`"),
        ("Python.h", "install the headers of the environment's Python: `apt-get install python3-dev`"),
        ("CxxCompiler", "no C++ compiler that works: `apt-get install g++`, or set CXX to one"),
        ("CppCompileError", "the C++ compiler fails: `apt-get install g++`, or set CXX to another one"),
    ),
}


def check_answer(name: str, environment: Environment, device: Device, answer: Answer, *, runtime: str) -> None:
    """Raise an error of the environment, with what to change, unless everything the cells rely on held."""
    torch = answer.ok.get("torch")
    if torch is not None:
        if str(torch["version"]).partition("+")[0] != environment.torch:
            raise EnvironmentBuildError(f"{name}: its torch is {torch['version']}", hint=_REBUILD[runtime])
        if device is Device.CUDA:
            _check_gpu_seen(name, torch)
    for check, error in answer.failed.items():
        known = _ADVICE.get(runtime, _ADVICE["venv"])
        advice = next((advice for words, advice in known if words in error), what_the_machine_lacks(error))
        raise EnvironmentBuildError(
            f"{name}: the check {check.replace('_', ' ')!r} fails: {error}",
            hint=advice or f"`toto-compat shell {name} --runtime {runtime}` opens the same environment",
        )


def _check_gpu_seen(name: str, torch: dict[str, Any]) -> None:
    if not torch["cuda_available"]:
        raise EnvironmentBuildError(
            f"{name}: torch sees no GPU although there is one",
            hint="the driver may be too old for this CUDA, or machine or engine need a restart after a driver update",
        )
    for gpu in torch["gpus"] if torch["architectures"] else ():
        check_kernels(name, gpu["name"], gpu["architecture"], torch["architectures"])


def blame_probe(name: str, end: ProcessEnd, limits: Limits, *, runtime: str) -> EnvironmentBuildError:
    """Say why a probe came to no answer."""
    if end.over_memory:
        return EnvironmentBuildError(
            f"{name}: its probe ran out of memory at {limits.memory}", hint="raise limits.memory in matrix.yaml"
        )
    if end.timed_out:
        return EnvironmentBuildError(
            f"{name}: its probe did not finish within {PROBE_SECONDS / 60:.0f} minutes",
            hint="the machine is overloaded, or raise limits.cpus in matrix.yaml",
        )
    if end.stopped:
        return EnvironmentBuildError(f"{name}: the run was stopped before its probe had ended")
    lines = "\n    ".join(end.last_lines[-6:])
    mounts_nothing = "; TOTO_COMPAT_DOCKER_FILES=copy mounts nothing" if runtime == "docker" else ""
    return EnvironmentBuildError(
        f"{name}: its probe ended with exit code {end.code} and no answer:\n    {lines}",
        hint=f"`toto-compat shell {name} --runtime {runtime}` opens the same environment{mounts_nothing}",
    )
