"""What is held against the candidate, and what is the machine's own trouble."""

import errno
import os

import pytest
import torch

from tests.cell.small_trials import WORKLOAD, trial_of
from toto_compat.cell import trial
from toto_compat.cell.group import failure_of, measured
from toto_compat.cell.trial import CandidateError, blaming_the_candidate, telling_line
from toto_compat.contract.result import Outcome, SuiteEvidence
from toto_compat.contract.suites import Suite
from toto_compat.errors import InputError

pytestmark = pytest.mark.cell


class BackendFailedError(RuntimeError):
    """As torch's BackendCompilerFailed wraps what a backend raised."""

    def __init__(self, inner: Exception) -> None:
        super().__init__(f"backend='inductor' raised: {type(inner).__name__}")
        self.inner_exception = inner


def full_disk(number: int = errno.ENOSPC) -> OSError:
    return OSError(number, os.strerror(number))


def caused_by(cause: Exception) -> Exception:
    try:
        raise RuntimeError("the kernel could not be written") from cause
    except RuntimeError as error:
        return error


COMPILER_SAID = RuntimeError(
    "C++ compile error\n/tmp/x.cpp: fatal error: error writing /tmp/x.s: No space left on device"
)


@pytest.mark.parametrize(
    "error",
    [
        full_disk(),
        full_disk(errno.EDQUOT),
        caused_by(full_disk()),
        caused_by(caused_by(full_disk())),
        COMPILER_SAID,
        BackendFailedError(COMPILER_SAID),
        BackendFailedError(full_disk()),
    ],
    ids=["full", "quota", "cause", "cause of a cause", "compiler's text", "wrapped text", "wrapped"],
)
def test_a_full_disk_is_no_evidence_against_the_candidate(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, blaming_the_candidate():
        raise error
    assert caught.value is error


CPU_ALLOCATOR_SAID = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "4000000000000 bytes."
)
KILLED_COMPILER_SAID = RuntimeError(
    "C++ compile error\n\nOutput:\ng++: fatal error: Killed signal terminated program cc1plus\ncompilation terminated."
)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("no more"),
        caused_by(MemoryError("no more")),
        BackendFailedError(MemoryError("no more")),
        CPU_ALLOCATOR_SAID,
        BackendFailedError(CPU_ALLOCATOR_SAID),
        BackendFailedError(KILLED_COMPILER_SAID),
        RuntimeError("CUDA error: out of memory"),
    ],
    ids=["bare", "cause", "wrapped", "torch's text", "wrapped text", "killed compiler", "CUDA's text"],
)
def test_missing_memory_is_no_evidence_against_the_candidate(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, blaming_the_candidate():
        raise error
    assert caught.value is error
    assert failure_of(error).kind == "out_of_memory"


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "Triton Error [CUDA]: CUDA_ERROR_OUT_OF_MEMORY",
        "CUDA driver error: out of memory",
        "CUDA error: no kernel image is available for execution on the device",
        "CUDA error: uncorrectable ECC error encountered",
        "CUDA error: CUDA-capable device(s) is/are busy or unavailable",
    ],
)
def test_a_fault_of_the_gpu_or_its_driver_is_no_evidence_against_the_candidate(text: str) -> None:
    for error in (RuntimeError(text), caused_by(RuntimeError(text)), BackendFailedError(RuntimeError(text))):
        with pytest.raises(type(error)) as caught, blaming_the_candidate():
            raise error
        assert caught.value is error
        assert failure_of(error).kind in ("environment", "out_of_memory")
        assert "; " in failure_of(error).message, "says what to do"


@pytest.mark.parametrize(
    "text", ["CUDA error: device-side assert triggered", "CUDA error: an illegal memory access was encountered"]
)
def test_what_a_kernel_does_wrong_stays_the_candidates(text: str) -> None:
    with pytest.raises(CandidateError), blaming_the_candidate():
        raise RuntimeError(text)
    assert failure_of(RuntimeError(text)).kind == "exception"


def test_a_kernel_that_fails_later_is_waited_for_while_the_candidate_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an index out of bounds does: the call returns, and the next one that waits raises."""

    def waits() -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", waits)
    with pytest.raises(CandidateError, match="device-side assert"), blaming_the_candidate():
        pass


def test_what_the_user_can_solve_is_no_evidence_against_the_candidate() -> None:
    with pytest.raises(InputError), blaming_the_candidate():
        raise InputError("series.csv: has 5 rows, the workload needs 640")


def test_a_backbone_that_cannot_be_built_is_no_evidence_against_the_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver(*_: object, **__: object) -> None:
        raise RuntimeError("no CUDA-capable device is detected")

    monkeypatch.setattr(trial, "build_backbone", no_driver)
    with pytest.raises(RuntimeError, match="no CUDA-capable device"):
        trial_of("upstream").compiled()


@pytest.mark.parametrize("error", [ValueError("wrong shape"), full_disk(errno.ENOENT), caused_by(ValueError("x"))])
def test_other_errors_are_the_candidates(error: Exception) -> None:
    with pytest.raises(CandidateError) as caught, blaming_the_candidate():
        raise error
    assert caught.value.cause is error
    assert failure_of(error).kind == "exception"


def test_errors_that_refer_to_each_other_are_looked_through_once() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__context__, second.__context__ = second, first
    with pytest.raises(CandidateError), blaming_the_candidate():
        raise first


@pytest.mark.parametrize("error", [full_disk(), MemoryError("no more")])
def test_a_suite_on_a_machine_that_is_full_is_an_error_and_not_a_failed_model(error: Exception) -> None:
    def suite() -> SuiteEvidence:
        with blaming_the_candidate():
            raise error

    outcome = measured(Suite.SPEED, suite)
    assert isinstance(outcome, SuiteEvidence)
    assert outcome.outcome is Outcome.ERROR


@pytest.mark.parametrize(
    "said",
    [
        NotImplementedError("\"gamma_cpu\" not implemented for 'Half'"),
        ValueError("Expected parameter probs of distribution Categorical to satisfy the constraint Simplex()"),
    ],
)
def test_upstream_that_cannot_draw_in_half_precision_is_quoted_whatever_torch_raises(
    said: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    class CannotDraw:
        def generate_samples(self, *_: object, **__: object) -> None:
            raise said

    half = trial_of("upstream", workload=WORKLOAD.model_copy(update={"autocast": "float16"}))
    monkeypatch.setattr(trial.Trial, "eager", lambda _self: CannotDraw())
    assert str(said) in half.why_upstream_cannot_draw()


def test_of_an_error_the_line_that_tells_is_taken() -> None:
    assert telling_line(ValueError("\nno such shape\nmore")) == "ValueError: no such shape"
    assert telling_line(ValueError("")) == "ValueError: no message"
    of_triton = RuntimeError("at 10:11:\ndef kernel(in_ptr0):\n    x = y\n        ^\nNameError('y is not defined')")
    assert telling_line(of_triton) == "RuntimeError: NameError('y is not defined')"


def test_what_a_cpp_compiler_refused_is_told_and_not_its_notes() -> None:
    class CppCompileError(RuntimeError):
        """As Inductor's, whose text has the command first and every note of the compiler last."""

    notes = "/x.h:215:13: warning: overflow in conversion [-Woverflow]\n  215 | 0xff,\n"
    refused = "/x/ab.cpp:24:46: error: no matching function for call to 'max_propagate_nan(double&, float&)'\n"
    text = f"C++ compile error\n\nCommand:\ng++ -Werror ab.cpp\n\nOutput:\n{notes}{refused}{notes}"
    expected = "C++ compile error: no matching function for call to 'max_propagate_nan(double&, float&)'"
    assert telling_line(CppCompileError(text)) == f"CppCompileError: {expected}"
    assert telling_line(CppCompileError("C++ compile error\n\nOutput:\n")) == "CppCompileError: C++ compile error"
