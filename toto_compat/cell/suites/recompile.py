"""Recompile: what the compiler does while lengths, horizons and batches change, in a process that starts cold."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import Any

import torch

from toto_compat.cell.live import CompilerWatch, CompileStart, Phase
from toto_compat.cell.process_tree import watching_the_tree
from toto_compat.cell.session import Session
from toto_compat.cell.step_operations import (
    StepOperations,
    active_share,
    active_shares,
    count_operations,
    count_unobserved,
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
from toto_compat.contract.events import Event, EventKind
from toto_compat.contract.request import CacheRequest, Demand, Workload
from toto_compat.contract.result import Figure, Outcome, SuiteEvidence
from toto_compat.contract.suites import Suite
from toto_compat.model.bound import BoundModel
from toto_compat.model.series import Series

METHOD = (
    "the candidate is bound; warm-up: mean forecasts of every announced batch at the smallest and the largest context, "
    "twice each, and sampled ones at both; then lengths and horizons in between, with every batch and sampled; then "
    "shapes that nobody announced; compilations counted where dynamo starts one, reasons from its own loggers"
)
# Evidence is read by people: a cache that recompiles in every step says the same thing a thousand times.
MOST_EVENTS_KEPT = 400


class Stage(StrEnum):
    BIND = "bind"  # before any forecast: what is compiled there is compiled all the same
    WARM_UP = "warm-up"  # meets every batch that was announced
    MEASURED = "measured"  # other lengths and horizons, within what was announced
    UNANNOUNCED = "unannounced"  # reported, and no gate looks at it


@dataclass(frozen=True)
class PlannedForecast:
    """One forecast of the run. Lengths in patches; `samples` 0 is a mean forecast, `variates` None the workload's."""

    context: int
    horizon: int
    batch: int
    samples: int = 0
    variates: int | None = None
    stage: Stage = Stage.MEASURED

    @property
    def shape(self) -> tuple[int, int, int, int, int | None]:
        return self.context, self.horizon, self.batch, self.samples, self.variates

    @property
    def name(self) -> str:
        kind = "samples" if self.samples else "mean"
        variates = f", variates {self.variates}" if self.variates else ""
        return f"{kind}, context {self.context}, horizon {self.horizon}, batch {self.batch}{variates}"


@dataclass(frozen=True)
class ForecastTaken:
    plan: PlannedForecast
    seconds: float
    phase: Phase


@dataclass(frozen=True)
class RefusedForecast:
    """A shape that nobody announced and that could not be forecast: the cache said no, or there is no such series."""

    plan: PlannedForecast
    error: str


@dataclass(frozen=True)
class ActiveShares:
    """Holds which share of each step ran in compiled code, by the forecast's name and the step; 0 is the prefill."""

    by_forecast: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    unobserved: float | None = None  # of all decode steps of the timed forecast, while nobody observes

    def smallest(self, *, prefill: bool) -> float | None:
        """The smallest share of any such step; None if a forecast showed none, which may be where it is smallest."""
        found = [
            min((share for step, share in steps.items() if (step == 0) is prefill), default=None)
            for steps in self.by_forecast.values()
        ]
        shares = [share for share in found if share is not None]
        if not shares or len(shares) < len(found):
            return None
        return min(shares) if prefill or self.unobserved is None else min(*shares, self.unobserved)


def plan_forecasts(workload: Workload) -> tuple[PlannedForecast, ...]:
    """The same forecasts for every cache: a warm-up that meets all that is announced, then what lies in between."""
    contexts, horizons, batches = workload.context_patches, workload.horizon_patches, workload.batches
    ends, horizon, batch = (contexts[0], contexts[-1]), horizons[0], batches[0]
    # a third round of samples would show what the second one does
    samples = min(workload.samples, 2 * workload.samples_per_batch)
    warm_up = [PlannedForecast(context, horizon, b) for b in batches for context in ends for _ in range(2)]
    warm_up += [PlannedForecast(context, horizon, batch, samples) for context in ends]
    measured = [PlannedForecast(context, horizon, batch) for context in contexts[1:-1]]
    measured += [PlannedForecast(contexts[0], other, batch) for other in horizons[1:]]
    measured += profiled_forecasts(workload)
    return (*(replace(planned, stage=Stage.WARM_UP) for planned in warm_up), *measured)


def profiled_forecasts(workload: Workload) -> list[PlannedForecast]:
    """Every batch and one round of samples at a length in between, with two decode steps: an inner one and the last."""
    contexts, horizons, batches = workload.context_patches, workload.horizon_patches, workload.batches
    between = (contexts[0] + contexts[1]) // 2
    horizon = min(3, max(horizons))
    means = [PlannedForecast(between, horizon, batch) for batch in batches]
    return [*means, PlannedForecast(between, horizon, batches[0], workload.samples_per_batch)]


def plan_unannounced(workload: Workload, announced: Sequence[int]) -> tuple[PlannedForecast, ...]:
    """Another batch, more variates, a longer context, a longer horizon; each twice, the second one is warm."""
    contexts, horizons, batch = workload.context_patches, workload.horizon_patches, workload.batches[0]
    other_batch = next(size for size in range(2 * max(workload.batches), 2**31) if size not in announced)
    plans = (
        PlannedForecast(contexts[0], horizons[0], other_batch),
        PlannedForecast(contexts[0], horizons[0], batch, variates=workload.variates + 1),
        PlannedForecast(contexts[-1] + contexts[-1] // 2 + 1, horizons[0], batch),
        PlannedForecast(contexts[-1], 2 * max(horizons), batch),
    )
    return tuple(replace(plan, stage=Stage.UNANNOUNCED) for plan in plans for _ in range(2))


@dataclass(frozen=True)
class EagerOperations:
    """Holds what eager does: a step -> its operations, of a forecast without samples and of one with them."""

    by_step: Mapping[bool, Mapping[int, StepOperations]]
    decode: int  # operations of the timed forecast's decode steps, taken without an observer


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


def has_settled(taken: Sequence[ForecastTaken]) -> bool:
    """Say whether announced shapes compile no more. If they do, others only show the same again, seconds at a time; and
    a function that dynamo gave up compiles nothing any more, whatever comes."""
    late = any(forecast.phase.compile_starts for forecast in after_warm_up(taken))
    return not late and not any(forecast.phase.count(EventKind.RECOMPILE_LIMIT) for forecast in taken)


def after_warm_up(taken: Sequence[ForecastTaken]) -> list[ForecastTaken]:
    return [forecast for forecast in taken if forecast.plan.stage is Stage.MEASURED]


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


def eager_operations(trial: Trial, cache: CacheRequest) -> EagerOperations:
    """Count what eager does. Its operations do not depend on the batch, so one forecast of each kind is enough."""
    plans = profiled_forecasts(trial.workload)
    model = trial.eager(cache)
    counted: dict[bool, Mapping[int, StepOperations]] = {}
    for planned in (plans[0], plans[-1]):
        forecast = partial(take_forecast, trial, model, planned, series_of(trial, model, planned))
        forecast()
        counted[bool(planned.samples)] = count_operations(model, forecast)
        trial.quiet.give_way()
    decode = unobserved_decode(trial, model).outside
    del model
    free_memory(trial.device)
    return EagerOperations(counted, decode)


def unobserved_decode(trial: Trial, model: BoundModel) -> StepOperations:
    """Count the decode steps of the timed forecast while nobody observes: the whole, less a forecast without any."""
    workload = trial.workload
    timed, without = (
        PlannedForecast(workload.context_patches[0], horizon, workload.batches[0])
        for horizon in (workload.horizon_patches[0], 1)
    )
    counted = []
    for planned in (timed, without):
        forecast = partial(take_forecast, trial, model, planned, series_of(trial, model, planned))
        forecast()
        counted.append(count_unobserved(forecast))
        trial.quiet.give_way()
    whole, first = counted
    return StepOperations(whole.outside - first.outside, whole.inside - first.inside, whole.compiled_calls)


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
        unobserved = unobserved_decode(trial, candidate) if trial.workload.horizon_patches[0] > 1 else None
    watch.mark("eager")
    with blaming_the_candidate():
        eager = [upstream] if trial.cache == UPSTREAM else [upstream, eager_operations(trial, trial.cache)]
    shares = {
        planned.name: active_shares(operations, *(one.by_step[bool(planned.samples)] for one in eager))
        for planned, operations in compiled.items()
    }
    if unobserved is not None:
        share = active_share(unobserved, *(StepOperations(outside=one.decode) for one in eager))
        return ActiveShares(shares, unobserved=share), taken
    return ActiveShares(shares), taken


def series_of(trial: Trial, model: BoundModel, planned: PlannedForecast) -> Series:
    return trial.series(
        model.patch_size, planned.context, planned.horizon, batch=planned.batch, variates=planned.variates
    )


def take_forecast(trial: Trial, model: BoundModel, planned: PlannedForecast, series: Series) -> float:
    """Seconds of one forecast, compilation included."""
    workload = trial.workload
    steps = planned.horizon * model.patch_size
    synchronise(trial.device)
    start = time.perf_counter()
    if planned.samples:
        torch.manual_seed(workload.seed)
        model.generate_samples(series, steps, num_samples=planned.samples, samples_per_batch=workload.samples_per_batch)
    else:
        model.generate_mean(series, steps)
    synchronise(trial.device)
    return time.perf_counter() - start


def hidden_recompilations(starts: Sequence[CompileStart]) -> int:
    """First compilations ('6/0') of code that was compiled before: a new code object that no recompile log shows.

    Dynamo writes one resume function per place and per caller's stack, each compiled once: those are not hidden.
    """
    seen: Counter[tuple[str, int]] = Counter()
    for start in starts:
        if start.compile_id.endswith("/0") and not start.function.startswith("torch_dynamo_resume"):
            seen[start.file, start.line] += 1
    return sum(count - 1 for count in seen.values())


def announced_recompilations(taken: Sequence[ForecastTaken], announced: int) -> int:
    """Compilations in the warm-up that announced batches explain: one per place in the code and further batch.

    A cache with static shapes needs one compilation per announced batch. It may make them all at its first forecast, as
    code objects of their own, or recompile when it first meets the batch; anything beyond one each is counted.
    """
    explained: Counter[tuple[str, int, str]] = Counter()
    batches_met: set[tuple[int, bool]] = set()
    compiled_before: set[tuple[str, int, str]] = set()
    for forecast in taken:
        if forecast.plan.stage not in (Stage.BIND, Stage.WARM_UP):
            continue
        at_bind = forecast.plan.stage is Stage.BIND  # which may warm up with every announced batch
        batch = (forecast.plan.batch, bool(forecast.plan.samples))  # samples are a batch of their own to the model
        meets_a_further_batch = bool(batches_met) and batch not in batches_met
        if not at_bind:
            batches_met.add(batch)
        recompiled: set[tuple[str, int, str]] = set()
        for start in forecast.phase.compile_starts:
            resumes = start.function.startswith("torch_dynamo_resume")
            place = (start.file, start.line, start.function if resumes else "")
            if start.compile_id.endswith("/0"):
                if place in compiled_before and not resumes:
                    explained[place] += 1
            elif at_bind or (meets_a_further_batch and place not in recompiled):
                recompiled.add(place)
                explained[place] += 1
            compiled_before.add(place)
    return sum(min(announced - 1, count) for count in explained.values())


def recompile_evidence(
    taken: Sequence[ForecastTaken],
    shares: ActiveShares,
    *,
    announced: int,
    unannounced: Sequence[ForecastTaken | RefusedForecast] = (),
) -> SuiteEvidence:
    """Figures and details from what was counted. `announced` is how many batches the cache was told of."""
    phases = [forecast.phase for forecast in taken]
    events = [event for phase in phases for event in phase.events]
    starts = [start for phase in phases for start in phase.compile_starts]
    after = after_warm_up(taken)
    kinds = Counter(event.kind for event in events)
    hidden = hidden_recompilations(starts)
    expected = announced_recompilations(taken, announced)
    figures = {
        "compile_active": active_figure(shares, prefill=False),
        "compile_active_prefill": active_figure(shares, prefill=True),
        "recompiles": Figure(
            value=sum(len(forecast.phase.compile_starts) for forecast in after),
            method="compilations started after warm-up, first ones and attempts over the limit included",
        ),
        "recompiles_total": Figure(
            value=kinds[EventKind.RECOMPILE] + hidden - expected,
            method="recompilations by dynamo's log, plus code compiled anew as another code object, in warm-up and "
            f"after it; without the {expected} of the warm-up that the {announced} announced batches explain",
        ),
        "recompiles_logged": Figure(
            value=kinds[EventKind.RECOMPILE],
            method="records of dynamo's recompile log: what TORCH_LOGS=recompiles shows",
        ),
        "recompiles_hidden": Figure(value=hidden, method="the same function compiled again as a new code object"),
        "recompiles_announced": Figure(
            value=expected, method="of these, one per place in the code and announced batch after the first"
        ),
        "bucket_compilations": Figure(
            value=kinds[EventKind.BUCKET_COMPILE], method="buckets that fixed_size said it compiled, as `analyze` reads"
        ),
        "recompile_limit": Figure(
            value=kinds[EventKind.RECOMPILE_LIMIT], method="times dynamo gave a function up, warm-up included"
        ),
        "graph_breaks": Figure(
            value=kinds[EventKind.GRAPH_BREAK],
            method="graph breaks in the whole run; a prefill that is compiled shares its code with the decode step",
        ),
        "graphs": Figure(value=sum(phase.graphs for phase in phases), method="graphs handed to the backend"),
        "compilations": Figure(value=len(starts), method="compilations started in the whole run"),
        "cold_compile_s": cold_compile_figure(taken),
        **unannounced_figures(unannounced),
    }
    return SuiteEvidence(
        suite=Suite.RECOMPILE,
        outcome=Outcome.MEASURED,
        method=METHOD,
        figures=figures,
        events=tuple(most_telling(events)),
        details={
            "phases": [_phase_row(forecast) for forecast in taken],
            "events_seen": len(events),
            "events_kept": min(len(events), MOST_EVENTS_KEPT),
            "reasons": _grouped_reasons(events),
            "unannounced": [_unannounced_row(forecast) for forecast in unannounced],
            "compile_active": {
                name: {str(step): round(share, 4) for step, share in steps.items()}
                for name, steps in shares.by_forecast.items()
            },
        },
    )


def active_figure(shares: ActiveShares, *, prefill: bool) -> Figure:
    """The step that leaves most outside decides; the prefill is told apart, since it runs once a forecast."""
    smallest = shares.smallest(prefill=prefill)
    if smallest is None:
        return Figure(
            value=None, missing="no such step was seen: the horizons are one patch long, or the model calls no observer"
        )
    what = "the prefill" if prefill else "decode steps"
    return Figure(
        value=smallest,
        method=f"operations of {what} in compiled code: 1 - those outside over those of the same step eager (this "
        "cache's or upstream's, whichever has fewer); the smallest over every batch, a sampled forecast and the timed "
        "one taken without an observer, warm; 0 for a step that called no compiled graph",
    )


def unannounced_figures(forecasts: Sequence[ForecastTaken | RefusedForecast]) -> dict[str, Figure]:
    """What shapes that nobody announced cost: compilations, and the longest that one of them kept a caller waiting."""
    taken = [forecast for forecast in forecasts if isinstance(forecast, ForecastTaken)]
    by_shape: dict[Any, list[float]] = {}
    for forecast in taken:
        by_shape.setdefault(forecast.plan.shape, []).append(forecast.seconds)
    stalls = [first - min(again) for first, *again in by_shape.values() if again]
    refused = len({forecast.plan.shape for forecast in forecasts if isinstance(forecast, RefusedForecast)})
    told = f"{len(by_shape)} shapes that nobody announced" + (f"; {refused} more were refused" if refused else "")
    if not stalls:
        missing = (
            "every shape that nobody announced was refused"
            if refused
            else "not tried: announced shapes compile after the warm-up, too, or dynamo gave a function up"
        )
        return {
            "unannounced_compilations": Figure(value=None, missing=missing),
            "unannounced_stall_s": Figure(value=None, unit="s", missing=missing),
        }
    return {
        "unannounced_compilations": Figure(
            value=sum(len(forecast.phase.compile_starts) for forecast in taken),
            method=f"compilations started at {told}",
        ),
        "unannounced_stall_s": Figure(
            value=max(0.0, *stalls),
            unit="s",
            method=f"the slowest first forecast minus the second of its shape, over {told}",
        ),
    }


def cold_compile_figure(taken: Sequence[ForecastTaken]) -> Figure:
    """Add up what compiling cost: how much longer the forecasts that compiled took than warm ones."""
    compiled = [forecast for forecast in taken if forecast.phase.compile_starts]
    warm = [
        forecast for forecast in taken if not forecast.phase.compile_starts and forecast.plan.stage is not Stage.BIND
    ]
    if not warm:
        return Figure(
            value=None, unit="s", missing="every forecast of the run compiled: there is no warm one to compare"
        )
    extra = 0.0
    for forecast in compiled:
        same_shape = [other.seconds for other in warm if other.plan.shape == forecast.plan.shape]
        extra += forecast.seconds - min(same_shape or [other.seconds for other in warm])
    return Figure(
        value=max(0.0, extra),
        unit="s",
        method=f"over the {len(compiled)} of {len(taken)} forecasts that compiled, from an empty inductor cache on: "
        "their seconds minus those of the fastest forecast of the same shape that compiled nothing, or of any shape "
        "where there is none of the same",
    )


def most_telling(events: Sequence[Event]) -> list[Event]:
    """All of them up to the cap; beyond it the limit hits stay, then the others in the order they came."""
    if len(events) <= MOST_EVENTS_KEPT:
        return list(events)
    limits = [index for index, event in enumerate(events) if event.kind is EventKind.RECOMPILE_LIMIT]
    others = [index for index, event in enumerate(events) if event.kind is not EventKind.RECOMPILE_LIMIT]
    return [events[index] for index in sorted([*limits, *others][:MOST_EVENTS_KEPT])]


def _phase_row(forecast: ForecastTaken) -> dict[str, Any]:
    phase = forecast.phase
    return {
        "name": phase.name,
        "warm_up": forecast.plan.stage in (Stage.BIND, Stage.WARM_UP),
        "seconds": round(forecast.seconds, 4),
        "compilations": len(phase.compile_starts),
        "recompiles": phase.count(EventKind.RECOMPILE),
        "graph_breaks": phase.count(EventKind.GRAPH_BREAK),
        "recompile_limits": phase.count(EventKind.RECOMPILE_LIMIT),
        "graphs": phase.graphs,
        "buckets": phase.count(EventKind.BUCKET_COMPILE),
    }


def _unannounced_row(forecast: ForecastTaken | RefusedForecast) -> dict[str, Any]:
    if isinstance(forecast, RefusedForecast):
        return {"name": forecast.plan.name, "error": forecast.error}
    return _phase_row(forecast)


def _grouped_reasons(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Counts over all events, kept or not."""
    groups = Counter((event.kind.value, event.function, event.normalised_reason or event.reason) for event in events)
    return [
        {"kind": kind, "function": function, "reason": reason, "count": count}
        for (kind, function, reason), count in groups.most_common()
    ]
