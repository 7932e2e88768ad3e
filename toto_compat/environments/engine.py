"""The container engine: reaching it, and saying before an hour is lost why an environment cannot run on it.

Every problem found here is one of the environment or the machine, never evidence against a cache.
"""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import docker.errors
import requests
import yaml
from docker.context import ContextAPI
from docker.models.images import Image
from docker.tls import TLSConfig

from toto_compat.errors import EngineError, EnvironmentBuildError

LABEL = "toto-compat"  # on every container, volume and image that is made; its value says what the thing is
NVIDIA_HOOK = "nvidia-container-runtime-hook"
NO_ENGINE_NEEDED = "`nox -s matrix -- --runtime venv` needs none"
GET_TOOLKIT = (
    "install nvidia-container-toolkit (NVIDIA's package repository), `nvidia-ctk runtime configure --runtime=docker`,"
    " restart the engine"
)
WITHOUT_IT = "`nox -s matrix -- --runtime venv` uses the GPU without it"
START_HINT = f"`docker/engine.sh start` installs and starts one on Debian; {NO_ENGINE_NEEDED}"

_REQUEST_SECONDS = 120


# --- reaching it ------------------------------------------------------------------------------------------------------


@contextmanager
def connect(*, timeout: int = _REQUEST_SECONDS) -> Iterator[docker.DockerClient]:
    """Connect to the engine that DOCKER_HOST, DOCKER_CONTEXT or the docker command's current context names."""
    client = open_client(timeout=timeout)
    try:
        with engine_errors():
            yield client
    finally:
        client.close()


def open_client(*, timeout: int = _REQUEST_SECONDS) -> docker.DockerClient:
    """Connect and ask for the version; EngineError tells no engine, no permission and no answer apart."""
    endpoint, tls = engine_endpoint()
    options: dict[str, Any] = {"timeout": timeout}
    if tls is not None:
        options["tls"] = tls
    if endpoint.startswith("ssh://"):
        # the user's own ssh: its keys, agent and config hold, and paramiko need not be installed
        options["use_ssh_client"] = True
    try:
        # asking for the version is what fails where there is no engine
        return docker.DockerClient(base_url=endpoint, version="auto", **options)
    except (docker.errors.DockerException, requests.exceptions.RequestException, OSError, ValueError) as error:
        raise blame_connection(endpoint, error) from error


def engine_endpoint() -> tuple[str, TLSConfig | bool | None]:
    """Find the engine as the docker command finds it: its address, and TLS settings if it needs them."""
    host = os.environ.get("DOCKER_HOST")
    if host:
        return host, _tls_from_variables()
    name = os.environ.get("DOCKER_CONTEXT")
    try:
        context = ContextAPI.get_context(name) if name else ContextAPI.get_current_context()
    except (docker.errors.DockerException, OSError, ValueError) as error:
        raise EngineError(
            f"the docker context cannot be read: {error}", hint="`docker context ls` shows them"
        ) from error
    if context is None:
        raise EngineError(f"there is no docker context {name!r}", hint="`docker context ls` shows those that are there")
    host = getattr(context, "Host", None) or "unix:///var/run/docker.sock"
    return ("unix:///var/run/docker.sock" if host.startswith("http+unix") else host), context.TLSConfig


def _tls_from_variables() -> TLSConfig | None:
    if not os.environ.get("DOCKER_TLS_VERIFY") and not os.environ.get("DOCKER_CERT_PATH"):
        return None
    folder = Path(os.environ.get("DOCKER_CERT_PATH") or Path.home() / ".docker")
    try:
        return TLSConfig(
            client_cert=(str(folder / "cert.pem"), str(folder / "key.pem")),
            ca_cert=str(folder / "ca.pem"),
            verify=bool(os.environ.get("DOCKER_TLS_VERIFY")),
        )
    except docker.errors.TLSParameterError as error:
        raise EngineError(
            f"{folder}: no cert.pem, key.pem and ca.pem there, which the engine is to be asked with",
            hint="correct DOCKER_CERT_PATH, or unset it and DOCKER_TLS_VERIFY",
        ) from error


def blame_connection(endpoint: str, error: BaseException) -> EngineError:
    """Say why nobody answers, from the chain of errors the SDK wraps it in."""
    causes = list(_causes(error))
    if any(isinstance(cause, PermissionError) for cause in causes):
        return EngineError(
            f"no permission to use the engine at {endpoint}",
            hint=f"`sudo usermod -aG docker $USER` and log in again; {NO_ENGINE_NEEDED}",
        )
    if any(isinstance(cause, FileNotFoundError) for cause in causes):
        return EngineError(f"there is no container engine at {endpoint}", hint=START_HINT)
    if endpoint.startswith("unix:") and any(isinstance(cause, ConnectionRefusedError) for cause in causes):
        return EngineError(
            f"the engine at {endpoint} is not running (its socket is there, nobody answers)", hint=START_HINT
        )
    return EngineError(
        f"the engine at {endpoint} does not answer: {causes[-1]}",
        hint="check DOCKER_HOST and `docker context ls`; `docker version` shows the same problem",
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, what it was raised from, and what urllib3 carries as arguments."""
    seen: set[int] = set()
    queue: list[object] = [error]
    while queue:
        cause = queue.pop(0)
        if isinstance(cause, BaseException) and id(cause) not in seen:
            seen.add(id(cause))
            yield cause
            queue += [cause.__cause__, cause.__context__, getattr(cause, "reason", None), *cause.args]


@contextmanager
def engine_errors() -> Iterator[None]:
    """Make a message, not a traceback, of an engine that goes away or refuses what nobody foresaw."""
    try:
        yield
    except docker.errors.APIError as error:
        raise EngineError(
            f"the engine refuses: {error.explanation or error}", hint="look at the engine's log"
        ) from error
    except requests.exceptions.RequestException as error:
        raise engine_lost(error) from error


def is_lost(error: BaseException) -> bool:
    """Tell if an error in the middle of something means that the engine went away."""
    lost = (requests.exceptions.ConnectionError, requests.exceptions.ChunkedEncodingError, ConnectionError)
    return isinstance(error, lost)


def engine_lost(error: BaseException) -> EngineError:
    return EngineError(
        f"the container engine went away in the middle of the run: {error}",
        hint="start it again and run the same command: finished cells are kept",
    )


def is_local(client: docker.DockerClient) -> bool:
    """Tell if the engine shares this machine's disk, as far as its address shows (the probe finds out for certain)."""
    return bool(client.api.base_url == "http+docker://localhost")


# --- images and registries --------------------------------------------------------------------------------------------


def local_image(client: docker.DockerClient, name: str) -> Image | None:
    try:
        return client.images.get(name)
    except docker.errors.ImageNotFound:
        return None
    except (docker.errors.APIError, docker.errors.NullResource) as error:
        if isinstance(error, docker.errors.APIError) and error.is_server_error():
            raise EngineError(
                f"the engine cannot say whether it has {name}: {error.explanation}", hint="look at the engine's log"
            ) from error
        raise EnvironmentBuildError(
            f"the engine refuses the image name {name!r}: {getattr(error, 'explanation', error)}",
            hint="correct the environment's `base_image` in matrix.yaml; an image is named like python:3.11-slim",
        ) from error


def labelled_images(client: docker.DockerClient, label: str, *, name: str | None = None) -> list[Image]:
    """List images with a label. The SDK's own list asks for each and fails if one was removed meanwhile."""
    images = (local_image(client, str(one["Id"])) for one in client.api.images(name=name, filters={"label": label}))
    return [image for image in images if image is not None]


def registry_digest(client: docker.DockerClient, image: str) -> str | None:
    """Ask a registry what a tag stands for; None where no registry answers."""
    try:
        digest = client.images.get_registry_data(image).id
    except (docker.errors.APIError, requests.exceptions.RequestException):
        return None
    return digest if isinstance(digest, str) and digest.startswith("sha256:") else None


# --- preflight --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EngineFacts:
    """Holds what the engine says about itself, as far as it decides whether cells can run."""

    version: str
    cpus: int
    runtimes: tuple[str, ...]
    cdi_devices: tuple[str, ...]
    root_folder: str
    free_bytes: int | None  # None: not on this machine
    identity: str = ""
    cdi_folders: tuple[str, ...] = ()  # where it looks for devices; of this machine's only those with GPUs in them
    local: bool = True  # on this machine
    hook: bool = False  # NVIDIA's hook is installed on this machine: an engine started since then hands out GPUs

    @property
    def uses_cdi(self) -> bool:
        """Tell if GPUs are asked for by their CDI names.

        Engines before API 1.50 say only where they look for them: those on another machine are left to the probe.
        """
        return "nvidia" not in self.runtimes and bool(self.cdi_devices or self.cdi_folders)

    def cdi_name(self, *names: str) -> str:
        """Return a GPU's whole CDI name by the first of its names that a description has; older ones have no UUIDs."""
        known = (name for name in names if f"nvidia.com/gpu={name}" in self.cdi_devices)
        return f"nvidia.com/gpu={next(known, names[0])}"


def engine_facts(client: docker.DockerClient) -> EngineFacts:
    info: Mapping[str, Any] = client.info()
    root = str(info.get("DockerRootDir") or "")
    free = shutil.disk_usage(root).free if root and is_local(client) and Path(root).is_dir() else None
    devices = [str(device.get("ID", "")) for device in info.get("DiscoveredDevices") or []]
    folders = [str(folder) for folder in info.get("CDISpecDirs") or ()]
    if is_local(client):
        described = {folder: _described_gpus(Path(folder)) for folder in folders}
        folders = [folder for folder in folders if described[folder]]
        devices += [device for folder in folders for device in described[folder] if device not in devices]
    return EngineFacts(
        version=str(info.get("ServerVersion") or ""),
        cpus=int(info.get("NCPU") or 1),
        runtimes=tuple(info.get("Runtimes") or {}),
        cdi_devices=tuple(device for device in devices if device.startswith("nvidia.com/gpu")),
        root_folder=root,
        free_bytes=free,
        identity=str(info.get("ID") or ""),
        cdi_folders=tuple(folders),
        local=is_local(client),
        hook=is_local(client) and shutil.which(NVIDIA_HOOK) is not None,
    )


def _described_gpus(folder: Path) -> list[str]:
    """List NVIDIA's GPUs in a folder of CDI descriptions, by their whole names: nvidia.com/gpu=GPU-5c89852c-..."""
    found: list[str] = []
    try:
        files = [path for path in folder.iterdir() if path.suffix in (".yaml", ".json")]
        texts = [path.read_text(encoding="utf-8", errors="replace") for path in files]
    except OSError:
        return []
    for text in texts:
        try:
            description = yaml.safe_load(text)  # JSON is YAML
        except yaml.YAMLError:
            continue
        if isinstance(description, dict) and description.get("kind") == "nvidia.com/gpu":
            devices = description.get("devices") or ()
            found += [f"nvidia.com/gpu={one['name']}" for one in devices if isinstance(one, dict) and "name" in one]
    return found


def check_hands_out_gpus(name: str, facts: EngineFacts) -> None:
    """Refuse an engine whose containers get no GPU, as far as that shows: one on another machine is left to the probe.

    An engine that found NVIDIA's hook on its PATH when it started says so nowhere, and hands out GPUs all the same.
    """
    if "nvidia" not in facts.runtimes and not facts.uses_cdi and facts.local and not facts.hook:
        raise EnvironmentBuildError(
            f"{name}: the engine has no NVIDIA runtime, so containers get no GPU", hint=f"{GET_TOOLKIT}; {WITHOUT_IT}"
        )


def check_disk(name: str, needed: int, facts: EngineFacts) -> None:
    if facts.free_bytes is not None and facts.free_bytes < needed:
        raise EnvironmentBuildError(
            f"{name}: building its image needs about {needed / 1e9:.0f} GB, the engine's disk ({facts.root_folder}) has"
            f" {facts.free_bytes / 1e9:.1f} GB free",
            hint="`toto-compat images prune` removes what no environment needs; `docker system df` shows the rest",
        )


def is_full_disk(text: str) -> bool:
    return "no space left on device" in text.lower() or "disk quota exceeded" in text.lower()
