"""Memory without torch: the ratio and the growth, and whose figures they are made of."""

import itertools

import pytest

from toto_compat.cell.suites.memory import COMPILER_BYTES_A_BATCH, CUDA_DEVICE, CUDA_RESERVED, HOST, MB, MemoryRun
from toto_compat.cell.suites.memory import memory_evidence as evidence_of
from toto_compat.contract.result import Figure

LIBRARIES = 400


def memory_run(*, held: int, growth: float = 0.0, announced_batches: int = 1, **changes: object) -> MemoryRun:
    """A process that held so much beyond its libraries, in MB, and grew by so much with every forecast."""
    run = MemoryRun(
        imports={HOST: LIBRARIES * MB},
        readings={HOST: tuple(int((LIBRARIES + held + growth * number) * MB) for number in range(60))},
        held={HOST: (LIBRARIES + held) * MB},
        announced_batches=announced_batches,
        steady_rss=(LIBRARIES + held + 100) * MB,
        peak_tree_rss=(LIBRARIES + held + 200) * MB,
    )
    return run.model_copy(update=changes)


def figures_of(reference: MemoryRun, compiled: MemoryRun, **options: object) -> dict[str, Figure]:
    return evidence_of(reference, compiled, **{"cold_peak": None, **options}).figures  # type: ignore[arg-type]


def test_the_libraries_are_taken_off_both_sides() -> None:
    for libraries in (0, 4000):
        runs = [
            memory_run(held=held).model_copy(
                update={"imports": {HOST: libraries * MB}, "held": {HOST: (libraries + held) * MB}}
            )
            for held in (184, 400)
        ]
        assert figures_of(*runs)["memory"].value == pytest.approx(2.0)


@pytest.mark.parametrize(("eager", "batches"), [(20, 3), (600, 3), (20, 6)])
def test_what_a_compiler_keeps_is_no_fault_whatever_the_model_and_the_number_of_shapes(
    eager: int, batches: int
) -> None:
    allowance = batches * COMPILER_BYTES_A_BATCH // MB
    reference = memory_run(held=eager)
    kept = figures_of(reference, memory_run(held=eager + allowance, announced_batches=batches))["memory"].value
    assert kept == pytest.approx(1.0)
    hoarded = memory_run(held=2 * (eager + allowance), announced_batches=batches)
    assert figures_of(reference, hoarded)["memory"].value == pytest.approx(2.0)


def test_the_peaks_stand_beside_what_decides() -> None:
    figures = figures_of(memory_run(held=100), memory_run(held=200), cold_peak=900 * MB)
    assert figures["compile_peak"].value == pytest.approx(1.5)
    assert figures["warm_peak_bytes"].value == 800 * MB


def test_a_process_that_may_have_compiled_cold_has_no_ratio_but_a_growth() -> None:
    figures = figures_of(memory_run(held=100), memory_run(held=200), inductor_cache_filled=False)
    assert figures["memory"].value is None
    assert "recompile suite" in figures["memory"].missing
    assert figures["memory_growth"].value == 0.0


def test_the_growth_of_each_side_is_its_own() -> None:
    figures = figures_of(memory_run(held=100, growth=0.25), memory_run(held=100, growth=1.0))
    assert figures["memory_growth"].value == pytest.approx(1.0)
    assert figures["reference_memory_growth"].value == pytest.approx(0.25)


def on_cuda(reserved: int, **readings: tuple[int, ...]) -> MemoryRun:
    run = memory_run(held=1, cuda_allocated=reserved // 2 * MB, cuda_peak_allocated=reserved * MB)
    return run.model_copy(
        update={
            "imports": {HOST: 0, CUDA_RESERVED: 0, CUDA_DEVICE: 700 * MB},
            "held": {HOST: 999 * MB, CUDA_RESERVED: reserved * MB, CUDA_DEVICE: 900 * MB},
            "readings": {**run.readings, **readings},
        }
    )


def test_on_cuda_what_torch_reserved_decides_because_the_pools_of_graphs_are_part_of_it() -> None:
    figures = figures_of(on_cuda(184), on_cuda(500))
    assert figures["memory"].value == pytest.approx(2.5)
    assert figures["cuda_allocated"].value == pytest.approx(250 / 92)
    assert figures["compile_peak_bytes"].value is None


@pytest.mark.parametrize("place", [HOST, CUDA_RESERVED, CUDA_DEVICE])
def test_on_cuda_a_leak_is_seen_wherever_it_is(place: str) -> None:
    still = dict.fromkeys((HOST, CUDA_RESERVED, CUDA_DEVICE), (5 * MB,) * 60)
    leak = tuple(itertools.accumulate([MB] * 60))
    assert on_cuda(500, **{**still, place: leak}).growth.value == pytest.approx(1.0)
