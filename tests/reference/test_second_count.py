"""The reference in a real environment, on short series: made, counted a second time by torch's log, shown, resumed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from toto_compat.evidence.store import load_run
from toto_compat.reference.showing import BEGIN, END
from toto_compat.reference.torch_logs import read_counts

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
ROW = "upstream/default+traced"
PLAN = {
    "schema": 1,
    "releases": ["2.13.0"],
    "runs": {"cpu": {"profile": "short", "rows": [ROW], "counted_by_torch_logs": [ROW]}},
}


def write_project(folder: Path) -> None:
    """A matrix in which upstream is traced and guarded as ever, but no code is generated: counting needs none."""
    matrix = yaml.safe_load((ROOT / "matrix.yaml").read_text(encoding="utf-8"))
    matrix["settings"]["traced"] = {"backend": "eager"}
    matrix["caches"]["upstream"]["settings"] = ["traced"]
    matrix["profiles"]["short"] = {"iterations": 1, "suites": ["recompile"], "workloads": ["short"]}
    matrix["workloads"]["short"] = {
        "model": "tiny",
        "context": [128, 160],
        "horizon": [64],
        "batches": [1],
        "sampling": ["4/2"],
    }
    (folder / "matrix.yaml").write_text(yaml.safe_dump(matrix), encoding="utf-8")
    (folder / "plan.yaml").write_text(yaml.safe_dump(PLAN), encoding="utf-8")
    (folder / "README.md").write_text(f"# A project\n\n{BEGIN}\n{END}\n", encoding="utf-8")


def reference(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "toto_compat.cli", "reference", "--plan", "plan.yaml", "--matrix", "matrix.yaml"]
    command += ["--keep-environments"]  # other tests use it
    variables = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)


def test_a_release_is_run_counted_twice_with_one_result_and_shown(tmp_path: Path) -> None:
    write_project(tmp_path)
    made = reference(tmp_path)
    assert made.returncode == 0, made.stderr[-3000:]
    (cell,) = load_run(tmp_path / "cpu").cells
    assert cell.provenance.torch.startswith("2.13.0")
    (count,) = read_counts(tmp_path / "cpu").counts
    assert count.raised == ""
    assert count.agree, count
    # upstream recompiles in every layer and breaks at every .item(): next to nothing would be a count of something else
    assert count.recompiles.by_log > 10
    assert count.graph_breaks.by_log > 10
    readme = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "the two counts agree on 1 of 1 releases" in readme
    rows = json.loads((tmp_path / "cpu" / "compatibility.json").read_text(encoding="utf-8"))["rows"]
    assert [row["verdict"] for row in rows] == ["FAIL"]

    again = reference(tmp_path)
    assert again.returncode == 0, again.stderr[-3000:]
    assert "0 cells are new" in again.stderr
    assert load_run(tmp_path / "cpu").cells == (cell,)
