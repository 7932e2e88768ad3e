"""Runs of several machines become one: every cell once, by one matrix, with its origin; or an error and nothing."""

import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.verdict.sample_cells import GATES, good_result, with_figures
from tests.verdict.stored_runs import store_run
from toto_compat.cli import cli
from toto_compat.contract.gate_limit import GateLimit
from toto_compat.contract.request import Device
from toto_compat.contract.result import Failure
from toto_compat.errors import InputError, SelectionError, StorageError, TotoCompatError
from toto_compat.evidence.merging import Merged
from toto_compat.evidence.store import cell_path, load_run, read_cell
from toto_compat.fleet import run_sources
from toto_compat.fleet.merge import merge_into
from toto_compat.fleet.run_sources import runs_of
from toto_compat.matrix.gates import Gate

EARLIER, LATER = "2026-11-16T10:00:00Z", "2026-11-16T12:00:00Z"


def merge(results: Path, *sources: str, conflicts: str = "newest") -> Merged:
    return merge_into(results, "all", sources, conflicts=conflicts)[1]


def error_of(kind: type[TotoCompatError], results: Path, *sources: str, conflicts: str = "newest") -> str:
    with pytest.raises(kind) as error:
        merge(results, *sources, conflicts=conflicts)
    return str(error.value)


@pytest.fixture
def machines(tmp_path: Path) -> Path:
    """Two machines' results: other environments, one cell in both."""
    store_run(
        tmp_path / "a", "one", [good_result(torch="2.9.0", build="cu128"), good_result(torch="2.13.0")], started=EARLIER
    )
    store_run(
        tmp_path / "b",
        "two",
        [good_result(torch="2.15.0"), good_result(torch="2.13.0", cache="upstream")],
        started=LATER,
    )
    return tmp_path


def changed(path: Path, **fields: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | fields), encoding="utf-8")


def test_cells_of_all_runs_are_judged_as_one_run(machines: Path) -> None:
    arguments = ["merge", str(machines / "a" / "one"), str(machines / "b" / "two"), "--run", "all"]
    done = CliRunner().invoke(cli, [*arguments, "--results", str(machines)])
    assert done.exit_code == 0, done.output
    assert "2 cells from one" in done.stderr
    rows = json.loads((machines / "all" / "compatibility.json").read_text(encoding="utf-8"))["rows"]
    assert [row["environment"] for row in rows] == [
        "torch-2.13.0-cpu",
        "torch-2.13.0-cpu",
        "torch-2.15.0-cpu",
        "torch-2.9.0-cu128",
    ]
    assert (machines / "latest").resolve() == (machines / "all").resolve()


def test_every_cell_keeps_its_origin(machines: Path) -> None:
    merge(machines, str(machines / "a"), str(machines / "b"))
    run = load_run(machines / "all")
    assert {one.name: len(one.cells) for one in run.info.merged} == {"one": 2, "two": 2}
    assert {stored.ran_in for stored in run.cells} == {"one", "two"}
    before = read_cell(cell_path(machines / "b" / "two", "torch-2.15.0-cpu/fixed_size/default"))
    after = read_cell(cell_path(machines / "all", "torch-2.15.0-cpu/fixed_size/default"))
    assert after == before.model_copy(update={"ran_in": "two"})


def test_of_two_results_of_a_cell_the_one_that_ran_last_is_taken(tmp_path: Path) -> None:
    store_run(tmp_path / "a", "old", [good_result()], started=LATER)
    store_run(tmp_path / "b", "new", [with_figures(good_result(), {Gate.SPEEDUP: 9.0})], started="2026-11-16T13:00:00Z")
    for order in (("a/old", "b/new"), ("b/new", "a/old")):
        results = tmp_path / order[0].replace("/", "-")
        merged = merge(results, *(str(tmp_path / one) for one in order))
        assert any("taken from new: it ran last" in note for note in merged.notes)
        (kept,) = load_run(results / "all").cells
        assert kept.ran_in == "new"
        told = {one.name: one.left_out for one in load_run(results / "all").info.merged}
        assert list(told["old"]) == [kept.cell]


def test_a_cell_that_ran_is_taken_before_a_newer_one_that_could_not_be_run(tmp_path: Path) -> None:
    crashed = good_result().model_copy(update={"failure": Failure(kind="crash", message="no memory"), "evidence": {}})
    store_run(tmp_path, "ran", [good_result()], started=EARLIER)
    store_run(tmp_path, "crashed", [crashed], started=LATER)
    merge(tmp_path, "crashed", "ran")
    assert load_run(tmp_path / "all").cells[0].ran_in == "ran"


def test_two_different_results_are_an_error_where_that_is_asked_for(tmp_path: Path) -> None:
    store_run(tmp_path, "old", [good_result()], started=EARLIER)
    store_run(tmp_path, "new", [good_result()], started=LATER)
    told = error_of(InputError, tmp_path, "old", "new", conflicts="error")
    assert "torch-2.13.0-cpu/fixed_size/default" in told
    assert not (tmp_path / "all").exists()


def test_the_same_result_twice_is_no_conflict(tmp_path: Path) -> None:
    store_run(tmp_path, "run", [good_result()])
    store_run(tmp_path, "copy", [good_result()])
    merged = merge(tmp_path, "run", "copy", conflicts="error")
    assert (len(merged.cells), merged.notes) == (1, ())


def test_different_results_of_one_moment_are_refused(tmp_path: Path) -> None:
    store_run(tmp_path, "run", [good_result()])
    store_run(tmp_path, "changed", [with_figures(good_result(), {Gate.SPEEDUP: 9.0})])
    assert "was changed" in error_of(InputError, tmp_path, "run", "changed")


def test_a_row_of_the_cpu_and_one_of_cuda_do_not_share_a_name(tmp_path: Path) -> None:
    store_run(tmp_path, "gpu", [good_result(torch="2.9.0", build="cu128")], device="cuda")
    store_run(tmp_path, "cpu", [good_result(torch="2.9.0", build="cu128", device=Device.CPU)])
    assert "one device at a time" in error_of(InputError, tmp_path, "gpu", "cpu")


def test_another_limit_of_a_gate_is_named(tmp_path: Path) -> None:
    store_run(tmp_path, "one", [good_result()])
    other = store_run(
        tmp_path, "two", [good_result(cache="upstream")], gates={**GATES, Gate.SPEEDUP: GateLimit(min=1.0)}
    )
    changed(other / "run.json", matrix_hash="another")
    told = error_of(InputError, tmp_path, "one", "two")
    assert "gates.speedup: {'min': 2.0} and {'min': 1.0}" in told
    assert not (tmp_path / "all").exists()


def test_another_pin_of_the_same_environment_is_named(tmp_path: Path) -> None:
    store_run(tmp_path, "one", [good_result()])
    other = store_run(tmp_path, "two", [good_result(cache="upstream")])
    changed(other / "run.json", matrix_hash="another")
    file = cell_path(other, "torch-2.13.0-cpu/upstream/default")
    document = json.loads(file.read_text(encoding="utf-8"))
    document["request"]["environment"]["pins"] = {"numpy": "2.0.0"}
    file.write_text(json.dumps(document), encoding="utf-8")
    told = error_of(InputError, tmp_path, "one", "two")
    assert "environment torch-2.13.0-cpu: pins: {} and {'numpy': '2.0.0'}" in told


def test_of_two_long_lists_only_what_differs_is_shown(tmp_path: Path) -> None:
    workloads = tuple(f"workload-{number}" for number in range(20))
    one = store_run(tmp_path, "one", [good_result()])
    other = store_run(tmp_path, "two", [good_result(cache="upstream")])
    changed(one / "run.json", production_workloads=workloads)
    changed(other / "run.json", production_workloads=(*workloads[:-1], "mine"), matrix_hash="another")
    told = error_of(InputError, tmp_path, "one", "two")
    assert "production_workloads: workload-19 in one and mine in the other" in told


def test_a_matrix_that_only_has_more_releases_is_told_and_merged(tmp_path: Path) -> None:
    store_run(tmp_path, "one", [good_result()])
    other = store_run(tmp_path, "two", [good_result(torch="2.15.0")])
    changed(other / "run.json", matrix_hash="another", releases=["2.16.0"])
    merged = merge(tmp_path, "one", "two")
    assert "differs from that of one in releases 2.16.0" in merged.notes[0]
    assert load_run(tmp_path / "all").info.matrix_hash == ""


def test_a_zipped_artifact_is_merged_and_leaves_nothing_behind(machines: Path) -> None:
    artifact = machines / "artifact.zip"
    with zipfile.ZipFile(artifact, "w") as packed:
        for file in (machines / "b").rglob("*.json"):
            packed.write(file, file.relative_to(machines / "b"))
    merge(machines, str(machines / "a" / "one"), str(artifact))
    assert len(load_run(machines / "all").cells) == 4
    assert not list(machines.glob(".merging-*"))


def replaced_by_a_link(file: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


HOSTILE: dict[str, tuple[Callable[[Path], object], type[TotoCompatError], str]] = {
    "no JSON": (lambda file: file.write_text("{", encoding="utf-8"), StorageError, "not a valid StoredCell file"),
    "nested too deeply": (lambda file: file.write_text("[" * 200_000, encoding="utf-8"), StorageError, ""),
    "of another cell": (
        lambda file: file.write_text(file.read_text(encoding="utf-8").replace("2.13.0-cpu/", "2.12.0-cpu/")),
        StorageError,
        "holds a result of torch-2.12.0-cpu",
    ),
    "a link": (replaced_by_a_link, StorageError, "a link, which no run has"),
    "too large": (lambda file: os.truncate(file, 65 * 1024**2), InputError, "no run writes files that large"),
}


@pytest.mark.parametrize("name", list(HOSTILE))
def test_a_damaged_or_hostile_cell_file_is_named_and_nothing_is_written(tmp_path: Path, name: str) -> None:
    damage, kind, told = HOSTILE[name]
    store_run(tmp_path, "good", [good_result(cache="upstream")])
    file = cell_path(store_run(tmp_path, "bad", [good_result()]), "torch-2.13.0-cpu/fixed_size/default")
    damage(file)
    message = error_of(kind, tmp_path, "good", "bad")
    assert told in message
    assert "bad" in message or name == "nested too deeply"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["bad", "good"]


@pytest.mark.parametrize("name", ["../../../etc/passwd", "torch/..\\x/default", ".hidden/x/y"])
def test_a_cell_name_that_leaves_its_run_is_refused(tmp_path: Path, name: str) -> None:
    folder = store_run(tmp_path, "bad", [good_result()])
    changed(folder / "run.json", cells=[name])
    with pytest.raises((InputError, StorageError)):
        merge(tmp_path, "bad")
    assert not (tmp_path / "all").exists()


def test_an_archive_that_leaves_its_folder_is_refused(tmp_path: Path) -> None:
    artifact = tmp_path / "artifact.zip"
    with zipfile.ZipFile(artifact, "w") as packed:
        packed.writestr("../outside/run.json", "{}")
    assert "outside of its folder" in error_of(InputError, tmp_path, str(artifact))
    assert sorted(one.name for one in tmp_path.iterdir()) == ["artifact.zip"]


def test_an_archive_of_more_files_than_runs_have_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_sources, "_MOST_FILES", 10)
    artifact = tmp_path / "artifact.zip"
    with zipfile.ZipFile(artifact, "w") as packed:
        for number in range(11):
            packed.writestr(zipfile.ZipInfo(f"{number}.json"), b"")
    assert "unpacks to 11 files" in error_of(InputError, tmp_path, str(artifact))
    assert sorted(one.name for one in tmp_path.iterdir()) == ["artifact.zip"]


def test_what_lies_deeper_in_an_archive_than_any_run_is_not_unpacked(tmp_path: Path) -> None:
    """One open file for every folder in the other: more of them than a process may have could not be removed again."""
    artifact, scratch = tmp_path / "artifact.zip", tmp_path / "scratch"
    scratch.mkdir()
    with zipfile.ZipFile(artifact, "w") as packed:
        packed.writestr("a/" * 900 + "run.json", "{}")
    with pytest.raises(SelectionError, match="no run in it"):
        runs_of(str(artifact), tmp_path, scratch)
    assert list(scratch.glob("*/*")) == []


def test_a_file_that_is_no_archive_and_an_empty_folder_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no zip", encoding="utf-8")
    (tmp_path / "empty").mkdir()
    assert "cannot be unpacked" in error_of(InputError, tmp_path, str(tmp_path / "notes.txt"))
    assert "no run in it" in error_of(SelectionError, tmp_path, str(tmp_path / "empty"))


@pytest.mark.parametrize("kind", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_an_archive_with_damaged_content_is_told(tmp_path: Path, kind: int) -> None:
    archive = tmp_path / "run.zip"
    with zipfile.ZipFile(archive, "w", kind) as packed:
        packed.writestr("run/run.json", b"{} " * 500)
    content = archive.read_bytes()
    at = content.index(b"run.json") + len(b"run.json")
    at += 4 * (kind == zipfile.ZIP_LZMA)  # behind the header of its own
    archive.write_bytes(content[:at] + b"\xff" * 6 + content[at + 6 :])
    assert "cannot be unpacked" in error_of(InputError, tmp_path, str(archive))


def test_what_is_wrong_in_an_artifact_is_told_by_its_name_and_not_by_a_folder_that_is_gone(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "gpu-a.zip", "w") as packed:
        packed.writestr("run.json", '{"cells": 3}')
    told = error_of(StorageError, tmp_path, str(tmp_path / "gpu-a.zip"))
    assert told.startswith("gpu-a.zip/run.json: not a valid RunInfo file")
    assert str(tmp_path) not in told


def test_a_run_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    store_run(tmp_path, "one", [good_result()])
    store_run(tmp_path, "all", [good_result(cache="upstream")])
    assert "is there already" in error_of(SelectionError, tmp_path, "one")
    assert load_run(tmp_path / "all").cells[0].cell.cache == "upstream"


def test_a_measured_cell_is_taken_before_a_newer_one_that_was_only_compiled_for_cuda(tmp_path: Path) -> None:
    measured = good_result(torch="2.9.0", build="cu128")
    lowered = measured.model_copy(
        update={"request": measured.request.model_copy(update={"lower_only": True, "device": Device.CPU})}
    )
    store_run(tmp_path, "measured", [measured], started=EARLIER, device="cuda")
    store_run(tmp_path, "lowered", [lowered], started=LATER)
    for order in (("measured", "lowered"), ("lowered", "measured")):
        results = tmp_path / order[0][:1]
        merge(results, *(str(tmp_path / one) for one in order))
        assert load_run(results / "all").cells[0].ran_in == "measured"


def test_a_source_that_no_file_can_be_called_is_told(tmp_path: Path) -> None:
    assert "cannot be read: File name too long" in error_of(StorageError, tmp_path, "x" * 300)


def test_a_name_that_is_no_name_of_a_run_is_refused(tmp_path: Path) -> None:
    store_run(tmp_path, "one", [good_result()])
    result = CliRunner().invoke(cli, ["merge", "one", "--run", "../escape", "--results", str(tmp_path)])
    assert isinstance(result.exception, SelectionError)
    assert not (tmp_path.parent / "escape").exists()


def test_two_runs_that_ask_differently_are_told_though_the_first_says_nothing_of_it(tmp_path: Path) -> None:
    store_run(tmp_path, "one", [good_result(torch="2.15.0")])
    for name, numpy in (("two", "1.26.4"), ("three", "2.0.0")):
        cache = "upstream" if name == "two" else "fixed_size"
        other = store_run(tmp_path, name, [good_result(cache=cache)])
        changed(other / "run.json", matrix_hash=name)
        file = cell_path(other, f"torch-2.13.0-cpu/{cache}/default")
        document = json.loads(file.read_text(encoding="utf-8"))
        document["request"]["environment"]["pins"] = {"numpy": numpy}
        file.write_text(json.dumps(document), encoding="utf-8")
    for mixed in ("two", "three"):
        told = error_of(InputError, tmp_path, "one", "two", "three")
        assert "pins: {'numpy': '1.26.4'} and {'numpy': '2.0.0'}" in told
        changed(tmp_path / mixed / "run.json", matrix_hash="")  # as a run that was merged of several has none
    assert "pins" in error_of(InputError, tmp_path, "one", "two", "three")


# --- the last results -------------------------------------------------------------------------------------------------


def with_history(folder: Path) -> Result:
    words = ["merge", "new", "--history", str(folder / "last"), "--run", "all", "--results", str(folder)]
    return CliRunner().invoke(cli, words)


def test_rows_that_nobody_ran_today_come_from_the_last_results(tmp_path: Path) -> None:
    store_run(tmp_path, "new", [good_result()], started=LATER)
    assert with_history(tmp_path).exit_code == 0, "there are none yet"
    store_run(tmp_path, "last", [good_result(), good_result(torch="2.15.0")], started=EARLIER)
    shutil.rmtree(tmp_path / "all")
    assert with_history(tmp_path).exit_code == 0
    assert {cell.ran_in for cell in load_run(tmp_path / "all").cells} == {"new", "last"}


def test_last_results_of_another_matrix_file_are_left_behind_and_that_is_told(tmp_path: Path) -> None:
    store_run(tmp_path, "new", [good_result()], started=LATER)
    gates = {**GATES, Gate.SPEEDUP: GateLimit(min=3.0)}
    store_run(tmp_path, "last", [good_result(torch="2.15.0")], started=EARLIER, gates=gates)
    result = with_history(tmp_path)
    assert result.exit_code == 0, result.output
    assert "last are left behind" in result.stderr and "gates.speedup" in result.stderr
    assert len(load_run(tmp_path / "all").cells) == 1


def test_last_results_that_are_damaged_are_an_error_and_nothing_is_written(tmp_path: Path) -> None:
    store_run(tmp_path, "new", [good_result()], started=LATER)
    folder = store_run(tmp_path, "last", [good_result(torch="2.15.0")], started=EARLIER)
    cell_path(folder, "torch-2.15.0-cpu/fixed_size/default").write_text("{", encoding="utf-8")
    assert isinstance(with_history(tmp_path).exception, StorageError)
    assert not (tmp_path / "all").exists()
