"""What is known of CUDA without a GPU, as the committed runs say it; and what may ever be committed as a GPU's own."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from toto_compat.acceptance.bundle import PUBLISHED, why_not_publishable
from toto_compat.contract.events import EventKind
from toto_compat.contract.result import Kind, Outcome, SuiteEvidence
from toto_compat.contract.suites import Suite
from toto_compat.evidence.store import StoredCell, load_run
from toto_compat.matrix.load import load_matrix
from toto_compat.verdict.judge import Status
from toto_compat.verdict.judged_run import judge_run

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "results" / "reference"
# Every cell that was run, by its run. The matrix beside them names more: what is not here is not known.
COMMITTED: dict[str, tuple[str, ...]] = {
    "cuda-lowered": tuple(
        f"{environment}/fixed_size/{mode}@{workload}"
        for environment in ("torch-2.15.0-cu132", "torch-2.13.0-cu130", "torch-2.9.0-cu128")
        for mode in ("reduce-overhead", "max-autotune")
        for workload in ("base", "base-float16", "tiny", "tiny-float16")
    ),
    "cuda-interpreted": tuple(
        f"{environment}/fixed_size/reduce-overhead"
        for environment in ("torch-2.15.0-cu132", "torch-2.13.0-cu130", "torch-2.9.0-cu128")
    ),
    "cuda-refused": tuple(
        f"{environment}/{cache}/reduce-overhead+production"
        for environment in ("torch-2.15.0-cu132", "torch-2.13.0-cu130", "torch-2.9.0-cu128")
        for cache in ("list_index", "compile_friendly")
    ),
}
RUNS = tuple(run for run, cells in COMMITTED.items() if cells)
MATRIX = REFERENCE / "cuda-lowered" / "matrix.yaml"
ARCHITECTURES = ("sm_80", "sm_90", "sm_120")
MOST_BYTES = 1_500_000
# Production's own words for it, in its logs of 2025: mutated inputs, and a value that is read back.
PRODUCTIONS_REASONS = re.compile(r"mutated inputs|_local_scalar_dense|incompatible op|unbacked|cpu")


def cells_of(run: str) -> tuple[StoredCell, ...]:
    return load_run(REFERENCE / run).cells if run in RUNS else ()


def lowered_in(cell: StoredCell) -> SuiteEvidence:
    found = cell.evidence[Suite.CUDA_LOWERING]
    assert found.outcome is Outcome.MEASURED, (cell.cell, found.failure)
    return found


def names(cells: Sequence[StoredCell]) -> list[str]:
    return [str(cell.cell) for cell in cells]


LOWERED, INTERPRETED, REFUSED = map(cells_of, COMMITTED)
THINNED = [cell for cell in LOWERED if "thinned" in cell.evidence[Suite.CUDA_LOWERING].details]
WHOLE = [cell for cell in LOWERED if cell not in THINNED]


def test_the_committed_runs_hold_what_is_said_of_them_and_no_more() -> None:
    there = {path.parent.name for path in REFERENCE.glob("cuda-*/run.json")}
    assert there == set(RUNS)
    for run in RUNS:
        assert sorted(names(cells_of(run))) == sorted(COMMITTED[run])


@pytest.mark.parametrize("cell", LOWERED, ids=names(LOWERED))
def test_cuda_graphs_would_take_every_graph_of_fixed_size_whole_on_every_architecture(cell: StoredCell) -> None:
    found = lowered_in(cell)
    figure = found.figures["cudagraphs"]
    assert (figure.value, figure.kind) == (0, Kind.PREDICTED)
    assert found.figures["graphs_not_lowered"].value == 0
    assert found.figures["values_on_cpu"].value == 0
    graphs = found.details["graphs"]
    assert {graph["architecture"] for graph in graphs} == set(ARCHITECTURES)
    for graph in graphs:
        assert [part["captured"] for part in graph["partitions"]] == [True], graph
        assert not graph["error"]
        assert graph["kernels"]


@pytest.mark.parametrize("cell", WHOLE, ids=names(WHOLE))
def test_that_is_the_passes_the_draws_and_decode_steps_of_1_and_128_rows(cell: StoredCell) -> None:
    made_for = {graph["made_for"] for graph in lowered_in(cell).details["graphs"]}
    assert {1, 128} == {int(found[1]) for name in made_for if (found := re.match(r"decode step for batch (\d+)", name))}
    assert any(name.startswith("context pass") for name in made_for)
    assert any(name.startswith("patch draws") for name in made_for)
    half = cell.request.workload.autocast == "float16"
    assert half == any("autocast float16" in name for name in made_for)


@pytest.mark.parametrize("cell", THINNED, ids=names(THINNED))
def test_max_autotune_has_as_many_graphs_as_reduce_overhead_and_all_are_taken_on_every_architecture(
    cell: StoredCell,
) -> None:
    """Its list of graphs is cut; the rows by architecture count all of them."""
    rows = {row["architecture"]: row for row in lowered_in(cell).details["architectures"]}
    twin = next(one for one in WHOLE if str(one.cell) == str(cell.cell).replace("max-autotune", "reduce-overhead"))
    expected = {row["architecture"]: row["graphs"] for row in lowered_in(twin).details["architectures"]}
    assert set(rows) == set(ARCHITECTURES)
    for name, row in rows.items():
        assert row["lowered"] == row["captured_whole"] == row["graphs"] == expected[name]
        assert row["captured_partitions"] == row["partitions"] == row["graphs"]
        assert not row["errors"]


def check_interpreted(cell: StoredCell) -> None:
    found = cell.evidence[Suite.CUDA_EQUIVALENCE]
    assert found.outcome is Outcome.MEASURED, found.failure
    figure, control = found.figures["cuda_equivalence"], found.figures["cuda_equivalence_control"]
    assert figure.kind is Kind.INTERPRETED
    assert figure.value is not None and figure.value <= 1.0
    assert control.value is not None and control.value > 1.0  # a cache that is wrong on purpose is seen
    assert found.figures["kernel_launches"].value
    assert cell.request.workload.horizon_patches[0] == 10
    scenarios = {one["scenario"] for one in found.details["comparisons"]}
    assert {"16 rows", "samples"} <= scenarios
    assert found.details["not_lowered"] == []


@pytest.mark.skipif(not INTERPRETED, reason="no run is committed: the second command of cuda-lowered/matrix.yaml")
def test_the_code_for_cuda_forecasts_as_eager_where_it_is_executed_without_a_gpu() -> None:
    for cell in INTERPRETED:
        check_interpreted(cell)


@pytest.mark.parametrize("cell", REFUSED, ids=names(REFUSED))
def test_what_production_ran_is_not_taken_for_productions_reasons(cell: StoredCell) -> None:
    found = lowered_in(cell)
    value = found.figures["cudagraphs"].value
    assert value is not None and value > 0
    assert found.events
    assert any(PRODUCTIONS_REASONS.search(event.reason) for event in found.events), found.events
    assert cell.request.settings.capture_scalar_outputs


def test_on_productions_own_release_the_reasons_are_in_the_words_of_its_log() -> None:
    told = {
        (event.kind, event.reason)
        for cell in REFUSED
        if str(cell.cell).startswith("torch-2.9.0-cu128/compile_friendly")
        for event in lowered_in(cell).events
    }
    assert (EventKind.CUDAGRAPH_SKIP, "incompatible op aten._local_scalar_dense.default") in told
    assert (EventKind.CUDAGRAPH_PARTITION, "non gpu ops") in told


@pytest.mark.parametrize("run", RUNS)
def test_none_of_it_decides_a_verdict(run: str) -> None:
    judged = judge_run(load_run(REFERENCE / run))
    assert {cell.verdict for cell in judged.cells} == {Status.INCONCLUSIVE}
    assert judged.run.unfinished == ()


@pytest.mark.parametrize("run", RUNS)
def test_the_committed_runs_are_small_and_name_no_folder_of_a_machine(run: str) -> None:
    files = [path for path in (REFERENCE / run).rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < MOST_BYTES
    for path in files:
        assert not re.search(r"(?<![\w.~-])/(root|home|work|opt|tmp)/", path.read_text(encoding="utf-8")), path


def test_their_environments_are_those_of_the_projects_matrix() -> None:
    ours, theirs = load_matrix(ROOT / "matrix.yaml").environments, load_matrix(MATRIX).environments
    assert {name: ours[name] for name in theirs} == dict(theirs)


def test_what_is_committed_as_a_gpus_own_was_measured_on_one() -> None:
    bundle = REFERENCE.parent / PUBLISHED
    assert not bundle.exists() or list(why_not_publishable(bundle)) == []
