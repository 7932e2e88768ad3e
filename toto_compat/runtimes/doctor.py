"""`toto-compat doctor`: what this machine can run, and the command that would get each missing part."""

import json
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

import click

from toto_compat.contract.request import Device
from toto_compat.environments.engine import check_hands_out_gpus, connect, engine_endpoint, engine_facts
from toto_compat.environments.pythons import compiler_version, find_compiler, find_python, how_to_get_python
from toto_compat.environments.virtualenv import disk_needed, read_built, venv_folder
from toto_compat.errors import EngineError, EnvironmentBuildError
from toto_compat.evidence.files import cache_folder
from toto_compat.matrix.load import find_matrix_file, load_matrix, matrix_option
from toto_compat.matrix.schema import Matrix
from toto_compat.runtimes.gpu import check_can_run, check_free, gpu_notes
from toto_compat.runtimes.machine import core_count, cpu_model
from toto_compat.runtimes.nvidia_smi import VISIBLE, Gpu, all_gpus, find_gpus, gpus_left_out, why_none

_TIMEOUT_SECONDS = 3


class State(StrEnum):
    OK = "ok"
    MISSING = "missing"
    OPTIONAL = "optional"  # missing, but only some commands need it


@dataclass(frozen=True)
class Finding:
    """One part of the machine; `fix` is a command or a sentence, empty where nothing is to be done."""

    part: str
    state: State
    found: str
    fix: str = ""


def examine(matrix: Matrix | None) -> Iterator[Finding]:
    yield Finding("processor", State.OK, f"{cpu_model()}, {core_count()} cores")
    engine = examine_docker()
    yield examine_compiler()
    yield from examine_environments(matrix, in_containers=engine.state is State.OK)
    yield examine_disk(matrix)
    yield from examine_gpu(matrix)
    yield engine
    yield examine_slurm()
    yield examine_chromium()


def examine_compiler() -> Finding:
    try:
        compiler = find_compiler()
    except EnvironmentBuildError as error:
        return Finding("C++ compiler", State.MISSING, error.message, error.hint)
    return Finding("C++ compiler", State.OK, f"{compiler_version(compiler)} ({compiler})")


def examine_environments(matrix: Matrix | None, *, in_containers: bool) -> Iterator[Finding]:
    """Look for each environment's Python; builds nothing. A container brings its own."""
    if matrix is None:
        yield Finding("environments", State.OPTIONAL, "no matrix.yaml here", "run it in the project's folder")
        return
    pythons: dict[str, Finding] = {}
    for name, environment in matrix.environments.items():
        minor = environment.python
        if minor not in pythons:
            pythons[minor] = examine_python(minor)
        python = pythons[minor]
        built = read_built(venv_folder(name, environment))
        there = f"built, torch {built.torch}" if built else f"not built yet, {python.found}"
        state = State.OK if built else python.state
        if state is State.MISSING and in_containers:
            state, there = State.OPTIONAL, f"runs in a container; for a virtualenv or a new lock: {python.found}"
        yield Finding(name, state, there, "" if built else python.fix)


def examine_python(minor: str) -> Finding:
    try:
        python = find_python(minor)
    except EnvironmentBuildError as error:
        return Finding(f"Python {minor}", State.MISSING, error.message, error.hint or how_to_get_python(minor))
    return Finding(f"Python {minor}", State.OK, f"Python {python.version} at {python.executable}")


def examine_disk(matrix: Matrix | None) -> Finding:
    cache = cache_folder()
    free = shutil.disk_usage(cache).free
    shown = f"{free / 10**9:.0f} GB free in {cache}"
    environments = matrix.environments.values() if matrix else []
    largest = max((disk_needed(environment) for environment in environments), default=2 * 10**9)
    if free < largest:
        fix = "`toto-compat prune`, or set TOTO_COMPAT_CACHE to a folder on another disk"
        return Finding("disk", State.MISSING, f"{shown}; an environment takes up to {largest / 10**9:.0f} GB", fix)
    return Finding("disk", State.OK, shown)


def examine_gpu(matrix: Matrix | None) -> Iterator[Finding]:
    """Look at the GPUs, what uses them, and which environments the driver and the cards can run."""
    try:
        gpus, others = find_gpus(), gpus_left_out()
        notes = list(gpu_notes()) if gpus else []
    except EnvironmentBuildError as error:
        yield Finding("GPU", State.MISSING, error.message, error.hint)
        return
    if not gpus:
        found, _, what_to_do = why_none().partition("; ")
        fix = "CUDA rows need a machine with an NVIDIA GPU and its driver (`apt-get install nvidia-driver`)"
        fix = what_to_do or fix
        if all_gpus():
            fix = f"unset {VISIBLE}, or set it to the UUID of one (`nvidia-smi -L` lists them)"
        elif shutil.which("nvidia-smi") and not what_to_do:
            fix = "`nvidia-smi -L` lists them; after a driver update a restart is needed"
        yield Finding("GPU", State.OPTIONAL, f"none: {found}", fix)
        return
    for gpu in (*gpus, *others):
        shown = f"{gpu.name} ({gpu.architecture or 'architecture unknown'}), driver {gpu.driver}, {gpu.uuid}"
        yield Finding(f"GPU {gpu.index}", State.OK, shown)
    for note in notes:
        found, _, fix = note.partition("; ")
        yield Finding("GPU", State.OPTIONAL, found, fix)
    yield examine_free_memory(gpus)
    yield from examine_runnable(matrix, gpus)
    yield examine_container_gpus()


def examine_free_memory(gpus: Sequence[Gpu]) -> Finding:
    try:
        for gpu in gpus:
            check_free("a cell", gpu)
    except EnvironmentBuildError as error:
        return Finding("GPU memory", State.MISSING, error.message, error.hint)
    free = min((gpu.memory_mb - gpu.used_mb for gpu in gpus if gpu.memory_mb), default=None)
    told = "nvidia-smi does not say how much is free" if free is None else f"{free} MB free"
    return Finding("GPU memory", State.OK, told)


def examine_runnable(matrix: Matrix | None, gpus: Sequence[Gpu]) -> Iterator[Finding]:
    """Say of each CUDA environment whether this driver and these cards can run it."""
    for name, environment in matrix.environments.items() if matrix else ():
        if environment.device is not Device.CUDA:
            continue
        try:
            check_can_run(name, environment, gpus)
        except EnvironmentBuildError as error:
            yield Finding(f"{name} on the GPU", State.OPTIONAL, error.message.removeprefix(f"{name}: "), error.hint)
        else:
            yield Finding(f"{name} on the GPU", State.OK, "driver and card can run it")


def examine_container_gpus() -> Finding:
    """Say whether the engine hands out GPUs, as far as it tells without being asked for one."""
    part = "GPU in containers"
    try:
        with connect(timeout=_TIMEOUT_SECONDS) as client:
            facts = engine_facts(client)
    except EngineError as error:
        return Finding(part, State.OPTIONAL, error.message, "virtualenvs use the GPU without an engine")
    try:
        check_hands_out_gpus(part, facts)
    except EnvironmentBuildError as error:
        return Finding(part, State.OPTIONAL, error.message.removeprefix(f"{part}: "), error.hint)
    how = "by CDI" if facts.uses_cdi else "by NVIDIA's runtime" if "nvidia" in facts.runtimes else "by NVIDIA's hook"
    return Finding(part, State.OK, f"the engine hands them out {how}")


def examine_docker() -> Finding:
    """Ask the engine itself, where the runs will look for it: a `docker` program without one behind it is no use."""
    try:
        with connect(timeout=_TIMEOUT_SECONDS) as client:
            version = client.version()["Version"]
    except EngineError as error:
        return Finding("Docker engine", State.OPTIONAL, error.message, error.hint)
    return Finding("Docker engine", State.OK, f"version {version} at {engine_endpoint()[0]}")


def examine_slurm() -> Finding:
    if not shutil.which("sbatch"):
        only_for = "only for `nox -s matrix -- --executor slurm`, on a machine that submits to a cluster"
        return Finding("Slurm", State.OPTIONAL, "no sbatch", only_for)
    try:
        done = subprocess.run(["sinfo", "--version"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return Finding("Slurm", State.OPTIONAL, "sbatch is here, sinfo does not answer", "`sinfo` says why")
    return Finding("Slurm", State.OK, done.stdout.strip() or "answers")


def examine_chromium() -> Finding:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if browser := shutil.which(name):
            return Finding("Chromium", State.OK, browser)
    only_for = "only for the browser tests and the picture of `nox -s reference`: `apt-get install chromium`"
    return Finding("Chromium", State.OPTIONAL, "none", only_for)


def what_it_can_run(findings: list[Finding]) -> str:
    """Sum the findings up in one sentence."""
    broken = [finding.part for finding in findings if finding.state is State.MISSING]
    on_gpus = [finding for finding in findings if finding.part.endswith(" on the GPU")]
    runnable = [finding for finding in on_gpus if finding.state is State.OK]
    where = (
        "in containers"
        if any(f.part == "Docker engine" and f.state is State.OK for f in findings)
        else "in virtualenvs"
    )
    if any(part in ("C++ compiler", "disk") for part in broken):
        return f"no cell can be run before this is fixed: {', '.join(broken)}"
    if any(part in ("GPU", "GPU memory") for part in broken):
        return "`nox -s matrix` needs the GPU put right first; `nox -s matrix -- --device cpu` can run here"
    if on_gpus and not runnable:
        return f"no CUDA environment runs on this GPU; `nox -s matrix -- --device cpu` can run here {where}"
    what = f"`nox -s matrix` can run here {where}, on {Device.CUDA if runnable else Device.CPU}"
    if runnable and where == "in containers" and not _containers_get_gpus(findings):
        what = "`nox -s matrix -- --runtime venv` can run here on cuda; containers get no GPU"
    return what + (f"; not {', '.join(broken)}" if broken else "")


def _containers_get_gpus(findings: list[Finding]) -> bool:
    return any(finding.part == "GPU in containers" and finding.state is State.OK for finding in findings)


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@matrix_option
def doctor_command(as_json: bool, matrix_file: Path | None) -> None:
    """Say what this machine can run, with the command for each missing part."""
    matrix = None
    if matrix_file is not None or Path("matrix.yaml").exists():
        matrix = load_matrix(find_matrix_file(matrix_file))
    findings = list(examine(matrix))
    closing = what_it_can_run(findings)
    if as_json:
        click.echo(json.dumps({"findings": [asdict(finding) for finding in findings], "summary": closing}, indent=2))
        return
    width = max(len(finding.part) for finding in findings)
    marks = {State.OK: "ok", State.MISSING: "NO", State.OPTIONAL: "--"}
    for finding in findings:
        click.echo(f"{marks[finding.state]}  {finding.part:<{width}}  {finding.found}")
        if finding.fix and finding.state is not State.OK:
            click.echo(f"    {'':<{width}}  -> {finding.fix}")
    click.echo(closing)
