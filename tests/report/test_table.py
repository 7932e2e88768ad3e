"""The table fits a terminal, is clear without colour, and pastes as Markdown."""

import re

import pytest

from tests.verdict.sample_cells import good_result, production_incident, with_figures, with_suite
from tests.verdict.stored_runs import judged_run
from toto_compat.contract.cell_name import CellName
from toto_compat.contract.result import CellResult, Failure, Figure, Outcome, SuiteEvidence
from toto_compat.contract.suites import Suite
from toto_compat.matrix.gates import Gate
from toto_compat.report.command import FORMATS
from toto_compat.report.compatibility import compatibility
from toto_compat.report.publish import closing_lines
from toto_compat.report.table import gate_columns, markdown_table, skipped_line, terminal_table


def shown(*results: CellResult, colour: bool = False) -> str:
    return terminal_table(judged_run(*results), colour=colour)


def as_markdown(*results: CellResult) -> str:
    return markdown_table(judged_run(*results))


def rows_of(text: str) -> list[str]:
    """The table without the closing sentence, which a terminal wraps by itself."""
    return text.rsplit("\n\n", 1)[0].splitlines()


def test_the_widest_rows_fit_a_hundred_columns() -> None:
    undecided = with_figures(
        good_result(
            cache="compile_friendly", mode="reduce-overhead", settings_name="production", torch="2.13.0", build="cu130"
        ),
        {Gate.LATENCY_STABILITY: Figure(value=None, missing="too few"), Gate.RECOMPILES_TOTAL: 9.0},
    )
    long_name = production_incident(mode="max-autotune").model_copy()
    text = shown(undecided, long_name)
    assert max(len(line) for line in rows_of(text)) <= 100
    assert "? INCONCLUSIVE" in text


def test_a_long_cache_name_is_wrapped_and_not_cut() -> None:
    text = shown(good_result(cache="our_own_very_long_cache_name_v2"))
    assert max(len(line) for line in rows_of(text)) <= 100
    first_column = "".join(line[:16].strip() for line in rows_of(text)[3:5])
    assert first_column == "our_own_very_long_cache_name_v2"[: len(first_column)]


def test_verdicts_have_text_and_shape_without_colour() -> None:
    text = shown(good_result(), production_incident())
    assert "+ PASS" in text
    assert "x FAIL" in text
    assert "\x1b" not in text


def test_colour_is_added_only_when_asked_and_changes_no_text() -> None:
    coloured = shown(good_result(), production_incident(), colour=True)
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == shown(good_result(), production_incident())


def test_the_row_shows_counts_equivalence_and_speedup() -> None:
    line = next(line for line in rows_of(shown(production_incident())) if line.startswith("list_index"))
    for part in ("recompile_limit", "PASS", "0/43", "132", "x"):
        assert part in line


def test_the_closing_sentence_answers_and_never_speaks_of_cuda_from_cpu_rows() -> None:
    closing = shown(good_result()).rsplit("\n\n", 1)[1]
    assert closing.startswith("On CUDA it is not known")
    assert "On the CPU compile can be re-enabled in torch-2.13.0-cpu with cache fixed_size, mode default" in closing


def test_markdown_is_one_table_with_predictions_marked() -> None:
    text = as_markdown(good_result(), production_incident())
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 4
    assert len({line.replace("\\|", "").count("|") for line in lines}) == 1
    assert "~8" in text
    assert "~0" in text


def test_text_from_torch_can_not_break_the_markdown_table() -> None:
    hostile = with_figures(
        good_result(), {Gate.MEMORY: Figure(value=None, missing="a | b <script>alert(1)</script>\nc")}
    )
    text = as_markdown(hostile)
    assert "<script>" not in text
    assert "a \\| b" in text


@pytest.mark.parametrize("form", ["md", "summary", "decision"])
def test_text_from_a_cell_is_no_link_and_no_image_in_markdown(form: str) -> None:
    message = "![x](https://host/x.png) [click](javascript:alert(1)) <b> |"
    failed = [
        good_result(cache=cache).model_copy(update={"failure": Failure(kind="crash", message=message)})
        for cache in ("upstream", "fixed_size")
    ]
    text = FORMATS[form](judged_run(*failed))
    assert "click" in text
    assert "](" not in text and "<b>" not in text


def test_a_hostile_name_of_a_cell_is_shown_in_the_table_and_not_obeyed() -> None:
    name = CellName("torch-2.13.0-cpu\x1b]0;title\x07/fixed\x1b[2J_size/default\u202e+a\x9b2J")
    hostile = good_result().model_copy(update={"cell": name})
    text = terminal_table(judged_run(hostile), colour=True)
    assert "fixed_size" in text
    assert re.search(r"\x1b(?!\[\d+m)|[\x07\x80-\x9f\u202e]", text) is None


def test_a_failure_of_one_huge_line_does_not_fill_the_terminal() -> None:
    failure = Failure(kind="crash", message="x" * 3_000_000, last_lines=("y" * 3_000_000,))
    judged = judged_run(good_result().model_copy(update={"failure": failure}))
    told = list(closing_lines(judged, ()))
    assert told[0].startswith("could not be run: ") and told[0].endswith("xxx...")
    assert sum(map(len, told)) < 10_000


def test_an_empty_run_still_answers() -> None:
    assert "On CUDA it is not known" in shown()


def test_the_columns_are_those_of_the_gate_table() -> None:
    shown_gates = {gate for column in gate_columns() for gate in column}
    assert shown_gates == {gate for gate in Gate if gate.rule.column}
    header = next(line for line in as_markdown(good_result()).splitlines() if line.startswith("|"))
    for gate in shown_gates:
        assert gate.rule.column is not None
        assert gate.rule.column.title in header


def test_what_a_cell_skipped_is_told_below_the_table_once_for_each_reason() -> None:
    why = "recompiles is 22, limit <= 0, so that this cell cannot PASS"
    result = production_incident()
    memory = SuiteEvidence(suite=Suite.MEMORY, outcome=Outcome.NOT_RUN, failure=Failure(kind="skipped", message=why))
    speed = result.evidence[Suite.SPEED].model_copy(update={"skipped": f"1 of 3 processes: {why}"})
    lost = with_suite(with_suite(result, Suite.MEMORY, memory), Suite.SPEED, speed)
    line = f"skipped in {result.cell}: memory ({why}); speed in part (1 of 3 processes: {why})"
    assert skipped_line(lost) == line
    assert line.replace("<", "&lt;") in as_markdown(good_result(), lost).splitlines()
    assert "skipped in" not in as_markdown(good_result(), result)
    judged = judged_run(lost)
    assert line in list(closing_lines(judged, ()))
    assert compatibility(judged)["rows"][0]["skipped"] == lost.skipped
