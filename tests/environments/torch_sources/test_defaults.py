"""The defaults of torch's compiler over releases, as the wheels' own sources set them."""

import ast
import json

import pytest

from toto_compat.environments.torch_sources import spans
from toto_compat.environments.torch_sources.defaults import (
    Expression,
    default_releases,
    defaults_of,
    document,
    torch_defaults,
)
from toto_compat.environments.torch_sources.expressions import Unknown, value_of


@pytest.mark.parametrize(
    ("name", "before", "then", "since"),
    [
        ("dynamo.mark_static_address(guard)", ("2.9.0", True), False, "2.9.1"),
        ("dynamo.accumulated_cache_size_limit", ("2.3.1", 64), 256, "2.4.0"),
        ("inductor.triton.cudagraph_support_input_mutation", ("2.4.1", False), True, "2.5.0"),
        ("inductor.fx_graph_cache", ("2.4.1", False), True, "2.5.0"),
        ("dynamo.specialize_float", ("2.5.1", True), False, "2.6.0"),
        ("dynamo.inline_inbuilt_nn_modules", ("2.4.1", False), True, "2.5.0"),
        ("inductor.graph_partition", ("2.8.0", False), True, "2.9.0"),
    ],
)
def test_what_changed_when_is_in_the_table(name: str, before: tuple[str, object], then: object, since: str) -> None:
    release, value = before
    assert torch_defaults(release)[name] is value or torch_defaults(release)[name] == value
    assert torch_defaults(since)[name] is then or torch_defaults(since)[name] == then


def test_a_renamed_setting_has_one_value_under_both_names() -> None:
    old, new = torch_defaults("2.6.0"), torch_defaults("2.13.0")
    assert old["dynamo.cache_size_limit"] == 8
    assert "dynamo.recompile_limit" not in old
    assert new["dynamo.recompile_limit"] == new["dynamo.cache_size_limit"] == 8
    assert new["dynamo.accumulated_recompile_limit"] == 256
    assert all(torch_defaults(release)["dynamo.capture_scalar_outputs"] is False for release in default_releases())


def test_the_build_of_a_wheel_is_no_part_of_a_release_and_an_unknown_one_is_told() -> None:
    assert torch_defaults("2.13.0+cpu") == torch_defaults("2.13.0")
    with pytest.raises(KeyError):
        torch_defaults("2.2.0")


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("os.environ.get('X', '0') == '1'", False),
        ("os.environ.get('X', '1') != '0'", True),
        ("not is_fbcode()", True),
        ("None if is_fbcode() else 4 * 1024", 4096),
        ("int(os.getenv('X', '7'))", 7),
        ("sys.platform == 'win32'", False),
        ("earlier and 'b'", "b"),
        ("{'a': (1, 2)}", {"a": [1, 2]}),
        ("set()", []),
        ("2**20", 2**20),
    ],
)
def test_an_expression_is_computed_without_torch(expression: str, value: object) -> None:
    assert value_of(ast.parse(expression, mode="eval").body, {"earlier": True}) == value


@pytest.mark.parametrize(
    "expression", ["torch.cuda.is_available()", "2**10000000", "[0] * 10**9", "1/0", "open('x')", "9**9**9", "later"]
)
def test_what_depends_on_torch_or_costs_too_much_is_no_value(expression: str) -> None:
    with pytest.raises(Unknown):
        value_of(ast.parse(expression, mode="eval").body, {})


def test_conditions_groups_and_functions_of_a_config_are_understood() -> None:
    source = b"""
import sys
limit = 8
old_limit: int = Config(alias="torch._dynamo.config.limit")
knob = Config(justknob="x", default=limit, env_name_force="Y")
_hidden = 1
where = compute()
if sys.platform == "win32":
    fast = False
else:
    fast = True
class triton:
    graphs = not is_fbcode()
class Code:
    def method(self): ...
    inner = 1
"""
    decorators = b"def mark_static_address(t, guard=False): ..."
    found = defaults_of([("torch/_dynamo/config.py", source), ("torch/_dynamo/decorators.py", decorators)])
    assert found == {
        "dynamo.limit": 8,
        "dynamo.old_limit": {"alias": "dynamo.limit"},
        "dynamo.knob": 8,
        "dynamo.where": {"expression": "compute()"},
        "dynamo.fast": True,
        "dynamo.triton.graphs": True,
        "dynamo.mark_static_address(guard)": False,
    }


def test_a_value_that_changes_its_type_begins_a_new_span_and_a_gap_ends_one() -> None:
    old: dict[str, object] = {"a": 1, "b": 1}
    read = {"2.9.0": old, "2.10.0": {"a": True}, "2.11.0": {"a": True, "b": 1}}
    table = document(read)
    assert table["releases"] == ["2.9.0", "2.10.0", "2.11.0"]
    assert table["defaults"] == {
        "a": [["2.9.0", "2.9.0", 1], ["2.10.0", "2.11.0", True]],
        "b": [["2.9.0", "2.9.0", 1], ["2.11.0", "2.11.0", 1]],
    }
    folded = table["defaults"]
    assert isinstance(folded, dict)
    assert dict(spans.unfolded(folded["a"], ["2.9.0", "2.10.0", "2.11.0"])) == {
        "2.9.0": 1,
        "2.10.0": True,
        "2.11.0": True,
    }


def test_what_cannot_be_computed_is_told_as_its_expression() -> None:
    unknown = {name: value for name, value in torch_defaults("2.13.0").items() if isinstance(value, Expression)}
    assert "inductor.compile_threads" in unknown  # it counts the machine's cores
    assert len(unknown) < 40


@pytest.mark.parametrize("table", ["defaults.json", "variables.json", "log_lines.json"])
def test_every_table_has_the_same_releases_and_names_no_host(table: str) -> None:
    assert tuple(spans.load(table)["releases"]) == default_releases()
    assert default_releases()[0] == "2.3.1"
    assert "://" not in json.dumps({**spans.load(table), "defaults": {}}) or table == "defaults.json"
