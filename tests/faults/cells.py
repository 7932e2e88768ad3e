"""Cells that misbehave: without end, flooding, eating memory, dying at import."""

import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.faults.kills import CELL_NOT_RUN, how
from tests.faults.outcome import Campaign, Outcome
from tests.faults.storage import joined
from tests.faults.trial import Ended, Trial, promises, resumed

ENVIRONMENT_ERROR = 5
VICTIM = "list_index"
LONGEST_LOG = 52_000_000  # bytes, what is said about the rest included
V1 = Path("/sys/fs/cgroup/memory")
V2 = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))


def _well_behaved(trial: Trial) -> None:
    trial.behaviours = {}
    trial.give_orders()


def never_ends(campaign: Campaign) -> Iterator[Outcome]:
    """Have a cell hang, deaf, with a child in a session of its own: its time ends both."""
    with campaign.trial(behaviours={VICTIM: "never ends"}, minutes=0.2) as trial:
        ended = trial.start().wait()
        broken = promises(ended, CELL_NOT_RUN) + _said(ended, "timeout: no end after 0.2 minutes")
        had = len(trial.kept())
        _well_behaved(trial)
        yield Outcome("12 s", f"{how(ended)}, timeout told, {had} cells kept", joined(broken, resumed(trial)))


def floods_its_log(campaign: Campaign) -> Iterator[Outcome]:
    """Have cells print 60 MB and more, in lines and in one line: the run goes on, and the logs stay small."""
    for behaviour in ("floods its log", "a line without end"):
        with campaign.trial(behaviours={VICTIM: behaviour}, minutes=10.0) as trial:
            ended = trial.start(limit=_little_memory).wait()
            broken = promises(ended, 0)
            logs = {path: path.stat().st_size for path in trial.results.glob("latest/logs/**/*.log")}
            broken += [f"{path.name}: a log of {size} bytes" for path, size in logs.items() if size > LONGEST_LOG]
            largest = max(logs.values(), default=0)
            if not any(b"MB left out" in path.read_bytes()[-1_000_000:] for path in logs):
                broken.append("no log says that something was left out")
            happened = f"{how(ended)}, the log ends at {largest / 1e6:.0f} MB and says so"
            yield Outcome(behaviour, happened, joined(broken, resumed(trial)))


def _little_memory() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_DATA, (400_000_000, 400_000_000))


def takes_all_memory(campaign: Campaign) -> Iterator[Outcome]:
    """Have a cell take memory as quickly as it can, watched by its supervisor."""
    yield from _out_of_memory(campaign, "watched", None)


def takes_all_memory_of_its_group(campaign: Campaign) -> Iterator[Outcome]:
    """The same with control groups: the kernel ends the cell, and the runner is told."""
    for version in (1, 2):
        with _group(version) as (group, missing):
            if group is None:
                yield Outcome(f"cgroup {version}", "", not_run=missing)
            else:
                yield from _out_of_memory(campaign, f"cgroup {version}", group)


def _out_of_memory(campaign: Campaign, moment: str, group: Path | None) -> Iterator[Outcome]:
    variables = {"TOTO_COMPAT_CGROUP": str(group)} if group else {}
    with campaign.trial(behaviours={VICTIM: "takes all memory"}, memory="300m", variables=variables) as trial:
        ended = trial.start().wait()
        broken = promises(ended, CELL_NOT_RUN) + _said(ended, "out_of_memory: took more than 300m")
        had = len(trial.kept())
        _well_behaved(trial)
        damage = joined(broken, resumed(trial))
        if group is not None and (left := [path.name for path in group.glob("toto-cell-*")]):
            damage = joined([f"control groups are left: {left}"], damage)
        yield Outcome(moment, f"{how(ended)}, out of memory told, {had} cells kept", damage)


@contextmanager
def _group(version: int) -> Iterator[tuple[Path | None, str]]:
    """Make a control group that cells may have theirs in; where that cannot be, say why."""
    roots = (V1,) if version == 1 else V2
    needed = "memory.limit_in_bytes" if version == 1 else "cgroup.subtree_control"
    root = next((one for one in roots if (one / needed).exists()), None)
    if root is None:
        yield None, f"this machine mounts no memory controller of version {version}"
        return
    group = root / f"toto-faults-{os.getpid()}"
    try:
        group.mkdir()
        if version == 2:
            (group / "cgroup.subtree_control").write_text("+memory")
    except OSError as error:
        with suppress(OSError):
            group.rmdir()
        controllers = (root / "cgroup.controllers").read_text().split() if version == 2 else []
        yield None, f"version {version} gives no memory controller here ({controllers or 'none'}): {error.strerror}"
        return
    try:
        yield group, ""
    finally:
        group.rmdir()


def torch_segfaults(campaign: Campaign) -> Iterator[Outcome]:
    """Give cells a torch that segfaults when it is imported: once before the probe, once behind it."""
    for probe, code, words in (
        (True, ENVIRONMENT_ERROR, "its probe ended with exit code 139"),
        (False, CELL_NOT_RUN, "was killed by SIGSEGV"),
    ):
        with campaign.trial(probe=probe) as trial:
            trial.python = str(_python_with(trial.folder / "venv", "import ctypes\nctypes.string_at(0)\n"))
            trial.give_orders()
            ended = trial.start().wait()
            broken = promises(ended, code) + _said(ended, words)
            trial.python, trial.probe = "", False
            trial.give_orders()
            where = "seen by the probe" if probe else "in a cell"
            yield Outcome(where, f"{how(ended)}, told as a crash", joined(broken, resumed(trial)))


def _python_with(folder: Path, torch: str) -> Path:
    """Make a virtualenv that has the host's packages and this torch."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "host.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    (packages / "torch").mkdir()
    (packages / "torch" / "__init__.py").write_text(torch, encoding="utf-8")
    return folder / "bin" / "python"


def _said(ended: Ended, words: str) -> list[str]:
    return [] if words in ended.said else [f"{words!r} is not said: {ended.said[-700:]}"]
