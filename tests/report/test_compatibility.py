"""compatibility.json as the design says, written whole or not at all."""

import json
import math
from pathlib import Path

import pytest

from tests.verdict.sample_cells import good_result, production_incident, with_figures
from tests.verdict.stored_runs import judged_run, store_run
from toto_compat.errors import StorageError
from toto_compat.evidence.store import load_run
from toto_compat.matrix.gates import Gate
from toto_compat.report.compatibility import as_json, compatibility
from toto_compat.report.publish import write_compatibility
from toto_compat.verdict.judged_run import judge_run

JUDGED = judged_run(good_result(), production_incident())


def test_a_row_holds_what_the_design_names() -> None:
    document = compatibility(JUDGED)
    assert set(document) == {"schema", "rows", "decision"}
    assert document["schema"] == 1
    row = next(row for row in document["rows"] if row["cache"] == "list_index")
    expected = {
        "environment": "torch-2.13.0-cpu",
        "torch": "2.13.0",
        "device": "cpu",
        "cache": "list_index",
        "mode": "default",
        "settings": "stock",
        "verdict": "FAIL",
        "decided_by": "recompile_limit",
    }
    assert {key: row[key] for key in expected} == expected
    assert row["gates"]["recompile_limit"]["status"] == "FAIL"
    assert row["gates"]["recompile_limit"]["value"] == 1.0
    assert row["gates"]["recompile_limit"]["limit"] == {"max": 0}
    assert row["gates"]["cudagraphs"]["kind"] == "predicted"
    assert row["gates"]["cudagraphs"]["status"] == "NOT_APPLICABLE"


def test_the_decision_is_per_device_with_ranges_and_settings() -> None:
    decision = compatibility(JUDGED)["decision"]
    assert decision["devices"]["cpu"]["answer"] == "enable"
    assert decision["devices"]["cuda"]["answer"] == "not_enough_evidence"
    assert decision["devices"]["cuda"]["set"] == ["export TOTO_DISABLE_COMPILE=1"]
    assert decision["devices"]["cpu"]["ranges"][0]["good_since"] == "2.13.0"
    assert decision["devices"]["cpu"]["break_even_forecasts"]["cold"] > 0


def test_the_files_are_written_and_are_strict_json(tmp_path: Path) -> None:
    broken = with_figures(good_result(), {Gate.EQUIVALENCE: math.nan, Gate.MEMORY: math.inf})
    write_compatibility(judged_run(broken, folder=tmp_path))
    document = json.loads((tmp_path / "compatibility.json").read_text(encoding="utf-8"), parse_constant=_refuse)
    assert document["rows"][0]["gates"]["equivalence"]["value"] == "NaN"
    assert document["rows"][0]["gates"]["memory"]["value"] == "Infinity"
    assert "FAIL" in (tmp_path / "compatibility.md").read_text(encoding="utf-8")
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".html", ".json", ".md"]


def test_a_stored_run_gets_its_page_even_beside_a_damaged_one(tmp_path: Path) -> None:
    damaged = store_run(tmp_path, "damaged", [good_result()])
    (damaged / "compatibility.json").write_text("{", encoding="utf-8")
    folder = store_run(tmp_path, "run", [good_result()])
    write_compatibility(judge_run(load_run(folder)))
    assert "fixed_size" in (folder / "compatibility.html").read_text(encoding="utf-8")


def test_a_place_that_can_not_be_written_is_a_storage_error(tmp_path: Path) -> None:
    blocked = tmp_path / "run"
    blocked.write_text("a file where the folder should be", encoding="utf-8")
    with pytest.raises(StorageError):
        write_compatibility(judged_run(good_result(), folder=blocked))


def test_the_same_evidence_gives_the_same_bytes() -> None:
    again = judged_run(good_result(), production_incident())
    assert as_json(compatibility(JUDGED)) == as_json(compatibility(again))


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def test_a_run_without_limits_beside_it_does_not_spoil_a_run(tmp_path: Path) -> None:
    store_run(tmp_path, "without limits", [good_result()], gates={}, started="2026-01-01T00:00:00Z")
    folder = store_run(tmp_path, "run", [good_result()])
    write_compatibility(judge_run(load_run(folder)))
    assert (folder / "compatibility.html").is_file()
