"""toto-ts's scaler in a decode step: what it would know after the context, brought forward patch by patch.

toto-ts goes over the whole series again in every step, at a length that grows. Its cumulative sums can be carried
instead: a step then reads one patch, and its shapes are fixed. They are carried in double precision, as toto-ts adds.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from toto.model.scaler import CausalPatchStdMeanScaler, CausalStdMeanScaler, StdMeanScaler

SUPPORTED_SCALERS = (StdMeanScaler, CausalStdMeanScaler, CausalPatchStdMeanScaler)
_BOUNDS = ("lowest", "highest")


def state_after(scaler: Any, inputs: Tensor, padding_mask: Tensor, loc: Tensor, scale: Tensor) -> dict[str, Tensor]:
    """Sum up what toto-ts's scaler knows after its pass over the context: [contexts, variates, 1] each."""
    weights = padding_mask.to(torch.float64)  # [contexts, variates, time]
    values = inputs.to(torch.float64)  # [contexts, variates, time]
    count = weights.sum(-1, keepdim=True)
    mean = (weights * values).sum(-1, keepdim=True) / count.clamp_min(1.0)
    squares = (weights * (values - mean) ** 2).sum(-1, keepdim=True)
    lowest, highest = scale_bounds(scaler, count, squares)
    state = {"count": count, "mean": mean, "squares": squares, "lowest": lowest, "highest": highest}
    return {**state, "loc": loc[..., -1:], "scale": scale[..., -1:]}


def scale_bounds(scaler: Any, count: Tensor, squares: Tensor) -> tuple[Tensor, Tensor]:
    """Give the bounds of a stabilised scale: powers of ten around that of the whole context."""
    whole = torch.sqrt(squares / count.clamp_min(1.0) + scaler.minimum_scale)
    exponent = getattr(scaler, "scale_factor_exponent", 0.0)
    return (whole * 10.0**-exponent).clamp_min(scaler.minimum_scale), whole * 10.0**exponent


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
        self._context_state: dict[str, Tensor] = {}
        self._copies = 1
        shape = (batch, variates, 1)
        for name in ("count", "mean", "squares", "lowest", "highest"):
            self.register_buffer(name, torch.zeros(shape, dtype=torch.float64, device=device), persistent=False)
        for name in ("loc", "scale"):
            self.register_buffer(name, torch.ones(shape, dtype=dtype, device=device), persistent=False)

    def begin(self, state: Mapping[str, Tensor], copies: int) -> None:
        """Take over from a pass over the context, [contexts, variates, 1] each; a context serves `copies` rows."""
        self._context_state = {name: value for name, value in state.items() if self.stabilise or name not in _BOUNDS}
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
