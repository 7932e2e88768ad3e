"""Bindings that are wrong in one way each, as a user's file could be. They run eager: compiling would not mend them."""

import threading
from typing import Any

import torch
from torch import Tensor

from toto_compat.model.bound import WholeModel
from toto_compat.model.series import Series


class Honest:
    """Upstream eager behind the interface that the suites use."""

    draws = "toto-ts"
    compiled = True
    cache_class = "tests:Honest"

    def __init__(self, eager: WholeModel) -> None:
        self.eager = eager
        self.patch_size = eager.patch_size

    @property
    def observer(self) -> Any:
        return self.eager.observer

    @observer.setter
    def observer(self, observer: Any) -> None:
        self.eager.observer = observer

    def teacher_forced(self, series: Series, truth: Tensor) -> list[dict[str, Tensor]]:
        return self.eager.teacher_forced(series, truth)

    def generate_mean(self, series: Series, horizon_steps: int) -> Tensor:
        return self.eager.generate_mean(series, horizon_steps)

    def generate_samples(
        self, series: Series, horizon_steps: int, *, num_samples: int, samples_per_batch: int
    ) -> Tensor:
        return self.eager.generate_samples(
            series, horizon_steps, num_samples=num_samples, samples_per_batch=samples_per_batch
        )


class AnswersByShape(Honest):
    """Answers every series with the forecast of the first one of its shape."""

    def __init__(self, eager: WholeModel) -> None:
        super().__init__(eager)
        self.known: dict[Any, Tensor] = {}

    def generate_mean(self, series: Series, horizon_steps: int) -> Tensor:
        key = (series.inputs.shape, horizon_steps)
        if key not in self.known:
            self.known[key] = super().generate_mean(series, horizon_steps)
        return self.known[key].clone()


class RemembersTheLast(Honest):
    """Mixes a little of the last forecast of the same shape into the next."""

    def __init__(self, eager: WholeModel) -> None:
        super().__init__(eager)
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

    def __init__(self, eager: WholeModel) -> None:
        super().__init__(eager)

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


class DrawsTooClose(Honest):
    """Draws at 0.6 of the spread, around the right centre."""

    draws = "own"
    spread = 0.6

    def generate_samples(
        self, series: Series, horizon_steps: int, *, num_samples: int, samples_per_batch: int
    ) -> Tensor:
        samples = super().generate_samples(
            series, horizon_steps, num_samples=num_samples, samples_per_batch=samples_per_batch
        )
        centre = samples.mean(dim=-1, keepdim=True)
        return centre + self.spread * (samples - centre)


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
