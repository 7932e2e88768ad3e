"""What compiled code depends on, beside what torch's own cache keys see."""

import contextlib
import hashlib
import importlib.metadata
import os
import platform
from pathlib import Path

import torch
from toto.model.backbone import TotoBackbone

from toto_compat.contract.source_hash import hash_contents, read_source
from toto_compat.model.bound import CompileSpec


def artifact_key(backbone: TotoBackbone, spec: CompileSpec, announced: str) -> dict[str, str]:
    """Say what the compiled code depends on, in words that a log line can quote."""
    weights = [(name, tuple(p.shape), str(p.dtype)) for name, p in backbone.named_parameters()]
    shape = hashlib.sha256(repr(weights).encode()).hexdigest()[:12]
    return {
        "torch": f"{torch.__version__} ({torch.version.git_version})",
        "torch's folder": str(Path(torch.__file__).parent),  # command lines name it, and they are in torch's keys
        "Python": f"{platform.python_implementation()} {platform.python_version()}",
        "toto-ts": _toto_ts(),
        "toto-compat's source": hash_contents(read_source())[:16],
        "device": _device(next(backbone.parameters()).device),
        "threads": str(torch.get_num_threads()),  # CPU kernels are compiled for so many
        "C++ compiler": os.environ.get("CXX", ""),
        "model": f"{len(backbone.transformer.layers)} layers of {backbone.embed_dim}, weights' shapes {shape}",
        "mode": spec.mode,
        "settings": spec.settings.model_dump_json(),
        "announced": announced,
    }


def _toto_ts() -> str:
    try:
        return importlib.metadata.version("toto-ts")
    except importlib.metadata.PackageNotFoundError:
        return "not installed as a package"


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"{torch.cuda.get_device_name(device)}, capability {major}.{minor}, CUDA {torch.version.cuda}"
    flags = ""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    instructions = hashlib.sha256(" ".join(sorted(flags.split())).encode()).hexdigest()[:12]
    return (
        f"{device.type}, {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, instructions {instructions}"
    )
