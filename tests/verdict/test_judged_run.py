"""A stored run is judged again without rerunning it, by its own limits or by another file's."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.verdict.sample_cells import (
    GATES,
    good_result,
    production_incident,
    speed_of,
    speed_run,
    with_figures,
    with_suite,
)
from tests.verdict.stored_runs import store_run
from toto_compat.contract.gate_limit import GateLimit
from toto_compat.contract.request import Device
from toto_compat.contract.result import CellResult
from toto_compat.contract.suites import Suite
from toto_compat.errors import MatrixFileError, SelectionError, StorageError
from toto_compat.evidence.store import RunInfo, cell_path, load_run
from toto_compat.matrix.gates import Gate
from toto_compat.verdict.decision import Answer
from toto_compat.verdict.judge import Status
from toto_compat.verdict.judged_run import JudgedRun, judge_run, read_gates


def info_of(folder: Path) -> RunInfo:
    return load_run(folder).info


def test_an_old_run_is_judged_by_other_limits(tmp_path: Path) -> None:
    folder = store_run(tmp_path, "r1", [with_figures(good_result(), {Gate.RECOMPILES_TOTAL: 5.0})])
    assert judge_run(load_run(folder)).cells[0].verdict is Status.PASS
    other = tmp_path / "other.yaml"
    other.write_text("recompiles_total: {max: 2}\n", encoding="utf-8")
    judged = judge_run(load_run(folder), read_gates(other, info_of(folder)))
    assert judged.cells[0].decided_by is Gate.RECOMPILES_TOTAL
    assert judged.gates == {**GATES, Gate.RECOMPILES_TOTAL: GateLimit(max=2)}


def test_a_file_with_one_limit_leaves_the_runs_other_gates_in_force(tmp_path: Path) -> None:
    folder = store_run(tmp_path, "r1", [production_incident(), good_result()])
    other = tmp_path / "other.yaml"
    other.write_text("gates: {speedup: {min: 1.0}}\n", encoding="utf-8")
    judged = judge_run(load_run(folder), read_gates(other, info_of(folder)))
    assert {cell.result.request.cell.cache: cell.verdict for cell in judged.cells} == {
        "list_index": Status.FAIL,
        "fixed_size": Status.PASS,
    }


def test_by_a_stricter_limit_the_row_with_the_fewest_failures_is_still_the_closest(tmp_path: Path) -> None:
    folder = store_run(tmp_path, "r1", [production_incident(), good_result()])
    other = tmp_path / "other.yaml"
    other.write_text("speedup: {min: 5}\n", encoding="utf-8")
    judged = judge_run(load_run(folder), read_gates(other, info_of(folder)))
    assert "closest is torch-2.13.0-cpu/fixed_size/default" in judged.decision.devices[Device.CPU].sentence


def test_gates_of_a_matrix_file_take_the_profiles_own_on_top(tmp_path: Path) -> None:
    info = info_of(store_run(tmp_path, "r1", [good_result()], gates={}))
    path = tmp_path / "matrix.yaml"
    path.write_text(
        "gates: {speedup: {min: 2}, memory: {max: 1.5}}\nprofiles: {strict: {gates: {speedup: {min: 3}}}}\n",
        encoding="utf-8",
    )
    assert read_gates(path, info)[Gate.SPEEDUP].min == 2
    strict = read_gates(path, info.model_copy(update={"profile": "strict"}))
    assert strict[Gate.SPEEDUP].min == 3
    assert strict[Gate.MEMORY].max == 1.5


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("recompile: {max: 0}", "did you mean recompile"),
        ("speedup: {least: 2}", "speedup.least"),
        ("speedup: {}", "a gate needs min or max"),
        ("- speedup", "accepted a mapping"),
        ("a: [", "accepted well-formed YAML"),
        ("speedup: {min: 2}\nspeedup: {min: 1}", "speedup"),
        ("speedup: !!python/name:os.system", "the tag"),
        ("speedup: " + "[" * 10_000, "nested too deeply"),
        ("gates: 3", "gates"),
    ],
)
def test_a_mistake_in_a_gates_file_names_the_file_and_the_key(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "gates.yaml"
    path.write_text(text, encoding="utf-8")
    info = info_of(store_run(tmp_path, "r1", [good_result()]))
    with pytest.raises(MatrixFileError) as caught:
        read_gates(path, info)
    assert "gates.yaml" in str(caught.value)
    assert told in str(caught.value)


def test_a_missing_gates_file_is_an_error_with_its_name(tmp_path: Path) -> None:
    info = info_of(store_run(tmp_path, "r1", [good_result()]))
    with pytest.raises(MatrixFileError, match=r"absent\.yaml"):
        read_gates(tmp_path / "absent.yaml", info)


def test_a_run_without_limits_asks_for_them(tmp_path: Path) -> None:
    folder = store_run(tmp_path, "r1", [good_result()], gates={})
    with pytest.raises(SelectionError, match="no gate limits"):
        judge_run(load_run(folder))


def test_a_damaged_cell_is_an_error_and_not_a_missing_row(tmp_path: Path) -> None:
    folder = store_run(tmp_path, "r1", [good_result()])
    path = next((folder / "cells").rglob("*.json"))
    path.write_text(path.read_text(encoding="utf-8")[:200], encoding="utf-8")
    with pytest.raises(StorageError, match=path.name):
        judge_run(load_run(folder))


def test_rows_come_by_device_and_release_and_then_as_planned(tmp_path: Path) -> None:
    results = [
        good_result(torch="2.10.0", build="cu128"),
        good_result(torch="2.9.0", build="cu128"),
        good_result(cache="upstream"),
        good_result(cache="fixed_size"),
    ]
    folder = store_run(tmp_path, "r1", results)
    assert [cell.result.cell for cell in judge_run(load_run(folder)).cells] == [
        "torch-2.13.0-cpu/upstream/default",
        "torch-2.13.0-cpu/fixed_size/default",
        "torch-2.9.0-cu128/fixed_size/default",
        "torch-2.10.0-cu128/fixed_size/default",
    ]


def stopped_before(tmp_path: Path, *unfinished: CellResult, finished: Sequence[CellResult]) -> JudgedRun:
    folder = store_run(tmp_path, "stopped", [*finished, *unfinished], device="cuda")
    for cell in unfinished:
        cell_path(folder, cell.cell).unlink()
    return judge_run(load_run(folder))


def test_a_run_that_was_stopped_does_not_decide_to_keep_compile_off(tmp_path: Path) -> None:
    waiting = good_result(build="cu128"), good_result(build="cu128", mode="reduce-overhead")
    judged = stopped_before(tmp_path, *waiting, finished=[production_incident(build="cu128")])
    found = judged.decision.devices[Device.CUDA]
    assert found.answer is Answer.NOT_ENOUGH_EVIDENCE
    assert "torch-2.13.0-cu128/fixed_size/default was planned and has no result, nor have 1 more" in found.sentence
    assert found.next_commands == (
        "toto-compat matrix 'torch-2.13.0-cu128/fixed_size/default' --profile quick --device cuda",
        "toto-compat matrix 'torch-2.13.0-cu128/fixed_size/reduce-overhead' --profile quick --device cuda",
    )
    assert found.next_commands[0] in found.sentence


def test_a_row_that_passed_before_the_run_was_stopped_still_enables(tmp_path: Path) -> None:
    judged = stopped_before(tmp_path, production_incident(build="cu128"), finished=[good_result(build="cu128")])
    assert judged.decision.devices[Device.CUDA].answer is Answer.ENABLE


def test_a_cache_that_gains_alone_does_not_keep_compile_off_while_cells_are_unfinished(tmp_path: Path) -> None:
    by_itself = speed_of(speed_run(upstream_ms=90.0, cache_ms=30.0, compiled_ms=30.0))
    alone = with_suite(good_result(build="cu128"), Suite.SPEED, by_itself)
    judged = stopped_before(tmp_path, production_incident(build="cu128"), finished=[alone])
    assert judged.decision.devices[Device.CUDA].answer is Answer.NOT_ENOUGH_EVIDENCE


def test_what_is_unfinished_on_one_device_leaves_the_other_decided(tmp_path: Path) -> None:
    judged = stopped_before(tmp_path, good_result(), finished=[production_incident(build="cu128")])
    assert judged.decision.devices[Device.CUDA].answer is Answer.KEEP_OFF
    assert judged.decision.devices[Device.CPU].answer is Answer.NOT_ENOUGH_EVIDENCE
    assert judged.decision.devices[Device.CPU].next_commands == (
        "toto-compat matrix 'torch-2.13.0-cpu/fixed_size/default' --profile quick --device cpu",
    )


def test_undecided_rows_of_a_stopped_run_are_to_be_run_again_too(tmp_path: Path) -> None:
    undecided = with_figures(good_result(build="cu128"), {Gate.MEMORY: None})
    judged = stopped_before(tmp_path, production_incident(build="cu128"), finished=[undecided])
    assert judged.decision.devices[Device.CUDA].next_commands == (
        "toto-compat matrix 'torch-2.13.0-cu128/list_index/default' --profile quick --device cuda",
        "toto-compat matrix 'torch-2.13.0-cu128/fixed_size/default' --profile quick --device cuda --fresh",
    )


def test_a_cell_that_was_only_compiled_does_not_speak_for_unfinished_ones_that_were_to_run(tmp_path: Path) -> None:
    """As in merged runs of machines with a GPU and without one."""
    cell = good_result(build="cu128", cache="upstream")
    only_compiled = cell.model_copy(update={"request": cell.request.model_copy(update={"lower_only": True})})
    finished = [production_incident(build="cu128"), only_compiled]
    judged = stopped_before(tmp_path, good_result(build="cu128"), finished=finished)
    found = judged.decision.devices[Device.CUDA]
    assert found.answer is Answer.NOT_ENOUGH_EVIDENCE
    assert found.next_commands[0] == (
        "toto-compat matrix 'torch-2.13.0-cu128/fixed_size/default' --profile quick --device cuda"
    )
