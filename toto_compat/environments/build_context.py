"""What the engine gets to build an image from: Dockerfile, locks, and either the wheels or the way to an index."""

import io
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from toto_compat.contract.request import Environment
from toto_compat.environments.indexes import pip_settings
from toto_compat.environments.locks import LAYERS, Lock, LockedPackage
from toto_compat.environments.wheelhouse import wheel_path
from toto_compat.errors import EnvironmentBuildError

_CHUNK = 2**20

Entry = tuple[str, bytes | Path]


def system_context(dockerfile: bytes) -> Iterator[Entry]:
    """Yield the files of the system stage, which is the same for every lock."""
    yield "Dockerfile", dockerfile


def build_context(dockerfile: bytes, lock: Lock, environment: Environment, *, online: bool) -> Iterator[Entry]:
    """Yield the files of the whole build."""
    yield "Dockerfile", dockerfile
    settings, certificates = pip_settings(environment.index) if online else ("", b"")
    yield "pip/pip.conf", settings.encode()
    yield "pip/ca.crt", certificates
    for layer in LAYERS:
        packages = lock.layer(layer)
        yield f"{layer}/lock.txt", _lock_text(packages)
        if not online:
            for package in packages:
                yield f"{layer}/wheels/{package.file}", wheel_path(package)


def _lock_text(packages: Sequence[LockedPackage]) -> bytes:
    return "".join(f"{package.requirement}\n" for package in packages).encode()


def tar_stream(entries: Iterator[Entry]) -> Iterator[bytes]:
    """Make a tar archive as it is read: gigabytes of wheels go through neither memory nor a temporary file."""
    for name, content in entries:
        header = tarfile.TarInfo(name)
        header.mode = 0o644
        try:
            header.size = len(content) if isinstance(content, bytes) else content.stat().st_size
            yield header.tobuf(tarfile.GNU_FORMAT)
            with io.BytesIO(content) if isinstance(content, bytes) else content.open("rb") as file:
                while chunk := file.read(_CHUNK):
                    yield chunk
        except OSError as error:
            # left as it is, requests would take it for a broken connection
            raise EnvironmentBuildError(
                f"{content!s} cannot be read: {error.strerror}", hint="`toto-compat fetch` gets missing wheels again"
            ) from error
        yield bytes(-header.size % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)
