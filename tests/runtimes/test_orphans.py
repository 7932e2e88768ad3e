"""Processes that outlive their supervisor are found by their home, wherever they went."""

import os
import subprocess
import sys
from pathlib import Path

from toto_compat.runtimes.orphans import end_processes_of

# forks twice with a session of its own in between, and waits
DAEMON = """
import os, signal
if os.fork() == 0:
    os.setsid()
    os.chdir('/')
    if os.fork() == 0:
        os.write(1, b'%d\\n' % os.getpid())
        os.close(1)
        signal.pause()
    os._exit(0)
os.wait()
"""


def daemon_at_home(home: Path) -> int:
    done = subprocess.run(
        [sys.executable, "-c", DAEMON], env={**os.environ, "HOME": str(home)}, stdout=subprocess.PIPE, check=True
    )
    return int(done.stdout)


def test_a_daemon_of_an_abandoned_cell_is_ended_and_its_neighbours_are_not(tmp_path: Path) -> None:
    mine, other = tmp_path / "mine", tmp_path / "mine-too"
    orphan, neighbour = daemon_at_home(mine / "home"), daemon_at_home(other / "home")
    assert end_processes_of(mine) == 1
    assert not Path(f"/proc/{orphan}/cwd").exists()
    assert Path(f"/proc/{neighbour}/cwd").exists()
    assert end_processes_of(other) == 1


def test_where_nobody_is_nothing_happens(tmp_path: Path) -> None:
    assert end_processes_of(tmp_path) == 0
