"""Contestants in processes of their own: what they hand back, what they die of, what they cannot do to a clock."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cell.small_trials import WORKLOAD, trial_of
from toto_compat.cell.contest import Contest
from toto_compat.cell.contestant import Contestant, ContestantError, series_bytes
from toto_compat.cell.group import GroupResult
from toto_compat.cell.session import Session
from toto_compat.cell.suites import speed
from toto_compat.cell.suites.speed import make_contestant, new_series, run_speed, shapes_worth_timing
from toto_compat.cell.suites.speed_figures import COMPILED, SpeedRun
from toto_compat.contract.gate_limit import GateLimit
from toto_compat.contract.request import CellProfile, CompileSettings, Demand, TimedShape, Workload
from toto_compat.contract.result import Figure, Outcome, SuiteEvidence
from toto_compat.contract.suites import Suite
from toto_compat.model.series import Series

pytestmark = pytest.mark.cell


class Doubles:
    """Forecasts twice the newest values; what it shall do besides is handed in."""

    patch_size = 32
    cache_class = "tests:Doubles"

    def __init__(self, besides: Callable[[Series], None] = lambda _series: None) -> None:
        self._besides = besides

    def generate_mean(self, series: Series, horizon_steps: int) -> Tensor:
        self._besides(series)
        return 2 * series.inputs[..., -horizon_steps:]


@contextmanager
def process_of(model: Any) -> Iterator[Contestant]:
    with Contestant(COMPILED, lambda: model, device="cpu", settings=CompileSettings()) as contestant:
        assert contestant.introduction().cache_class == "tests:Doubles"
        yield contestant


def a_series() -> Series:
    return trial_of("upstream").series(32, 4, 2)


def test_a_forecast_comes_back_and_the_continuation_stays_here() -> None:
    def looks_ahead(series: Series) -> None:
        assert series.truth.numel() == 0

    series = a_series()
    with process_of(Doubles(looks_ahead)) as contestant:
        forecast = contestant.forecast(series_bytes(series), 64)
        assert contestant.end() == ()
    assert torch.equal(forecast, 2 * series.inputs[..., -64:])


def failure_of(besides: Callable[[Series], None]) -> ContestantError:
    with process_of(Doubles(besides)) as contestant, pytest.raises(ContestantError) as raised:
        contestant.forecast(series_bytes(a_series()), 64)
    return raised.value


def test_what_a_forecast_raises_is_told_as_its_own() -> None:
    def refuse(_series: Series) -> None:
        raise ValueError("wrong shape")

    failed = failure_of(refuse).failed
    assert failed.by_the_model
    assert failed.failure.message == "ValueError: wrong shape"
    assert any("refuse" in line for line in failed.failure.last_lines)


def test_missing_memory_is_nobodys_fault() -> None:
    def too_large(_series: Series) -> None:
        raise MemoryError("no more")

    failed = failure_of(too_large).failed
    assert not failed.by_the_model
    assert failed.failure.kind == "out_of_memory"


def test_a_process_that_dies_is_told_with_its_exit_code() -> None:
    failed = failure_of(lambda _series: os._exit(7)).failed
    assert not failed.by_the_model
    assert "exit code 7" in failed.failure.message


def test_leaving_ends_a_contestant_that_hangs() -> None:
    with process_of(Doubles()) as contestant:
        process = contestant._process
    assert not process.is_alive()


def test_switches_that_a_contestant_changed_are_named() -> None:
    with process_of(Doubles(lambda _series: torch.set_float32_matmul_precision("medium"))) as contestant:
        contestant.forecast(series_bytes(a_series()), 64)
        told = contestant.end()
    assert "float32_matmul_precision from 'highest' to 'medium'" in told
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_contestant_has_no_way_to_the_clock() -> None:
    def stop_the_clock(_series: Series) -> None:
        time.perf_counter = lambda: 0.0

    with process_of(Doubles(stop_the_clock)) as contestant:
        contest = Contest([contestant], lambda: (a_series(), series_bytes(a_series())), 64)
        timings, _ = contest.rounds(3)
    assert min(timings[COMPILED]) > 0.0


def test_work_in_the_background_shows_as_processor_time() -> None:
    def spin() -> None:
        while True:
            pass

    def start_spinning(_series: Series) -> None:
        threading.Thread(target=spin, daemon=True).start()

    with process_of(Doubles(start_spinning)) as contestant:
        contestant.forecast(series_bytes(a_series()), 64)
        used = contestant.cpu_seconds()
        while contestant.cpu_seconds() < used + 0.5:  # it works although nobody has asked it anything
            time.sleep(0.01)


def test_no_two_series_are_the_same_and_a_users_own_is_moved_a_little() -> None:
    trial = trial_of("upstream")
    shape = TimedShape(context=128, horizon=64)
    first, second = (new_series(trial, 32, shape)[0].inputs for _ in range(2))
    assert first.shape == second.shape
    assert not torch.equal(first, second)


# --- what was timed is what is compared -------------------------------------------------------------------------------


class AnswersFromATable:
    """Forecasts the first series of a shape and gives that to every other."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._answers: dict[tuple[int, ...], Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def generate_mean(self, series: Series, horizon_steps: int) -> Tensor:
        shape = (*series.inputs.shape, horizon_steps)
        if shape not in self._answers:
            self._answers[shape] = self._model.generate_mean(series, horizon_steps)
        return self._answers[shape]


class RemembersWhatItMet(AnswersFromATable):
    """Forecasts what it has not met, and remembers: as right as can be, and no faster on anything new."""

    def generate_mean(self, series: Series, horizon_steps: int) -> Tensor:
        key = (*series.inputs.flatten().tolist(),)
        if key not in self._answers:
            self._answers[key] = self._model.generate_mean(series, horizon_steps)
        return self._answers[key]


class RightFourTimesInFive(AnswersFromATable):
    """Answers every fifth forecast with a cheap one: the last value, carried forward."""

    def generate_mean(self, series: Series, horizon_steps: int) -> Tensor:
        self._asked = vars(self).get("_asked", 0) + 1
        if self._asked % 5 == 0:
            return series.inputs[..., -1:].expand(*series.inputs.shape[:-1], horizon_steps)
        return self._model.generate_mean(series, horizon_steps)


class AlmostRight(AnswersFromATable):
    def generate_mean(self, series: Series, horizon_steps: int) -> Tensor:
        return self._model.generate_mean(series, horizon_steps) * (1 + 1e-4)


class AShorterForecast(AnswersFromATable):
    def generate_mean(self, series: Series, horizon_steps: int) -> Tensor:
        return self._model.generate_mean(series, horizon_steps // 2)


MEAN = WORKLOAD.model_copy(update={"timed": (TimedShape(),)})
SAMPLES = WORKLOAD.model_copy(update={"timed": (TimedShape(horizon=8, samples="32/16"),)})


def contest_with(
    monkeypatch: pytest.MonkeyPatch, wrap: Callable[[Any], Any], workload: Workload = MEAN
) -> SpeedRun | SuiteEvidence:
    """The whole suite, with the compiled contestant replaced by a wrapped upstream eager."""

    def contestant(trial: Any, name: str) -> Any:
        return wrap(trial.eager()) if name == COMPILED else make_contestant(trial, name)

    torch.set_num_threads(1)
    monkeypatch.setattr(speed, "make_contestant", contestant)
    measured = run_speed(Session(trial_of("upstream", workload=workload), CellProfile(iterations=1)))
    if isinstance(measured, SuiteEvidence):
        return measured
    [run] = measured.runs
    return run


@pytest.mark.parametrize("wrong", [AnswersFromATable, RightFourTimesInFive, AlmostRight, AShorterForecast])
def test_a_fast_answer_to_another_question_turns_timed_forecasts_red(
    monkeypatch: pytest.MonkeyPatch, wrong: Callable[[Any], Any]
) -> None:
    run = contest_with(monkeypatch, wrong)
    assert isinstance(run, SpeedRun)
    assert run.timed_forecasts is not None
    assert run.timed_forecasts > 1.0


@pytest.mark.parametrize("honest", [lambda model: model, RemembersWhatItMet])
def test_an_honest_forecast_leaves_timed_forecasts_green(
    monkeypatch: pytest.MonkeyPatch, honest: Callable[[Any], Any]
) -> None:
    run = contest_with(monkeypatch, honest)
    assert isinstance(run, SpeedRun)
    assert run.timed_forecasts is not None
    assert run.timed_forecasts <= 1.0
    assert {name: len(values) for name, values in run.timings.items()} == dict.fromkeys(run.timings, 12)


class DrawsCloserTogether:
    """Upstream, but for samples that lie closer together."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def generate_samples(self, series: Series, horizon_steps: int, **asked: int) -> Tensor:
        samples: Tensor = self._model.generate_samples(series, horizon_steps, **asked)
        centre = samples.mean(dim=-1, keepdim=True)
        return centre + 0.7 * (samples - centre)


class DrawsAFew(DrawsCloserTogether):
    """Draws a quarter of them, and those four times."""

    def generate_samples(self, series: Series, horizon_steps: int, **asked: int) -> Tensor:
        quarter = {name: number // 4 for name, number in asked.items()}
        samples: Tensor = self._model.generate_samples(series, horizon_steps, **quarter)
        return samples.repeat(1, 1, 1, 4)


@pytest.mark.parametrize(
    ("wrap", "right"), [(lambda model: model, True), (DrawsCloserTogether, False), (DrawsAFew, False)]
)
def test_samples_that_were_timed_are_judged_by_eagers_distributions(
    monkeypatch: pytest.MonkeyPatch, wrap: Callable[[Any], Any], right: bool
) -> None:
    run = contest_with(monkeypatch, wrap, SAMPLES)
    assert isinstance(run, SpeedRun)
    assert run.timed_forecasts is not None
    assert (run.timed_forecasts <= 1.0) is right


NO_RECOMPILES = Demand(gate="recompiles", suite=Suite.RECOMPILE, figure="recompiles", limit=GateLimit(max=0))
MEAN_AND_SAMPLES = (TimedShape(horizon=64, context=128), TimedShape(horizon=64, context=128, samples="16/16"))


@pytest.mark.parametrize(
    ("recompiles", "changed", "timed"),
    [(0.0, (), 2), (None, (), 2), (22.0, (), 1), (22.0, ("torch.backends.cudnn.enabled",), 2)],
    ids=["can pass", "not measured", "cannot pass", "figures will be taken back"],
)
def test_a_cell_that_cannot_pass_is_timed_on_its_first_forecast_alone(
    tmp_path: Path, recompiles: float | None, changed: tuple[str, ...], timed: int
) -> None:
    figures = {"recompiles": Figure(value=recompiles, missing="" if recompiles is not None else "lost")}
    counted = SuiteEvidence(suite=Suite.RECOMPILE, outcome=Outcome.MEASURED, figures=figures)
    left = GroupResult(evidence={Suite.RECOMPILE: counted}, changed=changed)
    (tmp_path / "observe.json").write_text(left.model_dump_json(by_alias=True), encoding="utf-8")
    trial = trial_of("upstream", workload=WORKLOAD.model_copy(update={"timed": MEAN_AND_SAMPLES}))
    session = Session(trial, CellProfile(iterations=1), work=tmp_path, demands=(NO_RECOMPILES,))
    shapes, left_out = shapes_worth_timing(session)
    assert [shape.name for shape in shapes] == [shape.name for shape in MEAN_AND_SAMPLES[:timed]]
    assert ("16/16 samples" in left_out and "recompiles is 22" in left_out) == (timed == 1)


class Raises(AnswersFromATable):
    def generate_mean(self, *_: Any) -> Tensor:
        raise ValueError("wrong shape")


def test_only_the_compiled_contestant_is_evidence_against_the_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    against = contest_with(monkeypatch, Raises)
    assert isinstance(against, SuiteEvidence)
    assert against.outcome is Outcome.MODEL_FAILED

    monkeypatch.setattr(speed, "make_contestant", lambda trial, _name: Raises(trial.eager()))
    monkeypatch.setattr(Contest, "first", lambda *_: 0.0)
    nobody = run_speed(Session(trial_of("upstream", workload=WORKLOAD), CellProfile(iterations=1)))
    assert isinstance(nobody, SuiteEvidence)
    assert nobody.outcome is Outcome.ERROR
