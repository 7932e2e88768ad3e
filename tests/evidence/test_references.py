"""References are stored by all that they depend on, nothing of it the candidate's, and damaged ones are not used."""

import errno
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.verdict.sample_cells import cell_request
from toto_compat.contract.cell_name import CellName
from toto_compat.contract.gate_limit import GateLimit
from toto_compat.contract.references import ANSWERS, TRUTHS, references_of
from toto_compat.contract.request import (
    CacheRequest,
    CellRequest,
    CompileSettings,
    CsvSeries,
    Demand,
    Device,
    Limits,
    Origin,
)
from toto_compat.contract.suites import Suite
from toto_compat.errors import StorageError
from toto_compat.evidence import references as module
from toto_compat.evidence.references import (
    KnownReferences,
    ReferenceStore,
    needs_references,
    references_key,
    request_for_references,
)
from toto_compat.evidence.store import cell_key

# --- the key ----------------------------------------------------------------------------------------------------------


def key(request: CellRequest | None = None, **changes: Any) -> str:
    facts = {"lock": "lock", "source_hash": "source", "machine": "machine"}
    told = {name: changes.pop(name) for name in facts if name in changes}
    return references_key((request or cell_request()).model_copy(update=changes), **facts | told)


PROFILE = cell_request().profile
OF_THE_CANDIDATE: dict[str, dict[str, Any]] = {
    "cache": {"cache": CacheRequest(name="upstream", source="builtin")},
    "name": {"cell": CellName("torch-2.13.0-cpu/upstream/max-autotune+production")},
    "settings": {"settings": CompileSettings(capture_scalar_outputs=True)},
    "demands": {"demands": (Demand(gate="memory", suite=Suite.MEMORY, figure="memory", limit=GateLimit(max=1)),)},
    "suites and repeats": {"profile": PROFILE.model_copy(update={"suites": (Suite.DETERMINISM,), "repeats": 3})},
    "timeout": {"profile": PROFILE.model_copy(update={"timeout_minutes": 1})},
    "names": {"profile_name": "full", "workload_name": "other"},
    "places": {"work_folder": "/elsewhere", "quiet_lock": "/lock", "origin": Origin(runtime="docker")},
    "room": {"limits": Limits(memory="4g", cpus=1, shm="2g", tmp="1g", pids=100)},
}
THEIR_OWN: dict[str, dict[str, Any]] = {
    "lock": {"lock": "other"},
    "source": {"source_hash": "other"},
    "machine": {"machine": "other"},
    "device": {"device": Device.CUDA},
    "workload": {"workload": cell_request().workload.model_copy(update={"sampling": ("32/8",)})},
    "seed": {"workload": cell_request().workload.model_copy(update={"seed": 1})},
    "threads": {"limits": Limits(threads=2)},
    "variables": {"variables": {"MKL_NUM_THREADS": "2"}},
}


@pytest.mark.parametrize("changes", OF_THE_CANDIDATE.values(), ids=OF_THE_CANDIDATE)
def test_cells_that_differ_in_their_candidate_share_references(changes: dict[str, Any]) -> None:
    assert key(**changes) == key()


@pytest.mark.parametrize("changes", THEIR_OWN.values(), ids=THEIR_OWN)
def test_what_changes_an_answer_changes_the_key(changes: dict[str, Any]) -> None:
    assert key(**changes) != key()


def test_series_count_by_what_is_in_them_and_checkpoints_by_their_files(tmp_path: Path) -> None:
    def of_series(folder: str, text: str) -> str:
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "a.csv").write_text(text)
        path = str(tmp_path / folder / "a.csv")
        return key(csv=CsvSeries(path=path, time_column="time", value_columns=("value",)))

    assert of_series("one", "1") == of_series("two", "1")
    assert of_series("one", "2") != of_series("two", "1")
    before = key(checkpoint_folder=str(tmp_path))
    (tmp_path / "weights").write_text("weights")
    assert key(checkpoint_folder=str(tmp_path)) != before


def test_a_cell_is_the_same_whether_references_were_given_or_not() -> None:
    given = cell_request().model_copy(update={"references": references_of({}, {}, key="key")})
    keys = {cell_key(one, lock="", source_hash="", machine="") for one in (given, cell_request())}
    assert len(keys) == 1


def test_who_computes_references_knows_no_candidate() -> None:
    mine = CacheRequest(name="mine", source="/somewhere/mine.py:Mine")
    asked = request_for_references(cell_request().model_copy(update={"cache": mine}))
    assert "mine" not in asked.model_dump_json()
    assert asked.only_references


@pytest.mark.parametrize(
    ("suites", "needs"), [((Suite.DETERMINISM,), True), ((Suite.RECOMPILE, Suite.SPEED), False), ((), False)]
)
def test_only_cells_that_are_compared_need_references(suites: tuple[Suite, ...], needs: bool) -> None:
    assert needs_references(cell_request(suites=suites)) is needs


# --- the store --------------------------------------------------------------------------------------------------------


def known(of: str = "key", answers: bytes = b"answers") -> KnownReferences:
    contents = {ANSWERS: answers, TRUTHS: b"truths"}
    return KnownReferences(references_of(contents, {"scenarios": ["one"]}, key=of), contents)


@pytest.fixture
def store(tmp_path: Path) -> ReferenceStore:
    return ReferenceStore(tmp_path / "references" / "source")


def test_what_is_stored_is_found_under_its_key_alone(store: ReferenceStore) -> None:
    store.put(known())
    assert store.get("key") == known()
    assert store.get("other") is None


def cut(place: Path) -> None:
    (place / ANSWERS).write_bytes(b"ans")


def lose(place: Path) -> None:
    (place / TRUTHS).unlink()


def hide(place: Path) -> None:
    (place / ANSWERS).unlink()
    (place / ANSWERS).mkdir()


def garble(place: Path) -> None:
    (place / "references.json").write_text("{")


def lose_all(place: Path) -> None:
    for path in place.iterdir():
        path.unlink()


def move(place: Path) -> None:
    place.rename(place.with_name("elsewhere"))
    other = ReferenceStore(place.parent)
    other.put(known(of="other"))
    (place.parent / "other").rename(place)


@pytest.mark.parametrize("damage", [cut, lose, hide, garble, lose_all, move])
def test_damaged_references_are_not_used_and_can_be_replaced(
    store: ReferenceStore, damage: Callable[[Path], None]
) -> None:
    store.put(known())
    damage(store.folder / "key")
    assert store.get("key") is None
    store.put(known(answers=b"computed again"))
    assert store.get("key") == known(answers=b"computed again")


@pytest.mark.parametrize("damage", [cut, lose, hide, garble, lose_all, move])
def test_damaged_references_are_set_aside_and_named(store: ReferenceStore, damage: Callable[[Path], None]) -> None:
    for damaged in (damage, cut):  # the second in the place of the first
        store.put(known())
        damaged(store.folder / "key")
        told = store.set_aside("key")
        assert str(store.folder / "damaged" / "key") in told
        assert "computed again" in told
        assert not (store.folder / "key").exists()
        assert (store.folder / "damaged" / "key").is_dir()
    store.put(known())
    assert store.set_aside("key") == ""
    assert store.get("key") == known()
    assert store.set_aside("never stored") == ""


def test_references_that_cannot_be_read_just_now_stay(store: ReferenceStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put(known())

    def away(path: Path, *_: object) -> bytes:
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(module, "read_left_file", away)  # of a file server, which no test has
        assert "cannot be read now" in store.set_aside("key")
    assert store.get("key") == known()


def test_what_is_stored_is_on_disk_before_it_gets_its_name(
    store: ReferenceStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[str] = set()
    rename = Path.rename

    def fsync(handle: int) -> None:
        synced.add(Path(os.readlink(f"/proc/self/fd/{handle}")).name)  # noqa: PTH115 - no other way to ask for it

    def checked(path: Path, target: Path) -> Path:
        assert {"new", ANSWERS, TRUTHS, "references.json"} <= synced
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", checked)
    store.put(known())


def test_a_folder_that_cannot_be_written_leaves_nothing_half(
    store: ReferenceStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_path: Path, _content: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(StorageError, match="No space left"):
        store.put(known())
    assert store.get("key") is None
    assert [path for path in store.folder.parent.rglob("*") if path.is_file()] == []


def test_of_two_runners_at_once_one_is_kept_whole(store: ReferenceStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one gets in between, where its folder stands in the way."""
    rename, first = Path.rename, known(answers=b"of the quicker one")

    def late(path: Path, target: Path) -> Path:
        if path.name == "new":
            monkeypatch.setattr(Path, "rename", rename)
            store.put(first)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", late)
    store.put(known())
    assert store.get("key") == first
    assert [path.name for path in store.folder.parent.iterdir()] == ["source"]


def test_references_of_sources_long_gone_are_dropped(tmp_path: Path) -> None:
    for number in range(5):
        ReferenceStore(tmp_path / "references" / f"source{number}").put(known())
        os.utime(tmp_path / "references" / f"source{number}", (number, number))
    assert {folder.name for folder in (tmp_path / "references").iterdir()} == {"source2", "source3", "source4"}


def test_a_clock_that_was_put_back_drops_no_references_of_the_source_that_runs(tmp_path: Path) -> None:
    now = time.time()
    for number in range(4):
        store = ReferenceStore(tmp_path / "references" / f"source{number}")
        store.put(known())
        os.utime(store.folder, (now + 86_400, now + 86_400 + number))
    own = ReferenceStore(tmp_path / "references" / "own")
    own.put(known())
    assert own.get("key") == known()
    assert {folder.name for folder in own.folder.parent.iterdir()} == {"own", "source2", "source3"}


def test_references_that_another_runner_drops_at_the_same_time_are_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, stat = tmp_path / "references" / "gone", Path.stat
    ReferenceStore(gone).put(known())

    def quicker(path: Path, **options: Any) -> os.stat_result:
        if path == gone:
            shutil.rmtree(gone, ignore_errors=True)
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", quicker)
    own = ReferenceStore(tmp_path / "references" / "own")
    own.put(known())
    assert own.get("key") == known()
