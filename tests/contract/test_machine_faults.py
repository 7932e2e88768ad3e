"""Words of CUDA, Triton and torch that speak of the machine are no evidence against a cache; those of kernels are."""

import pytest

from toto_compat.contract.machine_faults import what_the_machine_lacks


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("Triton Error [CUDA]: out of memory", "memory is used up"),
        ("Triton Error [CUDA]: CUDA_ERROR_OUT_OF_MEMORY", "memory is used up"),
        ("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`", "memory is used up"),
        ("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED", "memory is used up"),
        ("CUDA driver error: device kernel image is invalid", "no kernels for this GPU"),
        ("CUDA unknown error - this may be due to an incorrectly set up environment", "restart the machine"),
        ("CUDA error: MPS client failed to connect to the MPS control daemon", "unset CUDA_MPS_PIPE_DIRECTORY"),
        ("CUDA error: all CUDA-capable devices are busy or unavailable", "nvidia-smi -c DEFAULT"),
        ("Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU", "the GPU is gone"),
        ("No CUDA GPUs are available", "the GPU is gone"),
        ("The NVIDIA driver on your system is too old (found version 11040)", "update the NVIDIA driver"),
        ("CUDA error: the provided PTX was compiled with an unsupported toolchain.", "update the NVIDIA driver"),
        ("CUDA error: forward compatibility was attempted on non supported HW", "restart the machine"),
        ("CUDA error: system has unsupported display driver / cuda driver combination", "restart the machine"),
        ("CUDA error: uncorrectable NVLink error detected during the execution", "restart the machine"),
    ],
)
def test_a_fault_of_the_machine_is_told_with_what_to_do(text: str, advice: str) -> None:
    assert advice in what_the_machine_lacks(f"backend='inductor' raised:\nRuntimeError: {text}\n")


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: device-side assert triggered",
        "CUDA error: an illegal memory access was encountered",
        "CUDA error: misaligned address",
        "out of resource: shared memory, Required: 270336, Hardware limit: 101376",
        "Triton Error [CUDA]: an illegal instruction was encountered",
        "RuntimeError: accessing tensor output of CUDAGraphs that has been overwritten by a subsequent run",
    ],
)
def test_what_a_kernel_does_wrong_is_none_of_it(text: str) -> None:
    assert what_the_machine_lacks(text) == ""
