"""Group processes that do not import torch and toto-ts anew: one process imports them, every group is a fork of it.

The imports take longer than many groups do. The server compiles nothing and computes nothing, so a fork starts as a
fresh process would. Not for CUDA: what an import may have asked the driver does not survive a fork.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

from toto_compat.cell import group
from toto_compat.cell.quiet import QuietLock

_SECONDS_TO_IMPORT = 300.0


class ForkServer:
    """The orchestrator's side: starts the server, asks it for forks, one at a time."""

    def __init__(self, environment: dict[str, str], log: Path, quiet_lock: str | None = None) -> None:
        with log.open("wb") as sink:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "toto_compat.cell.fork_server", *([quiet_lock] if quiet_lock else [])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                env=environment,
                start_new_session=True,
                bufsize=0,
            )
        self._unread = b""

    def is_ready(self) -> bool:
        """Tell whether the imports went well; waits for them. If not, a process of the group's own will say why.

        A machine that is kept quiet for so long counts as a no, too: a group's own process waits under its timeout.
        """
        return self.answer(_SECONDS_TO_IMPORT) == "ready"

    def start(self, arguments: list[str], log: Path) -> "ForkedGroup | None":
        """None if the server is gone."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write((json.dumps([str(log), *arguments]) + "\n").encode())
        except BrokenPipeError:
            return None
        pid = self.answer(None)
        return ForkedGroup(int(pid), self) if pid else None

    def answer(self, timeout: float | None) -> str | None:
        """The server's next line, empty when it is gone, None if nothing came in time."""
        assert self._process.stdout is not None
        end = None if timeout is None else time.monotonic() + timeout
        while b"\n" not in self._unread:
            left = None if end is None else max(0.0, end - time.monotonic())
            if not select.select([self._process.stdout], [], [], left)[0]:
                return None
            read = os.read(self._process.stdout.fileno(), 4096)
            if not read:
                return ""
            self._unread += read
        line, self._unread = self._unread.split(b"\n", 1)
        return line.decode()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


class ForkedGroup:
    """A group's process, to be waited for like one of `subprocess`."""

    def __init__(self, pid: int, server: ForkServer) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            answer = self._server.answer(timeout)
            if answer is None:
                raise subprocess.TimeoutExpired(f"group process {self.pid}", timeout or 0.0)
            # a server that is gone has taken its forks with it
            self.returncode = int(answer) if answer else -signal.SIGKILL
        return self.returncode


def serve(quiet_lock: str | None = None) -> None:
    """Import, say so, then fork for every line on standard input and tell the process and how it ended."""
    # given back before the first fork: a fork takes the lock through a file that it opens itself
    with QuietLock(quiet_lock).working():
        # imported for the forks, and under the lock: an import is work too
        from toto_compat.cell import session  # noqa: F401
        from toto_compat.cell.suites import recompile  # noqa: F401
        from toto_compat.cell.suites.equivalence import determinism  # noqa: F401

    group.die_with_the_orchestrator()
    _say("ready")
    for line in sys.stdin:
        log, *arguments = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _run_group(log, arguments)
        _say(str(pid))
        _say(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))


def _run_group(log: str, arguments: list[str]) -> None:
    """In the fork: a session of its own, as a started process would have, its output in the log, and never back."""
    code = 1
    try:
        os.setsid()
        with open(log, "ab") as sink:  # noqa: PTH123 - a descriptor is what is needed
            os.dup2(sink.fileno(), 1)
            os.dup2(sink.fileno(), 2)
        with open(os.devnull, "rb") as nothing:  # noqa: PTH123
            os.dup2(nothing.fileno(), 0)
        code = group.main(arguments)
    except BaseException:  # whatever it is: this process must end here and not go on serving
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    serve(*sys.argv[1:])
