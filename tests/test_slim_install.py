"""The built wheel in a fresh virtualenv: slim, enough for a service, and honest about what it lacks."""

import os
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

from toto_compat.cli import OF_THE_EXTRA
from toto_compat.errors import ExitCode

ROOT = Path(__file__).parents[1]


def slim_install(folder: Path) -> Path:
    """The bin folder of a virtualenv with the wheel and its dependencies, nothing else."""
    wheels = folder / "wheels"
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", str(wheels), str(ROOT)]
    subprocess.run(command, check=True, timeout=300)
    (wheel,) = wheels.glob("toto_compat-*.whl")
    venv.create(folder / "venv", with_pip=True)
    subprocess.run([folder / "venv/bin/python", "-m", "pip", "install", "-q", wheel], check=True, timeout=300)
    return folder / "venv" / "bin"


def run(slim: Path, *words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TOTO_"))}
    command: list[str] = [str(slim / words[0]), *words[1:]]
    return subprocess.run(command, cwd=folder, env=kept, capture_output=True, text=True, check=False, timeout=120)


def test_the_extra_of_pyproject_is_what_the_command_line_knows() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = {one.partition(">")[0] for one in project["optional-dependencies"]["matrix"]}
    assert {"yaml" if name == "pyyaml" else name for name in names} == OF_THE_EXTRA


@pytest.mark.slow
def test_the_wheel_installs_slim_serves_and_names_the_extra_that_a_command_lacks(tmp_path: Path) -> None:
    """One test, since the virtualenv takes longer than all that is asked of it."""
    slim = slim_install(tmp_path)
    a_service_imports_production_without_the_extra(slim, tmp_path)
    the_tools_of_production_run(slim, tmp_path)
    for command in ("matrix", "report", "doctor", "bench", "images"):
        shown = run(slim, "toto-compat", command, folder=tmp_path)
        assert shown.returncode == ExitCode.MISSING_EXTRA, command
        assert "pip install 'toto-compat[matrix]'" in shown.stderr
        assert "Traceback" not in shown.stderr


def a_service_imports_production_without_the_extra(slim: Path, folder: Path) -> None:
    script = (
        "import importlib.util, sys; import toto_compat.production; from toto_compat.production import configure\n"
        f"assert not [name for name in {sorted(OF_THE_EXTRA)} if importlib.util.find_spec(name)]\n"
        "print(configure())"
    )
    shown = run(slim, "python", "-c", script, folder=folder)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "torch" in shown.stdout


def the_tools_of_production_run(slim: Path, folder: Path) -> None:
    (folder / "service.log").write_text("torch._dynamo hit config.recompile_limit (8)\n", encoding="utf-8")
    for words, said in (
        (("toggle", "disable"), "compile is off"),
        (("toggle", "status"), "TOTO_DISABLE_COMPILE=1"),
        (("analyze", "service.log"), "recompile"),
        (("lint-env",), "In force"),
        (("--help",), "Can torch.compile be switched back on"),
    ):
        shown = run(slim, "toto-compat", *words, folder=folder)
        assert shown.returncode == 0, (words, shown.stderr)
        assert said in shown.stdout
