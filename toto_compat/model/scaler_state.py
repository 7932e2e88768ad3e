"""toto-ts's scaler in a decode step: what it would know after the context, brought forward patch by patch.

toto-ts goes over the whole series again in every step, at a length that grows. Its cumulative sums can be carried
instead: a step then reads one patch, and its shapes are fixed. They are carried in double precision, as toto-ts adds.
"""

from typing import Any

import torch
from torch import Tensor
from toto.model.scaler import CausalPatchStdMeanScaler, CausalStdMeanScaler, StdMeanScaler

SUPPORTED_SCALERS = (StdMeanScaler, CausalStdMeanScaler, CausalPatchStdMeanScaler)


class ScalerState(torch.nn.Module):
    """Count, mean and sum of squared deviations of all that was seen: buffers, each [batch, variates, 1]."""

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
        weights = padding_mask.to(torch.float64)  # [contexts, variates, time]
        values = inputs.to(torch.float64)  # [contexts, variates, time]
        count = weights.sum(-1, keepdim=True)  # [contexts, variates, 1], as all that follow
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
        """Go back to what was known after the context."""
        for name, value in self._context_state.items():
            rows = self._copies * value.shape[0]
            getattr(self, name)[:rows].unflatten(0, (self._copies, value.shape[0])).copy_(value)

    def forward(self, patch: Tensor) -> tuple[Tensor, Tensor]:
        """Include the new patch, [batch, variates, patch_size]; give its location and scale.

        Each is [batch, variates, 1], or [batch, variates, patch_size] where toto-ts scales step by step.
        """
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
