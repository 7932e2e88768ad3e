"""The reference is made release by release: what is there is left alone, what was built is removed."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from toto_compat.contract.request import Device, Environment
from toto_compat.contract.result import Failure
from toto_compat.environments.virtualenv import venv_folder
from toto_compat.errors import EnvironmentBuildError, ExitCode, StorageError
from toto_compat.evidence.store import Run, StoredCell, cell_path, load_run, read_cell, write_cell
from toto_compat.matrix.asked import Asked
from toto_compat.matrix.load import load_matrix
from toto_compat.matrix.request import matrix_request
from toto_compat.reference import kept as kept_module
from toto_compat.reference import making as making_module
from toto_compat.reference.disk import BuiltHere
from toto_compat.reference.kept import keep
from toto_compat.reference.making import Made, Making, make, rows_of
from toto_compat.reference.plan import ReferencePlan
from toto_compat.reference.torch_logs import counted

ROOT = Path(__file__).parent.parent.parent
MATRIX = load_matrix(ROOT / "matrix.yaml")
ROWS = ("upstream/default", "list_index/default", "compile_friendly/default", "fixed_size/default")
PLAN = ReferencePlan.model_validate(
    {"schema": 1, "releases": ["2.9.0", "2.13.0"], "runs": {"cpu": {"profile": "quick", "rows": ROWS}}}
)


class Machine:
    """Stands where a machine with torch stands: every cell that is asked for gets the committed one's evidence."""

    def __init__(self, broken: Sequence[str] = ()) -> None:
        self.asked: list[Asked] = []
        self.broken = broken
        self.crashing: set[str] = set()  # rows that cannot be run
        self.stopped_after = 10**6  # cells, and then Ctrl-C

    def run_matrix(self, asked: Asked) -> ExitCode:
        self.asked.append(asked)
        assert asked.run is not None
        environment = asked.selectors[0].partition("/")[0]
        if environment in self.broken:
            raise EnvironmentBuildError(f"{environment}: no such wheel")
        for selector in asked.selectors[: self.stopped_after]:
            cell = read_cell(
                cell_path(ROOT / "results/reference/cpu", f"torch-2.13.0-cpu/{selector.partition('/')[2]}")
            )
            named = matrix_request(MATRIX, ROOT / "matrix.yaml", type(cell.cell)(selector), "quick", Device.CPU)
            cell = cell.model_copy(update={"cell": named.cell, "request": named})
            if selector.partition("/")[2] in self.crashing:
                cell = cell.model_copy(update={"evidence": {}, "failure": Failure(kind="crash", message="killed")})
            write_cell(asked.results / asked.run, cell)
        if len(asked.selectors) > self.stopped_after:
            raise KeyboardInterrupt
        return ExitCode.OK

    @property
    def cells(self) -> list[str]:
        return [selector for asked in self.asked for selector in asked.selectors]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    monkeypatch.setenv("TOTO_COMPAT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "")
    machine = Machine()
    monkeypatch.setattr(making_module, "run_matrix", machine.run_matrix)
    return machine


def making(folder: Path, **changes: object) -> Making:
    return Making(plan=PLAN, matrix=MATRIX, matrix_file=ROOT / "matrix.yaml", folder=folder / "reference", **changes)  # type: ignore[arg-type]


def test_every_row_of_every_release_is_run_once_and_kept(machine: Machine, tmp_path: Path) -> None:
    made = make(making(tmp_path), PLAN.releases)
    assert len(machine.cells) == len(made.kept) == 8
    assert [asked.runtime for asked in machine.asked] == ["venv", "venv"]
    run = load_run(tmp_path / "reference" / "cpu")
    assert len(run.cells) == 8
    assert {cell.request.cell.environment for cell in run.cells} == {"torch-2.9.0-cu128", "torch-2.13.0-cpu"}


def test_the_same_command_again_runs_only_what_is_missing(machine: Machine, tmp_path: Path) -> None:
    make(making(tmp_path), PLAN.releases)
    cell_path(tmp_path / "reference" / "cpu", "torch-2.9.0-cu128/list_index/default").unlink()
    machine.asked.clear()
    make(making(tmp_path), PLAN.releases)
    assert machine.cells == ["torch-2.9.0-cu128/list_index/default"]


def test_an_interruption_keeps_what_was_finished_and_the_same_command_runs_the_rest(
    machine: Machine, tmp_path: Path
) -> None:
    machine.stopped_after = 3
    with pytest.raises(KeyboardInterrupt):
        make(making(tmp_path), ["2.13.0"])
    assert len(load_run(tmp_path / "reference" / "cpu").cells) == 3
    machine.asked.clear()
    make(making(tmp_path), ["2.13.0"])
    assert machine.cells == ["torch-2.13.0-cpu/fixed_size/default"]


def test_what_a_session_had_finished_that_was_killed_is_kept_without_running_it_or_its_environment(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object, **__: object) -> None:
        raise SystemExit(9)  # as a kill: nothing is kept any more

    with monkeypatch.context() as context:
        context.setattr(making_module, "_keep_finished", die)
        with pytest.raises(SystemExit):
            making_module._run_once(making(tmp_path), rows_of(making(tmp_path), "2.13.0"), Made())
    assert len(machine.cells) == 4
    machine.asked.clear()
    made = make(making(tmp_path), ["2.13.0"])
    assert (machine.asked, len(made.kept)) == ([], 4)


def test_what_a_session_left_damaged_is_told_and_run_again(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as context:
        context.setattr(making_module, "_keep_finished", lambda *_, **__: [])
        make(making(tmp_path), ["2.13.0"])
    [damaged] = (tmp_path / "cache" / "reference").rglob("cells/torch-2.13.0-cpu/list_index/default.json")
    damaged.write_text("{", encoding="utf-8")
    made = make(making(tmp_path), ["2.13.0"])
    assert len(made.kept) == 4
    assert len(made.failed) == 1 and str(damaged) in made.failed[0]


def test_what_could_not_be_run_is_tried_twice_kept_as_that_and_then_left_alone(
    machine: Machine, tmp_path: Path
) -> None:
    machine.crashing = {"list_index/default"}
    made = make(making(tmp_path), ["2.13.0"])
    assert machine.cells.count("torch-2.13.0-cpu/list_index/default") == 2
    assert len(machine.cells) == 5
    assert made.failed == ["torch-2.13.0-cpu/list_index/default: could not be run, twice"]
    machine.asked.clear()
    assert make(making(tmp_path), ["2.13.0"]).failed == []
    assert machine.asked == []
    machine.crashing = set()
    assert make(making(tmp_path, retry=True), ["2.13.0"]).kept == ["torch-2.13.0-cpu/list_index/default"]


def test_a_cell_that_cannot_be_kept_does_not_keep_the_others_out(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def keep_but_one(*place: Any, cells: list[StoredCell], **about: Any) -> Run:
        if cells[0].cell == "torch-2.9.0-cu128/list_index/default":
            raise StorageError("its verdict changed when its evidence was thinned")
        return keep(*place, cells=cells, **about)

    with monkeypatch.context() as context:
        context.setattr(making_module, "keep", keep_but_one)
        made = make(making(tmp_path), PLAN.releases)
    assert (len(made.kept), len(made.failed)) == (7, 1)
    assert made.failed[0] == "2.9.0: its verdict changed when its evidence was thinned"
    machine.asked.clear()
    # nor is it lost: once thinning is right it is kept without being run again
    assert make(making(tmp_path), PLAN.releases).kept == ["torch-2.9.0-cu128/list_index/default"]
    assert machine.asked == []


def test_a_second_count_that_cannot_be_taken_does_not_stop_the_other_releases(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def announce(_self: BuiltHere, name: str, *_: object) -> None:
        if name == "torch-2.9.0-cu128" and len(machine.asked) == 1:  # it was run, and is to be counted
            raise EnvironmentBuildError(f"{name}: the disk is full")

    monkeypatch.setattr(BuiltHere, "announce", announce)
    monkeypatch.setattr(making_module, "count_by_log", lambda cell: counted(cell, "== forecast mean\n", 0))
    run = PLAN.runs["cpu"].model_copy(update={"counted_by_torch_logs": ("upstream/default",)})
    plan = PLAN.model_copy(update={"runs": {"cpu": run}})
    made = make(replace(making(tmp_path), plan=plan), PLAN.releases)
    assert len(made.kept) == 8
    assert made.failed == ["2.9.0: torch-2.9.0-cu128: the disk is full"]
    assert [one.cell for one in made.counts] == ["torch-2.13.0-cpu/upstream/default"]


def test_more_than_may_be_committed_is_told_before_anything_is_run(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_module, "MOST_BYTES", 300_000)
    (tmp_path / "reference").mkdir()
    (tmp_path / "reference" / "plan.yaml").write_text("", encoding="utf-8")
    with pytest.raises(StorageError, match="with 8 cells to come"):
        make(making(tmp_path), PLAN.releases)
    assert machine.asked == []


def test_only_the_runs_that_are_named_are_made(machine: Machine, tmp_path: Path) -> None:
    runs = {**PLAN.runs, "again": PLAN.runs["cpu"]}
    both = replace(making(tmp_path), plan=PLAN.model_copy(update={"runs": runs}), runs=("again",))
    make(both, ["2.13.0"])
    assert {asked.run for asked in machine.asked} == {"again-2.13.0"}
    assert not (tmp_path / "reference" / "cpu").exists()


def test_no_cell_is_started_once_the_budget_is_used_up(machine: Machine, tmp_path: Path) -> None:
    made = make(making(tmp_path, budget_seconds=0.0), PLAN.releases)
    assert (machine.cells, len(made.left)) == ([], 8)


def test_with_a_budget_as_many_cells_are_started_at_a_time_as_run_at_a_time(machine: Machine, tmp_path: Path) -> None:
    make(making(tmp_path, budget_seconds=3600.0, jobs=2), ["2.13.0"])
    assert [len(asked.selectors) for asked in machine.asked] == [2, 2]


def test_an_environment_that_cannot_be_built_does_not_stop_the_others(machine: Machine, tmp_path: Path) -> None:
    machine.broken = ("torch-2.9.0-cu128",)
    made = make(making(tmp_path), PLAN.releases)
    assert len(made.failed) == 1
    assert "no such wheel" in made.failed[0]
    assert len(made.kept) == 4


def test_a_release_without_an_environment_is_told_and_the_others_run(machine: Machine, tmp_path: Path) -> None:
    lacking = PLAN.model_copy(update={"releases": ("2.4.9", "2.13.0")})
    made = make(Making(lacking, MATRIX, ROOT / "matrix.yaml", tmp_path / "reference"), lacking.releases)
    assert made.lacking == ["matrix.yaml has no environment of torch 2.4.9: toto-compat releases --add 2.4.9"]
    assert len(made.kept) == 4


# --- disk ------------------------------------------------------------------------------------------------------------

NAME, ENVIRONMENT = "torch-2.9.0-cu128", MATRIX.environments["torch-2.9.0-cu128"]


def build(cache: Path, name: str, environment: Environment) -> Path:
    folder = venv_folder(name, environment, cache)
    (folder / "bin").mkdir(parents=True)
    return folder


def test_what_was_built_for_the_reference_is_removed_also_after_a_kill(tmp_path: Path) -> None:
    BuiltHere(tmp_path).announce(NAME, ENVIRONMENT, 30e9)
    folder = build(tmp_path, NAME, ENVIRONMENT)
    assert [name for name, _ in BuiltHere(tmp_path).remove_all()] == [folder.name]
    assert not folder.exists()
    assert BuiltHere(tmp_path).remove_all() == []


def test_an_environment_that_was_there_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = build(tmp_path, NAME, ENVIRONMENT)
    monkeypatch.setattr("toto_compat.reference.disk.read_built", lambda _: object())
    BuiltHere(tmp_path).announce(NAME, ENVIRONMENT, 30e9)
    assert BuiltHere(tmp_path).remove_all() == []
    assert folder.exists()


def test_more_disk_than_the_plan_allows_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentBuildError, match="allows 5 GB at a time"):
        BuiltHere(tmp_path).announce(NAME, ENVIRONMENT, 5e9)
    assert BuiltHere(tmp_path).remove_all() == []


@pytest.mark.parametrize("record", ['["../../precious"]', '[".."]', "{", '{"a": 1}', "[3]", "3", "null"])
def test_a_damaged_record_removes_nothing(tmp_path: Path, record: str) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "cache" / "reference").mkdir(parents=True)
    (tmp_path / "cache" / "venvs").mkdir()
    (tmp_path / "cache" / "reference" / "built.json").write_text(record, encoding="utf-8")
    assert BuiltHere(tmp_path / "cache").remove_all() == []
    assert (tmp_path / "precious").exists()


def test_two_runs_do_not_remove_each_others_environments(machine: Machine, tmp_path: Path) -> None:
    with BuiltHere().alone(), pytest.raises(EnvironmentBuildError, match="another reference run"):
        make(making(tmp_path), PLAN.releases)
    assert machine.asked == []


def test_environments_that_are_kept_are_not_removed_later_either(machine: Machine, tmp_path: Path) -> None:
    make(making(tmp_path, keep_environments=True), ["2.13.0"])
    folder = build(tmp_path / "cache", "torch-2.13.0-cpu", MATRIX.environments["torch-2.13.0-cpu"])
    make(making(tmp_path), ["2.13.0"])
    assert folder.exists()
