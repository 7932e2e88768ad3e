"""What is asked: every row count of samples, lengths past the announced, threads that are put back."""

from pathlib import Path

import pytest
import torch

from tests.cell.small_trials import trial_of
from toto_compat.cell.suites.equivalence.scenarios import (
    all_scenarios,
    as_a_user_gives_it,
    drawings_of,
    on_more_threads,
    past_the_announced,
    series_of,
    threads_of,
    through_forecast,
)
from toto_compat.cell.trial import Trial
from toto_compat.contract.request import CacheRequest, CsvSeries, Workload

pytestmark = pytest.mark.cell


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
