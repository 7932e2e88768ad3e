"""The container engine: reaching it, and saying before an hour is lost why an environment cannot run on it.

Every problem found here is one of the environment or the machine, never evidence against a cache.
"""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import docker.errors
import requests
from docker.models.images import Image
from docker.tls import TLSConfig

from toto_compat.errors import EngineError, EnvironmentBuildError
from toto_compat.matrix.schema import Device, Environment
from toto_compat.runtimes.machine import Gpu

LABEL = "toto-compat"  # on every container, volume and image that is made; its value says what the thing is
NO_ENGINE_NEEDED = "`nox -s matrix -- --runtime venv` needs none"
START_HINT = f"`docker/engine.sh start` installs and starts one on Debian; {NO_ENGINE_NEEDED}"

# From NVIDIA's table of minor version compatibility: a newer minor release of CUDA runs on the same driver.
_MINIMUM_DRIVER = {11: 450, 12: 525, 13: 580}
_CONNECT_SECONDS = 10
_REQUEST_SECONDS = 120


# --- reaching it ------------------------------------------------------------------------------------------------------


@contextmanager
def connect(*, timeout: int = _REQUEST_SECONDS) -> Iterator[docker.DockerClient]:
    """A client for the engine that DOCKER_HOST, DOCKER_CONTEXT or the docker command's current context names."""
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
    """Where the engine is, found as the docker command finds it."""
    host = os.environ.get("DOCKER_HOST")
    if host:
        return host, _tls_from_variables()
    from docker.context import ContextAPI

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
    return TLSConfig(
        client_cert=(str(folder / "cert.pem"), str(folder / "key.pem")),
        ca_cert=str(folder / "ca.pem"),
        verify=bool(os.environ.get("DOCKER_TLS_VERIFY")),
    )


def blame_connection(endpoint: str, error: BaseException) -> EngineError:
    """Why nobody answers, from the chain of errors the SDK wraps it in."""
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
    """The error, what it was raised from, and what urllib3 carries as arguments."""
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
    """An engine that goes away, or refuses what nobody foresaw, is a message and not a traceback."""
    try:
        yield
    except docker.errors.APIError as error:
        raise EngineError(
            f"the engine refuses: {error.explanation or error}", hint="look at the engine's log"
        ) from error
    except requests.exceptions.RequestException as error:
        raise engine_lost(error) from error


def is_lost(error: BaseException) -> bool:
    """Whether an error in the middle of something means that the engine went away."""
    lost = (requests.exceptions.ConnectionError, requests.exceptions.ChunkedEncodingError, ConnectionError)
    return isinstance(error, lost)


def engine_lost(error: BaseException) -> EngineError:
    return EngineError(
        f"the container engine went away in the middle of the run: {error}",
        hint="start it again and run the same command: finished cells are kept",
    )


def is_local(client: docker.DockerClient) -> bool:
    """Whether the engine shares this machine's disk, as far as the address tells (the probe finds out for certain)."""
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
    """Images with a label. Not the SDK's own list, which asks for each and fails if one was removed meanwhile."""
    found = (local_image(client, str(one["Id"])) for one in client.api.images(name=name, filters={"label": label}))
    return [image for image in found if image is not None]


def registry_digest(client: docker.DockerClient, image: str) -> str | None:
    """What a tag stands for in its registry; None where no registry answers."""
    try:
        digest = client.images.get_registry_data(image).id
    except (docker.errors.APIError, requests.exceptions.RequestException):
        return None
    return digest if isinstance(digest, str) and digest.startswith("sha256:") else None


# --- preflight --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EngineFacts:
    """What the engine says about itself, as far as it decides whether cells can run."""

    version: str
    cpus: int
    memory_bytes: int
    runtimes: tuple[str, ...]
    cdi_devices: tuple[str, ...]
    root_folder: str
    free_bytes: int | None  # None: not on this machine
    identity: str = ""
    cdi_folders: tuple[str, ...] = ()  # where it looks for devices; of this machine's only those with GPUs in them

    @property
    def uses_cdi(self) -> bool:
        """GPUs are asked for by their CDI names. Engines before API 1.50 say only where they look for them: those on
        another machine are left to the probe."""
        return "nvidia" not in self.runtimes and bool(self.cdi_devices or self.cdi_folders)


def engine_facts(client: docker.DockerClient) -> EngineFacts:
    info: Mapping[str, Any] = client.info()
    root = str(info.get("DockerRootDir") or "")
    free = shutil.disk_usage(root).free if root and is_local(client) and Path(root).is_dir() else None
    devices = [str(device.get("ID", "")) for device in info.get("DiscoveredDevices") or []]
    return EngineFacts(
        version=str(info.get("ServerVersion") or ""),
        cpus=int(info.get("NCPU") or 1),
        memory_bytes=int(info.get("MemTotal") or 0),
        runtimes=tuple(info.get("Runtimes") or {}),
        cdi_devices=tuple(device for device in devices if device.startswith("nvidia.com/gpu")),
        root_folder=root,
        free_bytes=free,
        identity=str(info.get("ID") or ""),
        cdi_folders=tuple(
            folder for folder in info.get("CDISpecDirs") or () if not is_local(client) or _describes_gpus(Path(folder))
        ),
    )


def _describes_gpus(folder: Path) -> bool:
    """Whether a folder of CDI descriptions, which every recent engine names, has any of NVIDIA's GPUs in it."""
    try:
        found = [path for path in folder.iterdir() if path.suffix in (".yaml", ".json")]
        return any("nvidia.com/gpu" in path.read_text(encoding="utf-8", errors="replace") for path in found)
    except OSError:
        return False


def check_gpu(
    name: str, environment: Environment, device: Device, facts: EngineFacts, gpus: Sequence[Gpu], *, local: bool = True
) -> None:
    """No NVIDIA runtime, driver too old, GPU too old for the wheel: told apart, with the fix. Silent if all is well."""
    if device is not Device.CUDA:
        return
    if "nvidia" not in facts.runtimes and not facts.uses_cdi:
        raise EnvironmentBuildError(
            f"{name}: the engine has no NVIDIA runtime, so containers get no GPU",
            hint="install nvidia-container-toolkit, `nvidia-ctk runtime configure --runtime=docker`, restart it;"
            " or run with --device cpu",
        )
    if not local:
        return  # a remote engine's GPUs are seen by the probe
    if not gpus:
        raise EnvironmentBuildError(
            f"{name}: no NVIDIA GPU answers on this machine", hint="check `nvidia-smi`; or run with --device cpu"
        )
    cuda_major = int(environment.build[2:-1])
    for gpu in gpus:
        minimum = _MINIMUM_DRIVER.get(cuda_major)
        if minimum and int(gpu.driver.partition(".")[0] or 0) < minimum:
            raise EnvironmentBuildError(
                f"{name}: driver {gpu.driver} is too old for {environment.build}: CUDA {cuda_major} needs {minimum}",
                hint=f"update the NVIDIA driver to {minimum} or later, or take an environment with an older CUDA",
            )
        if environment.gpu_architectures and not wheel_runs_on(gpu.architecture, environment.gpu_architectures):
            raise EnvironmentBuildError(
                f"{name}: the wheel has no kernels for {gpu.name} ({gpu.architecture}), only for"
                f" {', '.join(environment.gpu_architectures)}",
                hint="take an environment whose gpu_architectures cover this GPU; this says nothing about any cache",
            )


def wheel_runs_on(gpu: str, wheel: Sequence[str]) -> bool:
    """A GPU runs kernels of its own major version with the same or a lower minor one."""
    major, minor = _capability(gpu)
    return any(_capability(built)[0] == major and _capability(built)[1] <= minor for built in wheel)


def _capability(architecture: str) -> tuple[int, int]:
    digits = "".join(character for character in architecture.removeprefix("sm_") if character.isdigit())
    return int(digits[:-1]), int(digits[-1])


def check_disk(name: str, needed: int, facts: EngineFacts) -> None:
    if facts.free_bytes is not None and facts.free_bytes < needed:
        raise EnvironmentBuildError(
            f"{name}: building its image needs about {needed / 1e9:.0f} GB, the engine's disk ({facts.root_folder}) has"
            f" {facts.free_bytes / 1e9:.1f} GB free",
            hint="`toto-compat images prune` removes what no environment needs; `docker system df` shows the rest",
        )


def is_full_disk(text: str) -> bool:
    return "no space left on device" in text.lower() or "disk quota exceeded" in text.lower()
