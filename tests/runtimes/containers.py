"""What the container tests share: the small environment's image, and scripts in containers hardened like a cell."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import docker
import pytest

from tests.environments.small_project import SMALL, SMALL_ENVIRONMENT, make_small_project
from toto_compat.contract.request import Device, Limits
from toto_compat.environments.image import ensure_image
from toto_compat.matrix.request import cell_variables
from toto_compat.runtimes.container_end import ContainerEnd
from toto_compat.runtimes.container_options import CELL_FOLDER, PYTHON, ContainerJob, Identity
from toto_compat.runtimes.containers import Containers

SMALL_LIMITS = Limits(cpus=1, memory="192m", shm="32m", tmp="64m", pids=32)


@contextmanager
def small_image(client: docker.DockerClient, folder: Path) -> Iterator[str]:
    """The id of the small environment's image, built from a project in `folder` and removed afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        make_small_project(folder, patch, note=str(folder))
        _, built = ensure_image(client, SMALL, SMALL_ENVIRONMENT, lambda _: None)
    yield str(built.id)
    client.images.remove(str(built.id), force=True)


def job_of(image: str, folder: Path, script: str, **options: object) -> ContainerJob:
    """A Python script in a small container, hardened like a cell."""
    (folder / "script.py").write_text(script)
    source = folder.parent / "source"
    source.mkdir(exist_ok=True)
    settings: dict[str, object] = {
        "limits": SMALL_LIMITS,
        "timeout": 120.0,
        "variables": cell_variables(SMALL_LIMITS, Device.CUDA if options.get("gpu") else Device.CPU),
        **options,
    }
    return ContainerJob(
        image=image,
        command=(PYTHON, f"{CELL_FOLDER}/script.py"),
        folder=folder,
        source=source,
        **settings,  # type: ignore[arg-type]
    )


def identity(uid: int) -> Identity:
    return Identity(uid, uid, os.geteuid(), os.getegid())


def run(client: docker.DockerClient, job: ContainerJob) -> tuple[ContainerEnd, list[str]]:
    lines: list[str] = []
    return Containers(client).run(job, lines.append), lines


def own_containers(client: docker.DockerClient) -> list[str]:
    """Of this process alone: other test workers have theirs."""
    listed = client.containers.list(all=True, filters={"label": "toto-compat.runner"}, ignore_removed=True)
    return [str(one.name) for one in listed if f":{os.getpid()}:" in one.labels["toto-compat.runner"]]
