"""What a contest's timings become: figures of one or several processes, with their spread."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from toto_compat.contract.result import Figure, Kind, Outcome, SuiteEvidence
from toto_compat.contract.statistics import (
    FEWEST_FOR_P99,
    FEWEST_TIMED_FORECASTS,
    Interval,
    break_even,
    middle_range,
    percentile,
    ratio_of_medians,
    ratio_of_widths,
    ratio_to_few,
    relative_spread,
)
from toto_compat.contract.strict_model import StrictModel
from toto_compat.contract.suites import Group, Suite

UPSTREAM_EAGER = "upstream_eager"
SAME_CACHE_EAGER = "same_cache_eager"
COMPILED = "compiled"

UNSTABLE = 0.5  # of its median: eager's own middle range, from which on nothing is told. This project's choice
# Processor time over what a contestant's own turns give it: more was spent in the others' turns. This project's choice
BUSY_IN_OTHERS_TURNS = 1.5
HELD_BACK = 0.6  # the same of a contestant that was kept from working in its own

METHOD = (
    "each forecast that the workload names, mean or samples, is a contest of its own; every contestant is a process of "
    "its own, and one in which no cache of a user was imported takes the time; they take turns in a rotating order, "
    "each round on a series that nobody has met before, slow ones in fewer rounds, evenly spread; the device is "
    "synchronised before a forecast counts as done; compile and warm-up lie before the loop; all forecasts of the "
    "candidate that were timed are held against upstream eager afterwards; the contest that gains least decides"
)


class SpeedRun(StrictModel):
    """Holds what one contest measured; the orchestrator makes figures of one or several of them."""

    shape: str = ""  # of the forecast that was timed
    timings: dict[str, tuple[float, ...]]  # contestant -> milliseconds per forecast, in the order they were taken
    warm_start_s: float  # first compiled forecast minus a warm one; warm if another process filled the inductor cache
    conditions: dict[str, Any] = Field(default={})
    timed_forecasts: float | None = None  # worst error of a timed forecast over what is allowed
    unfair_turns: tuple[str, ...] = ()  # who worked in the others' turns, or could not in its own


class SpeedRuns(StrictModel):
    """Holds the contests of one process, one for each forecast that is timed."""

    runs: tuple[SpeedRun, ...]
    no_samples: str = ""  # what torch says where upstream eager cannot draw: means are timed instead
    left_out: str = ""  # which forecasts were not timed in a cell that cannot PASS, and why


def unfair_turns(timings: Mapping[str, Sequence[float]], used: Sequence[float], *, threads: int) -> tuple[str, ...]:
    """Name who used more of the processors than its own turns account for, which slowed the others down, and who could
    not use its own turns: something held it back."""
    told = []
    for (name, milliseconds), seconds in zip(timings.items(), used, strict=True):
        turns = sum(milliseconds) / 1000.0
        if seconds > BUSY_IN_OTHERS_TURNS * turns * threads + 1.0 or seconds < HELD_BACK * turns - 1.0:
            told.append(f"{name} used {seconds:.1f} s of processor time, its own turns took {turns:.1f} s")
    return tuple(told)


def combine(
    measurements: Mapping[Group, Sequence[Mapping[str, Any]]], evidence: Mapping[Suite, SuiteEvidence]
) -> SuiteEvidence:
    """Make evidence of all repeats; the recompile suite's process met an empty inductor cache and filled it."""
    observed = evidence.get(Suite.RECOMPILE)
    finished = observed if observed is not None and observed.outcome is Outcome.MEASURED else None
    cold_compile = finished.figures.get("cold_compile_s") if finished is not None else None
    processes = [SpeedRuns.model_validate(left) for left in measurements[Group.SPEED]]
    return all_shapes(
        processes,
        cold_compile_s=cold_compile
        or Figure(
            value=None,
            unit="s",
            missing="the recompile suite sees the cold compile, and it did not finish or was not asked for",
        ),
        inductor_cache_filled=finished is not None,
    )


def all_shapes(
    processes: Sequence[SpeedRuns], *, cold_compile_s: Figure, inductor_cache_filled: bool = True
) -> SuiteEvidence:
    """Evidence of every timed forecast, over all processes: the one with the smallest gain gives the figures."""
    by_shape: dict[str, list[SpeedRun]] = {}
    for run in (run for process in processes for run in process.runs):
        by_shape.setdefault(run.shape, []).append(run)
    each = {
        shape: speed_evidence(runs, cold_compile_s=cold_compile_s, inductor_cache_filled=inductor_cache_filled)
        for shape, runs in by_shape.items()
    }
    worst = each[min(each, key=lambda shape: _gain(each[shape].figures["speedup"]))]
    figures = dict(worst.figures)
    if len(each) > 1:
        for name in ("timed_forecasts", "latency_stability"):
            figures[name] = _largest([evidence.figures[name] for evidence in each.values()])
        for shape, evidence in each.items():
            for name in ("speedup", "speedup_same_cache", "p50_ms", "eager_p50_ms", "same_cache_eager_p50_ms"):
                figures[f"{name} [{shape}]"] = evidence.figures[name]
    details = {
        **worst.details,
        "shapes": {shape: evidence.details["timings"] for shape, evidence in each.items()},
        "conditions": [run.conditions for process in processes for run in process.runs],
    }
    if told := next((process.no_samples for process in processes if process.no_samples), ""):
        details["samples"] = f"not timed, upstream eager cannot draw here: {told}"
    left_out = next((process.left_out for process in processes if process.left_out), "")
    return worst.model_copy(update={"figures": figures, "details": details, "skipped": left_out})


def _gain(speedup: Figure) -> float:
    """Where there is no figure nothing is known, which is worse than any gain."""
    return speedup.value if speedup.value is not None else -math.inf


def _largest(figures: Sequence[Figure]) -> Figure:
    """The largest, with the largest of the lower ends: what is shown of one forecast is shown."""
    largest = max(figures, key=lambda figure: figure.value if figure.value is not None else math.inf)
    lows = [figure.low for figure in figures if figure.low is not None]
    return largest.model_copy(update={"low": max(lows)}) if largest.low is not None else largest


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
    unfair = "; ".join(one for run in runs for one in run.unfair_turns)
    figures: dict[str, Figure] = {"timed_forecasts": timed_figure(runs)}
    if enough and not unfair:
        over_upstream = [ratio_over_compiled(run, UPSTREAM_EAGER) for run in runs]
        over_same_cache = [ratio_over_compiled(run, SAME_CACHE_EAGER) for run in runs]
        worst = min(over_upstream, key=lambda interval: interval.low)
        in_total = min(ratio_in_total(run.timings[UPSTREAM_EAGER], run.timings[COMPILED]) for run in runs)
        figures["speedup"] = Figure(
            value=min(worst.low, in_total),
            unit="x",
            low=min(worst.low, in_total),
            high=worst.high,
            method=f"{runs[0].shape + ': ' if runs[0].shape else ''}upstream eager / compiled, ratio of medians; low "
            f"end of {interval_text(runs, UPSTREAM_EAGER)}, worst repeat; no more than the ratio of their mean times "
            f"({in_total:.2f}), the slowest thirtieth of each left out",
        )
        figures["speedup_same_cache"] = _worst(over_same_cache, interval_text(runs, SAME_CACHE_EAGER))
        figures["latency_stability"] = stability_figure(runs)
        figures["latency_sigma"] = Figure(
            value=max(relative_spread(run.timings[COMPILED]) for run in runs),
            method="sigma / mean of the warm compiled latency, worst repeat; one outlier in thirty decides it",
        )
    else:
        why = too_few or f"the contestants' turns were not their own: {unfair}"
        for name in ("speedup", "speedup_same_cache", "latency_stability", "latency_sigma"):
            figures[name] = Figure(value=None, missing=why)
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
            "shape": runs[0].shape,
            "forecasts_per_repeat": counts,
            "conditions": [run.conditions for run in runs],
        },
    )


def ratio_over_compiled(run: SpeedRun, name: str) -> Interval:
    """A contestant over compiled; of one that had fewer rounds the whole range of its times."""
    other, compiled = run.timings[name], run.timings[COMPILED]
    return ratio_of_medians(other, compiled) if len(other) == len(compiled) else ratio_to_few(other, compiled)


def interval_text(runs: Sequence[SpeedRun], name: str) -> str:
    fewest = min(len(run.timings[name]) for run in runs)
    if all(len(run.timings[name]) == len(run.timings[COMPILED]) for run in runs):
        return "the 95 % interval (paired block bootstrap)"
    return f"the range of {fewest} over the 95 % interval of compiled's median (block bootstrap)"


def ratio_in_total(eager: Sequence[float], compiled: Sequence[float]) -> float:
    """How much longer eager's forecasts take than compiled ones in the mean: a median is blind to stalls."""

    def mean(milliseconds: Sequence[float]) -> float:
        # of a few that are thought to be calm the slowest counts as well
        kept = len(milliseconds) - len(milliseconds) // 30
        return statistics.fmean(sorted(milliseconds)[:kept])

    return mean(eager) / mean(compiled)


def timed_figure(runs: Sequence[SpeedRun]) -> Figure:
    """How far the timed forecasts were from upstream eager's, over what is allowed."""
    ratios = [run.timed_forecasts for run in runs if run.timed_forecasts is not None]
    if len(ratios) < len(runs):
        return Figure(value=None, missing="the forecasts that were timed were not looked at")
    return Figure(
        value=max(ratios),
        method="error of the compiled forecasts that were timed over what is allowed: means, three of each process "
        "drawn afterwards, by equivalence's rule, all others by a hundred times the largest error allowed there; "
        "samples by their places in the distributions that upstream eager gives them; the worst",
    )


def stability_figure(runs: Sequence[SpeedRun]) -> Figure:
    """How much more a warm compiled forecast varies than upstream eager's does in the same minutes, in milliseconds.

    Against eager, and not against its own mean: a forecast that is four times as fast feels the same hiccup of the
    machine four times as much. Where eager itself varies by half its length nothing can be told. Widths of thirty
    forecasts are uncertain: upstream eager against itself once had 3.0, with an interval from 0.4 on.
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
        # a hundredth of the forecast is as good as nothing
        ratios.append(ratio_of_widths(compiled, eager, least=0.01 * statistics.median(eager)))
    return Figure(
        value=max(ratio.value for ratio in ratios),
        unit="x",
        low=max(ratio.low for ratio in ratios),
        high=max(ratio.high for ratio in ratios),
        method="width of the middle four fifths of the warm compiled latency over upstream eager's, with a 95 % "
        "interval (block bootstrap); the largest over repeats, and so are its ends",
    )


def _worst(intervals: Sequence[Interval], of_what: str) -> Figure:
    worst = min(intervals, key=lambda interval: interval.low)
    return Figure(
        value=worst.value,
        unit="x",
        low=worst.low,
        high=worst.high,
        method=f"same cache eager / compiled, ratio of medians with {of_what}, worst repeat",
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
