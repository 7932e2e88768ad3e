"""Who made a container or volume, and removing those whose maker no longer lives."""

import os
import platform

import docker
import docker.errors
import requests
from docker.models.containers import Container

from toto_compat.environments.engine import LABEL
from toto_compat.evidence.makers import pid_namespace, process_start

RUNNER_LABEL = f"{LABEL}.runner"


def runner_label() -> str:
    """Name this process, so that a later run can tell if it still lives."""
    return f"{platform.node()}:{os.getpid()}:{process_start(os.getpid())}:{pid_namespace()}"


def remove_leftovers(client: docker.DockerClient) -> list[str]:
    """Remove containers and volumes of runners that no longer live on this machine; return their names."""
    removed = []
    for container in client.containers.list(all=True, filters={"label": RUNNER_LABEL}, ignore_removed=True):
        if not runner_lives(container.labels.get(RUNNER_LABEL, "")):
            remove_container(container)
            removed.append(f"container {container.name}")
    for volume in client.volumes.list(filters={"label": RUNNER_LABEL}):
        if not runner_lives((volume.attrs.get("Labels") or {}).get(RUNNER_LABEL, "")):
            try:
                volume.remove()
            except docker.errors.APIError:
                continue  # in use by a container that another run is removing right now
            removed.append(f"volume {volume.name}")
    return removed


def remove_container(container: Container) -> None:
    try:
        container.remove(force=True, v=True)
    except (docker.errors.APIError, requests.exceptions.RequestException):
        return  # gone already; if the engine is lost, the next run finds it by its label


def runner_lives(label: str) -> bool:
    """Tell if the process that made something still runs; assume it where it cannot be asked.

    That is one of another machine, or of another container on this machine, whose process numbers mean others here.
    """
    host, pid, start, namespace = (*label.split(":", 3), "", "", "", "")[:4]
    if host != platform.node() or not pid.isdigit() or (namespace and namespace != pid_namespace()):
        return True
    return process_start(int(pid)) == start
