"""The interpreter an environment names is found wherever it is, or the error says how to get it."""

import sys
from pathlib import Path

import pytest

from toto_compat.environments.pythons import candidate_pythons, find_compiler, find_python, probe_python
from toto_compat.errors import EnvironmentBuildError

RUNNING = f"{sys.version_info[0]}.{sys.version_info[1]}"


def executable(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def says(minor: str, *, headers: bool = True) -> str:
    facts = f'"minor": "{minor}", "version": "{minor}.4", "headers": {str(headers).lower()}, "venv": true'
    return f'echo \'{{"executable": "\'"$0"\'", {facts}}}\''


@pytest.fixture(autouse=True)
def bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No interpreters and no compilers but those a test puts there."""
    monkeypatch.delenv("CXX", raising=False)  # the tests themselves are run with one
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/nowhere")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))


def test_the_running_interpreter_is_taken_where_it_matches() -> None:
    assert find_python(RUNNING).version == ".".join(map(str, sys.version_info[:3]))


def test_a_python_on_the_path_is_found(tmp_path: Path) -> None:
    path = executable(tmp_path / "bin" / "python3.99", says("3.99"))
    assert find_python("3.99").executable == str(path)


def test_a_shim_that_does_not_run_is_passed_over_for_the_newest_of_pyenv(tmp_path: Path) -> None:
    executable(tmp_path / "bin" / "python3.99", "echo 'python3.99: command not found' >&2; exit 127")
    executable(tmp_path / "pyenv/versions/3.99.9/bin/python", says("3.99"))
    newest = executable(tmp_path / "pyenv/versions/3.99.11/bin/python", says("3.99"))
    assert find_python("3.99").executable == str(newest)


def test_the_python_of_uv_is_found(tmp_path: Path) -> None:
    path = executable(tmp_path / "uv-managed" / "python", says("3.99"))
    executable(tmp_path / "bin" / "uv", f"echo {path}")
    assert list(candidate_pythons("3.99")) == [str(path)]
    assert find_python("3.99").executable == str(path)


def test_a_missing_python_says_how_to_get_it() -> None:
    with pytest.raises(EnvironmentBuildError, match=r"Python 3\.99 is not on this machine") as caught:
        find_python("3.99")
    assert "uv python install 3.99" in caught.value.hint


def test_a_python_without_headers_says_which_package_brings_them(tmp_path: Path) -> None:
    executable(tmp_path / "bin" / "python3.99", says("3.99", headers=False))
    with pytest.raises(EnvironmentBuildError, match=r"lacks its headers \(Python.h\)") as caught:
        find_python("3.99")
    assert "python3.99-dev" in caught.value.hint


def test_another_release_under_the_name_is_not_taken(tmp_path: Path) -> None:
    path = executable(tmp_path / "bin" / "python3.99", says("3.98"))
    assert probe_python(str(path), "3.99") is None


def test_the_users_compiler_comes_before_the_usual_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executable(tmp_path / "bin" / "g++", "true")
    own = executable(tmp_path / "bin" / "my-clang++", "true")
    assert find_compiler() == str(tmp_path / "bin" / "g++")
    monkeypatch.setenv("CXX", "my-clang++")
    assert find_compiler() == str(own)
