"""Runs cells in an environment's container: no network, no root, nothing writable but the cell's own folder."""

import hashlib
import json
import os
import secrets
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker

from toto_compat.errors import EngineError, EnvironmentBuildError
from toto_compat.evidence.provenance import (
    IMAGE_VARIABLE,
    LOCK_VARIABLE,
    RUNTIME_VARIABLE,
    SOURCE_HASH_VARIABLE,
)
from toto_compat.evidence.schema import CellRequest, CellResult, Failure, Outcome, Provenance, SuiteEvidence
from toto_compat.evidence.store import utc_now, write_atomically, write_model
from toto_compat.matrix.schema import Device, Environment, Limits
from toto_compat.runtimes import probe
from toto_compat.runtimes.cell_process import (
    CELL_COMMAND,
    INSIDE,
    LOG_FILE,
    REQUEST_FILE,
    RESULT_FILE,
    ProcessEnd,
    collect_result,
    read_left_file,
)
from toto_compat.runtimes.docker_image import ensure_image, plan_image
from toto_compat.runtimes.docker_run import (
    CELL_FOLDER,
    INPUT_FOLDER,
    PYTHON,
    ContainerEnd,
    ContainerJob,
    Containers,
    invoking_identity,
    remove_leftovers,
)
from toto_compat.runtimes.engine import (
    EngineFacts,
    check_gpu,
    engine_errors,
    engine_facts,
    is_local,
    local_image,
    open_client,
    wheel_runs_on,
)
from toto_compat.runtimes.locks import read_lock
from toto_compat.runtimes.machine import find_gpus
from toto_compat.runtimes.probe import ANSWER_FILE, NONCE_FILE
from toto_compat.runtimes.seam import OnLine, PreparedEnvironment
from toto_compat.runtimes.source import cache_folder

_PROBE_INSIDE = f"{INPUT_FOLDER}/probe/probe.py"
_PROBE_SECONDS = 600.0  # on a loaded machine a first compile takes minutes
_LARGEST_ANSWER = 1_000_000


@dataclass(frozen=True)
class Probed:
    """What the probe found out about an environment's containers."""

    copy: bool  # the engine does not see this machine's files
    answer: dict[str, Any]


class DockerRuntime:
    """Cells in containers, through the Docker SDK. Safe to use from several threads."""

    name = "docker"

    def __init__(
        self,
        source: Path,
        source_hash: str,
        command: tuple[str, ...] = CELL_COMMAND,
        *,
        limits: Limits | None = None,
        device: Device = Device.CPU,
        rebuild: bool = False,
    ) -> None:
        self._source, self._source_hash, self._command = source, source_hash, command
        self._limits, self._device, self._rebuild = limits or Limits(), device, rebuild
        self._client = open_client()
        self._facts = engine_facts(self._client)
        self._containers = Containers(self._client)
        self._cpus = CpuShares(self._facts, local=is_local(self._client))
        self._guard = threading.Lock()
        self._probed: dict[str, Probed] = {}
        self._images: dict[str, str] = {}
        remove_leftovers(self._client)

    @property
    def client(self) -> docker.DockerClient:
        return self._client

    def lock_of(self, environment_name: str, environment: Environment) -> str | None:
        try:
            with engine_errors():
                plan = plan_image(self._client, environment_name, environment)
                built = plan is not None and local_image(self._client, plan.tag) is not None
        except EnvironmentBuildError:
            return None
        return plan.identity if plan is not None and built and not self._rebuild else None

    def obstacle(self, environment_name: str, environment: Environment) -> str:
        try:
            read_lock(environment_name, environment)
        except EnvironmentBuildError as error:
            return str(error)
        return ""

    def prepare(self, environment_name: str, environment: Environment, say: OnLine) -> PreparedEnvironment:
        """Image and probe: an environment that comes out of here can run cells."""
        device = Device.CPU if environment.device is Device.CPU else self._device
        check_gpu(environment_name, environment, device, self._facts, find_gpus(), local=is_local(self._client))
        with engine_errors():
            plan, image = ensure_image(self._client, environment_name, environment, say, rebuild=self._rebuild)
        with self._guard:
            self._images[plan.identity] = str(image.id)
            probed = self._probed.get(plan.identity)
        if probed is None:
            record = self._probe_record(str(image.id), device)
            probed = read_probed(record)
            if probed is None:
                probed = self.probe(environment_name, environment, str(image.id), device, say)
                write_atomically(record, json.dumps({"copy": probed.copy, "answer": probed.answer}))
            with self._guard:
                self._probed[plan.identity] = probed
        return PreparedEnvironment(
            name=environment_name, environment=environment, runtime=self.name, python=PYTHON, lock=plan.identity
        )

    def probe(self, name: str, environment: Environment, image: str, device: Device, say: OnLine) -> Probed:
        """A container with exactly a cell's hardening: does it see our files, compile a kernel, use the GPU?"""
        wanted = os.environ.get("TOTO_COMPAT_DOCKER_FILES", "auto")
        attempts = {"copy": (True,), "bind": (False,)}.get(wanted, (False, True))
        gpu = first_gpu() if device is Device.CUDA else None
        answer: dict[str, Any] = {}
        for copy in attempts:
            with scratch_folder() as folder:
                inside = folder / INSIDE
                inside.mkdir()
                nonce = secrets.token_hex(16)
                (inside / NONCE_FILE).write_text(nonce)
                job = ContainerJob(
                    image=image,
                    command=(PYTHON, "-I", _PROBE_INSIDE, ANSWER_FILE),
                    inputs={Path(probe.__file__).resolve(): _PROBE_INSIDE},
                    folder=inside,
                    log=folder / LOG_FILE,
                    source=self._source,
                    environment={"TORCHINDUCTOR_CACHE_DIR": f"{CELL_FOLDER}/inductor"},
                    limits=self._limits,
                    cpuset=self._cpus.some(self._limits.cpus),
                    gpu=gpu,
                    cdi=self._facts.uses_cdi,
                    labels={"toto-compat.environment": name},
                    timeout=_PROBE_SECONDS,
                    copy=copy,
                )
                try:
                    end = self._containers.run(job, lambda _: None)
                except EnvironmentBuildError as error:
                    if not copy and len(attempts) > 1 and "bind source path does not exist" in error.message:
                        continue
                    raise EnvironmentBuildError(f"{name}: {error.message}", hint=error.hint) from error
                answer = read_answer(inside / ANSWER_FILE)
            if answer.get("ok", {}).get("nonce") == nonce:
                check_answer(name, environment, device, answer)
                if copy:
                    say(f"{name}: the engine does not see this machine's files, copying them in and out")
                return Probed(copy, answer)
            if end.lost:
                raise EngineError(end.lost, hint="start the engine again and run the same command")
            if end.out_of_memory or end.process.timed_out:
                break
        raise blame_probe(name, end, self._limits)

    def _probe_record(self, image: str, device: Device) -> Path:
        """Where a probe's answer is kept until image, engine, limits, user, driver or boot change."""
        facts = [image, self._facts.identity, self._facts.version, device.value, self._limits.model_dump_json()]
        facts += [str(gpu) for gpu in find_gpus()] if device is Device.CUDA else []
        facts += [invoking_identity().user, os.environ.get("TOTO_COMPAT_DOCKER_FILES", ""), _boot()]
        return cache_folder() / "probes" / f"{hashlib.sha256(chr(0).join(facts).encode()).hexdigest()[:24]}.json"

    def run_cell(
        self,
        prepared: PreparedEnvironment,
        request: CellRequest,
        folder: Path,
        on_line: OnLine,
        *,
        gpu: str | None = None,
    ) -> CellResult:
        started = utc_now()
        image = self._images[prepared.lock]
        copy = self._probed[prepared.lock].copy
        seen, inputs = as_seen_inside(request, copy=copy)
        # the log and the lock of `folder` stay out of the cell's reach: this process opens them by name
        inside = folder / INSIDE
        (inside / "work").mkdir(parents=True, exist_ok=True)
        write_model(inside / REQUEST_FILE, seen)
        on_gpu = request.device is Device.CUDA
        with self._cpus.taken(request.limits.cpus) as cpuset:
            job = ContainerJob(
                image=image,
                command=(PYTHON, *self._command, f"{CELL_FOLDER}/{REQUEST_FILE}", f"{CELL_FOLDER}/{RESULT_FILE}"),
                folder=inside,
                log=folder / LOG_FILE,
                source=self._source,
                inputs=inputs,
                environment={
                    LOCK_VARIABLE: prepared.lock,
                    IMAGE_VARIABLE: image,
                    RUNTIME_VARIABLE: self.name,
                    SOURCE_HASH_VARIABLE: self._source_hash,
                },
                limits=request.limits,
                cpuset=cpuset,
                gpu=(gpu or first_gpu()) if on_gpu else None,
                cdi=self._facts.uses_cdi,
                labels={"toto-compat.environment": prepared.name, "toto-compat.cell": request.cell},
                timeout=request.profile.timeout_minutes * 60,
                copy=copy,
            )
            try:
                end = self._containers.run(job, on_line)
            except (EngineError, EnvironmentBuildError) as error:
                # a container that the engine refuses: this cell's trouble, the others may go on
                end = ContainerEnd(ProcessEnd(code=-1), lost=str(error))
        known = Provenance(
            torch=prepared.environment.torch,
            lock=prepared.lock,
            image=image,
            runtime=self.name,
            source_hash=self._source_hash,
            started=started,
            finished=utc_now(),
        )
        return judge_end(collect_result(request, inside, end.process, known), end, request)

    def stop(self) -> None:
        self._containers.stop()


# --- how a cell's container ended -------------------------------------------------------------------------------------


def judge_end(result: CellResult, end: ContainerEnd, request: CellRequest) -> CellResult:
    """What only the engine knows: that it went away itself, or that the kernel killed some process for memory."""
    if end.lost:
        failure = Failure(kind="environment", message=end.lost, last_lines=end.process.last_lines)
        return result.model_copy(update={"failure": failure})
    if not end.out_of_memory:
        return result

    def out_of_memory(failure: Failure | None, last_lines: tuple[str, ...]) -> Failure:
        then = f" (then: {failure.message})" if failure else ""
        message = f"a process was killed at {request.limits.memory}: raise limits.memory in matrix.yaml{then}"
        return Failure(kind="out_of_memory", message=message, last_lines=last_lines)

    def without_blame(evidence: SuiteEvidence) -> SuiteEvidence:
        """A forecast that raised may only have missed the process that was killed: no evidence against the cache."""
        if evidence.outcome is not Outcome.MODEL_FAILED:
            return evidence
        failure = out_of_memory(evidence.failure, evidence.failure.last_lines if evidence.failure else ())
        return evidence.model_copy(update={"outcome": Outcome.ERROR, "failure": failure})

    changes: dict[str, Any] = {"evidence": {suite: without_blame(one) for suite, one in result.evidence.items()}}
    failures = [result.failure, *(evidence.failure for evidence in result.evidence.values())]
    if not any(failure is not None and failure.kind in ("out_of_memory", "interrupted") for failure in failures):
        # the cell may have gone on as if nothing had happened, or have waited for a dead compile worker
        changes["failure"] = out_of_memory(result.failure, end.process.last_lines)
    return result.model_copy(update=changes)


def as_seen_inside(request: CellRequest, *, copy: bool) -> tuple[CellRequest, dict[Path, str]]:
    """The request with paths as the container sees them, and what must be mounted there."""
    inputs: dict[Path, str] = {}

    def mounted(path: Path) -> str:
        return inputs.setdefault(path, f"{INPUT_FOLDER}/{len(inputs)}/{path.name}")

    changes: dict[str, Any] = {"work_folder": f"{CELL_FOLDER}/work"}
    if request.cache.source != "builtin":
        file, _, class_name = request.cache.source.rpartition(":")
        changes["cache"] = request.cache.model_copy(update={"source": f"{mounted(Path(file))}:{class_name}"})
    if request.csv is not None:
        changes["csv"] = request.csv.model_copy(update={"path": mounted(Path(request.csv.path))})
    if request.checkpoint_folder is not None:
        # file by file: in a hub's folder each is a link to a file elsewhere in the hub's cache
        changes["checkpoint_folder"] = f"{INPUT_FOLDER}/checkpoint"
        for path in sorted(Path(request.checkpoint_folder).iterdir()):
            if path.is_file():
                inputs[path] = f"{INPUT_FOLDER}/checkpoint/{path.name}"
    if request.quiet_lock is not None:
        changes["quiet_lock"] = None if copy else f"{INPUT_FOLDER}/quiet/lock"
        if not copy:
            # two files, see suites/quiet.py; a lock is no less a lock for being opened read-only
            for suffix in ("", ".turnstile"):
                path = Path(request.quiet_lock + suffix)
                path.touch(mode=0o644)
                inputs[path] = f"{INPUT_FOLDER}/quiet/lock{suffix}"
    return request.model_copy(update=changes), inputs


# --- the probe's answer -----------------------------------------------------------------------------------------------


def read_answer(path: Path) -> dict[str, Any]:
    try:
        answer = json.loads(read_left_file(path, _LARGEST_ANSWER))
    except (OSError, ValueError):
        return {}
    return answer if isinstance(answer, dict) else {}


def read_probed(record: Path) -> Probed | None:
    """An earlier probe of the very same thing; a damaged record is none."""
    found = read_answer(record)
    copy, answer = found.get("copy"), found.get("answer")
    return Probed(copy, answer) if isinstance(copy, bool) and isinstance(answer, dict) else None


def _boot() -> str:
    """Names this boot of the machine: drivers are updated across one."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def blame_probe(name: str, end: ContainerEnd, limits: Limits) -> EnvironmentBuildError:
    """The probe container came to no answer."""
    if end.out_of_memory:
        return EnvironmentBuildError(
            f"{name}: the probe container ran out of memory at {limits.memory}",
            hint="raise limits.memory in matrix.yaml",
        )
    if end.process.timed_out:
        return EnvironmentBuildError(
            f"{name}: the probe container did not finish within {_PROBE_SECONDS / 60:.0f} minutes",
            hint="the machine is overloaded, or raise limits.cpus in matrix.yaml",
        )
    lines = "\n    ".join(end.process.last_lines[-6:])
    return EnvironmentBuildError(
        f"{name}: the probe container ended with exit code {end.process.code} and no answer:\n    {lines}",
        hint="`toto-compat shell` opens the same container; TOTO_COMPAT_DOCKER_FILES=copy mounts nothing",
    )


# Which option to relax when a check of the probe fails, by words in its error.
_RELAX = (
    ("failed to map segment", "the temporary folder is not executable: the engine forbids `exec` on tmpfs"),
    ("No space left", "the temporary folder is too small: raise limits.tmp in matrix.yaml"),
    ("Cannot allocate memory", "raise limits.memory in matrix.yaml"),
    ("can't start new thread", "raise limits.pids in matrix.yaml"),
    ("Resource temporarily unavailable", "raise limits.pids in matrix.yaml"),
    ("shared memory", "raise limits.shm in matrix.yaml"),
    ("InvalidCxxCompiler", "the image has no C++ compiler: rebuild it with `toto-compat images build --rebuild`"),
)


def check_answer(name: str, environment: Environment, device: Device, answer: dict[str, Any]) -> None:
    """Everything the cells rely on held in the probe; else an error of the environment that says what to change."""
    ok, failed = answer.get("ok", {}), answer.get("failed", {})
    for check, error in failed.items():
        hint = next((advice for words, advice in _RELAX if words in error), "")
        raise EnvironmentBuildError(
            f"{name}: in its container the check {check.replace('_', ' ')!r} fails: {error}",
            hint=hint or f"`toto-compat shell {name}` opens the same container",
        )
    torch = ok["torch"]
    if str(torch["version"]).partition("+")[0] != environment.torch:
        raise EnvironmentBuildError(
            f"{name}: its image has torch {torch['version']}",
            hint="`toto-compat images build --rebuild` builds it anew",
        )
    if device is Device.CUDA:
        if not torch["cuda_available"]:
            raise EnvironmentBuildError(
                f"{name}: torch sees no GPU in the container although the engine handed one out",
                hint="the driver may be too old for this CUDA, or the engine needs a restart after a driver update",
            )
        if torch["architectures"] and not wheel_runs_on(torch["architecture"], torch["architectures"]):
            raise EnvironmentBuildError(
                f"{name}: the wheel has no kernels for {torch['gpu']} ({torch['architecture']})",
                hint=f"it has {', '.join(torch['architectures'])}; this says nothing about any cache",
            )


# --- processors and folders -------------------------------------------------------------------------------------------


class CpuShares:
    """Hands out processors: cells that run at the same time sit on different ones as long as there are enough."""

    def __init__(self, facts: EngineFacts, *, local: bool) -> None:
        usable = sorted(os.sched_getaffinity(0)) if local and hasattr(os, "sched_getaffinity") else []
        self._all = usable or list(range(facts.cpus))
        self._used: Counter[int] = Counter()
        self._guard = threading.Lock()

    def some(self, count: int) -> str:
        return ",".join(str(cpu) for cpu in self._all[:count])

    @contextmanager
    def taken(self, count: int) -> Iterator[str]:
        """The least used processors, as a cpuset; fewer than asked for where the machine has fewer."""
        with self._guard:
            chosen = sorted(sorted(self._all, key=lambda cpu: (self._used[cpu], cpu))[:count])
            self._used.update(chosen)
        try:
            yield ",".join(str(cpu) for cpu in chosen)
        finally:
            with self._guard:
                self._used.subtract(chosen)


def first_gpu() -> str:
    return next((gpu.index for gpu in find_gpus()), "0")


@contextmanager
def scratch_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="probe-", dir=cache_folder()) as folder:
        yield Path(folder)
