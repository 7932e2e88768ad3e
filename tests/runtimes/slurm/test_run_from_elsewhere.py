"""A run on Slurm that was brought here, or changed since: it can be looked at, and nothing is done for it."""

import os
from pathlib import Path

import pytest

from tests.runtimes.slurm.small_slurm import SmallSlurm, stored
from toto_compat.contract.cell_name import CellName
from toto_compat.errors import ExitCode, SelectionError, StorageError
from toto_compat.evidence.store import load_run, write_run_info


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SmallSlurm:
    slurm = SmallSlurm(tmp_path, monkeypatch)
    assert slurm.submit().exit_code == ExitCode.OK
    return slurm


def done_to_slurm(slurm: SmallSlurm) -> tuple[int, int]:
    return len(slurm.scripts), len(slurm.lines("cancelled"))


# --- a run of somebody else's -----------------------------------------------------------------------------------------


def test_nothing_of_a_run_from_elsewhere_is_submitted_or_cancelled(slurm: SmallSlurm) -> None:
    slurm.use_cache("another")
    slurm.end_jobs()
    before = done_to_slurm(slurm)
    for words in (("status", "one", "--wait"), ("cancel", "one")):
        result = slurm.call(*words)
        assert isinstance(result.exception, SelectionError), result.output
        assert "was not submitted from here" in str(result.exception)
    with pytest.raises(SelectionError):
        slurm.watch().to_the_end()
    assert done_to_slurm(slurm) == before


def test_what_a_run_from_elsewhere_brings_is_shown_and_not_stored(slurm: SmallSlurm) -> None:
    another = slurm.use_cache("another")
    slurm.leave_all_results()
    slurm.call("status", "one")
    assert len(load_run(slurm.run).cells) == 4
    assert list(stored(another)) == []


def test_what_this_machine_submitted_is_stored(slurm: SmallSlurm) -> None:
    slurm.leave_all_results()
    slurm.call("status", "one")
    assert len(list(stored(slurm.use_cache("cache")))) == 4


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"setup": []', '"setup": ["touch /tmp/x"]'),
        ('"partition": "a"', '"partition": "c"'),
        ('"number": 1,\n   "kind": "references"', '"number": 1,\n   "kind": "cell"'),
    ],
    ids=["setup", "partition", "kind"],
)
def test_a_run_that_was_changed_since_it_was_submitted_is_none_of_ours(slurm: SmallSlurm, old: str, new: str) -> None:
    slurm.change_submitted(old, new)
    assert isinstance(slurm.call("cancel", "one").exception, SelectionError)


def test_a_task_that_was_changed_is_not_submitted_again(slurm: SmallSlurm) -> None:
    slurm.end_jobs()
    for task in slurm.submitted.tasks:
        path = slurm.exchange.task(task.number)
        path.write_text(path.read_text().replace("/sources/", "/elsewhere/"))
    before = done_to_slurm(slurm)
    with pytest.raises(StorageError, match="changed since it was written"):
        slurm.watch().to_the_end()
    assert done_to_slurm(slurm) == before


# --- files that are not what they should be ---------------------------------------------------------------------------


@pytest.mark.parametrize("job", ["--user=me", "201\\n#SBATCH --uid=0", "201;id", "201_0\\n", "\u0663", "", "201_"])
def test_a_job_is_a_number_and_nothing_that_slurm_or_a_shell_would_obey(slurm: SmallSlurm, job: str) -> None:
    slurm.change_submitted('"201"', f'"{job}"')
    before = done_to_slurm(slurm)
    for words in (("status", "one", "--wait"), ("cancel", "one")):
        assert isinstance(slurm.call(*words).exception, StorageError)
    assert done_to_slurm(slurm) == before


@pytest.mark.parametrize("key", ["../../../pwned", "a" * 63, "A" * 64, "a" * 64 + "\\n"])
def test_a_key_of_the_store_is_a_hash(slurm: SmallSlurm, key: str) -> None:
    real = slurm.submitted.cells[0].key
    slurm.change_submitted(real, key)
    assert isinstance(slurm.call("status", "one").exception, StorageError)


def test_a_cell_that_is_not_of_the_run_is_refused(slurm: SmallSlurm) -> None:
    slurm.leave_all_results()
    info = load_run(slurm.run).info
    write_run_info(slurm.run, info.model_copy(update={"cells": info.cells[1:]}))
    result = slurm.call("status", "one")
    assert isinstance(result.exception, StorageError)
    assert "is no cell of this run" in str(result.exception)


def test_two_tasks_of_one_number_are_refused(slurm: SmallSlurm) -> None:
    slurm.change_submitted('"number": 2,', '"number": 3,')
    assert "two tasks have the same number" in str(slurm.call("status", "one").exception)


@pytest.mark.parametrize("name", ["\u00b2.json", "\u0663.json", "-1.json", f"{'9' * 5000}.json"[-200:]])
def test_a_result_with_an_odd_name_is_none(slurm: SmallSlurm, name: str) -> None:
    (slurm.exchange.folder / "results" / name).touch()
    assert slurm.exchange.arrived() == set()


@pytest.mark.parametrize("what", ["pipe", "link", "huge"])
def test_a_result_that_is_no_plain_file_is_put_aside(slurm: SmallSlurm, what: str) -> None:
    number = slurm.submitted.cells[0].number
    path = slurm.exchange.result(number)
    match what:
        case "pipe":
            os.mkfifo(path)
        case "link":
            slurm.leave_result(number).rename(path.with_name("elsewhere"))
            path.symlink_to("elsewhere")
        case _:
            path.touch()
            os.truncate(path, 50 * 10**9)
    watch = slurm.watch()
    watch.look(retry=False)
    assert number in {task.number for task in watch.waiting_for}
    assert not path.exists()


def test_a_pipe_for_a_log_or_for_progress_holds_nobody_up(slurm: SmallSlurm) -> None:
    first = slurm.submitted.cells[0].number
    slurm.leave_result(first)
    os.mkfifo(slurm.exchange.log(first))
    os.mkfifo(slurm.exchange.progress(first))
    slurm.watch().look(retry=False)
    assert len(load_run(slurm.run).cells) == 1
    assert not (slurm.run / "logs").exists()


# --- what is shown ----------------------------------------------------------------------------------------------------


def test_status_shows_no_escapes_to_a_terminal(slurm: SmallSlurm) -> None:
    queued = (slurm.folder / "queue").read_text(encoding="utf-8")
    slurm.order("queue", queued.replace("Resources", "\x1b]0;b\x07\x1b[2JResources"))
    result = slurm.call("status", "one")
    assert result.exit_code == ExitCode.OK, result.output
    assert "Resources" in result.output
    assert not {"\x1b", "\x07"} & set(result.output)


def test_status_shows_no_line_without_end(slurm: SmallSlurm) -> None:
    task = slurm.submitted.cells[0]
    slurm.leave_result(task.number)
    slurm.exchange.progress(task.number).write_text(f"note {'x' * 900_000}\n", encoding="utf-8")
    result = slurm.call("status", "one")
    assert "xxx" in result.output
    assert len(result.output) < 10_000


def test_a_cell_whose_name_holds_escapes_is_refused(slurm: SmallSlurm) -> None:
    own, hostile = slurm.submitted.cells[0].cell, CellName("a\x1b]0;b\x07/\x1b[2Jc/default")
    slurm.change_submitted(own, hostile.replace("\x1b", "\\u001b").replace("\x07", "\\u0007"))
    info = load_run(slurm.run).info
    write_run_info(slurm.run, info.model_copy(update={"cells": (*info.cells, hostile)}))
    result = slurm.call("status", "one")
    assert "is no name of a cell" in str(result.exception)
