"""What counts as a candidate having changed torch's switches, and what does not."""

import pytest
import torch
import torch._dynamo.config as dynamo_config

from toto_compat.cell.switches import changed, switches
from toto_compat.contract.request import CompileSettings

pytestmark = pytest.mark.cell

A_SET = "allowed_functions_module_string_ignorelist"


def test_compiling_alone_changes_nothing() -> None:
    before = switches()
    torch.compile(lambda x: x + 1)(torch.ones(2))
    assert changed(before, switches(), CompileSettings()) == ()


def test_equal_sets_in_another_order_are_no_change() -> None:
    one, other = {0, 8}, {8, 0}
    assert repr(one) != repr(other)
    with dynamo_config.patch({A_SET: one}):
        before = switches()
    with dynamo_config.patch({A_SET: other}):
        assert changed(before, switches(), CompileSettings()) == ()


def test_a_set_that_gained_a_member_is_a_change() -> None:
    before = switches()
    with dynamo_config.patch({A_SET: getattr(dynamo_config, A_SET) | {"toto"}}):
        assert len(changed(before, switches(), CompileSettings())) == 1


def test_a_raised_limit_is_named_with_both_values() -> None:
    before, limit = switches(), dynamo_config.recompile_limit
    with dynamo_config.patch(recompile_limit=limit + 1000):
        found = changed(before, switches(), CompileSettings())
    assert any(f"from {limit} to {limit + 1000}" in one for one in found)


def test_what_the_cell_itself_sets_is_not_held_against_the_candidate() -> None:
    before, limit = switches(), dynamo_config.recompile_limit + 1
    with dynamo_config.patch(recompile_limit=limit):
        assert changed(before, switches(), CompileSettings(recompile_limit=limit)) == ()


def test_a_limit_raised_past_the_cells_own_is_a_change() -> None:
    before, limit = switches(), dynamo_config.recompile_limit + 1
    with dynamo_config.patch(recompile_limit=limit + 1000):
        found = changed(before, switches(), CompileSettings(recompile_limit=limit))
    assert any(f"to {limit + 1000}" in one for one in found)


def test_lowered_precision_is_a_change() -> None:
    before, precision = switches(), torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        found = changed(before, switches(), CompileSettings())
    finally:
        torch.set_float32_matmul_precision(precision)
    assert any(one.startswith("float32_matmul_precision") for one in found)
