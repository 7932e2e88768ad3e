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


_WATCHED = 64  # elements of each weight


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
        self._sources = [backbone.unembed, *projections]
        # Enough of the weights behind the product to notice that somebody wrote to them, whichever way.
        watched = [source.weight.detach().flatten() for source in self._sources]
        self._watched = [weight[:: max(1, weight.numel() // _WATCHED)] for weight in watched]
        weight, bias = self._multiplied_out()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.bias = torch.nn.Parameter(bias, requires_grad=False)

    def is_stale(self) -> bool:
        return not torch.equal(torch.cat(self._watched), self._seen)

    def refresh(self) -> None:
        """The product again, in the same memory: graphs that read it need not be compiled again."""
        weight, bias = self._multiplied_out()
        self.weight.copy_(weight)
        self.bias.copy_(bias)

    def _multiplied_out(self) -> tuple[Tensor, Tensor]:
        unembed, *projections = self._sources
        self._seen = torch.cat(self._watched)
        dtype, width = unembed.weight.dtype, unembed.in_features
        # In double precision, so that the product is rounded once and not twice.
        project = torch.cat([p.weight for p in projections]).double()
        project_bias = torch.cat([p.bias for p in projections]).double()
        per_step = unembed.weight.view(self.patch_size, width, width)
        rows = [project @ per_step[i].double() for i in range(self.patch_size)]
        bias = unembed.bias.double().view(self.patch_size, width) @ project.T + project_bias
        return torch.cat(rows).to(dtype), bias.reshape(-1).to(dtype)

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


Rotation = tuple[Tensor, Tensor, Tensor, Tensor]  # cos and sin of the queries, cos and sin of the keys


def rotation_of_chunk(rotary: Any, positions: Tensor) -> Rotation:
    """What toto-ts rotates a chunk with. Its xPos scale depends on the largest position of the chunk."""
    frequencies, scale = rotary.forward(positions), rotary.get_scale(positions).to(positions.dtype)
    cos, sin = (table.to(positions.dtype) for table in (frequencies.cos(), frequencies.sin()))
    return cos * scale, sin * scale, cos * scale**-1, sin * scale**-1


def rotations_of_single_patches(rotary: Any, positions: Tensor) -> Rotation:
    """The same for decode steps, each a chunk of one."""
    chunks = [rotation_of_chunk(rotary, position.view(1)) for position in positions]
    query_cos, query_sin, key_cos, key_sin = (torch.cat(tables) for tables in zip(*chunks, strict=True))
    return query_cos, query_sin, key_cos, key_sin


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((-odd, even), dim=-1).flatten(-2)
    return x * cos + turned * sin


def _joint_projection(layer: Any, hidden: Tensor) -> Tensor:
    """..., width -> ..., (query, key, value), head, dimension of the head: toto-ts's own layout, its heads last."""
    attention = layer.attention
    joint = attention.wQKV(layer.norm1(hidden))
    split: Tensor = joint.unflatten(-1, (3, attention.head_dim, attention.num_heads)).transpose(-1, -2)
    return split


def _add_and_project(layer: Any, hidden: Tensor, pending: Tensor, *rotation: Tensor) -> tuple[Tensor, ...]:
    """The beginning of a layer; as at its end the norm follows an addition, so that one kernel does for both.

    A region's outputs must have memory of their own: inductor (2.13) takes the memory behind one for as large as its
    base, and a value that is a view into the joint projection gets written past its end.
    """
    query_cos, query_sin, key_cos, key_sin = rotation
    hidden = hidden + pending
    query, key, value = _joint_projection(layer, hidden).unbind(-3)
    query, key = _rotate(query, query_cos, query_sin), _rotate(key, key_cos, key_sin)
    return hidden, query, key, value.clone(memory_format=torch.contiguous_format)


def after_attention(layer: Any, hidden: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
    """The end of a layer: the hidden state, and what its MLP still has to add to it."""
    hidden = hidden + layer.attention.wO(attended)
    return hidden, layer.mlp(layer.norm2(hidden))


def _attend_and_finish(layer: Any, hidden: Tensor, *attention: Tensor) -> tuple[Tensor, Tensor]:
    """Attention spelled out: fused attention kernels are made for many queries a row, here call overhead is all."""
    query, keys, values, bias = attention
    scores = (query * query.shape[-1] ** -0.5) @ keys.transpose(-1, -2) + bias
    attended = scores.softmax(-1) @ values
    return after_attention(layer, hidden, attended.transpose(1, 2).flatten(2).flatten(0, 1))


# A region is compiled once and used by all layers. Between the two the cache is written: no region may do that.
project_region, attend_region = (
    function if nested_compile_region is None else nested_compile_region(function)
    for function in (_add_and_project, _attend_and_finish)
)


ROTATION_BUFFERS = ("query_cos", "query_sin", "key_cos", "key_sin")


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
        nothing_pending = torch.zeros(batch * variates, width, dtype=dtype, device=device)
        self.register_buffer("nothing_pending", nothing_pending, persistent=False)
        self.rotary = backbone.transformer.rotary_emb
        for name, table in self._rotation_tables(dtype, device).items():
            self.register_buffer(name, table, persistent=False)
        self.register_buffer("last_row", torch.tensor([capacity], device=device), persistent=False)
        self._rotation_of_context: dict[int, Rotation] = {}
        for tensor in (*self.cache.tensors(), *self.buffers()):
            torch._dynamo.mark_static_address(tensor)

    def _rotation_tables(self, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        """A row per slot. A space-wise layer is not rotated: turned by nothing, the last row, it is the same code."""
        positions = torch.arange(self.capacity, device=device, dtype=dtype)
        rotations = rotations_of_single_patches(self.rotary, positions)
        return {
            name: torch.cat([table, torch.full_like(table[:1], nothing)])
            for name, table, nothing in zip(ROTATION_BUFFERS, rotations, (1.0, 0.0, 1.0, 0.0), strict=True)
        }

    def refresh(self) -> None:
        """What was computed from weights, again and in the same memory."""
        for name, table in self._rotation_tables(self.patch.dtype, self.patch.device).items():
            getattr(self, name).copy_(table)
        self._rotation_of_context.clear()

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
            joint = _joint_projection(layer, hidden)  # batch, variate, patch, 3, head, dimension
            if self.is_time_layer[index]:
                query, key, value = joint.permute(3, 0, 1, 4, 2, 5).flatten(1, 2).contiguous().unbind()
                query, key = _rotate(query, *rotation[:2]), _rotate(key, *rotation[2:])
                self.cache.fill(self.cache_layer[index], key, value)
                newest_only = index == last_time_layer and not whole
                if newest_only:
                    query, hidden = query[:, :, -1:], hidden[:, :, -1:]
                attended = F.scaled_dot_product_attention(query, key, value, is_causal=not newest_only)
                attended = attended.unflatten(0, hidden.shape[:2]).transpose(2, 3)
            else:
                query, key, value = joint.permute(3, 0, 2, 4, 1, 5).flatten(1, 2).contiguous().unbind()
                mask = group_mask.unflatten(0, (hidden.shape[0], -1))[:, -hidden.shape[2] :].flatten(0, 1)
                attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
                attended = attended.unflatten(0, (hidden.shape[0], hidden.shape[2])).permute(0, 3, 1, 2, 4)
            hidden, pending = after_attention(layer, hidden, attended.flatten(-2))
            hidden = hidden + pending
        return hidden if whole else hidden[:, :, -1:]

    def _rotation(self, row: Tensor) -> list[Tensor]:
        return [getattr(self, name).index_select(0, row) for name in ROTATION_BUFFERS]

    def forward(self) -> tuple[Tensor, ...]:
        """Consume `patch`; predict the next one, leave its mean in `patch` and return the distribution."""
        position = self.advance()
        affine_loc, affine_scale = self.scaler(self.patch)
        hidden = self.embed((self.patch - affine_loc) / affine_scale).flatten(0, 1)  # a row per variate, width
        turned, unturned = self._rotation(position), self._rotation(self.last_row)
        bias = self.cache.bias()
        pending = self.nothing_pending
        for index, layer in enumerate(self.layers):
            rotation = turned if self.is_time_layer[index] else unturned
            hidden, query, key, value = project_region(layer, hidden, pending, *rotation)
            if self.is_time_layer[index]:
                query, key, value = (x.unsqueeze(2) for x in (query, key, value))
                key, value = self.cache.write(self.cache_layer[index], key, value)
                mask = bias
            else:
                query, key, value = (x.unflatten(0, (self.batch, -1)).transpose(1, 2) for x in (query, key, value))
                mask = self.group_bias
            hidden, pending = attend_region(layer, hidden, query, key, value, mask)
        hidden = (hidden + pending).view(self.batch, self.variates, 1, -1)
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
