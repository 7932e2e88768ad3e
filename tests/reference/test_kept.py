"""What the reference has, what of it is stale: by a suite's version or what is asked, never by a line of source."""

from pathlib import Path

import pytest

from toto_compat.contract.gate_limit import GateLimit
from toto_compat.contract.request import Device
from toto_compat.contract.result import Failure, Outcome, SuiteEvidence
from toto_compat.contract.suites import Suite
from toto_compat.errors import SelectionError, StorageError
from toto_compat.evidence.store import StoredCell, cell_path, load_run, read_cell, write_cell
from toto_compat.matrix.gates import Gate
from toto_compat.matrix.load import load_matrix
from toto_compat.matrix.request import matrix_request
from toto_compat.reference import kept as kept_module
from toto_compat.reference.kept import State, check_made_here, check_size, has_other_limits, keep, kept_row
from toto_compat.reference.plan import PlannedRow, planned_rows, read_plan

ROOT = Path(__file__).parent.parent.parent
MATRIX = load_matrix(ROOT / "matrix.yaml")
REFERENCE = ROOT / "results" / "reference"
ROW = next(row for row in planned_rows(read_plan(REFERENCE / "plan.yaml"), MATRIX, "2.13.0"))


def measured() -> StoredCell:
    return read_cell(cell_path(REFERENCE / ROW.run, ROW.cell))


def state_with(folder: Path, cell: StoredCell, row: PlannedRow = ROW) -> tuple[State, str]:
    write_cell(folder / ROW.run, cell)
    found = kept_row(folder, row, MATRIX)
    return found.state, found.why


def test_a_row_without_a_file_is_missing(tmp_path: Path) -> None:
    assert kept_row(tmp_path, ROW, MATRIX).state is State.MISSING


def test_other_sources_and_another_machine_make_nothing_stale(tmp_path: Path) -> None:
    cell = measured()
    elsewhere = cell.provenance.model_copy(update={"source_hash": "another", "host": "another", "lock": "another"})
    assert state_with(tmp_path, cell.model_copy(update={"provenance": elsewhere, "key": "another"})) == (
        State.THERE,
        "",
    )


def test_another_version_of_a_suite_makes_a_cell_stale(tmp_path: Path) -> None:
    cell = measured()
    old = cell.evidence[Suite.RECOMPILE].model_copy(update={"version": Suite.RECOMPILE.rule.version - 1})
    state, why = state_with(tmp_path, cell.model_copy(update={"evidence": {**cell.evidence, Suite.RECOMPILE: old}}))
    assert state is State.STALE
    assert "the suite recompile is of version" in why


def test_another_workload_or_pin_makes_a_cell_stale(tmp_path: Path) -> None:
    cell = measured()
    other = cell.request.workload.model_copy(update={"seed": 1})
    request = cell.request.model_copy(update={"workload": other})
    assert state_with(tmp_path, cell.model_copy(update={"request": request}))[0] is State.STALE
    pinned = cell.request.environment.model_copy(update={"pins": {"numpy": "2.0.0"}})
    request = cell.request.model_copy(update={"environment": pinned})
    assert state_with(tmp_path, cell.model_copy(update={"request": request})) == (
        State.STALE,
        "pins of torch-2.13.0-cpu changed",
    )


def test_a_suite_that_the_profile_has_now_makes_a_cell_stale(tmp_path: Path) -> None:
    cell = measured()
    fewer = cell.request.profile.model_copy(update={"suites": (Suite.EQUIVALENCE,)})
    request = cell.request.model_copy(update={"profile": fewer})
    assert "has the suite" in state_with(tmp_path, cell.model_copy(update={"request": request}))[1]


def test_other_repeats_or_iterations_make_a_cell_stale_and_another_timeout_does_not(tmp_path: Path) -> None:
    cell = measured()
    for field, value, expected in (("repeats", 2, State.STALE), ("timeout_minutes", 1.0, State.THERE)):
        profile = cell.request.profile.model_copy(update={field: value})
        changed = cell.model_copy(update={"request": cell.request.model_copy(update={"profile": profile})})
        state, why = state_with(tmp_path, changed)
        assert state is expected
        assert not why or why == "repeats of the profile quick was 2 and is 1"


def test_a_cell_that_was_measured_in_part_is_stale_once_its_limit_is_another(tmp_path: Path) -> None:
    cell = measured()
    assert cell.skipped, "it broke a limit, and the rest was left out"
    off = MATRIX.model_copy(update={"gates": {gate: GateLimit(max=10**9) for gate in Gate if not gate.rule.is_a_time}})
    write_cell(tmp_path / ROW.run, cell)
    assert kept_row(tmp_path, ROW, off).why == "it was measured in part, since it broke a limit that is another now"


def test_limits_of_today_are_those_that_a_run_is_judged_by(tmp_path: Path) -> None:
    keep(tmp_path, "cpu", MATRIX, profile="quick", cells=[measured()], revision="one")
    assert not has_other_limits(tmp_path, "cpu", MATRIX, "quick")
    other = MATRIX.model_copy(update={"gates": {**MATRIX.gates, Gate.SPEEDUP: GateLimit(min=9.0)}})
    assert has_other_limits(tmp_path, "cpu", other, "quick")
    before = load_run(tmp_path / "cpu")
    after = keep(tmp_path, "cpu", other, profile="quick", cells=[], revision="")
    assert after.info.gates[Gate.SPEEDUP].min == 9.0
    assert (after.cells, after.info.finished, after.info.git_revision) == (before.cells, before.info.finished, "one")


def test_a_cell_that_could_not_be_run_is_told_as_that(tmp_path: Path) -> None:
    crashed = measured().model_copy(update={"failure": Failure(kind="crash", message="killed"), "evidence": {}})
    assert state_with(tmp_path, crashed) == (State.COULD_NOT_RUN, "killed")


def test_a_suite_that_ended_in_an_error_makes_no_row_undecided_that_fails_by_what_was_measured(tmp_path: Path) -> None:
    """upstream breaks the limit of recompiles, whatever a suite that timed out would have measured."""
    cell, failure = measured(), Failure(kind="timeout", message="30 min are over")
    for lost, expected in ((Suite.SPEED, State.THERE), (Suite.RECOMPILE, State.COULD_NOT_RUN)):
        evidence = dict.fromkeys(cell.evidence) if lost is Suite.RECOMPILE else {lost: None}
        errors = {
            suite: SuiteEvidence(suite=suite, version=suite.rule.version, outcome=Outcome.ERROR, failure=failure)
            for suite in evidence
        }
        assert state_with(tmp_path, cell.model_copy(update={"evidence": {**cell.evidence, **errors}}))[0] is expected


def test_a_cell_that_was_compiled_for_more_gpus_than_are_asked_is_not_stale_and_one_for_fewer_is(
    tmp_path: Path,
) -> None:
    row = next(row for row in planned_rows(read_plan(REFERENCE / "plan.yaml"), MATRIX, "2.9.0"))
    assert row.architectures == ("sm_90",)
    request = matrix_request(MATRIX, ROOT / "matrix.yaml", row.cell, row.profile, Device.CPU)
    assert request.profile.architectures == ("sm_80", "sm_90", "sm_120")
    cell = measured().model_copy(update={"cell": row.cell, "request": request})
    assert state_with(tmp_path, cell, row)[0] is State.THERE
    fewer = matrix_request(MATRIX, Path(), row.cell, row.profile, Device.CPU, architectures=("sm_80",))
    other = cell.model_copy(update={"request": fewer})
    assert state_with(tmp_path, other, row) == (State.STALE, "it was not compiled for sm_90")


def test_cells_are_kept_beside_those_of_other_releases(tmp_path: Path) -> None:
    first = measured()
    second = read_cell(cell_path(REFERENCE / "cpu", "torch-2.13.0-cpu/fixed_size/default"))
    keep(tmp_path, "cpu", MATRIX, profile="quick", cells=[first], revision="one")
    run = keep(tmp_path, "cpu", MATRIX, profile="quick", cells=[second], revision="two")
    assert [cell.cell for cell in run.cells] == [first.cell, second.cell]
    assert run.info.git_revision == "two"
    assert load_run(tmp_path / "cpu").info.gates


def test_a_reference_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(tmp_path, "cpu", MATRIX, profile="quick", cells=[measured()], revision="")
    before = check_size(tmp_path)
    assert before > 10_000
    (tmp_path / "by-hand").mkdir()
    (tmp_path / "by-hand" / "run.json").write_bytes(b" " * 1000)
    (tmp_path / "cpu" / "compatibility.html").write_bytes(b" " * 1000)  # is not committed
    assert check_size(tmp_path) == before + 1000
    monkeypatch.setattr(kept_module, "MOST_BYTES", before + 2 * kept_module._BYTES_OF_A_CELL)
    with pytest.raises(StorageError, match="with 2 cells to come"):
        check_size(tmp_path, 2)
    monkeypatch.setattr(kept_module, "MOST_BYTES", 10_000)
    with pytest.raises(StorageError, match="the largest file is"):
        check_size(tmp_path)


def test_the_committed_reference_has_room_for_every_row_that_is_to_come() -> None:
    rows = [
        kept_row(REFERENCE, row, MATRIX)
        for release in read_plan(REFERENCE / "plan.yaml").releases
        for row in planned_rows(read_plan(REFERENCE / "plan.yaml"), MATRIX, release)
    ]
    check_size(REFERENCE, sum(row.state is State.MISSING for row in rows))


def test_a_run_of_the_plan_is_none_that_something_else_made() -> None:
    check_made_here(REFERENCE, list(read_plan(REFERENCE / "plan.yaml").runs))
    with pytest.raises(SelectionError, match=r"runs\.cuda-lowered: .* was not made by `nox -s reference`"):
        check_made_here(REFERENCE, ["cpu", "cuda-lowered"])


@pytest.mark.parametrize("killed_before", ["run.json", "upstream", "fixed_size"])
def test_after_a_kill_nothing_is_taken_for_kept_that_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_before: str
) -> None:
    """A kill while two cells are kept, before a file of theirs is written: the same command again keeps both."""
    rows = [row for row in planned_rows(read_plan(REFERENCE / "plan.yaml"), MATRIX, "2.13.0") if row.run == ROW.run]
    rows = [
        row for row in rows if row.cell.mode_and_settings == "default" and row.cell.cache in ("upstream", "fixed_size")
    ]
    cells = [read_cell(cell_path(REFERENCE / row.run, row.cell)) for row in rows]
    real = Path.replace

    def replace_file(self: Path, target: Path) -> Path:
        if killed_before in str(target):
            raise KeyboardInterrupt
        return real(self, target)

    with monkeypatch.context() as context:
        context.setattr(Path, "replace", replace_file)
        with pytest.raises(KeyboardInterrupt):
            keep(tmp_path, ROW.run, MATRIX, profile="quick", cells=cells, revision="")
    again = [
        cell for row, cell in zip(rows, cells, strict=True) if kept_row(tmp_path, row, MATRIX).state is not State.THERE
    ]
    run = keep(tmp_path, ROW.run, MATRIX, profile="quick", cells=again, revision="")
    assert {cell.cell for cell in run.cells} == {row.cell for row in rows}
