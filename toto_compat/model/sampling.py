"""Drawing a patch from the predicted distribution with toto-ts's random stream and a fraction of its arithmetic."""

import torch
from torch import Tensor


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
) -> Tensor:
    """A draw of the newest patch from the mixture of Student's t, in the series' own units.

    torch.distributions draws for every component and time step, in the order category, normal, gamma. The same calls
    are made here, so a seed gives the same numbers; only the chosen component of the newest patch is then computed.
    """
    components = df.shape[-1]
    if mixture:
        chosen = torch.multinomial(probs.reshape(-1, components), 1, True).view(*probs.shape[:-1], 1)
    normal = torch.normal(torch.zeros_like(df), torch.ones_like(df))
    gamma = torch._standard_gamma(0.5 * df)
    newest = [value[:, :, -patch_size:] for value in (df, loc, scale, normal, gamma)]
    if mixture:
        newest = [value.gather(-1, chosen[:, :, -patch_size:]) for value in newest]
    degrees, location, spread, normal, gamma = (value.squeeze(-1) for value in newest)
    chi_squared = (gamma / 0.5).clamp_min(torch.finfo(gamma.dtype).tiny)
    value = location + spread * (normal * torch.rsqrt(chi_squared / degrees))
    return affine_loc + affine_scale * value
