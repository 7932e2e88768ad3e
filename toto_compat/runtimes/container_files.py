"""How a job's files get into its container and out again: mounted, or copied where the engine has another disk."""

import io
import os
import tarfile
import tempfile
import uuid
from pathlib import Path
from typing import IO, Any

import docker
import docker.errors
import requests
from docker.models.containers import Container
from docker.types import Mount

from toto_compat.environments.engine import LABEL
from toto_compat.environments.leftovers import RUNNER_LABEL, remove_container, runner_label
from toto_compat.errors import EnvironmentBuildError, StorageError
from toto_compat.runtimes.container_options import CELL_FOLDER, INPUT_FOLDER, SOURCE_FOLDER, ContainerJob


def mounts_of(job: ContainerJob) -> list[Mount]:
    """Bind the job's files as mounts, not volumes: a folder the engine does not see is an error, no new empty one."""
    return [
        Mount(CELL_FOLDER, str(job.folder), type="bind"),
        Mount(SOURCE_FOLDER, str(job.source), type="bind", read_only=True),
        # a link is resolved here: its target need not lie where the engine would look for it
        *(Mount(inside, str(path.resolve()), type="bind", read_only=True) for path, inside in job.all_inputs.items()),
    ]


class prepared_files:  # noqa: N801 - a context manager with state, used like a function
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
        """Fill volumes in the place of binds: inputs stay read-only. A container that never starts carries files in."""
        job, client = self._job, self._client
        labels = {LABEL: "volume", RUNNER_LABEL: runner_label()}
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
            remove_container(carrier)
        return mounts

    def _remove_volumes(self) -> None:
        for volume in self._volumes:
            try:
                volume.remove(force=True)
            except (docker.errors.APIError, requests.exceptions.RequestException):
                continue


def _pack(path: Path, name: str, owner: tuple[int, int]) -> bytes:
    """Pack a file or folder under that name, readable by all and owned by `owner`. Links become files."""

    def owned(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid, entry.gid = owner
        entry.mode |= 0o444 | (0o111 if entry.isdir() else 0)
        return entry

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", dereference=True) as archive:
        archive.add(path, name, filter=owned)
    return buffer.getvalue()


def copy_out(container: Container, job: ContainerJob) -> None:
    """Bring what the cell left in its folder back to this machine. The compiler's caches stay where they are."""
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
    """Unpack files and folders only: a link, pipe or device that the cell made has no business on this machine."""
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
