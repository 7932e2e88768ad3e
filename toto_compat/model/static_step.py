"""One decode step of Toto as one graph with fixed shapes: scale the new patch, embed, attend, predict, advance.

The arithmetic is toto-ts's own, restated where toto-ts slices by a growing length or asks the device for a number:
the causal scaler carries its sums forward instead of going over the whole series again, attention runs over the whole
buffer under a mask, and `unembed` followed by the distribution's projections - two linear maps in a row - is one.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
from torch import Tensor
from toto.model.attention import AttentionAxis
from toto.model.backbone import TotoBackbone
from toto.model.distribution import MixtureOfStudentTsOutput, StudentTOutput
from toto.model.scaler import CausalPatchStdMeanScaler, CausalStdMeanScaler, StdMeanScaler

from toto_compat.caches.fixed_size import FixedSizeKVCache

# From torch 2.8 a region marked like this is compiled once and used by all twelve layers.
nested_compile_region: Callable[..., Any] | None = getattr(torch.compiler, "nested_compile_region", None)


class FusedHead(torch.nn.Module):
    """`unembed` and the distribution's projections multiplied out: `base` reads 8 times less weight for them."""

    def __init__(self, backbone: TotoBackbone) -> None:
        super().__init__()
        output = backbone.output_distribution
        self.mixture = isinstance(output, MixtureOfStudentTsOutput)
        projections = [output.df, output.loc_proj, output.scale_proj]
        if self.mixture:
            projections.append(output.mixture_weights)
        self.kinds = len(projections)
        self.components: int = projections[0].out_features
        self.patch_size: int = backbone.patch_embed.patch_size
        width, dtype = backbone.embed_dim, backbone.unembed.weight.dtype
        # In double precision, so that the product is rounded once and not twice.
        project = torch.cat([p.weight for p in projections]).double()
        project_bias = torch.cat([p.bias for p in projections]).double()
        unembed = backbone.unembed.weight.view(self.patch_size, width, width)
        rows = [project @ unembed[i].double() for i in range(self.patch_size)]
        bias = backbone.unembed.bias.double().view(self.patch_size, width) @ project.T + project_bias
        self.weight = torch.nn.Parameter(torch.cat(rows).to(dtype), requires_grad=False)
        self.bias = torch.nn.Parameter(bias.reshape(-1).to(dtype), requires_grad=False)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """batch, variate, patches, width -> df, loc, scale, probs, each batch, variate, time, component."""
        batch, variates, patches, _ = hidden.shape
        raw = F.linear(hidden, self.weight, self.bias)
        raw = raw.view(batch, variates, patches * self.patch_size, self.kinds, self.components)
        eps = torch.finfo(raw.dtype).eps
        df = 2.0 + F.softplus(raw[..., 0, :]).clamp_min(eps)
        loc = raw[..., 1, :]
        scale = F.softplus(raw[..., 2, :]).clamp_min(eps)
        if not self.mixture:
            return df, loc, scale, torch.ones_like(loc)
        probs = F.softmax(raw[..., 3, :], dim=-1)
        return df, loc, scale, probs / probs.sum(-1, keepdim=True)  # torch's Categorical divides once more


class ScalerState(torch.nn.Module):
    """What toto-ts's scaler would know after the context, brought forward patch by patch instead of recomputed."""

    count: Tensor
    mean: Tensor
    squares: Tensor
    lowest: Tensor
    highest: Tensor
    loc: Tensor
    scale: Tensor

    def __init__(self, scaler: Any, batch: int, variates: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.causal = not isinstance(scaler, StdMeanScaler)
        self.per_step = isinstance(scaler, CausalStdMeanScaler)
        self.minimum_scale: float = scaler.minimum_scale
        self.bessel: bool = getattr(scaler, "use_bessel_correction", False)
        self.stabilise: bool = getattr(scaler, "stabilize_with_global", False)
        self.exponent: float = getattr(scaler, "scale_factor_exponent", 0.0)
        self._context_state: dict[str, Tensor] = {}
        self._copies = 1
        shape = (batch, variates, 1)
        for name in ("count", "mean", "squares", "lowest", "highest"):
            self.register_buffer(name, torch.zeros(shape, dtype=torch.float64, device=device), persistent=False)
        for name in ("loc", "scale"):
            self.register_buffer(name, torch.ones(shape, dtype=dtype, device=device), persistent=False)

    def begin(self, inputs: Tensor, padding_mask: Tensor, loc: Tensor, scale: Tensor, copies: int) -> None:
        """Take over from the scaler's pass over the context; each context serves `copies` rows."""
        weights = padding_mask.to(torch.float64)
        values = inputs.to(torch.float64)
        count = weights.sum(-1, keepdim=True)
        mean = (weights * values).sum(-1, keepdim=True) / count.clamp_min(1.0)
        squares = (weights * (values - mean) ** 2).sum(-1, keepdim=True)
        state = {"count": count, "mean": mean, "squares": squares, "loc": loc[..., -1:], "scale": scale[..., -1:]}
        if self.stabilise:
            global_scale = torch.sqrt(squares / count.clamp_min(1.0) + self.minimum_scale)
            lowest = global_scale * 10.0**-self.exponent
            state["lowest"] = lowest.clamp_min(self.minimum_scale)
            state["highest"] = global_scale * 10.0**self.exponent
        self._context_state = state
        self._copies = copies
        self.rewind()

    def rewind(self) -> None:
        """Back to what was known after the context."""
        for name, value in self._context_state.items():
            rows = self._copies * value.shape[0]
            getattr(self, name)[:rows].unflatten(0, (self._copies, value.shape[0])).copy_(value)

    def forward(self, patch: Tensor) -> tuple[Tensor, Tensor]:
        """Include the new patch; give its location and scale."""
        if not self.causal:
            return self.loc, self.scale
        values = patch.to(torch.float64)
        size = values.shape[-1]
        if self.per_step:
            steps = torch.arange(1, size + 1, device=values.device, dtype=torch.float64)
            counts = self.count + steps
            means = (self.count * self.mean + values.cumsum(-1)) / counts
            before = torch.cat([self.mean, means[..., :-1]], dim=-1)
            squares = self.squares + ((values - before) * (values - means)).cumsum(-1)
        else:
            # The patch's own sums joined to the running ones: the last element of toto-ts's cumulative sums.
            counts = self.count + size
            own_mean = values.mean(-1, keepdim=True)
            shift = own_mean - self.mean
            means = self.mean + shift * (size / counts)
            own = ((values - own_mean) ** 2).sum(-1, keepdim=True)
            squares = self.squares + own + shift**2 * (self.count * size / counts)
        self.count.copy_(counts[..., -1:])
        self.mean.copy_(means[..., -1:])
        self.squares.copy_(squares[..., -1:])
        degrees = (counts - 1.0).clamp_min(1.0) if self.bessel else counts
        scale = torch.sqrt(squares / degrees + self.minimum_scale)
        if self.stabilise:
            scale = torch.minimum(torch.maximum(scale, self.lowest), self.highest)
        return means.to(patch.dtype), scale.to(patch.dtype)


Rotation = tuple[Tensor, Tensor, Tensor, Tensor]  # cos, sin, scale of the queries, scale of the keys


def rotation_of_chunk(rotary: Any, positions: Tensor) -> Rotation:
    """What toto-ts rotates a chunk with. Its xPos scale depends on the largest position of the chunk."""
    frequencies, scale = rotary.forward(positions), rotary.get_scale(positions).to(positions.dtype)
    cos, sin = (table.to(positions.dtype) for table in (frequencies.cos(), frequencies.sin()))
    return cos, sin, scale, scale**-1


def rotations_of_single_patches(rotary: Any, positions: Tensor) -> Rotation:
    """The same for decode steps, each a chunk of one."""
    chunks = [rotation_of_chunk(rotary, position.view(1)) for position in positions]
    cos, sin, query_scale, key_scale = (torch.cat(tables) for tables in zip(*chunks, strict=True))
    return cos, sin, query_scale, key_scale


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, scale: Tensor) -> Tensor:
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((-odd, even), dim=-1).flatten(-2)
    return (x * cos * scale) + (turned * sin * scale)


def _qkv(layer: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    attention = layer.attention
    query, key, value = attention.get_qkv(attention.rearrange_inputs(layer.norm1(hidden)))
    return query, key, value


def _project(layer: Any, hidden: Tensor, *rotation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    cos, sin, query_scale, key_scale = rotation
    query, key, value = _qkv(layer, hidden)
    return _rotate(query, cos, sin, query_scale), _rotate(key, cos, sin, key_scale), value


def _project_to_own_memory(layer: Any, hidden: Tensor, *rotation: Tensor) -> tuple[Tensor, ...]:
    """As a region's outputs must be: inductor (2.13) takes the memory behind one for as large as its base, and a value
    that is a view into the joint projection gets written past its end."""
    return tuple(x.clone(memory_format=torch.contiguous_format) for x in _project(layer, hidden, *rotation))


def _finish(layer: Any, hidden: Tensor, attended: Tensor) -> Tensor:
    attention = layer.attention
    batch, variates, patches, _ = hidden.shape
    hidden = hidden + attention.wO(attention.rearrange_output(attended, batch, variates, patches))
    return hidden + layer.mlp(layer.norm2(hidden))


# Time-wise and space-wise layers share both regions, so that inductor has as few kernels to compile as possible.
project_region = _project if nested_compile_region is None else nested_compile_region(_project_to_own_memory)
finish_region = _finish if nested_compile_region is None else nested_compile_region(_finish)


ROTATION_BUFFERS = ("cos", "sin", "query_scale", "key_scale")


class StaticStep(torch.nn.Module):
    """The step and every buffer it reads or writes, at addresses that stay the same for the life of the object."""

    def __init__(self, backbone: TotoBackbone, head: FusedHead, *, batch: int, variates: int, capacity: int) -> None:
        super().__init__()
        parameter = backbone.unembed.weight
        dtype, device = parameter.dtype, parameter.device
        self.batch, self.variates, self.capacity = batch, variates, capacity
        self.embed = backbone.patch_embed.projection
        self.layers = backbone.transformer.layers
        self.head = head
        self.is_time_layer = [layer.attention_axis == AttentionAxis.TIME for layer in self.layers]
        self.cache_layer = {i: n for n, i in enumerate(i for i, time in enumerate(self.is_time_layer) if time)}
        heads, width = self.layers[0].num_heads, backbone.embed_dim
        self.cache = self.make_cache(
            layers=len(self.cache_layer),
            rows=batch * variates,
            heads=heads,
            capacity=capacity,
            head_dim=width // heads,
            dtype=dtype,
            device=device,
        )
        self.scaler = ScalerState(backbone.scaler, batch, variates, dtype, device)
        patch_size = backbone.patch_embed.patch_size
        self.register_buffer(
            "patch", torch.zeros(batch, variates, patch_size, dtype=dtype, device=device), persistent=False
        )
        group_bias = torch.zeros(batch, 1, variates, variates, dtype=dtype, device=device)
        self.register_buffer("group_bias", group_bias, persistent=False)
        self.rotary = backbone.transformer.rotary_emb
        positions = torch.arange(capacity, device=device, dtype=dtype)
        for name, table in zip(ROTATION_BUFFERS, rotations_of_single_patches(self.rotary, positions), strict=True):
            self.register_buffer(name, table, persistent=False)
        self._rotation_of_context: dict[int, Rotation] = {}
        for tensor in (*self.cache.tensors(), *self.buffers()):
            torch._dynamo.mark_static_address(tensor)

    def make_cache(self, **shape: Any) -> FixedSizeKVCache:
        return FixedSizeKVCache(**shape)

    def advance(self) -> Tensor:
        """Where the new patch stands: for its rotation and its slot."""
        return self.cache.advance()

    def prefill(self, hidden: Tensor, group_mask: Tensor, *, whole: bool) -> Tensor:
        """The layers over a whole context, eager, filling the cache; hidden states of the newest patch or of all.

        Unless all are wanted, the last time-wise layer is where the older patches have done their part.
        """
        patches = hidden.shape[2]
        if patches not in self._rotation_of_context:
            positions = torch.arange(patches, device=hidden.device, dtype=hidden.dtype)
            self._rotation_of_context[patches] = rotation_of_chunk(self.rotary, positions)
        rotation = self._rotation_of_context[patches]
        last_time_layer = max(self.cache_layer, default=-1)
        for index, layer in enumerate(self.layers):
            if self.is_time_layer[index]:
                query, key, value = _project(layer, hidden, *rotation)
                self.cache.fill(self.cache_layer[index], key, value)
                newest_only = index == last_time_layer and not whole
                if newest_only:
                    query, hidden = query[:, :, -1:], hidden[:, :, -1:]
                attended = F.scaled_dot_product_attention(query, key, value, is_causal=not newest_only)
            else:
                query, key, value = _qkv(layer, hidden)
                mask = group_mask.unflatten(0, (hidden.shape[0], -1))[:, -hidden.shape[2] :].flatten(0, 1)
                attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
            hidden = _finish(layer, hidden, attended)
        return hidden if whole else hidden[:, :, -1:]

    def forward(self) -> tuple[Tensor, ...]:
        """Consume `patch`; predict the next one, leave its mean in `patch` and return the distribution."""
        position = self.advance()
        affine_loc, affine_scale = self.scaler(self.patch)
        hidden = self.embed((self.patch - affine_loc) / affine_scale).unsqueeze(2)
        rotation = [
            getattr(self, name).index_select(0, position) for name in ("cos", "sin", "query_scale", "key_scale")
        ]
        bias = self.cache.bias()
        for index, layer in enumerate(self.layers):
            if self.is_time_layer[index]:
                query, key, value = project_region(layer, hidden, *rotation)
                keys, values = self.cache.write(self.cache_layer[index], key, value)
                attended = F.scaled_dot_product_attention(query, keys, values, attn_mask=bias)
            else:
                query, key, value = _qkv(layer, hidden)
                attended = F.scaled_dot_product_attention(query, key, value, attn_mask=self.group_bias)
            hidden = finish_region(layer, hidden, attended)
        df, loc, scale, probs = self.head(hidden)
        mean = (probs * loc).sum(-1) * affine_scale + affine_loc
        self.patch.copy_(without_extremes(mean))
        return df, loc, scale, probs, affine_loc, affine_scale


def without_extremes(values: Tensor) -> Tensor:
    """toto-ts's guard on what it feeds back: infinite, NaN or absurdly large becomes 0."""
    extreme = values.isinf() | values.isnan() | (values.abs() >= torch.finfo(values.dtype).max / 2)
    return torch.where(extreme, torch.zeros_like(values), values)


SUPPORTED_SCALERS = (StdMeanScaler, CausalStdMeanScaler, CausalPatchStdMeanScaler)
SUPPORTED_DISTRIBUTIONS = (StudentTOutput, MixtureOfStudentTsOutput)
