"""Draws from the predicted mixture of Student's t: directly, or with toto-ts's own random stream.

torch.distributions draws a value of every component and of every context patch, and keeps one of each 24 of the newest
patch. `draw_patch` makes the same calls in the same order, so that a seed gives toto-ts's own samples. `draw_directly`
draws what is asked for, the component first and then one Student's t of it: the same distribution from three uniform
numbers a point. Those are drawn outside of any graph, into a buffer that stays where it is: a graph reads them from
there, on every release and device, and a seed gives the same samples compiled and eager.
"""

import math

import torch
from torch import Tensor

from toto_compat.model.head import Parameters

DIRECT, TOTO_TS = "direct", "toto-ts"
UNIFORMS = 3  # that a direct draw is made of: for the component, the radius and the angle


def draw_directly(df: Tensor, loc: Tensor, scale: Tensor, cumulative: Tensor, uniforms: Tensor) -> Tensor:
    """Draw a value of the mixture for every point; parameters [..., components], uniforms [3, ...].

    `cumulative` is the running sum of the components' weights. The sums end near 1, not at it: what is left belongs to
    the last component.
    """
    component = (uniforms[0].unsqueeze(-1) >= cumulative).sum(-1, keepdim=True).clamp_max(df.shape[-1] - 1)
    df, loc, scale = (value.gather(-1, component).squeeze(-1) for value in (df, loc, scale))
    return loc + scale * student_t(df, uniforms[1], uniforms[2])


def student_t(df: Tensor, radius: Tensor, angle: Tensor) -> Tensor:
    """Turn two uniform numbers in [0, 1) into one of Student's t: exact for every number of degrees of freedom.

    Box and Muller's method with the radius of the bivariate t instead of the normal's (Bailey 1994). The uniforms are
    double precision: their grid is what ends the tails, at 1e-16 instead of 6e-8.
    """
    exponent = (-2.0 * torch.log1p(-radius)).to(df.dtype) / df
    return (df * torch.expm1(exponent)).sqrt() * torch.cos(2.0 * math.pi * angle).to(df.dtype)


def precise(dtype: torch.dtype) -> torch.dtype:
    """Give the precision to draw in: half of one is too little for a tail."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def without_extremes(values: Tensor) -> Tensor:
    """Guard what is fed back as toto-ts does: infinite, NaN or absurdly large becomes 0."""
    extreme = values.isinf() | values.isnan() | (values.abs() >= torch.finfo(values.dtype).max / 2)
    return torch.where(extreme, torch.zeros_like(values), values)


class PatchDraws(torch.nn.Module):
    """Draws many values of one series' next patch, a fixed number at a time, whatever the samples and the horizon.

    A run draws `size` values: as many samples as fit of the points that are asked for. So one graph serves every number
    of samples and every horizon.
    """

    df: Tensor
    loc: Tensor
    scale: Tensor
    cumulative: Tensor
    affine_loc: Tensor
    affine_scale: Tensor
    row: Tensor
    uniforms: Tensor

    def __init__(
        self, variates: int, patch_size: int, components: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.variates, self.patch_size, self.dtype = variates, patch_size, dtype
        rows = variates * patch_size
        self.size = max(4096, rows)
        of = {"dtype": precise(dtype), "device": device}
        for name in ("df", "loc", "scale", "cumulative"):
            self.register_buffer(name, torch.ones(rows, components, **of), persistent=False)
        for name in ("affine_loc", "affine_scale"):
            self.register_buffer(name, torch.ones(rows, **of), persistent=False)
        self.register_buffer("row", torch.zeros(self.size, dtype=torch.int64, device=device), persistent=False)
        uniforms = torch.zeros(UNIFORMS, self.size, dtype=torch.float64, device=device)
        self.register_buffer("uniforms", uniforms, persistent=False)
        self._points = 0
        for buffer in self.buffers():
            torch._dynamo.mark_static_address(buffer)

    def begin(self, parameters: Parameters, affine_loc: Tensor, affine_scale: Tensor, points: int) -> int:
        """Take over one series' distribution, each [variates, patch_size, components]; gives the samples of a run."""
        df, loc, scale, probs = parameters
        for buffer, value in ((self.df, df), (self.loc, loc), (self.scale, scale)):
            buffer.copy_(value.flatten(0, 1))
        torch.cumsum(probs.flatten(0, 1).to(self.cumulative.dtype), dim=-1, out=self.cumulative)
        for buffer, value in ((self.affine_loc, affine_loc), (self.affine_scale, affine_scale)):
            buffer.copy_(value.expand(self.variates, self.patch_size).flatten())
        samples = self.size // (self.variates * points)
        if points != self._points:  # which row of the table each of the values is of, the samples of a point together
            asked = torch.arange(self.variates * self.patch_size, device=self.row.device)
            asked = asked.view(self.variates, self.patch_size)[:, :points].flatten()
            self.row.zero_()
            self.row[: asked.numel() * samples].copy_(asked.repeat_interleave(samples))
            self._points = points
        return samples

    def refresh(self) -> None:
        """Compute again what was computed from weights: here, nothing."""

    def forward(self) -> Tensor:
        """Draw from what stands in the buffers: [size]."""
        df, loc, scale, cumulative, affine_loc, affine_scale = (
            table.index_select(0, self.row)
            for table in (self.df, self.loc, self.scale, self.cumulative, self.affine_loc, self.affine_scale)
        )
        drawn = draw_directly(df, loc, scale, cumulative, self.uniforms)
        return without_extremes((affine_loc + affine_scale * drawn).to(self.dtype))


def draw_patch(  # noqa: PLR0917 - the step's outputs, in their order
    df: Tensor,
    loc: Tensor,
    scale: Tensor,
    probs: Tensor,
    affine_loc: Tensor,
    affine_scale: Tensor,
    *,
    patch_size: int,
    mixture: bool,
    copies: int = 1,
) -> Tensor:
    """Draw the newest patch with toto-ts's random stream, in the series' own units, `copies` times for every row.

    torch.distributions draws for every component and time step, in the order category, normal, gamma. The same draws
    are made here, so a seed gives the same numbers; only the chosen component of the newest patch is then computed.
    """
    components = df.shape[-1]
    every_df, every_probs = _repeated(df, copies), _repeated(probs, copies)
    if mixture:
        chosen = torch.multinomial(every_probs.reshape(-1, components), 1, True).view(*every_probs.shape[:-1], 1)
    normal = torch.empty_like(every_df).normal_()
    gamma = torch._standard_gamma(0.5 * every_df)
    location, spread = (_repeated(value[:, :, -patch_size:], copies) for value in (loc, scale))
    newest = [every_df[:, :, -patch_size:], location, spread, normal[:, :, -patch_size:], gamma[:, :, -patch_size:]]
    if mixture:
        newest = [value.gather(-1, chosen[:, :, -patch_size:]) for value in newest]
    degrees, location, spread, normal, gamma = (value.squeeze(-1) for value in newest)
    chi_squared = (gamma / 0.5).clamp_min(torch.finfo(gamma.dtype).tiny)
    value = location + spread * (normal * torch.rsqrt(chi_squared / degrees))
    return _repeated(affine_loc, copies) + _repeated(affine_scale, copies) * value


def _repeated(values: Tensor, copies: int) -> Tensor:
    return values if copies == 1 else values.repeat(copies, *[1] * (values.dim() - 1))
