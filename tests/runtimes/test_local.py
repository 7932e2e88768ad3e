"""What a cell leaves in its folder is put into the one log that is kept, and the runner follows none of its links."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.runtimes.stub_runtime import StubRuntime, prepared
from tests.verdict.sample_cells import cell_request, provenance
from toto_compat.contract.cell_name import CellName
from toto_compat.contract.result import CellResult
from toto_compat.evidence.makers import made_by_this_process
from toto_compat.evidence.store import CellStore
from toto_compat.runtimes import local
from toto_compat.runtimes.cell_process import INSIDE, LOG_FILE
from toto_compat.runtimes.local import FinishedCell, ReadyCell, run_cells
from toto_compat.runtimes.plan import plan_cells
from toto_compat.runtimes.progress import PlainProgress

ELSEWHERE = "a file of the runner's machine"


class LeavesFiles(StubRuntime):
    """A cell that does nothing but leave files in its folder."""

    def __init__(self, leave: Callable[[Path], None]) -> None:
        super().__init__()
        self._leave = leave

    def run_cell(self, *asked: Any, **_: Any) -> CellResult:
        request, folder = asked[1:3]
        (folder / LOG_FILE).write_text("its own output\n")
        self._leave(folder)
        return CellResult(cell=request.cell, request=request, provenance=provenance(request))


def kept_log(scratch: Path, leave: Callable[[Path], None]) -> str:
    logs: list[str] = []
    request = cell_request()
    run_cells(
        [ReadyCell(request, prepared(request.cell.environment, request.environment))],
        LeavesFiles(leave),
        jobs=1,
        gpus=[],
        scratch=scratch,
        keep_log=lambda _, log: logs.append(log.read_text(errors="replace")),
        progress=PlainProgress(1, write=lambda _: None),
        on_finished=lambda *_: None,
    )
    (text,) = logs
    return text


def test_a_folder_whose_runner_lives_is_not_abandoned_and_one_whose_runner_is_gone_is(tmp_path: Path) -> None:
    folder, in_use = local._new_scratch_folder(tmp_path)
    assert len(folder.name) == 8
    assert local.abandoned_scratch(tmp_path) == []
    in_use.close()
    assert local.abandoned_scratch(tmp_path) == [folder]


def test_a_folder_of_another_machine_is_left_alone_though_its_lock_is_not_seen_here(tmp_path: Path) -> None:
    """As on a shared file system whose locks hold on one machine alone."""
    folder, in_use = local._new_scratch_folder(tmp_path)
    in_use.close()
    (folder / local.IN_USE).write_text("-00000000.00000000-")
    (tmp_path / ".new-1.2.00000000-x").mkdir()  # before it has its lock
    assert local.abandoned_scratch(tmp_path) == []


def test_a_folder_that_was_being_made_by_a_runner_that_is_gone_is_abandoned(tmp_path: Path) -> None:
    pid, start, machine = made_by_this_process().strip("-").split(".")
    making = tmp_path / f".new-{pid}.{int(start) + 1}.{machine}-x"
    making.mkdir()
    assert local.abandoned_scratch(tmp_path) == [making]


class Mute(PlainProgress):
    """A display that breaks down at the end of a cell."""

    def finished(self, *_: Any) -> None:
        raise RuntimeError("nothing can be said")


def test_a_cell_is_handed_over_before_anything_is_said_of_it(tmp_path: Path) -> None:
    request, kept = cell_request(), list[FinishedCell]()
    with pytest.raises(RuntimeError, match="nothing can be said"):
        run_cells(
            [ReadyCell(request, prepared(request.cell.environment, request.environment))],
            LeavesFiles(lambda _: None),
            jobs=1,
            gpus=[],
            scratch=tmp_path,
            keep_log=lambda *_: None,
            progress=Mute(1, write=lambda _: None),
            on_finished=lambda _, done: kept.append(done),
        )
    assert len(kept) == 1


@pytest.mark.parametrize("place", ["work", f"{INSIDE}/work"], ids=["virtualenv", "container"])
def test_logs_of_groups_follow_the_cells_own_in_the_order_they_were_written(tmp_path: Path, place: str) -> None:
    def leave(folder: Path) -> None:
        work = folder / place
        work.mkdir(parents=True)
        for age, name in ((10, "first"), (5, "a second one"), (0, os.fsdecode(b"not utf-8 \xff"))):
            (work / f"{name}.log").write_text(f"output of group {age}\n")
            os.utime(work / f"{name}.log", (1000 - age, 1000 - age))
        (work / "result.json").write_text("no log")

    text = kept_log(tmp_path, leave)
    assert text.startswith("its own output\n\n--- first ---\noutput of group 10\n\n--- a second one ---\n")
    assert text.endswith("output of group 0\n")
    assert "no log" not in text


def test_of_a_log_that_is_too_long_the_end_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_LONGEST_GROUP_LOG", 8)

    def leave(folder: Path) -> None:
        (folder / "work").mkdir()
        (folder / "work" / "group.log").write_text("the beginning and the end")

    assert kept_log(tmp_path, leave).endswith("--- group ---\n the end")


def test_a_link_or_pipe_among_the_logs_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "elsewhere.txt").write_text(ELSEWHERE)

    def leave(folder: Path) -> None:
        work = folder / INSIDE / "work"
        work.mkdir(parents=True)
        (work / "a.log").symlink_to(tmp_path / "elsewhere.txt")
        os.mkfifo(work / "b.log")
        (work / "c.log").mkdir()
        (work / "d.log").write_text("an honest log")

    text = kept_log(tmp_path / "scratch", leave)
    assert ELSEWHERE not in text
    assert text.endswith("--- d ---\nan honest log")


def test_a_work_folder_that_is_a_link_is_not_entered(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "x.log").write_text(ELSEWHERE)

    def leave(folder: Path) -> None:
        (folder / INSIDE).mkdir()
        (folder / INSIDE / "work").symlink_to(tmp_path / "elsewhere")

    assert kept_log(tmp_path / "scratch", leave) == "its own output\n"
    assert (tmp_path / "elsewhere" / "x.log").exists()


class DoesNothing(StubRuntime):
    """A cell that has ended before it began."""

    def run_cell(self, *asked: Any, **_: Any) -> CellResult:
        request = asked[1]
        return CellResult(cell=request.cell, request=request, provenance=provenance(request))


def resident_megabytes() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def test_ten_thousand_cells_cost_the_runner_little_time_and_no_memory(tmp_path: Path) -> None:
    """Planned and run. The time is the processor's, this process alone: what cells take and what others do counts for
    nothing; nor does writing them down, which waits for the disk."""
    request, names = cell_request(), [CellName.of(f"torch-2.{n}.0-cpu", "fixed_size", "default") for n in range(10_000)]
    one = prepared("torch-2.13.0-cpu", request.environment)
    finished: set[str] = set()
    memory: list[float] = []

    def on_finished(cell: ReadyCell, _: FinishedCell) -> None:
        finished.add(cell.request.cell)
        if len(finished) in (2_000, 10_000):
            memory.append(resident_megabytes())

    before = time.process_time()
    requests = [request.model_copy(update={"cell": name}) for name in names]
    planned = plan_cells(requests, DoesNothing(), CellStore(tmp_path / "store"), fresh=False)
    cells = [ReadyCell(cell.request, one, cell.key) for cell in planned]
    run_cells(
        cells,
        DoesNothing(),
        jobs=2,
        gpus=[],
        scratch=tmp_path,
        keep_log=lambda *_: None,
        progress=PlainProgress(len(cells), write=lambda _: None),
        on_finished=on_finished,
    )
    assert time.process_time() - before < 10
    assert finished == set(names)
    assert memory[1] - memory[0] < 5
