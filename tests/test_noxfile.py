"""The noxfile as nox sees it: the sessions it lists, and what it does where it cannot read matrix.yaml."""

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent

pytest.importorskip("nox", reason="nox is not installed here: `nox -s tests` brings it")


def list_sessions(
    root: Path, *, without_yaml: bool = False, limit: Callable[[], None] | None = None
) -> subprocess.CompletedProcess[str]:
    """`nox -l` in this interpreter: script mode off, so that nothing is installed by a test."""
    forbid_yaml = "import sys; sys.modules['yaml'] = None; " if without_yaml else ""
    program = f"{forbid_yaml}import nox; nox.main()"
    command = [sys.executable, "-c", program, "-f", str(root / "noxfile.py"), "-l"]
    variables = os.environ | {"NOX_SCRIPT_MODE": "none", "NO_COLOR": "1"}
    return subprocess.run(
        command, cwd=root, env=variables, capture_output=True, text=True, check=False, preexec_fn=limit
    )


@pytest.fixture
def copied_project(tmp_path: Path) -> Path:
    for name in ("noxfile.py", "pyproject.toml", "matrix.yaml"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def test_the_sessions_of_the_documentation_are_listed() -> None:
    listed = list_sessions(ROOT).stdout
    missing = [
        name
        for name in ("matrix", "tests", "lint", "bench", "release_check", "lock", "repro", "reference", "docs")
        if f" {name} " not in listed
    ]
    assert missing == []


def test_every_environment_of_the_matrix_file_has_a_cell_session() -> None:
    environments = yaml.safe_load((ROOT / "matrix.yaml").read_text(encoding="utf-8"))["environments"]
    listed = list_sessions(ROOT).stdout
    missing = [name for name in environments if f"cell({name})" not in listed]
    assert missing == []


def test_an_environment_added_to_the_matrix_file_gets_a_session(copied_project: Path) -> None:
    matrix_file = copied_project / "matrix.yaml"
    matrix = yaml.safe_load(matrix_file.read_text(encoding="utf-8"))
    matrix["environments"]["torch-2.99.1-cu130"] = {"torch": "2.99.1", "build": "cu130"}
    matrix_file.write_text(yaml.safe_dump(matrix), encoding="utf-8")
    assert "cell(torch-2.99.1-cu130)" in list_sessions(copied_project).stdout


def little() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (700 << 20, 700 << 20))
    resource.setrlimit(resource.RLIMIT_CPU, (20, 20))


def test_a_yaml_bomb_in_the_matrix_file_costs_neither_memory_nor_time(copied_project: Path) -> None:
    """It is read for the names of sessions before anything checks it, on every `nox -s matrix`."""
    merged = [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 10)]
    bomb = "".join(["a0: &a0 {k: x}\n", *merged, "environments: {torch-2.13.0-cpu: {<<: *a9}}\n"])
    (copied_project / "matrix.yaml").write_text(bomb, encoding="utf-8")
    shown = list_sessions(copied_project, limit=little)
    assert shown.returncode == 0, shown.stderr
    assert "cell(torch-2.13.0-cpu)" in shown.stdout


@pytest.mark.parametrize(
    "content", ["environments: [", "[]", "", "schema: 1\n", "environments: 3\n", "environments: [a]\n", "[" * 10_000]
)
def test_a_broken_matrix_file_leaves_the_other_sessions(copied_project: Path, content: str) -> None:
    (copied_project / "matrix.yaml").write_text(content, encoding="utf-8")
    shown = list_sessions(copied_project)
    assert shown.returncode == 0
    assert "* matrix" in shown.stdout
    assert "`nox -s matrix` says why" in shown.stderr


def test_without_pyyaml_the_matrix_session_stays_and_the_way_out_is_named(copied_project: Path) -> None:
    shown = list_sessions(copied_project, without_yaml=True)
    assert shown.returncode == 0
    assert "* matrix" in shown.stdout
    assert "pip install pyyaml" in shown.stderr
