"""`report` and `diff` from the command line: formats, other limits, exit codes, clear errors."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

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
from toto_compat.cli import main
from toto_compat.contract.gate_limit import GateLimit
from toto_compat.contract.suites import Suite
from toto_compat.errors import ExitCode, SelectionError
from toto_compat.matrix.gates import Gate
from toto_compat.report.command import FORMATS, diff_command, report_command


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = tmp_path / "results"
    store_run(folder, "first", [good_result(), production_incident()], started="2026-11-01T10:00:00Z")
    slow = with_suite(
        good_result(), Suite.SPEED, speed_of(speed_run(upstream_ms=52.0, cache_ms=40.0, compiled_ms=25.2, seed=9))
    )
    store_run(folder, "slower", [slow, production_incident()], started="2026-11-02T10:00:00Z")
    store_run(folder, "again", [good_result(seed=5), production_incident()], started="2026-11-03T10:00:00Z")
    (folder / "latest").symlink_to("again")
    return folder


def report(results: Path, *arguments: str) -> Result:
    return CliRunner().invoke(report_command, [*arguments, "--results", str(results)], catch_exceptions=False)


def diff(results: Path, *arguments: str) -> Result:
    return CliRunner().invoke(diff_command, [*arguments, "--results", str(results)], catch_exceptions=False)


@pytest.mark.parametrize("form", [form for form in FORMATS if form != "html"])
def test_every_format_of_the_latest_run_is_printed(results: Path, form: str) -> None:
    finished = report(results, "--format", form)
    assert finished.exit_code == 0
    assert finished.stdout.strip()


@pytest.mark.parametrize(
    ("file", "content"),
    [("run.json", "{"), ("compatibility.json", '{"rows": [{"gates": "x"}]}'), ("compatibility.json", '{"rows": [1]}')],
)
def test_a_damaged_run_beside_it_is_told_and_left_out_of_the_page(results: Path, file: str, content: str) -> None:
    (results / "first" / file).write_text(content, encoding="utf-8")
    finished = report(results, "--format", "html")
    assert finished.exit_code == 0
    assert "first is left out of the history" in finished.stderr and str(results / "first" / file) in finished.stderr
    assert (results / "again" / "compatibility.html").is_file()


def test_a_pipe_in_a_run_beside_it_is_not_waited_for(results: Path) -> None:
    (results / "first" / "run.json").unlink()
    os.mkfifo(results / "first" / "run.json")
    finished = report(results, "--format", "html")
    assert "first is left out of the history" in finished.stderr


def test_json_of_a_named_run_is_its_table(results: Path) -> None:
    document = json.loads(report(results, "first", "--format", "json").stdout)
    assert {row["verdict"] for row in document["rows"]} == {"PASS", "FAIL"}


def test_other_limits_judge_an_old_run_and_leave_its_files_alone(results: Path, tmp_path: Path) -> None:
    strict = tmp_path / "strict.yaml"
    strict.write_text("gates: {speedup: {min: 50}}\n", encoding="utf-8")
    before = sorted(path.name for path in (results / "first").iterdir())
    document = json.loads(report(results, "first", "--format", "json", "--gates", str(strict)).stdout)
    assert {row["cache"]: row["decided_by"] for row in document["rows"]} == {
        "fixed_size": "speedup",
        "list_index": "recompile_limit",
    }
    assert sorted(path.name for path in (results / "first").iterdir()) == before


def test_output_goes_to_a_file(results: Path, tmp_path: Path) -> None:
    target = tmp_path / "out" / "table.md"
    assert report(results, "--format", "md", "--output", str(target)).stdout == ""
    assert target.read_text(encoding="utf-8").startswith("|")


def test_html_is_written_into_the_run_and_beside_it_for_other_limits(results: Path, tmp_path: Path) -> None:
    report(results, "first", "--format", "html")
    assert (results / "first" / "compatibility.html").is_file()
    strict = tmp_path / "strict.yaml"
    strict.write_text("speedup: {min: 50}\n", encoding="utf-8")
    report(results, "first", "--format", "html", "--gates", str(strict))
    assert (results / "first" / "compatibility-strict.html").is_file()


@pytest.mark.parametrize("words", [("--format", "html"), ("--format", "md"), ("--format", "env", "--open")])
def test_a_device_is_of_the_lines_for_an_env_file_alone(results: Path, words: tuple[str, ...]) -> None:
    assert report(results, *words, "--device", "cpu").exit_code == ExitCode.USAGE


def test_planned_cells_without_a_result_are_told(results: Path) -> None:
    (results / "first" / "cells" / "torch-2.13.0-cpu" / "list_index" / "default.json").unlink()
    finished = report(results, "first", "--format", "json")
    assert "1 planned cells have no result: torch-2.13.0-cpu/list_index/default" in finished.stderr
    assert len(json.loads(finished.stdout)["rows"]) == 1


@pytest.mark.parametrize("form", ["table", "md", "json", "html", "summary", "badge", "decision"])
def test_no_format_of_a_stopped_run_says_to_keep_compile_off(results: Path, tmp_path: Path, form: str) -> None:
    (results / "first" / "cells" / "torch-2.13.0-cpu" / "fixed_size" / "default.json").unlink()
    target = tmp_path / "shown"
    report(results, "first", "--format", form, "--output", str(target))
    text = target.read_text(encoding="utf-8").lower()
    assert "not enough evidence" in text
    assert "keep compile off" not in text and "keep off" not in text and "keep_off" not in text


def test_an_unknown_run_names_those_that_are_there(results: Path) -> None:
    with pytest.raises(SelectionError, match="again"):
        report(results, "absent")


def test_two_runs_of_the_same_thing_raise_no_alarm(results: Path) -> None:
    finished = diff(results, "first", "again", "--fail-on-regression")
    assert finished.exit_code == 0
    assert "0 regressed, 0 missing, 0 improved, 0 new, 2 same" in finished.stdout


def test_a_slowdown_is_told_and_fails_only_when_asked(results: Path) -> None:
    assert diff(results, "first", "slower").exit_code == 0
    finished = diff(results, "first", "slower", "--fail-on-regression")
    assert finished.exit_code == ExitCode.FINDINGS
    assert "| regressed | torch-2.13.0-cpu/fixed_size/default" in finished.stdout


def test_a_regression_fails_the_command_itself(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["diff", "first", "slower", "--fail-on-regression", "--results", str(results)]
    monkeypatch.setattr(sys, "argv", ["toto-compat", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == ExitCode.FINDINGS


@pytest.mark.parametrize("row_is_there", [False, True], ids=["the row is gone", "its evidence is gone"])
def test_a_row_that_is_no_longer_known_to_pass_fails_like_a_regression(results: Path, row_is_there: bool) -> None:
    undecided = with_figures(good_result(), {Gate.MEMORY: None})
    store_run(results, "lost", [undecided, production_incident()] if row_is_there else [production_incident()])
    assert diff(results, "first", "lost").exit_code == 0
    finished = diff(results, "first", "lost", "--fail-on-regression")
    assert finished.exit_code == ExitCode.FINDINGS
    assert "| missing  | torch-2.13.0-cpu/fixed_size/default" in finished.stdout


def test_a_failing_row_that_is_gone_is_no_regression(results: Path) -> None:
    store_run(results, "only-good", [good_result()])
    finished = diff(results, "first", "only-good", "--fail-on-regression")
    assert finished.exit_code == 0
    assert "1 missing" in finished.stdout


def test_a_copied_run_is_shown_under_the_name_that_finds_it(results: Path, tmp_path: Path) -> None:
    shutil.copytree(results / "first", results / "reference" / "cpu")
    assert diff(results, "first", "reference/cpu").stdout.startswith("first -> reference/cpu: ")
    document = json.loads(diff(results, "reference/cpu", "--json").stdout)
    assert (document["before"], document["after"]) == ("reference/cpu", "again")  # what `latest` points to
    for form in ("summary", "junit", "decision"):
        assert "reference/cpu" in report(results, "reference/cpu", "--format", form).stdout
    report(results, "reference/cpu", "--format", "html")
    assert "<b>reference/cpu</b>" in (results / "reference" / "cpu" / "compatibility.html").read_text(encoding="utf-8")
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(results / "first", elsewhere)
    assert str(elsewhere) in report(results, str(elsewhere), "--format", "summary").stdout


def test_limits_that_moved_between_runs_are_no_change(results: Path) -> None:
    lax: dict[Gate, GateLimit] = {gate: limit for gate, limit in GATES.items() if gate is not Gate.SPEEDUP}
    store_run(results, "lax", [good_result(), production_incident()], gates=lax)
    document = json.loads(diff(results, "first", "lax", "--json").stdout)
    assert {row["change"] for row in document["rows"]} == {"same"}


def test_diff_as_json_names_the_gate(results: Path) -> None:
    worse = with_figures(good_result(), {Gate.GRAPH_BREAKS: 4.0})
    store_run(results, "worse", [worse])
    document = json.loads(diff(results, "first", "worse", "--json").stdout)
    changes = {row["cell"]: row for row in document["rows"]}
    assert changes["torch-2.13.0-cpu/fixed_size/default"]["gates"]["graph_breaks"]["change"] == "regressed"
    assert changes["torch-2.13.0-cpu/list_index/default"]["change"] == "missing"


def test_a_table_needs_neither_matplotlib_nor_jinja(results: Path) -> None:
    program = (
        "import sys; from toto_compat.report.command import report_command as c; "
        f"c(['--results', {str(results)!r}], standalone_mode=False); "
        "assert not {'matplotlib', 'jinja2', 'torch'} & set(sys.modules), 'heavy import'"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, cwd=Path(__file__).parents[2])
