"""Forks of the server behave like processes of their own: results, exit codes, hangs, and a server that dies."""

import fcntl
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from toto_compat.cell.fork_server import ForkServer

ROOT = Path(__file__).parent.parent.parent
# Stands in for the groups: what the fork server imports, without torch.
GROUP = """
import os, signal, sys
def die_with_the_orchestrator(): pass
def main(arguments):
    print("in", arguments[0], "session of its own:", os.getsid(0) == os.getpid(), flush=True)
    if arguments[0] == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if arguments[0] == "raise":
        raise RuntimeError("no good")
    if arguments[0] == "hang":
        signal.pause()
    return int(arguments[1])
"""
# Imported on the way: whether a timing loop could begin meanwhile.
SESSION = """
import fcntl, pathlib
lock = pathlib.Path(__file__).parents[2] / "quiet"
with lock.open("a") as file:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lock.with_name("seen").write_text("free")
    except BlockingIOError:
        lock.with_name("seen").write_text("held")
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ForkServer]:
    package = tmp_path / "toto_compat"
    cell = package / "cell"
    (cell / "suites" / "equivalence").mkdir(parents=True)
    for folder in (package, cell, cell / "suites", cell / "suites" / "equivalence"):
        (folder / "__init__.py").touch()
    (cell / "group.py").write_text(GROUP)
    (cell / "session.py").write_text(SESSION)
    for name in ("recompile", "equivalence/determinism"):
        (cell / "suites" / f"{name}.py").touch()
    for name in ("fork_server", "quiet"):
        (cell / f"{name}.py").write_bytes((ROOT / "toto_compat" / "cell" / f"{name}.py").read_bytes())
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1"}
    started = ForkServer(environment, tmp_path / "server.log", str(tmp_path / "quiet"))
    assert started.is_ready(), (tmp_path / "server.log").read_text()
    yield started
    started.close()


def outcome(server: ForkServer, log: Path, *arguments: str) -> int:
    forked = server.start(list(arguments), log)
    assert forked is not None
    return forked.wait(timeout=60)


def test_every_fork_says_how_it_ended_and_writes_its_own_log(server: ForkServer, tmp_path: Path) -> None:
    assert outcome(server, tmp_path / "a.log", "a", "0") == 0
    assert outcome(server, tmp_path / "b.log", "b", "7") == 7
    assert (tmp_path / "a.log").read_text() == "in a session of its own: True\n"


def test_a_fork_that_crashes_or_raises_leaves_the_server_alive(server: ForkServer, tmp_path: Path) -> None:
    assert outcome(server, tmp_path / "crash.log", "crash") == -signal.SIGSEGV
    assert outcome(server, tmp_path / "raise.log", "raise") == 1
    assert "RuntimeError: no good" in (tmp_path / "raise.log").read_text()
    assert outcome(server, tmp_path / "after.log", "after", "0") == 0


def test_a_fork_that_hangs_can_be_killed(server: ForkServer, tmp_path: Path) -> None:
    forked = server.start(["hang", "0"], tmp_path / "hang.log")
    assert forked is not None
    with pytest.raises(subprocess.TimeoutExpired):
        forked.wait(timeout=0.2)
    os.kill(forked.pid, signal.SIGKILL)
    assert forked.wait(timeout=60) == -signal.SIGKILL


def test_timing_loops_wait_for_the_imports_and_not_for_what_comes_after(server: ForkServer, tmp_path: Path) -> None:
    assert (tmp_path / "seen").read_text() == "held"
    hanging = server.start(["hang", "0"], tmp_path / "hang.log")
    assert hanging is not None
    try:
        with (tmp_path / "quiet").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.kill(hanging.pid, signal.SIGKILL)
    assert hanging.wait(timeout=60) == -signal.SIGKILL


def test_a_server_that_is_gone_starts_nothing(server: ForkServer, tmp_path: Path) -> None:
    server._process.kill()
    server._process.wait()
    assert server.start(["a", "0"], tmp_path / "a.log") is None


def test_a_server_whose_imports_fail_is_not_ready(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}
    (tmp_path / "torch.py").write_text("raise ImportError('broken')")
    environment["PYTHONPATH"] = os.pathsep.join((str(tmp_path), str(ROOT)))
    server = ForkServer(environment, tmp_path / "server.log")
    try:
        assert not server.is_ready()
    finally:
        server.close()
    assert "broken" in (tmp_path / "server.log").read_text()
