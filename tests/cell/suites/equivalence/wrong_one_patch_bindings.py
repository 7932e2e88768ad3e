"""Bindings that are wrong in forecasts of one patch alone, as a user's file could be. They run eager."""

from dataclasses import replace

import torch
from torch import Tensor

from tests.cell.suites.equivalence.bindings.honest import Honest as _Honest
from toto_compat.model.series import Series

LONGEST = 6  # patches of the longest context that the tests' workload announces


class Honest(_Honest):
    """The twin of all of them."""


class WrongMeanOfOnePatch(_Honest):
    def generate_mean(self, series: Series, horizon_steps: int) -> Tensor:
        mean = super().generate_mean(series, horizon_steps)
        return mean if horizon_steps > self.patch_size else mean * 1.001


class WrongInPartOfAPatch(_Honest):
    """Right for a whole patch, and for part of it the newest points instead of the next ones."""

    def generate_mean(self, series: Series, horizon_steps: int) -> Tensor:
        if horizon_steps >= self.patch_size:
            return super().generate_mean(series, horizon_steps)
        return super().generate_mean(series, self.patch_size)[..., -horizon_steps:]


class PaddedWronglyInBetween(_Honest):
    """Right for the shortest and the longest context; what lies between is filled up to the longest with the first
    value, and not masked."""

    def seen(self, series: Series) -> Series:
        steps = series.inputs.shape[-1]
        missing = LONGEST * self.patch_size - steps
        if not 0 < missing < 2 * self.patch_size:
            return series

        def filled(values: Tensor) -> Tensor:
            return torch.cat([values[..., :1].expand(*values.shape[:-1], missing), values], dim=-1).contiguous()

        padded = {
            name: filled(getattr(series, name)) for name in ("inputs", "padding_mask", "id_mask", "timestamp_seconds")
        }
        padded["padding_mask"] = padded["padding_mask"].clone()
        padded["padding_mask"][..., :missing] = True
        return replace(series, **padded)


class WrongForManySamples(_Honest):
    """Right at every batch size but the largest, where all that it draws lies a tenth closer together."""

    draws = "its own"

    def generate_samples(
        self, series: Series, horizon_steps: int, *, num_samples: int, samples_per_batch: int
    ) -> Tensor:
        samples = super().generate_samples(
            series, horizon_steps, num_samples=num_samples, samples_per_batch=samples_per_batch
        )
        if samples_per_batch < max(self.batch_sizes):
            return samples
        centre = samples.mean(dim=-1, keepdim=True)
        return centre + 0.8 * (samples - centre)
