"""The decision record stands on its own: the answer, its evidence, its date and when to look again."""

from datetime import date
from pathlib import Path

from tests.verdict.sample_cells import good_result, production_incident
from tests.verdict.stored_runs import store_run
from toto_compat.contract.result import Figure
from toto_compat.evidence.store import load_run
from toto_compat.report.record import decision_record, forecasts_text
from toto_compat.verdict.judged_run import judge_run


def test_the_record_holds_answer_evidence_date_and_when_to_look_again(tmp_path: Path) -> None:
    results = [
        good_result(torch="2.9.0", build="cu128", mode="reduce-overhead"),
        production_incident(torch="2.9.0", build="cu128"),
    ]
    text = decision_record(judge_run(load_run(store_run(tmp_path, "nightly", results))))
    for part in (
        "Date: 2026-11-16",
        "## CUDA: Enable compile",
        "TOTO_COMPILE_MODE=reduce-overhead",
        "good in 2.9.0",
        "| list_index/default | fails in 2.9.0 | FAIL | recompile_limit |",
        "| speedup | >= 2 |",
        "At the latest on 2027-02-14",
        "forecasts from a cold start",
    ):
        assert part in text, part


def test_missing_evidence_comes_with_the_command_to_run(tmp_path: Path) -> None:
    text = decision_record(judge_run(load_run(store_run(tmp_path, "cpu", [good_result()]))))
    assert "## CUDA: Not enough evidence" in text
    assert "nox -s matrix -- --device cuda" in text
    assert "As soon as the missing evidence" in text


def test_a_break_even_that_never_comes_says_so() -> None:
    assert forecasts_text(Figure(value=None, missing="never: not faster")) == "never: not faster"
    assert forecasts_text(Figure(value=1234.0)) == "1,234 forecasts"
    assert forecasts_text(None) == "not measured"


def test_the_four_conditions_are_a_checklist_with_evidence(tmp_path: Path) -> None:
    text = decision_record(judge_run(load_run(store_run(tmp_path, "cpu", [good_result(), production_incident()]))))
    cpu = text.partition("## CPU")[2]
    assert "- [x] Recompiles in the KV cache are fixed (torch-2.13.0-cpu/fixed_size/default: recompile_limit 0" in cpu
    assert "- [x] Fewer than 10 recompiles a run" in cpu
    assert "- [ ] Consistently at least 2x faster (not known: " in cpu
    assert text.partition("## CPU")[0].count("- [ ]") == 4


def test_a_record_past_its_review_date_says_so_first(tmp_path: Path) -> None:
    run = load_run(store_run(tmp_path, "cpu", [good_result()]))
    assert "STALE" not in decision_record(judge_run(run, today=date(2027, 2, 14)))
    assert "STALE, it was to be reviewed by 2027-02-14" in decision_record(judge_run(run, today=date(2027, 2, 15)))
