"""What the container tests share: whether an engine answers, and a small environment whose image takes seconds.

The small environment is built by the real Dockerfile from a real lock; its torch is an empty package. Everything about
builds and containers can be shown with it; tests that need a compiler use the real torch image.
"""

import hashlib
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import pytest

from toto_compat.contract.request import Environment
from toto_compat.environments import image, locks
from toto_compat.environments.engine import open_client
from toto_compat.environments.locks import Lock, LockedPackage, asked_of, format_lock, lock_path
from toto_compat.environments.wheelhouse import wheel_path
from toto_compat.errors import EngineError

REPOSITORY = Path(__file__).parent.parent.parent
START = "docker/engine.sh start && docker/offline-base.sh"
OFFLINE_BASE_PYTHON = "3.11"
SMALL = "torch-9.9.9-cpu-small"
SMALL_ENVIRONMENT = Environment(
    torch="9.9.9", build="cpu", python=OFFLINE_BASE_PYTHON, base_image="registry.invalid/nothing:here"
)


def why_no_engine() -> str:
    """Empty if containers can be run here, else why not and what to do."""
    try:
        client = open_client(timeout=20)
    except EngineError as error:
        return f"{error.message}: `{START}`"
    with_base = client.images.list(
        name="toto-compat-base", filters={"label": f"toto-compat.python={OFFLINE_BASE_PYTHON}"}
    )
    client.close()
    return "" if with_base else f"no offline base image with Python {OFFLINE_BASE_PYTHON}: `docker/offline-base.sh`"


def tiny_wheel(
    folder: Path, name: str, version: str, content: str = "", more: Mapping[str, str] = MappingProxyType({})
) -> Path:
    """A real wheel with one module, and `more` files by their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    module = name.replace("-", "_")
    path = folder / f"{module}-{version}-py3-none-any.whl"
    info = f"{module}-{version}.dist-info"
    files = {
        f"{module}.py": content or f"__version__ = {version!r}\n",
        **more,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(zipfile.ZipInfo(file, (2026, 1, 1, 0, 0, 0)), text)
    return path


def locked(path: Path, layer: str) -> LockedPackage:
    name, version = path.name.split("-")[:2]
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return LockedPackage(name.replace("_", "-"), version, digest, path.name, path.stat().st_size, layer)


def shelve(path: Path, package: LockedPackage) -> None:
    """Put a wheel where `fetch` would."""
    target = wheel_path(package)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(path.read_bytes())


@dataclass(frozen=True)
class SmallProject:
    """A docker/ folder of its own with the project's Dockerfile and the small environment's lock."""

    folder: Path
    lock: Lock


def make_small_project(folder: Path, monkeypatch: pytest.MonkeyPatch, *, note: str = "") -> SmallProject:
    """`note` ends up in a module: another note is another lock and another image."""
    monkeypatch.setenv("TOTO_COMPAT_CACHE", str(folder / "cache"))
    monkeypatch.setattr(locks, "DOCKER_FOLDER", folder)
    monkeypatch.setattr(image, "DOCKER_FOLDER", folder)
    wheels = [
        (tiny_wheel(folder / "made", "toto-ts", "0.2.0"), "toto"),
        (tiny_wheel(folder / "made", "torch", "9.9.9", f"note = {note!r}\n"), "torch"),
    ]
    packages = []
    for path, layer in wheels:
        package = locked(path, layer)
        shelve(path, package)
        packages.append(package)
    lock = Lock(SMALL, OFFLINE_BASE_PYTHON, asked_of(SMALL_ENVIRONMENT), tuple(packages))
    (folder / "locks").mkdir(parents=True, exist_ok=True)
    lock_path(SMALL, folder).write_text(format_lock(lock))
    (folder / "Dockerfile").write_bytes((REPOSITORY / "docker" / "Dockerfile").read_bytes())
    return SmallProject(folder, lock)
