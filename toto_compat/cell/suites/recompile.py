"""Recompile: what the compiler does while lengths, horizons and batches change, in a process that starts cold."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from toto_compat.cell.live import CompilerWatch, CompileStart, Phase, StepActivity, step_activity
from toto_compat.cell.process_tree import watching_the_tree
from toto_compat.cell.session import Session
from toto_compat.cell.trial import Trial, blaming_the_candidate, synchronise
from toto_compat.contract.events import Event, EventKind
from toto_compat.contract.request import Workload
from toto_compat.contract.result import Figure, Outcome, SuiteEvidence
from toto_compat.contract.suites import Suite
from toto_compat.model.bound import BoundModel, observed
from toto_compat.model.series import Series

METHOD = (
    "warm-up: two mean forecasts each at the smallest and the largest context; then the other contexts, horizons and "
    "batches and a sampled forecast; compilations counted where dynamo starts one, reasons from its own loggers"
)
# Evidence is read by people: a cache that recompiles in every step says the same thing a thousand times.
MOST_EVENTS_KEPT = 400


@dataclass(frozen=True)
class PlannedForecast:
    """One forecast of the run. Lengths in patches; `samples` 0 is a mean forecast."""

    context: int
    horizon: int
    batch: int
    samples: int = 0
    warm_up: bool = False

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.context, self.horizon, self.batch, self.samples

    @property
    def name(self) -> str:
        kind = "samples" if self.samples else "mean"
        return f"{kind}, context {self.context}, horizon {self.horizon}, batch {self.batch}"


@dataclass(frozen=True)
class ForecastTaken:
    plan: PlannedForecast
    seconds: float
    phase: Phase


def plan_forecasts(workload: Workload) -> tuple[PlannedForecast, ...]:
    """The same forecasts for every cache: a warm-up at both ends, then everything in between and beside it."""
    contexts, horizons, batches = workload.context_patches, workload.horizon_patches, workload.batches
    ends = (contexts[0], contexts[-1])
    warm_up = [PlannedForecast(context, horizons[0], batches[0], warm_up=True) for context in ends for _ in range(2)]
    measured = [PlannedForecast(context, horizons[0], batches[0]) for context in contexts[1:-1]]
    measured += [PlannedForecast(contexts[0], horizon, batches[0]) for horizon in horizons[1:]]
    measured += [PlannedForecast(contexts[0], horizons[0], batch) for batch in batches[1:]]
    measured.append(PlannedForecast(contexts[0], horizons[0], batches[0], samples=workload.samples))
    return (*warm_up, *measured)


def run_recompile(session: Session) -> SuiteEvidence:
    """Watch the compiler and the process tree while the planned forecasts are taken, cold."""
    with watching_the_tree() as tree:
        evidence = count_compilations(session.trial, session.candidate)
    peak = Figure(
        value=tree.peak, unit="bytes", method="largest resident sum over the process tree during the cold compile"
    )
    return evidence.model_copy(update={"figures": {**evidence.figures, "compile_peak_bytes": peak}})


def count_compilations(trial: Trial, candidate: BoundModel) -> SuiteEvidence:
    """Take the planned forecasts one by one and count per forecast."""
    plan = plan_forecasts(trial.workload)
    taken: list[ForecastTaken] = []
    with CompilerWatch("before") as watch, step_activity() as activity:
        for planned in plan:
            series = trial.series(candidate.patch_size, planned.context, planned.horizon, batch=planned.batch)
            phase = watch.mark(planned.name)
            observer = nullcontext_observer if planned.warm_up else decode_steps_of(activity)
            with observed(candidate, observer), blaming_the_candidate():
                seconds = take_forecast(trial, candidate, planned, series)
            taken.append(ForecastTaken(planned, seconds, phase))
            trial.quiet.give_way()
    return recompile_evidence(taken, activity)


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


def nullcontext_observer(_step: int) -> AbstractContextManager[None]:
    return nullcontext()


def decode_steps_of(activity: StepActivity) -> Callable[[int], AbstractContextManager[None]]:
    """Counts decode steps only: the prefill (step 0) may well be eager, it runs once a forecast."""
    return lambda step: activity.step(step) if step > 0 else nullcontext()


def hidden_recompilations(starts: Sequence[CompileStart]) -> int:
    """First compilations ('6/0') of code that was compiled before: a new code object that no recompile log shows.

    Dynamo writes one resume function per place and per caller's stack, each compiled once: those are not hidden.
    """
    seen: Counter[tuple[str, int]] = Counter()
    for start in starts:
        if start.compile_id.endswith("/0") and not start.function.startswith("torch_dynamo_resume"):
            seen[start.file, start.line] += 1
    return sum(count - 1 for count in seen.values())


def recompile_evidence(taken: Sequence[ForecastTaken], activity: StepActivity) -> SuiteEvidence:
    """Figures and details from what was counted."""
    phases = [forecast.phase for forecast in taken]
    events = [event for phase in phases for event in phase.events]
    starts = [start for phase in phases for start in phase.compile_starts]
    after = [forecast for forecast in taken if not forecast.plan.warm_up]
    kinds = Counter(event.kind for event in events)
    hidden = hidden_recompilations(starts)
    figures = {
        "compile_active": Figure(
            value=1.0 - activity.eager_steps / activity.steps,
            method=f"share of {activity.steps} decode steps after warm-up that called code compiled by Inductor",
        )
        if activity.steps
        else Figure(value=None, missing="no decode step ran after warm-up: the horizons are one patch long"),
        "recompiles": Figure(
            value=sum(len(forecast.phase.compile_starts) for forecast in after),
            method="compilations started after warm-up, first ones and attempts over the limit included",
        ),
        "recompiles_total": Figure(
            value=kinds[EventKind.RECOMPILE] + hidden,
            method="recompilations in the whole run by dynamo's log, plus code compiled anew as another code object",
        ),
        "recompiles_logged": Figure(
            value=kinds[EventKind.RECOMPILE],
            method="records of dynamo's recompile log: what TORCH_LOGS=recompiles shows",
        ),
        "recompiles_hidden": Figure(value=hidden, method="the same function compiled again as a new code object"),
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
            "compiled_calls_per_decode_step": dict(sorted(activity.per_step.items())),
        },
    )


def cold_compile_figure(taken: Sequence[ForecastTaken]) -> Figure:
    """Add up what compiling cost: how much longer the forecasts that compiled took than warm ones."""
    compiled = [forecast for forecast in taken if forecast.phase.compile_starts]
    warm = [forecast for forecast in taken if not forecast.phase.compile_starts]
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
        "name": forecast.plan.name,
        "warm_up": forecast.plan.warm_up,
        "seconds": round(forecast.seconds, 4),
        "compilations": len(phase.compile_starts),
        "recompiles": phase.count(EventKind.RECOMPILE),
        "graph_breaks": phase.count(EventKind.GRAPH_BREAK),
        "recompile_limits": phase.count(EventKind.RECOMPILE_LIMIT),
        "graphs": phase.graphs,
    }


def _grouped_reasons(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Counts over all events, kept or not."""
    groups = Counter((event.kind.value, event.function, event.normalised_reason or event.reason) for event in events)
    return [
        {"kind": kind, "function": function, "reason": reason, "count": count}
        for (kind, function, reason), count in groups.most_common()
    ]
