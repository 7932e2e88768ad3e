"""What is asked: every row count of samples, lengths past the announced, threads that are put back."""

from pathlib import Path

import pytest
import torch

from tests.cell.small_trials import trial_of
from toto_compat.cell.group import GroupResult
from toto_compat.cell.session import Session
from toto_compat.cell.suites.equivalence.kinds import KINDS, SIZES
from toto_compat.cell.suites.equivalence.scenarios import (
    all_scenarios,
    as_a_user_gives_it,
    drawings_of,
    on_more_threads,
    past_the_announced,
    series_of,
    threads_of,
    through_forecast,
    what_is_asked,
)
from toto_compat.cell.trial import Trial
from toto_compat.contract.gate_limit import GateLimit
from toto_compat.contract.request import CacheRequest, CellProfile, CsvSeries, Demand, Workload
from toto_compat.contract.result import Figure, Outcome, SuiteEvidence
from toto_compat.contract.suites import Suite

pytestmark = pytest.mark.cell
NO_RECOMPILES = Demand(gate="recompiles", suite=Suite.RECOMPILE, figure="recompiles", limit=GateLimit(max=0))


@pytest.mark.parametrize("per_batch", [16, 64, 128])
@pytest.mark.parametrize("batch", [1, 2])
def test_parameters_are_compared_at_every_number_of_rows_that_samples_are_drawn_in(per_batch: int, batch: int) -> None:
    workload = Workload(batch=batch, batches=(1, 2), sampling=(f"{2 * per_batch}/{per_batch}",))
    trial = trial_of("upstream", workload=workload)
    rows = {one.scenario.batch * one.per_batch for one in drawings_of(trial, 2)}
    assert {batch * per_batch, batch * 10} <= rows
    assert rows <= {scenario.batch for scenario in all_scenarios(trial) if scenario.kind == "ordinary"}


def test_names_tell_scenarios_apart() -> None:
    names = [scenario.name for scenario in all_scenarios(trial_of("upstream", workload=Workload()))]
    assert len(names) == len(set(names))


def test_what_is_past_the_announced_is_past_it_however_it_is_rounded_up() -> None:
    trial = trial_of("upstream", workload=Workload(context=(512, 1664), horizon=(384,)))
    context, horizon = past_the_announced(trial)
    assert (trial.max_patches, context.context) == (64, 129)
    assert horizon.context == 52 and horizon.context + horizon.horizon > 80


@pytest.mark.parametrize("horizon", [1, 4, 12])
def test_nothing_else_is_past_the_announced(horizon: int) -> None:
    trial = trial_of("upstream", workload=Workload(context=(448, 512), horizon=(32 * horizon,)))
    for scenario in all_scenarios(trial):
        longer = scenario.context + scenario.horizon > trial.max_patches
        assert longer is scenario.past_the_announced, scenario.name


def test_a_longer_context_asks_for_no_more_of_a_users_rows_than_the_workload_does(tmp_path: Path) -> None:
    path = tmp_path / "short.csv"
    rows = [f"{1_700_000_000 + 60 * row},{row % 7}" for row in range((6 + 9) * 32 + 15)]
    path.write_text("\n".join(["timestamp,value", *rows]), encoding="utf-8")
    csv = CsvSeries(path=str(path), time_column="timestamp", value_columns=("value",))
    workload = Workload(context=(128, 192), horizon=(288,))
    trial = Trial(workload=workload, cache=CacheRequest(name="upstream", source="builtin"), csv=csv)
    for scenario in all_scenarios(trial):
        assert series_of(trial, scenario, 32).inputs.shape == (scenario.batch, scenario.variates, scenario.context * 32)


def test_a_longer_context_ends_as_the_longest_one() -> None:
    trial = trial_of("upstream")
    scenario = past_the_announced(trial)[0]
    series, longest = series_of(trial, scenario, 32), trial.series(32, 8, 2)
    assert torch.equal(series.inputs[..., -8 * 32 :], longest.inputs)
    assert torch.equal(series.timestamp_seconds[..., -8 * 32 :], longest.timestamp_seconds)


def test_variates_of_many_sizes_lie_beside_each_other_in_every_row() -> None:
    trial = trial_of("upstream")
    (scenario,) = [one for one in all_scenarios(trial) if one.kind == SIZES]
    largest = series_of(trial, scenario, 32).inputs.abs().amax(-1)
    assert bool((largest.amax(1) > 1e5 * largest.amin(1)).all())
    assert bool((largest.amax(0) > 1e5 * largest.amin(0)).all())


def test_a_user_gives_less_than_whole_patches() -> None:
    trial = trial_of("upstream")
    series = series_of(trial, through_forecast(trial.workload), 32)
    given = as_a_user_gives_it(series, 32)
    assert given.series.shape[-1] == series.inputs.shape[-1] - 16
    assert not series.padding_mask[..., :16].any()


def test_threads_are_put_back_unless_the_candidate_changed_them() -> None:
    scenario, own = on_more_threads(trial_of("upstream")), torch.get_num_threads()
    with threads_of(scenario):
        assert torch.get_num_threads() == own + 1
    assert torch.get_num_threads() == own
    with threads_of(scenario):
        torch.set_num_threads(own + 2)
    try:
        assert torch.get_num_threads() == own + 2
    finally:
        torch.set_num_threads(own)


def session_after(folder: Path, recompiles: float, workload: Workload) -> Session:
    """A process of a cell whose first one counted so many recompiles, of which none are allowed."""
    counted = SuiteEvidence(
        suite=Suite.RECOMPILE, outcome=Outcome.MEASURED, figures={"recompiles": Figure(value=recompiles)}
    )
    left = GroupResult(evidence={Suite.RECOMPILE: counted}).model_dump_json(by_alias=True)
    (folder / "observe.json").write_text(left, encoding="utf-8")
    trial = trial_of("upstream", workload=workload)
    return Session(trial, CellProfile(iterations=2), work=folder, demands=(NO_RECOMPILES,))


def test_a_cell_that_can_pass_is_asked_everything(tmp_path: Path) -> None:
    session = session_after(tmp_path, 0, Workload())
    asked = what_is_asked(session)
    assert (asked.scenarios, asked.drawings) == (all_scenarios(session.trial), drawings_of(session.trial, 2))
    assert [one.scenario.other_weights for one in asked.second_model] == [True]
    assert asked.left_out == ""


@pytest.mark.parametrize(
    "workload",
    [
        Workload(batches=(1, 2), sampling=("32/16",)),
        Workload(batch=2, batches=(1,), sampling=("32/16",)),
        Workload(batch=2, variates=4, groups=2, batches=(2, 1, 4), sampling=("128/16",)),
        Workload(batches=(1,), sampling=("16/1",)),
    ],
)
def test_a_cell_that_cannot_pass_is_asked_what_was_announced_and_says_so(tmp_path: Path, workload: Workload) -> None:
    session = session_after(tmp_path, 22, workload)
    asked = what_is_asked(session)
    rows = {workload.batch, *session.trial.batch_sizes, *(workload.batch * each for _, each in workload.sampled)}
    shapes = {(one.batch, one.variates, one.groups) for one in asked.scenarios}
    assert shapes <= {(batch, workload.variates, workload.groups) for batch in rows}
    assert {one.scenario.batch * one.per_batch for one in asked.drawings} <= rows
    assert not any(one.past_the_announced or one.more_threads or one.other_weights for one in asked.scenarios)
    assert asked.second_model == ()
    assert not any(one.scenario.name.startswith("many") for one in asked.drawings)
    assert "recompiles is 22" in asked.left_out
    # every length, horizon and kind of series at the announced shape stays
    every = [one for one in all_scenarios(session.trial) if one.name.startswith(("context ", "horizon ", "every"))]
    assert {one for one in every if not one.past_the_announced} <= set(asked.scenarios)
    assert asked.scenarios[:2] == all_scenarios(session.trial)[:2]
    assert asked.drawings[:2] == drawings_of(session.trial, 2)[:2]
    alone = workload.batch * workload.variates == 1  # of one variate there are no sizes to differ
    assert sum(one.name.endswith("as announced") for one in asked.scenarios) == len(KINDS) - 1 - alone
