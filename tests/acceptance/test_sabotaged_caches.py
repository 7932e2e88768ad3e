"""The file of sabotages on a real model: the two about CUDA graphs are right on a CPU and wrong by a replay's rules."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.model.small_backbone import Small, series_of
from toto_compat.acceptance.sabotages import ALL, sabotaged_caches
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


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sabotages") / "sabotaged_caches.py"
    path.write_text(sabotaged_caches(), encoding="utf-8")
    return path


def module_of(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("sabotaged_caches", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def bound(file: Path, class_name: str) -> BoundModel:
    request = CacheRequest(name="sabotaged", source=f"{file}:{class_name}")
    return bind(Small().build(), request, compile_spec=CompileSpec(mode="reduce-overhead"), max_patches=16)


def distance(model: BoundModel) -> float:
    series = series_of(context=5, horizon=PATCHES)
    eager = bind(Small().build(), CacheRequest(name="upstream", source="builtin"))
    ours, theirs = (_flat(one.teacher_forced(series, series.truth)) for one in (model, eager))
    return float((ours - theirs).abs().max() / theirs.abs().max())


def _flat(parameters: list[dict[str, Tensor]]) -> Tensor:
    return torch.cat([value.flatten() for step in parameters for value in step.values()])


def test_every_class_is_one_that_can_be_bound(file: Path) -> None:
    module = module_of(file)
    for sabotage in ALL:
        made: Any = getattr(module, sabotage.class_name)
        assert callable(made.bind), sabotage


def test_outputs_that_are_kept_are_overwritten_by_a_replay_and_right_without_one(file: Path) -> None:
    with every_graph_goes_to(run_as_it_is):
        assert distance(bound(file, "KeepsOldOutputs")) < 1e-9
    torch._dynamo.reset()
    with every_graph_goes_to(Rehearsal()):
        assert not distance(bound(file, "KeepsOldOutputs")) < 1e-9


def test_a_step_that_writes_to_an_input_breaks_a_replays_rules_and_is_right_without_one(file: Path) -> None:
    with every_graph_goes_to(run_as_it_is):
        assert distance(bound(file, "WritesAnInput")) < 1e-9
    torch._dynamo.reset()
    with every_graph_goes_to(Rehearsal()), pytest.raises(Exception, match="writes to inputs that are not static"):
        distance(bound(file, "WritesAnInput"))
