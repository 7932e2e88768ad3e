"""The simulation behind docs/scaling.md keeps to what no scheduler can get around."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def scaling() -> ModuleType:
    spec = importlib.util.spec_from_file_location("scaling", ROOT / "docs" / "scaling.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["scaling"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def costs(scaling: ModuleType) -> object:
    seconds = {(cache, mode): 100.0 for cache in scaling.CACHES for mode in scaling.MODE_NAMES}
    return scaling.Costs(seconds | {("upstream", "max-autotune"): 1000.0}, references=10.0, build=50.0)


def test_one_gpu_does_one_thing_after_the_other(scaling: ModuleType) -> None:
    tasks = scaling.tasks_of(costs(scaling), 12)
    outcome = scaling.simulate(tasks, 1, 50.0)
    assert outcome.wall == outcome.busy == sum(task.seconds for task in tasks) + 12 * 50.0
    assert outcome.building == 12 * 50.0


@pytest.mark.parametrize("gpus", [1, 8, 64])
def test_no_run_is_shorter_than_its_work_or_its_longest_chain(scaling: ModuleType, gpus: int) -> None:
    tasks = scaling.tasks_of(costs(scaling), 12)
    outcome = scaling.simulate(tasks, gpus, 50.0)
    assert outcome.wall >= sum(task.seconds for task in tasks) / gpus
    assert outcome.wall >= 50.0 + 10.0 + 1000.0
    assert len(outcome.ends) == len(set(tasks))


def test_cells_wait_for_the_references_of_their_release(scaling: ModuleType) -> None:
    outcome = scaling.simulate(scaling.tasks_of(costs(scaling), 2), 64, 0.0)
    references = {task.release: end for task, end in outcome.ends.items() if task.cell is None}
    assert references == {0: 10.0, 1: 10.0}
    assert all(end >= 10.0 + task.seconds for task, end in outcome.ends.items() if task.cell is not None)


def test_every_node_builds_an_environment_once(scaling: ModuleType) -> None:
    """Of eight jobs that begin together on a node each waits for the one build; on eight nodes there are eight."""
    tasks = [scaling.Task(0, float(seconds)) for seconds in range(1, 9)]
    assert scaling.simulate(tasks, 8, 50.0).building == 8 * 50.0
    assert scaling.simulate(tasks, 1, 50.0).building == 50.0


def test_the_page_is_what_the_script_makes_of_the_reference(
    scaling: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    scaling.main(["results/reference/cpu"])
    page = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    assert capsys.readouterr().out == page, "python docs/scaling.py results/reference/cpu > docs/scaling.md"


def test_what_was_not_measured_is_said_to_be_assumed(scaling: ModuleType) -> None:
    known = {(cache, "default"): 10.0 for cache in scaling.CACHES}
    every = scaling.Costs(scaling.with_modes_that_nobody_ran(known), references=0.0, build=0.0)
    rows = scaling.cells_table(known, every, every).splitlines()[2:]
    assert len(rows) == 12
    assert all(("10 (assumed)" in row) is ("| default " not in row) for row in rows)


def test_a_release_brings_no_cell_before_all_references_are_submitted(scaling: ModuleType) -> None:
    """As the executor does: see `_arrays` in toto_compat/runtimes/slurm/submission.py."""
    kinds = [task.cell is None for task in scaling.tasks_of(costs(scaling), 12)]
    assert kinds == [True] * 12 + [False] * 144


def test_the_page_says_that_nothing_on_it_was_measured_on_a_gpu() -> None:
    page = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    assert "No figure here was measured on a GPU" in page
    assert "(assumed)" in page
