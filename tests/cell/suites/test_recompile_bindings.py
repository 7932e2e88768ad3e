"""The recompile suite on users' bindings: what is compiled out of sight, or only in sight, counts all the same."""

from collections.abc import Iterator

import pytest
import torch

from tests.cell.small_trials import TWO_LAYERS, UNLOWERED
from tests.cell.suites import recompile_bindings as bindings
from toto_compat.cell.session import Session
from toto_compat.cell.suites.recompile import run_recompile
from toto_compat.cell.trial import Trial
from toto_compat.contract.request import CacheRequest, CellProfile, CompileSettings, Workload
from toto_compat.contract.result import SuiteEvidence
from toto_compat.model.backbone import SHAPES

pytestmark = pytest.mark.cell

WORKLOAD = Workload(context=(128, 256), horizon=(192, 96), batches=(1,), sampling=("2/1",))
PROFILE = CellProfile(iterations=1, unannounced_shapes=False)


@pytest.fixture(autouse=True)
def two_layers_and_a_fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.set_num_threads(1)
    torch._dynamo.reset()
    monkeypatch.setitem(SHAPES, "tiny", TWO_LAYERS)
    yield
    torch._dynamo.reset()


def evidence_of(binding: type[bindings.Honest], settings: CompileSettings) -> SuiteEvidence:
    source = f"{bindings.__file__}:{binding.__name__}"
    trial = Trial(WORKLOAD, CacheRequest(name=binding.__name__, source=source), settings=settings)
    return run_recompile(Session(trial, PROFILE))


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


@pytest.mark.parametrize("binding", [bindings.CompiledOnlyWhileObserved, bindings.EagerInAThread])
def test_eager_where_nobody_looks_turns_compile_active_red(binding: type[bindings.Honest]) -> None:
    share = evidence_of(binding, CompileSettings()).figures["compile_active"].value
    assert share is not None and share < 0.2


def test_compiled_everywhere_leaves_compile_active_as_it_is() -> None:
    # two layers leave more of a step to the checks and draws around it than twelve do
    share = evidence_of(bindings.Honest, CompileSettings()).figures["compile_active"].value
    assert share is not None and share > 0.6
