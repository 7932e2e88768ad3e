"""An engine for the tests marked `docker`; without one they are skipped, with the command that starts one."""

from collections.abc import Iterator

import docker
import pytest

from tests.runtimes.containers import why_no_engine
from toto_compat.runtimes.engine import open_client


@pytest.fixture(scope="session")
def client() -> Iterator[docker.DockerClient]:
    reason = why_no_engine()
    if reason:
        pytest.skip(reason)
    opened = open_client()
    yield opened
    opened.close()
