"""Stands between the runner and one cell: `python supervise.py <memory limit in bytes> <command>...`.

Ends the whole process tree of the cell when its own stdin closes - because the runner stops it, or because the runner
itself was killed - or when the tree takes more memory than the cell may use. The cell is asked first, so that it can
write down what it has. Standard library only, run by path.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

OUT_OF_MEMORY_LINE = "::supervisor out_of_memory"
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_SECONDS = 2.0  # each look walks /proc: a share of a core that a timing loop should not feel
_GRACE_SECONDS = 5.0
_DYING_SECONDS = 60.0  # the kernel takes its time with gigabytes; one stuck in a device must not hold us for ever


def descendants(root: int) -> list[int]:
    """List every process below `root`; empty where there is no /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            # the command name may hold spaces and brackets: fields are counted from the last one
            parent = int(entry.read_text(errors="replace").rpartition(")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            continue
        children.setdefault(parent, []).append(int(entry.parent.name))
    below, queue = [], [root]
    while queue:
        born = children.get(queue.pop(), [])
        below += born
        queue += born
    return below


def private_memory(pids: list[int]) -> int:
    """Count anonymous and shared memory of these processes in bytes, without file mappings (torch's libraries)."""
    total = 0
    for pid in pids:
        try:
            status = Path(f"/proc/{pid}/status").read_text(errors="replace")
        except OSError:
            continue
        for line in status.splitlines():
            if line.startswith(("RssAnon:", "RssShmem:")):
                total += int(line.split()[1]) * 1024
    return total


def end(cell: "subprocess.Popen[bytes]") -> None:
    """Ask, wait a little, kill."""
    cell.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        cell.wait(_GRACE_SECONDS)
    kill_tree()


def kill_tree() -> None:
    """Kill until nothing is left: a process may fork between the listing and the kill, and a large one dies slowly."""
    deadline = time.monotonic() + _DYING_SECONDS
    while (pids := descendants(os.getpid())) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        reap()
        time.sleep(0.01)


def reap() -> None:
    """Collect adopted orphans, or they stay in the table as zombies and look alive."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return


def die_with_supervisor() -> None:
    """Have the kernel end the cell if the supervisor is killed; what the cell started the runner finds."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def main(arguments: list[str]) -> int:
    memory_limit, command = int(arguments[0]), arguments[1:]
    if sys.platform == "linux":
        # orphans of the cell come to us instead of init, so that kill_tree finds them
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    cell = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=die_with_supervisor)
    pidfd = os.pidfd_open(cell.pid) if hasattr(os, "pidfd_open") else None
    watched = [sys.stdin.fileno()] + ([pidfd] if pidfd is not None else [])
    while cell.poll() is None:
        ready, _, _ = select.select(watched, [], [], _POLL_SECONDS)
        if sys.stdin.fileno() in ready:
            end(cell)
            return 128 + signal.SIGTERM
        used = private_memory(descendants(os.getpid()))
        if used > memory_limit:
            sys.stderr.write(f"{OUT_OF_MEMORY_LINE} {used} {memory_limit}\n")
            end(cell)
            return 128 + signal.SIGKILL
    code = cell.returncode
    kill_tree()
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
