"""prune removes what no environment needs, and never what somebody is building."""

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.runtimes.stub_runtime import MATRIX_TEXT
from toto_compat.cli import cli
from toto_compat.environments.build_lock import build_lock
from toto_compat.environments.virtualenv import venv_folder
from toto_compat.evidence.makers import made_on_this_machine
from toto_compat.matrix.load import load_matrix
from toto_compat.runtimes.source import CellSource, read_source, staged_name


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A virtualenv, a source and references in use and outdated; one virtualenv half-built; a dead cell's scratch."""
    (tmp_path / "matrix.yaml").write_text(MATRIX_TEXT, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    cache = tmp_path / "cache"
    monkeypatch.setenv("TOTO_COMPAT_CACHE", str(cache))
    matrix = load_matrix(tmp_path / "matrix.yaml")
    in_use = venv_folder("torch-2.13.0-cpu", matrix.environments["torch-2.13.0-cpu"])
    for folder in (in_use, cache / "venvs/torch-2.1.0-cpu-0123456789", cache / "venvs/.building-x-0123456789-abc"):
        folder.mkdir(parents=True)
        (folder / "content").write_text("x" * 5000)
    in_use.with_name(f"{in_use.name}.log").write_text("log")
    assert CellSource().folder.is_dir()
    (cache / "references" / CellSource().name / "key").mkdir(parents=True)
    unneeded = ("sources/outdated", "s/dead", "references/outdated", "references/.building-references-x")
    for folder in (cache / name for name in unneeded):
        folder.mkdir(parents=True)
    return cache


def prune(*arguments: str) -> str:
    result = CliRunner().invoke(cli, ["prune", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def folders(cache: Path) -> set[str]:
    return {path.name.split("-0")[0] for path in cache.glob("*/*") if path.is_dir()}


def test_only_what_no_environment_needs_is_removed(cache: Path) -> None:
    shown = prune()
    assert "venvs/torch-2.1.0-cpu-0123456789" in shown
    assert "freed" in shown
    remaining = {path.name for path in cache.glob("*/*") if path.is_dir()}
    assert staged_name(read_source()) in remaining
    assert any(name.startswith("torch-2.13.0-cpu-") for name in remaining)
    assert len(remaining) == 2
    assert [path.name for path in (cache / "references").iterdir()] == [CellSource().name]
    assert list((cache / "venvs").glob("*.log"))


def test_a_dry_run_removes_nothing(cache: Path) -> None:
    before = sorted(cache.rglob("*"))
    assert "would free" in prune("--dry-run")
    assert sorted(cache.rglob("*")) == before


def test_all_removes_what_is_in_use_too(cache: Path) -> None:
    prune("--all")
    assert [path for path in cache.glob("*/*") if path.is_dir()] == []


def test_a_virtualenv_that_is_being_built_stays(cache: Path) -> None:
    with build_lock(cache / "venvs" / "x-0123456789.lock", "x", lambda _: None):
        prune("--all")
        assert (cache / "venvs" / ".building-x-0123456789-abc").is_dir()


def test_a_virtualenv_that_another_machine_builds_stays_and_one_of_yesterday_does_not(cache: Path) -> None:
    """Its lock may hold there alone."""
    building = cache / "venvs" / ".building-x-0123456789-00000000.00000000-abc"
    building.mkdir()
    prune("--all")
    assert building.is_dir()
    os.utime(building, (0, 0))
    prune()
    assert not building.exists()


@pytest.mark.parametrize("host", [None, "00000000"], ids=["this one", "a container on this one"])
def test_a_virtualenv_that_is_built_here_is_known_by_its_lock(cache: Path, host: str | None) -> None:
    own, _, boot = made_on_this_machine().strip("-").partition(".")
    building = cache / "venvs" / f".building-x-0123456789-{host or own}.{boot}-abc"
    building.mkdir()
    with build_lock(cache / "venvs" / "x-0123456789.lock", "x", lambda _: None):
        prune("--all")
        assert building.is_dir()
    prune()
    assert not building.exists()


def test_nothing_to_remove_is_said(tmp_path: Path, cache: Path) -> None:
    prune("--all")
    assert "nothing to remove" in prune()
