"""Bindings that take what is the caller's for their own: results, a series' tensors, random numbers, other threads."""

import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tests.cell.suites.equivalence.bindings.honest import Honest
from toto_compat.model.series import Series


class ReusesItsMean(Honest):
    """Hands out one buffer for every shape: the next forecast writes over what the caller still holds."""

    def __init__(self, *bound: Any) -> None:
        super().__init__(*bound)
        self.buffers: dict[Any, Tensor] = {}

    def kept(self, values: Tensor) -> Tensor:
        return self.buffers.setdefault(values.shape, torch.empty_like(values)).copy_(values)

    def generate_mean(self, series: Series, horizon_steps: int) -> Tensor:
        return self.kept(super().generate_mean(series, horizon_steps))


class ReusesItsSamples(ReusesItsMean):
    def generate_mean(self, series: Series, horizon_steps: int) -> Tensor:
        return Honest.generate_mean(self, series, horizon_steps)

    def generate_samples(self, *arguments: Any, **named: Any) -> Tensor:
        return self.kept(super().generate_samples(*arguments, **named))


class KnowsASeriesByItsTensor(Honest):
    """Keeps the last forecast by the tensor that it was of: stale once somebody writes to that."""

    last: Any = (None, 0, None)

    def generate_mean(self, series: Series, horizon_steps: int) -> Tensor:
        inputs, steps, forecast = self.last
        if inputs is not series.inputs or steps != horizon_steps:
            forecast = super().generate_mean(series, horizon_steps)
            self.last = (series.inputs, horizon_steps, forecast)
        return forecast.clone()


class NotForTwoAtOnce(Honest):
    """One buffer for the series and no lock: two threads at once forecast each other's."""

    def __init__(self, *bound: Any) -> None:
        super().__init__(*bound)
        self.buffers: dict[Any, Tensor] = {}

    def seen(self, series: Series) -> Series:
        buffer = self.buffers.setdefault(series.inputs.shape, torch.empty_like(series.inputs))
        buffer.copy_(series.inputs)
        time.sleep(0)  # where another thread may come in
        return replace(series, inputs=buffer)


class RemembersWhatItWasFed(Honest):
    """Answers with what it was fed under teacher forcing, and forecasts nothing by itself."""

    def __init__(self, *bound: Any) -> None:
        super().__init__(*bound)
        self.fed: dict[bytes, Tensor] = {}

    def teacher_forced(self, series: Series, truth: Tensor) -> list[dict[str, Tensor]]:
        self.fed[series.inputs.contiguous().numpy().tobytes()] = truth.clone()
        return super().teacher_forced(series, truth)

    def generate_mean(self, series: Series, horizon_steps: int) -> Tensor:
        known = self.fed.get(series.inputs.contiguous().numpy().tobytes())
        if known is not None and known.shape[-1] >= horizon_steps:
            return known[..., :horizon_steps].clone()
        return super().generate_mean(series, horizon_steps) * 1.5


class DrawsTheSameWithoutASeed(Honest):
    """Leaves the random state as it found it: without a new seed every forecast has the same noise."""

    def generate_samples(self, *arguments: Any, **named: Any) -> Tensor:
        with torch.random.fork_rng():
            return super().generate_samples(*arguments, **named)


class SeedsInTheMean(Honest):
    """Seeds the process in a mean forecast: the samples after it, and the caller's own random numbers, repeat."""

    def generate_mean(self, series: Series, horizon_steps: int) -> Tensor:
        torch.manual_seed(0)
        return super().generate_mean(series, horizon_steps)


class ScalesTheCallersSeries(Honest):
    def generate_mean(self, series: Series, horizon_steps: int) -> Tensor:
        forecast = super().generate_mean(series, horizon_steps)
        series.inputs.div_(2.0)
        return forecast


class ScalesTheCallersSeriesWhenSampling(Honest):
    def generate_samples(self, series: Series, horizon_steps: int, **asked: int) -> Tensor:
        samples = super().generate_samples(series, horizon_steps, **asked)
        series.padding_mask.fill_(True)
        series.inputs.sub_(series.inputs.mean())
        return samples
