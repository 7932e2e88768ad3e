"""doctor says what is here and gives the command for what is not, whatever the state of the machine."""

import json
import socket
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.runtimes.stub_runtime import MATRIX_TEXT
from toto_compat.cli import cli
from toto_compat.runtimes.doctor import Finding, State, _ask_socket, examine_docker, what_it_can_run


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


def test_an_engine_that_answers_is_ok_with_its_version(tmp_path: Path) -> None:
    path = tmp_path / "docker.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1024)
                connection.sendall(b'HTTP/1.0 200 OK\r\n\r\n{"Version": "27.1"}')

        thread = threading.Thread(target=answer)
        thread.start()
        finding = _ask_socket(path)
        thread.join(10)
    assert (finding.state, finding.found) == (State.OK, f"version 27.1 at {path}")


def test_a_socket_nobody_listens_on_is_stale(tmp_path: Path) -> None:
    path = tmp_path / "docker.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
    assert "stale" in _ask_socket(path).found


def test_a_socket_one_may_not_use_names_the_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docker.sock").touch()

    def refuse(_self: socket.socket, _address: str) -> None:
        raise PermissionError

    monkeypatch.setattr("toto_compat.runtimes.doctor.socket.socket.connect", refuse)
    assert "usermod -aG docker" in _ask_socket(tmp_path / "docker.sock").fix


def test_a_remote_engine_that_does_not_answer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:9")
    assert "does not answer" in next(examine_docker()).found


def test_without_a_compiler_the_summary_says_that_nothing_runs() -> None:
    compiler = Finding("C++ compiler", State.MISSING, "none", "install one")
    assert what_it_can_run([compiler]).startswith("no cell can be run")
    assert "in virtualenvs, on cpu" in what_it_can_run([Finding("C++ compiler", State.OK, "g++")])
