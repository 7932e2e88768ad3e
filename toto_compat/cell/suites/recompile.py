"""Recompile: what the compiler does while lengths, horizons and batches change, in a process that starts cold."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from toto_compat.cell.suites.recompile_plan import (
    PlannedForecast,
    Stage,
    plan_forecasts,
    plan_unannounced,
    profiled_forecasts,
)
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


def count_compilations(
    trial: Trial,
    make_candidate: Callable[[], BoundModel],
    upstream: EagerOperations,
    demands: Sequence[Demand] = (),
    *,
    unannounced_shapes: bool = True,
) -> SuiteEvidence:
    """Bind the candidate, take the planned forecasts one by one, and count for each what was compiled."""
    with CompilerWatch("bind") as watch:
        with watching_the_tree() as tree:
            start = time.perf_counter()
            candidate = make_candidate()
            bound = PlannedForecast(0, 0, 0, stage=Stage.BIND)
            taken = [ForecastTaken(bound, time.perf_counter() - start, watch.phases[0])]
            taken += [take_planned(trial, candidate, planned, watch) for planned in plan_forecasts(trial.workload)]
        shares, again = measure_active_shares(trial, candidate, upstream, watch)
        taken += again
        announced = len(trial.batch_sizes)
        evidence = recompile_evidence(taken, shares, announced=announced)
        broken = broken_demand(demands, {Suite.RECOMPILE: evidence})
        if has_settled(taken) and unannounced_shapes and not broken:
            beyond = list(take_unannounced(trial, candidate, watch))
            evidence = recompile_evidence(taken, shares, announced=announced, unannounced=beyond)
        elif not unannounced_shapes:
            evidence = without_unannounced(evidence, "the profile leaves them out")
        elif has_settled(taken):
            why = f"{broken}, so that this cell cannot PASS"
            skipped = {"skipped": f"shapes that nobody announced: {why}"}
            evidence = without_unannounced(evidence, why).model_copy(update=skipped)
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


def unobserved_operations(trial: Trial, model: BoundModel) -> dict[str, StepOperations]:
    """Count what a model does while nobody observes: whole forecasts of one patch, where the workload has those, and
    the decode steps of the first horizon that has any, which are the whole less a forecast of one patch."""
    workload = trial.workload
    counted: dict[str, StepOperations] = {}

    def count(horizon: int, sampled: int = 0) -> StepOperations:
        planned = PlannedForecast(workload.context[0], horizon, workload.batches[0], sampled, sampled)
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
    decoding = next((one for one in workload.horizon if one > workload.patch_size), None)
    if decoding is not None:
        whole, first = count(decoding), count(workload.patch_size)
        counted["decode steps"] = StepOperations(
            whole.outside - first.outside, whole.inside - first.inside, whole.compiled_calls
        )
    return counted


def measure_active_shares(
    trial: Trial, candidate: BoundModel, upstream: EagerOperations, watch: CompilerWatch
) -> tuple[ActiveShares, list[ForecastTaken]]:
    """Count the operations that the candidate leaves outside compiled code against those of eager.

    Eager is the same cache and upstream, whichever has fewer in a step: a cache cannot look better by a wasteful eager
    side.
    """
    taken: list[ForecastTaken] = []
    compiled: dict[PlannedForecast, dict[int, StepOperations]] = {}
    for planned in profiled_forecasts(trial.workload):
        series = series_of(trial, candidate, planned)
        phase = watch.mark(f"{planned.name}, profiled")
        start = time.perf_counter()
        with blaming_the_candidate():
            compiled[planned] = count_operations(candidate, partial(take_forecast, trial, candidate, planned, series))
        taken.append(ForecastTaken(planned, time.perf_counter() - start, phase))
        trial.quiet.give_way()
    watch.mark("nobody observes")
    with blaming_the_candidate():
        unobserved = unobserved_operations(trial, candidate)
    watch.mark("eager")
    with blaming_the_candidate():
        eager = [upstream] if trial.cache == UPSTREAM else [upstream, eager_operations(trial, trial.cache)]
    shares = ActiveShares(
        by_forecast={
            planned.name: active_shares(operations, *(one.by_step[kind_of(trial.workload, planned)] for one in eager))
            for planned, operations in compiled.items()
        },
        of_one_patch=frozenset(
            planned.name for planned in compiled if not planned.has_decode_steps(trial.workload.patch_size)
        ),
        unobserved={
            what: active_share(operations, *(one.unobserved[what] for one in eager))
            for what, operations in unobserved.items()
        },
    )
    return shares, taken


def series_of(trial: Trial, model: BoundModel, planned: PlannedForecast) -> Series:
    context, horizon = (patches(points, model.patch_size) for points in (planned.context, planned.horizon))
    return trial.series(model.patch_size, context, horizon, batch=planned.batch, variates=planned.variates)


def take_forecast(trial: Trial, model: BoundModel, planned: PlannedForecast, series: Series) -> float:
    """Seconds of one forecast, compilation included."""
    synchronise(trial.device)
    start = time.perf_counter()
    if planned.samples:
        torch.manual_seed(trial.workload.seed)
        model.generate_samples(
            series, planned.horizon, num_samples=planned.samples, samples_per_batch=planned.per_batch
        )
    else:
        model.generate_mean(series, planned.horizon)
    synchronise(trial.device)
    return time.perf_counter() - start
