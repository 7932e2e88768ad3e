"""Which forecasts the recompile suite takes: a warm-up that meets all that is announced, then what lies in between."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from toto_compat.contract.request import Workload, patches

_PROFILED_PATCHES = 3  # two decode steps: an inner one and the last


class Stage(StrEnum):
    BIND = "bind"  # before any forecast: what is compiled there is compiled all the same
    WARM_UP = "warm-up"  # meets every batch that was announced
    MEASURED = "measured"  # other lengths and horizons, within what was announced
    UNANNOUNCED = "unannounced"  # reported, and no gate looks at it


@dataclass(frozen=True)
class PlannedForecast:
    """One forecast of the run. Lengths in points; `samples` 0 is a mean forecast, `variates` None the workload's."""

    context: int
    horizon: int
    batch: int
    samples: int = 0
    per_batch: int = 0
    variates: int | None = None
    stage: Stage = Stage.MEASURED

    @property
    def shape(self) -> tuple[int, int, int, int, int, int | None]:
        return self.context, self.horizon, self.batch, self.samples, self.per_batch, self.variates

    @property
    def name(self) -> str:
        kind = f"samples {self.samples}/{self.per_batch}" if self.samples else "mean"
        variates = f", variates {self.variates}" if self.variates else ""
        return f"{kind}, context {self.context}, horizon {self.horizon}, batch {self.batch}{variates}"

    def has_decode_steps(self, patch_size: int) -> bool:
        return patches(self.horizon, patch_size) > 1


def plan_forecasts(workload: Workload) -> tuple[PlannedForecast, ...]:
    """The same forecasts for every cache: a warm-up that meets all that is announced, then what lies in between."""
    contexts, batches = workload.context, workload.batches
    ends, batch, met = (contexts[0], contexts[-1]), batches[0], met_in_warm_up(workload)
    warm_up = [
        PlannedForecast(context, horizon, b) for horizon in met for b in batches for context in ends for _ in range(2)
    ]
    warm_up += [
        PlannedForecast(context, horizon, batch, *rounds)
        for horizon in met
        for rounds in rounds_of_samples(workload)
        for context in ends
    ]
    measured = [PlannedForecast(context, met[0], batch) for context in contexts[1:-1]]
    others = [horizon for horizon in workload.horizon if horizon not in met]
    measured += [PlannedForecast(contexts[0], other, batch) for other in others]
    if workload.has_one_patch_forecasts:
        first = rounds_of_samples(workload)[:1]
        measured += [PlannedForecast(contexts[0], other, batch, *rounds) for other in others for rounds in first]
        between = range(contexts[0] + workload.patch_size, contexts[-1], workload.patch_size)
        measured += [PlannedForecast(context, met[0], batch) for context in between[:8] if context not in contexts]
    measured += profiled_forecasts(workload)
    return (*(replace(planned, stage=Stage.WARM_UP) for planned in warm_up), *measured)


def met_in_warm_up(workload: Workload) -> tuple[int, ...]:
    """The first horizon, and the first of the other kind: with decode steps if that has none, without if it has."""
    first, *others = workload.horizon
    one_patch = first <= workload.patch_size
    other = next((horizon for horizon in others if (horizon <= workload.patch_size) is not one_patch), None)
    return (first,) if other is None else (first, other)


def rounds_of_samples(workload: Workload) -> tuple[tuple[int, int], ...]:
    """Samples and batch size of every batch size once; a third round would show what the second one does."""
    rounds = {per_batch: (min(samples, 2 * per_batch), per_batch) for samples, per_batch in workload.sampled[::-1]}
    return tuple(rounds[per_batch] for per_batch in dict.fromkeys(per_batch for _, per_batch in workload.sampled))


def profiled_forecasts(workload: Workload, context: int | None = None) -> list[PlannedForecast]:
    """Every batch and one round of samples at a length in between, unless one is given; of one patch where the
    workload has such forecasts, with decode steps where it has those."""
    contexts, batch = workload.context, workload.batches[0]
    patch_size = workload.patch_size
    between = context or (contexts[0] + contexts[1]) // 2 // patch_size * patch_size
    longest = max(workload.horizon_patches)
    horizons = [next(one for one in workload.horizon if one <= patch_size)] if workload.has_one_patch_forecasts else []
    horizons += [min(_PROFILED_PATCHES, longest) * patch_size] if longest > 1 else []
    sampled = [per_batch for _, per_batch in rounds_of_samples(workload)]
    planned = []
    for horizon in horizons:
        planned += [PlannedForecast(between, horizon, b) for b in workload.batches]
        # a round costs a decode step of so many rows: those of the first samples are enough there
        rows = sampled if horizon <= patch_size else sampled[:1]
        planned += [PlannedForecast(between, horizon, batch, per_batch, per_batch) for per_batch in rows]
    return planned


def plan_unannounced(workload: Workload, announced: Sequence[int]) -> tuple[PlannedForecast, ...]:
    """Another batch, more variates, a longer context, a longer horizon; each twice, the second one is warm."""
    contexts, horizons, batch = workload.context, workload.horizon, workload.batches[0]
    longer = (workload.context_patches[-1] * 3 // 2 + 1) * workload.patch_size
    plans = (
        PlannedForecast(contexts[0], horizons[0], other_batch(workload, announced)),
        PlannedForecast(contexts[0], horizons[0], batch, variates=workload.variates + 1),
        PlannedForecast(longer, horizons[0], batch),
        PlannedForecast(contexts[-1], 2 * max(horizons), batch),
    )
    return tuple(replace(plan, stage=Stage.UNANNOUNCED) for plan in plans for _ in range(2))


def other_batch(workload: Workload, announced: Sequence[int]) -> int:
    """A batch that nobody announced."""
    return next(size for size in range(2 * max(workload.batches), 2**31) if size not in announced)
