"""References in a cell: only those that are whole are used, and no candidate reads or changes what it is held to."""

from collections.abc import Callable
from pathlib import Path

import pytest

from toto_compat.cell.kept import ANSWERS_PLACE, TRUTHS_PLACE, KeptFromTheCandidate
from toto_compat.contract.references import (
    ANSWERS,
    REFERENCES_FOLDER,
    TRUTHS,
    References,
    UnusableReferencesError,
    references_of,
    write_references,
)
from toto_compat.contract.suites import Group

CONTENTS = {ANSWERS: b"the right answers", TRUTHS: b"what is fed"}
TOLD = references_of(CONTENTS, {"scenarios": ["one"]}, key="key")


@pytest.fixture
def given(tmp_path: Path) -> Path:
    write_references(tmp_path / REFERENCES_FOLDER, CONTENTS)
    return tmp_path


def on_the_disk(work: Path) -> set[bytes]:
    return {path.read_bytes() for path in work.rglob("*") if path.is_file()}


def test_what_is_given_is_off_the_disk_before_any_process_starts(given: Path) -> None:
    kept = KeptFromTheCandidate(given)
    kept.take_given(TOLD)
    assert on_the_disk(given) == set()
    assert kept.references({"scenarios": ["one"]}) == TOLD


def test_a_candidate_finds_what_it_is_fed_and_not_the_answers(given: Path) -> None:
    kept = KeptFromTheCandidate(given)
    kept.take_given(TOLD)
    kept.before(Group.CANDIDATE)
    assert on_the_disk(given) == {b"what is fed"}
    kept.before(Group.COMPARE)
    assert (given / ANSWERS_PLACE).read_bytes() == b"the right answers"


def overwrite(work: Path) -> None:
    (work / TRUTHS_PLACE).write_bytes(b"forged")
    (work / ANSWERS_PLACE).parent.mkdir()
    (work / ANSWERS_PLACE).write_bytes(b"forged")
    (work / ANSWERS_PLACE).with_name("more").write_bytes(b"forged")


def put_folders(work: Path) -> None:
    (work / TRUTHS_PLACE).unlink()
    (work / TRUTHS_PLACE / "deep").mkdir(parents=True)
    (work / ANSWERS_PLACE / "deep").mkdir(parents=True)


def put_links(work: Path) -> None:
    (work / "elsewhere").mkdir()
    (work / TRUTHS_PLACE).unlink()
    (work / TRUTHS_PLACE).symlink_to(work / "elsewhere")
    (work / ANSWERS_PLACE).parent.symlink_to(work / "elsewhere")


@pytest.mark.parametrize("tamper", [overwrite, put_folders, put_links])
@pytest.mark.parametrize("own", [True, False])
def test_what_a_candidate_does_to_the_files_changes_nothing(
    given: Path, tamper: Callable[[Path], None], own: bool
) -> None:
    kept = KeptFromTheCandidate(given)
    if own:
        for name, place in ((ANSWERS, ANSWERS_PLACE), (TRUTHS, TRUTHS_PLACE)):
            (given / place).parent.mkdir()
            (given / place).write_bytes(CONTENTS[name])
        kept.after(Group.REFERENCE)
    else:
        kept.take_given(TOLD)
    kept.before(Group.CANDIDATE)
    tamper(given)
    kept.after(Group.CANDIDATE)
    kept.before(Group.COMPARE)
    assert {path.name for path in (given / ANSWERS_PLACE).parent.iterdir()} == {ANSWERS}
    assert (given / ANSWERS_PLACE).read_bytes() == CONTENTS[ANSWERS]
    assert (given / TRUTHS_PLACE).read_bytes() == CONTENTS[TRUTHS]
    kept.after(Group.COMPARE)
    references = kept.references({})
    assert references is not None
    assert references.files == TOLD.files


def truncated(folder: Path) -> None:
    (folder / ANSWERS).write_bytes(CONTENTS[ANSWERS][:-1])


def missing(folder: Path) -> None:
    (folder / TRUTHS).unlink()


def unreadable(folder: Path) -> None:
    (folder / ANSWERS).unlink()
    (folder / ANSWERS).mkdir()


def gone(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


@pytest.mark.parametrize("damage", [truncated, missing, unreadable, gone])
def test_references_that_are_not_whole_are_refused_and_removed(given: Path, damage: Callable[[Path], None]) -> None:
    damage(given / REFERENCES_FOLDER)
    kept = KeptFromTheCandidate(given)
    with pytest.raises(UnusableReferencesError):
        kept.take_given(TOLD)
    assert on_the_disk(given) == set()
    assert kept.references({}) is None


@pytest.mark.parametrize("files", [{}, {ANSWERS: "0"}, {**TOLD.files, ANSWERS: "0"}, {**TOLD.files, "../request": "0"}])
def test_references_that_are_told_of_otherwise_are_refused(given: Path, files: dict[str, str]) -> None:
    kept = KeptFromTheCandidate(given)
    with pytest.raises(UnusableReferencesError):
        kept.take_given(References(key="key", files=files))
    assert kept.references({}) is None


def test_half_of_what_upstream_eager_leaves_is_no_reference(tmp_path: Path) -> None:
    (tmp_path / TRUTHS_PLACE).parent.mkdir()
    (tmp_path / TRUTHS_PLACE).write_bytes(b"what is fed")
    kept = KeptFromTheCandidate(tmp_path)
    kept.after(Group.REFERENCE)
    assert kept.references({}) is None
