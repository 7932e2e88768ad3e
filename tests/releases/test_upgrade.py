"""What is said before an upgrade follows from stored evidence: verdicts, reasons, defaults, lowering, times, advice."""

from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from tests.verdict.sample_cells import (
    cell_request,
    good_result,
    production_incident,
    speed_of,
    speed_run,
    with_figures,
    with_suite,
)
from tests.verdict.stored_runs import judged_run, store_run, stored
from toto_compat.contract.request import Device, Workload
from toto_compat.contract.result import CellResult, Failure, Outcome, SuiteEvidence
from toto_compat.contract.suites import Suite
from toto_compat.errors import ExitCode, SelectionError
from toto_compat.matrix.gates import Gate
from toto_compat.reference.thinning import thinned
from toto_compat.releases.difference import reasons_of
from toto_compat.releases.upgrade import Advice, Upgrade, compare_release, moved_defaults, upgrade_lines
from toto_compat.releases.upgrade_command import reference_cells


def of_new(**changes: Any) -> CellResult:
    return good_result(torch="2.14.1", **changes)


def upgrade_from(before: CellResult, after: CellResult, **known: Any) -> Upgrade:
    return compare_release("2.14.1", judged_run(after).cells, judged_run(before).cells, **known)


def said(upgrade: Upgrade, **options: bool) -> str:
    return "\n".join(upgrade_lines(upgrade, **options))


def with_reasons(result: CellResult, *rows: tuple[str, str, str, int]) -> CellResult:
    listed = [dict(zip(("kind", "function", "reason", "count"), row, strict=True)) for row in rows]
    evidence = result.evidence[Suite.RECOMPILE]
    return with_suite(result, Suite.RECOMPILE, evidence.model_copy(update={"details": {"reasons": listed}}))


def with_lowering(result: CellResult, **figures: Any) -> CellResult:
    row = {"architecture": "sm_90", "card": "H100", "graphs": 3, "lowered": 3, "captured_whole": 3, "seconds": 84.2}
    row |= {"partitions": 3, "captured_partitions": 3, "kernels": 35, "most_registers": 134, "spilling_kernels": 0}
    row |= {"library_calls": {}, "values_on_cpu": 0, "errors": {}, **figures}
    evidence = SuiteEvidence(suite=Suite.CUDA_LOWERING, outcome=Outcome.MEASURED, details={"architectures": [row]})
    return with_suite(result, Suite.CUDA_LOWERING, evidence)


def test_a_release_as_good_as_the_reference_can_be_taken() -> None:
    upgrade = upgrade_from(good_result(), of_new())
    assert (upgrade.advice, upgrade.exit_code) == (Advice.UPGRADE, ExitCode.OK)
    assert "recommendation: nothing that was measured on cpu speaks against torch 2.14.1" in said(upgrade)
    assert said(upgrade).startswith("torch 2.14.1 against 2.13.0")


def test_a_row_that_passed_and_fails_now_keeps_the_upgrade_away() -> None:
    worse = with_figures(of_new(), {Gate.RECOMPILES: 4.0})
    upgrade = upgrade_from(good_result(), worse)
    assert (upgrade.advice, upgrade.exit_code) == (Advice.STAY, ExitCode.FINDINGS)
    assert "fixed_size/default: PASS -> FAIL" in said(upgrade)
    assert "do not upgrade to torch 2.14.1: fixed_size/default" in said(upgrade)


def test_a_row_that_still_passes_and_is_a_third_slower_is_to_be_looked_at() -> None:
    slower = speed_of(speed_run(upstream_ms=90.0, cache_ms=70.0, compiled_ms=30.0))
    faster = speed_of(speed_run(upstream_ms=90.0, cache_ms=70.0, compiled_ms=20.0))
    upgrade = upgrade_from(with_suite(good_result(), Suite.SPEED, faster), with_suite(of_new(), Suite.SPEED, slower))
    assert (upgrade.advice, upgrade.exit_code) == (Advice.LOOK, ExitCode.FINDINGS)
    assert "speedup" in said(upgrade).rpartition("recommendation:")[2]


def test_what_failed_before_and_fails_worse_now_does_not_keep_the_upgrade_away() -> None:
    before = production_incident()
    after = with_figures(production_incident(torch="2.14.1"), {Gate.RECOMPILES_TOTAL: 60.0})
    upgrade = upgrade_from(before, after)
    assert upgrade.advice is Advice.UPGRADE
    assert "recompiles_total 43 before, 60 now" in said(upgrade)
    assert "compile stays off" in said(upgrade)


def test_a_passing_row_that_could_not_be_run_is_no_recommendation() -> None:
    crash = of_new().model_copy(update={"evidence": {}, "failure": Failure(kind="crash", message="exit code 139")})
    upgrade = upgrade_from(good_result(), crash)
    assert (upgrade.advice, upgrade.exit_code) == (Advice.UNKNOWN, ExitCode.CELL_NOT_RUN)
    assert "exit code 139" in said(upgrade)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"workload": Workload(context=(256, 512)), "workload_name": "smoke"}, "this run smoke"),
        ({"settings": cell_request().settings.model_copy(update={"mark_dynamic": True})}, "other settings"),
    ],
)
def test_answers_to_another_question_are_not_compared(change: dict[str, Any], told: str) -> None:
    other = of_new()
    other = other.model_copy(update={"request": other.request.model_copy(update=change)})
    upgrade = upgrade_from(good_result(), other)
    assert upgrade.rows[0].before is None
    assert told in said(upgrade)
    assert upgrade.advice is Advice.UNKNOWN, "nothing was compared, so nothing is recommended"


def test_reasons_that_the_compiler_never_gave_before_are_told() -> None:
    known = ("recompile", "forward", "size mismatch at index N", 3)
    before = with_reasons(good_result(), known)
    after = with_reasons(of_new(), known, ("recompile", "append", "a new\x1b[31m guard", 2))
    text = said(upgrade_from(before, after))
    assert "fixed_size/default: recompile in append: a new [31m guard: 0 before, 2 now" in text
    assert "size mismatch" not in text


def test_a_reason_in_other_words_is_not_a_new_one() -> None:
    before = with_reasons(
        good_result(),
        ("graph_break", "seq_len", "Tensor.item", 23),
        ("recompile", "forward", "tensor 'L['inputs']' size mismatch at index N. expected N, actual N", 10),
    )
    after = with_reasons(
        of_new(),
        ("graph_break", "seq_len", "Unsupported Tensor.item() call with capture_scalar_outputs=False", 23),
        ("graph_break", "append", "Data-dependent branching", 6),
        ("recompile", "forward", "tensor 'inputs' size mismatch at index N. expected N, actual N", 9),
    )
    [new] = upgrade_from(before, after).rows[0].new_reasons
    assert new.text == "graph break in append: Data-dependent branching: 0 before, 6 now"


def test_where_nothing_was_counted_before_no_reason_is_new() -> None:
    raised = SuiteEvidence(
        suite=Suite.RECOMPILE,
        outcome=Outcome.MODEL_FAILED,
        failure=Failure(kind="exception", message="CppCompileError"),
    )
    after = with_reasons(of_new(), ("graph_break", "append", "Data-dependent branching", 6))
    assert upgrade_from(with_suite(good_result(), Suite.RECOMPILE, raised), after).rows[0].new_reasons == []


def test_reasons_of_a_thinned_reference_are_counted_by_its_events() -> None:
    """Of its table the largest are left: the others would be new in every release."""
    whole = stored(production_incident(), "2026-11-16T10:00:00Z")
    listed = [
        {"kind": kind, "function": function, "reason": reason, "count": count}
        for (kind, function, reason), count in reasons_of(whole).items()
    ]
    evidence = whole.evidence[Suite.RECOMPILE]
    cut = evidence.model_copy(update={"details": {"reasons": listed[:1], "thinned": {"reasons": "1 of 3"}}})
    assert reasons_of(with_suite(whole, Suite.RECOMPILE, cut)) == reasons_of(whole)
    details = {"reasons": listed, "events_seen": len(evidence.events), "events_kept": len(evidence.events)}
    told = evidence.model_copy(update={"details": details})
    thin = thinned(whole.model_copy(update={"evidence": {**whole.evidence, Suite.RECOMPILE: told}}))
    assert "reasons" not in thin.evidence[Suite.RECOMPILE].details
    assert reasons_of(thin) == reasons_of(whole)


def test_the_gate_that_turned_is_told_before_figures_that_moved() -> None:
    before = with_figures(good_result(), {Gate.MEMORY: 1.9, Gate.COMPILE_ACTIVE: 0.91})
    after = with_figures(of_new(), {Gate.MEMORY: 1.1, Gate.COMPILE_ACTIVE: 0.92})
    text = said(upgrade_from(before, after))
    assert "fixed_size/default: FAIL -> PASS (memory 1.9 before, 1.1 now, limit <= 1.5)" in text
    assert "fixed_size/default passes" in text


def test_a_setting_that_was_renamed_is_not_told_as_new() -> None:
    moved = moved_defaults(
        {"dynamo.cache_size_limit": 8},
        {"dynamo.cache_size_limit": 8, "dynamo.recompile_limit": 8},
        {"dynamo.recompile_limit": "dynamo.cache_size_limit"},
    )
    assert [one.text for one in moved] == [
        "dynamo.recompile_limit is the new name of dynamo.cache_size_limit, which still works: 8"
    ]


def test_why_nothing_was_compiled_for_cuda_is_told() -> None:
    skipped = SuiteEvidence(
        suite=Suite.CUDA_LOWERING, outcome=Outcome.NOT_RUN, failure=Failure(kind="skipped", message="2.9 is the first")
    )
    assert "not tried: 2.9 is the first" in said(
        upgrade_from(good_result(), with_suite(of_new(), Suite.CUDA_LOWERING, skipped))
    )


def test_defaults_that_moved_are_told_with_those_that_matter_first() -> None:
    before = {"dynamo.recompile_limit": 8, "inductor.a": 1, "dynamo.old": True, "dynamo.same": 3}
    after = {"dynamo.recompile_limit": 16, "inductor.a": 2, "dynamo.new": None, "dynamo.same": 3}
    moved = moved_defaults(before, after)
    assert [one.name for one in moved] == ["dynamo.recompile_limit", "dynamo.new", "dynamo.old", "inductor.a"]
    upgrade = upgrade_from(good_result(), of_new(), defaults=moved)
    short = said(upgrade)
    assert "dynamo.recompile_limit: 8 -> 16" in short and "and 3 others" in short and "inductor.a" not in short
    whole = said(upgrade, all_defaults=True)
    assert "dynamo.old is gone, it was True" in whole and "dynamo.new is new: None" in whole


def test_defaults_that_nobody_knows_are_not_said_to_be_the_same() -> None:
    assert "not known for one of the two releases" in said(upgrade_from(good_result(), of_new()))


def test_lowering_for_cuda_is_told_per_architecture_with_what_moved() -> None:
    before = with_lowering(good_result())
    after = with_lowering(of_new(), captured_whole=2, partitions=5, spilling_kernels=4, errors={"KeyError": 1})
    text = said(upgrade_from(before, after))
    assert "for sm_90: graphs 3, captured whole 3 -> 2, partitions 3 -> 5" in text
    assert "spilling kernels 0 -> 4" in text
    assert "1 graphs cannot be compiled: KeyError" in text
    assert "not tried" in said(upgrade_from(good_result(), of_new()))


def test_compile_time_and_speed_stand_beside_each_other() -> None:
    text = said(upgrade_from(good_result(), of_new(seed=3)))
    assert "fixed_size/default: warm start, s 4.2" in text
    assert "median forecast, ms" in text


# --- the reference ----------------------------------------------------------------------------------------------------


def test_the_newest_older_release_of_the_references_is_compared_with(tmp_path: Path) -> None:
    for torch in ("2.9.0", "2.13.0", "2.15.0"):
        store_run(tmp_path, f"reference/cpu-{torch}", [good_result(torch=torch)])
    [cell] = reference_cells(tmp_path, None, Version("2.14.1"), Device.CPU)
    assert cell.result.request.environment.torch == "2.13.0"
    [cell] = reference_cells(tmp_path, None, Version("2.16.0"), Device.CPU)
    assert cell.result.request.environment.torch == "2.15.0"
    [cell] = reference_cells(tmp_path, "reference/cpu-2.9.0", Version("2.16.0"), Device.CPU)
    assert cell.result.request.environment.torch == "2.9.0"


def test_of_two_references_of_one_release_the_newer_run_counts(tmp_path: Path) -> None:
    old, new = good_result(), with_figures(good_result(), {Gate.GRAPH_BREAKS: 3.0})
    store_run(tmp_path, "reference/a-newer", [new], started="2026-11-17T10:00:00Z")
    store_run(tmp_path, "reference/b-older", [old], started="2026-11-16T10:00:00Z")
    [cell] = reference_cells(tmp_path, None, Version("2.14.1"), Device.CPU)
    assert cell.gates[Gate.GRAPH_BREAKS].value == 3.0


def test_a_later_reference_of_another_workload_takes_no_rows_place(tmp_path: Path) -> None:
    """Production's forecast has a row fixed_size/default too, and is run after quick's."""
    asked = good_result().request
    other = good_result()
    other = other.model_copy(
        update={"request": asked.model_copy(update={"workload": Workload(model="base", context=(256, 512))})}
    )
    store_run(tmp_path, "reference/cpu", [good_result()], started="2026-11-16T10:00:00Z")
    store_run(tmp_path, "reference/production", [other], started="2026-11-17T10:00:00Z")
    newest = (tmp_path, None, Version("2.14.1"), Device.CPU)
    [cell] = reference_cells(*newest, [asked.workload])
    assert cell.result.request.workload == asked.workload
    [cell] = reference_cells(*newest, [other.request.workload])
    assert cell.result.request.workload == other.request.workload
    assert len(reference_cells(*newest, [Workload(seed=1)])) == 1, "to be told why it is not compared"


def test_no_reference_for_the_device_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    store_run(tmp_path, "reference/cpu", [good_result()])
    with pytest.raises(SelectionError, match="no run on cuda") as caught:
        reference_cells(tmp_path, None, Version("2.14.1"), Device.CUDA)
    assert "--reference" in caught.value.hint
