"""The file of sabotages on a real model: the two about CUDA graphs are right on a CPU and wrong by a replay's rules."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.model.small_backbone import Small, series_of
from toto_compat.acceptance import sabotaged_caches
from toto_compat.cell.lowering.capture import every_graph_goes_to, run_as_it_is
from toto_compat.cell.lowering.replay import Rehearsal
from toto_compat.contract.request import CacheRequest
from toto_compat.model.binding import bind
from toto_compat.model.bound import BoundModel, CompileSpec

pytestmark = pytest.mark.cell

PATCHES = 4


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


FILE = Path(sabotaged_caches.__file__)


def bound(class_name: str) -> BoundModel:
    request = CacheRequest(name="sabotaged", source=f"{FILE}:{class_name}")
    return bind(Small().build(), request, compile_spec=CompileSpec(mode="reduce-overhead"), max_patches=16)


def distance(model: BoundModel) -> float:
    series = series_of(context=5, horizon=PATCHES)
    eager = bind(Small().build(), CacheRequest(name="upstream", source="builtin"))
    ours, theirs = (_flat(one.teacher_forced(series, series.truth)) for one in (model, eager))
    return float((ours - theirs).abs().max() / theirs.abs().max())


def _flat(parameters: list[dict[str, Tensor]]) -> Tensor:
    return torch.cat([value.flatten() for step in parameters for value in step.values()])


def test_outputs_that_are_kept_are_overwritten_by_a_replay_and_right_without_one() -> None:
    with every_graph_goes_to(run_as_it_is):
        assert distance(bound("KeepsOldOutputs")) < 1e-9
    torch._dynamo.reset()
    with every_graph_goes_to(Rehearsal()):
        assert not distance(bound("KeepsOldOutputs")) < 1e-9


def test_a_step_that_writes_to_an_input_breaks_a_replays_rules_and_is_right_without_one() -> None:
    with every_graph_goes_to(run_as_it_is):
        assert distance(bound("WritesAnInput")) < 1e-9
    torch._dynamo.reset()
    with every_graph_goes_to(Rehearsal()), pytest.raises(Exception, match="writes to inputs that are not static"):
        distance(bound("WritesAnInput"))
