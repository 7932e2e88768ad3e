"""What the static graphs cover of a model, and the name of what they do not.

The graphs restate what toto-ts does between its linear layers and norms, and multiply its head out. Whoever hooks,
patches or replaces one of those parts would not be heard, so such a model is not covered: a part of the model that was
changed in place, a method that somebody put in the place of toto-ts's own, and a release whose methods read otherwise
than those that were restated. Layers whose linear parts were changed are covered: those are called (`layer`).
"""

import functools
import hashlib
import importlib
import inspect
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Any

import torch
from toto.model import attention
from toto.model.backbone import TotoBackbone
from toto.model.embedding import PatchEmbedding
from toto.model.rope import TimeAwareRotaryEmbedding
from toto.model.transformer import Transformer, TransformerLayer

from toto_compat.model.head import SUPPORTED_DISTRIBUTIONS
from toto_compat.model.scaler_state import SUPPORTED_SCALERS

# What was restated, with the beginning of the SHA-256 of its source in the release that it was restated from.
RESTATED: Mapping[str, Mapping[str, str]] = {
    "0.2.0": {
        "toto.model.attention:TimeWiseMultiheadAttention.forward": "914e3b309a7e55b7",
        "toto.model.attention:TimeWiseMultiheadAttention.rearrange_inputs": "da0c23a8d3b00272",
        "toto.model.attention:TimeWiseMultiheadAttention.get_qkv": "25db696518130f68",
        "toto.model.attention:TimeWiseMultiheadAttention.positional_embedding": "176c165b483d1900",
        "toto.model.attention:TimeWiseMultiheadAttention.run_attention": "c7e6584221c1eb65",
        "toto.model.attention:TimeWiseMultiheadAttention.rearrange_output": "ac0ca06fbbf84db8",
        "toto.model.attention:SpaceWiseMultiheadAttention.forward": "914e3b309a7e55b7",
        "toto.model.attention:SpaceWiseMultiheadAttention.rearrange_inputs": "da0c23a8d3b00272",
        "toto.model.attention:SpaceWiseMultiheadAttention.get_qkv": "25db696518130f68",
        "toto.model.attention:SpaceWiseMultiheadAttention.positional_embedding": "176c165b483d1900",
        "toto.model.attention:SpaceWiseMultiheadAttention.run_attention": "c7e6584221c1eb65",
        "toto.model.attention:SpaceWiseMultiheadAttention.rearrange_output": "ac0ca06fbbf84db8",
        "toto.model.transformer:TransformerLayer.forward": "28d735f2d4586b3a",
        "toto.model.transformer:Transformer.forward": "acf9b5f7c25b67fe",
        "toto.model.transformer:Transformer._get_mask": "f379a15b2e32ff46",
        "toto.model.transformer:make_batched_block_mask": "ac61ac1967bfc9a2",
        "toto.model.backbone:TotoBackbone.forward": "930bbb733feb52e1",
        "toto.model.backbone:TotoBackbone.backbone": "d278855763cbac13",
        "toto.model.embedding:PatchEmbedding.forward": "1cbf9ac137b0ff7a",
        "toto.model.embedding:PatchEmbedding._patchify": "cc8f18d3096c4781",
        "toto.model.rope:TimeAwareRotaryEmbedding.rotate_queries_and_keys": "47f71b50d3e26624",
        "toto.model.rope:TimeAwareRotaryEmbedding.get_scale": "e2029caae19c4f84",
        "toto.model.scaler:compute_causal_statistics": "bad4223db82d9272",
        "toto.model.scaler:StdMeanScaler.__call__": "966068edacb46cc8",
        "toto.model.scaler:CausalStdMeanScaler.__call__": "a1e0f6c5c1d87621",
        "toto.model.scaler:CausalPatchStdMeanScaler.__call__": "9944ef530d57bc82",
        "toto.model.distribution:StudentTOutput.forward": "9a64b6188408334e",
        "toto.model.distribution:MixtureOfStudentTsOutput.forward": "4578884213278185",
        "toto.inference.forecaster:TotoForecaster.generate_mean": "48a6bd1b8a8c91dc",
        "toto.inference.forecaster:TotoForecaster.generate_samples": "fa0de78528d0d3e4",
        "toto.inference.forecaster:replace_extreme_values": "2da7d136d3a041cc",
    }
}


def why_not_static(backbone: TotoBackbone) -> str:
    """Empty if the static graphs cover this model, else the name of what they do not cover."""
    dtype = backbone.unembed.weight.dtype
    reasons = {
        "exogenous variates with fusion tokens": getattr(backbone, "fusion", None) is not None,
        "the memory-efficient attention layout": backbone.use_memory_efficient_attention,
        f"dtype {dtype}": dtype not in (torch.float32, torch.float64, torch.bfloat16),
        f"scaler {type(backbone.scaler).__name__}": type(backbone.scaler) not in SUPPORTED_SCALERS,
        f"distribution {type(backbone.output_distribution).__name__}": type(backbone.output_distribution)
        not in SUPPORTED_DISTRIBUTIONS,
    }
    own = [name for name, holds in reasons.items() if holds]
    return ", ".join([*own, *changed_methods(), *changed_parts(backbone)])


def changed_parts(backbone: TotoBackbone) -> list[str]:
    """Name the parts that the graphs go past and that are not toto-ts's own any more, as they stand in the model."""
    return [name for name, part, own in _passed_by(backbone) if not _is_own(part, own)]


def _passed_by(backbone: TotoBackbone) -> Iterator[tuple[str, Any, tuple[type, ...]]]:
    """Give every part whose `forward` the graphs restate instead of calling it, with the classes it may have."""
    attentions = (attention.TimeWiseMultiheadAttention, attention.SpaceWiseMultiheadAttention)
    yield "the model", backbone, (TotoBackbone,)
    yield "patch_embed", backbone.patch_embed, (PatchEmbedding,)
    yield "transformer", backbone.transformer, (Transformer,)
    yield "transformer.rotary_emb", backbone.transformer.rotary_emb, (TimeAwareRotaryEmbedding,)
    for index, layer in enumerate(backbone.transformer.layers):
        yield f"transformer.layers.{index}", layer, (TransformerLayer,)
        yield f"transformer.layers.{index}.attention", getattr(layer, "attention", None), attentions
    yield "unembed", backbone.unembed, (torch.nn.Linear,)
    output = backbone.output_distribution
    yield "output_distribution", output, SUPPORTED_DISTRIBUTIONS
    for name in ("df", "loc_proj", "scale_proj", "mixture_weights"):
        if hasattr(output, name):
            yield f"output_distribution.{name}", getattr(output, name), (torch.nn.Linear,)


def _is_own(part: Any, classes: tuple[type, ...]) -> bool:
    if type(part) not in classes or part._forward_hooks or part._forward_pre_hooks:
        return False
    return (
        vars(part).keys().isdisjoint(_methods(part.__class__))
    )  # what is assigned to an object hides its class's method


@functools.cache
def _methods(cls: type) -> frozenset[str]:
    """Give the names of a class's methods, but for the one that makes the cache: that is what fixed_size replaces."""
    return frozenset(name for name in dir(cls) if callable(getattr(cls, name))) - {"allocate_kv_cache"}


def changed_methods() -> list[str]:
    """Name the methods of toto-ts that are not those that were restated: patched, or of another release."""
    release = _installed()
    known = RESTATED.get(release)
    if known is None:  # another release is covered as long as it reads the same
        same = any(all(_digest(name) == digest for name, digest in one.items()) for one in RESTATED.values())
        return [] if same else [f"toto-ts {release}"]
    patched = [name.replace(":", ".") for name, digest in known.items() if _digest(name) != digest]
    if attention.scaled_dot_product_attention is not torch.nn.functional.scaled_dot_product_attention:
        patched.append("toto.model.attention.scaled_dot_product_attention")
    return [f"{name}, patched" for name in patched]


@functools.cache
def _installed() -> str:
    return version("toto-ts")


def _digest(name: str) -> str:
    """Give the digest of what stands behind `module:Class.method` now, wherever it was defined."""
    module, _, path = name.partition(":")
    found: Any = functools.reduce(lambda owner, part: getattr(owner, part, None), path.split("."), _module(module))
    return _digest_of(found) if callable(found) else "gone"


@functools.cache
def _module(name: str) -> Any:
    return importlib.import_module(name)


@functools.cache
def _digest_of(function: Any) -> str:
    try:
        lines = inspect.getsource(function).splitlines()
    except (OSError, TypeError):
        return "no source"
    return hashlib.sha256("\n".join(line.rstrip() for line in lines).encode()).hexdigest()[:16]
