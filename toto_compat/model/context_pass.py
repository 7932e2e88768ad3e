"""The one pass over a context: scale its patches, embed them, attend, predict the patch behind it.

`PlainPass` is the definition: toto-ts's own scaler and embedding, and the layers one after the other, at the context's
own length. `StaticPass` is the same pass with fixed shapes, for the compiler; tests/model/test_context_pass.py says
that the two are equal.

A static pass has room for a number of patches. Contexts that are shorter are padded behind their end, where causal
attention never looks, so 5, 6 and 8 patches share one graph and stay exact; what does depend on the length (xPos's
scales, the mask, which patch is the newest) lies in small buffers that are filled when the length changes. Several
series stand behind each other in the same room and do not see each other: a batch of short contexts is one pass, too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
from torch import Tensor
from toto.model.backbone import TotoBackbone
from toto.model.scaler import CausalPatchStdMeanScaler

from toto_compat.model.head import FusedHead, Parameters
from toto_compat.model.layer import CALLED, TAKEN_APART, can_be_taken_apart, joint_projection
from toto_compat.model.rotation import context_tables
from toto_compat.model.scaler_state import scale_bounds, state_after


@dataclass(frozen=True)
class Context:
    """Holds what a forecast starts from, in toto-ts's terms. `future` holds known values of the last variates."""

    inputs: Tensor
    padding_mask: Tensor
    id_mask: Tensor
    future: Tensor | None = None

    def part(self, series: slice) -> "Context":
        """Give some of the series."""
        future = None if self.future is None else self.future[series]
        return Context(self.inputs[series], self.padding_mask[series], self.id_mask[series], future)


@dataclass(frozen=True)
class Prefilled:
    """Holds what a pass leaves behind: the next patch's distribution, and what decode steps go on from.

    Parameters are [series, variates, time, components], of the newest patch or of all; affine ones [series, variates,
    1 or patch_size]; keys and values one tensor per layer over time, [2, series * variates, heads, patches, head_dim].
    """

    parameters: Parameters
    affine_loc: Tensor
    affine_scale: Tensor
    scaler_state: Mapping[str, Tensor]
    keys_values: Sequence[Tensor]
    groups: Tensor  # of each variate in the newest patch: [series, variates]
    fit: Tensor  # whether every patch is of one group alone, as toto-ts asks: one truth value, on the device

    @staticmethod
    def joined(parts: Sequence["Prefilled"]) -> "Prefilled":
        """Put passes over some of the series each together."""
        if len(parts) == 1:
            return parts[0]
        first, layers = parts[0], range(len(parts[0].keys_values))
        parameters = tuple(torch.cat(values) for values in zip(*(part.parameters for part in parts), strict=True))
        return Prefilled(
            parameters=parameters,
            affine_loc=torch.cat([part.affine_loc for part in parts]),
            affine_scale=torch.cat([part.affine_scale for part in parts]),
            scaler_state={name: torch.cat([part.scaler_state[name] for part in parts]) for name in first.scaler_state},
            keys_values=[torch.cat([part.keys_values[layer] for part in parts], dim=1) for layer in layers],
            groups=torch.cat([part.groups for part in parts]),
            fit=torch.stack([part.fit for part in parts]).all(),
        )


def _of_every_step(id_mask: Tensor, steps: int) -> Tensor:
    """Lengthen an id mask that is too short at its front, with what stands there, as toto-ts does."""
    missing = steps - id_mask.shape[-1]
    return id_mask if missing == 0 else torch.cat([id_mask[..., :1].expand(-1, -1, missing), id_mask], dim=-1)


def group_bias(groups: Tensor, dtype: torch.dtype) -> Tensor:
    """Add this to scores between variates: 0 within a group, minus infinity across. [..., variates] -> [..., v, v]"""
    apart = groups.unsqueeze(-1) != groups.unsqueeze(-2)
    return torch.zeros_like(apart, dtype=dtype).masked_fill(apart, -torch.inf)


class PlainPass:
    """The definition, in toto-ts's own words as far as they go."""

    def __init__(self, backbone: TotoBackbone, head: FusedHead) -> None:
        self.backbone, self.head = backbone, head

    def run(self, context: Context, *, whole: bool) -> Prefilled:
        """Pass over every series at once; predict behind the newest patch, or behind each as a `whole`."""
        backbone, inputs = self.backbone, context.inputs
        size: int = backbone.patch_embed.stride
        scaled, loc, scale = backbone.scaler(
            inputs,
            weights=torch.ones_like(inputs),
            padding_mask=context.padding_mask,
            prefix_length=inputs.shape[-1],
        )
        hidden, ids = backbone.patch_embed(
            scaled, context.id_mask
        )  # [series, variates, patches, width] and [.., patches]
        series, variates, patches, _ = hidden.shape
        transformer = backbone.transformer
        group_mask = transformer._get_mask(
            num_heads=transformer.layers[0].num_heads, dtype=inputs.dtype, id_mask=ids
        )  # [series * patches, heads, variates, variates]
        positions = torch.arange(patches, device=inputs.device, dtype=inputs.dtype)
        keys_values = []
        for layer in transformer.layers:
            joint = joint_projection(layer, hidden)  # [series, variates, patches, 3, heads, head_dim]
            query, key, value = joint.unbind(3)  # each [series, variates, patches, heads, head_dim]
            if layer.attention.attention_axis.name == "TIME":
                # over time: [series * variates, heads, patches, head_dim] each
                query, key, value = (x.flatten(0, 1).transpose(1, 2) for x in (query, key, value))
                query, key = transformer.rotary_emb.rotate_queries_and_keys(query, key, seq_pos=positions)
                keys_values.append(torch.stack((key, value)))
                attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
                attended = attended.transpose(1, 2).unflatten(0, (series, variates))
            else:
                # over variates: [series * patches, heads, variates, head_dim] each
                query, key, value = (x.transpose(1, 2).flatten(0, 1).transpose(1, 2) for x in (query, key, value))
                attended = F.scaled_dot_product_attention(query, key, value, attn_mask=group_mask)
                attended = attended.transpose(1, 2).unflatten(0, (series, patches)).transpose(1, 2)
            hidden = hidden + layer.attention.wO(attended.flatten(-2))
            hidden = hidden + layer.mlp(layer.norm2(hidden))
        last = slice(-size, None) if loc.shape[-1] > 1 else slice(None)
        return Prefilled(
            parameters=self.head.plain(hidden if whole else hidden[:, :, -1:]),
            affine_loc=loc[..., last],
            affine_scale=scale[..., last],
            scaler_state=state_after(backbone.scaler, inputs, context.padding_mask, loc, scale),
            keys_values=keys_values,
            groups=ids[..., -1],
            fit=torch.ones((), dtype=torch.bool, device=inputs.device),  # patch_embed has asserted it
        )


@dataclass(frozen=True)
class _Layout:
    """Holds what depends on a context's length in patches alone."""

    cosines: Tensor
    sines: Tensor
    row: Tensor  # of the tables, for every variate's patches
    bias: Tensor  # [1, 1, patches, patches]: 0 where a patch may look
    seen: Tensor  # the same as 1 and 0, for sums
    end: Tensor  # the newest patch of the series that a patch is of
    newest: Tensor  # the newest patch of each series


class StaticPass(torch.nn.Module):
    """The pass over buffers that stay where they are, with room for `patches` patches of up to `series` series.

    Rows of a layer are variates times patches, a variate's patches behind each other: to attention over time a variate
    is what a row of its own is in a decode step, and the layer's two regions are those of the step.
    """

    patches: Tensor
    present: Tensor
    ids: Tensor

    def __init__(
        self,
        backbone: TotoBackbone,
        head: FusedHead,
        *,
        room: int,
        variates: int,
        series: int,
        whole: bool,
        mixed: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.room, self.variates, self.series, self.whole, self.mixed = room, variates, series, whole, mixed
        self.size: int = backbone.patch_embed.stride
        self.embed = backbone.patch_embed.projection
        self.layers = backbone.transformer.layers
        self.rotary = backbone.transformer.rotary_emb
        self.head = head
        self.scaler = backbone.scaler
        self.scales_inside = type(backbone.scaler) is CausalPatchStdMeanScaler  # else toto-ts's own, outside
        taken_apart = mixed is None and all(map(can_be_taken_apart, self.layers))
        self.way = TAKEN_APART if taken_apart else CALLED
        self.project, self.attend, self.alone = self.way.project, self.way.attend, self.way.alone
        self.over_time = [layer.attention.attention_axis.name == "TIME" for layer in self.layers]
        self._layouts: dict[int, _Layout] = {}
        self._length = 0
        self._make_buffers(backbone.unembed.weight.dtype, backbone.unembed.weight.device)

    def _make_buffers(self, dtype: torch.dtype, device: torch.device) -> None:
        shape = (self.variates, self.room, self.size)
        self.register_buffer("patches", torch.zeros(shape, dtype=dtype, device=device), persistent=False)
        self.register_buffer("present", torch.zeros(shape, dtype=torch.bool, device=device), persistent=False)
        self.register_buffer("ids", torch.zeros(shape, dtype=torch.int64, device=device), persistent=False)
        for name, value in vars(self._layout(self.room)).items():
            self.register_buffer(name, value.clone(), persistent=False)
        self.register_buffer("not_turned", torch.full_like(self.row, self.room), persistent=False)
        for buffer in self.buffers():
            torch._dynamo.mark_static_address(buffer)

    def _layout(self, length: int) -> _Layout:
        """Make what a context of `length` patches needs; every series takes that many."""
        if length not in self._layouts:
            room, device = self.room, self.patches.device
            cosines, sines = (
                torch.cat([table[:-1], table[-1:].expand(room + 1 - length, -1, -1)])  # the last row turns nothing
                for table in context_tables(self.rotary, length, self.patches.dtype, device)
            )
            place = torch.arange(room, device=device)
            series = place // length
            seen = (series[:, None] == series) & (place[:, None] >= place)
            ends = torch.arange(1, self.series + 1, device=device) * length - 1
            self._layouts[length] = _Layout(
                cosines=cosines,
                sines=sines,
                row=(place % length).repeat(self.variates),
                bias=torch.zeros(1, 1, room, room, dtype=self.patches.dtype, device=device).masked_fill(
                    ~seen, -torch.inf
                ),
                seen=seen.to(torch.float64),
                end=((series + 1) * length - 1).clamp_max(room - 1),
                newest=ends.clamp_max(room - 1),
            )
        return self._layouts[length]

    def fits(self, length: int) -> int:
        """Tell how many series of this length one pass takes."""
        return min(self.series, self.room // length)

    def refresh(self) -> None:
        """Compute again what was computed from weights."""
        self._layouts.clear()
        self._length = 0

    def put(self, context: Context) -> None:
        """Lay series of one length into the buffers; what is left of the room is empty."""
        series, variates, steps = context.inputs.shape
        length = steps // self.size
        if length != self._length:
            for name, value in vars(self._layout(length)).items():
                getattr(self, name).copy_(value)
            self._length = length
        inputs, used = context.inputs, series * length
        if not self.scales_inside:
            inputs, self._loc, self._scale = self.scaler(
                inputs, weights=torch.ones_like(inputs), padding_mask=context.padding_mask, prefix_length=steps
            )
        given = (
            (self.patches, inputs),
            (self.present, context.padding_mask),
            (self.ids, _of_every_step(context.id_mask, steps).expand(series, variates, steps)),
        )
        for buffer, value in given:
            by_patch = value.unflatten(-1, (length, self.size)).transpose(0, 1)  # [variates, series, length, size]
            buffer[:, :used].unflatten(1, (series, length)).copy_(by_patch)
            buffer[:, used:].zero_()

    def forward(self) -> tuple[Tensor, ...]:
        """Give the distribution behind each newest patch (or behind all), the scaler's state, keys and values."""
        scaled, loc, scale, state = self._scaled() if self.scales_inside else (self.patches, None, None, [])
        hidden = self.embed(scaled).flatten(0, 1)  # [variates * room, width]
        groups = self.ids[..., 0]  # [variates, room]
        keys_values_of_layers = []
        for layer, over_time in zip(self.layers, self.over_time, strict=True):
            if over_time:
                query, keys_values, begun = self.project(layer, hidden, self.row, self.cosines, self.sines)
                # query [variates, heads, room, head_dim], keys_values [2, variates, heads, room, head_dim]
                query = query.unflatten(0, (self.variates, -1)).transpose(1, 2)
                keys_values = keys_values.unflatten(1, (self.variates, -1)).transpose(2, 3)
                keys_values_of_layers.append(keys_values)
                hidden = self.attend(layer, begun, query, keys_values, self.bias)
            elif self.variates == 1:
                hidden = self.alone(layer, hidden, self.not_turned, self.cosines, self.sines)
            else:
                hidden = self._turned_round(hidden, self.variates)  # [room * variates, width]
                query, keys_values, begun = self.project(layer, hidden, self.not_turned, self.cosines, self.sines)
                # query [room, heads, variates, head_dim], keys_values [2, room, heads, variates, head_dim]
                query = query.unflatten(0, (self.room, -1)).transpose(1, 2)
                keys_values = keys_values.unflatten(1, (self.room, -1)).transpose(2, 3)
                apart = group_bias(groups.t(), self.patches.dtype).unsqueeze(1)  # [room, 1, variates, variates]
                hidden = self._turned_round(self.attend(layer, begun, query, keys_values, apart), self.room)
        hidden = hidden.view(self.variates, self.room, -1)
        if not self.whole:
            hidden = hidden.index_select(1, self.newest)  # [variates, series, width]
        parameters = self.head(hidden.unsqueeze(0))  # each [1, variates, patches * size, components]
        newest_of_groups = groups.index_select(1, self.newest).t()  # [series, variates]
        fit = (self.ids == self.ids[..., :1]).all()
        if loc is not None and scale is not None:
            of_series = [value.index_select(1, self.newest).t().unsqueeze(-1) for value in (loc, scale, *state)]
        else:
            of_series = []
        return (*parameters, newest_of_groups, fit, *of_series, *keys_values_of_layers)

    @staticmethod
    def _turned_round(hidden: Tensor, outer: int) -> Tensor:
        """Change the order of rows from [outer, inner] to [inner, outer]."""
        return hidden.unflatten(0, (outer, -1)).transpose(0, 1).flatten(0, 1)

    def _scaled(self) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Scale as toto-ts's causal scaler: by all that was seen up to the end of a patch, added up patch by patch.

        Gives location and scale of every patch, [variates, room], and count, mean, squared deviations and bounds.
        """
        weights = self.present.to(torch.float64)  # [variates, room, size]
        values = self.patches.to(torch.float64)
        own_count = weights.sum(-1)  # [variates, room], as all that follow
        own_mean = (weights * values).sum(-1) / own_count.clamp_min(1.0)
        own_squares = (weights * (values - own_mean.unsqueeze(-1)) ** 2).sum(-1)
        count = (self.seen * own_count.unsqueeze(1)).sum(-1)
        mean = (self.seen * (own_count * own_mean).unsqueeze(1)).sum(-1) / count.clamp_min(1.0)
        shift = own_mean.unsqueeze(1) - mean.unsqueeze(-1)  # [variates, room, room]
        squares = (self.seen * (own_squares.unsqueeze(1) + own_count.unsqueeze(1) * shift**2)).sum(-1)
        degrees = (count - 1.0).clamp_min(1.0) if self.scaler.use_bessel_correction else count.clamp_min(1.0)
        scale = torch.sqrt(squares / degrees + self.scaler.minimum_scale)
        lowest, highest = scale_bounds(self.scaler, *(x.index_select(1, self.end) for x in (count, squares)))
        if self.scaler.stabilize_with_global:
            scale = torch.minimum(torch.maximum(scale, lowest), highest)
        loc, scale = mean.to(self.patches.dtype), scale.to(self.patches.dtype)
        scaled = (self.patches - loc.unsqueeze(-1)) / scale.unsqueeze(-1)
        return scaled, loc, scale, [count, mean, squares, lowest, highest]

    def result(self, outputs: Sequence[Tensor], context: Context, *, keep_keys: bool) -> Prefilled:
        """Bring a run's outputs into the form of the definition, in memory that no later run writes to.

        A CUDA graph's are overwritten when the next one runs, and draws or a new bucket may run before the keys and
        values are laid into a decode step's buffers. Where no step comes, they are left out.
        """
        series = len(context.inputs)
        length, time_layers = self._length, sum(self.over_time)
        *parameters, groups, fit = (value.clone() for value in outputs[:6])
        # [1, variates, patches * size, components] -> [series, variates, time, components]
        of_series = length if self.whole else 1
        parameters = [
            value.squeeze(0)[:, : series * of_series * self.size].unflatten(1, (series, -1)).transpose(0, 1)
            for value in parameters
        ]
        if self.scales_inside:
            loc, scale, count, mean, squares, lowest, highest = (value[:series].clone() for value in outputs[6:13])
            state = {"count": count, "mean": mean, "squares": squares, "lowest": lowest, "highest": highest}
            state |= {"loc": loc, "scale": scale}
        else:
            state = state_after(self.scaler, context.inputs, context.padding_mask, self._loc, self._scale)
            last = slice(-self.size, None) if self._loc.shape[-1] > 1 else slice(None)
            loc, scale = self._loc[..., last], self._scale[..., last]
        of_layers = [
            value[..., : series * length, :].unflatten(3, (series, length)).permute(0, 3, 1, 2, 4, 5)
            for value in outputs[len(outputs) - time_layers :]
            if keep_keys
        ]
        keys_values = [value.clone(memory_format=torch.contiguous_format).flatten(1, 2) for value in of_layers]
        return Prefilled(
            parameters=tuple(parameters),
            affine_loc=loc,
            affine_scale=scale,
            scaler_state=state,
            keys_values=keys_values,
            groups=groups[:series],
            fit=fit,
        )
