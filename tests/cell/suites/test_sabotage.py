"""Suites prove that they can fail: each sabotage turns its gate red, and its unsabotaged twin stays green."""

import functools
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from tests.cell.small_trials import UNLOWERED, WORKLOAD, trial_of
from toto_compat.cell.contest import Contest
from toto_compat.cell.live import CompilerWatch
from toto_compat.cell.suites.equivalence.compare import CONTROL, compare, equivalence_figure
from toto_compat.cell.suites.equivalence.reference import quantities, reference_on
from toto_compat.cell.suites.equivalence.scenarios import Scenario, series_of
from toto_compat.cell.suites.recompile import (
    count_compilations,
    eager_operations,
    measure_active_shares,
    take_planned,
)
from toto_compat.cell.suites.recompile_plan import profiled_forecasts
from toto_compat.cell.suites.speed_figures import SpeedRun, speed_evidence
from toto_compat.cell.trial import UPSTREAM
from toto_compat.contract.caches import SABOTAGES
from toto_compat.contract.result import Figure
from toto_compat.contract.torch_releases import config_name
from toto_compat.matrix.gates import Gate
from toto_compat.model.bound import BoundModel

pytestmark = pytest.mark.cell

SCENARIO = Scenario("two series of three variates", context=4, horizon=4, batch=2, variates=3, groups=2)
# The limits of matrix.yaml that these gates are judged by.
RECOMPILES_ALLOWED, SPEEDUP_NEEDED, ACTIVE_NEEDED = 0, 2.0, 0.8
# One decode step a forecast and one batch: a cache that compiles in every step takes seconds for each.
FEW_STEPS = WORKLOAD.model_copy(update={"context": (128, 192), "horizon": (64,), "batches": (1,), "sampling": ("2/1",)})


@pytest.fixture(autouse=True)
def one_thread_and_a_fresh_compiler() -> Iterator[None]:
    torch.set_num_threads(1)
    torch._dynamo.reset()
    # one of the sabotages raises the limits for its process
    limits = {"recompile_limit": 8, "accumulated_recompile_limit": 256}
    with torch._dynamo.config.patch({config_name(name, torch.__version__): limit for name, limit in limits.items()}):
        yield
    torch._dynamo.reset()


def names(gate: Gate) -> list[str]:
    return [name for name, sabotage in SABOTAGES.items() if sabotage.gate == gate]


def twins(gate: Gate) -> list[str]:
    return sorted({SABOTAGES[name].twin for name in names(gate)})


def test_every_sabotage_is_tested() -> None:
    gates = {sabotage.gate for sabotage in SABOTAGES.values()}
    by_memory = {Gate.MEMORY, Gate.MEMORY_GROWTH}  # in test_memory_on_a_model
    assert gates == {Gate.EQUIVALENCE, Gate.RECOMPILES, Gate.COMPILE_ACTIVE, Gate.SPEEDUP} | by_memory


def equivalence_of(cache: str) -> float:
    trial = trial_of(cache)
    eager, exact = trial.eager(), trial.eager(dtype=torch.float64)
    reference = reference_on(trial, eager, exact, SCENARIO)
    candidate, series = trial.eager(trial.cache), series_of(trial, SCENARIO, eager.patch_size)
    candidate.generate_mean(series, SCENARIO.horizon * candidate.patch_size)  # a reset can only forget then
    compared = compare(SCENARIO.name, quantities(candidate, SCENARIO, series, reference.truth), reference)
    control = compare(SCENARIO.name, quantities(trial.eager(CONTROL), SCENARIO, series, reference.truth), reference)
    figure = equivalence_figure(compared, [control])
    assert figure.value is not None, figure.missing
    return figure.value


@pytest.mark.parametrize("name", names(Gate.EQUIVALENCE))
def test_a_wrong_forecast_turns_equivalence_red(name: str) -> None:
    assert equivalence_of(f"sabotaged:{name}") > 1.0


@pytest.mark.parametrize("twin", twins(Gate.EQUIVALENCE))
def test_a_right_forecast_leaves_equivalence_green(twin: str) -> None:
    assert equivalence_of(twin) <= 1.0


@functools.cache
def recompile_figures(cache: str) -> dict[str, Figure]:
    trial = trial_of(cache, settings=UNLOWERED, workload=FEW_STEPS)
    upstream = eager_operations(trial, UPSTREAM)
    return count_compilations(trial, lambda: trial.compiled(batch_sizes=trial.batch_sizes), upstream).figures


def active_share_of(cache: str) -> float:
    """Compiled for real, and for what the share is measured on only."""
    trial = trial_of(cache, workload=FEW_STEPS)
    candidate = trial.compiled(batch_sizes=trial.batch_sizes)
    with CompilerWatch() as watch:
        for planned in profiled_forecasts(FEW_STEPS):
            take_planned(trial, candidate, planned, watch)
        shares, _ = measure_active_shares(trial, candidate, eager_operations(trial, UPSTREAM), watch)
    share = shares.deciding
    assert share is not None
    return share


@pytest.mark.parametrize("name", names(Gate.RECOMPILES))
def test_compiling_after_warm_up_turns_recompiles_red(name: str) -> None:
    figures = recompile_figures(f"sabotaged:{name}")
    assert figures["recompiles"].value is not None
    assert figures["recompiles"].value > RECOMPILES_ALLOWED
    assert "not tried" in figures["unannounced_stall_s"].missing


def test_a_code_object_per_step_dodges_the_recompile_log_but_not_the_count() -> None:
    figures = recompile_figures("sabotaged:code_object_per_step")
    assert figures["recompiles_logged"].value == 0
    assert figures["recompiles_hidden"].value == figures["recompiles_total"].value


@pytest.mark.parametrize("twin", twins(Gate.RECOMPILES))
def test_a_static_step_leaves_recompiles_green(twin: str) -> None:
    figures = recompile_figures(twin)
    assert figures["recompiles"].value == RECOMPILES_ALLOWED
    assert figures["graph_breaks"].value == 0


def test_buckets_of_every_length_dodge_the_recompile_log_but_not_the_total() -> None:
    figures = recompile_figures("sabotaged:bucket_per_length")
    buckets = figures["bucket_compilations"].value
    assert figures["recompiles_logged"].value == 0
    assert buckets is not None and buckets > 4
    assert figures["compilations"].value == buckets
    # one pass over contexts and one set of draws are made besides
    assert figures["recompiles_total"].value == buckets - 2 - 1


@pytest.mark.parametrize("name", names(Gate.COMPILE_ACTIVE))
def test_running_eager_in_disguise_turns_compile_active_red(name: str) -> None:
    assert active_share_of(f"sabotaged:{name}") < 0.05


@pytest.mark.parametrize("twin", twins(Gate.COMPILE_ACTIVE))
def test_a_compiled_step_leaves_compile_active_green(twin: str) -> None:
    assert active_share_of(twin) >= ACTIVE_NEEDED


class InThisProcess:
    """A contestant without a process of its own, so that the process's clock can take its time."""

    def __init__(self, name: str, forecast: Callable[[], Tensor]) -> None:
        self.name = name
        self._forecast = forecast

    def forecast(self, _series: bytes, _horizon_steps: int, _samples: int = 0, _per_batch: int = 0) -> Tensor:
        return self._forecast()

    def cpu_seconds(self) -> float:
        return 0.0


def speedup_of(cache: str, model: BoundModel, *, horizon: int) -> float:
    """By the process's own clock: what other processes do to this machine is not the cache's fault."""
    trial = trial_of(cache)
    upstream = trial.eager()
    series = trial.series(upstream.patch_size, 4, horizon)
    steps = horizon * upstream.patch_size
    contest = Contest(
        [
            InThisProcess("upstream_eager", lambda: upstream.generate_mean(series, steps)),
            InThisProcess("compiled", lambda: model.generate_mean(series, steps)),
        ],
        lambda: (series, b""),
        steps,
        clock=time.process_time,
    )
    contest.rounds(2)
    timings, _ = contest.rounds(30)
    timings["same_cache_eager"] = timings["upstream_eager"]
    run = SpeedRun(timings={name: tuple(values) for name, values in timings.items()}, warm_start_s=0.0)
    value = speed_evidence([run], cold_compile_s=Figure(value=0.0)).figures["speedup"].value
    assert value is not None
    return value


@pytest.mark.parametrize("name", names(Gate.SPEEDUP))
def test_wasting_time_turns_speedup_red(name: str) -> None:
    trial = trial_of(f"sabotaged:{name}", settings=UNLOWERED)
    assert speedup_of(trial.cache.name, trial.compiled(), horizon=2) < SPEEDUP_NEEDED


def test_a_compiled_static_step_leaves_speedup_green() -> None:
    trial = trial_of("fixed_size")
    assert speedup_of("fixed_size", trial.compiled(), horizon=8) >= SPEEDUP_NEEDED
