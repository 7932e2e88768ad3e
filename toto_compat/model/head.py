"""From a patch's hidden state to the distribution of the next patch: two linear maps in a row, and their product."""

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
from torch import Tensor
from toto.model.backbone import TotoBackbone
from toto.model.distribution import MixtureOfStudentTsOutput, StudentTOutput

SUPPORTED_DISTRIBUTIONS = (StudentTOutput, MixtureOfStudentTsOutput)

Parameters = tuple[Tensor, Tensor, Tensor, Tensor]  # df, loc, scale, probs, each [batch, variates, time, components]

_WATCHED = 64  # elements of each weight


class FusedHead(torch.nn.Module):
    """`unembed` and the distribution's projections, multiplied out.

    `plain` is the definition: unembed, then project. Nothing stands between the two, so that `forward` reads the
    product of their weights instead: 8 times less of it for `base`, on every release.
    """

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
        self._sources = [backbone.unembed, *projections]  # a list: the backbone's own modules, no parts of this one
        # Enough of the weights behind the product to notice that somebody wrote to them, whichever way.
        watched = [source.weight.detach().flatten() for source in self._sources]
        self._watched = [weight[:: max(1, weight.numel() // _WATCHED)] for weight in watched]
        weight, bias = self._multiplied_out()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)  # [patch_size * kinds * components, width]
        self.bias = torch.nn.Parameter(bias, requires_grad=False)  # [patch_size * kinds * components]

    def plain(self, hidden: Tensor) -> Parameters:
        """Predict as toto-ts does; `hidden` is [batch, variates, patches, width]."""
        unembed, *projections = self._sources
        features = unembed(hidden)  # [batch, variates, patches, patch_size * width]
        features = features.unflatten(-1, (self.patch_size, -1)).flatten(2, 3)  # [batch, variates, time, width]
        raw = torch.stack([project(features) for project in projections], dim=-2)
        return self._in_range(raw)  # of [batch, variates, time, kinds, components]

    def forward(self, hidden: Tensor) -> Parameters:
        """Predict with the product; `hidden` is [batch, variates, patches, width]."""
        batch, variates, patches, _ = hidden.shape
        raw = F.linear(hidden, self.weight, self.bias)  # [batch, variates, patches, patch_size * kinds * components]
        raw = raw.view(batch, variates, patches * self.patch_size, self.kinds, self.components)
        return self._in_range(raw)

    def _in_range(self, raw: Tensor) -> Parameters:
        """Bring each kind into its range; `raw` is [batch, variates, time, kinds, components]."""
        eps = torch.finfo(raw.dtype).eps
        df = 2.0 + F.softplus(raw[..., 0, :]).clamp_min(eps)
        loc = raw[..., 1, :]
        scale = F.softplus(raw[..., 2, :]).clamp_min(eps)
        if not self.mixture:
            return df, loc, scale, torch.ones_like(loc)
        probs = F.softmax(raw[..., 3, :], dim=-1)
        return df, loc, scale, probs / probs.sum(-1, keepdim=True)  # torch's Categorical divides once more

    def is_stale(self) -> bool:
        return not torch.equal(torch.cat(self._watched), self._seen)

    def refresh(self) -> None:
        """Multiply out again, into the same memory: graphs that read it need not be compiled again."""
        weight, bias = self._multiplied_out()
        self.weight.copy_(weight)
        self.bias.copy_(bias)

    def _multiplied_out(self) -> tuple[Tensor, Tensor]:
        unembed, *projections = self._sources
        self._seen = torch.cat(self._watched)
        dtype, width = unembed.weight.dtype, unembed.in_features
        # In double precision, so that the product is rounded once and not twice.
        project = torch.cat([p.weight for p in projections]).double()  # [kinds * components, width]
        project_bias = torch.cat([p.bias for p in projections]).double()  # [kinds * components]
        per_step = unembed.weight.view(self.patch_size, width, width)
        rows = [project @ per_step[i].double() for i in range(self.patch_size)]  # each [kinds * components, width]
        bias = unembed.bias.double().view(self.patch_size, width) @ project.T + project_bias
        return torch.cat(rows).to(dtype), bias.reshape(-1).to(dtype)
