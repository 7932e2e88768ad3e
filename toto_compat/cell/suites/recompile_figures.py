"""What the forecasts of the recompile suite become: figures, reasons, and the share that ran in compiled code."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from toto_compat.cell.live import CompileStart, Phase
from toto_compat.cell.suites.recompile_plan import PlannedForecast, Stage
from toto_compat.contract.events import Event, EventKind
from toto_compat.contract.result import Figure, Outcome, SuiteEvidence
from toto_compat.contract.suites import Suite

METHOD = (
    "the candidate is bound; warm-up: mean forecasts of every announced batch at the smallest and the largest context, "
    "twice each, and sampled ones of every batch size at both; of one patch and of several, where the workload has "
    "both; then lengths and horizons in between, with every batch and sampled; then, while the cell can still PASS, "
    "series of other kinds at shapes of the warm-up (padded, with gaps, of other values, groups, times, seeds and "
    "places in memory), shapes that nobody announced, series that cannot be forecast, forecasts that are broken off "
    "and many in a row; at the end a look at what still runs in compiled code; "
    "compilations counted where dynamo starts one, reasons from its own loggers"
)
# Evidence is read by people: a cache that recompiles in every step says the same thing a thousand times.
MOST_EVENTS_KEPT = 400


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
    """Holds which share of each step ran in compiled code, by the forecast's name and the step; 0 is the prefill.

    Of a forecast of one patch the prefill is all: there it decides. Elsewhere it runs once before many decode steps and
    is told apart.
    """

    by_forecast: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    of_one_patch: frozenset[str] = frozenset()  # forecasts without a decode step
    unobserved: Mapping[str, float] = field(default_factory=dict)  # what was forecast while nobody observed -> share

    @property
    def prefill(self) -> float | None:
        return _smallest(
            [min((share for step, share in steps.items() if step == 0), default=None) for steps in self._all]
        )

    @property
    def deciding(self) -> float | None:
        """The smallest share of a decode step, or of a forecast of one patch; None if a forecast showed no such step,
        which may be where it is smallest."""
        found = [
            min((share for step, share in steps.items() if (step == 0) is (name in self.of_one_patch)), default=None)
            for name, steps in self.by_forecast.items()
        ]
        smallest = _smallest(found)
        return smallest if smallest is None else min(smallest, *self.unobserved.values(), 1.0)

    def and_of(self, others: "ActiveShares") -> "ActiveShares":
        """Put two looks together, of which the smallest share decides."""
        return ActiveShares(
            {**self.by_forecast, **others.by_forecast},
            self.of_one_patch | others.of_one_patch,
            {**self.unobserved, **others.unobserved},
        )

    @property
    def _all(self) -> Sequence[Mapping[int, float]]:
        return tuple(self.by_forecast.values())


def _smallest(shares: Sequence[float | None]) -> float | None:
    known = [share for share in shares if share is not None]
    return min(known) if known and len(known) == len(shares) else None


def has_settled(taken: Sequence[ForecastTaken]) -> bool:
    """Say whether announced shapes compile no more. If they do, others only show the same again, seconds at a time; and
    a function that dynamo gave up compiles nothing any more, whatever comes."""
    late = any(forecast.phase.compile_starts for forecast in after_warm_up(taken))
    return not late and not any(forecast.phase.count(EventKind.RECOMPILE_LIMIT) for forecast in taken)


def after_warm_up(taken: Sequence[ForecastTaken]) -> list[ForecastTaken]:
    return [forecast for forecast in taken if forecast.plan.stage is Stage.MEASURED]


def compiled(forecast: ForecastTaken) -> bool:
    return bool(forecast.phase.compile_starts or forecast.phase.events)


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
    batches_met: set[tuple[int, int]] = set()
    compiled_before: set[tuple[str, int, str]] = set()
    for forecast in taken:
        if forecast.plan.stage not in (Stage.BIND, Stage.WARM_UP):
            continue
        at_bind = forecast.plan.stage is Stage.BIND  # which may warm up with every announced batch
        batch = (forecast.plan.batch, forecast.plan.per_batch)  # samples are a batch of their own to the model
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
    other_series: Sequence[ForecastTaken] = (),
    at_the_end: Sequence[ForecastTaken] = (),
    unannounced: Sequence[ForecastTaken | RefusedForecast] = (),
    mishaps: Mapping[str, int] | None = None,
) -> SuiteEvidence:
    """Figures and details from what was counted. `announced` is how many batches the cache was told of."""
    later = [*other_series, *at_the_end]
    phases = [forecast.phase for forecast in (*taken, *later)]
    events = [event for phase in phases for event in phase.events]
    starts = [start for phase in phases for start in phase.compile_starts]
    after = after_warm_up([*taken, *later])
    kinds = Counter(event.kind for event in events)
    hidden = hidden_recompilations(starts)
    expected = announced_recompilations(taken, announced)
    figures = {
        "compile_active": active_figure(shares.deciding, _DECIDING),
        "compile_active_prefill": active_figure(shares.prefill, "the pass over the context, every forecast"),
        "recompiles": Figure(
            value=sum(len(forecast.phase.compile_starts) for forecast in after),
            method="compilations started after warm-up, first ones and attempts over the limit included: at lengths "
            f"and horizons in between, at {len(other_series)} series of other kinds, and at the last look",
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
            method="graph breaks in the whole run, in the pass over the context as in decode steps",
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
            # of those that compiled nothing a number is enough
            "phases": [_phase_row(forecast) for forecast in (*taken, *(one for one in later if compiled(one)))],
            "other_series": len(other_series),
            "mishaps": dict(mishaps or {}),
            "events_seen": len(events),
            "events_kept": min(len(events), MOST_EVENTS_KEPT),
            "reasons": _grouped_reasons(events),
            "unannounced": [_unannounced_row(forecast) for forecast in unannounced],
            "compile_active": {
                name: {str(step): round(share, 4) for step, share in steps.items()}
                for name, steps in shares.by_forecast.items()
            },
            "compile_active_unobserved": {name: round(share, 4) for name, share in shares.unobserved.items()},
        },
    )


_DECIDING = "decode steps, and the pass over the context of forecasts of one patch, which have nothing else"


def active_figure(smallest: float | None, what: str) -> Figure:
    """The step that leaves most outside decides."""
    if smallest is None:
        return Figure(value=None, missing="no such step was seen: the model calls no observer")
    return Figure(
        value=smallest,
        method=f"operations in compiled code of {what}: 1 - those outside over those of the same step eager (this "
        "cache's or upstream's, whichever has fewer); the smallest over every batch, sampled forecasts and forecasts "
        "taken without an observer, warm, and over the looks at the beginning and at the end, if there was one; 0 for "
        "a step that called no compiled graph",
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
    cold = [forecast for forecast in taken if forecast.phase.compile_starts]
    warm = [
        forecast for forecast in taken if not forecast.phase.compile_starts and forecast.plan.stage is not Stage.BIND
    ]
    if not warm:
        return Figure(
            value=None, unit="s", missing="every forecast of the run compiled: there is no warm one to compare"
        )
    extra = 0.0
    for forecast in cold:
        same_shape = [other.seconds for other in warm if other.plan.shape == forecast.plan.shape]
        extra += forecast.seconds - min(same_shape or [other.seconds for other in warm])
    return Figure(
        value=max(0.0, extra),
        unit="s",
        method=f"over the {len(cold)} of {len(taken)} forecasts that compiled, from an empty inductor cache on: "
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
