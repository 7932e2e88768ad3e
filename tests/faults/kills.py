"""SIGKILL at seeded moments of a run: of the runner, of a cell, of a supervisor, of everything at once."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from tests.faults.outcome import ENDED_BEFORE, Campaign, Outcome, named
from tests.faults.trial import CELLS, Damage, Ended, Runner, command_of, promises, resumed

CELL_NOT_RUN = 6
PLACES = ("begin", "before its result", "after its result")


def killed(pids: list[int]) -> int:
    count = 0
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            count += 1
    return count


def runner(campaign: Campaign) -> Iterator[Outcome]:
    """Halt the runner before a call that changes a file, and kill it there."""
    yield from _killed_runner(campaign, "runner", lambda one: one.kill() or 1)  # type: ignore[func-returns-value]


def runner_and_supervisors(campaign: Campaign) -> Iterator[Outcome]:
    """As a session's end or the kernel does that kills all it sees: nobody is left to end the cells."""

    def kill_both(one: Runner) -> int:
        supervisors = one.children()
        one.kill()
        return 1 + killed(supervisors)

    yield from _killed_runner(campaign, "runner and supervisors", kill_both, of_a_cell)


def _killed_runner(
    campaign: Campaign,
    name: str,
    kill: Callable[[Runner], int],
    wanted: Callable[[str], bool] = lambda _: True,
) -> Iterator[Outcome]:
    for turn, number in enumerate(campaign.moments_of(name, wanted)):
        arguments = ("--run", "same") if turn % 2 else ()  # half of them go on in the same folder
        with campaign.trial() as trial:
            hit = trial.start(*arguments, fault={"FAULT_AT": str(number), "FAULT_KIND": "stop"})
            moment = f"{number}: {named(campaign.calls()[number - 1])}"
            if not hit.until_halted():
                hit.wait()
                yield Outcome(moment, "", not_run=ENDED_BEFORE)
                continue
            count = kill(hit)
            hit.wait()
            had = len(trial.kept())
            damage = resumed(trial, *arguments)
            yield Outcome(moment, f"{count} killed, {had} cells kept, resumed", damage)


def of_a_cell(call: str) -> bool:
    return call.startswith("write ") and call.endswith("/cell.log")


def cell(campaign: Campaign) -> Iterator[Outcome]:
    """Kill the process of a cell that runs: it is an error of that cell, the others go on."""
    yield from _killed_below(campaign, "cell", lambda one: one.cells())


def supervisor(campaign: Campaign) -> Iterator[Outcome]:
    """Kill what stands between runner and cell: the cell must not live on without it."""
    yield from _killed_below(campaign, "supervisor", lambda one: one.children())


def _killed_below(campaign: Campaign, name: str, victims: Callable[[Runner], list[int]]) -> Iterator[Outcome]:
    draw = campaign.random(name)
    every = [(cell, place) for cell in sorted(CELLS) for place in PLACES]
    for turn, (victim, place) in enumerate(draw.sample(every, len(every)) + draw.sample(every, len(every))):
        if turn == campaign.moments:
            return
        with campaign.trial(waits=(victim, place)) as trial:
            with trial.gate_shut():
                hit = trial.start()
                waiting = hit.until_waiting()
                count = killed([pid for pid in victims(hit) if is_of(pid, victim)]) if waiting else 0
            ended = hit.wait()
            broken = promises(ended, 0, CELL_NOT_RUN) + ([] if count else ["nothing was there to kill"])
            had = len(trial.kept())
            trial.waits = ()
            trial.give_orders()
            damage = resumed(trial)
            happened = f"{how(ended)}, {had} of {len(CELLS)} cells kept, resumed"
            yield Outcome(f"{victim} {place}", happened, Damage(damage.lost, damage.left, (*broken, *damage.broken)))


def is_of(pid: int, cell: str) -> bool:
    """Tell if a process is that of a cell, or of its supervisor, by the request that its command names."""
    for word in command_of(pid).split(b"\0"):
        if word.endswith(b"/request.json"):
            return bool(json.loads(Path(os.fsdecode(word)).read_bytes())["cell"] == cell)
    return False


def how(ended: Ended) -> str:
    return f"exit code {ended.code}" if ended.code >= 0 else f"signal {-ended.code}"
