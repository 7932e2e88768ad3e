"""Bindings that draw wrong samples; and two that draw right ones in a way of their own."""

from collections.abc import Callable
from typing import Any

import torch
from scipy import stats
from torch import Tensor

from tests.cell.suites.equivalence.bindings.honest import Honest
from toto_compat.model.series import Series


class SpoilsSamples(Honest):
    """Spoils the right samples, in batch, variate, time, samples."""

    draws = "own"

    def generate_samples(
        self, series: Series, horizon_steps: int, *, num_samples: int, samples_per_batch: int
    ) -> Tensor:
        return self.spoilt(
            super().generate_samples(
                series, horizon_steps, num_samples=num_samples, samples_per_batch=samples_per_batch
            )
        )

    def spoilt(self, samples: Tensor) -> Tensor:
        raise NotImplementedError


class DrawsTooClose(SpoilsSamples):
    """Draws at 0.6 of the spread, around the right centre."""

    spread = 0.6

    def spoilt(self, samples: Tensor) -> Tensor:
        centre = samples.mean(dim=-1, keepdim=True)
        return centre + self.spread * (samples - centre)


class DrawsALittleTooClose(DrawsTooClose):
    spread = 0.9


class DrawsTheLastPatchTooClose(DrawsTooClose):
    """Right in all patches but the last."""

    def spoilt(self, samples: Tensor) -> Tensor:
        last = samples[:, :, -self.patch_size :]
        return torch.cat([samples[:, :, : -self.patch_size], super().spoilt(last)], dim=2)


class DrawsAVariateTooClose(DrawsTooClose):
    """Right in all variates but the last."""

    def spoilt(self, samples: Tensor) -> Tensor:
        if samples.shape[1] == 1:
            return samples
        return torch.cat([samples[:, :-1], super().spoilt(samples[:, -1:])], dim=1)


class RightInTheFirstPatch(SpoilsSamples):
    """All later patches are another sample's."""

    def spoilt(self, samples: Tensor) -> Tensor:
        first, later = samples[:, :, : self.patch_size], samples[:, :, self.patch_size :]
        return torch.cat([first, later - later.mean(-1, keepdim=True) + first[:, :, -1:]], dim=2)


class SwapsSeries(SpoilsSamples):
    def spoilt(self, samples: Tensor) -> Tensor:
        return samples.roll(1, dims=0)


class SwapsVariates(SpoilsSamples):
    def spoilt(self, samples: Tensor) -> Tensor:
        return samples.roll(1, dims=1)


class SamplesOfTheFirstSeries(Honest):
    """Gives any series of a shape the samples of the first one."""

    draws = "own"

    def __init__(self, *bound: Any) -> None:
        super().__init__(*bound)
        self.known: dict[Any, Series] = {}

    def generate_samples(self, series: Series, *arguments: Any, **named: Any) -> Tensor:
        if bool(series.inputs.isfinite().all()):  # else it would raise from there on, which anybody sees
            series = self.known.setdefault(series.inputs.shape, series)
        return super().generate_samples(series, *arguments, **named)


class DrawsTheSameAgain(Honest):
    """Has a seed of its own, and every forecast begins with it."""

    draws = "own"

    def generate_samples(self, *arguments: Any, **named: Any) -> Tensor:
        torch.manual_seed(1)
        return super().generate_samples(*arguments, **named)


class DrawsItself(Honest):
    """Draws from eager's distributions with `noise`, a number between 0 and 1 for each [row, variate, point]."""

    draws = "own"

    def generate_samples(
        self, series: Series, horizon_steps: int, *, num_samples: int, samples_per_batch: int
    ) -> Tensor:
        rounds = [
            self._round(series, horizon_steps, samples_per_batch) for _ in range(num_samples // samples_per_batch)
        ]
        return torch.cat(rounds, dim=-1)

    def _round(self, series: Series, horizon_steps: int, count: int) -> Tensor:
        repeated = Series(
            **{name: value.repeat(count, *[1] * (value.dim() - 1)) for name, value in vars(series).items()}
        )
        rows, variates, _ = repeated.inputs.shape
        shape = (rows, variates, self.patch_size)
        noise = self.noise(shape)
        drawn = repeated.inputs.new_zeros(rows, variates, 0)
        while drawn.shape[-1] < horizon_steps:
            predicted = self.eager.predictive(repeated, torch.cat([drawn, drawn.new_zeros(shape)], dim=-1))[-1]
            patch = self.drawn(predicted, noise()).to(drawn)
            drawn = torch.cat([drawn, patch * predicted["affine_scale"] + predicted["affine_loc"]], dim=-1)
        return drawn.unflatten(0, (count, -1)).permute(1, 2, 3, 0)

    def noise(self, shape: tuple[int, ...]) -> Callable[[], Tensor]:
        return lambda: torch.rand(shape, dtype=torch.float64)

    def drawn(self, predicted: dict[str, Tensor], noise: Tensor) -> Tensor:
        """The point below which the mixture has as much as the noise says, found by halving."""
        df, loc, scale, probs = (predicted[name].double() for name in ("df", "loc", "scale", "probs"))
        low, high = torch.full_like(noise, -1e3), torch.full_like(noise, 1e3)
        for _ in range(32):
            middle = (low + high) / 2
            each = torch.from_numpy(stats.t.cdf(((middle.unsqueeze(-1) - loc) / scale).numpy(), df.numpy()))
            above = (each * probs).sum(-1) > noise
            low, high = torch.where(above, low, middle), torch.where(above, middle, high)
        return (low + high) / 2


class OneNoiseForARow(DrawsItself):
    """All points of a row lie equally high in their distributions: each one right by itself."""

    def noise(self, shape: tuple[int, ...]) -> Callable[[], Tensor]:
        once = torch.rand(shape[0], 1, 1, dtype=torch.float64).expand(shape)
        return lambda: once


class OneNoiseForAllPatches(DrawsItself):
    """Replays its random state in every step."""

    def noise(self, shape: tuple[int, ...]) -> Callable[[], Tensor]:
        once = torch.rand(shape, dtype=torch.float64)
        return lambda: once


class OneNoiseForAllVariates(DrawsItself):
    def noise(self, shape: tuple[int, ...]) -> Callable[[], Tensor]:
        return lambda: torch.rand(shape[0], 1, shape[2], dtype=torch.float64).expand(shape)


class OneDistanceForTwoRows(DrawsItself):
    """The last row of a round lies as far from the middle as the first, on either side by chance."""

    def noise(self, shape: tuple[int, ...]) -> Callable[[], Tensor]:
        def drawn() -> Tensor:
            noise = torch.rand(shape, dtype=torch.float64)
            noise[-1] = torch.where(torch.rand(shape[1:]) < 0.5, noise[0], 1 - noise[0])
            return noise

        return drawn


class OneDistanceForNeighbours(DrawsItself):
    """One point of eight lies as far from the middle as the one before it, on either side by chance."""

    def noise(self, shape: tuple[int, ...]) -> Callable[[], Tensor]:
        def drawn() -> Tensor:
            noise = torch.rand(shape, dtype=torch.float64)
            before = noise[..., ::8]
            noise[..., 1::8] = torch.where(torch.rand(before.shape) < 0.5, before, 1 - before)
            return noise

        return drawn


class DrawsNormally(DrawsItself):
    """Draws from a normal distribution with the mixture's own mean and spread."""

    def drawn(self, predicted: dict[str, Tensor], noise: Tensor) -> Tensor:
        df, loc, scale, probs = (predicted[name].double() for name in ("df", "loc", "scale", "probs"))
        mean = (probs * loc).sum(-1)
        squares = (probs * (scale.square() * df / (df - 2).clamp_min(0.1) + loc.square())).sum(-1)
        return mean + (squares - mean.square()).sqrt() * torch.special.ndtri(noise)


class CopiesARound(Honest):
    """Gives the first batch of samples again and again."""

    draws = "own"

    def generate_samples(
        self, series: Series, horizon_steps: int, *, num_samples: int, samples_per_batch: int
    ) -> Tensor:
        first = super().generate_samples(
            series, horizon_steps, num_samples=samples_per_batch, samples_per_batch=samples_per_batch
        )
        return first.repeat(1, 1, 1, num_samples // samples_per_batch)


class SamplesTheMean(Honest):
    """Gives every sample the mean forecast and a little noise."""

    draws = "own"

    def generate_samples(
        self,
        series: Series,
        horizon_steps: int,
        *,
        num_samples: int,
        samples_per_batch: int,  # noqa: ARG002 - the interface's
    ) -> Tensor:
        mean = self.eager.generate_mean(series, horizon_steps).unsqueeze(-1)
        return mean + 0.1 * torch.randn(*mean.shape[:-1], num_samples)


class DrawsOtherwise(Honest):
    """Draws right, from a random stream of its own."""

    draws = "own"

    def generate_samples(
        self, series: Series, horizon_steps: int, *, num_samples: int, samples_per_batch: int
    ) -> Tensor:
        torch.rand(7)
        return super().generate_samples(
            series, horizon_steps, num_samples=num_samples, samples_per_batch=samples_per_batch
        )


class ClaimsTotosDraws(DrawsOtherwise):
    """The same, but says that its seeds are toto-ts's."""

    draws = "toto-ts"


class SamplesOneValueAfterALongContext(Honest):
    draws = "own"

    def generate_samples(self, series: Series, horizon_steps: int, **asked: int) -> Tensor:
        samples = super().generate_samples(series, horizon_steps, **asked)
        long = series.inputs.shape[-1] > 4 * self.patch_size
        return samples[..., :1].expand_as(samples).clone() if long else samples


class SamplesOneSeriesPastAFewPatches(Honest):
    draws = "own"

    def generate_samples(self, series: Series, horizon_steps: int, **asked: int) -> Tensor:
        samples = super().generate_samples(series, horizon_steps, **asked)
        return samples[:1].expand_as(samples).clone() if horizon_steps > 3 * self.patch_size else samples


class CutsTheTails(DrawsItself):
    """Keeps its uniform numbers away from 0 and 1, so that no draw is infinite: a thousandth is never drawn."""

    def noise(self, shape: tuple[int, ...]) -> Callable[[], Tensor]:
        return lambda: torch.rand(shape, dtype=torch.float64).clamp(5e-4, 1 - 5e-4)


class SharesTheDistributionOut(DrawsItself):
    """Gives every row of a round its own part of each point's distribution: no independent draws."""

    def noise(self, shape: tuple[int, ...]) -> Callable[[], Tensor]:
        def drawn() -> Tensor:
            if shape[0] < 8:
                return torch.rand(shape, dtype=torch.float64)
            return (torch.rand(shape).argsort(0) + torch.rand(shape, dtype=torch.float64)) / shape[0]

        return drawn
