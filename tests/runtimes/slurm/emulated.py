"""The emulated Slurm that tests talk to, and runs on it."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from tests.runtimes.slurm.stub_node import BEHAVIOUR
from toto_compat.evidence.store import StoredCell, load_run
from toto_compat.runtimes.slurm.exchange import Submitted, exchange_of

ROOT = Path(__file__).parents[3]
SCRIPT = Path(__file__).with_name("cluster.sh")
_LONGEST_SECONDS = 600.0  # of a command, on a machine that has much else to do
HOW_TO_GET_IT = "no emulated Slurm is up here: `bash .ci/parts/40-slurm.sh up` starts one, from Debian's packages"

MATRIX_TEXT = """
schema: 1
environments:
  torch-2.13.0-cpu: {torch: "2.13.0", build: cpu}
  torch-2.9.0-cu128: {torch: "2.9.0", build: cu128}
caches:
  upstream: {source: builtin}
  list_index: {source: builtin}
  compile_friendly: {source: builtin}
  fixed_size: {source: builtin}
settings: {stock: {}}
modes: [default]
profiles:
  quick: {iterations: 1, workloads: [quick], suites: [recompile]}
  held_to_references: {iterations: 1, workloads: [quick], suites: [recompile, equivalence]}
workloads:
  quick: {}
"""


@dataclass(frozen=True)
class Emulated:
    """A cluster that is up."""

    folder: Path
    variables: dict[str, str]
    in_use: TextIO  # locked, shared, by every process whose tests have jobs on it

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until no other process has jobs on it, and keep others out: they would not find its controller."""
        fcntl.flock(self.in_use, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self.in_use, fcntl.LOCK_SH)

    def command(self, *words: str) -> str:
        done = subprocess.run(words, env=self.variables, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def daemon(self, order: str, name: str) -> None:
        # detached from the test's pipes: a daemon would hold them open
        subprocess.run(
            ["bash", SCRIPT, order, self.folder, name],
            env=self.variables,
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def kill_node(self, node: str) -> None:
        """Kill everything on a node at once, as a power cut would."""
        daemons, processes, jobs = [int((self.folder / f"{node}.pid").read_text())], [], set()
        for process in Path("/proc").glob("[0-9]*"):
            try:
                environment = (process / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            ours = f"SLURM_CONF={self.folder}/slurm.conf".encode() in environment
            if ours and f"SLURMD_NODENAME={node}".encode() in environment:
                processes.append(int(process.name))
                jobs |= {one.removeprefix(b"SLURM_JOB_ID=") for one in environment if one.startswith(b"SLURM_JOB_ID=")}
        for process in Path("/proc").glob("[0-9]*"):
            try:
                words, program = (process / "cmdline").read_bytes(), str((process / "exe").readlink())
            except OSError:
                continue
            if program.startswith(str(self.folder)) and any(b"slurmstepd: [" + job + b"." in words for job in jobs):
                daemons.append(int(process.name))
        # first those that would tell the controller how the others ended
        for pid in daemons + processes:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


@contextmanager
def emulated() -> Iterator[Emulated | None]:
    """Give the cluster for as long as nobody has its controller away; None if none was brought up.

    One that was and does not answer is an error: tests that skip for it would be missed by nobody."""
    place = subprocess.run(["bash", SCRIPT, "place"], capture_output=True, text=True, check=False)
    if place.returncode != 0:
        yield None
        return
    folder = Path(place.stdout.strip())
    with (folder / "in-use").open("a", encoding="utf-8") as in_use:
        fcntl.flock(in_use, fcntl.LOCK_SH)
        subprocess.run(["bash", SCRIPT, "wait"], check=True, stdin=subprocess.DEVNULL)
        words = ["bash", "-c", '. "$1"/env.sh && exec env -0', "bash", str(folder)]
        printed = subprocess.run(words, capture_output=True, check=True).stdout
        variables = dict(line.decode().split("=", 1) for line in printed.split(b"\0") if line)
        yield Emulated(folder, variables, in_use)


class Project:
    """A folder with a matrix.yaml from which runs are submitted."""

    def __init__(self, folder: Path, cluster: Emulated, **slurm: Any) -> None:
        self.folder, self.cluster = folder, cluster
        self.cache = folder / "cache"
        self.cache.mkdir()
        settings = {"partition": "steady", "gres": "gpu:a100:1", "poll_seconds": 0.3, "result_grace_seconds": 0.5}
        settings |= {"minutes": 10, "retries": 1} | slurm
        (folder / "matrix.yaml").write_text(f"{MATRIX_TEXT}slurm: {json.dumps(settings)}\n")

    def start(
        self, behaviour: str | dict[str, str], *arguments: str, variables: Mapping[str, str] | None = None
    ) -> "Started":
        own = {"PYTHONPATH": str(ROOT), "TOTO_COMPAT_CACHE": str(self.cache), BEHAVIOUR: "", **(variables or {})}
        command = [sys.executable, "-m", "tests.runtimes.slurm.stub_node", json.dumps(behaviour), *arguments]
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=self.cluster.variables | own,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        return Started(process)

    def matrix(
        self,
        behaviour: str | dict[str, str],
        *arguments: str,
        run: str = "one",
        variables: Mapping[str, str] | None = None,
    ) -> "Started":
        words = ("matrix", "--executor", "slurm", "--device", "cpu", "--run", run, *arguments)
        return self.start(behaviour, *words, variables=variables)

    def cells(self, run: str = "one") -> dict[str, StoredCell]:
        """The cells of a run by the name of their cache."""
        return {cell.cell.cache: cell for cell in load_run(self.folder / "results" / run).cells}

    def submitted(self, run: str = "one") -> Submitted:
        return exchange_of(self.folder / "results" / run).read_submitted()

    def jobs_of(self, cache: str, run: str = "one") -> tuple[str, ...]:
        return next(task.jobs for task in self.submitted(run).cells if task.cell.cache == cache)

    def lines(self, name: str) -> list[str]:
        return (self.cache / name).read_text().splitlines()


class Started:
    """A command that runs, and what it printed so far. One that never says what is waited for is killed, and told."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.printed = ""
        self._watchdog = threading.Timer(_LONGEST_SECONDS, process.kill)
        self._watchdog.daemon = True
        self._watchdog.start()

    def until(self, text: str) -> str:
        """Read on to the line that holds the text."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.printed += line
            if text in line:
                return line
        raise AssertionError(f"ended without saying {text!r}:\n{self.printed}")

    def end(self) -> int:
        rest, _ = self.process.communicate()
        self._watchdog.cancel()
        self.printed += rest
        return self.process.returncode
