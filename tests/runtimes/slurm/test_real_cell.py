"""One real cell from the command line through Slurm and back: torch, the cell and the virtualenv are real too."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.runtimes.slurm.emulated import ROOT, Emulated
from toto_compat.contract.result import Outcome
from toto_compat.contract.suites import Suite
from toto_compat.errors import ExitCode
from toto_compat.evidence.store import load_run

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

CELL = "torch-2.13.0-cpu/upstream/default+traced"


def test_a_real_cell_is_measured_on_a_node(tmp_path: Path, cluster: Emulated) -> None:
    matrix = yaml.safe_load((ROOT / "matrix.yaml").read_text(encoding="utf-8"))
    matrix["settings"]["traced"] = {"backend": "eager"}  # no code is generated: what is compiled anew shows in tracing
    matrix["caches"]["upstream"]["settings"] = ["traced"]
    workload = {"model": "tiny", "sampling": ["2/1"], "context": [64, 96], "horizon": [32], "batches": [1]}
    matrix["workloads"]["small"] = workload  # one patch: no decode step
    matrix["profiles"]["small"] = {"iterations": 1, "workloads": ["small"], "suites": ["recompile"]}
    matrix["slurm"] |= {"partition": "steady", "gres": "gpu:a100:1", "poll_seconds": 1}
    (tmp_path / "matrix.yaml").write_text(yaml.safe_dump(matrix, sort_keys=False), encoding="utf-8")
    command = [sys.executable, "-m", "toto_compat.cli", "matrix", CELL, "--executor", "slurm", "--device", "cpu"]
    done = subprocess.run(
        [*command, "--profile", "small", "--run", "one", "--fresh"],
        cwd=tmp_path,
        env=os.environ | cluster.variables | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == ExitCode.OK, done.stderr
    (cell,) = load_run(tmp_path / "results" / "one").cells
    evidence = cell.evidence[Suite.RECOMPILE]
    assert evidence.outcome is Outcome.MEASURED
    assert evidence.figures["recompiles_total"].value is not None
    assert cell.provenance.torch.startswith("2.13.0")
    assert cell.provenance.runtime == "venv"
