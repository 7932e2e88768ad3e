"""The memory of process trees, as the kernel tells it."""

import os
import subprocess
import sys
from pathlib import Path

from toto_compat.cell.process_tree import own_bytes, resident_bytes, tree_own_bytes, tree_rss, watching_the_tree

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


def test_what_a_child_keeps_is_counted_and_what_it_maps_of_a_file_is_not(tmp_path: Path) -> None:
    (tmp_path / "mapped").write_bytes(b"x" * 64 * MB)
    script = (
        "import mmap, sys\n"
        "print('up', flush=True); input()\n"
        "file = open(sys.argv[1], 'rb')\n"
        "mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ); touched = sum(mapped[::4096])\n"
        "print('mapped', flush=True); input()\n"
        "kept = b'x' * (64 << 20)\n"
        "print('kept', flush=True); input()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "mapped")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdin is not None and child.stdout is not None
    held = []
    for _ in range(3):
        child.stdout.readline()
        held.append(own_bytes(child.pid))
        assert tree_own_bytes(os.getpid()) >= held[-1]
        child.stdin.write(b"\n")
        child.stdin.flush()
    child.communicate()
    started, mapped, kept = held
    assert mapped - started < 8 * MB
    assert 60 * MB < kept - mapped < 72 * MB


def test_a_process_that_is_gone_holds_nothing() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert resident_bytes(child.pid) == own_bytes(child.pid) == 0


def test_the_peak_is_seen_even_when_the_block_is_shorter_than_the_interval() -> None:
    with watching_the_tree(every_seconds=3600) as tree:
        pass
    assert tree.peak >= 5 * MB
