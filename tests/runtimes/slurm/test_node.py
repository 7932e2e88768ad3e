"""A job on its node, as far as that can be seen without a cluster."""

import tempfile
from pathlib import Path

import pytest

from toto_compat.environments.build_lock import build_lock
from toto_compat.errors import EnvironmentBuildError
from toto_compat.runtimes.slurm.node import node_lock


@pytest.fixture(autouse=True)
def shared_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What every user of a node can write to."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_locks_of_a_node_lie_in_a_folder_of_the_user_alone() -> None:
    folder = node_lock("torch-2.13.0-cpu").parent
    assert folder.stat().st_mode & 0o777 == 0o700
    assert node_lock("torch-2.13.0-cpu").parent == folder


@pytest.mark.parametrize("what", ["a link", "open to others", "a file"])
def test_a_folder_that_somebody_else_prepared_is_not_used(what: str, tmp_path: Path) -> None:
    folder = node_lock("x").parent
    folder.rmdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    match what:
        case "a link":
            folder.symlink_to(elsewhere)
        case "open to others":
            folder.mkdir()
            folder.chmod(0o777)
        case _:
            folder.touch()
    with pytest.raises(EnvironmentBuildError, match="not a folder of this user's alone"):
        node_lock("x")


def test_a_lock_follows_no_link_and_empties_no_file(tmp_path: Path) -> None:
    precious, link = tmp_path / "precious", tmp_path / "x.lock"
    precious.write_text("content")
    link.symlink_to(precious)
    with pytest.raises(OSError, match="symbolic links"), build_lock(link, "x", print):
        pass
    with build_lock(precious, "x", print):
        pass
    assert precious.read_text() == "content"
