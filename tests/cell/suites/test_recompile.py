"""Recompile counts on the real tiny model, against dynamo's own log in a script that knows nothing of this project."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.cell.small_trials import UNLOWERED, WORKLOAD, trial_of
from toto_compat.cell.live import CompileStart, Phase, StepActivity
from toto_compat.cell.suites.recompile import (
    MOST_EVENTS_KEPT,
    ForecastTaken,
    PlannedForecast,
    cold_compile_figure,
    count_compilations,
    hidden_recompilations,
    most_telling,
    plan_forecasts,
    recompile_evidence,
)
from toto_compat.cell.trial import Trial
from toto_compat.contract.events import Event, EventKind, Severity
from toto_compat.contract.request import Workload
from toto_compat.contract.result import SuiteEvidence

pytestmark = pytest.mark.cell

PLAIN_SCRIPT = """
import torch
from toto.inference.forecaster import TotoForecaster
from toto.model.backbone import TotoBackbone

torch.manual_seed(0)
model = TotoBackbone(
    patch_size=32, stride=32, embed_dim=128, num_layers=12, num_heads=4, mlp_hidden_dim=256, dropout=0.1,
    spacewise_every_n_layers=12, spacewise_first=False, scaler_cls="<class 'model.scaler.CausalPatchStdMeanScaler'>",
    output_distribution_classes=["<class 'model.distribution.MixtureOfStudentTsOutput'>"],
    output_distribution_kwargs={"k_components": 24}, use_memory_efficient_attention=False,
).eval().requires_grad_(False)
model.compile(backend="eager")
forecaster = TotoForecaster(model)

def forecast(context, horizon, batch, samples=0):
    steps = context * 32
    arguments = dict(
        inputs=torch.randn(batch, 1, steps), prediction_length=horizon * 32,
        timestamp_seconds=torch.arange(steps).expand(batch, 1, steps).contiguous(),
        time_interval_seconds=torch.full((batch, 1), 60, dtype=torch.int),
        input_padding_mask=torch.ones(batch, 1, steps, dtype=torch.bool),
        id_mask=torch.zeros(batch, 1, steps, dtype=torch.int), use_kv_cache=True,
    )
    if samples:
        forecaster.generate_samples(num_samples=samples, sampling_batch_size=4, **arguments)
    else:
        forecaster.generate_mean(**arguments)

for planned in [(4, 4, 1), (4, 4, 1), (8, 4, 1), (8, 4, 1), (6, 4, 1), (4, 3, 1), (4, 4, 2), (4, 4, 1, 8)]:
    forecast(*planned)
"""


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def evidence_of(cache: str, workload: Workload = WORKLOAD) -> SuiteEvidence:
    trial = trial_of(cache, settings=UNLOWERED, workload=workload)
    return count_compilations(trial, trial.compiled(batch_sizes=trial.batch_sizes))


@pytest.fixture(scope="module")
def upstream() -> SuiteEvidence:
    return evidence_of("upstream")


def test_warm_up_is_two_forecasts_at_both_ends_and_the_rest_is_measured() -> None:
    plan = plan_forecasts(Workload())
    assert [(p.context, p.horizon, p.batch) for p in plan if p.warm_up] == [(16, 10, 1)] * 2 + [(64, 10, 1)] * 2
    measured = [p for p in plan if not p.warm_up]
    assert {p.context for p in measured} == {16, 32, 48}
    assert {p.horizon for p in measured} == {10, 5, 12}
    assert {p.batch for p in measured} == {1, 2}
    assert [p.samples for p in measured if p.samples] == [32]


def test_every_batch_of_the_plan_is_announced() -> None:
    assert trial_of("upstream", workload=Workload()).batch_sizes == (1, 2, 16)


def test_a_series_that_cannot_be_made_is_not_the_candidates_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_series(*_: object, **__: object) -> None:
        raise ValueError("no such column")

    monkeypatch.setattr(Trial, "series", no_series)
    trial = trial_of("upstream")
    with pytest.raises(ValueError, match="no such column"):
        count_compilations(trial, trial.eager())


def test_upstream_recompiles_as_often_as_a_plain_script_with_torch_logs_says(
    upstream: SuiteEvidence, tmp_path: Path
) -> None:
    assert [(p.context, p.horizon, p.batch, p.samples) for p in plan_forecasts(WORKLOAD)] == [
        (4, 4, 1, 0), (4, 4, 1, 0), (8, 4, 1, 0), (8, 4, 1, 0), (6, 4, 1, 0), (4, 3, 1, 0), (4, 4, 2, 0), (4, 4, 1, 8),
    ]  # fmt: skip
    script = tmp_path / "plain.py"
    script.write_text(PLAIN_SCRIPT)
    finished = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)],
        env={**os.environ, "TORCH_LOGS": "recompiles"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-2000:]
    logged = finished.stderr.count("[__recompiles] Recompiling function")
    assert logged > 10
    assert upstream.figures["recompiles_logged"].value == logged
    assert upstream.figures["recompiles_total"].value == logged


def test_list_index_fails_with_production_s_own_line() -> None:
    few = {"context_patches": (4, 5), "horizon_patches": (2,), "batches": (1,), "samples": 2, "samples_per_batch": 1}
    evidence = evidence_of("list_index", WORKLOAD.model_copy(update=few))
    limits = [event for event in evidence.events if event.kind is EventKind.RECOMPILE_LIMIT]
    hit = next(event for event in limits if event.function == "positional_embedding")
    assert hit.reason == "6/7: kv_cache._current_idx[7] == 0"
    assert hit.limit == 8
    assert evidence.figures["recompile_limit"].value == len(limits)


def test_upstream_breaks_its_graph_and_says_where(upstream: SuiteEvidence) -> None:
    breaks = upstream.figures["graph_breaks"].value
    assert breaks is not None and breaks > 10
    assert {row["kind"] for row in upstream.details["reasons"]} >= {"recompile", "graph_break"}
    assert sum(row["graph_breaks"] for row in upstream.details["phases"]) == breaks


def taken(context: int, seconds: float, *, compilations: int = 0, samples: int = 0) -> ForecastTaken:
    phase = Phase("forecast", compile_starts=[start(f"{number}/0") for number in range(compilations)])
    return ForecastTaken(PlannedForecast(context, horizon=4, batch=1, samples=samples), seconds, phase)


def test_the_cold_compile_is_what_all_forecasts_that_compiled_took_longer_than_warm_ones() -> None:
    run = [
        taken(4, 70.0, compilations=45),
        taken(4, 2.0),
        taken(8, 30.0, compilations=17),
        taken(8, 5.0),
        taken(8, 4.0),
        taken(4, 50.0, compilations=22, samples=8),
    ]
    # the same shape warm took 2 and 4 at best; of the sampled shape there is no warm one, the fastest took 2
    figure = recompile_evidence(run, StepActivity()).figures["cold_compile_s"]
    assert figure.value == pytest.approx(68.0 + 26.0 + 48.0)
    assert "3 of 6 forecasts" in figure.method


def test_without_a_warm_forecast_there_is_no_cold_compile_to_tell() -> None:
    figure = cold_compile_figure([taken(4, 70.0, compilations=1), taken(4, 60.0, compilations=1)])
    assert figure.value is None
    assert "every forecast" in figure.missing


def start(compile_id: str, function: str = "step", line: int = 10) -> CompileStart:
    return CompileStart(compile_id, function, "model.py", line)


def test_new_code_objects_at_one_place_are_hidden_recompilations_whatever_their_name() -> None:
    assert hidden_recompilations([start(f"{frame}/0", f"step_{frame}") for frame in range(5)]) == 4


def test_recompiles_that_the_log_shows_are_not_counted_twice() -> None:
    assert hidden_recompilations([start("0/0"), start("0/1"), start("0/2")]) == 0


def test_different_functions_are_not_recompilations_of_each_other() -> None:
    assert hidden_recompilations([start("0/0", line=1), start("1/0", line=2)]) == 0


def test_a_flood_of_events_keeps_the_limit_hits() -> None:
    recompile = Event(kind=EventKind.RECOMPILE, severity=Severity.WARNING)
    limit = Event(kind=EventKind.RECOMPILE_LIMIT, severity=Severity.ERROR)
    kept = most_telling([recompile] * (MOST_EVENTS_KEPT + 50) + [limit])
    assert len(kept) == MOST_EVENTS_KEPT
    assert kept[-1] is limit
