"""References are computed once in a run, before its cells and without a candidate; nothing that a cell does gets in."""

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.runtimes.stub_runtime import StubRuntime, prepared
from tests.verdict.sample_cells import cell_request, provenance
from toto_compat.contract.references import ANSWERS, REFERENCES_FOLDER, TRUTHS, references_of, write_references
from toto_compat.contract.request import CellRequest
from toto_compat.contract.result import CellResult, Failure
from toto_compat.contract.suites import Suite
from toto_compat.errors import StorageError
from toto_compat.evidence.references import KnownReferences, ReferenceStore
from toto_compat.runtimes import references
from toto_compat.runtimes.cell_process import INSIDE
from toto_compat.runtimes.local import ReadyCell, run_cells
from toto_compat.runtimes.nvidia_smi import Gpu
from toto_compat.runtimes.progress import PlainProgress
from toto_compat.runtimes.references import SharedReferences, left_references

CONTENTS = {ANSWERS: b"answers", TRUTHS: b"truths"}
COMPUTED = KnownReferences(references_of(CONTENTS, {"scenarios": []}), CONTENTS)
COMPARED = (Suite.EQUIVALENCE,)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOTO_COMPAT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def shared(tmp_path: Path) -> SharedReferences:
    return SharedReferences(ReferenceStore(tmp_path / "references" / "source"), "source")


class Computing:
    """Stands in for upstream eager, and counts."""

    def __init__(self, answer: KnownReferences | None = COMPUTED) -> None:
        self.answer, self.asked = answer, 0

    def __call__(self, request: CellRequest) -> KnownReferences | None:
        assert request.only_references
        self.asked += 1
        return self.answer


def ask(shared: SharedReferences, compute: Callable[[CellRequest], KnownReferences | None], **cell: Any) -> Any:
    return shared.of(cell_request(**cell), "lock", compute, lambda _: None)


def stored_in(shared: SharedReferences) -> list[Path]:
    return [path for path in shared.store.folder.glob("*") if path.is_dir()]


# --- once in a run ----------------------------------------------------------------------------------------------------


def test_the_cells_of_an_environment_and_workload_share_what_the_first_computed(shared: SharedReferences) -> None:
    compute = Computing()
    given = [ask(shared, compute, cache=cache) for cache in ("upstream", "fixed_size", "list_index")]
    assert compute.asked == 1
    assert given[0].contents == CONTENTS
    assert given[0].told.key
    assert given == [given[0]] * 3
    ask(shared, compute, torch="2.12.0", settings_name="production")  # the lock tells environments apart, not the name
    shared.of(cell_request(), "another lock", compute, lambda _: None)
    assert compute.asked == 3


def test_the_next_run_computes_nothing_unless_it_is_told_to(shared: SharedReferences) -> None:
    first = ask(shared, Computing())
    later = Computing()
    assert ask(SharedReferences(shared.store, "source"), later) == first
    assert later.asked == 0
    assert ask(SharedReferences(shared.store, "source", fresh=True), later) == first
    assert later.asked == 1


def test_damaged_answers_are_named_set_aside_and_computed_again(shared: SharedReferences) -> None:
    first, said = ask(shared, Computing()), list[str]()
    (shared.store.folder / first.told.key / ANSWERS).write_bytes(b"ans")
    again = Computing()
    assert SharedReferences(shared.store, "source").of(cell_request(), "lock", again, said.append) == first
    assert again.asked == 1
    [told] = said
    assert told.startswith("torch-2.13.0-cpu: stored answers cannot be used")
    assert (shared.store.folder / "damaged" / first.told.key).is_dir()


def test_two_cells_at_once_wait_for_one(shared: SharedReferences) -> None:
    both_asked, asked = threading.Barrier(2), []

    def compute(_: CellRequest) -> KnownReferences:
        asked.append(1)
        return COMPUTED

    def one_of_two(cache: str) -> KnownReferences:
        both_asked.wait(60)
        given: KnownReferences = ask(shared, compute, cache=cache)
        return given

    with ThreadPoolExecutor(2) as pool:
        given = list(pool.map(one_of_two, ("upstream", "fixed_size")))
    assert asked == [1]
    assert given[0] == given[1]


def test_gpus_of_another_kind_have_references_of_their_own(
    shared: SharedReferences, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = {"0": "A100", "1": "A100", "2": "H100"}
    gpus = tuple(Gpu(index, name, "580", "sm_80", f"GPU-{index}") for index, name in kinds.items())
    monkeypatch.setattr(references, "find_gpus", lambda: gpus)
    compute = Computing()
    keys = [shared.of(cell_request(), "lock", compute, lambda _: None, gpu=f"GPU-{index}") for index in kinds]
    assert compute.asked == 2
    assert keys[0] == keys[1] != keys[2]


def test_what_cannot_be_computed_is_not_tried_for_every_cell(shared: SharedReferences) -> None:
    compute = Computing(None)
    assert [ask(shared, compute, cache=cache) for cache in ("upstream", "fixed_size")] == [None, None]
    assert compute.asked == 1
    assert stored_in(shared) == []


def test_a_cell_that_is_not_compared_needs_none(shared: SharedReferences) -> None:
    compute = Computing()
    assert ask(shared, compute, suites=(Suite.RECOMPILE,)) is None
    assert compute.asked == 0


def test_a_store_that_cannot_be_written_costs_only_time(
    shared: SharedReferences, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise StorageError("no space left", hint="free some")

    monkeypatch.setattr(ReferenceStore, "put", full)
    notes: list[str] = []
    given = shared.of(cell_request(), "lock", Computing(), notes.append)
    assert given is not None
    assert given.contents == CONTENTS
    assert "no space left" in notes[0]
    assert ask(shared, Computing()) is None  # it computes its own


def test_files_that_change_during_the_run_are_given_to_nobody(shared: SharedReferences) -> None:
    """Not even with their hashes set right: the run goes by those that it saw first."""
    first = ask(shared, Computing())
    forged = CONTENTS | {ANSWERS: b"forged"}
    shared.store.put(KnownReferences(references_of(forged, first.told.made, key=first.told.key), forged))
    assert ask(shared, Computing()) is None


# --- what a cell leaves -----------------------------------------------------------------------------------------------


def left(folder: Path, place: str = "work", failure: Failure | None = None) -> CellResult:
    write_references(folder / place / REFERENCES_FOLDER, CONTENTS)
    request = cell_request()
    known = provenance(request).model_copy(update={"references": COMPUTED.told})
    return CellResult(cell=request.cell, request=request, provenance=known, failure=failure)


@pytest.mark.parametrize("place", ["work", f"{INSIDE}/work"], ids=["virtualenv", "container"])
def test_references_are_taken_from_where_the_cell_could_write(tmp_path: Path, place: str) -> None:
    assert left_references(tmp_path, left(tmp_path, place)) == COMPUTED


def test_of_a_cell_that_was_interrupted_nothing_is_taken(tmp_path: Path) -> None:
    interrupted = Failure(kind="interrupted", message="the run was stopped")
    assert left_references(tmp_path, left(tmp_path, failure=interrupted)) is None


def cut(path: Path) -> None:
    path.write_bytes(b"ans")


def link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


@pytest.mark.parametrize("damage", [cut, link, Path.unlink])
def test_what_is_not_what_the_result_says_is_not_taken(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    result = left(tmp_path)
    damage(tmp_path / "work" / REFERENCES_FOLDER / ANSWERS)
    assert left_references(tmp_path, result) is None


# --- a run ------------------------------------------------------------------------------------------------------------


class Recording(StubRuntime):
    """Remembers what each cell found in its work folder when it started; `spoil` is done there while it runs."""

    def __init__(self, spoil: Callable[[Path], None] = lambda _: None, behaviour: str = "measure") -> None:
        super().__init__(behaviour)
        self.found: dict[str, list[tuple[bool, set[bytes]]]] = {}
        self._spoil = spoil

    def run_cell(self, *asked: Any, **options: Any) -> CellResult:
        request, folder = asked[1:3]
        done = super().run_cell(*asked, **options)
        told = json.loads((folder / "request.json").read_text())
        given = told["references"] is not None
        contents = {path.read_bytes() for path in (folder / "work").rglob("*.safetensors")} if given else set()
        self.found.setdefault(request.cell.cache, []).append((request.only_references, contents))
        if not request.only_references:
            self._spoil(folder / "work")
        return done


def run(shared: SharedReferences, runtime: StubRuntime, scratch: Path, jobs: int = 1) -> list[CellResult]:
    results: list[CellResult] = []
    requests = [cell_request(cache=cache, suites=COMPARED) for cache in ("list_index", "fixed_size")]
    run_cells(
        [ReadyCell(request, prepared(request.cell.environment, request.environment)) for request in requests],
        runtime,
        jobs=jobs,
        gpus=[],
        scratch=scratch,
        keep_log=lambda *_: None,
        progress=PlainProgress(2, write=lambda _: None),
        on_finished=lambda _, done: results.append(done.result),
        references=shared,
    )
    return results


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_run_asks_upstream_eager_once_and_gives_its_answers_to_every_cell(
    tmp_path: Path, shared: SharedReferences, jobs: int
) -> None:
    runtime = Recording()
    results = run(shared, runtime, tmp_path / "s", jobs)
    given = [(False, {b"answers", b"truths"})]
    assert runtime.found == {"upstream": [(True, set())], "list_index": given, "fixed_size": given}
    assert all(result.failure is None for result in results)
    assert all(result.request.references is None for result in results)  # as asked: it is no part of its identity
    assert [path for path in (tmp_path / "s").iterdir() if path.is_dir()] == []


def test_what_a_candidate_writes_into_its_folder_does_not_get_into_the_store(
    tmp_path: Path, shared: SharedReferences
) -> None:
    def poison(work: Path) -> None:
        write_references(work / REFERENCES_FOLDER, {ANSWERS: b"poison", TRUTHS: b"poison"})

    runtime = Recording(poison)
    run(shared, runtime, tmp_path / "s")
    (place,) = stored_in(shared)
    assert {path.read_bytes() for path in place.glob("*.safetensors")} == {b"answers", b"truths"}
    assert runtime.found["fixed_size"] == [(False, {b"answers", b"truths"})]


class Failing(StubRuntime):
    """Cannot run what would compute the references."""

    def __init__(self, how: Callable[[CellRequest], CellResult]) -> None:
        super().__init__()
        self._how, self.asked = how, 0

    def run_cell(self, *asked: Any, **options: Any) -> CellResult:
        if asked[1].only_references:
            self.asked += 1
            return self._how(asked[1])
        assert options["references"] is None
        return super().run_cell(*asked, **options)


def crashed(request: CellRequest) -> CellResult:
    failure = Failure(kind="crash", message="it died")
    return CellResult(cell=request.cell, request=request, provenance=provenance(request), failure=failure)


def refused(_: CellRequest) -> CellResult:
    raise OSError("no disk")


def interrupted(request: CellRequest) -> CellResult:
    failure = Failure(kind="interrupted", message="the run was stopped")
    return crashed(request).model_copy(update={"failure": failure})


@pytest.mark.parametrize("how", [crashed, refused, interrupted])
def test_where_upstream_eager_cannot_be_asked_alone_the_cells_ask_it(
    tmp_path: Path, shared: SharedReferences, how: Callable[[CellRequest], CellResult]
) -> None:
    runtime = Failing(how)
    results = run(shared, runtime, tmp_path / "s")
    assert runtime.asked == 1
    assert [result.failure for result in results] == [None, None]
    assert stored_in(shared) == []
