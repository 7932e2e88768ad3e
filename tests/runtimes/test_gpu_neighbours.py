"""Memory that another program takes on a cell's GPU meanwhile is not held against the cache."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.runtimes.nvidia import smi
from tests.runtimes.stub_runtime import StubRuntime, prepared
from tests.verdict.sample_cells import GATES, good_result, with_figures
from tests.verdict.test_disturbances import timed
from tests.verdict.test_disturbances import under as under_conditions
from toto_compat.contract.result import CellResult
from toto_compat.contract.suites import Suite
from toto_compat.evidence.details import mistake_in_details
from toto_compat.matrix.gates import Gate
from toto_compat.runtimes import gpu_neighbours as module
from toto_compat.runtimes.gpu_neighbours import neighbours_on, with_neighbours
from toto_compat.runtimes.local import ReadyCell, run_cells
from toto_compat.runtimes.nvidia_smi import Program
from toto_compat.runtimes.progress import PlainProgress
from toto_compat.verdict.judge import Status, judge

GPU = str(smi.ONE[0]["uuid"])
TRAIN = Program(GPU, "7", "train", 5000)
GROWN = Program(GPU, "7", "train", 9000)
IN_A_CONTAINER = [{"pid": 41, "name": "python", "gpu_percent": 60, "own": None}]


@pytest.fixture(autouse=True)
def ask_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    counting_as_the_driver(monkeypatch, True)  # these tests may run in a container
    yield
    smi.forget()


def counting_as_the_driver(monkeypatch: pytest.MonkeyPatch, alike: bool) -> None:
    monkeypatch.setattr(module, "_sees_processes_of_the_machine", lambda: alike)


def under(result: CellResult, processes: list[dict[str, Any]]) -> CellResult:
    return under_conditions(result, [timed(gpu_processes=processes)])


def on_a_gpu(figure: float) -> CellResult:
    return with_figures(good_result(torch="2.9.0", build="cu128", mode="default"), {Gate.MEMORY: figure})


@pytest.mark.parametrize(
    ("before", "after"),
    [((), (TRAIN,)), ((TRAIN,), ()), ((TRAIN,), (GROWN,))],
    ids=["came", "left", "took more"],
)
@pytest.mark.parametrize("figure", [0.5, 9.0], ids=["within", "past the limit"])
def test_memory_beside_a_program_that_took_or_gave_some_decides_nothing(
    before: tuple[Program, ...], after: tuple[Program, ...], figure: float
) -> None:
    result = with_neighbours(on_a_gpu(figure), before, after)
    judged = judge(result, GATES)
    assert judged.gates[Gate.MEMORY].status is Status.INCONCLUSIVE
    assert judged.gates[Gate.MEMORY_GROWTH].status is Status.INCONCLUSIVE
    assert "train (pid 7, " in judged.gates[Gate.MEMORY].reason
    assert "run it on a GPU of its own" in judged.gates[Gate.MEMORY].reason
    assert judged.gates[Gate.EQUIVALENCE].status is Status.PASS


def test_a_program_that_holds_what_it_held_is_in_both_counts_and_disturbs_nothing() -> None:
    result = with_neighbours(on_a_gpu(9.0), (TRAIN,), (TRAIN,))
    assert judge(result, GATES).gates[Gate.MEMORY].status is Status.FAIL


@pytest.mark.parametrize(
    ("before", "after"),
    [((), (TRAIN,)), ((TRAIN,), ()), ((TRAIN,), (TRAIN,))],
    ids=["came", "left", "was there all the time"],
)
def test_a_timing_beside_a_program_on_the_gpu_decides_nothing_where_the_cell_cannot_tell_them_apart(
    before: tuple[Program, ...], after: tuple[Program, ...]
) -> None:
    """As in Docker, where processes have other numbers than the driver tells, or are not told at all."""
    judged = judge(with_neighbours(under(on_a_gpu(0.5), IN_A_CONTAINER), before, after), GATES)
    for gate in (Gate.SPEEDUP, Gate.LATENCY_STABILITY):
        assert judged.gates[gate].status is Status.INCONCLUSIVE
        assert "train (pid 7, 5000 MB) used the GPU" in judged.gates[gate].reason
        assert "stop it and run it again" in judged.gates[gate].reason
    assert judged.verdict is Status.INCONCLUSIVE


def test_one_that_only_holds_memory_disturbs_no_timing_that_tells_who_computed() -> None:
    processes = [{"pid": 41, "name": "python", "gpu_percent": 60, "own": True}]
    processes.append({"pid": 7, "name": "train", "gpu_percent": 0, "own": False})
    result = with_neighbours(under(on_a_gpu(0.5), processes), (TRAIN,), (TRAIN,))
    assert result.evidence[Suite.SPEED].details["other_programs"] == ["train (pid 7, 5000 MB)"]
    assert judge(result, GATES).gates[Gate.SPEEDUP].status is Status.PASS


def test_without_a_neighbour_a_timing_in_a_container_decides() -> None:
    assert judge(with_neighbours(under(on_a_gpu(0.5), IN_A_CONTAINER), (), ()), GATES).verdict is Status.PASS


def test_a_runner_that_cannot_see_who_still_runs_takes_those_that_were_listed_both_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a pid namespace of its own: there a neighbour has no folder in /proc, and a process of ours may be stale."""
    counting_as_the_driver(monkeypatch, False)
    smi.install(tmp_path, monkeypatch, smi.ONE, processes=[smi.process(smi.ONE[0], pid=2**22 + 1, name="t", memory=5)])
    assert [one.name for one in neighbours_on(GPU)] == ["t"]
    result = with_neighbours(on_a_gpu(0.5), (TRAIN,), (GROWN,))
    assert judge(result, GATES).gates[Gate.MEMORY].status is Status.INCONCLUSIVE
    ours = Program(GPU, "9", "python", 700)
    result = with_neighbours(on_a_gpu(0.5), (), (ours,))
    assert result == on_a_gpu(0.5)


def test_a_cell_without_such_evidence_is_left_as_it_is() -> None:
    result = on_a_gpu(0.5)
    without = result.model_copy(update={"evidence": {Suite.EQUIVALENCE: result.evidence[Suite.EQUIVALENCE]}})
    assert with_neighbours(without, (), (TRAIN,)) is without


def test_a_list_that_is_none_is_told_as_damage() -> None:
    result = with_neighbours(on_a_gpu(0.5), (), (TRAIN,))
    memory = result.evidence[Suite.MEMORY]
    damaged = memory.model_copy(update={"details": {**memory.details, "other_programs": 7}})
    assert mistake_in_details(result.evidence) == ""
    assert "evidence.memory.details.other_programs" in mistake_in_details({Suite.MEMORY: damaged})


def test_only_programs_that_run_and_are_on_this_gpu_are_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, gone = os.getpid(), 2**22 + 1  # more than Linux counts to
    programs = [
        smi.process(smi.EIGHT[0], pid=here, name="/usr/bin/train", memory=5),
        smi.process(smi.EIGHT[0], pid=gone, name="ended a moment ago", memory=5),
        smi.process(smi.EIGHT[1], pid=here, name="elsewhere", memory=5),
    ]
    smi.install(tmp_path, monkeypatch, smi.EIGHT, processes=programs)
    assert neighbours_on(GPU) == (Program(GPU, str(here), "train", 5),)
    assert neighbours_on(None) == ()


class Disturbed(StubRuntime):
    """A cell during which somebody begins to train on its GPU."""

    def __init__(self, begin: Callable[[], object]) -> None:
        super().__init__()
        self._begin = begin

    def run_cell(self, *_: Any, **__: Any) -> CellResult:
        self._begin()
        return on_a_gpu(9.0)


def test_the_runner_asks_before_and_after_every_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = smi.process(smi.ONE[0], pid=os.getpid(), name="train", memory=5000)
    smi.install(tmp_path, monkeypatch, smi.ONE)
    request, finished = on_a_gpu(9.0).request, list[CellResult]()
    run_cells(
        [ReadyCell(request, prepared(request.cell.environment, request.environment))],
        Disturbed(lambda: smi.install(tmp_path, monkeypatch, smi.ONE, processes=[training])),
        jobs=1,
        gpus=[GPU],
        scratch=tmp_path / "scratch",
        keep_log=lambda *_: None,
        progress=PlainProgress(1, write=lambda _: None),
        on_finished=lambda _, done: finished.append(done.result),
    )
    for suite in (Suite.MEMORY, Suite.SPEED):
        assert finished[0].evidence[suite].details["other_programs"] == [f"train (pid {os.getpid()}, 5000 MB)"]
