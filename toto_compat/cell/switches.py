"""The process-wide switches of torch that a candidate may not touch: rounding, and what the compiler does.

A cache that is faster because it turned precision down for everybody, or that counts no recompiles because it raised
their limit, was not measured under the cell's settings.
"""

import warnings
from typing import Any

import torch
import torch._dynamo.config as dynamo_config
import torch._inductor.config as inductor_config

from toto_compat.contract.request import CompileSettings
from toto_compat.contract.torch_releases import CONFIG_NAMES


def numerics() -> dict[str, Any]:
    """The switches that change rounding."""
    return {
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "tf32_matmul": bool(torch.backends.cuda.matmul.allow_tf32),
        "tf32_cudnn": bool(torch.backends.cudnn.allow_tf32),
        "sdpa_flash": torch.backends.cuda.flash_sdp_enabled(),
        "sdpa_memory_efficient": torch.backends.cuda.mem_efficient_sdp_enabled(),
        "sdpa_math": torch.backends.cuda.math_sdp_enabled(),
        "mkldnn": torch.backends.mkldnn.enabled,
        "threads": torch.get_num_threads(),
        "default_dtype": str(torch.get_default_dtype()),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "autocast": torch.is_autocast_enabled() or torch.is_autocast_cpu_enabled(),
    }


def switches() -> dict[str, str]:
    """Every switch with its value, as text that can be compared."""
    values_by_name = numerics()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # reading all of them also reads deprecated ones
        for name, config in (("dynamo", dynamo_config), ("inductor", inductor_config)):
            values = config.shallow_copy_dict() if hasattr(config, "shallow_copy_dict") else {}
            values_by_name |= {f"{name}.{key}": value for key, value in values.items()}
    return {name: _told(value) for name, value in values_by_name.items() if not callable(value)}


def _told(value: Any) -> str:
    """Write a value the same way every time: equal sets come in orders that depend on how they were made."""
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(repr, value)))}}}"
    return repr(value)


def changed(before: dict[str, str], after: dict[str, str], settings: CompileSettings) -> tuple[str, ...]:
    """Name the switches that differ; those that the cell's own settings set may only have the value set there."""
    own = {"dynamo.capture_scalar_outputs": "True"} if settings.capture_scalar_outputs else {}
    for name, names in CONFIG_NAMES.items():
        value = getattr(settings, name)
        if value is not None:
            own |= {f"dynamo.{spelled}": _told(value) for _, spelled in names}
    return tuple(
        f"{name} from {before.get(name, 'nothing')} to {value}"
        for name, value in sorted(after.items())
        if value not in (before.get(name), own.get(name))
    )
