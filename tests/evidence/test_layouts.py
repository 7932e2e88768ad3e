"""Files of earlier layouts are read, files of later ones refused by name."""

import json
from pathlib import Path

import pytest

from tests.verdict.sample_cells import good_result
from tests.verdict.stored_runs import store_run
from toto_compat.errors import StorageError
from toto_compat.evidence.store import load_run, read_cell

REFERENCE = Path(__file__).parents[2] / "results" / "reference"


def first_cell(folder: Path) -> Path:
    return next((folder / "cells").rglob("*.json"))


def test_a_cell_of_layout_1_is_read_without_its_verdict(tmp_path: Path) -> None:
    folder = store_run(tmp_path, "old", [good_result()])
    path = first_cell(folder)
    before, document = read_cell(path), json.loads(path.read_text(encoding="utf-8"))
    request = document["request"] | {"schema": 1, "environment_name": "e", "mode": "default", "settings_name": "stock"}
    request["profile"] |= {"workload": "quick", "gates": {"speedup": {"min": 3.0}}}
    for name in ("variables", "origin"):
        request.pop(name)
    judged = {"verdict": "PASS", "decided_by": "", "gates": {"speedup": {"status": "PASS"}}}
    path.write_text(json.dumps(document | judged | {"schema": 1, "request": request}), encoding="utf-8")
    assert read_cell(path) == before


def test_a_cell_of_a_later_layout_is_refused_by_name(tmp_path: Path) -> None:
    path = first_cell(store_run(tmp_path, "new", [good_result()]))
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | {"schema": 99}), encoding="utf-8")
    with pytest.raises(StorageError, match="later version of toto-compat") as caught:
        read_cell(path)
    assert str(path) in caught.value.message


@pytest.mark.parametrize("run", sorted(path.parent.name for path in REFERENCE.glob("*/run.json")))
def test_the_committed_runs_load(run: str) -> None:
    loaded = load_run(REFERENCE / run)
    assert loaded.cells
    assert not loaded.unfinished


def test_lengths_in_patches_of_layout_2_are_read_as_points(tmp_path: Path) -> None:
    path = first_cell(store_run(tmp_path, "old", [good_result()]))
    document = json.loads(path.read_text(encoding="utf-8"))
    workload = {
        "model": "base",
        "context_patches": [4, 8],
        "horizon_patches": [2],
        "samples": 64,
        "samples_per_batch": 16,
    }
    document["request"] |= {"schema": 2, "workload": workload}
    path.write_text(json.dumps(document | {"schema": 2}), encoding="utf-8")
    read = read_cell(path).request.workload
    assert (read.context, read.horizon, read.sampling) == ((256, 512), (128,), ("64/16",))


@pytest.mark.parametrize("patches", [[None], ["x"], [{}]])
def test_damaged_lengths_of_layout_2_are_told_as_damage(tmp_path: Path, patches: list[object]) -> None:
    path = first_cell(store_run(tmp_path, "old", [good_result()]))
    document = json.loads(path.read_text(encoding="utf-8"))
    document["request"] |= {"schema": 2, "workload": {"model": "base", "context_patches": patches}}
    path.write_text(json.dumps(document | {"schema": 2}), encoding="utf-8")
    with pytest.raises(StorageError, match=r"request\.workload\.context\.0"):
        read_cell(path)


def test_a_run_that_named_one_workload_of_productions_is_read(tmp_path: Path) -> None:
    folder = store_run(tmp_path, "old", [good_result()])
    info = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    del info["production_workloads"]
    (folder / "run.json").write_text(json.dumps(info | {"production_workload": "base"}), encoding="utf-8")
    assert load_run(folder).info.production_workloads == ("base",)
