"""CUDA code executed without a GPU: right where Inductor's is, wrong where it was sabotaged. In a process of its own,
since Triton's interpreter is chosen when triton is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cell.lowering.cuda_build import needs_cuda_build

pytestmark = pytest.mark.cell

SCRIPT = Path(__file__).parent / "interpreted_step.py"


def off_by(sabotage: str) -> float:
    """Run the step's CUDA code with a sabotage in it; the largest difference to the CPU's own, inf for NaN."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), sabotage], capture_output=True, text=True, check=False, env=environment
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    return float(ended.stdout.split()[-1])


@needs_cuda_build
def test_the_code_made_for_cuda_computes_what_the_cpu_does() -> None:
    assert off_by("none") < 1e-5


@needs_cuda_build
@pytest.mark.parametrize("sabotage", ["mask dropped", "block too short", "kernel left out"])
def test_a_sabotage_in_the_lowered_code_shows(sabotage: str) -> None:
    assert off_by(sabotage) > 1e-3
