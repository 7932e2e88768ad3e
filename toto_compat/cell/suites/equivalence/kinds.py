"""Kinds of series whose values, masks, groups or place in memory are odd, made of an ordinary one of the same shape."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from toto_compat.model.series import Series

NAN_UNDER_THE_MASK = "nan_under_the_mask"
LEVEL = "level"
OF_SEVERAL_ROWS = "rows_with_groups_of_their_own"
SIZES = "of_many_sizes"
_SIZES = (1.0, 1e7, 1e3)  # not less than 1: the model's smallest scale, a tenth, is added to less
_GROUPS = ((0, 3, 0), (0, 1, 2), (1, 1, 0))  # apart from each other, of three kinds, together; any numbers are ids


def _constant(series: Series, _patch_size: int) -> Series:
    return replace(series, inputs=torch.where(series.padding_mask, torch.full_like(series.inputs, 3.0), 0.0))


def _large(series: Series, _patch_size: int) -> Series:
    return replace(series, inputs=series.inputs * 1e5)


def _small(series: Series, _patch_size: int) -> Series:
    return replace(series, inputs=series.inputs * 1e-5)


def _one_spike(series: Series, patch_size: int) -> Series:
    inputs = series.inputs.clone()
    inputs[..., -patch_size // 2] = 1e3 * inputs.abs().max()
    mask = series.padding_mask.clone()
    mask[..., -patch_size // 2] = True
    return replace(series, inputs=inputs, padding_mask=mask)


def _nan_under_the_mask(series: Series, patch_size: int) -> Series:
    mask = series.padding_mask.clone()
    mask[..., patch_size // 2] = False  # a workload may miss nothing
    return replace(series, inputs=torch.where(mask, series.inputs, torch.nan), padding_mask=mask)


def _left_padded(series: Series, patch_size: int) -> Series:
    """As production pads a series that is too short: two whole patches and a half of nothing before it."""
    mask, inputs = series.padding_mask.clone(), series.inputs.clone()
    mask[..., : 2 * patch_size + patch_size // 2] = False
    inputs[..., : 2 * patch_size + patch_size // 2] = 0.0
    return replace(series, inputs=inputs, padding_mask=mask)


def _rows_with_groups_of_their_own(series: Series, _patch_size: int) -> Series:
    """In every row the variates are grouped otherwise."""
    ids = series.id_mask.clone()
    for row in range(ids.shape[0]):
        groups = torch.tensor(_GROUPS[row % len(_GROUPS)], device=ids.device, dtype=ids.dtype)
        ids[row] = groups[torch.arange(ids.shape[1], device=ids.device) % len(groups)].view(-1, 1)
    return replace(series, id_mask=ids)


def _not_contiguous(series: Series, _patch_size: int) -> Series:
    """The same values and masks, lying in memory with time first."""
    lying = {
        name: getattr(series, name).permute(2, 0, 1).contiguous().permute(1, 2, 0)
        for name in ("inputs", "padding_mask", "id_mask")
    }
    return replace(series, **lying)


def _gaps(series: Series, patch_size: int) -> Series:
    """The newest values are missing, and a whole patch between others."""
    mask = series.padding_mask.clone()
    mask[..., -patch_size // 4 :] = False
    mask[..., patch_size : 2 * patch_size] = False
    return replace(series, padding_mask=mask, inputs=torch.where(mask, series.inputs, 0.0))


def _level(series: Series, _patch_size: int) -> Series:
    """Thousands of times its own spread away from zero, as prices are."""
    return replace(series, inputs=torch.where(series.padding_mask, series.inputs + 2e4, 0.0))


def _of_many_sizes(series: Series, _patch_size: int) -> Series:
    """One variate is a ratio, the next one counts bytes; the rows begin with another one each."""
    batch, variates, _ = series.inputs.shape
    number = torch.arange(batch).view(-1, 1, 1) + torch.arange(variates).view(1, -1, 1)
    sizes = torch.tensor(_SIZES)[number % len(_SIZES)].to(series.inputs)
    return replace(series, inputs=series.inputs * sizes)


KINDS: Mapping[str, Callable[[Series, int], Series]] = {
    "constant": _constant,
    "large": _large,
    "small": _small,
    "one_spike": _one_spike,
    NAN_UNDER_THE_MASK: _nan_under_the_mask,
    "left_padded": _left_padded,
    OF_SEVERAL_ROWS: _rows_with_groups_of_their_own,
    "not_contiguous": _not_contiguous,
    "gaps": _gaps,
    LEVEL: _level,
    SIZES: _of_many_sizes,
}
# Of these upstream eager gives no draws, or in single precision none whose places are uniform.
NOT_SAMPLED = (NAN_UNDER_THE_MASK, LEVEL)
