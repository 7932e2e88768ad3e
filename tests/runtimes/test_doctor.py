"""doctor says what is here and gives the command for what is not, whatever the state of the machine."""

import json
from pathlib import Path

import docker
import pytest
from click.testing import CliRunner

from tests.runtimes.stub_runtime import MATRIX_TEXT
from toto_compat.cli import cli
from toto_compat.matrix.load import load_matrix
from toto_compat.runtimes.doctor import Finding, State, examine_docker, examine_environments, what_it_can_run


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "matrix.yaml").write_text(MATRIX_TEXT, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOTO_COMPAT_CACHE", str(tmp_path / "cache"))
    return tmp_path


def findings() -> dict[str, dict[str, str]]:
    result = CliRunner().invoke(cli, ["doctor", "--json"], catch_exceptions=False)
    return {finding["part"]: finding for finding in json.loads(result.stdout)["findings"]}


def test_every_part_is_looked_at() -> None:
    expected = {"C++ compiler", "torch-2.13.0-cpu", "torch-2.9.0-cu128", "disk", "Docker engine", "Slurm", "Chromium"}
    assert expected <= set(findings())


def test_a_bare_machine_gets_a_command_for_each_missing_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    monkeypatch.delenv("CXX", raising=False)
    found = findings()
    missing = {part for part, finding in found.items() if finding["state"] != "ok"}
    assert {"C++ compiler", "Docker engine", "Slurm", "Chromium"} <= missing
    assert all(found[part]["fix"] for part in missing)
    assert found["C++ compiler"]["state"] == "missing"


@pytest.mark.parametrize("host", ["garbage", "tcp://127.0.0.1:abc", "tcp://[::1", "tcp://127.0.0.1:9"])
def test_an_address_where_no_engine_is_gets_a_fix_and_no_ok(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", host)
    engine = examine_docker()
    assert engine.state is State.OPTIONAL
    assert host in engine.found
    assert "DOCKER_HOST" in engine.fix


@pytest.mark.docker
def test_an_engine_that_answers_is_ok_with_its_version(client: docker.DockerClient) -> None:
    engine = examine_docker()
    assert engine.state is State.OK
    assert engine.found.startswith(f"version {client.version()['Version']} at ")


def test_a_python_that_is_missing_matters_only_where_there_are_no_containers(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = MATRIX_TEXT.replace('torch: "2.12.0", build: cpu', 'torch: "2.12.0", build: cpu, python: "3.99"')
    (project / "matrix.yaml").write_text(text, encoding="utf-8")
    matrix = load_matrix(project / "matrix.yaml")

    def state(*, in_containers: bool) -> State:
        found = examine_environments(matrix, in_containers=in_containers)
        return next(finding.state for finding in found if finding.part == "torch-2.12.0-cpu")

    assert state(in_containers=False) is State.MISSING
    assert state(in_containers=True) is State.OPTIONAL


def test_without_a_compiler_the_summary_says_that_nothing_runs() -> None:
    compiler = Finding("C++ compiler", State.MISSING, "none", "install one")
    assert what_it_can_run([compiler]).startswith("no cell can be run")
    assert "in virtualenvs, on cpu" in what_it_can_run([Finding("C++ compiler", State.OK, "g++")])
