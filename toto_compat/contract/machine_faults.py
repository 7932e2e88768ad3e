"""Errors of CUDA that speak of the machine, the driver or another program on the GPU, and never of a cache."""

# By words of CUDA, cuBLAS, cuDNN and Triton; what to do about each.
_MEMORY = "the GPU's memory is used up: end other programs on it, or take a smaller workload"
_RESTART = "the GPU or its driver is in a bad state: `dmesg | grep -i xid` says more; restart the machine"
_GONE = "the GPU is gone: `nvidia-smi` says why"
_WHEEL = "the wheel has no kernels for this GPU: take an environment that has"
_MPS = "start NVIDIA's multi-process service, or do without it (`unset CUDA_MPS_PIPE_DIRECTORY`)"
MACHINE_FAULTS = {
    "CUBLAS_STATUS_ALLOC_FAILED": _MEMORY,
    # what cuBLAS and cuDNN say where their workspace finds no memory
    "CUBLAS_STATUS_NOT_INITIALIZED": _MEMORY,
    "CUDNN_STATUS_ALLOC_FAILED": _MEMORY,
    "CUDNN_STATUS_NOT_INITIALIZED": _MEMORY,
    "CUSOLVER_STATUS_ALLOC_FAILED": _MEMORY,
    "DEVICE_ALLOCATION_FAILED": _MEMORY,
    "driver error: out of memory": _MEMORY,
    "CUDA_ERROR_OUT_OF_MEMORY": _MEMORY,
    "Triton Error [CUDA]: out of memory": _MEMORY,
    "no kernel image is available": _WHEEL,
    "device kernel image is invalid": _WHEEL,
    "uncorrectable ECC error": _RESTART,
    "uncorrectable NVLink error": _RESTART,
    "forward compatibility was attempted": _RESTART,
    "unsupported display driver": _RESTART,
    "CUDA error: unknown error": _RESTART,
    "CUDA unknown error": _RESTART,
    "unspecified driver error": _RESTART,
    "GPU is lost": _RESTART,
    "hardware stack error": _RESTART,
    "busy or unavailable": "another program holds the GPU alone (compute mode Exclusive_Process): end it, or "
    "`nvidia-smi -c DEFAULT`",
    "driver version is insufficient": "update the NVIDIA driver",
    "driver on your system is too old": "update the NVIDIA driver",
    "unsupported toolchain": "update the NVIDIA driver",
    "no CUDA-capable device is detected": _GONE,
    "Found no NVIDIA driver": _GONE,
    "No CUDA GPUs are available": _GONE,
    "system not yet initialized": "start NVIDIA's fabric manager (`systemctl start nvidia-fabricmanager`)",
    "Failed to initialize NVML": _RESTART,
    "MPS client failed": _MPS,
    "MPS server is not ready": _MPS,
}


def what_the_machine_lacks(text: str) -> str:
    """Say what to do if these words speak of the machine; '' if they may be a cache's fault."""
    return next((advice for words, advice in MACHINE_FAULTS.items() if words in text), "")
