"""The recompile suite on users' bindings: what is compiled out of sight, or only in sight, counts all the same."""

from collections.abc import Iterator

import pytest
import torch

from tests.cell.small_trials import TWO_LAYERS, UNLOWERED
from tests.cell.suites import recompile_bindings as bindings
from toto_compat.cell.live import CompilerWatch
from toto_compat.cell.session import Session
from toto_compat.cell.suites.recompile import run_recompile, take_other_series, take_planned
from toto_compat.cell.suites.recompile_figures import ActiveShares, ForecastTaken, after_warm_up, recompile_evidence
from toto_compat.cell.suites.recompile_plan import plan_forecasts
from toto_compat.cell.trial import Trial
from toto_compat.contract.gate_limit import GateLimit
from toto_compat.contract.request import CacheRequest, CellProfile, CompileSettings, Demand, Workload
from toto_compat.contract.result import SuiteEvidence
from toto_compat.contract.suites import Suite
from toto_compat.model.backbone import SHAPES

pytestmark = pytest.mark.cell

WORKLOAD = Workload(context=(128, 256), horizon=(192, 96), batches=(1,), sampling=("2/1",))
PROFILE = CellProfile(iterations=1, unannounced_shapes=False)
NOTHING_AFTER_WARM_UP = (Demand(gate="recompiles", suite=Suite.RECOMPILE, figure="recompiles", limit=GateLimit(max=0)),)


@pytest.fixture(autouse=True)
def two_layers_and_a_fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.set_num_threads(1)
    torch._dynamo.reset()
    monkeypatch.setitem(SHAPES, "tiny", TWO_LAYERS)
    yield
    torch._dynamo.reset()


def trial_of(binding: type[bindings.Honest], settings: CompileSettings) -> Trial:
    source = f"{bindings.__file__}:{binding.__name__}"
    return Trial(WORKLOAD, CacheRequest(name=binding.__name__, source=source), settings=settings)


def evidence_of(
    binding: type[bindings.Honest], settings: CompileSettings, demands: tuple[Demand, ...] = ()
) -> SuiteEvidence:
    return run_recompile(Session(trial_of(binding, settings), PROFILE, demands=demands))


def test_what_bind_compiles_and_breaks_is_counted() -> None:
    evidence = evidence_of(bindings.BreaksAndWarmsUpInBind, UNLOWERED)
    breaks, cold = evidence.figures["graph_breaks"].value, evidence.figures["cold_compile_s"].value
    assert breaks is not None and breaks > 0
    assert cold is not None and cold > 0
    first = evidence.details["phases"][0]
    assert (first["name"], first["warm_up"]) == ("bind", True)
    assert first["compilations"] > 0


def test_a_bind_that_compiles_nothing_costs_nothing() -> None:
    evidence = evidence_of(bindings.Honest, UNLOWERED)
    assert evidence.details["phases"][0]["compilations"] == 0
    for name in ("graph_breaks", "recompiles", "recompiles_total"):
        assert evidence.figures[name].value == 0, name
    assert evidence.details["other_series"] > 80
    # NaN and infinity, mean and samples; ids that change within a patch, both
    assert {name: evidence.details["mishaps"][name] for name in ("ValueError", "AssertionError")} == {
        "ValueError": 4,
        "AssertionError": 2,
    }


@pytest.mark.parametrize("binding", [bindings.CompiledOnlyWhileObserved, bindings.EagerInAThread])
def test_eager_where_nobody_looks_turns_compile_active_red(binding: type[bindings.Honest]) -> None:
    share = evidence_of(binding, CompileSettings()).figures["compile_active"].value
    assert share is not None and share < 0.2


def test_compiled_everywhere_leaves_compile_active_as_it_is() -> None:
    # two layers leave more of a step to the checks and draws around it than twelve do
    share = evidence_of(bindings.Honest, CompileSettings()).figures["compile_active"].value
    assert share is not None and share > 0.6


COMPILING_FOR_A_SERIES = [
    bindings.AGraphForEveryPadding,
    bindings.AGraphForEveryGap,
    bindings.AGraphForEveryGrouping,
    bindings.AGraphForConstants,
    bindings.AGraphForEveryMagnitude,
    bindings.AGraphForEveryPlace,
    bindings.AGraphForEverySeed,
    bindings.AGraphForEveryInterval,
]


def compilations_of(binding: type[bindings.Honest]) -> tuple[list[ForecastTaken], list[ForecastTaken]]:
    """What is taken after the warm-up: by the plan, and of series of other kinds. Nothing is profiled."""
    trial = trial_of(binding, UNLOWERED)
    with CompilerWatch() as watch:
        candidate = trial.compiled(batch_sizes=trial.batch_sizes)
        planned = [take_planned(trial, candidate, one, watch) for one in plan_forecasts(WORKLOAD)]
        return after_warm_up(planned), list(take_other_series(trial, candidate, watch))


@pytest.mark.parametrize("binding", COMPILING_FOR_A_SERIES)
def test_a_graph_for_a_kind_of_series_is_compiled_for_that_and_for_nothing_before_it(
    binding: type[bindings.Honest],
) -> None:
    planned, others = compilations_of(binding)
    assert not any(one.phase.compile_starts for one in planned)
    figure = recompile_evidence([], ActiveShares(), announced=1, other_series=others).figures["recompiles"]
    assert figure.value is not None and figure.value > 0


def test_several_numbers_of_padded_patches_are_tried_in_means_and_samples() -> None:
    _, others = compilations_of(bindings.AGraphForEveryPadding)
    compiled = [one.phase.name for one in others if one.phase.compile_starts]
    assert len([name for name in compiled if ": padded by" in name]) >= 5
    for kind in (": padded by 3 patches", ": constant", ": large", ": one id", ": elsewhere in memory"):
        assert {one.plan.samples for one in others if one.phase.name.endswith(kind)} == {0, 1}


def test_other_series_compile_nothing_where_nothing_depends_on_them() -> None:
    _, others = compilations_of(bindings.Honest)
    assert len(others) > 80
    assert not any(one.phase.compile_starts for one in others)


def test_the_first_compilation_for_a_series_turns_recompiles_red_and_ends_the_rest() -> None:
    evidence = evidence_of(bindings.AGraphForEveryPadding, UNLOWERED, NOTHING_AFTER_WARM_UP)
    assert evidence.figures["recompiles"].value == 1
    told = "recompiles is 1, limit <= 0, so that this cell cannot PASS"
    assert evidence.skipped == f"series of other kinds and what happens to a service: {told}"
    *before, last = evidence.details["phases"]
    assert not any(row["compilations"] for row in before if not row["warm_up"])
    assert (last["name"].rpartition(": ")[2], last["compilations"]) == ("padded by 1 patches", 1)


@pytest.mark.parametrize(
    "binding",
    [
        bindings.GivesUpAtTheLongest,
        bindings.GivesUpAfterAnException,
        bindings.GivesUpAfterABreak,
        bindings.GivesUpAfterMany,
        bindings.GivesUpAfterAnotherBatch,
        bindings.GivesSamplesUpAfterAnException,
    ],
)
def test_giving_compiled_code_up_later_turns_compile_active_red(binding: type[bindings.Honest]) -> None:
    evidence = evidence_of(binding, CompileSettings())
    share = evidence.figures["compile_active"].value
    assert share is not None and share < 0.2
    looks: dict[str, dict[str, float]] = evidence.details["compile_active"]
    at_first = [share for name, steps in looks.items() if "at the end" not in name for share in steps.values()]
    assert min(at_first) > 0.6
