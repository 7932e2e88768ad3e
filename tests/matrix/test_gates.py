"""The gate table: each row can decide, and says everything that is asked of it elsewhere."""

from pathlib import Path

import pytest

from toto_compat.contract.gate_limit import GateLimit
from toto_compat.matrix.gates import Gate
from toto_compat.matrix.load import gates_markdown

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("gate", list(Gate))
def test_a_row_is_complete(gate: Gate) -> None:
    assert gate.rule.meaning.endswith(".")
    assert gate.figure
    assert gate.rule.column is None or gate.rule.column.title


@pytest.mark.parametrize("gate", [gate for gate in Gate if gate.rule.default])
def test_the_default_limit_is_on_the_side_that_the_row_calls_better(gate: Gate) -> None:
    assert gate.rule.default is not None
    assert (gate.rule.default.min is not None) is gate.rule.larger_is_better


def test_a_limit_admits_its_own_ends_and_reads_as_a_person_writes_it() -> None:
    limit = GateLimit(min=0, max=1)
    assert [limit.admits(value) for value in (-0.1, 0.0, 1.0, 1.1, float("nan"))] == [False, True, True, False, False]
    assert [GateLimit(max=0).text, GateLimit(min=2).text, limit.text] == ["<= 0", ">= 2", "0 to 1"]


def test_the_committed_description_is_that_of_the_table() -> None:
    committed = (ROOT / "docs" / "gates.md").read_text(encoding="utf-8")
    assert committed == gates_markdown(), "write it anew: toto-compat schema --gates > docs/gates.md"
