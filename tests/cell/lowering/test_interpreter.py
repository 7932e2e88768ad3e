"""CUDA code executed without a GPU: right where Inductor's is, wrong where it was sabotaged. In a process of its own,
since Triton's interpreter is chosen when triton is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cell.lowering.cuda_build import needs_cuda_build
from toto_compat.cell.lowering import interpreter as module
from toto_compat.cell.lowering.interpreter import InterpreterGapError

pytestmark = pytest.mark.cell

SCRIPT = Path(__file__).parent / "interpreted_step.py"


def off_by(sabotage: str, step: str = "layer") -> float:
    """Run a step's CUDA code with a sabotage in it; the largest difference to the CPU's own, inf for NaN."""
    ended = interpreted(sabotage, step)
    assert ended.returncode == 0, ended.stderr[-2000:]
    return float(ended.stdout.split()[-1])


def interpreted(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@needs_cuda_build
def test_the_code_made_for_cuda_computes_what_the_cpu_does() -> None:
    assert off_by("none") < 1e-5


@needs_cuda_build
@pytest.mark.parametrize("sabotage", ["mask dropped", "block too short", "kernel left out"])
def test_a_sabotage_in_the_lowered_code_shows(sabotage: str) -> None:
    assert off_by(sabotage) > 1e-3


@needs_cuda_build
def test_powers_of_negative_numbers_are_as_nvidia_has_them() -> None:
    assert off_by("none", "powers") < 1e-3


@needs_cuda_build
def test_inductors_own_reductions_are_the_cpus() -> None:
    assert off_by("none", "reductions") < 1e-5


@needs_cuda_build
def test_a_function_that_the_interpreter_lacks_is_named_with_its_kernel() -> None:
    ended = interpreted("none", "beyond it")
    assert ended.returncode != 0
    assert "InterpreterGapError: kernel triton_" in ended.stderr and "erfinv" in ended.stderr


def test_only_what_the_code_itself_asserts_speaks_of_the_code() -> None:
    told = "kernel triton_poi_fused_0: AttributeError: no erfinv"
    with pytest.raises(InterpreterGapError, match=told), module._naming_what_lacks(told.partition(":")[0], Exception):
        raise RuntimeError("InterpreterError") from AttributeError("no erfinv")
    with pytest.raises(RuntimeError, match="InterpreterError"), module._naming_what_lacks("kernel", Exception):
        raise RuntimeError("InterpreterError") from AssertionError("index out of bounds: 0 <= tmp4 < 7")
    with pytest.raises(ValueError, match="not a gap"), module._naming_what_lacks("a library call"):
        raise ValueError("not a gap")
