"""Running a command in a hardened container: what it may do, how it ends, and that nothing of it stays behind."""

import io
import os
import platform
import signal
import socket
import tarfile
import tempfile
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import docker
import docker.errors
import requests
import urllib3.exceptions
from docker.models.containers import Container
from docker.types import DeviceRequest, Mount

from toto_compat.errors import EngineError, EnvironmentBuildError, StorageError
from toto_compat.matrix.schema import Limits
from toto_compat.runtimes import supervise
from toto_compat.runtimes.cell_process import LOG_FILE, ProcessEnd, bytes_of
from toto_compat.runtimes.engine import LABEL, engine_lost, is_lost
from toto_compat.runtimes.seam import OnLine

CELL_FOLDER = "/toto-compat/cell"  # the only writable place that outlives the container
SOURCE_FOLDER = "/toto-compat/source"
INPUT_FOLDER = "/toto-compat/inputs"
PYTHON = "/opt/venv/bin/python"
SUPERVISOR = f"{INPUT_FOLDER}/supervise/supervise.py"
FIXED_UID = 10001  # of a cell that root starts: no cell runs as root

_LAST_LINES = 25
_LONGEST_LINE = 400
_UNLIMITED = 2**62  # the supervisor's own memory limit: in a container the kernel's limit decides
_KILL_PATIENCE_SECONDS = 20.0
_BROKEN_PAUSE_SECONDS = 1.0


@dataclass(frozen=True)
class Identity:
    """Whose processes a container's are, and who gets the files afterwards."""

    uid: int
    gid: int
    owner_uid: int
    owner_gid: int

    @property
    def user(self) -> str:
        return f"{self.uid}:{self.gid}"

    @property
    def hands_back(self) -> bool:
        return (self.uid, self.gid) != (self.owner_uid, self.owner_gid)


def invoking_identity() -> Identity:
    """The invoking user's own numbers; root's cells run as a fixed user and their files go back to root."""
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0:
        return Identity(FIXED_UID, FIXED_UID, uid, gid)
    return Identity(uid, gid, uid, gid)


@dataclass(frozen=True)
class ContainerJob:
    """One command in one container: `folder` is CELL_FOLDER in there, `inputs` (path here, path there) read-only."""

    image: str
    command: tuple[str, ...]
    folder: Path
    source: Path
    inputs: Mapping[Path, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    cpuset: str = ""
    gpu: str | None = None  # a device id; None: no GPU in the container
    cdi: bool = False  # the engine hands out GPUs by CDI name
    labels: Mapping[str, str] = field(default_factory=dict)
    timeout: float = 3600.0
    copy: bool = False  # the engine does not see this machine's files: they are copied in and out
    identity: Identity = field(default_factory=invoking_identity)
    log: Path | None = None  # None: in `folder`, where the command can put a link in its place

    @property
    def log_file(self) -> Path:
        return self.log or self.folder / LOG_FILE

    @property
    def all_inputs(self) -> dict[Path, str]:
        """The supervisor is none of the staged source: it belongs to the runtime, not to the cell."""
        return {Path(supervise.__file__).resolve(): SUPERVISOR, **self.inputs}


@dataclass(frozen=True)
class ContainerEnd:
    """How it ended. `out_of_memory` is also true if only a child was killed and the command went on."""

    process: ProcessEnd
    out_of_memory: bool = False
    lost: str = ""  # the engine went away or refused: what the container left is not to be relied on


# --- what it may do ---------------------------------------------------------------------------------------------------


def runner_label() -> str:
    """Who started a container, so that a later run can tell whether its runner still lives."""
    return f"{platform.node()}:{os.getpid()}:{_process_start(os.getpid())}:{_pid_namespace()}"


def container_options(job: ContainerJob, mounts: Sequence[Mount]) -> dict[str, Any]:
    """The hardening, in one place: probe, cell and shell are all started with exactly this."""
    limits = job.limits
    memory = bytes_of(limits.memory)
    return {
        "image": job.image,
        "user": job.identity.user,
        "working_dir": CELL_FOLDER,
        "environment": container_environment(job),
        "labels": {LABEL: "cell", f"{LABEL}.runner": runner_label(), **job.labels},
        "name": f"toto-compat-{uuid.uuid4().hex[:12]}",
        "network_mode": "none",
        "read_only": True,
        # exec: inductor loads what it has just compiled. /run and /var/tmp are for programs that insist on them.
        "tmpfs": {"/tmp": f"size={bytes_of(limits.tmp)},exec,nosuid,nodev,mode=1777"},  # noqa: S108
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges"],
        "mem_limit": memory,
        "memswap_limit": memory,
        "nano_cpus": limits.cpus * 10**9,
        "cpuset_cpus": job.cpuset or None,
        "pids_limit": limits.pids,
        "shm_size": bytes_of(limits.shm),
        "init": True,
        "mounts": list(mounts),
        "device_requests": gpu_request(job.gpu, cdi=job.cdi),
        "ulimits": [docker.types.Ulimit(name="core", soft=0, hard=0)],
    }


def container_environment(job: ContainerJob) -> dict[str, str]:
    """The variables of the venv runtime's cells, with folders that are writable in here."""
    threads = str(job.limits.threads)
    return {
        "HOME": "/tmp",  # noqa: S108 - a tmpfs of the container's own
        "USER": "toto-compat",  # inductor names a folder after the user, who has no name in here
        "LANG": "C.UTF-8",
        "CXX": "g++",
        "PYTHONPATH": SOURCE_FOLDER,
        "PYTHONNOUSERSITE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        # a 32-core host would start 32 compile workers and meet the memory and pids limits
        "TORCHINDUCTOR_COMPILE_THREADS": str(job.limits.cpus),
        # where nvidia is the engine's default runtime a container gets every GPU unless it says otherwise
        **({} if job.gpu is not None else {"CUDA_VISIBLE_DEVICES": "", "NVIDIA_VISIBLE_DEVICES": "void"}),
        **job.environment,
    }


def gpu_request(gpu: str | None, *, cdi: bool) -> list[DeviceRequest] | None:
    """One GPU by its id, so that cells spread over the GPUs of the host."""
    if gpu is None:
        return None
    if cdi:
        return [DeviceRequest(driver="cdi", device_ids=[f"nvidia.com/gpu={gpu}"])]
    return [DeviceRequest(device_ids=[gpu], capabilities=[["gpu"]])]


# --- running ----------------------------------------------------------------------------------------------------------


class Containers:
    """The containers that run now, so that all of them can be stopped from another thread."""

    def __init__(self, client: docker.DockerClient) -> None:
        self.client = client
        self._guard = threading.Lock()
        self._running: dict[str, Container] = {}
        self._stopping = False

    def run(self, job: ContainerJob, on_line: OnLine) -> ContainerEnd:
        """Run to the end, the timeout or stop(); the container is gone afterwards, the log is in the folder."""
        try:
            with _prepared_files(self.client, job) as mounts:
                return self._run(job, mounts, on_line)
        except docker.errors.APIError as error:
            raise blame_refusal(error, job) from error
        except requests.exceptions.RequestException as error:
            if not is_lost(error):
                raise EngineError(f"the engine does not answer: {error}", hint="look at the engine's log") from error
            return ContainerEnd(ProcessEnd(code=-1), lost=engine_lost(error).message)

    def _run(self, job: ContainerJob, mounts: Sequence[Mount], on_line: OnLine) -> ContainerEnd:
        container = self._create(job, mounts)
        stdin: socket.SocketIO | None = None
        try:
            with self._guard:
                if self._stopping:
                    return ContainerEnd(ProcessEnd(code=128 + signal.SIGINT, stopped=True))
                self._running[str(container.id)] = container
            # The supervisor inside ends everything when this connection closes: with it the container ends at once if
            # the runner is killed, whatever kills it.
            stdin = self.client.api.attach_socket(str(container.id), params={"stdin": 1, "stream": 1})
            container.start()
            with self._guard:
                stopping = self._stopping
            if stopping:
                _kill(container)  # stop() came before there was anything to kill
            return self._follow(container, job, on_line)
        finally:
            if stdin is not None:
                stdin.close()
            with self._guard:
                self._running.pop(str(container.id), None)
            _remove(container)

    def _create(self, job: ContainerJob, mounts: Sequence[Mount]) -> Container:
        options = container_options(job, mounts)
        create, host = _split_options(options)
        # through the low-level API: only there stdin can be closed by the engine when the connection ends
        config = self.client.api.create_host_config(**host)
        command = [PYTHON, "-I", "-S", SUPERVISOR, str(_UNLIMITED), *job.command]
        made = self.client.api.create_container(
            command=command, stdin_open=True, detach=False, host_config=config, **create
        )
        return self.client.containers.get(made["Id"])

    def _follow(self, container: Container, job: ContainerJob, on_line: OnLine) -> ContainerEnd:
        last: deque[str] = deque(maxlen=_LAST_LINES)
        reader = threading.Thread(target=_copy_lines, args=(container, job.log_file, last, on_line), daemon=True)
        reader.start()
        timeout = _Timeout(container, job.timeout)
        try:
            broken = self._wait(container, timeout)
        except docker.errors.NotFound:
            raise  # somebody removed it
        except requests.exceptions.RequestException as error:
            return ContainerEnd(ProcessEnd(code=-1, last_lines=tuple(last)), lost=engine_lost(error).message)
        finally:
            timeout.cancel()
        reader.join(_KILL_PATIENCE_SECONDS)
        container.reload()
        state = container.attrs["State"]
        with self._guard:
            stopping = self._stopping
        if job.copy:
            copy_out(container, job)
        code = int(state.get("ExitCode") or 0)
        stopped = stopping and code != 0 and not timeout.passed
        ended_by_supervisor = code == 128 + signal.SIGTERM and not stopped and not timeout.passed
        out_of_memory = bool(state.get("OOMKilled"))
        return ContainerEnd(
            ProcessEnd(
                code=code,
                timed_out=timeout.passed,
                stopped=stopped,
                over_memory=out_of_memory,
                last_lines=tuple(line for line in last if not line.startswith("::")),
            ),
            out_of_memory=out_of_memory,
            lost="the connection to the engine broke, which ended the cell" if broken and ended_by_supervisor else "",
        )

    def _wait(self, container: Container, timeout: "_Timeout") -> bool:
        """Until it has ended; whether the connection broke on the way. That is no end: the engine is asked again."""
        broken = False
        deadline = time.monotonic() + timeout.seconds + _KILL_PATIENCE_SECONDS
        while (left := deadline - time.monotonic()) > 0:
            try:
                container.wait(timeout=left)  # returns at once if it has ended
                break
            except requests.exceptions.RequestException as error:
                if isinstance(error, docker.errors.NotFound) or not _answers(self.client):
                    raise
            broken = broken or not timeout.passed
            time.sleep(_BROKEN_PAUSE_SECONDS)
        return broken

    def stop(self) -> None:
        """End every running container and let no other start."""
        with self._guard:
            self._stopping = True
            running = list(self._running.values())
        for container in running:
            _kill(container)


class _Timeout:
    """Kills a container when its time is over. With a clock of its own: over ssh the SDK's requests never time out."""

    def __init__(self, container: Container, seconds: float) -> None:
        self.seconds = seconds
        self.passed = False
        self._container = container
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True
        self._timer.start()

    def _end(self) -> None:
        self.passed = True
        _kill(self._container)

    def cancel(self) -> None:
        self._timer.cancel()


def _split_options(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The SDK wants some of them on the container and the rest on its host configuration."""
    create_names = ("image", "user", "working_dir", "environment", "labels", "name")
    create = {name: value for name, value in options.items() if name in create_names}
    host = {name: value for name, value in options.items() if name not in create_names and value is not None}
    return create, host


def blame_refusal(error: docker.errors.APIError, job: ContainerJob) -> EnvironmentBuildError:
    """Why the engine, which answers, refuses a container, and which option to relax. The next one may be accepted."""
    text = str(error.explanation or error)
    hint = "`toto-compat doctor` shows what the engine can do"
    if "could not select device driver" in text or "nvidia" in text.lower() or "CDI" in text:
        hint = "the engine cannot hand out GPUs: install nvidia-container-toolkit, or run with --device cpu"
    elif "cpus" in text.lower() or "cpuset" in text.lower():
        hint = f"the engine has fewer than {job.limits.cpus} processors: lower limits.cpus in matrix.yaml"
    elif "memory" in text.lower():
        hint = f"the engine refuses a limit of {job.limits.memory}: change limits.memory in matrix.yaml"
    elif "pids" in text.lower():
        hint = "the engine cannot limit processes: its kernel lacks the pids control group"
    elif "bind source path does not exist" in text:
        hint = "the engine does not see this machine's files: set TOTO_COMPAT_DOCKER_FILES=copy"
    return EnvironmentBuildError(f"the engine refuses a container of {job.image}: {text.strip()[:300]}", hint=hint)


def _copy_lines(container: Container, log: Path, last: deque[str], on_line: OnLine) -> None:
    """The container's output, live: to the log, to the display and into the last lines. Ends with the container."""
    try:
        with log.open("a", encoding="utf-8") as file:
            for line in _lines(container):
                file.write(line + "\n")
                file.flush()
                last.append(line[:_LONGEST_LINE])
                on_line(line)
    except (requests.exceptions.RequestException, urllib3.exceptions.HTTPError) as error:
        last.append(f"the output ends here: {error}")
    except OSError as error:
        last.append(f"{log}: {error.strerror or error}")


def _lines(container: Container) -> Iterator[str]:
    rest = b""
    for chunk in container.logs(stream=True, follow=True, stdout=True, stderr=True):
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield line.decode("utf-8", errors="replace").rstrip("\r")
    if rest:
        yield rest.decode("utf-8", errors="replace")


def _answers(client: docker.DockerClient) -> bool:
    try:
        return bool(client.ping())
    except (docker.errors.APIError, requests.exceptions.RequestException, OSError):
        return False


def _kill(container: Container) -> None:
    try:
        container.kill()
    except (docker.errors.APIError, requests.exceptions.RequestException):
        return  # it ended by itself, or the engine is gone


def _remove(container: Container) -> None:
    try:
        container.remove(force=True, v=True)
    except (docker.errors.APIError, requests.exceptions.RequestException):
        return  # gone already; if the engine is lost, the next run finds it by its label


# --- files in and out -------------------------------------------------------------------------------------------------


def mounts_of(job: ContainerJob) -> list[Mount]:
    """Binds. As mounts, not volumes: a folder the engine does not see is an error, not a new empty folder there."""
    return [
        Mount(CELL_FOLDER, str(job.folder), type="bind"),
        Mount(SOURCE_FOLDER, str(job.source), type="bind", read_only=True),
        # a link is resolved here: its target need not lie where the engine would look for it
        *(Mount(inside, str(path.resolve()), type="bind", read_only=True) for path, inside in job.all_inputs.items()),
    ]


class _prepared_files:  # noqa: N801 - a context manager with state, used like a function
    """Mounts for a job: binds, or (where the engine has another disk) a volume filled and emptied through the API."""

    def __init__(self, client: docker.DockerClient, job: ContainerJob) -> None:
        self._client, self._job = client, job
        self._volumes: list[Any] = []

    def __enter__(self) -> list[Mount]:
        job = self._job
        if not job.copy:
            if job.identity.hands_back:
                give_to(job.folder, job.identity.uid, job.identity.gid)
            return mounts_of(job)
        try:
            return self._fill_volumes()
        except BaseException:
            self._remove_volumes()
            raise

    def __exit__(self, *_: object) -> None:
        if self._job.copy:
            self._remove_volumes()
        elif self._job.identity.hands_back:
            give_to(self._job.folder, self._job.identity.owner_uid, self._job.identity.owner_gid)

    def _fill_volumes(self) -> list[Mount]:
        """Volumes instead of binds, so that inputs stay read-only. A container that never starts carries files in."""
        job, client = self._job, self._client
        labels = {LABEL: "volume", f"{LABEL}.runner": runner_label()}
        places = {CELL_FOLDER: False, SOURCE_FOLDER: True, INPUT_FOLDER: True}
        mounts = []
        for place, read_only in places.items():
            volume = client.volumes.create(f"toto-compat-{Path(place).name}-{uuid.uuid4().hex[:12]}", labels=labels)
            self._volumes.append(volume)
            mounts.append(Mount(place, volume.name, type="volume", read_only=read_only))
        writable = [Mount(mount["Target"], mount["Source"], type="volume") for mount in mounts]
        carrier = client.containers.create(job.image, ["true"], mounts=writable, labels={**labels, LABEL: "carrier"})
        try:
            root = Path(CELL_FOLDER).parent
            own = (job.identity.uid, job.identity.gid)
            for inside, path, owner in (
                (CELL_FOLDER, job.folder, own),
                (SOURCE_FOLDER, job.source, (0, 0)),
                *((inside, path, (0, 0)) for path, inside in job.all_inputs.items()),
            ):
                carrier.put_archive(str(root), _pack(path, str(Path(inside).relative_to(root)), owner))
        finally:
            _remove(carrier)
        return mounts

    def _remove_volumes(self) -> None:
        for volume in self._volumes:
            try:
                volume.remove(force=True)
            except (docker.errors.APIError, requests.exceptions.RequestException):
                continue


def _pack(path: Path, name: str, owner: tuple[int, int]) -> bytes:
    """A file or folder as a tar archive under that name, readable by all and owned by `owner`. Links become files."""

    def owned(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid, entry.gid = owner
        entry.mode |= 0o444 | (0o111 if entry.isdir() else 0)
        return entry

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", dereference=True) as archive:
        archive.add(path, name, filter=owned)
    return buffer.getvalue()


def copy_out(container: Container, job: ContainerJob) -> None:
    """What the cell left in its folder, back on this machine. The compiler's caches stay where they are."""
    stream, _ = container.get_archive(CELL_FOLDER)
    try:
        with tempfile.TemporaryFile(dir=job.folder) as spool:
            for chunk in stream:
                spool.write(chunk)
            spool.seek(0)
            unpack(spool, job.folder)
    except requests.exceptions.RequestException:
        raise  # an OSError too, but the engine's
    except (tarfile.TarError, OSError) as error:
        raise EnvironmentBuildError(
            f"what the cell left cannot be copied out of its container: {error}",
            hint="free space here, or run with an engine that sees this machine's files",
        ) from error


def unpack(archive_file: IO[bytes], folder: Path) -> None:
    """Files and folders only: a link, pipe or device that the cell made has no business on this machine."""
    with tarfile.open(fileobj=archive_file) as archive:
        for entry in archive:
            entry.name = entry.name.partition("/")[2]
            stays = not entry.name or entry.name.startswith(("work/inductor", "work/triton", "work/tmp"))
            if not stays and (entry.isreg() or entry.isdir()):
                archive.extract(entry, folder, filter="data")


def give_to(folder: Path, uid: int, gid: int) -> None:
    """Hand a folder and all that is in it to a user; only root can, and only root needs to."""
    try:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, uid, gid, follow_symlinks=False)
    except FileNotFoundError:
        return give_to(folder, uid, gid)  # a file went away while the tree was walked
    except OSError as error:
        raise StorageError(f"{folder} cannot be handed to uid {uid}: {error.strerror}") from error
    return None


# --- leftovers --------------------------------------------------------------------------------------------------------


def remove_leftovers(client: docker.DockerClient) -> list[str]:
    """Remove containers and volumes of runners that no longer live on this machine; says which."""
    removed = []
    for container in client.containers.list(all=True, filters={"label": f"{LABEL}.runner"}, ignore_removed=True):
        if not runner_lives(container.labels.get(f"{LABEL}.runner", "")):
            _remove(container)
            removed.append(f"container {container.name}")
    for volume in client.volumes.list(filters={"label": f"{LABEL}.runner"}):
        if not runner_lives((volume.attrs.get("Labels") or {}).get(f"{LABEL}.runner", "")):
            try:
                volume.remove()
            except docker.errors.APIError:
                continue  # in use by a container that another run is removing right now
            removed.append(f"volume {volume.name}")
    return removed


def runner_lives(label: str) -> bool:
    """Whether the process that started something still runs; true for one that cannot be asked: another machine's, or
    one of another container on this machine, whose process numbers mean others here."""
    host, pid, start, namespace = (*label.split(":", 3), "", "", "", "")[:4]
    if host != platform.node() or not pid.isdigit() or (namespace and namespace != _pid_namespace()):
        return True
    return _process_start(int(pid)) == start


def _pid_namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _process_start(pid: int) -> str:
    """When a process began, as the kernel counts: a number used again by another process has another start."""
    try:
        # the command name may hold spaces and brackets: fields are counted from the last one
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if stat[0] == "Z" else stat[19]
