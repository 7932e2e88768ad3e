"""Submitting tasks as job arrays, so that none is lost or submitted twice whenever the process is killed.

An array has a name of its own, which is on disk before Slurm is asked for it. Whoever comes next looks for that name in
the queue and takes over what was accepted.
"""

import secrets
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from toto_compat.contract.request import Limits
from toto_compat.matrix.slurm import JobDemands
from toto_compat.runtimes.slurm.cluster import LARGEST_ARRAY, Cluster, SlurmError, queue
from toto_compat.runtimes.slurm.exchange import Exchange, Submission, Submitted, Unanswered
from toto_compat.runtimes.slurm.node import run_task
from toto_compat.runtimes.slurm.seal import check_own, own_task

NODE_FUNCTION: Callable[[str], Any] = run_task  # what every job calls with the path of its task

_TO_PREPARE_MINUTES = 60.0

Keep = Callable[[Submitted], None]


@dataclass(frozen=True)
class _Array:
    """Holds what the jobs of one array have in common."""

    kind: str
    after: int | None
    demands: JobDemands
    limits: Limits
    minutes: float


def submit(exchange: Exchange, submitted: Submitted, tasks: Sequence[Submission], keep: Keep) -> None:
    """Submit these tasks, alike ones as one array. `keep` gets every change at once, and has it on disk.

    Slurm limits how many jobs of one array run at a time. Where that is wanted of the whole run, one array comes after
    the other."""
    check_own(exchange, submitted)
    cluster = Cluster(exchange.jobs, submitted.settings)
    cluster.check()
    if submitted.unanswered is not None:
        before = {task.number: task.jobs for task in submitted.tasks}
        submitted = taken_over(submitted)
        found = {task.number: task.jobs[-1] for task in submitted.tasks if task.jobs != before[task.number]}
        cluster.leave_calls(NODE_FUNCTION, {job: exchange.task(number) for number, job in found.items()})
        keep(submitted)
        tasks = [task for task in tasks if task.number not in found]
    one_by_one, previous = submitted.at_a_time < len(submitted.cells), list[str]()
    for array, own in _arrays(exchange, submitted, tasks):
        after = [task.jobs[-1] for task in submitted.tasks if task.number == array.after and task.jobs]
        for start in range(0, len(own), LARGEST_ARRAY):
            chunk = own[start : start + LARGEST_ARRAY]
            name = f"toto-compat-{exchange.run}-{secrets.token_hex(8)}"
            asked = Unanswered(name=name, tasks=tuple(task.number for task in chunk))
            submitted = submitted.model_copy(update={"unanswered": asked})
            keep(submitted)
            ids = cluster.submit(
                NODE_FUNCTION,
                [exchange.task(task.number) for task in chunk],
                array.demands,
                cpus=array.limits.cpus,
                memory_mb=array.limits.memory_bytes // 2**20,
                minutes=array.minutes,
                at_a_time=submitted.at_a_time,
                name=name,
                after=after + previous,
            )
            previous = [ids[0].partition("_")[0]] if one_by_one else []
            submitted = submitted.with_jobs(dict(zip(asked.tasks, ids, strict=True)))
            keep(submitted)


def taken_over(submitted: Submitted) -> Submitted:
    """Give tasks the jobs of an array whose answer nobody lived to write down, if Slurm has taken it."""
    asked = submitted.unanswered
    if asked is None:
        return submitted
    jobs = queue()
    if jobs is None:
        raise SlurmError(
            f"Slurm does not answer: whether it has taken {len(asked.tasks)} jobs of this run is not known",
            hint="nothing was submitted; the same command again, once it answers",
        )
    found = next((job for job, queued in jobs.items() if queued.name == asked.name), None)
    if found is None:
        return submitted.with_jobs({})
    array = found.partition("_")[0]
    one = len(asked.tasks) == 1  # submitit makes no array of it
    return submitted.with_jobs(
        {number: array if one else f"{array}_{index}" for index, number in enumerate(asked.tasks)}
    )


def _arrays(
    exchange: Exchange, submitted: Submitted, tasks: Sequence[Submission]
) -> list[tuple[_Array, list[Submission]]]:
    arrived = exchange.arrived()
    arrays: defaultdict[str, list[Submission]] = defaultdict(list)
    described: dict[str, _Array] = {}
    # references first: the jobs of cells name those that they come after
    for task in sorted(tasks, key=lambda one: one.kind != "references"):
        request = own_task(exchange, task).request
        array = _Array(
            kind=task.kind,
            # Slurm refuses to wait for a job that it has forgotten
            after=task.after if not task.jobs and task.after not in arrived else None,
            demands=submitted.settings.demands_of(request.cell.environment),
            limits=request.limits,
            minutes=request.profile.timeout_minutes + _TO_PREPARE_MINUTES,
        )
        arrays[repr(array)].append(task)
        described[repr(array)] = array
    return [(described[alike], own) for alike, own in arrays.items()]
