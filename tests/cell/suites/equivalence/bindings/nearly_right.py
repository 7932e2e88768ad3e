"""Bindings whose samples are a few hundredths off: each draw by itself looks right."""

import torch
from torch import Tensor
from torch.distributions import Categorical, StudentT

from tests.cell.suites.equivalence.bindings.honest import Honest
from tests.cell.suites.equivalence.bindings.samples import SpoilsSamples
from toto_compat.model.series import Series

Parameters = dict[str, Tensor]


class DrawsTwoPercentTooClose(SpoilsSamples):
    """Draws at 0.98 of the spread, around the right centre."""

    def spoilt(self, samples: Tensor) -> Tensor:
        centre = samples.mean(dim=-1, keepdim=True)
        return centre + 0.98 * (samples - centre)


class DrawsByParameters(Honest):
    """Draws patch by patch from eager's distributions, whose parameters `changed` may touch; right as it stands."""

    draws = "own"

    def changed(self, parameters: Parameters, patch: int) -> Parameters:  # noqa: ARG002 - for those below
        return parameters

    def generate_samples(
        self, series: Series, horizon_steps: int, *, num_samples: int, samples_per_batch: int
    ) -> Tensor:
        rounds = num_samples // samples_per_batch
        return torch.cat([self._round(series, horizon_steps, samples_per_batch) for _ in range(rounds)], dim=-1)

    def _round(self, series: Series, horizon_steps: int, count: int) -> Tensor:
        repeated = Series(
            **{name: value.repeat(count, *[1] * (value.dim() - 1)) for name, value in vars(series).items()}
        )
        rows, variates, _ = repeated.inputs.shape
        drawn = repeated.inputs.new_zeros(rows, variates, 0)
        patch = 0
        while drawn.shape[-1] < horizon_steps:
            nothing = drawn.new_zeros(rows, variates, self.patch_size)
            right = self.eager.predictive(repeated, torch.cat([drawn, nothing], dim=-1))[-1]
            parameters = self.changed(dict(right), patch)
            of_each = StudentT(parameters["df"], parameters["loc"], parameters["scale"]).sample()
            which = Categorical(parameters["probs"]).sample().unsqueeze(-1)
            points = of_each.gather(-1, which).squeeze(-1) * parameters["affine_scale"] + parameters["affine_loc"]
            drawn, patch = torch.cat([drawn, points], dim=-1), patch + 1
        return drawn[..., :horizon_steps].unflatten(0, (count, -1)).permute(1, 2, 3, 0)


class ScalesALittleTooSmall(DrawsByParameters):
    """In decode steps alone."""

    def changed(self, parameters: Parameters, patch: int) -> Parameters:
        return {**parameters, "scale": parameters["scale"] * (0.96 if patch else 1.0)}


class ShiftsALittle(DrawsByParameters):
    def changed(self, parameters: Parameters, patch: int) -> Parameters:  # noqa: ARG002
        return {**parameters, "loc": parameters["loc"] + 0.03 * parameters["scale"]}


class ShiftsToAndFro(DrawsByParameters):
    """Every other point a little up, the rest down: level on the whole."""

    def changed(self, parameters: Parameters, patch: int) -> Parameters:  # noqa: ARG002
        points = parameters["loc"].shape[2]
        sign = 1.0 - 2.0 * torch.arange(points).remainder(2).view(1, 1, -1, 1)
        return {**parameters, "loc": parameters["loc"] + 0.06 * sign * parameters["scale"]}


class TailsALittleTooLight(DrawsByParameters):
    def changed(self, parameters: Parameters, patch: int) -> Parameters:  # noqa: ARG002
        return {**parameters, "df": 1.25 * parameters["df"]}


class FavoursTheLikeliest(DrawsByParameters):
    """Component weights as of a temperature a little below 1."""

    def changed(self, parameters: Parameters, patch: int) -> Parameters:  # noqa: ARG002
        favoured = parameters["probs"] ** 1.5
        return {**parameters, "probs": favoured / favoured.sum(-1, keepdim=True)}


class OneRowOfABatchTooClose(DrawsByParameters):
    """The last row of every sampled batch: a sixteenth of all draws."""

    def changed(self, parameters: Parameters, patch: int) -> Parameters:  # noqa: ARG002
        scale = parameters["scale"].clone()
        scale[-1] *= 0.85
        return {**parameters, "scale": scale}
