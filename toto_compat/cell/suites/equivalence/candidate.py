"""The candidate's answers to what upstream eager was asked, and to the same asked in other ways."""

import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from pydantic import Field
from torch import Tensor

from toto_compat.cell.session import Session
from toto_compat.cell.suites.equivalence.comparison import sizes_of
from toto_compat.cell.suites.equivalence.exchange import Tensors, load_tensors, save_tensors
from toto_compat.cell.suites.equivalence.other_weights import bound_beside
from toto_compat.cell.suites.equivalence.reference import parts_of, truths_file
from toto_compat.cell.suites.equivalence.scenarios import (
    Drawing,
    Scenario,
    as_a_user_gives_it,
    asked_of_nan,
    not_masked,
    pair_of,
    series_of,
    steps_a_user_asks_for,
    threads_of,
    what_is_asked,
)
from toto_compat.cell.trial import CandidateError, Trial, blaming_the_candidate, synchronise, telling_line
from toto_compat.contract.strict_model import StrictModel
from toto_compat.model.bound import BoundModel, observed
from toto_compat.model.forecaster import forecaster_of
from toto_compat.model.series import Series

# The first series again, in ways that must not change its forecast.
HALF_A_PATCH_LESS = "again_half_a_patch_less"
HELD = "held_while_another_was_forecast"
AGAIN = (
    HELD,  # no forecast anew: the tensor itself, which nobody may write to any more
    "again",
    HALF_A_PATCH_LESS,
    "again_after_other_shapes",
    "again_after_an_exception",
    "again_after_a_break",
    "again_after_many_forecasts",
    "again_another_day",
    "again_in_a_thread",
    "again_after_samples",
)
BESIDE_ANOTHER_MODEL = "again_beside_another_model"  # where there was one
MANY = (
    "many_forecasts"  # [forecast, batch, variate, time]: two series in turn, each must be forecast as it was at first
)
# Of one patch, which take little: what wears out or counts its forecasts shows in them. How many is drawn: who knew the
# number could be right until then. At most this many more for each iteration of the profile.
FEWEST_FORECASTS = 150
FORECASTS_AN_ITERATION = 50
TOLD_NOTHING = "mean_forecast_told_nothing"
WRITTEN_OVER = "again_in_the_tensors_of_another"
TWO_AT_ONCE = "two_at_once"  # [forecast]: how far it is from the same forecast alone, RMSE over its size
FORECASTS_AT_ONCE = 20
UNSEEDED, UNSEEDED_HELD, UNSEEDED_NEXT = "unseeded", "unseeded, held", "unseeded, the next"


class CandidateAsked(StrictModel):
    """Says how the candidate took it; the answers themselves are in its file."""

    draws: str
    has_forecaster: bool = False  # else there is no `forecast()` to be asked
    thread_refused: str = ""  # what it raised in a second thread, if it did
    two_at_once_refused: str = ""  # what it raised when two threads asked at the same time
    refused: dict[str, str] = Field(default={})  # scenarios that it may refuse, and what it raised there
    nan_refused: dict[str, str] = Field(default={})  # what of NaN that is not masked, and what it raised there


class NotItsOwnError(Exception):
    """The candidate changed what belongs to the caller."""


class BrokenOffError(Exception):
    """Raised inside a forecast by its observer, as an impatient caller would."""


def answers_file(work: Path) -> Path:
    return work / "equivalence" / "candidate.safetensors"


def samples_file(work: Path) -> Path:
    return work / "equivalence" / "samples.safetensors"


def run_candidate(session: Session) -> CandidateAsked:
    """Ask the candidate every scenario that has a reference, the first series again and again, and for samples."""
    asked = what_is_asked(session)
    trial, model = session.trial, session.candidate
    first = pair_of(trial.workload)[0]
    series = series_of(trial, first, model.patch_size)
    asking = _Asking(trial, model, load_tensors(truths_file(session.work)))
    answers = asking.answers.setdefault(first.name, {})

    def again(how: str, *, less: int = 0) -> None:
        with blaming_the_candidate(), leaving_alone(series, random_state=True):
            answers[how] = model.generate_mean(series, first.horizon * model.patch_size - less).double()

    one, other, *others = asked.scenarios
    asking.ask(one)
    with blaming_the_candidate():
        held = model.generate_mean(series, first.horizon * model.patch_size)
    asking.ask(other)
    answers[HELD] = held.double()
    another = series_of(trial, other, model.patch_size)
    asking.answers.setdefault(other.name, {})[WRITTEN_OVER] = _written_over(
        model, series_of(trial, first, model.patch_size), another, first.horizon * model.patch_size
    )
    again("again")
    again(HALF_A_PATCH_LESS, less=model.patch_size // 2)
    for scenario in others:
        if not scenario.more_threads and not scenario.other_weights:  # last of all
            asking.ask(scenario)
    again("again_after_other_shapes")
    nan_refused = _provoke(trial, model, series, asking.answers)
    again("again_after_an_exception")
    _break_off(model, series, first.horizon * model.patch_size)
    again("again_after_a_break")
    answers[MANY] = _many_forecasts(session, model, (series, another))
    again("again_after_many_forecasts")
    with another_day():
        again("again_another_day")
    trial.quiet.give_way()
    thread_refused = _in_a_thread(lambda: again("again_in_a_thread"))
    drawn = draw_samples(trial, model, asked.drawings)
    again("again_after_samples")
    for scenario in others:
        if scenario.more_threads:
            asking.ask(scenario)
    beside = [scenario for scenario in others if scenario.other_weights and asking.has_a_reference(scenario)]
    if beside:
        second = _second_model(trial)
        drawn |= _drawn(trial, second, asked.second_model)  # before any mean
        asking.ask(*beside, of=second)
        again(BESIDE_ANOTHER_MODEL)
    # last: dynamo may have compiled otherwise meanwhile
    answers[TWO_AT_ONCE], two_at_once_refused = _two_at_once(model, (series, another))
    answers[TOLD_NOTHING] = _told_nothing(trial, series, first)
    save_tensors(answers_file(session.work), asking.answers)
    save_tensors(samples_file(session.work), drawn)
    return CandidateAsked(
        draws=model.draws,
        has_forecaster=forecaster_of(model) is not None,
        thread_refused=thread_refused,
        two_at_once_refused=two_at_once_refused,
        refused=asking.refused,
        nan_refused=nan_refused,
    )


class _Asking:
    """Asks scenarios, and keeps what was answered and what was refused."""

    def __init__(self, trial: Trial, model: BoundModel, truths: Tensors) -> None:
        self.answers: Tensors = {}
        self.refused: dict[str, str] = {}
        self._trial = trial
        self._model = model
        self._truths = truths

    def has_a_reference(self, scenario: Scenario) -> bool:
        return scenario.name in self._truths

    def ask(self, scenario: Scenario, *, of: BoundModel | None = None) -> None:
        trial, model = self._trial, of or self._model
        if not self.has_a_reference(scenario) or (scenario.through_forecast and forecaster_of(model) is None):
            return
        series = series_of(trial, scenario, model.patch_size)
        truth = self._truths[scenario.name]["truth"].to(series.inputs.device)
        answers = self.answers.setdefault(scenario.name, {})
        for part in parts_of(scenario):
            try:
                with blaming_the_candidate(), threads_of(scenario), leaving_alone(series):
                    answers |= part(model, scenario, series, truth)
                    synchronise(trial.device)
            except CandidateError as error:
                if not scenario.may_be_refused:
                    raise
                self.refused[scenario.name] = telling_line(error.cause)
        trial.quiet.give_way()


def run_candidate_once(session: Session) -> CandidateAsked:
    """Do the same for a suite that shares the process with the one before it."""
    if samples_file(session.work).exists():
        return CandidateAsked(draws="")
    return run_candidate(session)


@contextmanager
def leaving_alone(series: Series, *, random_state: bool = False) -> Iterator[None]:
    """See that the caller's series is as it was, and the random numbers that come next, where nothing is drawn."""
    before = {name: value.clone() for name, value in vars(series).items()}
    random_before = _random_state(series.inputs.device)
    yield
    changed = [name for name, value in vars(series).items() if not _is_same(value, before[name])]
    if changed:
        raise NotItsOwnError(f"it wrote to the series that it was given: {', '.join(changed)}")
    if random_state and not torch.equal(random_before, _random_state(series.inputs.device)):
        raise NotItsOwnError("a mean forecast, which draws nothing, changed the random state")


def _is_same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))


def _random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _written_over(model: BoundModel, written: Series, another: Series, steps: int) -> Tensor:
    """Forecast a series, then another one that was written into its very tensors, as a rolling window is."""
    with blaming_the_candidate():
        model.generate_mean(written, steps)
        for name, value in vars(another).items():
            getattr(written, name).copy_(value)
        return model.generate_mean(written, steps).double()


def _two_at_once(model: BoundModel, series: tuple[Series, Series]) -> tuple[Tensor, str]:
    """Ask for two series in two threads at the same time. A clear error is an answer: what it says, or nothing.

    Gives how far each forecast is from the same one alone.
    """
    with blaming_the_candidate():
        alone = [model.generate_mean(one, model.patch_size).clone() for one in series]
    far: list[Tensor] = []
    refused: list[BaseException] = []
    begin = threading.Barrier(2)

    def run(number: int) -> None:
        begin.wait()
        try:
            for _ in range(FORECASTS_AT_ONCE):
                forecast = model.generate_mean(series[number], model.patch_size)
                difference = (forecast - alone[number]).double() / sizes_of(alone[number])
                far.append(difference.square().mean().sqrt().cpu())
        except BaseException as error:
            refused.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return torch.stack(far) if far else torch.empty(0), telling_line(refused[0]) if refused else ""


def _provoke(trial: Trial, model: BoundModel, series: Series, answers: Tensors) -> dict[str, str]:
    """Ask for what cannot be forecast: NaN that no mask hides. An error is an answer: what was raised, where."""
    raised: dict[str, str] = {}
    for name, broken in not_masked(series, model.patch_size).items():
        for what, ask in asked_of_nan(trial, broken, model.patch_size).items():
            try:
                answers.setdefault(name, {})[what] = ask(model).double()
            except Exception as error:
                raised[f"{name}, {what}"] = telling_line(error)
    return raised


def _break_off(model: BoundModel, series: Series, steps: int) -> None:
    @contextmanager
    def impatient(step: int) -> Iterator[None]:
        yield
        if step == 1:
            raise BrokenOffError

    with suppress(BrokenOffError), observed(model, impatient):
        model.generate_mean(series, steps)


def _many_forecasts(session: Session, model: BoundModel, series: tuple[Series, Series]) -> Tensor:
    """Two series in turn, as often as was drawn, which nobody can know; of an even number."""
    most = FEWEST_FORECASTS + FORECASTS_AN_ITERATION * session.profile.iterations
    pairs = random.SystemRandom().randint(FEWEST_FORECASTS, most) // 2
    with blaming_the_candidate():
        forecasts = [model.generate_mean(one, model.patch_size) for _ in range(pairs) for one in series]
        return torch.stack(forecasts).double()


@contextmanager
def another_day() -> Iterator[None]:
    """The clocks that Python shows are a year on, and it is no CI machine, or one if it was none.

    What is kept for some time runs out meanwhile. A clock that was taken by its name before, or read in C, is right.
    """
    variables = {key: value for key, value in os.environ.items() if key != "CI"}
    if "CI" not in os.environ:
        variables["CI"] = "true"
    with ExitStack() as stack:
        for name in ("time", "monotonic", "perf_counter", "time_ns", "monotonic_ns", "perf_counter_ns"):
            by = 400 * 86400 * (10**9 if name.endswith("_ns") else 1)
            stack.enter_context(mock.patch.object(time, name, _moved(getattr(time, name), by)))
        stack.enter_context(mock.patch.dict(os.environ, variables, clear=True))
        yield


def _moved(clock: Callable[[], float], by: int) -> Callable[[], float]:
    return lambda: clock() + by


def _in_a_thread(ask: Callable[[], None]) -> str:
    """Ask in a second thread. A clear error is an answer: what it says, or nothing if there was none."""
    refused: list[BaseException] = []

    def run() -> None:
        try:
            ask()
        except BaseException as error:
            refused.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return telling_line(getattr(refused[0], "cause", refused[0])) if refused else ""


def _told_nothing(trial: Trial, series: Series, first: Scenario) -> Tensor:
    """The forecast of the cell's cache, eager and with no shape announced: what was announced must not matter."""
    with blaming_the_candidate():
        model = trial.eager(trial.cache)
        return model.generate_mean(series, first.horizon * model.patch_size).double()


def _second_model(trial: Trial) -> BoundModel:
    """Bind the cell's cache once more; the first model is still there, as in a service that has two checkpoints."""
    with blaming_the_candidate():
        return bound_beside(trial)


def draw_samples(trial: Trial, model: BoundModel, drawings: Sequence[Drawing]) -> Tensors:
    """All drawings, the first seed of the first one twice."""
    drawn = _drawn(trial, model, drawings)
    for first in drawings[:1]:
        with blaming_the_candidate():
            [again] = drawn_by(model, trial, first, seed=first.seeds[0]).values()
        drawn[first.scenario.name]["again"] = again
        drawn[first.scenario.name] |= _unseeded(trial, model, first)
    return drawn


def _drawn(trial: Trial, model: BoundModel, drawings: Sequence[Drawing]) -> Tensors:
    drawn: Tensors = {}
    for drawing in drawings:
        if drawing.scenario.through_forecast and forecaster_of(model) is None:
            continue
        for seed in drawing.seeds:
            with blaming_the_candidate():
                drawn.setdefault(drawing.scenario.name, {}).update(drawn_by(model, trial, drawing, seed=seed))
        trial.quiet.give_way()
    return drawn


def _unseeded(trial: Trial, model: BoundModel, drawing: Drawing) -> dict[str, Tensor]:
    """Draw twice as a service does, which sets no seed: the second must be other draws, and leave the first alone."""
    series = series_of(trial, drawing.scenario, model.patch_size)
    steps = steps_drawn(trial, drawing, model.patch_size)
    asked = {"num_samples": drawing.samples, "samples_per_batch": drawing.per_batch}
    with blaming_the_candidate():
        held = model.generate_samples(series, steps, **asked)
        then = held.clone()
        following = model.generate_samples(series, steps, **asked)
    return {UNSEEDED: then.double(), UNSEEDED_HELD: held.double(), UNSEEDED_NEXT: following.double()}


def drawn_by(model: BoundModel, trial: Trial, drawing: Drawing, *, seed: int) -> dict[str, Tensor]:
    """Samples under a seed, shape batch, variate, time, samples; of `forecast()` also what it says about them."""
    scenario = drawing.scenario
    series = series_of(trial, scenario, model.patch_size)
    steps = steps_drawn(trial, drawing, model.patch_size)
    torch.manual_seed(seed)
    if scenario.through_forecast:
        given = as_a_user_gives_it(series, model.patch_size)
        forecast = forecaster_of(model).forecast(given, steps, num_samples=drawing.samples)
        told = {f"{seed}.{name}": said(forecast).double() for name, said in SAID_OF_SAMPLES.items()}
        return {str(seed): forecast.samples.double(), **told}
    with leaving_alone(series):
        samples = model.generate_samples(
            series, steps, num_samples=drawing.samples, samples_per_batch=drawing.per_batch
        )
    return {str(seed): samples.double()}


def steps_drawn(trial: Trial, drawing: Drawing, patch_size: int) -> int:
    """How long the samples are: of the pair the first horizon, since its scenario may be longer."""
    scenario = drawing.scenario
    if scenario.through_forecast:
        return steps_a_user_asks_for(scenario, patch_size)
    is_of_the_pair = scenario in pair_of(trial.workload)
    return trial.workload.horizon[0] if is_of_the_pair else scenario.points(patch_size)


# What a `Forecast` says about its samples.
SAID_OF_SAMPLES: Mapping[str, Callable[[Any], Tensor]] = {
    "mean": lambda forecast: forecast.mean,
    "median": lambda forecast: forecast.median,
    "std": lambda forecast: forecast.std,
    "quantile": lambda forecast: forecast.quantile(0.9),
}
