"""One decode step of Toto with fixed shapes: scale the new patch, embed it, attend to the past, predict, advance.

`PlainStep` is the definition and reads from top to bottom. Its arithmetic is toto-ts's own, restated where toto-ts
slices by a growing length or asks the device for a number: the scaler carries its sums forward (`scaler_state`), and
attention runs over the whole buffer under a mask (`FixedSizeKVCache`).

`StaticStep` is the same step, made for the compiler; tests/model/test_plain_step.py says that the two are equal. On a
CPU a kernel costs g++ 1.2 to 1.5 s whatever is in it, so a cold compile is as long as the step has different kernels.
What its tricks buy, on torch 2.13.0, CPU:

- The plain step of `tiny`, compiled as it stands: 11 kernels, 22 s cold, 34 ms for a forecast of ten patches behind
  64. The fast one: 8 kernels, 12 s, 20 ms. Both are the quickest of several runs on the same two cores.
- Keys and values of a layer share a buffer that one kernel writes; one table rotates queries, keys and values of all
  layers, turned or not, in one kernel (`rotation`); the matrix products add what a layer adds to the hidden state
  (`layer`). These three took the fast step itself from 11 kernels to 8, from 14.9 to 10.9 s.
- A layer is two regions, compiled once for all layers: about half the compile time (`layer`).
- The head is one matrix product, not two in a row: `base` reads 8 times less weight for it (`head`).

The pass over the context that comes before the first step is in `context_pass`.
"""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
from torch import Tensor
from toto.model.attention import AttentionAxis
from toto.model.backbone import TotoBackbone

from toto_compat.caches.fixed_size import FixedSizeKVCache
from toto_compat.model.head import FusedHead, Parameters
from toto_compat.model.layer import CALLED, TAKEN_APART, can_be_taken_apart, joint_projection
from toto_compat.model.rotation import decode_tables
from toto_compat.model.sampling import UNIFORMS, draw_directly, precise, without_extremes
from toto_compat.model.scaler_state import ScalerState


class PlainStep(torch.nn.Module):
    """The definition, and every buffer a step reads or writes, at addresses that stay the same for its life.

    In shapes, `rows` are batch times variates: a layer that attends over time takes every variate for itself.
    """

    patch: Tensor
    group_bias: Tensor
    uniforms: Tensor
    sampling: Tensor

    def __init__(
        self,
        backbone: TotoBackbone,
        head: FusedHead,
        *,
        batch: int,
        variates: int,
        capacity: int,
        mixed: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.batch, self.variates, self.capacity, self.mixed = batch, variates, capacity, mixed
        self.embed = backbone.patch_embed.projection
        self.layers = backbone.transformer.layers
        self.rotary = backbone.transformer.rotary_emb
        self.head = head
        over_time = [i for i, layer in enumerate(self.layers) if layer.attention_axis == AttentionAxis.TIME]
        self.cache_layer = {index: number for number, index in enumerate(over_time)}  # the others have no cache
        self.make_buffers(backbone)
        for tensor in (*self.cache.tensors(), *self.buffers()):
            torch._dynamo.mark_static_address(tensor)

    def make_buffers(self, backbone: TotoBackbone) -> None:
        """Make all that lasts from one step to the next: after this, a step only reads and overwrites."""
        dtype, device = backbone.unembed.weight.dtype, backbone.unembed.weight.device
        batch, variates, heads = self.batch, self.variates, self.layers[0].num_heads
        self.cache = self.make_cache(
            layers=len(self.cache_layer),
            rows=batch * variates,
            heads=heads,
            capacity=self.capacity,
            head_dim=backbone.embed_dim // heads,
            dtype=self.mixed or dtype,  # under autocast keys and values come in half precision: no more need be kept
            device=device,
        )
        self.scaler = ScalerState(backbone.scaler, batch, variates, dtype, device)
        patch = torch.zeros(batch, variates, backbone.patch_embed.patch_size, dtype=dtype, device=device)
        self.register_buffer("patch", patch, persistent=False)  # the newest one: what a step consumes and leaves
        group_bias = torch.zeros(batch, 1, variates, variates, dtype=dtype, device=device)
        self.register_buffer("group_bias", group_bias, persistent=False)  # 0 within a group, minus infinity across
        uniforms = torch.zeros(UNIFORMS, *patch.shape, dtype=torch.float64, device=device)
        self.register_buffer("uniforms", uniforms, persistent=False)  # what a draw of the next patch is made of
        sampling = torch.zeros((), dtype=torch.bool, device=device)
        self.register_buffer("sampling", sampling, persistent=False)  # whether that draw is fed back, or the mean

    def make_cache(self, **shape: Any) -> FixedSizeKVCache:
        return FixedSizeKVCache(**shape)

    def refresh(self) -> None:
        """Compute again what was computed from weights, into the same memory: here, nothing."""

    def advance(self) -> Tensor:
        """Tell where the new patch stands: for its rotation and its slot."""
        return self.cache.advance()

    def forward(self) -> tuple[Tensor, ...]:
        """Consume `patch`; predict the next one, leave its mean in `patch` and return the distribution."""
        position = self.advance()  # [1]
        affine_loc, affine_scale = self.scaler(self.patch)  # each [batch, variates, 1 or patch_size]
        hidden = self.embed((self.patch - affine_loc) / affine_scale)  # [batch, variates, width]
        for index, layer in enumerate(self.layers):
            joint = joint_projection(layer, hidden)  # [batch, variates, 3, heads, head_dim]
            query, key, value = joint.unbind(2)  # each [batch, variates, heads, head_dim]
            if index in self.cache_layer:
                # over time: [rows, heads, 1, head_dim] each
                query, key, value = (x.flatten(0, 1).unsqueeze(2) for x in (query, key, value))
                query, key = self.rotary.rotate_queries_and_keys(query, key, seq_pos=position.to(query.dtype))
                # keys and values of all slots: [rows, heads, capacity, head_dim] each
                keys, values = self.cache.write(self.cache_layer[index], torch.stack((key, value)))
                bias = self.cache.bias()  # [1, 1, 1, capacity]
            else:
                # over variates: [batch, heads, variates, head_dim] each
                query, keys, values = (x.transpose(1, 2) for x in (query, key, value))
                bias = self.group_bias  # [batch, 1, variates, variates]
            attended = F.scaled_dot_product_attention(query, keys, values, attn_mask=bias)
            attended = attended.transpose(1, 2).reshape(hidden.shape)  # [batch, variates, width]
            hidden = hidden + layer.attention.wO(attended)
            hidden = hidden + layer.mlp(layer.norm2(hidden))
        df, loc, scale, probs = self.predict(hidden.unsqueeze(2))  # each [batch, variates, patch_size, components]
        self.feed_back(df, loc, scale, probs, affine_loc, affine_scale)
        return df, loc, scale, probs, affine_loc, affine_scale

    def predict(self, hidden: Tensor) -> Parameters:
        return self.head.plain(hidden)

    def feed_back(self, df: Tensor, loc: Tensor, scale: Tensor, probs: Tensor, *affine: Tensor) -> None:
        """Leave in `patch` what the next step consumes: the mean, or a draw made of `uniforms` where samples are drawn.

        One graph does both, so that it is the same one for means and samples.
        """
        affine_loc, affine_scale = affine
        mean = (probs * loc).sum(-1)  # [batch, variates, patch_size]
        df, loc, scale, probs = (value.to(precise(self.patch.dtype)) for value in (df, loc, scale, probs))
        drawn = draw_directly(df, loc, scale, probs.cumsum(-1), self.uniforms)
        value = torch.where(self.sampling, drawn.to(self.patch.dtype), mean.to(self.patch.dtype))
        self.patch.copy_(without_extremes(value * affine_scale + affine_loc))


class StaticStep(PlainStep):
    """The same step with fewer kernels: rotated by tables, a layer in two regions, the head in one product."""

    cosines: Tensor
    sines: Tensor
    last_row: Tensor

    def __init__(self, backbone: TotoBackbone, head: FusedHead, **shape: Any) -> None:
        super().__init__(backbone, head, **shape)
        # addmm would take the hidden state itself down to autocast's precision
        self.way = TAKEN_APART if self.mixed is None and all(map(can_be_taken_apart, self.layers)) else CALLED
        self.project, self.attend, self.alone = self.way.project, self.way.attend, self.way.alone

    def make_buffers(self, backbone: TotoBackbone) -> None:
        """Make the tables, too: [capacity + 1, 3, head_dim], the last row for layers that attend over variates."""
        super().make_buffers(backbone)
        cosines, sines = decode_tables(self.rotary, self.capacity, self.patch.dtype, self.patch.device)
        self.register_buffer("cosines", cosines, persistent=False)
        self.register_buffer("sines", sines, persistent=False)
        self.register_buffer("last_row", torch.tensor([self.capacity], device=self.patch.device), persistent=False)

    def refresh(self) -> None:
        """Compute again what was computed from weights, into the same memory."""
        cosines, sines = decode_tables(self.rotary, self.capacity, self.patch.dtype, self.patch.device)
        self.cosines.copy_(cosines)
        self.sines.copy_(sines)

    def forward(self) -> tuple[Tensor, ...]:
        """Consume `patch`; predict the next one, leave its mean in `patch` and return the distribution."""
        position = self.advance()  # [1]
        affine_loc, affine_scale = self.scaler(self.patch)  # each [batch, variates, 1 or patch_size]
        hidden = self.embed((self.patch - affine_loc) / affine_scale).flatten(0, 1)  # [rows, width]
        bias = self.cache.bias()  # [1, 1, 1, capacity]
        for index, layer in enumerate(self.layers):
            # query [rows, heads, head_dim], keys_values [2, rows, heads, head_dim], begun [rows, width]
            if index in self.cache_layer:
                query, keys_values, begun = self.project(layer, hidden, position, self.cosines, self.sines)
                query = query.unsqueeze(2)  # [rows, heads, 1, head_dim]
                keys_values = self.cache.write(self.cache_layer[index], keys_values.unsqueeze(3))
                # keys_values now [2, rows, heads, capacity, head_dim]
                hidden = self.attend(layer, begun, query, keys_values, bias)  # [rows, width]
            elif self.variates == 1:
                hidden = self.alone(layer, hidden, self.last_row, self.cosines, self.sines)
            else:
                query, keys_values, begun = self.project(layer, hidden, self.last_row, self.cosines, self.sines)
                query = query.unflatten(0, (self.batch, -1)).transpose(1, 2)  # [batch, heads, variates, head_dim]
                keys_values = keys_values.unflatten(1, (self.batch, -1)).transpose(2, 3)
                # keys_values now [2, batch, heads, variates, head_dim]
                hidden = self.attend(layer, begun, query, keys_values, self.group_bias)
        hidden = hidden.view(self.batch, self.variates, 1, -1)
        df, loc, scale, probs = self.predict(hidden)  # each [batch, variates, patch_size, components]
        self.feed_back(df, loc, scale, probs, affine_loc, affine_scale)
        return df, loc, scale, probs, affine_loc, affine_scale

    def predict(self, hidden: Tensor) -> Parameters:
        return self.head(hidden)
