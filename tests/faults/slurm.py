"""Faults of a runner that submits to Slurm: killed while it does, no cell is lost and none is run twice."""

import os
import signal
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.faults.kills import how
from tests.faults.outcome import ENDED_BEFORE, Campaign, Outcome, named
from tests.faults.trial import Damage, Ended, promises
from tests.runtimes.slurm.emulated import HOW_TO_GET_IT, Emulated, Project, Started, emulated
from tests.runtimes.slurm.stub_node import GPUS
from toto_compat.evidence.store import load_run

CACHES = ("upstream", "list_index", "compile_friendly", "fixed_size")
CELLS = tuple(f"torch-2.13.0-cpu/{cache}/*" for cache in CACHES)


def runner_killed_as_it_submits(campaign: Campaign) -> Iterator[Outcome]:
    """Halt the runner between Slurm's answer and its own note of it, and kill it there."""
    with emulated() as cluster:
        if cluster is None:
            yield Outcome("", "", not_run=HOW_TO_GET_IT)
        else:
            yield from _killed_as_it_submits(campaign, cluster)


def _killed_as_it_submits(campaign: Campaign, cluster: Emulated) -> Iterator[Outcome]:
    calls = _calls(campaign, cluster)
    for turn, number in enumerate(_drawn(campaign, calls)):
        project = _project(campaign, cluster, f"killed{turn}")
        hit = _start(project, campaign, {"FAULT_AT": str(number), "FAULT_KIND": "stop"})
        moment = f"{number}: {named(calls[number - 1])}"
        if not _until_halted(hit):
            hit.end()
            yield Outcome(moment, "", not_run=ENDED_BEFORE)
            continue
        hit.process.kill()
        hit.end()
        known = len([task for task in project.submitted().tasks if task.jobs])
        again = project.start("measure", "status", "one", "--wait")
        ended = Ended(again.end(), again.printed)
        happened = f"killed, {known} jobs known, taken up: {how(ended)}"
        yield Outcome(moment, happened, _damage(project, ended))


def _project(campaign: Campaign, cluster: Emulated, name: str) -> Project:
    folder = campaign.folder / "slurm" / name
    folder.mkdir(parents=True)
    return Project(folder, cluster)


def _start(project: Project, campaign: Campaign, fault: Mapping[str, str]) -> Started:
    shim = {
        "LD_PRELOAD": str(campaign.shim),
        "FAULT_UNDER": str(project.folder / "results"),
        "FAULT_MATCH": "/slurm/",
        "FAULT_LOG": str(project.folder / "calls.log"),
        **fault,
    }
    return project.matrix("measure", *CELLS, "--profile", "held_to_references", variables=shim)


def _calls(campaign: Campaign, cluster: Emulated) -> list[str]:
    """List what an undisturbed runner does to the files of its exchange, in order."""
    project = _project(campaign, cluster, "undisturbed")
    started = _start(project, campaign, {})
    assert started.end() == 0, started.printed
    calls = (project.folder / "calls.log").read_text(encoding="utf-8").splitlines()
    return [call.replace(str(project.folder), "") for call in calls]


def _drawn(campaign: Campaign, calls: list[str]) -> list[int]:
    """Draw numbers of calls, from 1, at which Slurm has taken jobs and the runner has not noted them yet."""
    numbers, taken = [], False
    for number, call in enumerate(calls, 1):
        taken = taken or "_submission.sh" in call or "_submitted.pkl" in call
        if taken:
            numbers.append(number)
        if call.startswith("rename ") and call.endswith("/submitted.json"):
            taken = False
    draw, count = campaign.random("runner that submits"), min(campaign.moments, len(numbers))
    return sorted(draw.sample(numbers, count))


def _until_halted(started: Started) -> bool:
    status = os.waitid(os.P_PID, started.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    return status is not None and status.si_code == os.CLD_STOPPED and status.si_status == signal.SIGSTOP


def _damage(project: Project, ended: Ended) -> Damage:
    run = project.folder / "results" / "one"
    measured = {cell.cell.cache for cell in load_run(run).cells if cell.failure is None}
    began = Counter(line.split()[0] for line in project.lines(GPUS))
    began["upstream"] -= 1  # the job that computes references
    lost = [f"{cache} is nowhere" for cache in CACHES if cache not in measured]
    lost += [f"{cache} is run {count} times" for cache, count in began.items() if count > 1]
    own = {job for task in project.submitted().tasks for job in task.jobs}
    queued = project.cluster.command("squeue", "--array", "--noheader", "--format=%i %Z").splitlines()
    jobs = dict(line.split(" ", 1) for line in queued)
    left = [f"job {job}" for job, folder in jobs.items() if job not in own and Path(folder) == project.folder]
    return Damage(tuple(lost), tuple(left), tuple(promises(ended, 0)))
