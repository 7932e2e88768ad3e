"""Bindings that are wrong on series of one kind."""

from dataclasses import replace

import torch
from torch import Tensor

from tests.cell.suites.equivalence.bindings.honest import Honest
from toto_compat.model.bound import unchecked_distributions
from toto_compat.model.series import Series


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


class TakesNanForZero(Honest):
    """Makes a number of everything, and a forecast of nothing."""

    def seen(self, series: Series) -> Series:
        return replace(series, inputs=series.inputs.nan_to_num())


class BridgesANan(Honest):
    """Raises where there is nothing at all; a single NaN gets the largest value of its series."""

    def seen(self, series: Series) -> Series:
        if series.inputs.isnan().all():
            raise ValueError("there is nothing to forecast")
        largest = series.inputs.nan_to_num(-torch.inf).amax(-1, keepdim=True)
        there = series.inputs.isnan() & series.padding_mask
        return replace(series, inputs=torch.where(there, largest, series.inputs))


class SamplesNanAsZero(Honest):
    """Right in means; draws from the distribution of zeros."""

    def generate_samples(self, series: Series, horizon_steps: int, **asked: int) -> Tensor:
        known = replace(series, inputs=series.inputs.nan_to_num())
        return super().generate_samples(known, horizon_steps, **asked)


class AnswersNanAsEagerUnchecked(Honest):
    """Honest: what compiled upstream says, since dynamo switches torch's checks off."""

    def generate_mean(self, series: Series, horizon_steps: int) -> Tensor:
        with unchecked_distributions():
            return super().generate_mean(series, horizon_steps)


class AnswersNanWithNan(AnswersGapsWithNan):
    """Honest: of NaN comes NaN."""

    def generate_samples(self, series: Series, horizon_steps: int, **asked: int) -> Tensor:
        if series.inputs.isnan().any():
            return torch.full((*series.inputs.shape[:2], horizon_steps, asked["num_samples"]), torch.nan)
        return super().generate_samples(series, horizon_steps, **asked)


class OddSeriesWrongWhereAnnounced(Honest):
    """A path of its own for announced shapes, upstream's for all others; the first cuts spikes and takes padding for
    values."""

    def seen(self, series: Series) -> Series:
        if series.inputs.shape[0] not in self.batch_sizes or series.inputs.shape[1] > 1:
            return series
        return CutsASpike.seen(self, TakesPaddingForValues.seen(self, series))  # type: ignore[arg-type]


class NewestValueIsThere(Honest):
    """Takes the newest value for a real one, whatever the mask says."""

    def seen(self, series: Series) -> Series:
        mask = series.padding_mask.clone()
        mask[..., -1] = True
        return replace(series, padding_mask=mask)


class EmptyPatchesOnlyBefore(Honest):
    """Takes a patch without a value for padding before the series; within it for zeros."""

    def seen(self, series: Series) -> Series:
        empty = ~series.padding_mask.unflatten(-1, (-1, self.patch_size)).any(-1)
        began = (~empty).cumsum(-1) > 0
        within = (empty & began).repeat_interleave(self.patch_size, -1)
        return replace(series, padding_mask=series.padding_mask | within)


class TwoGroupsAtMost(Honest):
    """Takes a group id for zero or not zero."""

    def seen(self, series: Series) -> Series:
        return replace(series, id_mask=series.id_mask.bool().to(series.id_mask.dtype))


class GroupsLieTogether(Honest):
    """Ends a group where the next variate has another id: 0, 3, 0 are three groups to it."""

    def seen(self, series: Series) -> Series:
        ids = series.id_mask
        changes = torch.zeros_like(ids)
        changes[:, 1:] = (ids[:, 1:] != ids[:, :-1]).to(ids.dtype)
        return replace(series, id_mask=changes.cumsum(1).to(ids.dtype))


class ReadsMasksAsTheyLie(Honest):
    """Takes masks for contiguous."""

    def seen(self, series: Series) -> Series:
        _, variates, steps = series.padding_mask.shape
        lying = series.padding_mask.as_strided(series.padding_mask.shape, (variates * steps, steps, 1))
        return replace(series, padding_mask=lying)


class SmallBesideLargeIsWrong(Honest):
    """A variate that is small beside another one of its series is forecast a tenth too high."""

    def generate_mean(self, series: Series, horizon_steps: int) -> Tensor:
        sizes = series.inputs.nan_to_num().abs().amax(-1, keepdim=True)
        small = sizes < 1e-5 * sizes.amax(1, keepdim=True)
        return super().generate_mean(series, horizon_steps) * torch.where(small, 1.1, 1.0)


class SmallRowBesideALargeOneIsWrong(Honest):
    """The same of rows of a batch."""

    def generate_mean(self, series: Series, horizon_steps: int) -> Tensor:
        sizes = series.inputs.nan_to_num().abs().amax(-1, keepdim=True)
        small = sizes < 1e-5 * sizes.amax(0, keepdim=True)
        return super().generate_mean(series, horizon_steps) * torch.where(small, 1.1, 1.0)


class SamplesOddSeriesWrong(Honest):
    """Right in means and parameters; what it samples of odd series is wrong."""

    draws = "own"

    def generate_samples(self, series: Series, horizon_steps: int, **asked: int) -> Tensor:
        for kind in (ReadsMemoryAsItLies, TakesPaddingForValues, CutsASpike, CutsLargeValues, GroupsOfTheFirstRow):
            series = kind.seen(self, series)  # type: ignore[arg-type]
        return super().generate_samples(series, horizon_steps, **asked)
