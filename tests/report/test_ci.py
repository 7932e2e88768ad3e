"""What CI systems read: valid JUnit, a bounded summary, a badge that is never green without evidence."""

import xml.etree.ElementTree as ET
from pathlib import Path

from tests.verdict.sample_cells import cell_request, good_result, production_incident, provenance, with_figures
from tests.verdict.stored_runs import judged_run, store_run
from toto_compat.contract.result import CellResult, Failure, Figure
from toto_compat.evidence.store import load_run
from toto_compat.matrix.gates import Gate
from toto_compat.report.ci import badge, junit_xml, step_summary
from toto_compat.verdict.judged_run import JudgedRun, judge_run


def judged(folder: Path, *results: CellResult) -> JudgedRun:
    return judge_run(load_run(store_run(folder, "nightly", results)))


def test_junit_has_a_test_per_gate_and_counts_that_agree(tmp_path: Path) -> None:
    root = ET.fromstring(junit_xml(judged(tmp_path, good_result(), production_incident())))  # noqa: S314 - our own
    assert len(root.findall("testsuite")) == 2
    for tag, attribute in (("testcase", "tests"), ("failure", "failures"), ("skipped", "skipped"), ("error", "errors")):
        assert len(list(root.iter(tag))) == int(root.get(attribute, "-1")), attribute
    failed = {case.get("name") for case in root.iter("testcase") if case.find("failure") is not None}
    assert failed == {"recompile_limit", "recompiles_total", "graph_breaks"}


def test_missing_evidence_is_skipped_with_its_reason_and_never_a_passed_test(tmp_path: Path) -> None:
    result = with_figures(good_result(), {Gate.MEMORY: Figure(value=None, missing="killed \x1b[31mred\x00")})
    root = ET.fromstring(junit_xml(judged(tmp_path, result)))  # noqa: S314 - our own
    skipped = next(case for case in root.iter("testcase") if case.get("name") == "memory").find("skipped")
    assert skipped is not None
    assert skipped.get("message", "").startswith("INCONCLUSIVE: not measured: killed")


def test_a_cell_that_could_not_run_is_an_error(tmp_path: Path) -> None:
    request = cell_request()
    failure = Failure(kind="crash", message="segmentation fault", last_lines=("a", "b"))
    result = CellResult(cell=request.cell, request=request, provenance=provenance(request), failure=failure)
    root = ET.fromstring(junit_xml(judged(tmp_path, result)))  # noqa: S314 - our own
    error = root.find(".//error")
    assert error is not None and error.text == "segmentation fault\na\nb"


def test_the_summary_answers_first_and_stays_under_githubs_limit(tmp_path: Path) -> None:
    text = step_summary(judged(tmp_path, good_result(), production_incident()))
    assert text.index("On CUDA it is not known") < text.index("| torch-2.13.0-cpu")
    assert "1 PASS, 1 FAIL, 0 INCONCLUSIVE" in text
    lacking = {Gate.MEMORY: Figure(value=None, missing="x" * 3000)}  # a reason is cut, and many are long all the same
    huge = [with_figures(good_result(torch=f"2.{minor}.0"), lacking) for minor in range(600)]
    cut = step_summary(judged_run(*huge))
    assert len(cut.encode()) < 2**20
    assert "compatibility.md" in cut


def test_the_badge_is_green_only_where_the_device_was_tried(tmp_path: Path) -> None:
    assert badge(judged(tmp_path / "cpu", good_result()))["label"] == "torch.compile on cpu"
    blind = good_result(build="cu128", mode="reduce-overhead")
    blind = blind.model_copy(update={"provenance": provenance(blind.request, gpu=None)})
    assert badge(judged(tmp_path / "blind", blind, good_result()))["color"] == "lightgrey"
    assert badge(judged(tmp_path / "off", production_incident()))["message"] == "keep off"
