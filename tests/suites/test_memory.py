"""Memory without torch: process trees, and the ratio."""

import os
import subprocess
import sys

import pytest

from toto_compat.suites.memory import MemoryRun, memory_evidence, resident_bytes, tree_rss, watching_the_tree

MB = 1 << 20


def test_a_tree_holds_more_than_its_root() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", "print('up', flush=True); input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdin is not None and child.stdout is not None
    try:
        child.stdout.readline()
        assert resident_bytes(child.pid) > 0
        assert tree_rss(os.getpid()) >= resident_bytes(child.pid) + resident_bytes(os.getpid()) // 2
    finally:
        child.communicate(b"\n")


def test_a_process_that_is_gone_holds_nothing() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert resident_bytes(child.pid) == 0


def test_the_peak_is_seen_even_when_the_block_is_shorter_than_the_interval() -> None:
    with watching_the_tree(every_seconds=3600) as tree:
        pass
    assert tree.peak >= 5 * MB


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
