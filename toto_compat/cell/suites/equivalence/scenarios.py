"""What is forecast to compare: every shape of the workload, shapes past it, and series of all kinds at one of them."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from toto.data.util.dataset import MaskedTimeseries
from toto.inference.forecaster import TotoForecaster

from toto_compat.cell.session import Session
from toto_compat.cell.suites.equivalence.kinds import KINDS, NAN_UNDER_THE_MASK, NOT_SAMPLED, OF_SEVERAL_ROWS, SIZES
from toto_compat.cell.trial import Trial
from toto_compat.contract.request import Workload, patches
from toto_compat.model.bound import BoundModel
from toto_compat.model.series import Series

SAMPLES_PER_BATCH: int = inspect.signature(TotoForecaster.forecast).parameters["samples_per_batch"].default
# Of one patch: with what else is drawn 250,000 points of `tiny`'s, of which a spread that is 2 % off is seen.
MANY_ROWS = 4096
MOST_ROUNDS = 256  # that they are drawn in: fewer rows where samples are drawn one by one
ROWS_OF_LOW_PRECISION = 256  # where parameters are right to two or three digits, more would see their rounding
_BETWEEN_SEEDS = 1000
_SAMPLES_OF_OTHER_WEIGHTS = 16
_MOST_CONTEXTS = 8  # of one patch after the other that a forecast of one patch is tried after
_MOST_ROWS_ON_MORE_THREADS = 128
_MOST_SLOW_ROWS = 128
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
    asked: int | None = None  # points of the mean and of samples, where they are no whole patches
    past_the_announced: bool = False
    more_threads: bool = False
    other_weights: bool = False  # of a second model in the same process
    through_forecast: bool = False  # by toto-ts's `forecast()`, as a user calls it

    def points(self, patch_size: int) -> int:
        """How many points are forecast: the last patch may be asked for in part."""
        return self.asked or self.horizon * patch_size

    @property
    def may_lack_a_reference(self) -> bool:
        """Say whether upstream eager need not be finite here: of odd values it is asked only what it can answer, and
        weights that nobody trained may overflow in half precision."""
        return self.kind in KINDS or self.other_weights

    @property
    def may_be_refused(self) -> bool:
        """Say whether an error is an answer: nobody announced that shape, or eager itself refuses that series."""
        return self.past_the_announced or self.kind == NAN_UNDER_THE_MASK


@dataclass(frozen=True)
class Drawing:
    """Samples of one scenario: how many, in rounds of how many, under how many seeds."""

    scenario: Scenario
    samples: int
    per_batch: int
    times: int = 1
    first_seed: int = 0
    judged_rows: int = 64  # of each seed, where eager must be asked for every one
    to_see_little: bool = False  # so many that a spread a few hundredths off is seen

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(self.first_seed + number for number in range(self.times))


def scenarios_of(workload: Workload, sampled_rows: tuple[int, ...] = ()) -> tuple[Scenario, ...]:
    """Every context length at the workload's own shape, mixes of batch, variates and id groups, then the kinds.

    The mixes are short, and in an order in which one size changes at a time: the compiler makes it dynamic then, and
    the shapes after it cost no compilation. `sampled_rows` are mixes too: the parameters that samples are drawn from
    are compared at no other place.
    """
    own_shape = (workload.batch, workload.variates, workload.groups)
    lengths = [
        Scenario(f"context {context}", context, _horizon_after(workload, context), *own_shape)
        for context in workload.context_patches
    ]
    shortest = workload.context_patches[0]
    horizon = _horizon_after(workload, shortest)
    # where a forecast is one patch, a decode step is enough: hundreds of rows take minutes otherwise
    mixed = min(horizon, 2) if workload.has_one_patch_forecasts else horizon
    sizes = [(rows, workload.variates, workload.groups) for rows in sampled_rows if rows > _KIND_SHAPE[0]]
    mixes = [
        Scenario(f"batch {batch}, {variates} variates in {groups}", shortest, mixed, batch, variates, groups)
        for batch, variates, groups in (*sizes, _KIND_SHAPE, (2, 3, 1))
    ]
    announced, longest = workload.context_patches[-1] + max(workload.horizon_patches), workload.context_patches[-1]
    largest = (max(workload.batches), workload.variates, workload.groups)
    lengths.append(Scenario("every announced slot", longest, announced - longest, *largest))
    others = dict.fromkeys(other for other in (*workload.horizon_patches, 1) if other != horizon)
    lengths += [Scenario(f"horizon {other}", shortest, other, *own_shape) for other in others]
    lengths += parts_of_patches(workload)
    kinds = [Scenario(kind.replace("_", " "), shortest, min(3, horizon), *_KIND_SHAPE, kind=kind) for kind in KINDS]
    # once more at the announced shape: what was made for it need not be what answers any other
    kinds += [
        Scenario(f"{kind.replace('_', ' ')}, as announced", shortest, min(3, horizon), *own_shape, kind=kind)
        for kind in KINDS
        if kind != OF_SEVERAL_ROWS and (kind != SIZES or workload.batch * workload.variates > 1)
    ]
    return (*lengths, *mixes, *kinds)


def parts_of_patches(workload: Workload) -> list[Scenario]:
    """Every horizon that is no whole patches; one of a single patch after every context from the shortest to the
    longest, since what was made for the longest may answer for all of them."""
    own_shape = (workload.batch, workload.variates, workload.groups)
    first, *_, last = workload.context_patches
    parts = [points for points in dict.fromkeys(workload.horizon) if points % workload.patch_size]
    after = {points: [first] for points in parts}
    one_patch = next((points for points in workload.horizon if points <= workload.patch_size), None)
    if one_patch is not None:
        after[one_patch] = list(range(first, last + 1))[:_MOST_CONTEXTS]
        after[one_patch] += [last] if last not in after[one_patch] else []
    return [
        Scenario(
            f"{points} points after context {context}",
            context,
            patches(points, workload.patch_size),
            *own_shape,
            asked=points,
        )
        for points, contexts in after.items()
        for context in contexts
    ]


def _horizon_after(workload: Workload, context: int) -> int:
    """A prefill and at least eight decode steps, as far as that many were announced."""
    announced = workload.context_patches[-1] + max(workload.horizon_patches)
    return min(max(9, workload.horizon_patches[0]), announced - context)


def pair_of(workload: Workload) -> tuple[Scenario, Scenario]:
    """Two series of one shape: the first of `scenarios_of`, and another one that must not get its forecast."""
    first = scenarios_of(workload)[0]
    return first, replace(first, name=f"{first.name}, another series", seed_offset=1)


def through_forecast(workload: Workload) -> Scenario:
    """What a user calls: a series and a horizon that are no whole patches, everything else left at its default."""
    shape = (workload.batch, workload.variates, workload.groups)
    horizon = min(3, _horizon_after(workload, workload.context_patches[0]))
    return Scenario("forecast()", workload.context_patches[0], horizon, *shape, through_forecast=True)


def through_forecast_of_one_patch(workload: Workload) -> tuple[Scenario, ...]:
    """The same of one patch, where the workload has such forecasts."""
    shape = (workload.batch, workload.variates, workload.groups)
    one = Scenario("forecast() of a patch", workload.context_patches[-1], 1, *shape, through_forecast=True)
    return (one,) if workload.has_one_patch_forecasts else ()


def past_the_announced(trial: Trial) -> tuple[Scenario, ...]:
    """Longer than what was announced, however it is rounded up: a context past the next power of two, a long decode.

    The context comes first: buffers that were made for it hold the other one too.
    """
    workload, announced = trial.workload, trial.max_patches
    shape = (workload.batch, workload.variates, workload.groups)
    longest = workload.context_patches[-1]
    context = (1 << announced.bit_length()) + 1
    horizon = announced - longest + 17
    return (
        Scenario("context past the announced", context, 2, *shape, past_the_announced=True),
        Scenario("horizon past the announced", longest, horizon, *shape, past_the_announced=True),
    )


def on_more_threads(trial: Trial) -> Scenario:
    """As many rows as there are, so that there is work to share."""
    workload = trial.workload
    rows = min(max(trial.batch_sizes), _MOST_ROWS_ON_MORE_THREADS)
    shape = (rows, workload.variates, workload.groups)
    horizon = min(3, _horizon_after(workload, workload.context_patches[0]))
    return Scenario("on one thread more", workload.context_patches[0], horizon, *shape, more_threads=True)


def of_other_weights(workload: Workload) -> Scenario:
    """The mean of a second model, which is asked for samples first."""
    shape = (workload.batch, workload.variates, workload.groups)
    horizon = min(3, _horizon_after(workload, workload.context_patches[0]))
    return Scenario("other weights", workload.context_patches[0], horizon, *shape, other_weights=True)


def drawing_of_other_weights(trial: Trial) -> tuple[Drawing, ...]:
    """Few samples of the second model, its first forecast: those of other weights are seen in hundreds of points."""
    workload = trial.workload
    if not workload.sampling:
        return ()
    at_once, shape = workload.samples_per_batch, (workload.batch, workload.variates, workload.groups)
    horizon = min(2, max(workload.horizon_patches))
    scenario = Scenario("samples of other weights", workload.context_patches[0], horizon, *shape, other_weights=True)
    rounds = -(-_SAMPLES_OF_OTHER_WEIGHTS // at_once)
    return (Drawing(scenario, rounds * at_once, at_once, first_seed=workload.seed - _BETWEEN_SEEDS),)


def all_scenarios(trial: Trial) -> tuple[Scenario, ...]:
    """All that is compared in a cell, in the order in which it is asked.

    More threads come last: dynamo compiles anew for them, and what is asked afterwards might meet its limit.
    """
    workload = trial.workload
    first, *others = scenarios_of(workload, sampled_rows(trial))
    return (
        first,
        pair_of(workload)[1],
        *others,
        through_forecast(workload),
        *through_forecast_of_one_patch(workload),
        *past_the_announced(trial),
        on_more_threads(trial),
        of_other_weights(workload),
    )


@dataclass(frozen=True)
class Asked:
    """Holds what a candidate is asked, in order; `left_out` says why that is not all there is."""

    scenarios: tuple[Scenario, ...]
    drawings: tuple[Drawing, ...]
    second_model: tuple[Drawing, ...] = ()  # drawn from it before its mean
    left_out: str = ""


def what_is_asked(session: Session) -> Asked:
    """Everything; of a cell that cannot PASS only shapes that were announced, and no more samples than are asked for.

    Each other shape, and another number of threads, costs a cache that recompiles the whole model once more, and could
    only say again what its row says already.
    """
    trial = session.trial
    scenarios, drawings = all_scenarios(trial), drawings_of(trial, session.profile.iterations)
    if not (broken := session.why_it_cannot_pass()):
        return Asked(scenarios, drawings, drawing_of_other_weights(trial))
    return Asked(
        tuple(one for one in scenarios if was_announced(trial, one)),
        tuple(
            one
            for one in drawings
            if not one.to_see_little and was_announced(trial, one.scenario, rows_for_each=one.per_batch)
        ),
        left_out=f"shapes and threads that nobody announced, many samples, a second model: {broken}, so that this "
        "cell cannot PASS",
    )


def was_announced(trial: Trial, scenario: Scenario, *, rows_for_each: int = 1) -> bool:
    """Say whether the workload asks for this shape itself, so many rows at once for each series."""
    workload = trial.workload
    if scenario.past_the_announced or scenario.more_threads or scenario.other_weights:
        return False
    if (scenario.variates, scenario.groups) != (workload.variates, workload.groups):
        return False
    sampled = [workload.batch * per_batch for _, per_batch in workload.sampled]
    return scenario.batch * rows_for_each in (workload.batch, *sampled, *trial.batch_sizes)


def sampled_rows(trial: Trial) -> tuple[int, ...]:
    """Return every number of rows that a forecast or its samples are computed in.

    In half precision a CPU draws nothing, and multiplies at a quarter of the speed: there the largest are left out.
    """
    own = trial.workload.batch
    sampled = [own * per_batch for _, per_batch in trial.workload.sampled]
    rows = dict.fromkeys((*trial.batch_sizes, *sampled, own * SAMPLES_PER_BATCH))
    slow = trial.workload.in_half_precision and trial.device == "cpu"
    return tuple(one for one in rows if not slow or one <= _MOST_SLOW_ROWS)


def drawings_of(trial: Trial, rounds: int) -> tuple[Drawing, ...]:
    """All samples that are judged: both series of the pair, several series at once, and through `forecast()`.

    Several series share the rows that were announced, or have the kinds' shape, so that nothing compiles anew. Many
    samples cost little and show a spread that is a few hundredths off: the first patch's, and that of decode steps.
    Each drawing has seeds of its own: two of one seed would be the same draws twice.
    """
    workload = trial.workload
    if not workload.sampling:
        return ()
    shortest = workload.context_patches[0]
    shared = max(1, workload.batch * workload.samples_per_batch // 2)
    own_shape = (workload.batch, workload.variates, workload.groups)
    at_once, most = workload.samples_per_batch, max(workload.horizon_patches)
    many = Scenario("many samples of a patch", shortest, 1, *own_shape)
    few_patches = Scenario("many samples of three patches", shortest, min(3, most), *own_shape)
    long = Scenario("samples after the longest context", workload.context_patches[-1], min(3, most), *own_shape)
    two = Scenario("samples of 2 series", shortest, min(5, most), 2, workload.variates, workload.groups)
    three = Scenario("samples of 3 series, 3 variates in 2", shortest, min(3, most), *_KIND_SHAPE)
    rows = min(MANY_ROWS, ROWS_OF_LOW_PRECISION) if workload.in_half_precision else MANY_ROWS
    by_default = (through_forecast(workload), *through_forecast_of_one_patch(workload))
    drawings = (
        *(Drawing(one, workload.samples, at_once, max(2, rounds)) for one in pair_of(workload)),
        _many(Drawing(many, at_once, at_once), rows, MOST_ROUNDS),
        *([_many(Drawing(few_patches, at_once, at_once), rows // 4, MOST_ROUNDS // 4)] if most > 1 else []),
        Drawing(long, 2 * at_once, at_once),
        Drawing(two, 2 * shared, shared),
        Drawing(three, 8, 1),
        *(Drawing(one, 3 * SAMPLES_PER_BATCH, SAMPLES_PER_BATCH) for one in by_default),
        *every_sampling(workload),
        *(
            Drawing(
                Scenario(f"samples, {kind.replace('_', ' ')}", shortest, min(2, most), *_KIND_SHAPE, kind=kind), 16, 1
            )
            for kind in KINDS
            if kind not in NOT_SAMPLED
        ),
    )
    return tuple(
        replace(drawing, first_seed=workload.seed + _BETWEEN_SEEDS * number) for number, drawing in enumerate(drawings)
    )


def _many(drawing: Drawing, rows: int, most_rounds: int) -> Drawing:
    """As many rounds as so many rows of one variate take, and no more than `most_rounds`."""
    a_round = drawing.per_batch * drawing.scenario.batch * drawing.scenario.variates
    rounds = max(2, min(most_rounds, -(-rows // a_round)))
    return replace(drawing, samples=rounds * drawing.per_batch, judged_rows=rows, to_see_little=True)


def every_sampling(workload: Workload) -> tuple[Drawing, ...]:
    """Every number of samples and batch size as the workload asks for it, if it asks for several or for one patch."""
    if len(workload.sampling) == 1 and not workload.has_one_patch_forecasts:
        return ()
    own_shape = (workload.batch, workload.variates, workload.groups)
    shortest, longest = workload.context_patches[0], workload.context_patches[-1]
    horizon = patches(workload.horizon[0], workload.patch_size)
    drawings = []
    for samples, per_batch in workload.sampled:
        name = f"{samples} samples in batches of {per_batch}"
        as_asked = Scenario(name, longest, horizon, *own_shape, asked=workload.horizon[0])
        drawings.append(Drawing(as_asked, samples, per_batch))
        if horizon == 1 and max(workload.horizon_patches) > 1:
            further = Scenario(f"{name}, 2 patches", shortest, 2, *own_shape)
            drawings.append(Drawing(further, min(samples, 2 * per_batch), per_batch))
    return tuple(drawings)


def series_of(trial: Trial, scenario: Scenario, patch_size: int) -> Series:
    """The scenario's series on the trial's device: the same numbers in every process."""
    workload = trial.workload
    series = trial.series(
        patch_size,
        min(scenario.context, workload.context_patches[-1]),  # a user's CSV may have no more rows
        min(scenario.horizon, max(9, *workload.horizon_patches)),
        batch=scenario.batch,
        variates=scenario.variates,
        groups=scenario.groups,
        seed_offset=scenario.seed_offset,
    )
    if scenario.context > workload.context_patches[-1]:
        series = _repeated(series, scenario.context * patch_size)
    if scenario.through_forecast:
        series = _beginning_in_mid_patch(series, patch_size)
    return KINDS[scenario.kind](series, patch_size) if scenario.kind in KINDS else series


def as_a_user_gives_it(series: Series, patch_size: int) -> MaskedTimeseries:
    """The series of a `through_forecast` scenario without the half patch that `forecast()` pads it with."""
    shown = slice(patch_size // 2, None)
    return MaskedTimeseries(
        series.inputs[..., shown],
        series.padding_mask[..., shown],
        series.id_mask[..., shown],
        series.timestamp_seconds[..., shown],
        series.time_interval_seconds,
    )


def steps_a_user_asks_for(scenario: Scenario, patch_size: int) -> int:
    return scenario.horizon * patch_size - patch_size // 2


@contextmanager
def threads_of(scenario: Scenario) -> Iterator[None]:
    """Forecast with the scenario's number of threads; a number that somebody else set meanwhile is left to be seen."""
    own = torch.get_num_threads()
    wanted = own + 1 if scenario.more_threads else own
    torch.set_num_threads(wanted)
    try:
        yield
    finally:
        if torch.get_num_threads() == wanted:
            torch.set_num_threads(own)


def with_zeros_under_the_mask(series: Series) -> Series:
    return replace(series, inputs=torch.where(series.padding_mask, series.inputs, 0.0))


def not_masked(series: Series, patch_size: int) -> dict[str, Series]:
    """Series with NaN where the mask says that there are values: all of them, and one in the newest patch of every
    row's first variate. Upstream eager raises on both."""
    there = torch.ones_like(series.padding_mask)
    inputs, mask = series.inputs.clone(), series.padding_mask.clone()
    inputs[:, 0, -patch_size // 2], mask[:, 0, -patch_size // 2] = torch.nan, True
    return {
        "nothing but NaN, not masked": replace(
            series, inputs=torch.full_like(series.inputs, torch.nan), padding_mask=there
        ),
        "one NaN, not masked": replace(series, inputs=inputs, padding_mask=mask),
    }


def asked_of_nan(trial: Trial, series: Series, patch_size: int) -> dict[str, Callable[[BoundModel], Tensor]]:
    """What is asked of such a series: means, and samples on a CPU. A GPU may end the process where a number is drawn
    with a probability that is none."""
    workload = trial.workload
    steps, at_once = min(2, max(workload.horizon_patches)) * patch_size, workload.samples_per_batch
    asked: dict[str, Callable[[BoundModel], Tensor]] = {"mean": lambda model: model.generate_mean(series, steps)}
    if workload.sampling and trial.device == "cpu":
        asked["samples"] = lambda model: model.generate_samples(
            series, steps, num_samples=at_once, samples_per_batch=at_once
        )
    return asked


def _repeated(series: Series, steps: int) -> Series:
    """A longer context with the same values again and again."""
    times = -(-steps // series.inputs.shape[-1])
    ago = torch.arange(steps - 1, -1, -1, device=series.inputs.device)
    return replace(
        series,
        inputs=series.inputs.repeat(1, 1, times)[..., -steps:].contiguous(),
        padding_mask=series.padding_mask.repeat(1, 1, times)[..., -steps:].contiguous(),
        id_mask=series.id_mask.repeat(1, 1, times)[..., -steps:].contiguous(),
        timestamp_seconds=series.timestamp_seconds[..., -1:] - series.time_interval_seconds.unsqueeze(-1) * ago,
    )


def _beginning_in_mid_patch(series: Series, patch_size: int) -> Series:
    mask, inputs = series.padding_mask.clone(), series.inputs.clone()
    mask[..., : patch_size // 2] = False
    inputs[..., : patch_size // 2] = 0.0
    return replace(series, inputs=inputs, padding_mask=mask)
