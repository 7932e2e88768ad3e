"""Files of an earlier run of the same name that cannot be read are kept aside and named; whole ones stay."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.verdict.sample_cells import cell_request, good_evidence, provenance
from toto_compat.errors import StorageError
from toto_compat.evidence.store import (
    RunInfo,
    StoredCell,
    cell_path,
    load_run,
    set_damaged_aside,
    write_cell,
    write_run_info,
)

REQUESTS = [cell_request(cache=cache) for cache in ("upstream", "fixed_size")]
CELLS = [request.cell for request in REQUESTS]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "one"
    facts = {"name": "one", "profile": "quick", "runtime": "venv", "executor": "local", "device": "cpu"}
    write_run_info(folder, RunInfo(cells=tuple(CELLS), started="2026-11-16T10:00:00Z", **facts))  # type: ignore[arg-type]
    for request in REQUESTS:
        evidence = good_evidence(request)
        cell = StoredCell(cell=request.cell, request=request, provenance=provenance(request), evidence=evidence)
        write_cell(folder, cell)
    return folder


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def of_a_later_version(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_bytes()), "schema": 99}), encoding="utf-8")


def of_another_cell(path: Path) -> None:
    path.write_bytes(cell_path(path.parents[3], CELLS[1]).read_bytes())


@pytest.mark.parametrize("damage", [truncate, empty, of_a_later_version, of_another_cell])
def test_a_damaged_cell_of_a_run_is_kept_aside_and_named(run: Path, damage: Callable[[Path], None]) -> None:
    path = cell_path(run, CELLS[0])
    damage(path)
    content = path.read_bytes()
    [told] = set_damaged_aside(run, CELLS)
    kept = run / "damaged" / path.relative_to(run)
    assert told.startswith(f"{CELLS[0]}: its file cannot be used; it lies in {kept} now: ")
    assert kept.read_bytes() == content
    assert [cell.cell for cell in load_run(run).cells] == CELLS[1:]


def test_what_is_in_the_place_of_a_cell_is_kept_aside_each_time(run: Path) -> None:
    path = cell_path(run, CELLS[0])
    kept = run / "damaged" / path.relative_to(run)
    for _ in range(2):
        path.unlink(missing_ok=True)
        (path / "folder").mkdir(parents=True)
        assert len(list(set_damaged_aside(run, CELLS))) == 1
        assert (kept / "folder").is_dir()
    for content in (b"{", b"["):
        path.write_bytes(content)
        assert len(list(set_damaged_aside(run, CELLS))) == 1
        assert kept.read_bytes() == content


def test_nothing_is_kept_aside_out_of_the_run(run: Path, tmp_path: Path) -> None:
    another = tmp_path / "another"
    another.mkdir()
    (another / "run.json").write_text("precious", encoding="utf-8")
    (run / "damaged").symlink_to(another, target_is_directory=True)
    truncate(run / "run.json")
    with pytest.raises(StorageError, match="a link, which no run has"):
        list(set_damaged_aside(run, CELLS))
    assert (another / "run.json").read_text(encoding="utf-8") == "precious"


@pytest.mark.parametrize("damage", [truncate, empty, of_a_later_version])
def test_a_damaged_list_of_cells_is_kept_aside_and_the_cells_stay(run: Path, damage: Callable[[Path], None]) -> None:
    damage(run / "run.json")
    [told] = set_damaged_aside(run, CELLS)
    assert told.startswith("the run: its file cannot be used")
    assert (run / "damaged" / "run.json").exists()
    assert all(cell_path(run, cell).exists() for cell in CELLS)


def test_a_whole_run_one_of_an_older_layout_and_none_are_left_alone(run: Path, tmp_path: Path) -> None:
    path = cell_path(run, CELLS[0])
    cell = json.loads(path.read_bytes())
    cell["schema"] = cell["request"]["schema"] = 2
    path.write_text(json.dumps(cell), encoding="utf-8")
    assert list(set_damaged_aside(run, CELLS)) == []
    assert [cell.cell for cell in load_run(run).cells] == CELLS
    assert list(set_damaged_aside(tmp_path / "new", CELLS)) == []
