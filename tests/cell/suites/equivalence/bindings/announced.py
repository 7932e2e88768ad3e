"""Bindings that are right at the first shape that was announced, and wrong at others or past them."""

from dataclasses import replace

import torch
from torch import Tensor

from tests.cell.suites.equivalence.bindings.honest import Honest
from toto_compat.model.series import Series


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
