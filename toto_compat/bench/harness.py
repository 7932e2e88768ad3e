"""How much of a run's wall time is the harness's own: a run is started and its processes are looked at meanwhile.
Beside it, what a second job at a time buys.

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
import yaml

from toto_compat.bench.figures import BenchFigure, one_run
from toto_compat.contract.suites import Suite
from toto_compat.errors import EnvironmentBuildError, ExitCode
from toto_compat.matrix.load import find_matrix_file
from toto_compat.runtimes.machine import core_count

_EVERY_SECONDS = 0.25
_GOAL = "<= 0.03"
_UNTIMED = (Suite.EQUIVALENCE, Suite.DETERMINISM, Suite.RECOMPILE, Suite.CUDAGRAPH)


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


def _run(figure: str, environment: str, profile: str, folder: Path, *more: str) -> tuple[Watch, float]:
    """Run all default cells of an environment anew; return what was seen and how long it took."""
    click.echo(f"{time.strftime('%H:%M:%S')} matrix {' '.join((environment, profile, *more))} ...")
    command = [sys.executable, "-m", "toto_compat.cli", "matrix", f"{environment}/*/default", "--fresh"]
    command += ["--profile", profile, "--runtime", "venv", "--device", "cpu", "--results", str(folder / "results")]
    started = time.monotonic()
    watch, code, said = watched_run([*command, *more], folder)
    if code != ExitCode.OK:
        raise EnvironmentBuildError(f"the run for {figure} ended with exit code {code}:\n{said[-2000:]}")
    return watch, time.monotonic() - started


def harness_share(environment: str, profile: str) -> BenchFigure:
    """Run all default cells of an environment anew and say which part of the wall time was not torch's."""
    with tempfile.TemporaryDirectory(prefix="toto-harness-") as folder:
        watch, seconds = _run("matrix.harness_share", environment, profile, Path(folder))
    method = (
        f"part of the wall time of a run of {environment}/*/default, profile {profile}, {seconds:.0f} s, in which no "
        f"process with torch in its memory, nor a compiler that one started, nor pip used the processor; "
        f"{watch.intervals} looks, one every {_EVERY_SECONDS:g} s"
    )
    return one_run("matrix.harness_share", watch.share, "", _GOAL, method)


def second_job(environment: str, profile: str) -> BenchFigure:
    """Run the same cells one and two at a time, with the suites of the profile that time nothing: those make way for
    nobody."""
    name = "matrix.jobs2_over_jobs1"
    with tempfile.TemporaryDirectory(prefix="toto-jobs-") as place:
        folder = Path(place)
        matrix = yaml.safe_load(find_matrix_file(None).read_text(encoding="utf-8"))
        matrix["profiles"]["untimed"] = matrix["profiles"][profile] | {"suites": [suite.value for suite in _UNTIMED]}
        (folder / "matrix.yaml").write_text(yaml.safe_dump(matrix, sort_keys=False), encoding="utf-8")
        told = ("--matrix", str(folder / "matrix.yaml"), "--jobs")
        seconds = [_run(name, environment, "untimed", folder, *told, jobs)[1] for jobs in ("1", "2")]
    method = (
        f"wall time of runs of {environment}/*/default, workloads of profile {profile}, suites {', '.join(_UNTIMED)}, "
        f"{seconds[0]:.0f} s with --jobs 1, then {seconds[1]:.0f} s with --jobs 2, on {core_count()} cores"
    )
    return one_run(name, seconds[0] / seconds[1], "x", ">= 1.5", method)
