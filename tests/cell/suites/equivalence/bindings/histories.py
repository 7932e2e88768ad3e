"""Bindings whose answer depends on what they were asked before, how often, and by whom."""

import os
import threading
import time
from typing import Any

import torch
from torch import Tensor

from tests.cell.suites.equivalence.bindings.honest import Honest
from toto_compat.model.series import Series


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


class WrongAfterSixtyForecasts(Honest):
    asked = 0

    def generate_mean(self, series: Series, horizon_steps: int) -> Tensor:
        self.asked += 1
        return super().generate_mean(series, horizon_steps) + (1e-3 if self.asked > 60 else 0.0)


class WrongNowAndThen(Honest):
    """In one forecast of seventy-three, and right again in the next."""

    asked = 0

    def generate_mean(self, series: Series, horizon_steps: int) -> Tensor:
        self.asked += 1
        return super().generate_mean(series, horizon_steps) + (1e-3 if self.asked % 73 == 0 else 0.0)


class WrongAfterSampling(Honest):
    """Keeps what the samples left in its buffers."""

    sampled = 0

    def generate_samples(self, series: Series, horizon_steps: int, **asked: int) -> Tensor:
        self.sampled += asked["num_samples"]
        return super().generate_samples(series, horizon_steps, **asked)

    def generate_mean(self, series: Series, horizon_steps: int) -> Tensor:
        return super().generate_mean(series, horizon_steps) + (1e-3 if self.sampled > 300 else 0.0)


class WrongAfterAnHour(Honest):
    """Takes what it kept for an hour to be old then, and forecasts without it."""

    def __init__(self, *bound: Any) -> None:
        super().__init__(*bound)
        self.made = time.monotonic()

    def generate_mean(self, series: Series, horizon_steps: int) -> Tensor:
        old = time.monotonic() - self.made > 3600
        return super().generate_mean(series, horizon_steps) + (1e-3 if old else 0.0)


class RightInContinuousIntegration(Honest):
    """Knows where it is looked at: right there, and in a process of the kind that it was made in."""

    def __init__(self, *bound: Any) -> None:
        super().__init__(*bound)
        self.made_in = os.environ.get("CI")

    def generate_mean(self, series: Series, horizon_steps: int) -> Tensor:
        elsewhere = os.environ.get("CI") != self.made_in
        return super().generate_mean(series, horizon_steps) + (1e-3 if elsewhere else 0.0)
