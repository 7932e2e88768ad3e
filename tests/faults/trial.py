"""One trial of a fault: a project of its own, a runner that can be hit at an exact moment, and what was lost by it."""

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from toto_compat.environments.pythons import find_compiler

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
RUNNER = HERE / "stand_in_runner.py"
ENVIRONMENT = "torch-2.13.0-cpu"
CACHES = ("upstream", "list_index", "compile_friendly")
MODES = ("default", "reduce-overhead")
CELLS = frozenset(f"{ENVIRONMENT}/{cache}/{mode}" for cache in CACHES for mode in MODES)
MATRIX = f"""
schema: 1
environments:
  {ENVIRONMENT}: {{torch: "2.13.0", build: cpu}}
caches:
  upstream: {{source: builtin}}
  list_index: {{source: builtin}}
  compile_friendly: {{source: builtin}}
settings: {{stock: {{}}}}
modes: [default, reduce-overhead]
limits: {{memory: MEMORY}}
profiles:
  quick: {{iterations: 1, workloads: [quick], suites: [recompile, equivalence], timeout_minutes: MINUTES}}
  other: {{iterations: 1, workloads: [quick], suites: [equivalence], timeout_minutes: MINUTES}}
workloads:
  quick: {{}}
"""
_LONGEST_RUN_SECONDS = 900.0  # on a machine that has much else to do
_LEFT_SECONDS = 60.0  # a supervisor asks, waits five seconds, and kills


@dataclass(frozen=True)
class Damage:
    """What a fault did in the end. Nothing is lost if all three are empty."""

    lost: tuple[str, ...] = ()  # finished cells that are gone, or were run a second time
    left: tuple[str, ...] = ()  # processes, containers and files that nobody owns
    broken: tuple[str, ...] = ()  # promises about files, exit codes and messages that did not hold

    def __bool__(self) -> bool:
        return bool(self.lost or self.left or self.broken)


@dataclass(frozen=True)
class Ended:
    """How a runner ended; a negative code is a signal."""

    code: int
    said: str
    stopped_at: str = ""


@dataclass
class Trial:
    """A folder with a matrix, results and a cache of its own."""

    folder: Path
    shim: Path
    behaviours: dict[str, str] = field(default_factory=dict)
    waits: tuple[str, ...] = ()  # a cell, and where it stands still while the gate is shut
    minutes: float = 1.0
    memory: str = "1g"
    flood_blocks: int = 60  # of about a megabyte
    python: str = ""  # of another interpreter: then the cells are real ones
    probe: bool = False  # ask that interpreter first, as a run does
    variables: dict[str, str] = field(default_factory=dict)
    containers: dict[str, str] = field(default_factory=dict)  # image, source and behaviour: then cells run in those

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        self.give_orders()

    def give_orders(self) -> None:
        matrix = MATRIX.replace("MINUTES", f"{self.minutes:g}").replace("MEMORY", self.memory)
        (self.folder / "matrix.yaml").write_text(matrix, encoding="utf-8")
        orders = {
            "ledger": str(self.ledger),
            "behaviours": self.behaviours,
            "flood_blocks": self.flood_blocks,
            "gate": str(self.gate),
            "waits": list(self.waits),
            "python": self.python,
            "probe": self.probe,
            **self.containers,
        }
        self.gate.touch()
        self.orders.write_text(json.dumps(orders), encoding="utf-8")

    @property
    def orders(self) -> Path:
        return self.folder / "orders.json"

    @property
    def gate(self) -> Path:
        return self.folder / "gate"

    @contextmanager
    def gate_shut(self) -> Iterator[None]:
        """Have the cell that waits stand still."""
        with self.gate.open("w") as gate:
            fcntl.flock(gate, fcntl.LOCK_EX)
            yield

    @property
    def ledger(self) -> Path:
        return self.folder / "ledger"

    @property
    def results(self) -> Path:
        return self.folder / "results"

    @property
    def cache(self) -> Path:
        return self.folder / "c"

    @property
    def calls(self) -> Path:
        return self.folder / "calls.log"

    def start(
        self,
        *arguments: str,
        fault: Mapping[str, str] | None = None,
        under: str = "",
        limit: Callable[[], None] | None = None,
    ) -> "Runner":
        """Start a runner on everything there is to run; `fault` says what the shim does to it."""
        variables = {name: value for name, value in os.environ.items() if not name.startswith(("FAULT_", "LD_"))}
        variables |= {"PYTHONPATH": str(ROOT), "TOTO_COMPAT_CACHE": str(self.cache)}
        variables |= self.variables
        if fault is not None:
            variables |= {
                "LD_PRELOAD": str(self.shim),
                "FAULT_UNDER": under or f"{self.results}:{self.cache}",
                "FAULT_LOG": str(self.calls),
                **fault,
            }
        words = [sys.executable, str(RUNNER), str(self.orders), "matrix", f"{ENVIRONMENT}/*", "--device", "cpu"]
        words += ["--runtime", "venv", "--jobs", "2", *arguments]
        said = self.folder / f"said-{time.monotonic_ns()}.txt"
        with said.open("w", encoding="utf-8") as output:
            process = subprocess.Popen(
                words,
                cwd=self.folder,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                preexec_fn=limit,  # noqa: PLW1509 - a limit of the runner's own; nothing here takes a lock
            )
        return Runner(process, said, self)

    # --- what there is ------------------------------------------------------------------------------------------------

    def entries(self, word: str) -> list[str]:
        """Cells in the ledger, in the order in which they began or ended."""
        if self.containers:  # a ledger is out of their reach: what the runners said is taken for it
            said = [path.read_text(errors="replace") for path in sorted(self.folder.glob("said-*.txt"))]
            return re.findall(r"^[\d:]+ (\S+): started$", "\n".join(said), re.MULTILINE) if word == "begun" else []
        if not self.ledger.exists():
            return []
        lines = self.ledger.read_text(encoding="utf-8").splitlines()
        return [line.partition(" ")[2] for line in lines if line.startswith(f"{word} ")]

    def kept(self) -> set[str]:
        """Name the cells that are whole on disk, measured, wherever that is."""
        files = [*self.results.glob("*/cells/**/*.json"), *self.cache.glob("evidence/*/*.json")]
        return {name for path in files if (name := whole_cell(path))}

    def processes(self) -> list[str]:
        """Describe every process that has to do with this trial."""
        return sorted(processes_of(self.folder))

    def damaged_files(self) -> list[str]:
        """Name JSON files of ours that a reader would stumble over."""
        found = []
        for path in [*self.results.rglob("*.json"), *self.cache.rglob("*.json")]:
            if "/s/" in str(path) or path.is_symlink():
                continue
            try:
                json.loads(path.read_bytes())
            except (OSError, ValueError):
                found.append(str(path.relative_to(self.folder)))
        return found

    def leftover_files(self) -> list[str]:
        """Name what lies in results and cache that no reader looks for: temporary files and scratch folders."""
        paths = [*self.results.rglob(".*"), *self.cache.rglob(".*")]
        paths += self.cache.glob("s/[!.]*")
        allowed = {".lock"}
        return sorted(str(path.relative_to(self.folder)) for path in paths if path.name not in allowed)

    def was_hit(self, number: int) -> bool:
        """Tell if a runner with the shim came to the call of this number."""
        return self.calls.exists() and len(self.calls.read_text(encoding="utf-8").splitlines()) >= number

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass
class Runner:
    """A runner that was started."""

    process: "subprocess.Popen[bytes]"
    said: Path
    trial: Trial

    def until_halted(self) -> bool:
        """Wait until the shim has halted it; False if it came to its end before that."""
        with self._deadline():
            status = os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        return status is not None and status.si_code == os.CLD_STOPPED

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def until_waiting(self) -> bool:
        """Wait until the cell that was told to stands at the gate; False if the run came to its end before that."""
        while not self.trial.entries("waiting"):
            if self.process.poll() is not None:
                return False
            time.sleep(0.02)
        return True

    def kill(self) -> None:
        self.process.kill()

    def children(self) -> list[int]:
        """The supervisors of its cells."""
        return [pid for pid in children_of(self.process.pid) if b"supervise.py" in command_of(pid)]

    def cells(self) -> list[int]:
        """The processes of its cells, each the child of a supervisor."""
        return [cell for supervisor in self.children() for cell in children_of(supervisor)]

    def wait(self) -> Ended:
        with self._deadline():
            code = self.process.wait()
        return Ended(code, self.said.read_text(encoding="utf-8", errors="replace"))

    def _deadline(self) -> "Deadline":
        return Deadline(self.process)


class Deadline:
    """Kills a runner that never ends: that is a broken promise, and the campaign goes on."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._timer = threading.Timer(_LONGEST_RUN_SECONDS, process.kill)
        self._timer.daemon = True

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()


# --- judging ----------------------------------------------------------------------------------------------------------


def resumed(trial: Trial, *arguments: str, code: int = 0, may_run_again: frozenset[str] = frozenset()) -> Damage:
    """Run the same command again, right after the fault, and hold what there is then against what there was before."""
    kept, begun_before = trial.kept(), len(trial.entries("begun"))
    broken = [f"half-written: {name}" for name in trial.damaged_files()]
    ended = trial.start(*arguments).wait()
    begun = trial.entries("begun")[begun_before:]
    lost = [f"{cell} was kept and is run again" for cell in sorted(kept & set(begun) - may_run_again)]
    lost += [f"{cell} is run {begun.count(cell)} times" for cell in sorted(set(begun)) if begun.count(cell) > 1]
    lost += [f"{cell} is nowhere" for cell in sorted(CELLS - whole_cells_of_latest(trial))]
    broken += [f"half-written after resuming: {name}" for name in trial.damaged_files()]
    broken += promises(ended, code)
    return Damage(tuple(lost), tuple(still_left(trial)), tuple(broken))


def promises(ended: Ended, *codes: int) -> list[str]:
    """Name what a runner promised and did not hold: its exit code, and no traceback."""
    broken = []
    if codes and ended.code not in codes:
        broken.append(f"exit code {ended.code} instead of {' or '.join(map(str, codes))}: {ended.said[-600:]}")
    if "Traceback" in ended.said:
        broken.append(f"a traceback: {ended.said[-1500:]}")
    return broken


def still_left(trial: Trial) -> list[str]:
    """Name processes that do not go away by themselves, and files."""
    deadline = time.monotonic() + _LEFT_SECONDS
    while (alive := trial.processes()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [*alive, *trial.leftover_files()]


def whole_cell(path: Path) -> str:
    """Name the cell of a file that is whole and holds a measured cell; else nothing."""
    try:
        cell = json.loads(path.read_bytes())
        measured = all(suite["outcome"] != "error" for suite in cell["evidence"].values())
        return str(cell["cell"]) if cell["failure"] is None and cell["evidence"] and measured else ""
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ""


def whole_cells_of_latest(trial: Trial) -> set[str]:
    return {name for path in trial.results.glob("latest/cells/**/*.json") if (name := whole_cell(path))}


def processes_of(folder: Path) -> Iterator[str]:
    wanted = f"{folder}/".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        if int(entry.name) == os.getpid():
            continue
        try:
            told = (entry / "cmdline").read_bytes() + b"\0" + (entry / "environ").read_bytes()
            told += b"\0" + os.fsencode((entry / "cwd").readlink()) + b"/"
            state = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        except OSError:
            continue
        if wanted in told and state != "Z":
            yield f"process {entry.name}: {command_of(int(entry.name)).replace(bytes(1), b' ').decode()[:120]}"


def children_of(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(entry.read_text(errors="replace").rpartition(")")[2].split()[1]) == pid:
                found.append(int(entry.parent.name))
        except (OSError, ValueError, IndexError):
            continue
    return sorted(found)


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def build_shim(folder: Path) -> Path:
    """Compile the shim with the compiler that cells need as well."""
    shim = folder / "shim.so"
    words = [find_compiler(), "-x", "c", "-shared", "-fPIC", "-O1", "-o", str(shim), str(HERE / "shim.c"), "-ldl"]
    subprocess.run(words, check=True, capture_output=True, text=True)
    return shim
