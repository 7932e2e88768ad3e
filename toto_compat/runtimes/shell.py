"""`toto-compat shell ENVIRONMENT`: a shell in the pinned container, with a cell's own mounts, limits and hardening."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import click
import docker

from toto_compat.errors import EngineError, EnvironmentBuildError, SelectionError
from toto_compat.matrix.load import find_matrix_file, load_matrix, matrix_option
from toto_compat.matrix.schema import Device
from toto_compat.runtimes.docker import CpuShares, first_gpu
from toto_compat.runtimes.docker_image import ensure_image
from toto_compat.runtimes.docker_run import CELL_FOLDER, ContainerJob, container_options, give_to, mounts_of
from toto_compat.runtimes.engine import connect, engine_facts, is_local
from toto_compat.runtimes.source import cache_folder, stage_source


@click.command("shell", context_settings={"ignore_unknown_options": True})
@click.argument("environment")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@matrix_option
def shell_command(environment: str, command: tuple[str, ...], device: str, matrix_file: Path | None) -> None:
    """A shell (or COMMAND) in ENVIRONMENT's container, as a cell would find it: no network, read-only, limited.

    The folder it starts in is empty, writable and gone afterwards; the project's source is on PYTHONPATH."""
    matrix = load_matrix(find_matrix_file(matrix_file))
    if environment not in matrix.environments:
        names = ", ".join(matrix.environments)
        raise SelectionError(f"there is no environment {environment!r}", hint=f"the matrix has {names}")
    if shutil.which("docker") is None:
        raise EnvironmentBuildError(
            "the `docker` command is needed for an interactive shell and is not on PATH", hint="install docker-cli"
        )
    source, _ = stage_source()
    with connect() as client:
        check_engine_is_here(client)
        _, image = ensure_image(
            client, environment, matrix.environments[environment], lambda line: click.echo(line, err=True)
        )
        facts = engine_facts(client)
        cpuset = CpuShares(facts, local=True).some(matrix.limits.cpus)
        image_id = str(image.id)
    with tempfile.TemporaryDirectory(prefix="shell-", dir=cache_folder()) as folder:
        job = ContainerJob(
            image=image_id,
            command=command or ("/bin/sh", "-i"),
            folder=Path(folder),
            source=source,
            limits=matrix.limits,
            cpuset=cpuset,
            gpu=first_gpu() if Device(device) is Device.CUDA else None,
            cdi=facts.uses_cdi,
            labels={"toto-compat": "shell", "toto-compat.environment": environment},
        )
        if job.identity.hands_back:
            give_to(job.folder, job.identity.uid, job.identity.gid)
        done = subprocess.run(docker_command(job, terminal=sys.stdin.isatty()), check=False)
    if done.returncode:
        sys.exit(done.returncode)


def check_engine_is_here(client: docker.DockerClient) -> None:
    """A cell's files can be copied to an engine elsewhere; a shell's are mounted."""
    if not is_local(client):
        raise EngineError(
            f"a shell needs an engine on this machine, and {client.api.base_url} is another one",
            hint="log in there and run the same command, or unset DOCKER_HOST and `docker context use default`",
        )


def docker_command(job: ContainerJob, *, terminal: bool) -> list[str]:
    """The same options as for a cell, spelled for the docker command: the SDK cannot lend out a terminal."""
    options = container_options(job, [])
    command = ["docker", "run", "--rm", "--interactive", "--init", "--read-only", "--entrypoint", ""]
    command += ["--tty"] if terminal else []
    command += ["--user", options["user"], "--workdir", CELL_FOLDER, "--name", options["name"]]
    command += ["--network", options["network_mode"], "--pids-limit", str(options["pids_limit"])]
    command += ["--memory", str(options["mem_limit"]), "--memory-swap", str(options["memswap_limit"])]
    command += [
        "--cpus",
        str(options["nano_cpus"] / 10**9),
        "--shm-size",
        str(options["shm_size"]),
        "--ulimit",
        "core=0",
    ]
    command += ["--cpuset-cpus", job.cpuset] if job.cpuset else []
    command += [word for capability in options["cap_drop"] for word in ("--cap-drop", capability)]
    command += [word for option in options["security_opt"] for word in ("--security-opt", option)]
    command += [word for path, how in options["tmpfs"].items() for word in ("--tmpfs", f"{path}:{how}")]
    command += [word for name, value in options["labels"].items() for word in ("--label", f"{name}={value}")]
    command += [word for name, value in options["environment"].items() for word in ("--env", f"{name}={value}")]
    if job.gpu is not None:
        command += ["--device", f"nvidia.com/gpu={job.gpu}"] if job.cdi else ["--gpus", f"device={job.gpu}"]
    for mount in mounts_of(job):
        read_only = ",readonly" if mount.get("ReadOnly") else ""
        command += ["--mount", f"type=bind,source={mount['Source']},target={mount['Target']}{read_only}"]
    return [*command, job.image, *job.command]
