"""Stands between the runner and one cell: `python supervise.py <memory limit in bytes>[@<group>] <command>...`.

Ends the whole process tree of the cell when its own stdin closes - because the runner stops it, or because the runner
itself was killed - or when the tree takes more memory than the cell may use. The cell is asked first, so that it can
write down what it has. Standard library only, run by path.

`group` is a folder of the cgroup file system, version 2 or the memory controller of version 1, in which the cell gets a
group of its own: there the kernel holds it to its memory. Without one the tree is looked at every now and then.
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
KILLED_LINE = "::supervisor killed_for_memory"  # somebody in the group that this process is in, which may hold others
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_SECONDS = 2.0  # each look walks /proc: a share of a core that a timing loop should not feel
_CLOSE_POLL_SECONDS = 0.1  # from half of the limit on: what is left may be gone in two seconds
_FIRST_FOR_THE_KERNEL = 500  # of 1000: short of memory, the kernel is to take a cell and not its runner
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


class MemoryGroup:
    """A control group of the cell's own, gone with it. The files are called otherwise in the two versions."""

    def __init__(self, parent: Path, limit: int) -> None:
        for left in parent.glob("toto-cell-*"):
            # of a supervisor that was killed; a group in which somebody lives cannot be removed
            if not Path(f"/proc/{left.name.rpartition('-')[2]}").exists():
                with contextlib.suppress(OSError):
                    left.rmdir()
        self.folder = parent / f"toto-cell-{os.getpid()}"
        self.folder.mkdir(exist_ok=True)
        try:
            second = (self.folder / "memory.max").exists()
            self._events = self.folder / ("memory.events" if second else "memory.oom_control")
            _order(self.folder / ("memory.max" if second else "memory.limit_in_bytes"), str(limit))
            # without these a cell swaps instead, and the kernel kills one process of it and leaves the others
            for name, value in (("memory.swap.max", "0"), ("memory.oom.group", "1")) if second else ():
                with contextlib.suppress(OSError):
                    _order(self.folder / name, value)
        except OSError:
            self.remove()
            raise

    def enter(self, pid: int) -> None:
        _order(self.folder / "cgroup.procs", str(pid))

    def killed_some(self) -> bool:
        """Tell if the kernel killed a process of the cell for its memory."""
        return (kills_told_in(self._events) or 0) > 0

    def remove(self) -> None:
        deadline = time.monotonic() + _GRACE_SECONDS
        while self.folder.exists() and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                self.folder.rmdir()
                return
            time.sleep(0.01)  # the kernel counts a process that has just died


def _order(file: Path, value: str) -> None:
    """Write into a file of the kernel's. In an ordinary folder there is none, and none is made."""
    handle = os.open(file, os.O_WRONLY)
    try:
        os.write(handle, value.encode())
    finally:
        os.close(handle)


def kills_told_in(events: Path) -> "int | None":
    try:
        lines = events.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


def kills_around(proc: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")) -> int:
    """Count processes that the kernel killed for memory in the group that this process is in, whoever's limit it was:
    on a bare host that of a session, a service or a job."""
    try:
        lines = proc.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return 0
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        root, name = (mounted / "memory", "memory.oom_control") if controllers else (mounted, "memory.events")
        # in a container the group may be mounted at the root and have another name outside
        for folder in (root / path.lstrip("/"), root):
            if (kills := kills_told_in(folder / name)) is not None:
                return kills
    return 0


def memory_group(named: str, limit: int) -> "MemoryGroup | None":
    try:
        return MemoryGroup(Path(named), limit) if named else None
    except OSError as error:
        sys.stderr.write(f"{named}: no control group can be made there, memory is looked at instead: {error}\n")
        return None


def start(command: list[str], group: "MemoryGroup | None") -> "subprocess.Popen[bytes]":
    """Start the cell. The kernel ends it if the supervisor is killed; what the cell itself started the runner finds."""

    def prepare() -> None:
        if group is not None:
            try:
                group.enter(os.getpid())
            except OSError as error:
                os.write(2, f"{group.folder}: cannot be entered, memory is looked at instead: {error}\n".encode())
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(str(_FIRST_FOR_THE_KERNEL))

    return subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=prepare)  # noqa: PLW1509 - there are no threads


def main(arguments: list[str]) -> int:
    limit, _, named = arguments[0].partition("@")
    group, kills_before = memory_group(named, int(limit)), kills_around()
    try:
        return supervise(arguments[1:], int(limit), group)
    finally:
        if kills_around() > kills_before:
            sys.stderr.write(f"{KILLED_LINE}\n")
        if group is not None:
            group.remove()


def supervise(command: list[str], memory_limit: int, group: "MemoryGroup | None") -> int:
    if sys.platform == "linux":
        # orphans of the cell come to us instead of init, so that kill_tree finds them
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    cell = start(command, group)
    pidfd = os.pidfd_open(cell.pid) if hasattr(os, "pidfd_open") else None
    watched = [sys.stdin.fileno()] + ([pidfd] if pidfd is not None else [])
    pause = _POLL_SECONDS
    while cell.poll() is None:
        ready, _, _ = select.select(watched, [], [], pause)
        if sys.stdin.fileno() in ready:
            end(cell)
            return 128 + signal.SIGTERM
        used = private_memory(descendants(os.getpid()))
        if used > memory_limit or (group is not None and group.killed_some()):
            sys.stderr.write(f"{OUT_OF_MEMORY_LINE} {used} {memory_limit}\n")
            end(cell)
            return 128 + signal.SIGKILL
        pause = _CLOSE_POLL_SECONDS if used > memory_limit // 2 else _POLL_SECONDS
    code = cell.returncode
    if group is not None and group.killed_some():
        sys.stderr.write(f"{OUT_OF_MEMORY_LINE} {memory_limit} {memory_limit}\n")
    kill_tree()
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
