"""Memory without torch: the ratio, and whose figures it is made of."""

import pytest

from toto_compat.cell.suites.memory import MemoryRun, memory_evidence

MB = 1 << 20


def test_steady_state_decides_and_the_peak_stands_beside_it() -> None:
    figures = memory_evidence(
        MemoryRun(steady_rss=400 * MB, peak_tree_rss=450 * MB),
        MemoryRun(steady_rss=560 * MB, peak_tree_rss=700 * MB),
        cold_peak=900 * MB,
    ).figures
    assert figures["memory"].value == pytest.approx(1.4)
    assert figures["compile_peak"].value == pytest.approx(2.25)
    assert figures["warm_peak_bytes"].value == 700 * MB


def test_on_cuda_what_torch_reserved_decides_because_the_pools_of_graphs_are_part_of_it() -> None:
    figures = memory_evidence(
        MemoryRun(steady_rss=1, peak_tree_rss=1, cuda_allocated=100, cuda_reserved=200, cuda_peak_allocated=150),
        MemoryRun(steady_rss=9, peak_tree_rss=9, cuda_allocated=130, cuda_reserved=500, cuda_peak_allocated=190),
        cold_peak=None,
    ).figures
    assert figures["memory"].value == pytest.approx(2.5)
    assert figures["cuda_allocated"].value == pytest.approx(1.3)
    assert figures["compile_peak_bytes"].value is None
