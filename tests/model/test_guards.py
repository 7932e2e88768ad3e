"""What dynamo no longer guards for fixed_size is noticed all the same, and what it still guards is."""

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.model.small_backbone import Small, agree, series_of  # noqa: E402
from toto_compat.contract.request import CacheRequest  # noqa: E402
from toto_compat.model.binding import bind  # noqa: E402
from toto_compat.model.bound import CompileSpec  # noqa: E402
from toto_compat.model.compile_step import _lowering  # noqa: E402
from toto_compat.model.static_model import StaticModel  # noqa: E402

pytestmark = pytest.mark.cell
UPSTREAM = CacheRequest(name="upstream", source="builtin")


def a_new_parameter(backbone: Any) -> None:
    attention = backbone.transformer.layers[0].attention
    attention.wO.weight = torch.nn.Parameter(attention.wO.weight.detach() * 1.5)


def other_memory_behind_the_same_parameter(backbone: Any) -> None:
    weight = backbone.transformer.layers[1].mlp[0].weight
    weight.data = weight.data * 0.5


def written_in_place(backbone: Any) -> None:
    with torch.no_grad():
        backbone.transformer.layers[0].attention.wQKV.weight.mul_(1.2)


def loaded_by_assignment(backbone: Any) -> None:
    state = {name: value * 1.1 for name, value in backbone.state_dict().items() if "mlp" in name}
    backbone.load_state_dict(state, strict=False, assign=True)


def two_that_are_one(backbone: Any) -> None:
    first, second = (layer.attention.wO for layer in backbone.transformer.layers[:2])
    second.weight = first.weight


def another_epsilon(backbone: Any) -> None:
    for layer in backbone.transformer.layers:
        layer.norm1.eps = 0.5


CHANGES: tuple[Callable[[Any], None], ...] = (
    a_new_parameter,
    other_memory_behind_the_same_parameter,
    written_in_place,
    loaded_by_assignment,
    two_that_are_one,
    another_epsilon,
)


def test_whatever_is_changed_after_compiling_shows_in_the_next_forecast() -> None:
    backbone, series = Small().build(), series_of()
    compiled = StaticModel(backbone, CompileSpec())
    before = compiled.generate_mean(series, 30)
    for change in CHANGES:
        change(backbone)
        right = bind(backbone, UPSTREAM).generate_mean(series, 30)
        assert not agree(before, right), f"{change.__name__} changes no forecast"
        before = compiled.generate_mean(series, 30)
        assert agree(before, right), change.__name__


def test_only_guards_on_tensors_are_left_out() -> None:
    keep = _lowering(CompileSpec())["options"].get("guard_filter_fn")
    if keep is None:
        pytest.skip("this torch has no guard_filter_fn; 2.13.0 has it: `nox -s tests`")

    class Guard:
        def __init__(self, kind: str) -> None:
            self.guard_type = kind

    kinds = ("TENSOR_MATCH", "CONSTANT_MATCH", "GLOBAL_STATE", "TYPE_MATCH", "EMPTY_NN_MODULE_HOOKS_DICT")
    assert keep([Guard(kind) for kind in kinds]) == [False, True, True, True, True]
