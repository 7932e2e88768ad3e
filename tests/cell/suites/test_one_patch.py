"""Forecasts of one patch: the pass over the context is all of them, and the gates look at it."""

from collections.abc import Iterator

import pytest
import torch

from tests.cell.small_trials import TWO_LAYERS
from tests.cell.suites import one_patch_bindings as bindings
from toto_compat.cell.session import Session
from toto_compat.cell.suites.recompile import run_recompile
from toto_compat.cell.trial import Trial
from toto_compat.contract.request import CacheRequest, CellProfile, CompileSettings, Workload
from toto_compat.contract.result import SuiteEvidence
from toto_compat.model.backbone import SHAPES

pytestmark = pytest.mark.cell

WORKLOAD = Workload(context=(128, 160), horizon=(8, 1), batches=(1,), sampling=("4/2",))
PROFILE = CellProfile(iterations=1, unannounced_shapes=False)


@pytest.fixture(scope="module", autouse=True)
def two_layers() -> Iterator[None]:
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SHAPES, "tiny", TWO_LAYERS)
        yield


def evidence_of(binding: type[bindings.CompiledPass], workload: Workload = WORKLOAD) -> SuiteEvidence:
    torch._dynamo.reset()
    source = f"{bindings.__file__}:{binding.__name__}"
    settings = CompileSettings()
    trial = Trial(workload, CacheRequest(name=binding.__name__, source=source), settings=settings)
    return run_recompile(Session(trial, PROFILE))


def test_a_compiled_pass_over_the_context_is_active_and_compiles_once_a_context() -> None:
    figures = evidence_of(bindings.CompiledPass).figures
    share = figures["compile_active"].value
    assert share is not None and share > 0.8
    assert figures["graph_breaks"].value == 0
    assert figures["recompiles"].value == 0


@pytest.mark.parametrize("binding", [bindings.EagerPass, bindings.CompiledWhileObserved])
def test_an_eager_pass_under_a_compiled_name_turns_compile_active_red(binding: type[bindings.CompiledPass]) -> None:
    share = evidence_of(binding).figures["compile_active"].value
    assert share is not None and share < 0.2


def test_a_graph_for_every_context_in_between_turns_recompiles_red() -> None:
    longer = WORKLOAD.model_copy(update={"context": (128, 256)})
    recompiles = evidence_of(bindings.CompiledPass, longer).figures["recompiles"].value
    assert recompiles is not None and recompiles > 0
