"""The candidate's answers to what upstream eager was asked, and to the same asked in other ways."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from toto_compat.cell.session import Session
from toto_compat.cell.suites.equivalence.exchange import Tensors, load_tensors, save_tensors
from toto_compat.cell.suites.equivalence.reference import quantities, truths_file
from toto_compat.cell.suites.equivalence.scenarios import Scenario, all_scenarios, pair_of, series_of
from toto_compat.cell.trial import Trial, blaming_the_candidate, synchronise, telling_line
from toto_compat.contract.strict_model import StrictModel
from toto_compat.model.bound import BoundModel, observed
from toto_compat.model.series import Series

# The first series again, in ways that must not change its forecast.
AGAIN = ("again", "again_after_other_shapes", "again_after_an_exception", "again_after_a_break", "again_in_a_thread")


class CandidateAsked(StrictModel):
    """Says how the candidate took it; the answers themselves are in its file."""

    draws: str
    thread_refused: str = ""  # what it raised in a second thread, if it did


class BrokenOffError(Exception):
    """Raised inside a forecast by its observer, as an impatient caller would."""


def answers_file(work: Path) -> Path:
    return work / "equivalence" / "candidate.safetensors"


def samples_file(work: Path) -> Path:
    return work / "equivalence" / "samples.safetensors"


def run_candidate(session: Session) -> CandidateAsked:
    """Ask the candidate every scenario that has a reference, the first series again and again, and for samples."""
    trial, model = session.trial, session.candidate_told_nothing
    truths = load_tensors(truths_file(session.work))
    first, second = pair_of(trial.workload)
    answers: Tensors = {}

    def ask(scenario: Scenario) -> None:
        if scenario.name not in truths:
            return
        series = series_of(trial, scenario, model.patch_size)
        truth = truths[scenario.name]["truth"].to(series.inputs.device)
        with blaming_the_candidate():
            answers[scenario.name] = quantities(model, series, truth)
            synchronise(trial.device)
        trial.quiet.give_way()

    def ask_again(how: str, series: Series) -> None:
        with blaming_the_candidate():
            forecast = model.generate_mean(series, first.horizon * model.patch_size)
            answers.setdefault(first.name, {})[how] = forecast.double()

    series = series_of(trial, first, model.patch_size)
    ask(first)
    ask(second)
    ask_again("again", series)
    for scenario in all_scenarios(trial):
        if scenario.name not in answers:
            ask(scenario)
    ask_again("again_after_other_shapes", series)
    _provoke(model, series)
    ask_again("again_after_an_exception", series)
    _break_off(model, series, first.horizon * model.patch_size)
    ask_again("again_after_a_break", series)
    refused = _in_a_thread(lambda: ask_again("again_in_a_thread", series))
    save_tensors(answers_file(session.work), answers)
    save_tensors(samples_file(session.work), _samples(session, model))
    return CandidateAsked(draws=model.draws, thread_refused=refused)


def run_candidate_once(session: Session) -> CandidateAsked:
    """Do the same for a suite that shares the process with the one before it."""
    if samples_file(session.work).exists():
        return CandidateAsked(draws="")
    return run_candidate(session)


def _provoke(model: BoundModel, series: Series) -> None:
    """Forecast what cannot be forecast; whether the candidate raises is its own affair."""
    nothing = torch.full_like(series.inputs, torch.nan)
    broken = Series(**{**vars(series), "inputs": nothing, "padding_mask": torch.ones_like(series.padding_mask)})
    with suppress(Exception):  # the point is what comes after it
        model.generate_mean(broken, model.patch_size)


def _break_off(model: BoundModel, series: Series, steps: int) -> None:
    @contextmanager
    def impatient(step: int) -> Iterator[None]:
        yield
        if step == 1:
            raise BrokenOffError

    with suppress(BrokenOffError), observed(model, impatient):
        model.generate_mean(series, steps)


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


def sample_seeds(trial: Trial, rounds: int) -> tuple[int, ...]:
    return tuple(trial.workload.seed + number for number in range(max(2, rounds)))


def _samples(session: Session, model: BoundModel) -> Tensors:
    """Samples of both series under several seeds, the first seed of the first series twice."""
    trial = session.trial
    drawn: Tensors = {}
    for scenario in pair_of(trial.workload):
        series = series_of(trial, scenario, model.patch_size)
        for seed in sample_seeds(trial, session.profile.iterations):
            with blaming_the_candidate():
                drawn.setdefault(scenario.name, {})[str(seed)] = sampled(model, series, trial, seed=seed)
        trial.quiet.give_way()
    first = pair_of(trial.workload)[0]
    seed = sample_seeds(trial, session.profile.iterations)[0]
    with blaming_the_candidate():
        series = series_of(trial, first, model.patch_size)
        drawn[first.name]["again"] = sampled(model, series, trial, seed=seed)
    return drawn


def sampled(model: Any, series: Series, trial: Trial, *, seed: int) -> Tensor:
    """Samples of the first horizon, shape batch, variate, time, samples; one seed gives one stream of draws."""
    torch.manual_seed(seed)
    steps = trial.workload.horizon_patches[0] * model.patch_size
    samples: Tensor = model.generate_samples(
        series, steps, num_samples=trial.workload.samples, samples_per_batch=trial.workload.samples_per_batch
    )
    return samples.double()
