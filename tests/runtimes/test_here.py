"""The runtime `here`: the current interpreter with what is installed in it, and its freeze as the lock."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from toto_compat.environments import here
from toto_compat.environments.here import freeze, freeze_lock, here_environment
from toto_compat.environments.virtualenv import read_built, venv_folder
from toto_compat.errors import EnvironmentBuildError
from toto_compat.matrix.load import load_matrix

ROOT = Path(__file__).parents[2]


def test_the_freeze_names_every_distribution_and_its_hash_is_the_lock() -> None:
    lines = freeze().splitlines()
    assert lines[0].startswith("python==3.")
    assert any(line.startswith("pydantic==") for line in lines)
    assert len(set(lines)) == len(lines) > 10
    assert freeze_lock() == freeze_lock()


def test_without_torch_there_is_nothing_to_test_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(here, "torch_version", lambda: "")
    with pytest.raises(EnvironmentBuildError, match="no torch is installed"):
        here_environment()


@pytest.mark.parametrize(
    ("version", "name"),
    [("2.13.0+cpu", "torch-2.13.0-cpu"), ("2.9.0+cu128", "torch-2.9.0-cu128"), ("2.13.0", "torch-2.13.0-cpu")],
)
def test_the_environment_is_named_as_the_matrix_would(monkeypatch: pytest.MonkeyPatch, version: str, name: str) -> None:
    monkeypatch.setattr(here, "torch_version", lambda: version)
    monkeypatch.setattr(here, "_version", {"toto-ts": "0.2.0"}.get)
    assert here_environment()[0] == name


def test_a_build_that_no_environment_can_name_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(here, "torch_version", lambda: "2.13.0+rocm6.4")
    monkeypatch.setattr(here, "_version", {"toto-ts": "0.2.0"}.get)
    with pytest.raises(EnvironmentBuildError, match="no release that the matrix can name"):
        here_environment()


WITH_THE_HOSTS_PACKAGES = "import sys; sys.path.append(sys.argv.pop(1)); from toto_compat.cli import main; main()"


@pytest.fixture
def torch_python() -> str:
    matrix = load_matrix(ROOT / "matrix.yaml")
    name = "torch-2.13.0-cpu"
    folder = venv_folder(name, matrix.environments[name])
    if read_built(folder) is None:
        pytest.skip(f"{name} is not built: `nox -s tests` builds it")
    return str(folder / "bin" / "python")


@pytest.mark.slow
def test_toggle_test_plans_the_smoke_profile_on_this_interpreter(torch_python: str) -> None:
    """An interpreter that has torch and the command's own packages, as a service's with the extra has."""
    packages = str(Path(sys.executable).parents[1] / f"lib/python3.{sys.version_info.minor}/site-packages")
    words = ["toggle", "test", "--dry-run", "--json", "--device", "cpu"]
    done = subprocess.run(
        [torch_python, "-c", WITH_THE_HOSTS_PACKAGES, packages, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert "torch-2.13.0-cpu/fixed_size/default" in done.stdout
    assert plan
