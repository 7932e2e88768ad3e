"""Runs are whole or not there, damage is named, and only what was measured is reused."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.verdict.sample_cells import cell_request, good_result, with_figures, with_suite
from toto_compat.contract.cell_name import CellName
from toto_compat.contract.files import utc_now
from toto_compat.contract.gate_limit import GateLimit
from toto_compat.contract.request import CellRequest, CsvSeries, Device, Origin, SymbolSeries
from toto_compat.contract.result import CellResult, Failure, Outcome, SuiteEvidence
from toto_compat.contract.suites import Suite
from toto_compat.errors import SelectionError, StorageError
from toto_compat.evidence import store as store_module
from toto_compat.evidence.files import check_writable, write_atomically
from toto_compat.evidence.store import (
    CellStore,
    RunInfo,
    StoredCell,
    can_be_reused,
    cell_key,
    cell_path,
    check_run_name,
    claimed_run,
    find_run,
    list_runs,
    load_run,
    log_path,
    new_run_name,
    point_latest,
    write_cell,
    write_run_info,
)
from toto_compat.matrix.demands import demands_of
from toto_compat.matrix.gates import Gate


def stored(result: CellResult | None = None, **fields: Any) -> StoredCell:
    result = result or good_result()
    own: dict[str, Any] = {name: getattr(result, name) for name in CellResult.model_fields}
    own |= {"key": "ab12", "seconds": 3.0, "stored": utc_now(), "ran_in": "first"}
    return StoredCell(**own | fields)


def make_run(results: Path, name: str, *cells: StoredCell) -> Path:
    info = RunInfo(
        name=name,
        profile="quick",
        runtime="venv",
        executor="local",
        device="cpu",
        cells=(*(cell.cell for cell in cells), CellName("never/reached/default")),
        started=utc_now(),
    )
    write_run_info(results / name, info)
    for cell in cells:
        write_cell(results / name, cell)
    return results / name


def key(request: CellRequest, **parts: str) -> str:
    return cell_key(request, **({"lock": "l", "source_hash": "s", "machine": "m"} | parts))


# --- runs ------------------------------------------------------------------------------------------------------------


def test_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    cell = stored()
    run = load_run(make_run(tmp_path, "first", cell))
    assert run.cells == (cell,)
    assert run.unfinished == ("never/reached/default",)


def test_a_cells_name_is_its_path(tmp_path: Path) -> None:
    make_run(tmp_path, "first", stored())
    assert (tmp_path / "first/cells/torch-2.13.0-cpu/fixed_size/default.json").is_file()


def test_a_damaged_file_is_named_with_what_to_do(tmp_path: Path) -> None:
    cell = stored()
    folder = make_run(tmp_path, "first", cell)
    path = cell_path(folder, cell.cell)
    path.write_text(path.read_text()[:200])
    with pytest.raises(StorageError, match="not a valid StoredCell file") as caught:
        load_run(folder)
    assert str(path) in caught.value.message
    assert "delete it" in caught.value.hint


@pytest.mark.parametrize("place", ["run.json", "cells/torch-2.13.0-cpu/fixed_size/default.json"])
@pytest.mark.parametrize(("kind", "why"), [("pipe", "not a regular file"), ("sparse", "larger than"), ("link", "link")])
def test_only_a_plain_file_of_a_possible_size_is_read(tmp_path: Path, place: str, kind: str, why: str) -> None:
    """A pipe without a writer would be waited for, and a file with a hole of 50 GB would fill the memory."""
    path = make_run(tmp_path, "first", stored()) / place
    path.rename(tmp_path / "elsewhere.json")
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "sparse":
            path.touch()
            os.truncate(path, 50 * 10**9)
        case "link":
            path.symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(StorageError, match=why):
        load_run(tmp_path / "first")


@pytest.mark.parametrize("path_of", [cell_path, log_path])
@pytest.mark.parametrize("linked", [".", "torch-2.13.0-cpu", "torch-2.13.0-cpu/fixed_size"])
def test_no_link_in_a_run_leads_out_of_it(tmp_path: Path, linked: str, path_of: Callable[[Path, str], Path]) -> None:
    cell = stored().cell
    path = path_of(tmp_path / "run", cell)
    folder = path.parents[2] / linked
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.symlink_to(tmp_path)
    with pytest.raises(StorageError, match="a link, which no run has"):
        path_of(tmp_path / "run", cell)


@pytest.mark.parametrize("path_of", [cell_path, log_path])
@pytest.mark.parametrize(
    "cell", ["../../x/y", "a/../x", "a/b/..", "a//b", "a/b/\x1b[2J", "a/b/c\n", "a/b/c';x;'", f"a/b/{'c' * 300}"]
)
def test_what_is_no_name_of_a_cell_is_no_place_in_a_run(
    tmp_path: Path, cell: str, path_of: Callable[[Path, str], Path]
) -> None:
    with pytest.raises(StorageError, match="no name of a cell"):
        path_of(tmp_path, cell)


def test_a_file_that_holds_another_cell_is_none_of_the_run(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "first", stored())
    other = cell_path(folder, "never/reached/default")
    other.parent.mkdir(parents=True)
    cell_path(folder, stored().cell).rename(other)
    with pytest.raises(StorageError, match="holds a result of torch-2"):
        load_run(folder)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("device", "tpu"),
        ("profile", "quick; touch x"),
        ("production_profile", "$(touch x)"),
        ("started", "yesterday"),
        ("started", "9999-12-31T00:00:00Z"),
        ("finished", "soon"),
        ("releases", ["newest"]),
        ("releases", ["2.13.0\n"]),
        ("releases", ["\u0662.\u0663.\u0664"]),
    ],
)
def test_what_a_run_is_judged_by_is_what_it_is_taken_for(tmp_path: Path, field: str, value: object) -> None:
    path = make_run(tmp_path, "first") / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(StorageError, match=rf"run\.json: not a valid RunInfo file: {field}"):
        load_run(tmp_path / "first")


def test_what_a_run_says_of_itself_is_shown_and_not_obeyed(tmp_path: Path) -> None:
    path = make_run(tmp_path, "first") / "run.json"
    fields = ("git_revision", "executor", "runtime", "host")
    path.write_text(json.dumps(json.loads(path.read_text()) | dict.fromkeys(fields, "a\x1b]0;title\x07b\u202ec")))
    info = load_run(tmp_path / "first").info
    assert {getattr(info, field) for field in fields} == {"abc"}


def test_a_full_disk_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json"
    write_atomically(path, "old")

    def full(_handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="No space left on device") as caught:
        write_atomically(path, "new")
    assert "finished cells are kept" in caught.value.hint
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.json"]


def test_a_folder_that_cannot_be_written_is_told_with_a_way_out(tmp_path: Path) -> None:
    (tmp_path / "results").touch()
    with pytest.raises(StorageError, match="cannot be written") as caught:
        check_writable(tmp_path / "results")
    assert "--results" in caught.value.hint


def test_a_read_only_folder_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: Any, **_options: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("toto_compat.contract.files.tempfile.mkstemp", refuse)
    with pytest.raises(StorageError, match="Permission denied") as caught:
        check_writable(tmp_path)
    assert "make it writable" in caught.value.hint


def test_latest_points_at_the_last_run(tmp_path: Path) -> None:
    for name in ("first", "second"):
        make_run(tmp_path, name)
        point_latest(tmp_path, name)
    assert find_run("latest", tmp_path) == (tmp_path / "second").resolve()
    assert (tmp_path / "latest").readlink() == Path("second")


def test_where_links_are_not_allowed_latest_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: Any, **_options: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(Path, "symlink_to", refuse)
    make_run(tmp_path, "first")
    point_latest(tmp_path, "first")
    assert not (tmp_path / "latest").exists()
    assert find_run("latest", tmp_path) == (tmp_path / "first").resolve()


@pytest.mark.parametrize("content", [b"\xff\xfe", b"x" * 5000, b"../elsewhere", b""])
def test_a_pointer_to_no_run_is_told(tmp_path: Path, content: bytes) -> None:
    make_run(tmp_path, "first")
    (tmp_path / "latest.txt").write_bytes(content)
    with pytest.raises((StorageError, SelectionError), match=r"no name of a run|no such run"):
        find_run("latest", tmp_path)


@pytest.mark.parametrize("name", ["x\n", "x" * 300, "\u0661"])
def test_a_name_that_no_folder_should_have_is_none_of_a_run(tmp_path: Path, name: str) -> None:
    with pytest.raises(SelectionError, match="not usable"):
        check_run_name(name)
    with pytest.raises(SelectionError, match="no such run"):
        find_run(name, tmp_path)


def test_a_run_is_found_by_name_by_path_and_in_reference(tmp_path: Path) -> None:
    first = make_run(tmp_path, "first")
    reference = make_run(tmp_path / "reference", "cpu")
    assert find_run("first", tmp_path) == find_run(str(first), tmp_path) == first.resolve()
    assert find_run("reference/cpu", tmp_path) == reference.resolve()
    assert list_runs(tmp_path) == ["first", "reference/cpu"]


def test_an_unknown_run_names_the_ones_there_are(tmp_path: Path) -> None:
    make_run(tmp_path, "first")
    with pytest.raises(SelectionError) as caught:
        find_run("frist", tmp_path)
    assert "first" in caught.value.hint


def test_no_run_at_all_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(SelectionError) as caught:
        find_run("latest", tmp_path)
    assert "toto-compat matrix" in caught.value.hint


def test_two_runs_in_one_second_have_two_names(tmp_path: Path) -> None:
    first = new_run_name(tmp_path, "quick")
    (tmp_path / first).mkdir()
    assert new_run_name(tmp_path, "quick") != first


# --- the store of finished cells -------------------------------------------------------------------------------------


def test_a_key_does_not_depend_on_where_files_lie(tmp_path: Path) -> None:
    request = cell_request()
    moved = request.model_copy(update={"work_folder": "/elsewhere", "quiet_lock": "/other.lock"})
    assert key(request) == key(moved)
    sources = []
    for folder in ("a", "b"):
        file = tmp_path / folder / "mine.py"
        file.parent.mkdir()
        file.write_text("class Mine: ...")
        cache = request.cache.model_copy(update={"source": f"{file}:Mine"})
        sources.append(request.model_copy(update={"cache": cache}))
    assert key(sources[0]) == key(sources[1])


def test_a_key_depends_on_what_is_in_the_users_series_and_not_on_where_they_lie() -> None:
    def key_of(name: str = "A", path: str = "/data/A.csv", content: str = "1", column: str = "close") -> str:
        series = CsvSeries(path=path, time_column="time", value_columns=(column,))
        symbols = (SymbolSeries(name=name, series=series, content=content),)
        return key(cell_request().model_copy(update={"symbols": symbols}))

    assert key_of() == key_of(path="/elsewhere/0.csv")
    changed = {key_of(), key_of(name="B"), key_of(content="2"), key_of(column="open"), key(cell_request())}
    assert len(changed) == 5


@pytest.mark.parametrize("part", ["lock", "source_hash", "machine"])
def test_a_key_depends_on_what_could_change_the_result(part: str) -> None:
    assert key(cell_request()) != key(cell_request(), **{part: "other"})


def test_a_key_depends_on_the_content_of_the_users_files(tmp_path: Path) -> None:
    request = cell_request()
    file, csv, weights = tmp_path / "mine.py", tmp_path / "prices.csv", tmp_path / "weights"
    file.write_text("class Mine: ...")
    csv.write_text("t,v\n1,2\n")
    weights.mkdir()
    (weights / "model.safetensors").write_bytes(b"1")
    own = request.model_copy(
        update={
            "cache": request.cache.model_copy(update={"source": f"{file}:Mine"}),
            "csv": CsvSeries(path=str(csv), time_column="t", value_columns=("v",)),
            "checkpoint_folder": str(weights),
        }
    )
    keys = [key(own)]
    file.write_text("class Mine: x = 1")
    keys.append(key(own))
    csv.write_text("t,v\n1,3\n")
    keys.append(key(own))
    (weights / "model.safetensors").write_bytes(b"12")
    keys.append(key(own))
    assert len(set(keys)) == 4


def test_a_key_depends_on_a_file_that_the_users_cache_imports(tmp_path: Path) -> None:
    request, file = cell_request(), tmp_path / "mine.py"
    file.write_text("import helper\nclass Mine(helper.Base): ...")
    (tmp_path / "helper.py").write_text("from deeper.inside import Base")
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper" / "__init__.py").touch()
    (tmp_path / "deeper" / "inside.py").write_text("class Base: ...")
    (tmp_path / "unrelated.py").write_text("a = 1")
    own = request.model_copy(update={"cache": request.cache.model_copy(update={"source": f"{file}:Mine"})})
    before = key(own)
    (tmp_path / "unrelated.py").write_text("a = 2")
    assert key(own) == before
    (tmp_path / "deeper" / "inside.py").write_text("class Base: x = 1")
    assert key(own) != before


def test_a_key_depends_on_the_variables_around_the_cell_and_on_its_threads() -> None:
    request = cell_request()
    keys = {
        key(request),
        key(request.model_copy(update={"variables": {"OMP_NUM_THREADS": "4"}})),
        key(request.model_copy(update={"limits": request.limits.model_copy(update={"threads": 4})})),
    }
    assert len(keys) == 3


def test_a_key_does_not_depend_on_what_is_only_told_along() -> None:
    request = cell_request()
    patient = request.profile.model_copy(update={"timeout_minutes": 7.0})
    described = request.environment.model_copy(update={"base_image": "another", "gpu_architectures": ("sm_90",)})
    told = {"profile": patient, "environment": described, "origin": Origin(runtime="docker", image="sha256:1")}
    assert key(request) == key(request.model_copy(update=told))


def test_a_finished_cell_comes_back_by_its_key(tmp_path: Path) -> None:
    store, cell = CellStore(tmp_path), stored()
    store.put(cell)
    assert store.get("ab12") == cell
    assert store.get("cd34") is None
    assert store.known_seconds() == {f"{cell.cell} {cell.request.profile_name} cpu": 3.0}


def test_what_could_not_be_run_is_not_reused(tmp_path: Path) -> None:
    good = good_result()
    failed = good.model_copy(update={"failure": Failure(kind="timeout", message="too long")})
    error = good.evidence[Suite.SPEED].model_copy(update={"outcome": Outcome.ERROR})
    broken = good.model_copy(update={"evidence": {**good.evidence, Suite.SPEED: error}})
    partial = good.model_copy(update={"evidence": {Suite.SPEED: good.evidence[Suite.SPEED]}})
    assert can_be_reused(good, ())
    for result in (failed, broken, partial):
        assert not can_be_reused(result, ())
        CellStore(tmp_path).put(stored(result))
        assert CellStore(tmp_path).get("ab12") is None


def test_limits_are_not_in_the_key_and_what_they_made_a_cell_skip_is_run_once_it_may_pass(tmp_path: Path) -> None:
    strict, loose = (
        demands_of({Gate.RECOMPILES: GateLimit(max=limit)}, device=Device.CPU, mode="default") for limit in (0, 30)
    )
    request = cell_request().model_copy(update={"demands": strict})
    assert key(request) == key(request.model_copy(update={"demands": loose}))
    skipped = SuiteEvidence(
        suite=Suite.MEMORY, outcome=Outcome.NOT_RUN, failure=Failure(kind="skipped", message="recompiles is 22")
    )
    whole = with_figures(good_result(), {Gate.RECOMPILES: 22.0}).model_copy(update={"request": request})
    thin = with_suite(whole, Suite.MEMORY, skipped)
    store = CellStore(tmp_path)
    for result, is_reused_when_loosened in ((whole, True), (thin, False)):
        store.put(stored(result))
        assert store.get("ab12", strict) is not None
        assert (store.get("ab12", loose) is not None) is is_reused_when_loosened


@pytest.mark.parametrize("damage", ["", "{", '{"schema": 1}', "other key"])
def test_a_damaged_stored_cell_is_run_again(tmp_path: Path, damage: str) -> None:
    store = CellStore(tmp_path)
    store.put(stored())
    path = store.path("ab12")
    if damage == "other key":
        damage = json.dumps(json.loads(path.read_text()) | {"key": "cd34"})
    path.write_text(damage)
    assert store.get("ab12") is None


def test_damaged_timings_are_no_timings(tmp_path: Path) -> None:
    (tmp_path / "timings.json").write_text("[1, 2")
    assert CellStore(tmp_path).known_seconds() == {}


def test_a_pipe_in_the_store_is_not_waited_for(tmp_path: Path) -> None:
    store = CellStore(tmp_path)
    store.path("ab12").parent.mkdir()
    os.mkfifo(store.path("ab12"))
    os.mkfifo(tmp_path / "timings.jsonl")
    assert store.get("ab12") is None
    assert store.known_seconds() == {}
    with pytest.raises(StorageError, match="timings"):
        store.put(stored())


@pytest.mark.parametrize("seconds", ["NaN", "Infinity", "-1", "1e300", "1" + 400 * "0"])
def test_seconds_that_no_cell_takes_are_no_timings(tmp_path: Path, seconds: str) -> None:
    (tmp_path / "timings.jsonl").write_text(f'{{"a": {seconds}}}\n{{"b": 2.0}}\n')
    assert CellStore(tmp_path).known_seconds() == {"b": 2.0}


def test_seconds_that_no_cell_takes_are_not_kept(tmp_path: Path) -> None:
    CellStore(tmp_path).put(stored(seconds=float("nan")))
    assert not (tmp_path / "timings.jsonl").exists()


def test_half_a_line_of_timings_costs_the_others_nothing(tmp_path: Path) -> None:
    store = CellStore(tmp_path)
    store.put(stored())
    known = store.known_seconds()
    with (tmp_path / "timings.jsonl").open("a") as file:
        file.write('{"another": 1')
    assert store.known_seconds() == known
    assert len(known) == 1


def test_timings_of_version_0_1_are_still_known_until_the_cell_runs_again(tmp_path: Path) -> None:
    store = CellStore(tmp_path)
    store.put(stored())
    (name,) = store.known_seconds()
    (tmp_path / "timings.json").write_text(json.dumps({name: 999.0, "older": 5.0}))
    assert store.known_seconds() == {name: stored().seconds, "older": 5.0}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "not a valid StoredCell file"),
        (b'{"schema": 3, "cell"', "not a valid StoredCell file"),
        (b'{"schema": 99}', "written by a later version of toto-compat"),
    ],
)
def test_a_stored_cell_that_cannot_be_used_is_set_aside_with_its_reason(
    tmp_path: Path, content: bytes, why: str
) -> None:
    store = CellStore(tmp_path)
    key = "ab" * 32
    store.path(key).parent.mkdir(parents=True)
    store.path(key).write_bytes(content)
    said = store.set_aside(key)
    assert why in said and str(tmp_path / "damaged" / f"{key}.json") in said
    assert (tmp_path / "damaged" / f"{key}.json").read_bytes() == content
    assert not store.path(key).exists()
    assert store.set_aside(key) == ""


def test_a_run_of_a_later_version_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"schema": 2, "new": 1}', encoding="utf-8")
    with pytest.raises(StorageError, match=r"run\.json: written by a later version of toto-compat \(layout 2"):
        load_run(tmp_path)


def test_a_run_is_written_by_one_runner_at_a_time(tmp_path: Path) -> None:
    with claimed_run(tmp_path, "one", "quick") as folder:
        assert folder == tmp_path / "one"
        with pytest.raises(StorageError, match="another runner is writing"), claimed_run(tmp_path, "one", "quick"):
            pass
    with claimed_run(tmp_path, "one", "quick"):
        pass


def test_two_runners_without_a_name_never_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both look before either makes its folder: the second finds it made and takes another."""
    names = iter(["same", "same", "same-2"])
    monkeypatch.setattr(store_module, "new_run_name", lambda *_: next(names))
    with claimed_run(tmp_path, None, "quick") as first, claimed_run(tmp_path, None, "quick") as second:
        assert (first.name, second.name) == ("same", "same-2")
