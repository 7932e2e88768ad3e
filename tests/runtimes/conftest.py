"""The tests here share one connection to the engine; those of one file share the small image."""

from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from tests.environments.engine_client import client
from tests.runtimes.containers import small_image

__all__ = ["client"]


@pytest.fixture(scope="module")
def image(client: docker.DockerClient, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The small environment's image, for all tests of one file."""
    with small_image(client, tmp_path_factory.mktemp("project")) as built:
        yield built


@pytest.fixture
def cell(tmp_path: Path) -> Path:
    folder = tmp_path / "cell"
    folder.mkdir()
    return folder
