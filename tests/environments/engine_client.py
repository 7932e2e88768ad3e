"""An engine for the tests marked `docker`; without one they are skipped, with the command that starts one."""

from collections.abc import Iterator

import docker
import pytest

from tests.environments.small_project import why_no_engine
from toto_compat.environments.engine import open_client


@pytest.fixture(scope="session")
def client() -> Iterator[docker.DockerClient]:
    reason = why_no_engine()
    if reason:
        pytest.skip(reason)
    opened = open_client()
    yield opened
    opened.close()
