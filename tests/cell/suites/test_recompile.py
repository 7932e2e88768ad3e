"""Recompile counts on the real tiny model, against dynamo's own log in a script that knows nothing of this project."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from tests.cell.small_trials import UNLOWERED, WORKLOAD, trial_of
from toto_compat.cell.live import CompileStart, Phase
from toto_compat.cell.session import Session
from toto_compat.cell.suites import recompile
from toto_compat.cell.suites.recompile import EagerOperations, count_compilations, eager_operations
from toto_compat.cell.suites.recompile_figures import (
    MOST_EVENTS_KEPT,
    ActiveShares,
    ForecastTaken,
    RefusedForecast,
    announced_recompilations,
    cold_compile_figure,
    has_settled,
    hidden_recompilations,
    most_telling,
    recompile_evidence,
    unannounced_figures,
)
from toto_compat.cell.suites.recompile_plan import PlannedForecast, Stage, plan_forecasts, plan_unannounced
from toto_compat.cell.suites.recompile_series import kinds_of, plan_other_series
from toto_compat.cell.trial import UPSTREAM, Trial
from toto_compat.contract.events import Event, EventKind, Severity
from toto_compat.contract.gate_limit import GateLimit
from toto_compat.contract.request import CellProfile, Demand, Workload
from toto_compat.contract.result import SuiteEvidence
from toto_compat.contract.suites import Suite

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

for planned in [
    (4, 4, 1), (4, 4, 1), (8, 4, 1), (8, 4, 1), (4, 4, 2), (4, 4, 2), (8, 4, 2), (8, 4, 2), (4, 4, 1, 8), (8, 4, 1, 8),
    (6, 4, 1), (4, 3, 1), (5, 3, 1), (5, 3, 2), (5, 3, 1, 4),
]:
    forecast(*planned)
"""


PRODUCTION = Workload(
    model="base",
    context=(256, 512),
    horizon=(8, 1, 64, 128, 336),
    batches=(1,),
    sampling=("256/128", "3072/384", "128/128", "128/64", "128/32"),
)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def evidence_of(cache: str, workload: Workload = WORKLOAD) -> SuiteEvidence:
    trial = trial_of(cache, settings=UNLOWERED, workload=workload)
    return count_compilations(
        trial, lambda: trial.compiled(batch_sizes=trial.batch_sizes), eager_operations(trial, UPSTREAM)
    )


@pytest.fixture(scope="module")
def upstream() -> SuiteEvidence:
    return evidence_of("upstream")


def test_the_warm_up_meets_every_announced_batch_and_samples_at_both_ends() -> None:
    warm_up = {p.shape[:4] for p in plan_forecasts(Workload()) if p.stage is Stage.WARM_UP}
    assert warm_up == {(context, 320, 1, samples) for context in (512, 2048) for samples in (0, 32)} | {
        (context, 320, 2, 0) for context in (512, 2048)
    }


def test_the_warm_up_of_production_meets_every_batch_size_and_both_kinds_of_horizon() -> None:
    warm_up = [p for p in plan_forecasts(PRODUCTION) if p.stage is Stage.WARM_UP]
    assert {(p.horizon, p.per_batch) for p in warm_up} == {
        (horizon, rows) for horizon in (8, 128) for rows in (0, 128, 384, 64, 32)
    }
    measured = [p for p in plan_forecasts(PRODUCTION) if p.stage is Stage.MEASURED]
    assert {p.horizon for p in measured} >= {8, 1, 64, 336}
    assert {p.context for p in measured if not p.samples} == {256, 320, 384, 448}


def test_what_is_measured_has_announced_batches_and_other_lengths_or_horizons_within_the_maxima() -> None:
    workload = Workload()
    plan = plan_forecasts(workload)
    warm_up = {p.shape for p in plan if p.stage is Stage.WARM_UP}
    measured = [p for p in plan if p.stage is Stage.MEASURED]
    assert not warm_up & {p.shape for p in measured}
    assert {(p.batch, bool(p.samples)) for p in measured} == {(1, False), (2, False), (1, True)}
    assert {p.context for p in measured} == {512, 768, 1024, 1536}
    assert {p.horizon for p in measured} == {96, 160, 320, 384}
    assert max(p.context + p.horizon for p in measured) <= 32 * trial_of("upstream", workload=workload).max_patches


def test_the_unannounced_shapes_go_past_everything_that_was_announced_and_come_twice() -> None:
    trial = trial_of("upstream", workload=Workload())
    plan = plan_unannounced(trial.workload, trial.batch_sizes)
    assert plan[::2] == plan[1::2]
    batch, variates, context, horizon = plan[::2]
    assert batch.batch not in trial.batch_sizes
    assert variates.variates == 2
    assert context.context + context.horizon > 32 * trial.max_patches
    assert (horizon.context, horizon.horizon) == (2048, 768)


def test_series_of_other_kinds_have_shapes_that_the_warm_up_met_and_random_numbers_of_their_own() -> None:
    for workload in (Workload(), PRODUCTION):
        met = {
            (p.context, p.horizon, p.batch, p.per_batch) for p in plan_forecasts(workload) if p.stage is Stage.WARM_UP
        }
        others = list(plan_other_series(workload))
        assert {(one.plan.context, one.plan.horizon, one.plan.batch, one.plan.per_batch) for one in others} <= met
        assert {bool(one.plan.samples) for one in others} == {False, True}
        seeds = [one.seed for one in others if one.seed is not None]
        assert len(set(seeds)) == len(seeds) < len(others)


def test_a_kind_changes_no_shape_and_no_type() -> None:
    trial = trial_of("upstream", workload=WORKLOAD.model_copy(update={"variates": 3, "groups": 2}))
    series = trial.series(32, 4, 2, batch=2)
    for name, change in kinds_of(4, 32).items():
        other = change(series, 32)
        for field in fields(series):
            before, after = getattr(series, field.name), getattr(other, field.name)
            assert (before.shape, before.dtype) == (after.shape, after.dtype), (name, field.name)
        assert other.padding_mask.any(), name
        assert any(
            not torch.equal(getattr(series, field.name), getattr(other, field.name))
            or getattr(series, field.name).storage_offset() != getattr(other, field.name).storage_offset()
            for field in fields(series)
        ), name


def test_every_batch_of_the_plan_is_announced() -> None:
    assert trial_of("upstream", workload=Workload()).batch_sizes == (1, 2, 16)


def test_a_series_that_cannot_be_made_is_not_the_candidates_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_series(*_: object, **__: object) -> None:
        raise ValueError("no such column")

    monkeypatch.setattr(Trial, "series", no_series)
    trial = trial_of("upstream")
    with pytest.raises(ValueError, match="no such column"):
        count_compilations(trial, trial.eager, EagerOperations({}, {}))


def test_upstreams_operations_are_counted_before_a_users_file_could_change_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []

    def compiled(_trial: Trial, **_: object) -> None:
        order.append("the candidate is bound")
        raise ValueError("enough")

    monkeypatch.setattr(recompile, "eager_operations", lambda _trial, cache: order.append(f"{cache.name} is counted"))
    monkeypatch.setattr(Trial, "compiled", compiled)
    with pytest.raises(ValueError, match="enough"):
        recompile.run_recompile(Session(trial_of("fixed_size"), CellProfile(iterations=1)))
    assert order == ["upstream is counted", "the candidate is bound"]


def test_upstream_recompiles_as_often_as_a_plain_script_with_torch_logs_says(
    upstream: SuiteEvidence, tmp_path: Path
) -> None:
    assert [(p.context // 32, p.horizon // 32, p.batch, p.samples) for p in plan_forecasts(WORKLOAD)] == [
        (4, 4, 1, 0), (4, 4, 1, 0), (8, 4, 1, 0), (8, 4, 1, 0), (4, 4, 2, 0), (4, 4, 2, 0), (8, 4, 2, 0), (8, 4, 2, 0),
        (4, 4, 1, 8), (8, 4, 1, 8), (6, 4, 1, 0), (4, 3, 1, 0), (5, 3, 1, 0), (5, 3, 2, 0), (5, 3, 1, 4),
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
    announced = upstream.figures["recompiles_announced"].value
    assert announced is not None
    assert upstream.figures["recompiles_total"].value == logged - announced


def test_list_index_fails_with_production_s_own_line() -> None:
    few = {"context": (128, 160), "horizon": (64,), "batches": (1,), "sampling": ("2/1",)}
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


def test_fixed_size_compiles_each_announced_batch_once_and_none_of_them_counts() -> None:
    few = {"context": (128, 448), "horizon": (64,), "batches": (1, 2)}
    trial = trial_of("fixed_size", settings=UNLOWERED, workload=WORKLOAD.model_copy(update=few))
    evidence = count_compilations(
        trial, lambda: trial.compiled(batch_sizes=trial.batch_sizes), eager_operations(trial, UPSTREAM)
    )
    batches = len(trial.batch_sizes)
    # a decode step each, one pass over contexts, one set of draws
    assert evidence.figures["bucket_compilations"].value == evidence.figures["compilations"].value == batches + 2
    assert evidence.figures["recompiles_hidden"].value == evidence.figures["recompiles_announced"].value == batches - 1
    assert evidence.figures["recompiles_total"].value == evidence.figures["recompiles"].value == 0
    # another batch: a step; more variates, a longer context: a pass and a step; the longer horizon fits that step
    assert evidence.figures["unannounced_compilations"].value == 5
    assert [row["buckets"] for row in evidence.details["unannounced"]] == [1, 0, 2, 0, 2, 0, 0, 0]


def test_shapes_that_nobody_announced_are_skipped_where_a_limit_is_broken_already() -> None:
    few = {"context": (128, 448), "horizon": (64,), "batches": (1,)}
    trial = trial_of("fixed_size", settings=UNLOWERED, workload=WORKLOAD.model_copy(update=few))
    nothing_may_be_compiled = Demand(
        gate="compilations", suite=Suite.RECOMPILE, figure="compilations", limit=GateLimit(max=0)
    )
    evidence = count_compilations(
        trial,
        lambda: trial.compiled(batch_sizes=trial.batch_sizes),
        eager_operations(trial, UPSTREAM),
        (nothing_may_be_compiled,),
    )
    told = "compilations is 4, limit <= 0, so that this cell cannot PASS"
    left_out = "shapes that nobody announced, series of other kinds and what happens to a service"
    assert evidence.skipped == f"{left_out}: {told}"
    assert (evidence.details["other_series"], evidence.details["mishaps"]) == (0, {})
    assert evidence.details["unannounced"] == []
    assert evidence.figures["unannounced_stall_s"].missing == f"not tried: {told}"
    assert evidence.figures["compile_peak_bytes"].value


def test_a_profile_may_leave_out_shapes_that_nobody_announced() -> None:
    few = {"context": (128, 448), "horizon": (64,), "batches": (1,)}
    trial = trial_of("fixed_size", settings=UNLOWERED, workload=WORKLOAD.model_copy(update=few))
    evidence = count_compilations(
        trial,
        lambda: trial.compiled(batch_sizes=trial.batch_sizes),
        eager_operations(trial, UPSTREAM),
        unannounced_shapes=False,
    )
    assert (evidence.skipped, evidence.details["unannounced"]) == ("", [])
    assert evidence.figures["unannounced_stall_s"].missing == "not tried: the profile leaves them out"


def warm_up(batch: int, *starts: CompileStart, samples: int = 0) -> ForecastTaken:
    plan = PlannedForecast(4, 4, batch, samples, samples, stage=Stage.WARM_UP)
    return ForecastTaken(plan, 1.0, Phase("forecast", compile_starts=list(starts)))


def test_one_compilation_per_announced_batch_is_explained_whether_hidden_or_logged() -> None:
    all_at_once = [warm_up(1, start("0/0"), start("1/0"), start("2/0")), warm_up(2), warm_up(1, samples=8)]
    when_met = [warm_up(1, start("0/0")), warm_up(2, start("0/1")), warm_up(1, start("0/2"), samples=8)]
    assert announced_recompilations(all_at_once, announced=3) == announced_recompilations(when_met, announced=3) == 2


def test_more_compilations_than_announced_batches_are_not_explained() -> None:
    hidden = [warm_up(1, *(start(f"{frame}/0") for frame in range(6)))]
    logged = [warm_up(1, start("0/0"), start("0/1"), start("0/2")), warm_up(2, start("0/3"), start("0/4"))]
    assert announced_recompilations(hidden, announced=3) == 2
    assert announced_recompilations(logged, announced=2) == 1


def test_what_is_compiled_after_the_warm_up_is_never_explained() -> None:
    late = ForecastTaken(PlannedForecast(5, 4, 2), 1.0, Phase("forecast", compile_starts=[start("1/0"), start("0/1")]))
    assert announced_recompilations([warm_up(1, start("0/0")), late], announced=3) == 0


def test_the_stall_is_the_slowest_first_forecast_over_the_second_of_its_shape() -> None:
    run = [taken(8, 30.0, compilations=2), taken(8, 2.0), taken(4, 9.0, compilations=1), taken(4, 1.0)]
    figures = unannounced_figures(run)
    assert figures["unannounced_stall_s"].value == 28.0
    assert figures["unannounced_compilations"].value == 3


def test_a_refused_shape_is_told_and_takes_nothing_from_the_others() -> None:
    refused = RefusedForecast(PlannedForecast(4, 4, batch=3), "ValueError: batch 3 was not announced")
    evidence = recompile_evidence(
        [taken(4, 1.0)], ActiveShares(), announced=1, unannounced=[refused, refused, taken(8, 3.0), taken(8, 2.0)]
    )
    assert evidence.figures["unannounced_stall_s"].value == 1.0
    assert "1 more were refused" in evidence.figures["unannounced_compilations"].method
    assert evidence.details["unannounced"][0]["error"] == "ValueError: batch 3 was not announced"
    assert "refused" in unannounced_figures([refused])["unannounced_stall_s"].missing


def test_the_decode_step_with_the_least_decides_and_the_prefill_is_told_apart() -> None:
    shares = ActiveShares({"mean": {0: 0.1, 1: 0.9, 2: 0.8}, "samples": {0: 0.2, 1: 0.7, 2: 0.9}})
    figures = recompile_evidence([taken(4, 1.0)], shares, announced=1).figures
    assert figures["compile_active"].value == 0.7
    assert figures["compile_active_prefill"].value == 0.1


def test_shapes_nobody_announced_are_tried_only_where_announced_ones_compile_no_more() -> None:
    limit = Event(kind=EventKind.RECOMPILE_LIMIT, severity=Severity.ERROR)
    given_up = ForecastTaken(PlannedForecast(4, 4, 1, stage=Stage.WARM_UP), 1.0, Phase("forecast", events=[limit]))
    assert has_settled([warm_up(1, start("0/0")), taken(4, 1.0)])
    assert not has_settled([warm_up(1, start("0/0")), taken(4, 1.0, compilations=1)])
    assert not has_settled([given_up, taken(4, 1.0)])


def test_of_two_looks_the_smaller_share_decides() -> None:
    first = ActiveShares({"mean": {0: 0.9, 1: 0.9}}, frozenset(), {"decode steps": 0.9})
    steps = ActiveShares({"mean, at the end": {0: 0.8, 1: 0.3}})
    unobserved = ActiveShares({"mean, at the end": {0: 0.8, 1: 0.8}}, frozenset(), {"decode steps, at the end": 0.2})
    assert (first.and_of(steps).deciding, first.and_of(steps).prefill) == (0.3, 0.8)
    assert first.and_of(unobserved).deciding == 0.2
    assert first.and_of(ActiveShares({"mean, at the end": {}})).deciding is None


def test_what_other_series_and_the_last_look_compile_counts_and_costs_no_cold_compile() -> None:
    late = taken(8, 90.0, compilations=2)
    figures = recompile_evidence(
        [taken(4, 1.0)], ActiveShares(), announced=1, other_series=[late], at_the_end=[late]
    ).figures
    assert (figures["recompiles"].value, figures["cold_compile_s"].value) == (4, 0.0)


def test_a_forecast_without_steps_leaves_the_share_unknown() -> None:
    shares = ActiveShares({"mean": {0: 0.9, 1: 0.9}, "samples": {}})
    assert shares.deciding is shares.prefill is None


def test_a_forecast_that_should_decode_and_shows_no_such_step_leaves_the_share_unknown() -> None:
    figure = recompile_evidence([taken(4, 1.0)], ActiveShares({"mean": {0: 0.5}}), announced=1).figures
    assert figure["compile_active"].value is None
    assert figure["compile_active_prefill"].value == 0.5


def test_of_a_forecast_of_one_patch_the_pass_over_the_context_decides() -> None:
    both = {"one": {0: 0.3}, "several": {0: 0.1, 1: 0.9}}
    assert ActiveShares(both, of_one_patch=frozenset({"one"})).deciding == 0.3
    assert ActiveShares({"one": {0: 0.9}}, frozenset({"one"}), {"samples of one patch": 0.2}).deciding == 0.2


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
    figure = recompile_evidence(run, ActiveShares(), announced=1).figures["cold_compile_s"]
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
