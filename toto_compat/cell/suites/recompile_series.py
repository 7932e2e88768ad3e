"""Series of other kinds at shapes that the warm-up met: what is compiled for one of them, its values or masks cost.

Everything that a caller may change without changing a shape: values, gaps, how much of the context is padding, groups,
times, where the tensors lie in memory, and the state of the random numbers.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from toto_compat.cell.suites.recompile_plan import PlannedForecast, met_in_warm_up, rounds_of_samples
from toto_compat.contract.request import Workload
from toto_compat.model.series import Series

Change = Callable[[Series, int], Series]  # takes the patch size
_LYING = ("inputs", "padding_mask", "id_mask", "timestamp_seconds")  # what has a place in memory for every point
_EVERY_NUMBER = 4  # of padded patches is tried up to this one, and some of those above
_SEEDS = 3  # of three forecasts two have seeds of their own, the third goes on from where the last one stopped


@dataclass(frozen=True)
class OtherSeries:
    """A forecast at a shape that was met, of a series that was not. Without a seed random numbers go on as they are."""

    plan: PlannedForecast
    kind: str
    change: Change
    seed: int | None

    @property
    def name(self) -> str:
        return f"{self.plan.name}: {self.kind}"


def plan_other_series(workload: Workload) -> Iterator[OtherSeries]:
    """Every kind at every mean forecast that the warm-up takes, and at a round of samples of the fewest rows."""
    ends = dict.fromkeys((workload.context[0], workload.context[-1]))
    # a round of hundreds of rows costs seconds, and its rows have one series in common
    sampled = min((per_batch for _, per_batch in rounds_of_samples(workload)), default=0)
    number = 0
    for context in ends:
        for kind, change in kinds_of(context // workload.patch_size, workload.patch_size).items():
            for horizon in met_in_warm_up(workload):
                plans = [PlannedForecast(context, horizon, batch) for batch in workload.batches]
                plans += [PlannedForecast(context, horizon, workload.batches[0], sampled, sampled)] if sampled else []
                for plan in plans:
                    number += 1
                    seed = None if number % _SEEDS == 0 else workload.seed + number
                    yield OtherSeries(plan, kind, change, seed)


def kinds_of(context: int, patch_size: int) -> dict[str, Change]:
    """Every kind of a series of so many patches."""
    half = patch_size // 2
    patches = {*range(1, _EVERY_NUMBER + 1), context // 2, context - 2, context - 1}
    points = [1, half, 2 * patch_size + half, *(number * patch_size for number in sorted(patches))]
    padded = {
        f"padded by {number / patch_size:g} patches": partial(_padded, points=number)
        for number in sorted(points)
        if 0 < number < context * patch_size
    }
    return padded | _KINDS


def _with_mask(series: Series, mask: Tensor) -> Series:
    return replace(series, padding_mask=mask, inputs=torch.where(mask, series.inputs, 0.0))


def _with_values(series: Series, values: Tensor) -> Series:
    """Other values, where there are any."""
    return replace(series, inputs=torch.where(series.padding_mask, values, 0.0).to(series.inputs.dtype))


def _padded(series: Series, _patch_size: int, *, points: int) -> Series:
    mask = series.padding_mask.clone()
    mask[..., :points] = False
    return _with_mask(series, mask)


def _rows_padded_otherwise(series: Series, patch_size: int) -> Series:
    mask = series.padding_mask.clone()
    for row in range(len(mask)):
        for variate in range(mask.shape[1]):
            padded = (row + variate + 1) % (mask.shape[-1] // patch_size)
            mask[row, variate, : padded * patch_size] = False
    return _with_mask(series, mask)


def _complete(series: Series, _patch_size: int) -> Series:
    return replace(series, padding_mask=torch.ones_like(series.padding_mask))


def _gaps(series: Series, patch_size: int) -> Series:
    """The newest values are missing, and a whole patch between others."""
    mask = series.padding_mask.clone()
    mask[..., -patch_size // 4 :] = False
    mask[..., patch_size : 2 * patch_size] = False
    return _with_mask(series, mask)


def _every_second_missing(series: Series, _patch_size: int) -> Series:
    mask = series.padding_mask.clone()
    mask[..., ::2] = False
    mask[..., -1] = True
    return _with_mask(series, mask)


def _regrouped(series: Series, _patch_size: int, *, ids: Callable[[Tensor], Tensor]) -> Series:
    variates = torch.arange(series.id_mask.shape[1], device=series.id_mask.device)
    groups = ids(variates).to(series.id_mask.dtype).view(1, -1, 1)
    return replace(series, id_mask=groups.expand_as(series.id_mask).contiguous())


def _rows_grouped_otherwise(series: Series, _patch_size: int) -> Series:
    ids = series.id_mask.clone()
    for row in range(len(ids)):
        ids[row] = (torch.arange(ids.shape[1], device=ids.device) % (row + 2)).view(-1, 1) + row
    return replace(series, id_mask=ids)


def _at_other_times(series: Series, _patch_size: int) -> Series:
    times = 3600 * torch.arange(series.inputs.shape[-1], device=series.inputs.device) + 86_400
    return replace(
        series,
        timestamp_seconds=times.to(series.timestamp_seconds.dtype).expand_as(series.timestamp_seconds).contiguous(),
        time_interval_seconds=torch.full_like(series.time_interval_seconds, 3600),
    )


def _elsewhere_in_memory(series: Series, _patch_size: int) -> Series:
    """The same values and masks where no vector begins. Strides stay as they are: toto-ts lays a caller's out anew."""

    def moved(values: Tensor) -> Tensor:
        flat = values.flatten()
        return torch.cat([flat[:3], flat])[3:].view(values.shape)

    return replace(series, **{name: moved(getattr(series, name)) for name in _LYING})


def _backwards(series: Series, _patch_size: int) -> Series:
    return _with_values(series, series.inputs.flip(-1))


_KINDS: dict[str, Change] = {
    "rows padded otherwise": _rows_padded_otherwise,
    "nothing missing": _complete,
    "gaps": _gaps,
    "every second value missing": _every_second_missing,
    "other values": _backwards,
    "constant": lambda series, _: _with_values(series, torch.full_like(series.inputs, 3.0)),
    "zero": lambda series, _: _with_values(series, torch.zeros_like(series.inputs)),
    "large": lambda series, _: _with_values(series, series.inputs * 1e5),
    "small": lambda series, _: _with_values(series, series.inputs * 1e-5),
    "negative": lambda series, _: _with_values(series, -series.inputs.abs() - 1.0),
    "far from zero": lambda series, _: _with_values(series, series.inputs + 2e4),
    "whole numbers": lambda series, _: _with_values(series, series.inputs.round()),
    "one id": partial(_regrouped, ids=lambda variates: torch.full_like(variates, 7)),
    "an id for each variate": partial(_regrouped, ids=lambda variates: variates + 1),
    "ids in another order": partial(_regrouped, ids=lambda variates: (len(variates) - variates) // 2),
    "rows grouped otherwise": _rows_grouped_otherwise,
    "at other times": _at_other_times,
    "elsewhere in memory": _elsewhere_in_memory,
}
