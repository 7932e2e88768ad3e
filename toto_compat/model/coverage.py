"""What the static graphs cover of a model, and the name of what they do not."""

from importlib.metadata import version

import torch
from packaging.version import Version
from toto.model.backbone import TotoBackbone

from toto_compat.model.head import SUPPORTED_DISTRIBUTIONS
from toto_compat.model.scaler_state import SUPPORTED_SCALERS


def why_not_static(backbone: TotoBackbone) -> str:
    """Empty if the static graphs cover this model, else the name of what they do not cover."""
    dtype = backbone.unembed.weight.dtype
    reasons = {
        f"toto-ts {version('toto-ts')}": Version(version("toto-ts")) < Version("0.2"),
        "exogenous variates with fusion tokens": getattr(backbone, "fusion", None) is not None,
        "the memory-efficient attention layout": backbone.use_memory_efficient_attention,
        f"dtype {dtype}": dtype not in (torch.float32, torch.float64, torch.bfloat16),
        f"scaler {type(backbone.scaler).__name__}": not isinstance(backbone.scaler, SUPPORTED_SCALERS),
        f"distribution {type(backbone.output_distribution).__name__}": not isinstance(
            backbone.output_distribution, SUPPORTED_DISTRIBUTIONS
        ),
    }
    return ", ".join(name for name, holds in reasons.items() if holds)
