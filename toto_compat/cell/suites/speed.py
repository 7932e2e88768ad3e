"""Speed: upstream eager, the same cache eager and the compiled cell, forecast by forecast in turn, a process each."""

import random
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import torch

from toto_compat.cell.contest import Contest
from toto_compat.cell.contestant import Contestant, ContestantError, series_bytes
from toto_compat.cell.machine_conditions import machine_conditions
from toto_compat.cell.quiet import QuietLock
from toto_compat.cell.session import Session
from toto_compat.cell.suites.speed_figures import (
    COMPILED,
    SAME_CACHE_EAGER,
    UPSTREAM_EAGER,
    SpeedRun,
    SpeedRuns,
    unfair_turns,
)
from toto_compat.cell.suites.timed_forecasts import TimedRound, worst_of_timed
from toto_compat.cell.trial import UPSTREAM, Trial
from toto_compat.contract.request import CellProfile, TimedShape, patches, sampling_of
from toto_compat.contract.result import Outcome, SuiteEvidence
from toto_compat.contract.suites import Suite
from toto_compat.model.bound import BoundModel
from toto_compat.model.series import Series

_WARM_UP_ROUNDS = 2
_SLOW_SECONDS = 5.0  # of one forecast, from which on three rounds have to do
_FEWEST_OF_SLOW, _FEWEST = 3, 10


def make_contestant(trial: Trial, name: str) -> BoundModel:
    """The model of a contestant, made in its own process."""
    if name == COMPILED:
        return trial.compiled(batch_sizes=trial.batch_sizes)
    return trial.eager(UPSTREAM if name == UPSTREAM_EAGER else trial.cache)


def new_series(trial: Trial, patch_size: int, shape: TimedShape) -> tuple[Series, bytes]:
    """A series that no process of this cell has met and none can know in advance: by a seed that was drawn just now."""
    seed = random.SystemRandom().randrange(2**31)
    assert shape.context is not None and shape.horizon is not None
    context, horizon = (patches(points, patch_size) for points in (shape.context, shape.horizon))
    series = trial.series(patch_size, context, horizon, batch=shape.batch, seed_offset=seed)
    if trial.csv is not None:
        # a user's series is the same whatever the seed: a hundredth of its spread makes it another one
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(series.inputs.shape, generator=generator).to(series.inputs)
        moved = series.inputs + 0.01 * series.inputs.std() * noise
        series = replace(series, inputs=torch.where(series.padding_mask, moved, series.inputs))
    return series, series_bytes(series)


def run_speed(session: Session) -> SpeedRuns | SuiteEvidence:
    """Warm up, then time all contestants while nothing else on this machine works, and look at what they forecast."""
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


def conduct(session: Session, contestants: Sequence[Contestant]) -> SpeedRuns:
    """The contests themselves, one forecast that is timed after the other, by the same processes."""
    trial = session.trial
    introductions = [contestant.introduction() for contestant in contestants]
    patch_size = introductions[0].patch_size
    session.cache_class_elsewhere = introductions[-1].cache_class
    shapes, left_out = shapes_worth_timing(session)
    timed = [time_shape(session, contestants, patch_size, shape) for shape in shapes]
    session.changed_elsewhere = tuple(dict.fromkeys(one for contestant in contestants for one in contestant.end()))
    runs = [
        run.model_copy(update={"timed_forecasts": worst_of_timed(trial, shape, forecasts, contests=len(timed))})
        for run, shape, forecasts in timed
    ]
    return SpeedRuns(runs=tuple(runs), no_samples=session.no_samples, left_out=left_out)


def shapes_worth_timing(session: Session) -> tuple[Sequence[TimedShape], str]:
    """The forecasts to time, and why not all: a cell that cannot PASS is timed on the first, so that its row has a
    figure, while the others would only compile it again (half of the minutes of a whole model on a CPU)."""
    first, *others = session.trial.workload.timed_shapes
    if not others or not (broken := session.why_it_cannot_pass()):
        return (first, *others), ""
    names = " and ".join(shape.name for shape in others)
    return (first,), f"{names} not timed: {broken}, so that this cell cannot PASS"


Timed = tuple[SpeedRun, TimedShape, list[TimedRound]]


def time_shape(session: Session, contestants: Sequence[Contestant], patch_size: int, shape: TimedShape) -> Timed:
    """One contest: warm up, find out how many rounds there is time for, and time them."""
    trial, profile = session.trial, session.profile
    assert shape.horizon is not None
    sampling = sampling_of(shape.samples) if shape.samples else (0, 0)
    contest = Contest(contestants, partial(new_series, trial, patch_size, shape), shape.horizon, sampling=sampling)
    compiled = contestants[-1]
    first_seconds = contest.first(compiled)
    fewer = rounds_of_slow(contest, contestants, profile)
    trial.quiet.give_way()
    with trial.quiet.timing():
        before = machine_conditions()
        used_before = [contestant.cpu_seconds() for contestant in contestants]
        timings, forecasts = contest.rounds(profile.iterations * profile.forecasts_per_iteration, fewer)
        used = [contestant.cpu_seconds() - then for contestant, then in zip(contestants, used_before, strict=True)]
        after = machine_conditions()
    run = SpeedRun(
        shape=shape.name,
        timings={name: tuple(values) for name, values in timings.items()},
        warm_start_s=max(0.0, first_seconds - statistics.median(timings[COMPILED]) / 1000.0),
        conditions={"before": before, "after": after},
        unfair_turns=unfair_turns(timings, used, threads=torch.get_num_threads()) if trial.device == "cpu" else (),
    )
    timed = [
        TimedRound(series, eager=answers.get(UPSTREAM_EAGER), candidate=answers[COMPILED])
        for series, answers in forecasts
    ]
    return run, shape, timed


def rounds_of_slow(contest: Contest, contestants: Sequence[Contestant], profile: CellProfile) -> dict[str, int]:
    """Warm up, and give eager contestants that would take too long fewer rounds; the candidate has all of them."""
    rounds = profile.iterations * profile.forecasts_per_iteration
    fewer: dict[str, int] = {}
    for contestant in contestants:
        seconds = contest.first(contestant)
        if seconds < _SLOW_SECONDS:
            seconds = min(seconds, *(contest.first(contestant) for _ in range(_WARM_UP_ROUNDS - 1)))
        least = _FEWEST_OF_SLOW if seconds > _SLOW_SECONDS else _FEWEST
        allowed = max(least, int(profile.seconds_a_contestant / max(seconds, 1e-9)))
        if contestant.name != COMPILED and allowed < rounds:
            fewer[contestant.name] = allowed
    return fewer
