"""A shell finds what a cell would find, in the runtime that was asked for."""

import json
import shutil
import sys
from pathlib import Path

import docker
import pytest
from click.testing import CliRunner

from tests.environments.small_project import REPOSITORY, SMALL, SMALL_ENVIRONMENT, make_small_project
from tests.runtimes.containers import small_image
from tests.runtimes.stub_runtime import MATRIX_TEXT, StubRuntime, prepared
from toto_compat.contract.request import Device, Environment, Limits
from toto_compat.errors import EngineError, SelectionError
from toto_compat.matrix.request import cell_variables
from toto_compat.runtimes import shell
from toto_compat.runtimes.container_options import invoking_identity
from toto_compat.runtimes.docker import DockerRuntime, check_attachable
from toto_compat.runtimes.seam import AttachedCommand, OnLine, PreparedEnvironment
from toto_compat.runtimes.shell import run_attached, shell_command
from toto_compat.runtimes.source import CellSource


class BuiltRuntime(StubRuntime):
    """Its environments are there, and would fail any check."""

    def build(self, environment_name: str, environment: Environment, say: OnLine) -> PreparedEnvironment:  # noqa: ARG002
        return prepared(environment_name, environment)

    def prepare(self, environment_name: str, environment: Environment, say: OnLine) -> PreparedEnvironment:  # noqa: ARG002
        raise AssertionError("a shell is where one finds out why a probe fails")


@pytest.fixture
def matrix_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOTO_COMPAT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "matrix.yaml").write_text(MATRIX_TEXT, encoding="utf-8")
    return tmp_path / "matrix.yaml"


def test_a_command_runs_in_the_environment_with_a_cells_variables(
    matrix_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def open_stub(name: str, **options: object) -> StubRuntime:
        asked.extend([name, options["device"]])
        return BuiltRuntime()

    monkeypatch.setattr(shell, "open_runtime", open_stub)
    answer = tmp_path / "answer.json"
    look = "[os.getcwd(), sys.executable, dict(os.environ)]"
    script = f"import json, os, sys; json.dump({look}, open({str(answer)!r}, 'w'))"
    arguments = ["torch-2.13.0-cpu", "--runtime", "venv", "--matrix", str(matrix_file), "--", "{python}", "-c", script]
    done = CliRunner().invoke(shell_command, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    assert asked == ["venv", Device.CPU]
    folder, python, variables = json.loads(answer.read_text())
    assert python == sys.executable
    assert cell_variables(Limits(), Device.CPU).items() <= variables.items()
    assert variables["HOME"].startswith(folder)
    assert not Path(folder).exists()  # gone afterwards


def test_the_commands_exit_code_is_the_shells(matrix_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "open_runtime", lambda *_, **__: BuiltRuntime())
    arguments = ["torch-2.13.0-cpu", "--matrix", str(matrix_file), "--", "sh", "-c", "exit 7"]
    assert CliRunner().invoke(shell_command, arguments).exit_code == 7


def test_ctrl_c_is_the_commands_own(tmp_path: Path) -> None:
    # the command sends it to this process, as a terminal sends it to both
    script = "import os, signal; os.kill(os.getppid(), signal.SIGINT)"
    assert run_attached(AttachedCommand((sys.executable, "-c", script), {}, tmp_path)) == 0


def test_an_unknown_environment_is_refused_with_the_names_there_are() -> None:
    run = CliRunner().invoke(shell_command, ["torch-9-cpu", "--matrix", str(REPOSITORY / "matrix.yaml")])
    assert isinstance(run.exception, SelectionError)
    assert "torch-2.13.0-cpu" in run.exception.hint


def test_a_glob_that_names_several_environments_is_refused(matrix_file: Path) -> None:
    run = CliRunner().invoke(shell_command, ["*-cpu", "--matrix", str(matrix_file)])
    assert isinstance(run.exception, SelectionError)
    assert "torch-2.13.0-cpu, torch-2.12.0-cpu" in run.exception.message


@pytest.mark.docker
def test_a_shell_in_a_container_runs_as_a_cell_would(
    client: docker.DockerClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if shutil.which("docker") is None:
        pytest.skip("the docker command is not on PATH: `apt-get install docker.io`")
    with small_image(client, tmp_path / "project"):
        make_small_project(tmp_path / "project", monkeypatch, note=str(tmp_path / "project"))
        runtime = DockerRuntime(CellSource(), limits=Limits(cpus=1, memory="192m"), device=Device.CPU)
        built = runtime.build(SMALL, SMALL_ENVIRONMENT, lambda _: None)
        folder = tmp_path / "folder"
        folder.mkdir()
        script = "import os, toto_compat; print(os.getuid(), os.getcwd(), os.environ['OMP_NUM_THREADS'])"
        command = runtime.attached(built, ("{python}", "-c", script), folder, terminal=False)
        assert run_attached(command) == 0
    assert capfd.readouterr().out == f"{invoking_identity().uid} /toto-compat/cell 1\n"


def test_a_shell_on_an_engine_elsewhere_is_refused_with_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = docker.DockerClient(base_url="tcp://192.0.2.1:2376", version="1.41")  # asks nobody yet
    monkeypatch.setattr(shutil, "which", lambda _: "/usr/bin/docker")
    with pytest.raises(EngineError, match="needs an engine on this machine") as caught:
        check_attachable(elsewhere)
    assert "unset DOCKER_HOST" in caught.value.hint
