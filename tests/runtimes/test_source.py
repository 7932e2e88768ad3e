"""Cells run a staged copy of the package's cell side, named by its content."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from toto_compat.errors import StorageError
from toto_compat.evidence.files import cache_folder
from toto_compat.runtimes.source import PACKAGE, CellSource, source_files


def small_package(folder: Path) -> Path:
    package = folder / "toto_compat"
    (package / "cell").mkdir(parents=True)
    (package / "report").mkdir()
    (package / "__init__.py").write_text("")
    (package / "errors.py").write_text("")
    (package / "cell" / "run.py").write_text("A = 1\n")
    (package / "report" / "table.py").write_text("B = 1\n")
    return package


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOTO_COMPAT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_an_edit_after_the_source_was_taken_changes_nothing_in_the_copy(tmp_path: Path) -> None:
    package = small_package(tmp_path)
    source = CellSource(package)
    (package / "cell" / "run.py").write_text("A = 2\n")
    assert (source.folder / "toto_compat" / "cell" / "run.py").read_text() == "A = 1\n"
    assert CellSource(package).hash != source.hash
    assert CellSource(package).folder != source.folder


def test_the_same_source_is_staged_once(tmp_path: Path, cache: Path) -> None:
    package = small_package(tmp_path)
    assert CellSource(package).folder == CellSource(package).folder
    assert len(list((cache / "sources").iterdir())) == 1


def test_taking_a_source_writes_nothing(tmp_path: Path, cache: Path) -> None:
    CellSource(small_package(tmp_path))
    assert not cache.exists()


def test_a_change_of_the_host_side_leaves_the_hash(tmp_path: Path) -> None:
    package = small_package(tmp_path)
    before = CellSource(package).hash
    (package / "report" / "table.py").write_text("B = 2\n")
    assert CellSource(package).hash == before


def test_the_staged_cell_imports_on_its_own(tmp_path: Path) -> None:
    """Whatever the cell imports is staged: the host side is not there to fall back on."""
    staged = CellSource().folder
    environment = {"PYTHONPATH": str(staged), "PATH": os.environ["PATH"]}
    command = [sys.executable, "-c", "import toto_compat.cell.run as run; print(run.__file__)"]
    shown = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith(str(staged))
    assert not any(path.name in ("cli.py", "workflow.py", "gates.py") for path in source_files(PACKAGE))


@pytest.mark.parametrize("damage", ["emptied", "removed", "another"])
def test_a_copy_that_lost_a_file_with_the_power_is_made_anew(tmp_path: Path, cache: Path, damage: str) -> None:
    package = small_package(tmp_path)
    staged = CellSource(package).folder / "toto_compat" / "cell" / "run.py"
    match damage:
        case "emptied":
            staged.write_bytes(b"")
        case "removed":
            staged.unlink()
        case _:
            staged.write_text("B = 1\n")
    assert CellSource(package).folder / "toto_compat" / "cell" / "run.py" == staged
    assert staged.read_text() == "A = 1\n"
    assert len(list((cache / "sources").iterdir())) == 1


def test_what_a_cell_left_beside_its_source_makes_no_other(tmp_path: Path) -> None:
    package = small_package(tmp_path)
    left = CellSource(package).folder / "toto_compat" / "__pycache__"
    left.mkdir()
    assert CellSource(package).folder == left.parent.parent
    assert left.is_dir()


def test_a_cache_folder_that_cannot_be_made_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TOTO_COMPAT_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(StorageError, match="cannot be made") as caught:
        cache_folder()
    assert "TOTO_COMPAT_CACHE" in caught.value.hint
