"""Speed: upstream eager, the same cache eager and the compiled cell, forecast by forecast in turn, a process each."""

import os
import random
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import Field

from toto_compat.cell.quiet import QuietLock
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

# torch comes with them, which the process that puts evidence together does without
if TYPE_CHECKING:
    from torch import Tensor

    from toto_compat.cell.contestant import Contestant
    from toto_compat.cell.session import Session
    from toto_compat.cell.trial import Trial
    from toto_compat.model.bound import BoundModel
    from toto_compat.model.series import Series

UPSTREAM_EAGER = "upstream_eager"
SAME_CACHE_EAGER = "same_cache_eager"
COMPILED = "compiled"

UNSTABLE = 0.5  # of its median: eager's own middle range, from which on nothing is told. This project's choice
# Processor time over what a contestant's own turns give it: more was spent in the others' turns. This project's choice
BUSY_IN_OTHERS_TURNS = 1.5
_WARM_UP_ROUNDS = 2

METHOD = (
    "generate_mean at the smallest context and the first horizon; every contestant is a process of its own, and one in "
    "which no cache of a user was imported takes the time; the contestants take turns in a rotating order, each round "
    "on a series that nobody has met before; the device is synchronised before a forecast counts as done; compile and "
    "warm-up lie before the loop; the forecasts that were timed are held against upstream eager's afterwards"
)


class SpeedRun(StrictModel):
    """Holds what one contest measured; the orchestrator makes figures of one or several of them."""

    timings: dict[str, tuple[float, ...]]  # contestant -> milliseconds per forecast, in the order they were taken
    warm_start_s: float  # first compiled forecast minus a warm one; warm if another process filled the inductor cache
    conditions: dict[str, Any] = Field(default={})
    timed_forecasts: float | None = None  # worst error of a timed forecast over what is allowed
    busy_in_others_turns: tuple[str, ...] = ()  # contestants that were, and how much


class TakesPart(Protocol):
    """What a contest needs of a contestant: see `cell.contestant`."""

    name: str

    def forecast(self, series: bytes, horizon_steps: int) -> "Tensor": ...

    def cpu_seconds(self) -> float: ...


class Contest:
    """Takes the time of contestants on series that none of them has met."""

    def __init__(
        self,
        contestants: Sequence[TakesPart],
        new_series: Callable[[], tuple["Series", bytes]],
        horizon_steps: int,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._contestants = contestants
        self._new_series = new_series
        self._horizon_steps = horizon_steps
        self._clock = clock

    def one(self, contestant: TakesPart, series: bytes) -> tuple[float, "Tensor"]:
        """Return the seconds and the forecast of one contestant."""
        start = self._clock()
        forecast = contestant.forecast(series, self._horizon_steps)
        return self._clock() - start, forecast

    def first(self, contestant: TakesPart) -> float:
        """The seconds of a forecast outside of any round."""
        return self.one(contestant, self._new_series()[1])[0]

    def rounds(self, count: int) -> tuple[dict[str, list[float]], list[tuple["Series", dict[str, "Tensor"]]]]:
        """Everybody once a round; returns the milliseconds of each, and each round's series with its forecasts."""
        timings: dict[str, list[float]] = {contestant.name: [] for contestant in self._contestants}
        forecasts: list[tuple[Series, dict[str, Tensor]]] = []
        for number, contestant in enumerate(taking_turns(self._contestants, count)):
            if number % len(self._contestants) == 0:
                series, as_bytes = self._new_series()
                forecasts.append((series, {}))
            seconds, forecast = self.one(contestant, as_bytes)
            timings[contestant.name].append(seconds * 1000.0)
            forecasts[-1][1][contestant.name] = forecast
        return timings, forecasts


def make_contestant(trial: "Trial", name: str) -> "BoundModel":
    """The model of a contestant, made in its own process."""
    from toto_compat.cell.trial import UPSTREAM

    if name == COMPILED:
        return trial.compiled(batch_sizes=trial.batch_sizes)
    return trial.eager(UPSTREAM if name == UPSTREAM_EAGER else trial.cache)


def new_series(trial: "Trial", patch_size: int) -> "tuple[Series, bytes]":
    """A series that no process of this cell has met and none can know in advance: by a seed that was drawn just now."""
    import torch

    from toto_compat.cell.contestant import series_bytes

    seed = random.SystemRandom().randrange(2**31)
    workload = trial.workload
    series = trial.series(patch_size, workload.context_patches[0], workload.horizon_patches[0], seed_offset=seed)
    if trial.csv is not None:
        # a user's series is the same whatever the seed: a hundredth of its spread makes it another one
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(series.inputs.shape, generator=generator).to(series.inputs)
        moved = series.inputs + 0.01 * series.inputs.std() * noise
        series = replace(series, inputs=torch.where(series.padding_mask, moved, series.inputs))
    return series, series_bytes(series)


def run_speed(session: "Session") -> SpeedRun | SuiteEvidence:
    """Warm up, then time all contestants while nothing else on this machine works, and look at what they forecast."""
    # torch comes with it, see above
    from toto_compat.cell.contestant import Contestant, ContestantError

    trial = session.trial
    alone = replace(trial, quiet=QuietLock(None))  # who has the lock is the process that takes the time
    try:
        with ExitStack() as stack:
            contestants = [
                stack.enter_context(
                    Contestant(
                        name, partial(make_contestant, alone, name), device=trial.device, settings=trial.settings
                    )
                )
                for name in (UPSTREAM_EAGER, SAME_CACHE_EAGER, COMPILED)
            ]
            return conduct(session, contestants)
    except ContestantError as error:
        by_the_candidate = error.failed.by_the_model and error.name == COMPILED
        outcome = Outcome.MODEL_FAILED if by_the_candidate else Outcome.ERROR
        return SuiteEvidence(suite=Suite.SPEED, outcome=outcome, failure=error.failed.failure)


def conduct(session: "Session", contestants: "Sequence[Contestant]") -> SpeedRun:
    """The contest itself."""
    # torch comes with it, see above
    import torch

    from toto_compat.cell.suites.timed_forecasts import TimedForecast, worst_ratio

    trial, profile = session.trial, session.profile
    introductions = [contestant.introduction() for contestant in contestants]
    patch_size = introductions[0].patch_size
    session.cache_class_elsewhere = introductions[-1].cache_class
    contest = Contest(
        contestants, partial(new_series, trial, patch_size), trial.workload.horizon_patches[0] * patch_size
    )
    compiled = contestants[-1]
    first_seconds = contest.first(compiled)
    contest.rounds(_WARM_UP_ROUNDS)
    trial.quiet.give_way()
    with trial.quiet.timing():
        before = machine_conditions()
        used_before = [contestant.cpu_seconds() for contestant in contestants]
        timings, forecasts = contest.rounds(profile.iterations * profile.forecasts_per_iteration)
        used = [contestant.cpu_seconds() - then for contestant, then in zip(contestants, used_before, strict=True)]
        after = machine_conditions()
    session.changed_elsewhere = tuple(dict.fromkeys(one for contestant in contestants for one in contestant.end()))
    timed = [
        TimedForecast(series, eager=answers[UPSTREAM_EAGER], candidate=answers[COMPILED])
        for series, answers in forecasts
    ]
    return SpeedRun(
        timings={name: tuple(values) for name, values in timings.items()},
        warm_start_s=max(0.0, first_seconds - statistics.median(timings[COMPILED]) / 1000.0),
        conditions={"before": before, "after": after},
        timed_forecasts=worst_ratio(trial, timed),
        busy_in_others_turns=busy_in_others_turns(timings, used, threads=torch.get_num_threads()),
    )


def busy_in_others_turns(
    timings: Mapping[str, Sequence[float]], used: Sequence[float], *, threads: int
) -> tuple[str, ...]:
    """Name who used more of the processors than its own turns account for: it slowed the others down."""
    told = []
    for (name, milliseconds), seconds in zip(timings.items(), used, strict=True):
        turns = sum(milliseconds) / 1000.0
        if seconds > BUSY_IN_OTHERS_TURNS * turns * threads + 1.0:
            told.append(f"{name} used {seconds:.1f} s of processor time, its own turns took {turns:.1f} s")
    return tuple(told)


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
    busy = "; ".join(one for run in runs for one in run.busy_in_others_turns)
    figures: dict[str, Figure] = {"timed_forecasts": timed_figure(runs)}
    if enough and not busy:
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
        why = too_few or f"a contestant worked while others were timed: {busy}"
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
            "forecasts_per_repeat": counts,
            "conditions": [run.conditions for run in runs],
        },
    )


def timed_figure(runs: Sequence[SpeedRun]) -> Figure:
    """How far the timed forecasts were from upstream eager's, over what is allowed."""
    ratios = [run.timed_forecasts for run in runs if run.timed_forecasts is not None]
    if len(ratios) < len(runs):
        return Figure(value=None, missing="the forecasts that were timed were not looked at")
    return Figure(
        value=max(ratios),
        method="error of the compiled forecasts that were timed over what is allowed: three of each process, drawn "
        "afterwards, by equivalence's rule, all others by ten times the largest error allowed there; the worst",
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


def machine_conditions() -> Mapping[str, Any]:
    """Load, clocks, throttling and who else uses the GPU: what explains a figure that does not repeat."""
    conditions: dict[str, Any] = {"load_average": list(os.getloadavg())}
    frequency = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq")
    if frequency.is_file():
        conditions["cpu_mhz"] = int(frequency.read_text()) / 1000.0
    if shutil.which("nvidia-smi"):
        conditions["gpu"] = _nvidia_smi(
            "--query-gpu=clocks.sm,clocks.mem,clocks_throttle_reasons.active,temperature.gpu,utilization.gpu"
        )
        own = str(os.getpid())
        others = _nvidia_smi("--query-compute-apps=pid,process_name,used_memory").splitlines()
        conditions["foreign_gpu_processes"] = [line for line in others if line.partition(",")[0].strip() != own]
    return conditions


def _nvidia_smi(query: str) -> str:
    command = ["nvidia-smi", query, "--format=csv,noheader"]
    try:
        finished = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return finished.stdout.strip()
