"""Runs cells in an environment's container: no network, no root, nothing writable but the cell's own folder."""

import os
import secrets
import shutil
import threading
from pathlib import Path
from typing import Any, TypedDict

import docker

from toto_compat.contract.files import utc_now
from toto_compat.contract.request import CellRequest, Device, Environment, Limits
from toto_compat.contract.result import CellResult, Provenance
from toto_compat.environments.base_image import BaseImage
from toto_compat.environments.engine import (
    LABEL,
    check_hands_out_gpus,
    engine_errors,
    engine_facts,
    is_local,
    local_image,
    open_client,
)
from toto_compat.environments.image import disk_needed, ensure_image, image_log, plan_image
from toto_compat.environments.leftovers import remove_leftovers
from toto_compat.environments.locks import read_lock
from toto_compat.environments.virtualenv import download_size
from toto_compat.environments.wheelhouse import missing_wheels
from toto_compat.errors import EngineError, EnvironmentBuildError
from toto_compat.evidence.files import write_model
from toto_compat.evidence.references import KnownReferences
from toto_compat.matrix.request import cell_variables
from toto_compat.runtimes import probe
from toto_compat.runtimes.cell_process import (
    CELL_COMMAND,
    INSIDE,
    LOG_FILE,
    REQUEST_FILE,
    RESULT_FILE,
    WORK,
    ProcessEnd,
    collect_result,
)
from toto_compat.runtimes.container_end import ContainerEnd, judge_end
from toto_compat.runtimes.container_files import give_to, mounts_of
from toto_compat.runtimes.container_options import (
    CELL_FOLDER,
    INPUT_FOLDER,
    PYTHON,
    ContainerJob,
    docker_command,
    invoking_identity,
)
from toto_compat.runtimes.containers import Containers
from toto_compat.runtimes.cpu_shares import CpuShares
from toto_compat.runtimes.gpu import check_gpus, first_gpu
from toto_compat.runtimes.inputs import with_inputs
from toto_compat.runtimes.nvidia_smi import find_gpus
from toto_compat.runtimes.probing import (
    PROBE_SECONDS,
    Probed,
    blame_probe,
    check_answer,
    probe_record,
    probed_once,
    read_answer,
    scratch_folder,
)
from toto_compat.runtimes.references import give_references
from toto_compat.runtimes.seam import AttachedCommand, BuildNeeds, OnLine, PreparedEnvironment
from toto_compat.runtimes.source import CellSource

_PROBE_INSIDE = f"{INPUT_FOLDER}/probe/probe.py"
_HOW_FILES_GET_IN = "TOTO_COMPAT_DOCKER_FILES"
# A CPU image of 1.7 GB took 280 s with its wheels on two busy cores; a CUDA image is several times its size.
_BUILD_SECONDS = {Device.CPU: 240.0, Device.CUDA: 900.0}


class _HandedOut(TypedDict):
    """Names a container's GPU, in a ContainerJob's own words."""

    gpu: str | None
    cdi: str


class DockerRuntime:
    """Cells in containers, through the Docker SDK. Safe to use from several threads."""

    name = "docker"
    elsewhere = False

    def __init__(
        self,
        source: CellSource,
        *,
        limits: Limits,
        device: Device,
        rebuild: bool = False,
        command: tuple[str, ...] = CELL_COMMAND,
    ) -> None:
        self.source = source
        self._limits, self._device, self._rebuild, self._command = limits, device, rebuild, command
        self._client = open_client()
        with engine_errors():
            self._facts = engine_facts(self._client)
        self._containers = Containers(self._client)
        self._cpus = CpuShares(self._facts.cpus, local=is_local(self._client))
        self._guard = threading.Lock()
        self._tidied = False
        self._probed: dict[str, Probed] = {}
        self._images: dict[str, str] = {}
        self._bases: dict[str, BaseImage] = {}

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
            self._check_gpus(environment_name, environment)
        except EnvironmentBuildError as error:
            return str(error)
        return ""

    def needs(self, environment_name: str, environment: Environment) -> BuildNeeds:
        try:
            lock = read_lock(environment_name, environment)
        except EnvironmentBuildError:
            # about what another lock of its kind would say: `obstacle` tells that there is none
            to_fetch = whole = download_size(environment)
        else:
            to_fetch, whole = sum(package.size for package in missing_wheels(lock)), lock.download_bytes
        return BuildNeeds(
            download_bytes=to_fetch, disk_bytes=disk_needed(whole), seconds=_BUILD_SECONDS[environment.device]
        )

    def tidy(self) -> None:
        with self._guard:
            tidied, self._tidied = self._tidied, True
        if not tidied:
            with engine_errors():
                remove_leftovers(self._client)

    def build_log(self, environment_name: str, environment: Environment) -> Path:  # noqa: ARG002 - the protocol's
        return image_log(environment_name)

    def build(self, environment_name: str, environment: Environment, say: OnLine) -> PreparedEnvironment:
        self.tidy()
        with engine_errors():
            plan, image = ensure_image(self._client, environment_name, environment, say, rebuild=self._rebuild)
        with self._guard:
            self._images[plan.identity], self._bases[plan.identity] = str(image.id), plan.base
        return PreparedEnvironment(
            name=environment_name, environment=environment, runtime=self.name, python=PYTHON, lock=plan.identity
        )

    def prepare(self, environment_name: str, environment: Environment, say: OnLine) -> PreparedEnvironment:
        self._check_gpus(environment_name, environment)
        prepared = self.build(environment_name, environment, say)
        with self._guard:
            image, known = self._images[prepared.lock], prepared.lock in self._probed
        if not known:
            device = environment.runs_on(self._device)
            facts = [self.name, image, self._facts.identity, self._facts.version]
            facts += [invoking_identity().user, os.environ.get(_HOW_FILES_GET_IN, "")]
            record = probe_record(facts, device, self._limits)
            probed = probed_once(record, lambda: self.probe(environment_name, environment, image, device, say))
            with self._guard:
                self._probed[prepared.lock] = probed
        return prepared

    def _gpu(self, device: Device, uuid: str | None = None) -> _HandedOut:
        """Say which GPU a container gets, and its name where the engine goes by CDI."""
        if device is not Device.CUDA:
            return {"gpu": None, "cdi": ""}
        uuid = uuid or first_gpu()
        index = next((gpu.index for gpu in find_gpus() if gpu.uuid == uuid), uuid)
        return {"gpu": uuid, "cdi": self._facts.cdi_name(uuid, index) if self._facts.uses_cdi else ""}

    def _check_gpus(self, environment_name: str, environment: Environment) -> None:
        device = environment.runs_on(self._device)
        if device is Device.CUDA:
            check_hands_out_gpus(environment_name, self._facts)
            if is_local(self._client):  # those of a remote engine are seen by the probe
                check_gpus(environment_name, environment, device, find_gpus())

    def probe(self, name: str, environment: Environment, image: str, device: Device, say: OnLine) -> Probed:
        """See if a container with a cell's hardening sees our files, compiles a kernel and uses the GPU."""
        wanted = os.environ.get(_HOW_FILES_GET_IN, "auto")
        attempts = {"copy": (True,), "bind": (False,)}.get(wanted, (False, True))
        for copy in attempts:
            with scratch_folder() as folder:
                inside = folder / INSIDE
                inside.mkdir()
                nonce = secrets.token_hex(16)
                (inside / probe.NONCE_FILE).write_text(nonce)
                job = ContainerJob(
                    image=image,
                    command=(PYTHON, "-I", _PROBE_INSIDE, probe.ANSWER_FILE, *probe.CHECKS),
                    inputs={Path(probe.__file__).resolve(): _PROBE_INSIDE},
                    folder=inside,
                    log=folder / LOG_FILE,
                    source=self.source.folder,
                    variables=cell_variables(self._limits, device)
                    | {"TORCHINDUCTOR_CACHE_DIR": f"{CELL_FOLDER}/inductor"},
                    limits=self._limits,
                    cpuset=self._cpus.some(self._limits.cpus),
                    **self._gpu(device),
                    labels={f"{LABEL}.environment": name},
                    timeout=PROBE_SECONDS,
                    copy=copy,
                )
                try:
                    end = self._containers.run(job, lambda _: None)
                except EnvironmentBuildError as error:
                    if not copy and len(attempts) > 1 and "bind source path does not exist" in error.message:
                        continue
                    raise EnvironmentBuildError(f"{name}: {error.message}", hint=error.hint) from error
                answer = read_answer(inside / probe.ANSWER_FILE)
            if answer is not None and answer.ok.get("nonce") == nonce:
                check_answer(name, environment, device, answer, runtime=self.name)
                if copy:
                    say(f"{name}: the engine does not see this machine's files, copying them in and out")
                return Probed(answer=answer, copied=copy)
            if end.lost:
                raise EngineError(end.lost, hint="start the engine again and run the same command")
            if end.out_of_memory or end.process.timed_out or end.process.stopped:
                break
        raise blame_probe(name, end.process, self._limits, runtime=self.name)

    def run_cell(
        self,
        prepared: PreparedEnvironment,
        request: CellRequest,
        folder: Path,
        on_line: OnLine,
        *,
        gpu: str | None = None,
        references: KnownReferences | None = None,
    ) -> CellResult:
        started = utc_now()
        source = self.source.folder
        image, copy = self._images[prepared.lock], self._probed[prepared.lock].copied
        base = self._bases[prepared.lock]
        origin = request.origin.model_copy(
            update={
                "runtime": self.name,
                "lock": prepared.lock,
                "image": image,
                "source_hash": self.source.hash,
                "base_image": base.asked,
                "base_used": base.reference,
                "base_digest": base.identity,
                "base_is_stand_in": base.is_stand_in,
            }
        )
        seen, inputs = as_seen_inside(request, copy=copy)
        # the log and the lock of `folder` stay out of the cell's reach: this process opens them by name
        inside = folder / INSIDE
        (inside / WORK).mkdir(parents=True, exist_ok=True)
        own = {"origin": origin, "references": give_references(references, inside / WORK)}
        write_model(inside / REQUEST_FILE, seen.model_copy(update=own))
        with self._cpus.taken(request.limits.cpus) as cpuset:
            job = ContainerJob(
                image=image,
                command=(PYTHON, *self._command, f"{CELL_FOLDER}/{REQUEST_FILE}", f"{CELL_FOLDER}/{RESULT_FILE}"),
                folder=inside,
                log=folder / LOG_FILE,
                source=source,
                inputs=inputs,
                variables=request.variables,
                limits=request.limits,
                cpuset=cpuset,
                **self._gpu(request.device, gpu),
                labels={f"{LABEL}.environment": prepared.name, f"{LABEL}.cell": request.cell},
                timeout=request.profile.timeout_minutes * 60,
                copy=copy,
            )
            try:
                end = self._containers.run(job, on_line)
            except (EngineError, EnvironmentBuildError) as error:
                # a container that the engine refuses: this cell's trouble, the others may go on
                end = ContainerEnd(ProcessEnd(code=-1), lost=str(error))
        known = Provenance(**origin.model_dump(), torch=prepared.environment.torch, started=started, finished=utc_now())
        return judge_end(collect_result(request, inside, end.process, known), end, request)

    def attached(
        self, prepared: PreparedEnvironment, words: tuple[str, ...], folder: Path, *, terminal: bool
    ) -> AttachedCommand:
        check_attachable(self._client)
        device = prepared.environment.runs_on(self._device)
        job = ContainerJob(
            image=self._images[prepared.lock],
            command=tuple(word.replace("{python}", PYTHON) for word in words),
            folder=folder,
            source=self.source.folder,
            variables=cell_variables(self._limits, device),
            limits=self._limits,
            cpuset=self._cpus.some(self._limits.cpus),
            **self._gpu(device),
            labels={LABEL: "shell", f"{LABEL}.environment": prepared.name},
        )
        if job.identity.hands_back:
            give_to(job.folder, job.identity.uid, job.identity.gid)
        command = docker_command(job, mounts_of(job), terminal=terminal)
        # the docker command finds the engine by the user's own variables and settings, as we did
        return AttachedCommand(words=tuple(command), variables=dict(os.environ), folder=folder)

    def stop(self) -> None:
        self._containers.stop()


def check_attachable(client: docker.DockerClient) -> None:
    """Refuse to attach where that cannot work: the SDK lends out no terminal, and files are mounted, not copied."""
    if shutil.which("docker") is None:
        raise EnvironmentBuildError(
            "the `docker` command is needed for an interactive shell and is not on PATH", hint="install docker-cli"
        )
    if not is_local(client):
        raise EngineError(
            f"a shell needs an engine on this machine, and {client.api.base_url} is another one",
            hint="log in there and run the same command, or unset DOCKER_HOST and `docker context use default`",
        )


def as_seen_inside(request: CellRequest, *, copy: bool) -> tuple[CellRequest, dict[Path, str]]:
    """Return the request with paths as the container sees them, and what must be mounted there."""
    inputs: dict[Path, str] = {}

    def mounted(path: Path, name: str) -> str:
        inside = f"{INPUT_FOLDER}/{name}"
        if path.is_dir():
            # file by file: in a hub's folder each is a link to a file elsewhere in the hub's cache
            files = sorted(file for file in path.rglob("*") if file.is_file())
            inputs.update({file: f"{inside}/{file.relative_to(path)}" for file in files})
        else:
            inputs[path] = inside
        return inside

    changes: dict[str, Any] = {"work_folder": f"{CELL_FOLDER}/{WORK}"}
    if request.quiet_lock is not None:
        changes["quiet_lock"] = None if copy else f"{INPUT_FOLDER}/quiet/lock"
        if not copy:
            # two files, see cell/quiet.py; a lock is no less a lock for being opened read-only
            for suffix in ("", ".turnstile"):
                lock = Path(request.quiet_lock + suffix)
                lock.touch(mode=0o644)
                inputs[lock] = f"{INPUT_FOLDER}/quiet/lock{suffix}"
    return with_inputs(request, mounted).model_copy(update=changes), inputs
