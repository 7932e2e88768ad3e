"""docker where an engine answers, else virtualenvs; and opening a runtime changes nothing."""

from pathlib import Path

import docker
import pytest

from toto_compat.contract.request import Device, Limits
from toto_compat.errors import EngineError
from toto_compat.runtimes.open import RuntimeName, open_runtime
from toto_compat.runtimes.seam import Runtime


def opened(name: RuntimeName, said: list[str] | None = None) -> Runtime:
    return open_runtime(name, limits=Limits(), device=Device.CPU, say=said.append if said is not None else None)


@pytest.fixture
def no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")


@pytest.mark.docker
def test_containers_are_used_where_an_engine_answers(client: docker.DockerClient) -> None:
    said: list[str] = []
    assert opened("auto", said).name == "docker"
    assert said == []


@pytest.mark.usefixtures("no_engine")
def test_virtualenvs_are_used_where_none_does_and_that_is_said_once() -> None:
    said: list[str] = []
    assert opened("auto", said).name == "venv"
    assert len(said) == 1
    assert "there is no container engine" in said[0]


@pytest.mark.usefixtures("no_engine")
def test_who_insists_on_containers_is_told_that_there_is_no_engine() -> None:
    with pytest.raises(EngineError, match="there is no container engine"):
        opened("docker")


def test_who_asks_for_virtualenvs_gets_them() -> None:
    assert opened("venv").name == "venv"


@pytest.mark.parametrize("name", ["docker", "venv"])
def test_opening_leaves_nothing(
    name: RuntimeName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if name == "docker":
        request.getfixturevalue("client")  # skips where there is no engine
    monkeypatch.setenv("TOTO_COMPAT_CACHE", str(tmp_path))
    opened(name)
    assert list(tmp_path.iterdir()) == []
