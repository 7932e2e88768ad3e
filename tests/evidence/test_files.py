"""What counts as written is on disk, its name included; what is in its way is set aside."""

import os
from pathlib import Path

import pytest

from toto_compat.evidence import store as store_module
from toto_compat.evidence.files import set_aside, write_atomically
from toto_compat.evidence.store import CellStore, claimed_run, point_latest
from toto_compat.runtimes.slurm.exchange import exchange_of


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Note what is written to disk, and go without."""
    noted: list[Path] = []

    def fsync(handle: int) -> None:
        noted.append(Path(os.readlink(f"/proc/self/fd/{handle}")))  # noqa: PTH115 - no other way to ask for its name

    monkeypatch.setattr(os, "fsync", fsync)
    return noted


def test_a_file_and_every_folder_above_it_is_synced_before_it_counts_as_written(
    tmp_path: Path, synced: list[Path]
) -> None:
    write_atomically(tmp_path / "a" / "b" / "file.json", "{}")
    [content] = [path for path in synced if path.suffix == ".tmp"]
    assert content.parent == tmp_path / "a" / "b"
    assert [path for path in synced if path != content] == [tmp_path, tmp_path / "a", tmp_path / "a" / "b"]
    assert synced[-1] == tmp_path / "a" / "b"  # the name, after the file got it


def test_a_runs_folder_has_its_name_on_disk_before_anything_is_written_into_it(
    tmp_path: Path, synced: list[Path]
) -> None:
    with claimed_run(tmp_path / "results", "one", "quick"):
        assert synced == [tmp_path, tmp_path / "results"]


def test_the_pointer_to_the_latest_run_is_on_disk(tmp_path: Path, synced: list[Path]) -> None:
    point_latest(tmp_path, "one")
    assert synced == [tmp_path]


def test_the_folders_that_cross_to_nodes_have_their_names_on_disk(tmp_path: Path, synced: list[Path]) -> None:
    """What a node leaves in them is the truth about its cell: it must not go with its folder."""
    exchange = exchange_of(tmp_path)
    exchange.make_folders()
    assert {exchange.folder, tmp_path} <= set(synced)
    assert exchange.folder.stat().st_mode & 0o777 == 0o700


def test_of_two_runners_that_set_the_same_file_aside_the_second_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, key = CellStore(tmp_path), "0" * 64
    store.path(key).parent.mkdir()
    store.path(key).write_text("{")

    def quicker(path: Path, kept: Path) -> None:
        set_aside(path, kept)
        set_aside(path, kept)

    monkeypatch.setattr(store_module, "set_aside", quicker)
    assert "cannot be used and is run again" in store.set_aside(key)
    assert (tmp_path / "damaged" / f"{key}.json").read_text() == "{"
