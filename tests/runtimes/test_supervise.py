"""The supervisor ends a cell with everything it started, whatever the reason, and passes its exit code on."""

import contextlib
import os
import signal
import subprocess
import sys

import pytest

from toto_compat.runtimes import supervise

PLENTY = 2**40
# a grandchild in a session of its own, whose parent is gone: it belongs to nobody but the supervisor
GRANDCHILD = "import signal; signal.pause()"
CHILD = (
    "import subprocess, sys\n"
    f"left = subprocess.Popen([sys.executable, '-c', {GRANDCHILD!r}], start_new_session=True)\n"
    "print(left.pid, flush=True)\n"
)
ORPHAN = f"import signal, subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}])\n"


def supervised(script: str, memory: int = PLENTY) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-I", "-S", supervise.__file__, str(memory), sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def lives(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("pass", 0),
        ("raise SystemExit(3)", 3),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", 128 + signal.SIGSEGV),
    ],
)
def test_the_cells_exit_code_is_passed_on_as_a_shell_counts(script: str, code: int) -> None:
    with supervised(script) as process:
        assert process.wait(60) == code


def test_a_closed_stdin_ends_the_cell_and_what_it_started() -> None:
    with supervised(ORPHAN + "signal.pause()") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        orphan = int(process.stdout.readline())
        assert lives(orphan)
        process.stdin.close()
        assert process.wait(60) == 128 + signal.SIGTERM
        assert not lives(orphan)


def test_what_a_finished_cell_left_running_is_ended() -> None:
    with supervised(ORPHAN) as process:
        assert process.stdout is not None
        orphan = int(process.stdout.readline())
        assert process.wait(60) == 0
        assert not lives(orphan)


def test_a_cell_that_takes_too_much_memory_is_told_apart() -> None:
    script = "import os, signal; taken = bytearray(os.urandom(2**20)) * 200; signal.pause()"
    with supervised(script, memory=100 * 2**20) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith(supervise.OUT_OF_MEMORY_LINE)
        assert process.wait(60) == 128 + signal.SIGKILL


def test_a_cell_is_asked_before_it_is_killed() -> None:
    script = (
        "import signal, sys\n"
        "def leave(*_): print('wrote down what it has', flush=True); sys.exit()\n"
        "signal.signal(signal.SIGTERM, leave); print('ready', flush=True); signal.pause()\n"
    )
    with supervised(script) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.stdin.close()
        assert process.stdout.read() == "wrote down what it has\n"
