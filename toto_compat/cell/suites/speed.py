"""Speed: upstream eager, the same cache eager and the compiled cell, forecast by forecast in turn, in one process."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import Field

from toto_compat.cell.machine_conditions import machine_conditions
from toto_compat.contract.result import Figure, Kind, Outcome, SuiteEvidence
from toto_compat.contract.statistics import (
    FEWEST_FOR_P99,
    FEWEST_TIMED_FORECASTS,
    Interval,
    break_even,
    middle_range,
    percentile,
    ratio_of_medians,
    relative_spread,
    taking_turns,
)
from toto_compat.contract.strict_model import StrictModel
from toto_compat.contract.suites import Group, Suite

if TYPE_CHECKING:
    from toto_compat.cell.session import Session

UPSTREAM_EAGER = "upstream_eager"
SAME_CACHE_EAGER = "same_cache_eager"
COMPILED = "compiled"

UNSTABLE = 0.5  # of its median: eager's own middle range, from which on nothing is told. This project's choice

METHOD = (
    "generate_mean at the smallest context and the first horizon; the contestants take turns forecast by forecast in a "
    "rotating order; the device is synchronised before each timestamp; compile and warm-up lie before the loop"
)


@dataclass(frozen=True)
class Contestant:
    name: str
    forecast: Callable[[], object]


class SpeedRun(StrictModel):
    """Holds what one fresh process measured; the orchestrator makes figures of one or several of them."""

    timings: dict[str, tuple[float, ...]]  # contestant -> milliseconds per forecast, in the order they were taken
    warm_start_s: float  # first compiled forecast minus a warm one; warm if another process filled the inductor cache
    conditions: dict[str, Any] = Field(default={})


def time_in_turns(
    contestants: Sequence[Contestant],
    rounds: int,
    *,
    clock: Callable[[], float],
    synchronise: Callable[[], None],
) -> dict[str, list[float]]:
    """Take the time of every forecast, in milliseconds."""
    timings: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    for contestant in taking_turns(contestants, rounds):
        synchronise()
        start = clock()
        contestant.forecast()
        synchronise()
        timings[contestant.name].append((clock() - start) * 1000.0)
    return timings


def run_speed(session: "Session") -> SpeedRun:
    """Warm up, then time all contestants while nothing else on this machine works."""
    # torch comes with it, which the process that puts evidence together does without
    from toto_compat.cell.trial import UPSTREAM, blaming_the_candidate, synchronise

    trial, profile, candidate = session.trial, session.profile, session.candidate
    first_seconds = session.first_forecast_seconds()
    workload = trial.workload
    horizon = workload.horizon_patches[0]
    models = {UPSTREAM_EAGER: trial.eager(UPSTREAM), SAME_CACHE_EAGER: trial.eager(trial.cache)}
    patch_size = candidate.patch_size
    series = trial.series(patch_size, workload.context_patches[0], horizon)

    def contestant(name: str) -> Contestant:
        return Contestant(name, lambda: models[name].generate_mean(series, horizon * patch_size))

    def compiled() -> None:
        with blaming_the_candidate():
            candidate.generate_mean(series, horizon * patch_size)
            synchronise(trial.device)  # what its kernels did wrong comes out here, not in another contestant's turn

    contestants = [contestant(name) for name in models] + [Contestant(COMPILED, compiled)]
    for _ in range(2):
        for each in contestants:
            each.forecast()
        trial.quiet.give_way()
    rounds = profile.iterations * profile.forecasts_per_iteration
    with trial.quiet.timing():
        before = machine_conditions()
        timings = time_in_turns(
            contestants, rounds, clock=time.perf_counter, synchronise=lambda: synchronise(trial.device)
        )
        after = machine_conditions()
    return SpeedRun(
        timings={name: tuple(values) for name, values in timings.items()},
        warm_start_s=max(0.0, first_seconds - statistics.median(timings[COMPILED]) / 1000.0),
        conditions={"before": before, "after": after},
    )


def combine(
    measurements: Mapping[Group, Sequence[Mapping[str, Any]]], evidence: Mapping[Suite, SuiteEvidence]
) -> SuiteEvidence:
    """Make evidence of all repeats; the recompile suite's process met an empty inductor cache and filled it."""
    observed = evidence.get(Suite.RECOMPILE)
    finished = observed if observed is not None and observed.outcome is Outcome.MEASURED else None
    cold_compile = finished.figures.get("cold_compile_s") if finished is not None else None
    return speed_evidence(
        [SpeedRun.model_validate(run) for run in measurements[Group.SPEED]],
        cold_compile_s=cold_compile
        or Figure(
            value=None,
            unit="s",
            missing="the recompile suite sees the cold compile, and it did not finish or was not asked for",
        ),
        inductor_cache_filled=finished is not None,
    )


def speed_evidence(
    runs: Sequence[SpeedRun], *, cold_compile_s: Figure, inductor_cache_filled: bool = True
) -> SuiteEvidence:
    """Figures over all repeats: the worst repeat decides the speedup, percentiles are over all of them.

    `inductor_cache_filled`: another process had compiled the same before, so that these started warm.
    """
    counts = [len(run.timings[COMPILED]) for run in runs]
    pooled = {name: [ms for run in runs for ms in run.timings[name]] for name in runs[0].timings}
    enough = min(counts) >= FEWEST_TIMED_FORECASTS
    too_few = (
        ""
        if enough
        else f"{min(counts)} timed forecasts in a repeat; {FEWEST_TIMED_FORECASTS} are needed: "
        "raise iterations or forecasts_per_iteration of the profile"
    )
    figures: dict[str, Figure] = {}
    if enough:
        over_upstream = [ratio_of_medians(run.timings[UPSTREAM_EAGER], run.timings[COMPILED]) for run in runs]
        over_same_cache = [ratio_of_medians(run.timings[SAME_CACHE_EAGER], run.timings[COMPILED]) for run in runs]
        worst = min(over_upstream, key=lambda interval: interval.low)
        figures["speedup"] = Figure(
            value=worst.low,
            unit="x",
            low=worst.low,
            high=worst.high,
            method="upstream eager / compiled, ratio of medians; low end of the 95 % interval (paired block "
            "bootstrap), "
            "worst repeat",
        )
        figures["speedup_same_cache"] = _worst(over_same_cache)
        figures["latency_stability"] = stability_figure(runs)
        figures["latency_sigma"] = Figure(
            value=max(relative_spread(run.timings[COMPILED]) for run in runs),
            method="sigma / mean of the warm compiled latency, worst repeat; one outlier in thirty decides it",
        )
    else:
        for name in ("speedup", "speedup_same_cache", "latency_stability", "latency_sigma"):
            figures[name] = Figure(value=None, missing=too_few)
    for share, name in ((0.50, "p50_ms"), (0.95, "p95_ms")):
        figures[name] = _percentile_figure(pooled[COMPILED], share, too_few)
    timed = len(pooled[COMPILED])
    too_few_for_p99 = f"{timed} timed forecasts, {FEWEST_FOR_P99} are needed" if timed < FEWEST_FOR_P99 else ""
    figures["p99_ms"] = _percentile_figure(pooled[COMPILED], 0.99, too_few or too_few_for_p99)
    figures["eager_p50_ms"] = _percentile_figure(pooled[UPSTREAM_EAGER], 0.50, too_few)
    figures["same_cache_eager_p50_ms"] = _percentile_figure(pooled[SAME_CACHE_EAGER], 0.50, too_few)
    figures["cold_compile_s"] = cold_compile_s
    figures["warm_start_s"] = (
        Figure(
            value=statistics.median(run.warm_start_s for run in runs),
            unit="s",
            method="first forecast of a new process with a filled inductor cache, minus a warm one; what later shapes "
            "compile is not in it",
        )
        if inductor_cache_filled
        else Figure(
            value=None,
            unit="s",
            missing="the recompile suite fills the inductor cache, and it did not finish or was not asked for",
        )
    )
    eager_ms, compiled_ms = statistics.median(pooled[UPSTREAM_EAGER]), statistics.median(pooled[COMPILED])
    figures["break_even_cold"] = _break_even_figure(cold_compile_s.value, eager_ms, compiled_ms)
    figures["break_even_warm"] = _break_even_figure(figures["warm_start_s"].value, eager_ms, compiled_ms)
    return SuiteEvidence(
        suite=Suite.SPEED,
        outcome=Outcome.MEASURED,
        method=METHOD,
        figures=figures,
        details={
            "timings": {name: [round(ms, 4) for ms in values] for name, values in pooled.items()},
            "forecasts_per_repeat": counts,
            "conditions": [run.conditions for run in runs],
        },
    )


def stability_figure(runs: Sequence[SpeedRun]) -> Figure:
    """How much more a warm compiled forecast varies than upstream eager's does in the same minutes, in milliseconds.

    Against eager, and not against its own mean: a forecast that is four times as fast feels the same hiccup of the
    machine four times as much. Where eager itself varies by half its length nothing can be told.
    """
    ratios = []
    for run in runs:
        eager, compiled = run.timings[UPSTREAM_EAGER], run.timings[COMPILED]
        if middle_range(eager) > UNSTABLE * statistics.median(eager):
            return Figure(
                value=None,
                unit="x",
                missing=f"upstream eager itself varies by {middle_range(eager):.1f} ms around "
                f"{statistics.median(eager):.1f} ms here: run it on a quieter machine",
            )
        # a machine too quiet to measure: a hundredth of the forecast is as good as nothing
        ratios.append(middle_range(compiled) / max(middle_range(eager), 0.01 * statistics.median(eager)))
    return Figure(
        value=max(ratios),
        unit="x",
        method="width of the middle four fifths of the warm compiled latency over upstream eager's, worst repeat",
    )


def _worst(intervals: Sequence[Interval]) -> Figure:
    worst = min(intervals, key=lambda interval: interval.low)
    return Figure(
        value=worst.value,
        unit="x",
        low=worst.low,
        high=worst.high,
        method="same cache eager / compiled, ratio of medians with its 95 % bootstrap interval, worst repeat",
    )


def _percentile_figure(values: Sequence[float], share: float, too_few: str) -> Figure:
    if too_few:
        return Figure(value=None, unit="ms", missing=too_few)
    return Figure(value=percentile(values, share), unit="ms", method=f"{share:.0%} of {len(values)} timed forecasts")


def _break_even_figure(compile_seconds: float | None, eager_ms: float, compiled_ms: float) -> Figure:
    if compile_seconds is None:
        return Figure(value=None, unit="forecasts", missing="the compile time was not measured")
    forecasts = break_even(compile_seconds, eager_ms, compiled_ms)
    if forecasts is None:
        return Figure(value=None, unit="forecasts", missing="never: compiled is not faster than upstream eager")
    return Figure(
        value=forecasts, unit="forecasts", kind=Kind.REPORTED, method="compile time / median saving per forecast"
    )
