"""Memory without torch: the ratio and the growth, and whose figures they are made of."""

import itertools
from typing import Any

import pytest

from toto_compat.cell.device_memory import held_on_device
from toto_compat.cell.suites.memory import (
    COMPILER_BYTES_A_BATCH,
    CUDA_DEVICE,
    CUDA_HELD,
    CUDA_RESERVED,
    HOST,
    MB,
    MemoryRun,
)
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


def on_cuda(held: int, *, reserved: int = 0, **readings: Any) -> MemoryRun:
    """A process on a GPU whose context takes 700 MB, by what it held there beyond that, in MB."""
    taken = reserved or held
    run = memory_run(held=1, cuda_allocated=held // 2 * MB, cuda_peak_allocated=held * MB)
    return run.model_copy(
        update={
            "imports": {HOST: 0, CUDA_RESERVED: 0, CUDA_DEVICE: 700 * MB, CUDA_HELD: 700 * MB},
            "held": {
                HOST: 999 * MB,
                CUDA_RESERVED: taken * MB,
                CUDA_DEVICE: (700 + max(held, taken)) * MB,
                CUDA_HELD: (700 + held) * MB,
            },
            "readings": {**run.readings, **readings},
        }
    )


def test_on_cuda_the_device_itself_decides_less_what_the_allocator_could_give() -> None:
    figures = figures_of(on_cuda(184, reserved=184), on_cuda(500, reserved=440))
    assert figures["memory"].value == pytest.approx(2.5)
    assert figures["cuda_allocated"].value == pytest.approx(250 / 92)
    assert figures["compile_peak_bytes"].value is None


def test_on_cuda_a_device_that_another_program_left_meanwhile_gives_no_ratio() -> None:
    alone = on_cuda(184)
    shared = alone.model_copy(update={"held": {**alone.held, CUDA_DEVICE: 710 * MB, CUDA_HELD: 700 * MB}})
    for reference, compiled in ((alone, shared), (shared, alone)):
        figure = figures_of(reference, compiled)["memory"]
        assert figure.value is None
        assert "another program" in figure.missing


@pytest.mark.parametrize("place", [HOST, CUDA_RESERVED, CUDA_DEVICE, CUDA_HELD])
def test_on_cuda_a_leak_is_seen_wherever_it_is(place: str) -> None:
    still: dict[str, Any] = dict.fromkeys((HOST, CUDA_RESERVED, CUDA_DEVICE, CUDA_HELD), (5 * MB,) * 60)
    leak = tuple(itertools.accumulate([MB] * 60))
    assert on_cuda(500, **{**still, place: leak}).growth.value == pytest.approx(1.0)


# --- what fixed_size holds on `tiny`, by the rules of CUDA's allocator ------------------------------------------------

WEIGHTS, WORKSPACE, KERNELS = 11.0, 8.125, 30.0  # MB: cuBLAS's own on an A100, and kernels that eager loads
BUFFERS = (4.0, 7.0, 8.0)  # of three announced batches, 19 MB by their shapes
GRAPH_POOL = 22.0  # of each captured batch: one segment of 20 MB and one of 2


def segments_of(*live: float, pool: tuple[int, int] = (0, 0)) -> list[dict[str, object]]:
    """A segment for each tensor, the worst case: of 20 MB up to 10, of 2 MB up to 1, else its size in steps of 2."""
    sizes = [2.0 if size <= 1 else 20.0 if size < 10 else 2.0 * -(-size // 2) for size in live]
    return [
        {"total_size": int(whole * MB), "active_size": int(size * MB), "segment_pool_id": pool}
        for whole, size in zip(sizes, live, strict=True)
    ]


def fixed_size_on_tiny(*, graphs: bool, copies: int = 1) -> tuple[MemoryRun, MemoryRun]:
    """The two processes as the device counts them; `copies` of its buffers are what hoarding would add."""
    eager = segments_of(WEIGHTS, WORKSPACE)
    own = eager + segments_of(*BUFFERS * copies)
    pools = segments_of(*[GRAPH_POOL] * len(BUFFERS), pool=(0, 1)) if graphs else []
    return tuple(  # type: ignore[return-value]
        on_cuda(
            held=int(held_on_device(used_on_device=_used(segments, kernels), segments=segments) / MB),
            reserved=int(sum(int(str(one["total_size"])) for one in segments) / MB),
        ).model_copy(update={"announced_batches": len(BUFFERS)})
        for segments, kernels in ((eager, KERNELS), (own + pools, KERNELS + 6.0))
    )


def _used(segments: list[dict[str, object]], kernels: float) -> int:
    return int(kernels * MB) + sum(int(str(one["total_size"])) for one in segments)


@pytest.mark.parametrize("graphs", [False, True], ids=["no graphs", "CUDA graphs"])
def test_fixed_size_on_tiny_is_judged_by_what_it_holds_and_not_by_segments(graphs: bool) -> None:
    reference, compiled = fixed_size_on_tiny(graphs=graphs)
    figure = figures_of(reference, compiled)["memory"]
    assert figure.value is not None
    assert figure.value <= 1.5
    by_segments = compiled.gained(CUDA_RESERVED) / (reference.gained(CUDA_RESERVED) + 3 * COMPILER_BYTES_A_BATCH)
    assert by_segments > figure.value


@pytest.mark.parametrize("graphs", [False, True], ids=["no graphs", "CUDA graphs"])
def test_hoarding_on_tiny_shows_on_a_gpu_all_the_same(graphs: bool) -> None:
    figure = figures_of(*fixed_size_on_tiny(graphs=graphs, copies=5))["memory"]
    assert figure.value is not None
    assert figure.value > 1.5


def test_the_pool_of_a_graph_counts_whole_and_free_memory_of_other_segments_does_not() -> None:
    segments = [*segments_of(4.0), *segments_of(4.0, pool=(0, 1))]
    assert held_on_device(used_on_device=100 * MB, segments=segments) == (100 - 16) * MB
    assert held_on_device(used_on_device=100 * MB, segments=[]) == 100 * MB
