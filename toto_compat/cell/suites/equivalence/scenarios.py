"""What is forecast to compare: every shape of the workload, and series of all kinds at one of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from toto_compat.cell.trial import Trial
from toto_compat.contract.request import Workload
from toto_compat.model.series import Series

_KIND_SHAPE = (3, 3, 2)  # batch, variates, id groups that the kinds are tried at: one shape, so nothing compiles anew


@dataclass(frozen=True)
class Scenario:
    """One series to forecast. Lengths in patches; `kind` says what is odd about its values."""

    name: str
    context: int
    horizon: int
    batch: int
    variates: int
    groups: int
    kind: str = "ordinary"
    seed_offset: int = 0  # another one gives other values of the same shape

    @property
    def may_lack_a_reference(self) -> bool:
        """Say whether upstream eager need not be finite here: of odd values it is asked only what it can answer."""
        return self.kind != "ordinary"


def scenarios_of(workload: Workload, batch_sizes: tuple[int, ...] = ()) -> tuple[Scenario, ...]:
    """Every context length at the workload's own shape, mixes of batch, variates and id groups, then the kinds.

    The mixes are short, and in an order in which one size changes at a time: the compiler makes it dynamic then, and
    the shapes after it cost no compilation. Samples are drawn for as many rows as `batch_sizes` say: those are mixes
    too, since the parameters that samples are drawn from are compared at no other place.
    """
    horizon = max(9, workload.horizon_patches[0])  # a prefill and at least eight decode steps
    own_shape = (workload.batch, workload.variates, workload.groups)
    lengths = [Scenario(f"context {context}", context, horizon, *own_shape) for context in workload.context_patches]
    shortest = workload.context_patches[0]
    sizes = [(rows, workload.variates, workload.groups) for rows in batch_sizes if rows > 3]
    mixes = [
        Scenario(f"batch {batch}, {variates} variates in {groups}", shortest, horizon, batch, variates, groups)
        for batch, variates, groups in ((3, 1, 1), _KIND_SHAPE, (2, 3, 1), (2, 1, 1), *sizes)
    ]
    kinds = [Scenario(kind.replace("_", " "), shortest, 3, *_KIND_SHAPE, kind=kind) for kind in KINDS]
    return (*lengths, *mixes, *kinds)


def pair_of(workload: Workload) -> tuple[Scenario, Scenario]:
    """Two series of one shape: the first of `scenarios_of`, and another one that must not get its forecast."""
    first = scenarios_of(workload)[0]
    return first, replace(first, name=f"{first.name}, another series", seed_offset=1)


def all_scenarios(trial: Trial) -> tuple[Scenario, ...]:
    """All that is compared in a cell: the scenarios, and the second series of the first one's shape."""
    return (*scenarios_of(trial.workload, trial.batch_sizes), pair_of(trial.workload)[1])


def series_of(trial: Trial, scenario: Scenario, patch_size: int) -> Series:
    """The scenario's series on the trial's device: the same numbers in every process."""
    series = trial.series(
        patch_size,
        scenario.context,
        scenario.horizon,
        batch=scenario.batch,
        variates=scenario.variates,
        groups=scenario.groups,
        seed_offset=scenario.seed_offset,
    )
    return KINDS[scenario.kind](series, patch_size) if scenario.kind in KINDS else series


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


def _nan_under_the_mask(series: Series, _patch_size: int) -> Series:
    return replace(series, inputs=torch.where(series.padding_mask, series.inputs, torch.nan))


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
        ids[row] = (ids[row] + torch.arange(ids.shape[1], device=ids.device).view(-1, 1) * row) % 2
    return replace(series, id_mask=ids)


def _not_contiguous(series: Series, _patch_size: int) -> Series:
    """The same values, lying in memory with time first."""
    return replace(series, inputs=series.inputs.permute(2, 0, 1).contiguous().permute(1, 2, 0))


KINDS: Mapping[str, Callable[[Series, int], Series]] = {
    "constant": _constant,
    "large": _large,
    "small": _small,
    "one_spike": _one_spike,
    "nan_under_the_mask": _nan_under_the_mask,
    "left_padded": _left_padded,
    "rows_with_groups_of_their_own": _rows_with_groups_of_their_own,
    "not_contiguous": _not_contiguous,
}
