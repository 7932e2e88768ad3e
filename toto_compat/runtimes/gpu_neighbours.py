"""Other programs on a cell's GPU, asked before it starts and after it has ended: then none of them is its own.

What a process holds there is the difference of two counts of the whole device, so that a program that takes or gives
back memory meanwhile would be taken for the cache's.
"""

from collections.abc import Sequence
from pathlib import Path

from toto_compat.contract.result import CellResult, Outcome
from toto_compat.contract.suites import Suite
from toto_compat.runtimes.nvidia_smi import Program, running_programs

_PROCESSES = Path("/proc")


def neighbours_on(gpu: str | None) -> tuple[Program, ...]:
    """List the programs on a GPU that still run: the driver may list one of ours a moment after its end."""
    if gpu is None:
        return ()
    return tuple(one for one in running_programs() if one.gpu == gpu and (_PROCESSES / one.pid).exists())


def with_neighbours(result: CellResult, before: Sequence[Program], after: Sequence[Program]) -> CellResult:
    """Note in a result's memory who came to its GPU, left it, or held another amount of it afterwards."""
    memory = result.evidence.get(Suite.MEMORY)
    changed = sorted({str(one) for one in {*before} ^ {*after}})
    if not changed or memory is None or memory.outcome is not Outcome.MEASURED:
        return result
    noted = memory.model_copy(update={"details": {**memory.details, "other_programs": changed}})
    return result.model_copy(update={"evidence": {**result.evidence, Suite.MEMORY: noted}})
