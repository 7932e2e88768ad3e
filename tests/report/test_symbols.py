"""Symbols in the reports: a row each under their cell, whatever they are called."""

import json
from typing import Any

import pytest

from tests.report.hostile import HOSTILE
from tests.verdict.sample_cells import GATES, good_result
from tests.verdict.stored_runs import judged_run
from toto_compat.contract.request import CsvSeries, SymbolSeries
from toto_compat.contract.result import CellResult, Figure, Outcome, SuiteEvidence
from toto_compat.contract.suites import Suite
from toto_compat.matrix.gates import Gate
from toto_compat.report.compatibility import as_json, row
from toto_compat.report.html import render_page
from toto_compat.report.page_data import cell_details
from toto_compat.report.symbols import escaped_name, symbols_markdown, symbols_table
from toto_compat.report.table import markdown_table, terminal_table
from toto_compat.verdict.comparison import Change, compare
from toto_compat.verdict.judge import Status, judge
from toto_compat.verdict.judged_run import JudgedRun, judge_run

LIMITS = {
    **GATES,
    **{gate: gate.rule.default for gate in Gate if gate.rule.suite is Suite.SYMBOLS and gate.rule.default},
}


def with_symbols(names: tuple[str, ...], *, content: str = "1", **figures: float | None) -> CellResult:
    """A good cell that also forecast series of these names; `figures` are those of the worst."""
    result = good_result()
    measured = {"symbol_equivalence": 0.5, "symbol_mae": 0.0, "symbol_recompiles": 0.0, "symbol_speedup": 3.0} | figures
    rows: list[dict[str, Any]] = [
        {
            "symbol": name,
            "mae_eager": 1822.25,
            "mae_compiled": 1822.25,
            "difference": measured["symbol_mae"],
            "equivalence": 0.5,
            "speedup": 3.0,
            "recompiles": 0,
            "notes": ["constant: every value is 5"],
            "problem": "",
        }
        for name in names
    ]
    evidence = SuiteEvidence(
        suite=Suite.SYMBOLS,
        outcome=Outcome.MEASURED,
        figures={
            name: Figure(value=value, missing="" if value is not None else f"{names[0]}: no forecast")
            for name, value in measured.items()
        },
        details={"symbols": rows, "worst": dict.fromkeys(measured, names[0])},
    )
    series = CsvSeries(path="0.csv", time_column="time", value_columns=("close",))
    symbols = tuple(SymbolSeries(name=name, series=series, content=content) for name in names)
    profile = result.request.profile.model_copy(update={"suites": (*result.request.profile.suites, Suite.SYMBOLS)})
    return result.model_copy(
        update={
            "evidence": {**result.evidence, Suite.SYMBOLS: evidence},
            "request": result.request.model_copy(update={"symbols": symbols, "profile": profile}),
        }
    )


def judged_by_limits(result: CellResult) -> JudgedRun:
    return judge_run(judged_run(result).run, LIMITS)


def test_the_worst_symbol_decides_and_is_named_in_the_reason() -> None:
    assert judge(with_symbols(("AAPL",)), LIMITS).verdict is Status.PASS
    cases: tuple[tuple[dict[str, Any], Gate], ...] = (
        ({"symbol_equivalence": 1.5}, Gate.SYMBOL_EQUIVALENCE),
        ({"symbol_mae": 0.02}, Gate.SYMBOL_MAE),
        ({"symbol_mae": float("nan")}, Gate.SYMBOL_MAE),
        ({"symbol_recompiles": 1.0}, Gate.SYMBOL_RECOMPILES),
        ({"symbol_speedup": 0.9}, Gate.SYMBOL_SPEEDUP),
    )
    for figures, gate in cases:
        judged = judge(with_symbols(("AAPL", "BTCUSD"), **figures), LIMITS)
        assert (judged.verdict, judged.decided_by) == (Status.FAIL, gate)
        assert "AAPL is the worst" in judged.reason


def test_a_symbol_without_a_figure_is_inconclusive() -> None:
    judged = judge(with_symbols(("AAPL",), symbol_mae=None), LIMITS)
    assert (judged.verdict, judged.decided_by) == (Status.INCONCLUSIVE, Gate.SYMBOL_MAE)
    assert "AAPL: no forecast" in judged.reason


def test_gates_of_symbols_say_nothing_of_a_cell_that_was_given_none() -> None:
    judged = judge(good_result(), LIMITS)
    assert judged.verdict is Status.PASS
    assert not [gate for gate in judged.gates if gate.rule.suite is Suite.SYMBOLS]


def test_a_suite_that_did_not_run_where_symbols_were_given_is_inconclusive() -> None:
    result = with_symbols(("AAPL",))
    evidence = {suite: one for suite, one in result.evidence.items() if suite is not Suite.SYMBOLS}
    judged = judge(result.model_copy(update={"evidence": evidence}), LIMITS)
    assert (judged.verdict, judged.decided_by) == (Status.INCONCLUSIVE, Gate.SYMBOL_EQUIVALENCE)


def test_the_reports_have_a_row_per_symbol() -> None:
    judged = judged_by_limits(with_symbols(("AAPL", "BTCUSD")))
    for text in (terminal_table(judged), markdown_table(judged)):
        assert "1822" in text and "AAPL" in text and "BTCUSD" in text
    symbols = row(judged.cells[0])["symbols"]
    assert [one["symbol"] for one in symbols] == ["AAPL", "BTCUSD"]
    assert symbols[0]["mae_eager"] == 1822.25
    assert [one[0] for one in cell_details(judged.cells[0], [], 0)["symbols"]] == ["AAPL", "BTCUSD"]


def test_a_terminal_is_wide_enough_for_any_name() -> None:
    cell = judge(with_symbols(("A-VERY-LONG-NAME-OF-A-SERIES-THAT-NOBODY-WOULD-GIVE", "B\n\x1b[31m")), LIMITS)
    table = symbols_table(cell)
    assert max(len(line) for line in table.splitlines()) <= 100
    assert "\x1b" not in table


@pytest.mark.parametrize(
    "name", [HOSTILE, "a|b", "`code`", "[x](http://x)", "![x](http://x)", "*b* _i_", "# h", "\n- x"]
)
def test_a_hostile_name_is_text_in_markdown_and_on_the_page(name: str) -> None:
    judged = judged_by_limits(with_symbols((name,), symbol_mae=0.5))
    table = symbols_markdown(judged.cells[0])
    lines = table.splitlines()
    assert len(lines) == 5  # a title, an empty line, and a table of one row
    assert lines[-1].replace("\\|", "").count("|") == 8
    assert "<" not in table
    assert "<script>alert" not in render_page(judged, {}).replace("&lt;script", "")
    assert json.loads(as_json(row(judged.cells[0])))["symbols"][0]["symbol"] == name


def test_escaped_markdown_has_no_markup_left() -> None:
    assert escaped_name("[a](b) <i> `c` *d* a|b & \\") == (r"\[a\]\(b\) &lt;i&gt; \`c\` \*d\* a\|b &amp; " + "\\\\")


def test_a_diff_tells_other_series_from_worse_ones() -> None:
    before = judge(with_symbols(("AAPL",)), LIMITS)
    worse = judge(with_symbols(("AAPL",), symbol_mae=0.5), LIMITS)
    others = judge(with_symbols(("AAPL",), content="2", symbol_mae=0.5), LIMITS)
    without = judge(good_result(), LIMITS)
    assert compare([before], [worse])[0].change is Change.REGRESSED
    [changed] = compare([before], [others])
    assert changed.change is Change.SAME
    assert "symbol_mae is of other series of yours in each run" in changed.text
    assert compare([before], [without])[0].change is Change.SAME


def test_a_damaged_table_of_symbols_is_shown_as_far_as_it_goes() -> None:
    result = with_symbols(("AAPL",))
    evidence = result.evidence[Suite.SYMBOLS]
    for damaged in ("none", [1, {"symbol": 3, "speedup": "fast", "notes": 7}], {"a": 1}):
        changed = evidence.model_copy(update={"details": {"symbols": damaged}})
        cell = judge(result.model_copy(update={"evidence": {**result.evidence, Suite.SYMBOLS: changed}}), LIMITS)
        symbols_table(cell)
        symbols_markdown(cell)
