"""Recompile: what the compiler does while lengths, batches and series change, in a process that starts cold."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import torch

from toto_compat.cell.live import CompilerWatch
from toto_compat.cell.process_tree import watching_the_tree
from toto_compat.cell.session import Session
from toto_compat.cell.step_operations import (
    StepOperations,
    active_share,
    active_shares,
    count_operations,
    count_unobserved,
)
from toto_compat.cell.suites.recompile_figures import (
    ActiveShares,
    ForecastTaken,
    RefusedForecast,
    has_settled,
    recompile_evidence,
    unannounced_figures,
)
from toto_compat.cell.suites.recompile_mishaps import befall, mishaps
from toto_compat.cell.suites.recompile_plan import (
    PlannedForecast,
    Stage,
    other_batch,
    plan_forecasts,
    plan_unannounced,
    profiled_forecasts,
)
from toto_compat.cell.suites.recompile_series import OtherSeries, plan_other_series
from toto_compat.cell.trial import (
    UPSTREAM,
    CandidateError,
    Trial,
    blaming_the_candidate,
    free_memory,
    synchronise,
    telling_line,
)
from toto_compat.contract.demands import broken_demand
from toto_compat.contract.request import CacheRequest, Demand, Workload, patches
from toto_compat.contract.result import Figure, SuiteEvidence
from toto_compat.contract.suites import Suite
from toto_compat.model.bound import BoundModel
from toto_compat.model.series import Series

# What a forecast's operations depend on: whether it is sampled, and whether it has decode steps. Not on the batch.
Kind = tuple[bool, bool]


@dataclass(frozen=True)
class EagerOperations:
    """Holds what eager does: by kind of forecast a step -> its operations; and of forecasts that nobody observed."""

    by_step: Mapping[Kind, Mapping[int, StepOperations]]
    unobserved: Mapping[str, StepOperations]


def run_recompile(session: Session) -> SuiteEvidence:
    """Watch the compiler and the process tree while the planned forecasts are taken, cold."""
    # first, while no cache of a user was imported: it could make upstream's steps look longer than they are
    upstream = eager_operations(session.trial, UPSTREAM)
    wanted = session.profile.unannounced_shapes
    return count_compilations(
        session.trial, lambda: session.candidate, upstream, session.demands, unannounced_shapes=wanted
    )


@dataclass
class Seen:
    """Holds what was seen so far, and turns it into evidence."""

    announced: int  # batches that the cache was told of
    demands: Sequence[Demand] = ()
    taken: list[ForecastTaken] = field(default_factory=list)
    shares: ActiveShares = field(default_factory=ActiveShares)
    other_series: list[ForecastTaken] = field(default_factory=list)
    at_the_end: list[ForecastTaken] = field(default_factory=list)
    unannounced: list[ForecastTaken | RefusedForecast] = field(default_factory=list)
    mishaps: dict[str, int] = field(default_factory=dict)

    @property
    def evidence(self) -> SuiteEvidence:
        return recompile_evidence(
            self.taken,
            self.shares,
            announced=self.announced,
            other_series=self.other_series,
            at_the_end=self.at_the_end,
            unannounced=self.unannounced,
            mishaps=self.mishaps,
        )

    @property
    def has_settled(self) -> bool:
        return has_settled([*self.taken, *self.other_series])

    @property
    def why_it_cannot_pass(self) -> str:
        broken = broken_demand(self.demands, {Suite.RECOMPILE: self.evidence})
        return f"{broken}, so that this cell cannot PASS" if broken else ""

    @property
    def why_no_more(self) -> str:
        """Say why the rest would only show the same again, seconds at a time; '' if it would not."""
        if self.demands:
            return self.why_it_cannot_pass
        return "" if self.has_settled else "announced shapes compile after the warm-up, or dynamo gave a function up"


def count_compilations(
    trial: Trial,
    make_candidate: Callable[[], BoundModel],
    upstream: EagerOperations,
    demands: Sequence[Demand] = (),
    *,
    unannounced_shapes: bool = True,
) -> SuiteEvidence:
    """Bind the candidate, take the planned forecasts one by one, and count for each what was compiled; then series of
    other kinds, and all that happens to a service. Look what is in compiled code before that and after it."""
    seen = Seen(len(trial.batch_sizes), demands)
    with CompilerWatch("bind") as watch:
        with watching_the_tree() as tree:
            start = time.perf_counter()
            candidate = make_candidate()
            bound = PlannedForecast(0, 0, 0, stage=Stage.BIND)
            seen.taken = [ForecastTaken(bound, time.perf_counter() - start, watch.phases[0])]
            seen.taken += [take_planned(trial, candidate, planned, watch) for planned in plan_forecasts(trial.workload)]
        first, again = look(trial, candidate, watch)
        seen.taken += again
        eager = eager_sides(trial, upstream, watch)
        seen.shares = shares_of(trial, eager, first)
        left_out = seen.why_no_more
        if not left_out:
            for forecast in take_other_series(trial, candidate, watch):
                seen.other_series.append(forecast)
                if forecast.phase.compile_starts and (left_out := seen.why_no_more):
                    break
        if seen.has_settled and unannounced_shapes and not seen.why_it_cannot_pass:
            seen.unannounced = list(take_unannounced(trial, candidate, watch))
        if not left_out:
            watch.mark("mishaps")
            for mishap in mishaps(trial, candidate, other_batch(trial.workload, trial.batch_sizes)):
                ended = befall(trial, mishap)
                seen.mishaps[ended or "nothing raised"] = seen.mishaps.get(ended or "nothing raised", 0) + 1
            for last, again in look_at_both_ends(trial, candidate, watch):
                seen.at_the_end += again
                seen.shares = seen.shares.and_of(shares_of(trial, eager, last))
        evidence = seen.evidence
        if left_out:
            rest = f"series of other kinds and what happens to a service: {left_out}"
            evidence = evidence.model_copy(update={"skipped": rest})
        if not unannounced_shapes:
            evidence = without_unannounced(evidence, "the profile leaves them out")
        elif seen.has_settled and (why := seen.why_it_cannot_pass) and not seen.unannounced:
            evidence = without_unannounced(evidence, why)
            skipped = f"shapes that nobody announced, {evidence.skipped or why}"
            evidence = evidence.model_copy(update={"skipped": skipped})
    peak = Figure(
        value=tree.peak, unit="bytes", method="largest resident sum over the process tree during the cold compile"
    )
    return evidence.model_copy(update={"figures": {**evidence.figures, "compile_peak_bytes": peak}})


def without_unannounced(evidence: SuiteEvidence, why: str) -> SuiteEvidence:
    """Say why shapes that nobody announced were not tried."""
    missing = {"missing": f"not tried: {why}"}
    told = {name: figure.model_copy(update=missing) for name, figure in unannounced_figures(()).items()}
    return evidence.model_copy(update={"figures": {**evidence.figures, **told}})


def take_planned(trial: Trial, candidate: BoundModel, planned: PlannedForecast, watch: CompilerWatch) -> ForecastTaken:
    """Take one forecast in a phase of its own."""
    series = series_of(trial, candidate, planned)
    phase = watch.mark(planned.name)
    with blaming_the_candidate():
        seconds = take_forecast(trial, candidate, planned, series)
    trial.quiet.give_way()
    return ForecastTaken(planned, seconds, phase)


def take_other_series(trial: Trial, candidate: BoundModel, watch: CompilerWatch) -> Iterator[ForecastTaken]:
    """Take series of other kinds at shapes that were met. What eager itself cannot forecast may be refused."""
    for other in plan_other_series(trial.workload):
        series = other.change(series_of(trial, candidate, other.plan), candidate.patch_size)
        phase = watch.mark(other.name)
        start = time.perf_counter()
        if other.seed is not None:
            torch.manual_seed(other.seed)
        try:
            with blaming_the_candidate():
                take_forecast(trial, candidate, other.plan, series, seeded=False)
        except CandidateError:
            if upstream_answers(trial, other, series):
                raise
        yield ForecastTaken(other.plan, time.perf_counter() - start, phase)
        trial.quiet.give_way()


def upstream_answers(trial: Trial, other: OtherSeries, series: Series) -> bool:
    """Say whether upstream eager has a finite forecast for this."""
    model = trial.eager()
    with suppress(ValueError, RuntimeError, AssertionError):
        if other.plan.samples:
            drawn = {"num_samples": other.plan.samples, "samples_per_batch": other.plan.per_batch}
            return bool(model.generate_samples(series, other.plan.horizon, **drawn).isfinite().all())
        return bool(model.generate_mean(series, other.plan.horizon).isfinite().all())
    return False


def take_unannounced(
    trial: Trial, candidate: BoundModel, watch: CompilerWatch
) -> Iterator[ForecastTaken | RefusedForecast]:
    """Take what nobody announced. A cache may refuse it: whatever is raised here takes nothing from the rest."""
    for planned in plan_unannounced(trial.workload, trial.batch_sizes):
        try:
            yield take_planned(trial, candidate, planned, watch)
        except Exception as error:
            yield RefusedForecast(planned, telling_line(error.cause if isinstance(error, CandidateError) else error))


def kind_of(workload: Workload, planned: PlannedForecast) -> Kind:
    return bool(planned.samples), planned.has_decode_steps(workload.patch_size)


def eager_operations(trial: Trial, cache: CacheRequest) -> EagerOperations:
    """Count what eager does, on one forecast of each kind."""
    model = trial.eager(cache)
    counted: dict[Kind, Mapping[int, StepOperations]] = {}
    for planned in profiled_forecasts(trial.workload):
        kind = kind_of(trial.workload, planned)
        if kind in counted:
            continue
        forecast = partial(take_forecast, trial, model, planned, series_of(trial, model, planned))
        forecast()
        counted[kind] = count_operations(model, forecast)
        trial.quiet.give_way()
    unobserved = unobserved_operations(trial, model)
    del model
    free_memory(trial.device)
    return EagerOperations(counted, unobserved)


def unobserved_operations(trial: Trial, model: BoundModel, context: int | None = None) -> dict[str, StepOperations]:
    """Count what a model does while nobody observes: whole forecasts of one patch, where the workload has those, and
    the decode steps of the shortest horizon that has any, which are the whole less a forecast of one patch."""
    workload = trial.workload
    counted: dict[str, StepOperations] = {}

    def count(horizon: int, sampled: int = 0) -> StepOperations:
        planned = PlannedForecast(context or workload.context[0], horizon, workload.batches[0], sampled, sampled)
        forecast = partial(take_forecast, trial, model, planned, series_of(trial, model, planned))
        forecast()
        operations = count_unobserved(forecast)
        trial.quiet.give_way()
        return operations

    if workload.has_one_patch_forecasts:
        horizon = next(one for one in workload.horizon if one <= workload.patch_size)
        counted["mean of one patch"] = count(horizon)
        if workload.sampling:
            counted["samples of one patch"] = count(horizon, workload.samples_per_batch)
    decoding = min((one for one in workload.horizon if one > workload.patch_size), default=None)
    if decoding is not None:
        counted["decode steps"] = _less(count(decoding), count(workload.patch_size))
        if workload.sampling:
            fewest = min(per_batch for _, per_batch in workload.sampled)
            counted["decode steps of samples"] = _less(count(decoding, fewest), count(workload.patch_size, fewest))
    return counted


def _less(whole: StepOperations, first: StepOperations) -> StepOperations:
    return StepOperations(whole.outside - first.outside, whole.inside - first.inside, whole.compiled_calls)


@dataclass(frozen=True)
class Look:
    """Holds the operations that a candidate's forecasts had outside of compiled code and in it."""

    by_forecast: Mapping[PlannedForecast, Mapping[int, StepOperations]]
    unobserved: Mapping[str, StepOperations]
    when: str = ""


def measure_active_shares(
    trial: Trial, candidate: BoundModel, upstream: EagerOperations, watch: CompilerWatch
) -> tuple[ActiveShares, list[ForecastTaken]]:
    """Count the operations that the candidate leaves outside compiled code against those of eager, once."""
    first, taken = look(trial, candidate, watch)
    return shares_of(trial, eager_sides(trial, upstream, watch), first), taken


def look(
    trial: Trial, candidate: BoundModel, watch: CompilerWatch, *, context: int | None = None, when: str = ""
) -> tuple[Look, list[ForecastTaken]]:
    """Count the operations of forecasts of every kind, at a length in between or at the one that is given."""
    taken: list[ForecastTaken] = []
    compiled: dict[PlannedForecast, dict[int, StepOperations]] = {}
    for planned in profiled_forecasts(trial.workload, context):
        series = series_of(trial, candidate, planned)
        phase = watch.mark(f"{planned.name}, profiled{when}")
        start = time.perf_counter()
        with blaming_the_candidate():
            compiled[planned] = count_operations(candidate, partial(take_forecast, trial, candidate, planned, series))
        taken.append(ForecastTaken(planned, time.perf_counter() - start, phase))
        trial.quiet.give_way()
    watch.mark(f"nobody observes{when}")
    with blaming_the_candidate():
        unobserved = unobserved_operations(trial, candidate, context)
    return Look(compiled, unobserved, when), taken


def look_at_both_ends(
    trial: Trial, candidate: BoundModel, watch: CompilerWatch
) -> Iterator[tuple[Look, list[ForecastTaken]]]:
    """Look once more, at the shortest and at the longest context."""
    for context in dict.fromkeys((trial.workload.context[0], trial.workload.context[-1])):
        yield look(trial, candidate, watch, context=context, when=f", at the end, context {context}")


def eager_sides(trial: Trial, upstream: EagerOperations, watch: CompilerWatch) -> list[EagerOperations]:
    """Count what eager does: the same cache and upstream, of which the one that has fewer in a step is the measure. A
    cache cannot look better by a wasteful eager side."""
    watch.mark("eager")
    with blaming_the_candidate():
        return [upstream] if trial.cache == UPSTREAM else [upstream, eager_operations(trial, trial.cache)]


def shares_of(trial: Trial, eager: Sequence[EagerOperations], seen: Look) -> ActiveShares:
    """Hold what was seen against eager."""
    return ActiveShares(
        by_forecast={
            f"{planned.name}{seen.when}": active_shares(
                operations, *(one.by_step[kind_of(trial.workload, planned)] for one in eager)
            )
            for planned, operations in seen.by_forecast.items()
        },
        of_one_patch=frozenset(
            f"{planned.name}{seen.when}"
            for planned in seen.by_forecast
            if not planned.has_decode_steps(trial.workload.patch_size)
        ),
        unobserved={
            f"{what}{seen.when}": active_share(operations, *(one.unobserved[what] for one in eager))
            for what, operations in seen.unobserved.items()
        },
    )


def series_of(trial: Trial, model: BoundModel, planned: PlannedForecast) -> Series:
    context, horizon = (patches(points, model.patch_size) for points in (planned.context, planned.horizon))
    return trial.series(model.patch_size, context, horizon, batch=planned.batch, variates=planned.variates)


def take_forecast(
    trial: Trial, model: BoundModel, planned: PlannedForecast, series: Series, *, seeded: bool = True
) -> float:
    """Seconds of one forecast, compilation included."""
    synchronise(trial.device)
    start = time.perf_counter()
    if planned.samples:
        if seeded:
            torch.manual_seed(trial.workload.seed)
        model.generate_samples(
            series, planned.horizon, num_samples=planned.samples, samples_per_batch=planned.per_batch
        )
    else:
        model.generate_mean(series, planned.horizon)
    synchronise(trial.device)
    return time.perf_counter() - start
