"""A group's process: what it saves and when, and what it does under the quiet lock."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cell.stand_in_groups import request_in
from toto_compat.cell import group
from toto_compat.cell.group import GroupResult, run_group
from toto_compat.contract.request import CellRequest
from toto_compat.contract.result import Outcome, SuiteEvidence
from toto_compat.contract.suites import Group, Suite

ROOT = Path(__file__).parent.parent.parent
# Stands in for torch: tells whether a timing loop could begin while it is imported, and is not there after all.
TORCH = """
import fcntl, sys
with open(sys.argv[1].replace("request.json", "quiet")) as lock:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ImportError("imported while the lock is held")
raise ImportError("imported while the lock is free")
"""


def quiet_request_in(folder: Path, *suites: Suite) -> CellRequest:
    request = request_in(folder, suites=suites or tuple(Suite))
    return request.model_copy(update={"quiet_lock": str(folder / "quiet")})


def started_with(request: Path) -> subprocess.CompletedProcess[str]:
    """Run a group's process to its end; modules beside the request come before all others."""
    arguments = [str(request), "observe", str(request.with_name("observe.json"))]
    return subprocess.run(
        [sys.executable, "-m", "toto_compat.cell.group", *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join((str(request.parent), str(ROOT))), "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_torch_is_imported_under_the_quiet_lock(tmp_path: Path) -> None:
    request = tmp_path / "request.json"
    request.write_text(quiet_request_in(tmp_path).model_dump_json(by_alias=True))
    (tmp_path / "torch.py").write_text(TORCH)
    finished = started_with(request)
    assert "imported while the lock is held" in finished.stderr


@pytest.mark.cell
def test_a_process_that_has_let_go_of_the_lock_ends_at_once(tmp_path: Path) -> None:
    """Interpreters take themselves down at their end, for seconds after a large compile, beside a timing loop."""
    request, taken_down = tmp_path / "request.json", tmp_path / "taken-down"
    request.write_text(quiet_request_in(tmp_path, Suite.MEMORY).model_dump_json(by_alias=True))
    at_exit = f"import atexit, pathlib\natexit.register(pathlib.Path({str(taken_down)!r}).touch)\n"
    (tmp_path / "sitecustomize.py").write_text(at_exit)
    finished = started_with(request)
    assert finished.returncode == 0, finished.stderr
    assert not taken_down.exists()


@pytest.mark.cell
def test_a_trial_works_under_the_lock_that_its_process_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def can_be_taken() -> bool:
        with (tmp_path / "quiet").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True

    def runner(session: Any) -> SuiteEvidence:
        seen.append(can_be_taken())
        # a timing loop begins with this: were the process's lock another one, it would wait
        session.trial.quiet._release()
        seen.append(can_be_taken())
        return SuiteEvidence(suite=Suite.RECOMPILE, outcome=Outcome.MEASURED)

    monkeypatch.setattr(group, "suite_function", lambda _place: runner)
    run_group(quiet_request_in(tmp_path), Group.OBSERVE, lambda _result: None)
    assert seen == [False, True]


@pytest.mark.cell
def test_a_finished_suite_is_saved_before_the_next_one_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from toto_compat.cell.suites.equivalence import compare, determinism

    def dies(*_: object) -> SuiteEvidence:
        raise SystemExit(9)

    evidence = SuiteEvidence(suite=Suite.EQUIVALENCE, outcome=Outcome.MEASURED)
    monkeypatch.setattr(compare, "run_compare", lambda *_: evidence)
    monkeypatch.setattr(determinism, "run_determinism", dies)
    saved: list[GroupResult] = []
    with pytest.raises(SystemExit):
        run_group(quiet_request_in(tmp_path), Group.COMPARE, saved.append)
    assert [result.tells_of(Suite.EQUIVALENCE) for result in saved] == [True]
    assert [result.tells_of(Suite.DETERMINISM) for result in saved] == [False]
    assert saved[0].facts["torch"]


@pytest.mark.cell
def test_a_candidate_that_turns_precision_down_is_told_with_what_it_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    def careless(_session: Any) -> SuiteEvidence:
        torch.set_float32_matmul_precision("medium")
        return SuiteEvidence(suite=Suite.RECOMPILE, outcome=Outcome.MEASURED)

    monkeypatch.setattr(group, "suite_function", lambda _place: careless)
    saved: list[GroupResult] = []
    before = torch.get_float32_matmul_precision()
    try:
        run_group(quiet_request_in(tmp_path, Suite.RECOMPILE), Group.OBSERVE, saved.append)
    finally:
        torch.set_float32_matmul_precision(before)
    assert any(one.startswith("float32_matmul_precision from") for one in saved[0].changed)


@pytest.mark.cell
@pytest.mark.parametrize("name", [Group.OBSERVE, Group.SPEED, Group.MEMORY])
def test_cold_and_warm_starts_are_of_a_model_told_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: Group
) -> None:
    from toto_compat.cell.trial import Trial

    def compiled(_trial: Trial, *, batch_sizes: object = ()) -> None:
        raise ValueError(f"told {batch_sizes}")

    monkeypatch.setattr(Trial, "compiled", compiled)
    request = quiet_request_in(tmp_path, Suite.RECOMPILE, Suite.MEMORY, Suite.SPEED)
    saved: list[GroupResult] = []
    run_group(request, name, saved.append)
    (evidence,) = saved[-1].evidence.values()
    assert evidence.failure is not None
    assert evidence.failure.message == "ValueError: told (1, 2, 16)"
