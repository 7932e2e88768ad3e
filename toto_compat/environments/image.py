"""One image per environment, named by what is in it: Dockerfile, lock, base image. What exists is not built again."""

import hashlib
import os
import re
import tarfile
import tempfile
import time
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import docker.errors
import requests
import urllib3.exceptions
from docker.models.images import Image

from toto_compat.contract.request import Environment
from toto_compat.environments.base_image import REPOSITORY, BaseImage, find_base, reason_of, resolve_base
from toto_compat.environments.build_context import build_context, system_context, tar_stream
from toto_compat.environments.build_lock import OnLine, build_lock
from toto_compat.environments.engine import LABEL, check_disk, engine_facts, engine_lost, is_full_disk, local_image
from toto_compat.environments.image_contents import read_contents
from toto_compat.environments.locks import DOCKER_FOLDER, Lock, read_lock
from toto_compat.environments.sbom import bill_of_materials, bill_text, image_bill
from toto_compat.environments.wheelhouse import fetch_hint, fetch_wheels, verify_wheels
from toto_compat.errors import EnvironmentBuildError, StorageError, TotoCompatError
from toto_compat.evidence.files import cache_folder, write_atomically
from toto_compat.matrix.toto_source import is_release

_CANCEL_PATIENCE_SECONDS = 30.0
_CANCEL_QUIET_SECONDS = 5.0
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_CHATTER = re.compile(r"\s*--->|Removing intermediate container|Step \d+/\d+ : (?!RUN)")


@dataclass(frozen=True)
class ImagePlan:
    """Holds what the image of an environment is made of."""

    environment_name: str
    lock: Lock
    base: BaseImage
    dockerfile: bytes

    @property
    def identity(self) -> str:
        parts = [self.dockerfile, self.lock.identity.encode(), self.base.identity.encode()]
        return hashlib.sha256(b"\0".join(parts)).hexdigest()

    @property
    def tag(self) -> str:
        return f"{REPOSITORY}/{self.environment_name}:{self.identity[:16]}"

    @property
    def labels(self) -> dict[str, str]:
        return {
            LABEL: "environment",
            f"{LABEL}.environment": self.environment_name,
            f"{LABEL}.identity": self.identity,
            f"{LABEL}.lock": self.lock.identity,
            f"{LABEL}.base": f"{self.base.asked} {self.base.reference} {self.base.identity}",
            f"{LABEL}.torch": self.lock.version_of("torch"),
            f"{LABEL}.python": self.lock.python,
        }


def plan_image(client: docker.DockerClient, name: str, environment: Environment) -> ImagePlan | None:
    """Work out what the image would be, without any network; None if its base is not here yet."""
    lock = read_lock(name, environment)
    base = find_base(client, environment.base_image, lock.python)
    return ImagePlan(name, lock, base, read_dockerfile()) if base else None


def read_dockerfile() -> bytes:
    path = DOCKER_FOLDER / "Dockerfile"
    try:
        return path.read_bytes()
    except OSError as error:
        raise EnvironmentBuildError(
            f"{path}: {error.strerror}",
            hint="images are built from a checkout of the project; `--runtime venv` needs neither",
        ) from error


def ensure_image(
    client: docker.DockerClient,
    name: str,
    environment: Environment,
    say: OnLine,
    *,
    rebuild: bool = False,
    online: bool = False,
) -> tuple[ImagePlan, Image]:
    """Return the image of an environment, built only if it is not there. Two builders at once: the second waits."""
    lock = read_lock(name, environment)
    base = resolve_base(client, environment.base_image, lock.python, say)
    plan = ImagePlan(name, lock, base, read_dockerfile())
    image = local_image(client, plan.tag)
    if image is not None and not rebuild:
        return plan, image
    log = image_log(name)
    log.parent.mkdir(parents=True, exist_ok=True)
    with build_lock(builder_lock(), name, say):
        image = local_image(client, plan.tag)
        if image is None or rebuild:
            image = _build(client, plan, environment, say, log, rebuild=rebuild, online=online)
            _write_bill(client, plan, environment, image, say)
    return plan, image


def _write_bill(
    client: docker.DockerClient, plan: ImagePlan, environment: Environment, image: Image, say: OnLine
) -> None:
    """Write down what is in an image that was just built. An image without its bill is one all the same."""
    try:
        contents = read_contents(client, image, base=plan.base, python=plan.lock.python)
        bill = bill_of_materials(plan.environment_name, environment, plan.lock, contents)
        write_atomically(image_bill(plan.lock), bill_text(bill))
    except (TotoCompatError, docker.errors.APIError, requests.exceptions.RequestException, tarfile.TarError) as error:
        say(f"{plan.environment_name}: its bill of materials cannot be written: {error}")


def image_log(name: str) -> Path:
    return cache_folder() / "images" / f"{name}.log"


def builder_lock() -> Path:
    """Name the lock of all builds: one at a time, because a build that ends removes stages, also those of another."""
    return Path(tempfile.gettempdir()) / f"toto-compat-build-{os.getuid()}.lock"


def disk_needed(download_bytes: int) -> int:
    """Estimate a build's disk: the wheels in a stage, the packages unpacked from them in a stage and in the image."""
    return 2 * 10**9 + download_bytes * 6


def _build(
    client: docker.DockerClient,
    plan: ImagePlan,
    environment: Environment,
    say: OnLine,
    log: Path,
    *,
    rebuild: bool,
    online: bool,
) -> Image:
    name, lock = plan.environment_name, plan.lock
    if online and not is_release(environment.toto_ts):
        raise EnvironmentBuildError(
            f"{name}: its toto-ts is a fork, which no index has",
            hint="build it without --online: the wheel is sent along",
        )
    check_disk(name, disk_needed(lock.download_bytes), engine_facts(client))
    if not online:
        fetch_wheels(lock, environment, say)
        verify_wheels(lock.packages)
    say(f"{name}: building {plan.tag} on {plan.base.reference}; output in {log}")
    started = time.monotonic()
    arguments = {"BASE_IMAGE": plan.base.reference, "PYTHON_VERSION": lock.python}
    if rebuild:
        arguments["REBUILD"] = uuid.uuid4().hex
    # The system stage alone may need a network, for apt: with it in the cache the rest is built without one.
    system = {"target": "system", "nocache": rebuild, "network_mode": "none" if plan.base.complete else None}
    whole = {"tag": plan.tag, "labels": plan.labels, "network_mode": None if online else "none"}
    image: Image | None = None
    broken_off = True
    try:
        log.write_bytes(b"")
        _stream_build(
            client, plan, tar_stream(system_context(plan.dockerfile)), {**system, "buildargs": arguments}, log
        )
        context = tar_stream(build_context(plan.dockerfile, lock, environment, online=online))
        _stream_build(client, plan, context, {**whole, "buildargs": arguments}, log)
        image = client.images.get(plan.tag)
        broken_off = False
    except EnvironmentBuildError:
        broken_off = False
        raise
    except (requests.exceptions.RequestException, urllib3.exceptions.HTTPError, ConnectionError) as error:
        raise engine_lost(error) from error
    except OSError as error:
        raise StorageError(
            f"{log}: cannot be written: {error.strerror}", hint="free space, or set TOTO_COMPAT_CACHE"
        ) from error
    finally:
        # An online build has the user's index settings in its stages, which may hold a password: whatever happened,
        # they go.
        stages = ["stage-torch", *(["stage-toto"] if online else []), *(["stage"] if image is None else [])]
        quiet = _CANCEL_QUIET_SECONDS if online and broken_off else 0.0
        if not drop_stages(client, *stages, quiet=quiet) and online:
            say(f"{name}: stages with your pip settings are still on the engine: `toto-compat images prune`")
    say(f"{name}: image of {image.attrs['Size'] / 1e9:.2f} GB built in {time.monotonic() - started:.0f} s")
    return image


def _stream_build(
    client: docker.DockerClient, plan: ImagePlan, context: Iterator[bytes], options: dict[str, Any], log: Path
) -> None:
    """Send the context, write the output to the log; the engine reports failure as one more event."""
    last: deque[str] = deque(maxlen=12)
    try:
        events = client.api.build(
            fileobj=context,  # type: ignore[arg-type]  # requests streams any iterator of bytes
            custom_context=True,
            rm=True,
            forcerm=True,
            decode=True,
            **options,
        )
        # closed at once if this side breaks off: the engine goes on building until then
        with closing(events), log.open("a", encoding="utf-8") as file:
            for event in events:
                text = _COLOUR.sub("", str(event.get("error") or event.get("stream") or event.get("status") or ""))
                file.write(text)
                file.flush()
                last.extend(line for line in text.splitlines() if line.strip() and not _CHATTER.match(line))
                if "error" in event:
                    raise blame_build(plan, list(last), log)
    except docker.errors.APIError as error:
        if is_full_disk(str(error)):
            raise blame_build(plan, [str(error)], log) from error
        raise EnvironmentBuildError(
            f"{plan.environment_name}: the engine refuses to build: {reason_of(error)}",
            hint=f"check docker/Dockerfile; the output so far is in {log}",
        ) from error


def blame_build(plan: ImagePlan, last: Sequence[str], log: Path) -> EnvironmentBuildError:
    """Say what made a build fail, from its last lines."""
    name, text = plan.environment_name, "\n".join(last)
    if is_full_disk(text):
        return EnvironmentBuildError(
            f"{name}: the engine's disk is full",
            hint="`toto-compat images prune` and `docker system df`; nothing of this build was kept",
        )
    said = [line.removeprefix("toto-compat: ") for line in last if line.startswith("toto-compat: ")]
    if said:
        return EnvironmentBuildError(
            f"{name}: {'; '.join(said)}",
            hint=f"take a base image with Python {plan.lock.python}, or one whose apt mirror can be reached",
        )
    if "DO NOT MATCH THE HASHES" in text:
        message = f"{name}: a wheel does not match the hash in its lock"
    else:
        message = f"{name}: the image could not be built"
    shown = "\n    ".join(line[:300] for line in last)
    advice = f"{fetch_hint(text, name)}; " if "pip" in text else ""
    return EnvironmentBuildError(f"{message}:\n    {shown}", hint=f"{advice}all output is in {log}")


def drop_stages(client: docker.DockerClient, *values: str, quiet: float = 0.0) -> bool:
    """Remove untagged stage images of ours and tell if all are gone. One that a build uses right now stays.

    With `quiet`, go on until none was there for so many seconds: the engine finishes the step at which a build was
    broken off, and what that step made is a stage once more.
    """
    last_seen = time.monotonic()
    deadline = last_seen + _CANCEL_PATIENCE_SECONDS
    while True:
        removed, left = False, False
        for value in values:
            filters = {"dangling": True, "label": f"{LABEL}={value}"}
            try:
                removed |= bool(client.images.prune(filters=filters)["ImagesDeleted"])
                left |= bool(client.api.images(filters=filters, quiet=True))
            except requests.exceptions.RequestException:
                return False
        now = time.monotonic()
        last_seen = now if removed or left else last_seen
        if now - last_seen >= quiet or now >= deadline:
            return not left
        time.sleep(0.5)
