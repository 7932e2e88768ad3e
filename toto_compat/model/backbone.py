"""The real toto-ts backbone: seeded weights in two sizes, or a checkpoint through toto-ts's own loader."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from toto.model.attention import XFORMERS_AVAILABLE
from toto.model.backbone import TotoBackbone
from toto.model.toto import Toto

from toto_compat.contract.request import PATCH_SIZES, Workload
from toto_compat.errors import InputError

_COMMON = {
    "num_layers": 12,  # never fewer: production's guards failed one layer after the other
    "dropout": 0.1,
    "spacewise_every_n_layers": 12,
    "spacewise_first": False,
    "scaler_cls": "<class 'model.scaler.CausalPatchStdMeanScaler'>",
    "output_distribution_classes": ["<class 'model.distribution.MixtureOfStudentTsOutput'>"],
    "output_distribution_kwargs": {"k_components": 24},
    "stabilize_with_global": True,
    "scale_factor_exponent": 10.0,
}

# `base` is the shape of the public Toto-Open-Base-1.0; `tiny` keeps its depth and shrinks the rest.
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "tiny": {**_COMMON, "patch_size": 32, "stride": 32, "embed_dim": 128, "num_heads": 4, "mlp_hidden_dim": 256},
    "base": {**_COMMON, "patch_size": 64, "stride": 64, "embed_dim": 768, "num_heads": 12, "mlp_hidden_dim": 3072},
}


def build_backbone(
    workload: Workload, *, dtype: torch.dtype, device: str, checkpoint_folder: str | None = None
) -> TotoBackbone:
    """The model in evaluation mode. Weights are drawn in float32 and cast, so that every dtype has the same ones."""
    if checkpoint_folder is not None:
        backbone = _load_checkpoint(Path(checkpoint_folder))
        patch_size = backbone.patch_embed.stride
        if patch_size != workload.patch_size:
            raise InputError(
                f"checkpoint {checkpoint_folder}: its patch has {patch_size} points, that of model {workload.model} "
                f"{workload.patch_size}",
                hint=f"name the model with its patch in the workload: {PATCH_SIZES}",
            )
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(workload.seed)
            backbone = TotoBackbone(**SHAPES[workload.model], use_memory_efficient_attention=bool(XFORMERS_AVAILABLE))
            draw_constants(backbone)
    return backbone.to(device=device, dtype=dtype).eval().requires_grad_(False)


@torch.no_grad()
def draw_constants(backbone: TotoBackbone) -> None:
    """Draw what torch begins with one value: a norm's weights are all 1, some biases all 0.

    A cache that forgets to apply such a parameter would forecast right on untrained weights alone.
    """
    for parameter in backbone.parameters():
        first = parameter.view(-1)[0]
        if parameter.numel() > 1 and bool((parameter == first).all()):
            parameter.add_(0.25 * (2.0 * torch.rand_like(parameter) - 1.0))


def _load_checkpoint(folder: Path) -> TotoBackbone:
    for name in ("config.json", "model.safetensors"):
        if not (folder / name).is_file():
            raise InputError(
                f"checkpoint {folder}: no {name}", hint="give a folder with config.json and model.safetensors"
            )
    try:
        # Not from_pretrained: toto-ts 0.2.0's hook for it does not fit huggingface_hub 1.0 and later. Strict: a weight
        # that is missing from the file must not stay random.
        return Toto.load_from_checkpoint(str(folder), strict=True).model
    except (RuntimeError, ValueError, TypeError, KeyError) as error:
        raise InputError(
            f"checkpoint {folder}: toto-ts cannot load it: {error}", hint="was it saved by toto-ts?"
        ) from error
