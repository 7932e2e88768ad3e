"""The memory of process trees, as the kernel tells it."""

import os
import subprocess
import sys

from toto_compat.cell.process_tree import resident_bytes, tree_rss, watching_the_tree

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
