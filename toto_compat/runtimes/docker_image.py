"""One image per environment, named by what is in it: Dockerfile, lock, base image. What exists is not built again."""

import configparser
import hashlib
import io
import os
import re
import subprocess
import sys
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

from toto_compat.errors import EnvironmentBuildError, StorageError
from toto_compat.matrix.schema import Environment
from toto_compat.runtimes.engine import (
    LABEL,
    check_disk,
    engine_facts,
    engine_lost,
    is_full_disk,
    labelled_images,
    local_image,
    registry_digest,
)
from toto_compat.runtimes.locks import (
    DOCKER_FOLDER,
    LAYERS,
    Lock,
    LockedPackage,
    read_base_digests,
    read_lock,
    record_base_digest,
)
from toto_compat.runtimes.pythons import find_python
from toto_compat.runtimes.seam import OnLine
from toto_compat.runtimes.source import cache_folder
from toto_compat.runtimes.venv import build_lock, index_answers
from toto_compat.runtimes.wheelhouse import fetch_hint, fetch_wheels, verify_wheels, wheel_path

OFFLINE_BASE = "toto-compat-base"
REPOSITORY = "toto-compat"
_CHUNK = 2**20
_CANCEL_PATIENCE_SECONDS = 30.0
_CANCEL_QUIET_SECONDS = 5.0
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_CHATTER = re.compile(r"\s*--->|Removing intermediate container|Step \d+/\d+ : (?!RUN)")


@dataclass(frozen=True)
class BaseImage:
    """The image an environment is built on, found on the engine."""

    asked: str  # as matrix.yaml names it
    reference: str  # what FROM gets
    identity: str  # registry digest, or the image's id where no registry knows it
    complete: bool  # has python, headers and compiler: no network is needed to prepare it


@dataclass(frozen=True)
class ImagePlan:
    """What the image of an environment is made of."""

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


# --- what it is built on ----------------------------------------------------------------------------------------------


def find_base(client: docker.DockerClient, asked: str, python: str) -> BaseImage | None:
    """The base as far as it is on the engine already: by its pinned digest, by its tag, or the offline base."""
    digest = read_base_digests().get(asked)
    references = [f"{_repository(asked)}@{digest}"] if digest else [asked]
    for reference in references:
        image = local_image(client, reference)
        if image is not None:
            return BaseImage(asked, reference, digest or _identity(image), complete=_is_complete(image, python))
    for image in labelled_images(client, f"{LABEL}=base", name=OFFLINE_BASE):
        if image.labels.get(f"{LABEL}.python") == python and own_tags(image):
            return BaseImage(asked, own_tags(image)[0], str(image.id), complete=True)
    return None


def resolve_base(client: docker.DockerClient, asked: str, python: str, say: OnLine) -> BaseImage:
    """The base, pulled if need be; the first machine that reaches a registry writes its digest down."""
    found = find_base(client, asked, python)
    if found is not None and not found.reference.startswith(OFFLINE_BASE):
        return found
    digest = read_base_digests().get(asked) or registry_digest(client, asked)
    if digest is not None:
        reference = f"{_repository(asked)}@{digest}"
        say(f"pulling {asked} ({digest[:19]})")
        try:
            client.images.pull(reference)
        except (docker.errors.APIError, requests.exceptions.RequestException) as error:
            say(f"{asked} cannot be pulled: {reason_of(error)}")
        else:
            if asked not in read_base_digests():
                record_base_digest(asked, digest)
                say(f"{asked} is pinned now: commit docker/locks/base-images.yaml")
            image = client.images.get(reference)
            return BaseImage(asked, reference, digest, complete=_is_complete(image, python))
    if found is not None:
        say(f"{asked} is not here and no registry answers: using the offline base {found.reference}")
        return found
    raise EnvironmentBuildError(
        f"the base image {asked} is not on the engine and no registry answers",
        hint="`docker/offline-base.sh [SUITE]` makes a base image from Debian packages, where the suite has"
        f" Python {python} (bookworm 3.11, trixie 3.13); `docker/offline-base.sh --python {_own_python(python)}` adds"
        " the one of this machine. Or `docker load` the image from a machine that has it",
    )


def _own_python(minor: str) -> str:
    try:
        return find_python(minor).executable
    except EnvironmentBuildError:
        return f"python{minor}"


def _repository(image: str) -> str:
    """'host:5000/name:tag' -> 'host:5000/name'."""
    head, slash, last = image.partition("@")[0].rpartition("/")
    return f"{head}{slash}{last.partition(':')[0]}"


def own_tags(image: Image) -> list[str]:
    """The names that were given here: an image that somebody built on one of ours inherits its label."""
    return [tag for tag in image.tags if tag.startswith((f"{REPOSITORY}/", f"{OFFLINE_BASE}:"))]


def _identity(image: Image) -> str:
    digests = [digest.partition("@")[2] for digest in image.attrs.get("RepoDigests") or []]
    return digests[0] if digests else str(image.id)


def _is_complete(image: Image, python: str) -> bool:
    return bool(image.labels.get(LABEL) == "base" and image.labels.get(f"{LABEL}.python") == python)


def reason_of(error: Exception) -> str:
    text = getattr(error, "explanation", None) or str(error)
    return str(text).splitlines()[0][:200]


# --- building ---------------------------------------------------------------------------------------------------------


def plan_image(client: docker.DockerClient, name: str, environment: Environment) -> ImagePlan | None:
    """What the image would be, without any network; None if its base is not here yet."""
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
    """The image of an environment, built only if it is not there. Two builders at once: the second waits."""
    lock = read_lock(name, environment)
    base = resolve_base(client, environment.base_image, lock.python, say)
    plan = ImagePlan(name, lock, base, read_dockerfile())
    image = local_image(client, plan.tag)
    if image is not None and not rebuild:
        return plan, image
    folder = cache_folder() / "images"
    folder.mkdir(parents=True, exist_ok=True)
    with build_lock(builder_lock(), name, say):
        image = local_image(client, plan.tag)
        if image is None or rebuild:
            image = _build(client, plan, environment, say, folder / f"{name}.log", rebuild=rebuild, online=online)
    return plan, image


def builder_lock() -> Path:
    """One build at a time: when a build ends its stages are removed, which must not hit those of another."""
    return Path(tempfile.gettempdir()) / f"toto-compat-build-{os.getuid()}.lock"


def disk_needed(lock: Lock) -> int:
    """While it is built: the wheels in a stage, the packages unpacked from them in a stage and in the image."""
    return 2 * 10**9 + lock.download_bytes * 6


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
    check_disk(name, disk_needed(lock), engine_facts(client))
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
        _stream_build(client, plan, tar_stream(_system_context(plan)), {**system, "buildargs": arguments}, log)
        context = tar_stream(_context(plan, environment, online=online))
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
    """What made a build fail, from its last lines."""
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
    """Remove untagged stage images of ours; whether all are gone. One that a build uses right now stays.

    With `quiet`, until none was there for so many seconds: the engine finishes the step at which a build was broken
    off, and what that step made is a stage once more."""
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


# --- the context ------------------------------------------------------------------------------------------------------

Entry = tuple[str, bytes | Path]


def _system_context(plan: ImagePlan) -> Iterator[Entry]:
    yield "Dockerfile", plan.dockerfile


def _context(plan: ImagePlan, environment: Environment, *, online: bool) -> Iterator[Entry]:
    """Dockerfile, locks, and either the wheels or the way to an index."""
    yield "Dockerfile", plan.dockerfile
    settings, certificates = pip_settings(environment.index) if online else ("", b"")
    yield "pip/pip.conf", settings.encode()
    yield "pip/ca.crt", certificates
    for layer in LAYERS:
        packages = plan.lock.layer(layer)
        yield f"{layer}/lock.txt", lock_text(packages)
        if not online:
            for package in packages:
                yield f"{layer}/wheels/{package.file}", wheel_path(package)


def lock_text(packages: Sequence[LockedPackage]) -> bytes:
    return "".join(f"{package.requirement}\n" for package in packages).encode()


def tar_stream(entries: Iterator[Entry]) -> Iterator[bytes]:
    """A tar archive as it is read: gigabytes of wheels go through neither memory nor a temporary file."""
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


def pip_settings(index: str | None = None) -> tuple[str, bytes]:
    """The user's index settings and the environment's `index` as a pip.conf for a build, and the certificates needed.

    Folders of this machine are left out: a build does not see them. So is an `index` that does not answer, for which
    pip would wait once per package."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    ).stdout
    settings: dict[str, str] = {}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        settings[key.rpartition(".")[2]] = value.strip("'\"").replace("\\n", " ")
    if index and index_answers(index):
        settings["extra-index-url"] = f"{settings.get('extra-index-url', '')} {index}"
    kept: dict[str, str] = {}
    for key in ("index-url", "extra-index-url", "trusted-host", "timeout", "default-timeout", "retries"):
        words = [word for word in settings.get(key, "").split() if not word.startswith("file:")]
        if words:
            kept[key] = " ".join(words)
    certificates = b""
    if settings.get("cert"):
        try:
            certificates = Path(settings["cert"]).read_bytes()
        except OSError as error:
            raise EnvironmentBuildError(
                f"pip's certificate bundle {settings['cert']} cannot be read: {error.strerror}",
                hint="correct `pip config get global.cert` or PIP_CERT",
            ) from error
        kept["cert"] = "/build/pip/ca.crt"
    parser = configparser.ConfigParser(interpolation=None)
    parser["global"] = kept
    text = io.StringIO()
    parser.write(text)
    return text.getvalue(), certificates
