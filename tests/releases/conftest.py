"""An index on loopback that is all pip can see, and a matrix and locks of the test's own."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.releases.local_index import LocalIndex, served, wheel
from toto_compat.environments import locks

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalIndex]:
    for variable in [name for name in os.environ if name.startswith("PIP_") or name.lower().endswith("_proxy")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("TOTO_COMPAT_CACHE", str(tmp_path / "cache"))
    own = LocalIndex()
    own.publish("nvidia_cuda_runtime-13.4.7-py3-none-any.whl", wheel("nvidia-cuda-runtime", "13.4.7"))
    own.publish("triton-3.9.0-py3-none-any.whl", wheel("triton", "3.9.0"))
    own.publish("numpy-1.26.4-py3-none-any.whl", wheel("numpy", "1.26.4"))
    with served(own):
        monkeypatch.setenv("PIP_INDEX_URL", own.simple)
        yield own


@pytest.fixture
def matrix_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the project's matrix and locks; what is added goes there."""
    shutil.copytree(REPOSITORY / "docker" / "locks", tmp_path / "docker" / "locks")
    monkeypatch.setattr(locks, "DOCKER_FOLDER", tmp_path / "docker")
    for python in ("3.11", "3.12"):  # known, so that no registry is asked
        locks.record_base_digest(
            f"python:{python}-slim", f"sha256:{python.replace('.', '') * 32:.64}", tmp_path / "docker"
        )
    return Path(shutil.copy(REPOSITORY / "matrix.yaml", tmp_path / "matrix.yaml"))
