"""How much of a run's wall time is the harness's own: a run is started and its processes are looked at meanwhile.

An interval is torch's if a process that has torch's libraries mapped, or one that such a process started (a compiler),
used the processor in it; or if packages were being installed. Everything else is the harness: its own start, the plan,
gaps between processes, interpreters that have not imported torch yet, the report.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click

from toto_compat.bench.figures import BenchFigure, one_run
from toto_compat.errors import EnvironmentBuildError, ExitCode

_EVERY_SECONDS = 0.25
_GOAL = "<= 0.03"


@dataclass
class Watch:
    """Looks at the processes below one, again and again."""

    root: int
    intervals: int = 0
    of_torch: int = 0
    _known: dict[int, bool] = field(default_factory=dict)  # a process that has mapped torch keeps it
    _ticks: dict[int, int] = field(default_factory=dict)

    def look(self) -> None:
        """Count one more interval, as torch's or not."""
        parents = _parents()
        below = _below(self.root, parents)
        working = {pid for pid in below if self._is_torch(pid, parents, below) or _installs(pid)}
        ticks = {pid: _ticks_of(pid) for pid in working}
        self.intervals += 1
        self.of_torch += any(used > self._ticks.get(pid, 0) for pid, used in ticks.items())
        self._ticks = ticks

    def _is_torch(self, pid: int, parents: Mapping[int, int], below: set[int]) -> bool:
        while pid in below:
            if self._known.get(pid) or maps_torch(pid):
                self._known[pid] = True
                return True
            pid = parents[pid]
        return False

    @property
    def share(self) -> float:
        return 1 - self.of_torch / self.intervals if self.intervals else 0.0


def maps_torch(pid: int) -> bool:
    """Tell if a process has torch's libraries in its memory."""
    return "/libtorch" in _read(pid, "maps")


def _installs(pid: int) -> bool:
    words = _read(pid, "cmdline").split("\0")
    return "pip" in words and "install" in words


def _ticks_of(pid: int) -> int:
    """Return the processor time of a process and of its children that have ended: nobody else knows theirs."""
    fields = _read(pid, "stat").rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) if len(fields) > 15 else 0


def _parents() -> dict[int, int]:
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        fields = _read(int(entry.name), "stat").rpartition(")")[2].split()
        if len(fields) > 1:
            found[int(entry.name)] = int(fields[1])
    return found


def _below(root: int, parents: Mapping[int, int]) -> set[int]:
    below, pending = set(), [root]
    while pending:
        parent = pending.pop()
        born = [pid for pid, its in parents.items() if its == parent]
        below.update(born)
        pending += born
    return below


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def watched_run(command: Sequence[str], folder: Path, *, every: float = _EVERY_SECONDS) -> tuple[Watch, int, str]:
    """Run a command to its end and watch it; return what was seen, its exit code and what it said."""
    with (folder / "said.txt").open("w+", encoding="utf-8") as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
        watch = Watch(process.pid)
        try:
            while not _ended_within(process.wait, every):
                watch.look()
        finally:
            process.kill()
            process.wait()
        said.seek(0)
        return watch, process.returncode, said.read()


def _ended_within(wait: Callable[[float], int], seconds: float) -> bool:
    try:
        wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def harness_share(environment: str, profile: str) -> BenchFigure:
    """Run all default cells of an environment anew and say which part of the wall time was not torch's."""
    click.echo(f"{time.strftime('%H:%M:%S')} matrix {environment} {profile} ...")
    with tempfile.TemporaryDirectory(prefix="toto-harness-") as name:
        folder = Path(name)
        command = [sys.executable, "-m", "toto_compat.cli", "matrix", f"{environment}/*/default", "--fresh"]
        command += ["--profile", profile, "--runtime", "venv", "--device", "cpu", "--results", str(folder / "results")]
        started = time.monotonic()
        watch, code, said = watched_run(command, folder)
        seconds = time.monotonic() - started
    if code != ExitCode.OK:
        raise EnvironmentBuildError(f"the run for matrix.harness_share ended with exit code {code}:\n{said[-2000:]}")
    method = (
        f"part of the wall time of a run of {environment}/*/default, profile {profile}, {seconds:.0f} s, in which no "
        f"process with torch in its memory, nor a compiler that one started, nor pip used the processor; "
        f"{watch.intervals} looks, one every {_EVERY_SECONDS:g} s"
    )
    return one_run("matrix.harness_share", watch.share, "", _GOAL, method)
