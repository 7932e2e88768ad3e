"""What is forecast: synthetic series with trend, seasons, gaps and id groups, or a user's CSV."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from toto.data.util.dataset import pad_array, pad_id_mask

from toto_compat.contract.csv_file import CsvColumns, check_rows, read_csv
from toto_compat.contract.request import CsvSeries, Workload


@dataclass(frozen=True)
class Series:
    """A context in the form toto-ts takes, and its held-out continuation. Shapes: batch, variate, time."""

    inputs: Tensor
    padding_mask: Tensor  # True where the value is real
    id_mask: Tensor  # group of each variate
    timestamp_seconds: Tensor
    time_interval_seconds: Tensor  # batch, variate
    truth: Tensor  # batch, variate, horizon

    def to(self, *, device: str | torch.device | None = None, dtype: torch.dtype | None = None) -> "Series":
        moved = {
            name: getattr(self, name).to(device=device)
            for name in ("padding_mask", "id_mask", "timestamp_seconds", "time_interval_seconds")
        }
        values = {name: getattr(self, name).to(device=device, dtype=dtype) for name in ("inputs", "truth")}
        return Series(**moved, **values)

    def nudged(self, ulps: int, *, seed: int = 0) -> "Series":
        """The same context with each value moved up or down by that many units in the last place."""
        generator = torch.Generator().manual_seed(seed)
        up = torch.rand(self.inputs.shape, generator=generator).to(self.inputs.device) < 0.5
        moved = self.inputs
        for _ in range(ulps):
            target = torch.where(up, torch.inf, -torch.inf).to(moved.dtype)
            moved = torch.nextafter(moved, target)
        return replace(self, inputs=torch.where(self.padding_mask, moved, self.inputs))


def make_series(
    workload: Workload,
    *,
    patch_size: int,
    context_patches: int,
    horizon_patches: int,
    batch: int | None = None,
    variates: int | None = None,
    groups: int | None = None,
    seed_offset: int = 0,
    csv: CsvSeries | None = None,
) -> Series:
    """A float32 series on the CPU; the same arguments give the same numbers on every machine and release."""
    batch = workload.batch if batch is None else batch
    variates = workload.variates if variates is None else variates
    groups = min(workload.groups if groups is None else groups, variates)
    context, horizon = context_patches * patch_size, horizon_patches * patch_size
    if csv is not None:
        values, present, start, interval = _csv_window(csv, context + horizon, batch, variates)
    else:
        values = _synthetic(batch, variates, context + horizon, workload.seed + seed_offset)
        generator = torch.Generator().manual_seed(workload.seed + seed_offset + 1)
        present = torch.rand(values.shape, generator=generator) >= workload.missing
        start, interval = 1_700_000_000, 60
        present[..., context - 1] = True  # the newest value is there, as in any live series
    inputs = torch.where(present, values, torch.zeros_like(values))[..., :context]
    group_of_variate = torch.arange(variates) * groups // variates
    return Series(
        inputs=_compact(inputs),
        padding_mask=_compact(present[..., :context]),
        id_mask=_compact(group_of_variate.view(1, variates, 1).expand(batch, variates, context).to(torch.int)),
        timestamp_seconds=_compact((start + interval * torch.arange(context)).expand(batch, variates, context)),
        time_interval_seconds=torch.full((batch, variates), interval, dtype=torch.int),
        truth=_compact(values[..., context:]),
    )


def _compact(values: Tensor) -> Tensor:
    """A copy with the strides of its own shape: of a single series, `contiguous()` keeps the strides of what it was cut
    from, and dynamo guards on strides - the compiler would be blamed for how the series was made."""
    return values.clone(memory_format=torch.contiguous_format)


def _synthetic(batch: int, variates: int, length: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)

    def draw(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(batch, variates, 1, generator=generator, dtype=torch.float64)

    time = torch.arange(length, dtype=torch.float64)
    trend = draw(-0.01, 0.01) * time
    day = draw(0.5, 2.0) * torch.sin(2 * math.pi * time / draw(20.0, 40.0) + draw(0.0, 6.0))
    week = draw(0.5, 3.0) * torch.sin(2 * math.pi * time / draw(150.0, 300.0) + draw(0.0, 6.0))
    noise = 0.3 * torch.randn(batch, variates, length, generator=generator, dtype=torch.float64)
    return (draw(-5.0, 20.0) + trend + day + week + noise).to(torch.float32)


def window_series(
    columns: CsvColumns, start: int, context: int, horizon: int, patch_size: int
) -> tuple[Series, Tensor]:
    """One window of a user's series, and where its held-out values are there.

    A context that is no multiple of the patch is padded as toto-ts's `forecast()` pads it.
    """
    values = _numbers(columns)[None, :, start : start + context + horizon]
    present = ~values.isnan()
    given = torch.nan_to_num(values)
    times = torch.tensor(columns.timestamps[start : start + context]).expand(1, values.shape[1], context)
    series = Series(
        inputs=_compact(pad_array(given[..., :context], patch_size)),
        padding_mask=_compact(pad_array(present[..., :context], patch_size)),
        id_mask=_compact(pad_id_mask(torch.zeros_like(times, dtype=torch.int), patch_size)),
        timestamp_seconds=_compact(pad_array(times, patch_size)),
        time_interval_seconds=torch.full(values.shape[:2], columns.interval_seconds, dtype=torch.int),
        truth=_compact(given[..., context:]),
    )
    return series, present[..., context:]


def _numbers(columns: CsvColumns) -> Tensor:
    return torch.tensor([[math.nan if v is None else v for v in column] for column in columns.values])


def _csv_window(csv: CsvSeries, length: int, batch: int, variates: int) -> tuple[Tensor, Tensor, int, int]:
    """The newest `length` rows for the first batch entry, and windows moved back by one row each for the others."""
    columns = read_csv(csv)
    rows = len(columns.timestamps)
    check_rows(csv, columns, length + batch - 1)
    numbers = _numbers(columns)[torch.arange(variates) % len(columns.values)]
    windows = torch.stack([numbers[:, rows - length - shift : rows - shift] for shift in range(batch)])
    present = ~windows.isnan()
    return torch.nan_to_num(windows), present, columns.timestamps[rows - length], columns.interval_seconds
