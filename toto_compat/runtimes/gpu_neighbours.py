"""Other programs on a cell's GPU, asked before it starts and after it has ended: then none of them is its own.

What a process holds there is the difference of two counts of the whole device, so that a program that takes or gives
back memory meanwhile would be taken for the cache's. And one that computes makes every time longer: a cell in a
container does not see it, or cannot tell it from itself.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from toto_compat.contract.result import CellResult, Outcome
from toto_compat.contract.suites import Suite
from toto_compat.runtimes.nvidia_smi import Program, running_programs

_PROCESSES = Path("/proc")
_FIRST_NAMESPACE = "pid:[4026531836]"  # Linux's number for that of the machine itself


def neighbours_on(gpu: str | None) -> tuple[Program, ...]:
    """List the programs on a GPU that still run: the driver may list one of ours a moment after its end."""
    if gpu is None:
        return ()
    listed = [one for one in running_programs() if one.gpu == gpu]
    return tuple(one for one in listed if not _sees_processes_of_the_machine() or (_PROCESSES / one.pid).exists())


def with_neighbours(result: CellResult, before: Sequence[Program], after: Sequence[Program]) -> CellResult:
    """Note in a result who was on its GPU: beside times all of them, beside its memory those that changed theirs."""
    if not _sees_processes_of_the_machine():
        # who of them still runs cannot be seen: one that was listed both times is none of ours
        stayed = {one.pid for one in before} & {one.pid for one in after}
        before, after = ([one for one in listed if one.pid in stayed] for listed in (before, after))
    noted = _with_programs(result, Suite.MEMORY, {*before} ^ {*after})
    return _with_programs(noted, Suite.SPEED, {one.pid: one for one in (*after, *before)}.values())


def _with_programs(result: CellResult, suite: Suite, programs: Iterable[Program]) -> CellResult:
    evidence, told = result.evidence.get(suite), sorted(map(str, programs))
    if not told or evidence is None or evidence.outcome is not Outcome.MEASURED:
        return result
    noted = evidence.model_copy(update={"details": {**evidence.details, "other_programs": told}})
    return result.model_copy(update={"evidence": {**result.evidence, suite: noted}})


def _sees_processes_of_the_machine() -> bool:
    """Tell if process numbers here are those of the driver, which counts on the machine and not in a container."""
    try:
        return str((_PROCESSES / "self/ns/pid").readlink()) == _FIRST_NAMESPACE
    except OSError:
        return False
