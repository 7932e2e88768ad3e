"""Bindings that are wrong in one way each, as a user's file could be. They run eager: compiling would not mend them."""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Self

import torch
from scipy import stats
from torch import Tensor
from toto.data.util.dataset import MaskedTimeseries
from toto.inference.forecaster import Forecast, TotoForecaster
from toto.model.backbone import TotoBackbone
from toto.model.util import KVCache

from toto_compat.model.bound import CompileSpec, WholeModel
from toto_compat.model.series import Series


class Honest:
    """Upstream eager behind the interface that the suites use. `seen` is what it makes of a series first."""

    draws = "toto-ts"
    compiled = True
    cache_class = "tests:Honest"

    def __init__(self, eager: WholeModel, max_patches: int, batch_sizes: tuple[int, ...]) -> None:
        self.eager = eager
        self.patch_size = eager.patch_size
        self.max_patches = max_patches
        self.batch_sizes = batch_sizes

    @classmethod
    def bind(
        cls,
        backbone: TotoBackbone,
        *,
        compile_spec: CompileSpec | None,  # noqa: ARG003 - the interface's
        max_patches: int,
        batch_sizes: tuple[int, ...],
    ) -> Self:
        return cls(WholeModel(backbone, KVCache, None), max_patches, batch_sizes)

    @property
    def observer(self) -> Any:
        return self.eager.observer

    @observer.setter
    def observer(self, observer: Any) -> None:
        self.eager.observer = observer

    def seen(self, series: Series) -> Series:
        return series

    def teacher_forced(self, series: Series, truth: Tensor) -> list[dict[str, Tensor]]:
        return self.eager.teacher_forced(self.seen(series), truth)

    def generate_mean(self, series: Series, horizon_steps: int) -> Tensor:
        return self.eager.generate_mean(self.seen(series), horizon_steps)

    def generate_samples(
        self, series: Series, horizon_steps: int, *, num_samples: int, samples_per_batch: int
    ) -> Tensor:
        return self.eager.generate_samples(
            series, horizon_steps, num_samples=num_samples, samples_per_batch=samples_per_batch
        )


# --- what was announced -----------------------------------------------------------------------------------------------


class WrongOnceAnnounced(Honest):
    """Right as long as nobody says which batches are to come."""

    def generate_mean(self, series: Series, horizon_steps: int) -> Tensor:
        return super().generate_mean(series, horizon_steps) + (1e-3 if self.batch_sizes else 0.0)


class WrongUnlessAnnounced(Honest):
    def generate_mean(self, series: Series, horizon_steps: int) -> Tensor:
        return super().generate_mean(series, horizon_steps) + (0.0 if self.batch_sizes else 1e-3)


class CutsALongContext(Honest):
    """Forgets what is older than the announced maximum."""

    def seen(self, series: Series) -> Series:
        kept = slice(-self.max_patches * self.patch_size, None)
        names = ("inputs", "padding_mask", "id_mask", "timestamp_seconds")
        return replace(series, **{name: getattr(series, name)[..., kept] for name in names})


class WrapsALongHorizon(Honest):
    """Past the announced maximum it writes over what it wrote first."""

    def generate_mean(self, series: Series, horizon_steps: int) -> Tensor:
        forecast = super().generate_mean(series, horizon_steps)
        room = self.max_patches * self.patch_size - series.inputs.shape[-1]
        if 0 < room < horizon_steps:
            forecast[..., : horizon_steps - room] = forecast[..., room:].clone()
        return forecast


class RefusesWhatIsLonger(Honest):
    """Says clearly what it has no room for: that is an answer."""

    def _refuse(self, series: Series, steps: int) -> None:
        patches = (series.inputs.shape[-1] + steps) // self.patch_size
        if patches > self.max_patches:
            raise ValueError(f"{patches} patches are more than the {self.max_patches} announced")

    def teacher_forced(self, series: Series, truth: Tensor) -> list[dict[str, Tensor]]:
        self._refuse(series, truth.shape[-1])
        return super().teacher_forced(series, truth)

    def generate_mean(self, series: Series, horizon_steps: int) -> Tensor:
        self._refuse(series, horizon_steps)
        return super().generate_mean(series, horizon_steps)


class RefusesTheWorkload(Honest):
    """Refuses a length that was announced."""

    def generate_mean(self, series: Series, horizon_steps: int) -> Tensor:
        if series.inputs.shape[-1] >= 6 * self.patch_size:
            raise ValueError("too long for me")
        return super().generate_mean(series, horizon_steps)


class WrongOnMoreThreads(Honest):
    """Two threads add to one number at once."""

    def generate_mean(self, series: Series, horizon_steps: int) -> Tensor:
        return super().generate_mean(series, horizon_steps) + (1e-3 if torch.get_num_threads() > 1 else 0.0)


class WrongAtTheRowsOfSamples(Honest):
    """Right in a mean forecast; the parameters that samples are drawn from are those of fewer degrees of freedom."""

    rows = 16

    def teacher_forced(self, series: Series, truth: Tensor) -> list[dict[str, Tensor]]:
        steps = super().teacher_forced(series, truth)
        if series.inputs.shape[0] == self.rows:
            steps[-1]["df"] *= 0.99
        return steps


# --- series of all kinds ----------------------------------------------------------------------------------------------


class GroupsOfTheFirstRow(Honest):
    def seen(self, series: Series) -> Series:
        return replace(series, id_mask=series.id_mask[:1].expand_as(series.id_mask).contiguous())


class TakesPaddingForValues(Honest):
    """Of patches that hold nothing at all: the zeros there count as zeros."""

    def seen(self, series: Series) -> Series:
        empty = ~series.padding_mask.unflatten(-1, (-1, self.patch_size)).any(-1)
        return replace(series, padding_mask=series.padding_mask | empty.repeat_interleave(self.patch_size, -1))


class FloorsTheScale(Honest):
    """A series without spread gets a little, so as not to divide by nothing."""

    def seen(self, series: Series) -> Series:
        ends = [torch.where(series.padding_mask, series.inputs, far) for far in (-torch.inf, torch.inf)]
        flat = ends[0].amax(-1, keepdim=True) == ends[1].amin(-1, keepdim=True)
        ripple = 1e-3 * torch.arange(series.inputs.shape[-1]).remainder(2)
        return replace(series, inputs=torch.where(flat & series.padding_mask, series.inputs + ripple, series.inputs))


class CutsLargeValues(Honest):
    def seen(self, series: Series) -> Series:
        return replace(series, inputs=series.inputs.clamp(-1e6, 1e6))


class LosesSmallValues(Honest):
    """Rounds to six decimals."""

    def seen(self, series: Series) -> Series:
        small = series.inputs.abs() < 1e-3
        return replace(series, inputs=torch.where(small, (series.inputs * 1e6).round() / 1e6, series.inputs))


class CutsASpike(Honest):
    def seen(self, series: Series) -> Series:
        usual = series.inputs.abs().nanquantile(0.9, dim=-1, keepdim=True)
        return replace(series, inputs=torch.minimum(series.inputs, 100.0 * usual))


class ReadsMemoryAsItLies(Honest):
    """Takes any input for a contiguous one."""

    def seen(self, series: Series) -> Series:
        shape = series.inputs.shape
        return replace(series, inputs=series.inputs.as_strided(shape, (shape[1] * shape[2], shape[2], 1)))


class FillsGapsWithTheMean(Honest):
    """Makes numbers of NaN under the mask that eager would make of another series."""

    def seen(self, series: Series) -> Series:
        nan = series.inputs.isnan()
        return replace(series, inputs=torch.where(nan, series.inputs.nanmean(-1, keepdim=True), series.inputs))


class FillsGapsWithZeros(Honest):
    """What is under the mask is nobody's business: the forecast of the series without it."""

    def seen(self, series: Series) -> Series:
        return replace(series, inputs=torch.where(series.padding_mask, series.inputs, 0.0))


class AnswersGapsWithNan(Honest):
    def generate_mean(self, series: Series, horizon_steps: int) -> Tensor:
        if series.inputs.isnan().any():
            return torch.full((*series.inputs.shape[:2], horizon_steps), torch.nan)
        return super().generate_mean(series, horizon_steps)


# --- forecast() -------------------------------------------------------------------------------------------------------


class WithAForecaster(Honest):
    @property
    def forecaster(self) -> TotoForecaster:
        return self.eager.forecaster


class _OneStepEarly(TotoForecaster):  # type: ignore[misc] # toto-ts has no types
    """Forecasts by one step less of the series: right again where that fills the same patches."""

    def forecast(self, inputs: MaskedTimeseries, *arguments: Any, **named: Any) -> Forecast:
        shorter = MaskedTimeseries(*(values[..., :-1] for values in inputs[:4]), *inputs[4:])
        return super().forecast(shorter, *arguments, **named)


class _MeanForMedian(TotoForecaster):  # type: ignore[misc] # toto-ts has no types
    """Says the median where the mean was asked for."""

    def forecast(self, *arguments: Any, **named: Any) -> Forecast:
        forecast = super().forecast(*arguments, **named)
        return forecast if forecast.samples is None else Forecast(forecast.median, forecast.samples)


class _TwoOfTen(TotoForecaster):  # type: ignore[misc] # toto-ts has no types
    """Draws two samples and gives them five times."""

    def generate_samples(self, *arguments: Any, **named: Any) -> Tensor:
        samples: Tensor = super().generate_samples(*arguments, **named)
        return samples[..., :2].repeat(1, 1, 1, samples.shape[-1] // 2)


class ForecastsByOneStepLess(Honest):
    @property
    def forecaster(self) -> TotoForecaster:
        return _OneStepEarly(self.eager.forecaster.model)


class TakesTheMedianForTheMean(Honest):
    @property
    def forecaster(self) -> TotoForecaster:
        return _MeanForMedian(self.eager.forecaster.model)


class RepeatsSamplesByDefault(Honest):
    draws = "own"

    @property
    def forecaster(self) -> TotoForecaster:
        return _TwoOfTen(self.eager.forecaster.model)


# --- one series after another -----------------------------------------------------------------------------------------


class AnswersByShape(Honest):
    """Answers every series with the forecast of the first one of its shape."""

    def __init__(self, *bound: Any) -> None:
        super().__init__(*bound)
        self.known: dict[Any, Tensor] = {}

    def generate_mean(self, series: Series, horizon_steps: int) -> Tensor:
        key = (series.inputs.shape, horizon_steps)
        if key not in self.known:
            self.known[key] = super().generate_mean(series, horizon_steps)
        return self.known[key].clone()


class RemembersTheLast(Honest):
    """Mixes a little of the last forecast of the same shape into the next."""

    def __init__(self, *bound: Any) -> None:
        super().__init__(*bound)
        self.last: dict[Any, Tensor] = {}

    def generate_mean(self, series: Series, horizon_steps: int) -> Tensor:
        forecast = super().generate_mean(series, horizon_steps)
        key = forecast.shape
        mixed = forecast + 1e-3 * self.last.get(key, torch.zeros_like(forecast))
        self.last[key] = forecast
        return mixed


class SpoiltByAnException(Honest):
    """Never recovers from a forecast that raised."""

    spoilt = False

    def generate_mean(self, series: Series, horizon_steps: int) -> Tensor:
        if series.inputs.isnan().any() and series.padding_mask.all():
            self.spoilt = True
            raise ValueError("not finite")
        return super().generate_mean(series, horizon_steps) + (1e-3 if self.spoilt else 0.0)


class SpoiltByABreak(Honest):
    """Keeps the half of a forecast that was broken off."""

    unfinished = False

    def generate_mean(self, series: Series, horizon_steps: int) -> Tensor:
        carried, self.unfinished = self.unfinished, True
        forecast = super().generate_mean(series, horizon_steps) + (1e-3 if carried else 0.0)
        self.unfinished = False
        return forecast


class WrongInAThread(Honest):
    """Answers another thread with zeros."""

    def __init__(self, *bound: Any) -> None:
        super().__init__(*bound)

        self.own = threading.get_ident()
        self.ident = threading.get_ident

    def generate_mean(self, series: Series, horizon_steps: int) -> Tensor:
        forecast = super().generate_mean(series, horizon_steps)
        return forecast if self.ident() == self.own else torch.zeros_like(forecast)


class RefusesAThread(WrongInAThread):
    """Says clearly that it is for one thread: that is an answer."""

    def generate_mean(self, series: Series, horizon_steps: int) -> Tensor:
        if self.ident() != self.own:
            raise RuntimeError("forecast from the thread that made me")
        return Honest.generate_mean(self, series, horizon_steps)


# --- samples ----------------------------------------------------------------------------------------------------------


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
        return super().generate_samples(self.known.setdefault(series.inputs.shape, series), *arguments, **named)


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


# Right at the first shape that was announced, wrong at combinations of what was announced.


class WrongInAForecastOfOnePatch(Honest):
    def generate_mean(self, series: Series, horizon_steps: int) -> Tensor:
        return super().generate_mean(series, horizon_steps) + (1e-3 if horizon_steps == self.patch_size else 0.0)


class WrongWithinAPatch(Honest):
    """Of a horizon that is no whole number of patches."""

    def generate_mean(self, series: Series, horizon_steps: int) -> Tensor:
        return super().generate_mean(series, horizon_steps) + (1e-3 if horizon_steps % self.patch_size else 0.0)


class SwapsRowsAfterALongContext(Honest):
    def generate_mean(self, series: Series, horizon_steps: int) -> Tensor:
        forecast = super().generate_mean(series, horizon_steps)
        return forecast.flip(0) if series.inputs.shape[-1] > 4 * self.patch_size else forecast


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


class OddSeriesWrongWhereAnnounced(Honest):
    """A path of its own for announced shapes, upstream's for all others; the first cuts spikes and takes padding for
    values."""

    def seen(self, series: Series) -> Series:
        if series.inputs.shape[0] not in self.batch_sizes or series.inputs.shape[1] > 1:
            return series
        return CutsASpike.seen(self, TakesPaddingForValues.seen(self, series))  # type: ignore[arg-type]


class WrongAfterSixtyForecasts(Honest):
    asked = 0

    def generate_mean(self, series: Series, horizon_steps: int) -> Tensor:
        self.asked += 1
        return super().generate_mean(series, horizon_steps) + (1e-3 if self.asked > 60 else 0.0)
