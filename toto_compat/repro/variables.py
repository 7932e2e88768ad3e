"""The environment variables of production that a cell is given: those that torch reads, not those of its walls."""

import re
from collections.abc import Mapping

from toto_compat.errors import InputError
from toto_compat.production.switch import VARIABLES

# What torch, its compilers and its libraries read. Everything else says nothing about a forecast, and may say where
# programs, libraries and passwords are.
_ADMITTED = re.compile(
    r"(TORCH|TORCHDYNAMO|TORCHINDUCTOR|TORCH_[A-Z]+|PYTORCH|INDUCTOR|AOT|TRITON|CUDA|CUBLAS|CUBLASLT|CUDNN|"
    r"ATEN|KMP|GOMP|OMP|MKL|DNNL|ONEDNN)_[A-Z0-9_]+|NVIDIA_TF32_OVERRIDE"
)
# A file, a host, or code to load: OMP_TOOL_LIBRARIES is another LD_PRELOAD.
_A_PLACE = re.compile(
    r"(DIRS?|DIRECTORY|PATHS?|HOME|FILES?|FOLDER|ROOT|OUT|REMOTE_CACHE|REDIS_[A-Z_]+|SERVER|URL|HOST|PORT|"
    r"LIB|LIBS|LIBRARY|LIBRARIES|PLUGINS?|MODULES?|CXX|CC|COMPILER|COMMAND)$|^TOTO_COMPAT_"
)
# By name: why not, and what to write instead.
_REFUSED: Mapping[str, str] = {
    "CUDA_VISIBLE_DEVICES": "a cell sees the one GPU that it is given",
    "CUDA_DEVICE_ORDER": "a cell sees the one GPU that it is given",
    "OMP_NUM_THREADS": "say workload.threads",
    "MKL_NUM_THREADS": "say workload.threads",
    "TORCHINDUCTOR_COMPILE_THREADS": "it follows limits.cpus of matrix.yaml",
    "TORCH_LOGS": "a cell listens to torch's loggers itself, and this would make it deaf",
    "TORCH_LOGS_FORMAT": "a cell listens to torch's loggers itself",
    "TORCH_TRACE": "it names a place on production's machine",
    "TORCH_COMPILE_DISABLE": "a cell that compiles nothing shows nothing",
    "TORCHDYNAMO_DISABLE": "a cell that compiles nothing shows nothing",
    "TORCHDYNAMO_CAPTURE_SCALAR_OUTPUTS": "say settings.capture_scalar_outputs",
    "TOTO_DISABLE_COMPILE": "a cell that compiles nothing shows nothing",
    "TOTO_COMPILE": "an incident is compiled",
    "TOTO_COMPILE_MODE": "say mode",
    "TOTO_COMPILE_BACKEND": "say settings.backend",
    "TRITON_INTERPRET": "it swaps the compiler that is looked at",
}


def why_refused(name: str, value: str = "") -> str:
    """Say why a cell is not given this variable, or what stands for it in an incident; empty if it is given."""
    if name in _REFUSED:
        return _REFUSED[name]
    if not _ADMITTED.fullmatch(name) and name not in VARIABLES:
        if name.startswith("TOTO_") and not _A_PLACE.search(name):
            return f"nothing reads it: toto-compat's own are {', '.join(VARIABLES)}"
        return "only what torch, its compilers and toto read is passed on: it may break the cell's isolation"
    if _A_PLACE.search(name):
        return "it names a place on production's machine, or code to load"
    if "\0" in value or "\n" in value:
        return "its value has more than one line"
    return ""


def checked_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Give the variables back if a cell may have all of them; else InputError names the first that it may not have."""
    for name, value in variables.items():
        if why := why_refused(name, value):
            raise InputError(f"the variable {name} is not passed into a cell: {why}", hint="leave it out of variables:")
    return dict(variables)
