"""What a container may do: the hardening, the limits and the variables, in one place for cell, probe and shell."""

import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import docker
from docker.types import DeviceRequest, Mount
from docker.utils import parse_bytes

from toto_compat.contract.request import Limits
from toto_compat.environments.engine import LABEL
from toto_compat.environments.leftovers import RUNNER_LABEL, runner_label
from toto_compat.runtimes import supervise
from toto_compat.runtimes.cell_process import LOG_FILE

CELL_FOLDER = "/toto-compat/cell"  # the only writable place that outlives the container
SOURCE_FOLDER = "/toto-compat/source"
INPUT_FOLDER = "/toto-compat/inputs"
PYTHON = "/opt/venv/bin/python"
SUPERVISOR = f"{INPUT_FOLDER}/supervise/supervise.py"
FIXED_UID = 10001  # of a cell that root starts: no cell runs as root


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
    """Take the invoking user's own numbers; root's cells run as a fixed user and their files go back to root."""
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
    variables: Mapping[str, str] = field(default_factory=dict)  # of a cell; those that name a place are added
    limits: Limits = field(default_factory=Limits)
    cpuset: str = ""
    gpu: str | None = None  # its UUID; None: no GPU in the container
    cdi: str = ""  # its whole CDI name, on an engine that hands out GPUs by it
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
        """Add the supervisor to the inputs: it is none of the staged source, it belongs to the runtime."""
        return {Path(supervise.__file__).resolve(): SUPERVISOR, **self.inputs}


def container_options(job: ContainerJob, mounts: Sequence[Mount]) -> dict[str, Any]:
    """Spell the hardening for the SDK: probe, cell and shell are all started with exactly this."""
    limits = job.limits
    return {
        "image": job.image,
        "user": job.identity.user,
        "working_dir": CELL_FOLDER,
        "environment": container_variables(job),
        "labels": {LABEL: "cell", RUNNER_LABEL: runner_label(), **job.labels},
        "name": f"toto-compat-{uuid.uuid4().hex[:12]}",
        "network_mode": "none",
        "read_only": True,
        # exec: inductor loads what it has just compiled. /run and /var/tmp are for programs that insist on them.
        "tmpfs": {"/tmp": f"size={int(parse_bytes(limits.tmp))},exec,nosuid,nodev,mode=1777"},  # noqa: S108
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges"],
        "mem_limit": limits.memory_bytes,
        "memswap_limit": limits.memory_bytes,
        "nano_cpus": limits.cpus * 10**9,
        "cpuset_cpus": job.cpuset or None,
        "pids_limit": limits.pids,
        "shm_size": int(parse_bytes(limits.shm)),
        "init": True,
        "mounts": list(mounts),
        "device_requests": gpu_request(job.gpu, job.cdi),
        "ulimits": [docker.types.Ulimit(name="core", soft=0, hard=0)],
    }


def container_variables(job: ContainerJob) -> dict[str, str]:
    """Add to the job's variables those that name a place in the container or keep a GPU out of it."""
    places = {
        "HOME": "/tmp",  # noqa: S108 - a tmpfs of the container's own
        "CXX": "g++",
        "PYTHONPATH": SOURCE_FOLDER,
        "PYTHONDONTWRITEBYTECODE": "1",  # the source is read-only
    }
    if job.gpu is None:
        # where nvidia is the engine's default runtime a container gets every GPU unless it says otherwise
        places["NVIDIA_VISIBLE_DEVICES"] = "void"
    else:
        # a base image may ask for the driver of its own CUDA; the wheel brings another one
        places |= {"NVIDIA_DISABLE_REQUIRE": "true", "NVIDIA_REQUIRE_CUDA": ""}
    return {**job.variables, **places}


def gpu_request(gpu: str | None, cdi: str) -> list[DeviceRequest] | None:
    """Ask for one GPU by its UUID, so that cells spread over the GPUs of the host."""
    if gpu is None:
        return None
    if cdi:
        return [DeviceRequest(driver="cdi", device_ids=[cdi])]
    return [DeviceRequest(device_ids=[gpu], capabilities=[["gpu"]])]


def docker_command(job: ContainerJob, mounts: Sequence[Mount], *, terminal: bool) -> list[str]:
    """Spell the same options for the docker command: the SDK cannot lend out a terminal."""
    options = container_options(job, [])
    command = ["docker", "run", "--rm", "--interactive", "--init", "--read-only", "--entrypoint", ""]
    command += ["--tty"] if terminal else []
    command += ["--user", options["user"], "--workdir", CELL_FOLDER, "--name", options["name"]]
    command += ["--network", options["network_mode"], "--pids-limit", str(options["pids_limit"])]
    command += ["--memory", str(options["mem_limit"]), "--memory-swap", str(options["memswap_limit"])]
    command += ["--cpus", str(options["nano_cpus"] / 10**9), "--shm-size", str(options["shm_size"])]
    command += ["--ulimit", "core=0"]
    command += ["--cpuset-cpus", job.cpuset] if job.cpuset else []
    command += [word for capability in options["cap_drop"] for word in ("--cap-drop", capability)]
    command += [word for option in options["security_opt"] for word in ("--security-opt", option)]
    command += [word for path, how in options["tmpfs"].items() for word in ("--tmpfs", f"{path}:{how}")]
    command += [word for name, value in options["labels"].items() for word in ("--label", f"{name}={value}")]
    command += [word for name, value in options["environment"].items() for word in ("--env", f"{name}={value}")]
    if job.gpu is not None:
        command += ["--device", job.cdi] if job.cdi else ["--gpus", f"device={job.gpu}"]
    for mount in mounts:
        read_only = ",readonly" if mount.get("ReadOnly") else ""
        command += ["--mount", f"type=bind,source={mount['Source']},target={mount['Target']}{read_only}"]
    return [*command, job.image, *job.command]
