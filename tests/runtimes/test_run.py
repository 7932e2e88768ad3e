"""Cells that share a CPU are started so that none of them comes last that is long."""

from tests.runtimes.stub_runtime import prepared
from tests.verdict.sample_cells import cell_request
from toto_compat.evidence.store import timing_name
from toto_compat.runtimes.local import ReadyCell
from toto_compat.runtimes.run import longest_first


def ready(cache: str, torch: str) -> ReadyCell:
    request = cell_request(cache=cache, torch=torch)
    return ReadyCell(request, prepared(request.cell.environment, request.environment))


def names(cells: list[ReadyCell]) -> list[str]:
    return [f"{cell.request.environment.torch}/{cell.request.cell.cache}" for cell in cells]


def test_the_longest_cell_is_first_and_one_that_nobody_timed_before_it() -> None:
    cells = [ready(cache, "2.13.0") for cache in ("upstream", "list_index", "compile_friendly", "fixed_size")]
    seconds = (120.0, 143.0, 131.0)
    known = {timing_name(cell.request): took for cell, took in zip(cells, seconds, strict=False)}
    order = [name.partition("/")[2] for name in names(longest_first(cells, known))]
    assert order == ["fixed_size", "list_index", "compile_friendly", "upstream"]
    assert longest_first(cells, {}) == cells


def test_environments_stay_in_their_order() -> None:
    cells = [ready("upstream", "2.9.0"), ready("upstream", "2.13.0"), ready("fixed_size", "2.9.0")]
    known = {timing_name(cell.request): took for cell, took in zip(cells, (1.0, 9.0, 5.0), strict=True)}
    assert names(longest_first(cells, known)) == ["2.9.0/fixed_size", "2.9.0/upstream", "2.13.0/upstream"]
