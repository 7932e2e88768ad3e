"""One decode step of Toto as one graph with fixed shapes: scale the new patch, embed, attend, predict, advance.

The arithmetic is toto-ts's own, restated where toto-ts slices by a growing length or asks the device for a number:
the causal scaler carries its sums forward instead of going over the whole series again, attention runs over the whole
buffer under a mask, and `unembed` followed by the distribution's projections - two linear maps in a row - is one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
from torch import Tensor
from toto.model.attention import AttentionAxis
from toto.model.backbone import TotoBackbone
from toto.model.distribution import MixtureOfStudentTsOutput, StudentTOutput
from toto.model.feed_forward import SwiGLU
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


Rotation = tuple[Tensor, Tensor]  # turns: position, pair of dimensions; scales: query and key, position, dimension


def rotation_of_chunk(rotary: Any, positions: Tensor) -> Rotation:
    """What toto-ts rotates a chunk with: turns as complex numbers, then scales.

    xPos's scale depends on the largest position of the chunk; toto-ts's is not the same for both dimensions of a pair.
    """
    angles, scale = rotary.forward(positions)[..., ::2], rotary.get_scale(positions).to(positions.dtype)
    turns = torch.complex(angles.cos().to(positions.dtype), angles.sin().to(positions.dtype))
    return turns, torch.stack((scale, scale**-1))


def _rotate_in_place(x: Tensor, rotation: Rotation) -> None:
    """Queries and keys, contiguous: query and key, row, head, position, dimension of the head."""
    turns, scales = rotation
    torch.view_as_complex(x.unflatten(-1, (-1, 2))).mul_(turns)
    x.mul_(scales[:, None, None])


def _rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turns and scales in one, as the compiler likes it. The sine of a pair's first dimension is the negative one."""
    turned = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)  # the two dimensions of each pair change places
    return x * cosines + turned * sines


def _joint_projection(layer: Any, hidden: Tensor) -> Tensor:
    """..., width -> ..., (query, key, value), head, dimension of the head: toto-ts's own layout, its heads last."""
    attention = layer.attention
    joint = attention.wQKV(layer.norm1(hidden))
    split: Tensor = joint.unflatten(-1, (3, attention.head_dim, attention.num_heads)).transpose(-1, -2)
    return split


@dataclass(frozen=True)
class LayerEnds:
    """A layer before and after its attention: on its own for prefill, joined to the projections for a decode step."""

    begin: Callable[[Any, Tensor], Tensor]
    finish: Callable[[Any, Tensor, Tensor], Tensor]
    project: Callable[..., tuple[Tensor, Tensor, Tensor]]
    attend: Callable[..., Tensor]


def _layer_ends(begin: Callable[[Any, Tensor], Tensor], finish: Callable[[Any, Tensor, Tensor], Tensor]) -> LayerEnds:
    """`project` and `attend` are regions, where torch has them: compiled once, used by all layers.

    Between the two the cache is written: no region may do that. And a region's outputs must have memory of their own:
    inductor (2.13) takes the memory behind one for as large as its base, and a view into something larger gets written
    past its end.
    """

    def project(layer: Any, hidden: Tensor, row: Tensor, *tables: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        cosines, sines = (table.index_select(0, row).view(3, 1, 1, -1) for table in tables)
        rotated = _rotate(_joint_projection(layer, hidden).transpose(0, 1), cosines, sines)
        query, keys_values = (x.clone(memory_format=torch.contiguous_format) for x in (rotated[0], rotated[1:]))
        return query, keys_values, begin(layer, hidden)

    def attend(layer: Any, begun: Tensor, *attention: Tensor) -> Tensor:
        # spelled out: fused attention kernels are made for many queries a row, here call overhead is all
        query, keys_values, bias = attention
        keys, values = keys_values.unbind()
        attended = (query @ keys.transpose(-1, -2) + bias).softmax(-1) @ values
        return finish(layer, begun, attended.transpose(1, 2).flatten(2).flatten(0, 1))

    if nested_compile_region is None:
        return LayerEnds(begin, finish, project, attend)
    return LayerEnds(begin, finish, nested_compile_region(project), nested_compile_region(attend))


def _begin_with_bias(layer: Any, hidden: Tensor) -> Tensor:
    biased: Tensor = hidden + layer.attention.wO.bias
    return biased


def _finish_with_products(layer: Any, begun: Tensor, attended: Tensor) -> Tensor:
    """What a layer adds to the hidden state is added by the matrix products: no kernel for it, one norm kernel for all.

    The bias comes before the norm, as it does where a layer begins: for inductor that is the order of the kernel.
    """
    hidden = torch.addmm(begun, attended, layer.attention.wO.weight.t())
    first, activation, last, _dropout = layer.mlp
    biased = hidden + last.bias
    return torch.addmm(biased, activation(first(layer.norm2(hidden))), last.weight.t())


def _begin_with_copy(_layer: Any, hidden: Tensor) -> Tensor:
    return hidden.clone()


def _finish_with_calls(layer: Any, begun: Tensor, attended: Tensor) -> Tensor:
    hidden = begun + layer.attention.wO(attended)
    finished: Tensor = hidden + layer.mlp(layer.norm2(hidden))
    return finished


TAKEN_APART = _layer_ends(_begin_with_bias, _finish_with_products)
CALLED = _layer_ends(_begin_with_copy, _finish_with_calls)


def can_be_taken_apart(layer: Any) -> bool:
    """Whether its linear layers are toto-ts's own: a module that somebody wrapped, hooked or replaced is called."""
    output, mlp = layer.attention.wO, layer.mlp
    if type(mlp) is not torch.nn.Sequential or [type(module) for module in mlp] != _TOTO_MLP:
        return False
    added = [output, mlp[2]]
    return all(map(_is_untouched, (*added, mlp, mlp[3]))) and all(
        type(linear) is torch.nn.Linear and type(linear.weight) is type(linear.bias) is torch.nn.Parameter
        for linear in added
    )


_TOTO_MLP = [torch.nn.Linear, SwiGLU, torch.nn.Linear, torch.nn.Dropout]  # xformers' fused one is another


def _is_untouched(module: Any) -> bool:
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


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
        self.ends = TAKEN_APART if all(map(can_be_taken_apart, self.layers)) else CALLED
        self.project, self.attend = self.ends.project, self.ends.attend
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
        for name, table in zip(("cosines", "sines"), self._rotation_tables(dtype, device), strict=True):
            self.register_buffer(name, table, persistent=False)
        self.register_buffer("last_row", torch.tensor([capacity], device=device), persistent=False)
        self._rotation_of_context: dict[int, Rotation] = {}
        for tensor in (*self.cache.tensors(), *self.buffers()):
            torch._dynamo.mark_static_address(tensor)

    def _rotation_tables(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosines and sines: slot, each a chunk of its own; query, key and value; dimension of the head.

        Values are turned by nothing, and so is all of a space-wise layer, with the last row: the same code for all.
        Queries are scaled for attention on the way.
        """
        positions = torch.arange(self.capacity, device=device, dtype=dtype)
        chunks = [rotation_of_chunk(self.rotary, position.view(1)) for position in positions]
        turns = torch.cat([turns for turns, _ in chunks])
        scales = torch.cat([scales for _, scales in chunks], dim=1)
        tables = (
            turns.real.repeat_interleave(2, dim=-1) * scales,
            torch.stack((-turns.imag, turns.imag), dim=-1).flatten(-2) * scales,
        )
        cosines, sines = (
            F.pad(table.transpose(0, 1), (0, 0, 0, 1, 0, 1), value=nothing)
            for table, nothing in zip(tables, (1.0, 0.0), strict=True)
        )
        for table in (cosines, sines):
            table[:, 0] *= table.shape[-1] ** -0.5
        return cosines, sines

    def refresh(self) -> None:
        """What was computed from weights, again and in the same memory."""
        cosines, sines = self._rotation_tables(self.patch.dtype, self.patch.device)
        self.cosines.copy_(cosines)
        self.sines.copy_(sines)
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
                joint = joint.permute(3, 0, 1, 4, 2, 5).flatten(1, 2).contiguous()
                _rotate_in_place(joint[:2], rotation)
                query, key, value = joint.unbind()
                self.cache.fill(self.cache_layer[index], joint[1:])
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
            begun = self.ends.begin(layer, hidden).flatten(0, 2)
            hidden = self.ends.finish(layer, begun, attended.flatten(-2).flatten(0, 2)).view_as(hidden)
        return hidden if whole else hidden[:, :, -1:]

    def forward(self) -> tuple[Tensor, ...]:
        """Consume `patch`; predict the next one, leave its mean in `patch` and return the distribution."""
        position = self.advance()
        affine_loc, affine_scale = self.scaler(self.patch)
        hidden = self.embed((self.patch - affine_loc) / affine_scale).flatten(0, 1)  # a row per variate, width
        bias = self.cache.bias()
        for index, layer in enumerate(self.layers):
            if self.is_time_layer[index]:
                query, keys_values, begun = self.project(layer, hidden, position, self.cosines, self.sines)
                query = query.unsqueeze(2)
                keys_values = self.cache.write(self.cache_layer[index], keys_values.unsqueeze(3))
                mask = bias
            else:
                query, keys_values, begun = self.project(layer, hidden, self.last_row, self.cosines, self.sines)
                query = query.unflatten(0, (self.batch, -1)).transpose(1, 2)
                keys_values = keys_values.unflatten(1, (self.batch, -1)).transpose(2, 3)
                mask = self.group_bias
            hidden = self.attend(layer, begun, query, keys_values, mask)
        hidden = hidden.view(self.batch, self.variates, 1, -1)
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
