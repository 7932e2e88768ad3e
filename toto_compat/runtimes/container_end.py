"""How a cell's container ended, and what that means for the cell's result."""

from dataclasses import dataclass
from typing import Any

from toto_compat.contract.request import CellRequest
from toto_compat.contract.result import CellResult, Failure, blameless
from toto_compat.runtimes.cell_process import ProcessEnd


@dataclass(frozen=True)
class ContainerEnd:
    """Says how it ended. `out_of_memory` is also true if only a child was killed and the command went on."""

    process: ProcessEnd
    out_of_memory: bool = False
    lost: str = ""  # the engine went away or refused: what the container left is not to be relied on


def judge_end(result: CellResult, end: ContainerEnd, request: CellRequest) -> CellResult:
    """Add what only the engine knows: that it went away itself, or that the kernel killed some process for memory."""
    if end.lost:
        failure = Failure(kind="environment", message=end.lost, last_lines=end.process.last_lines)
        return result.model_copy(update={"failure": failure})
    if not end.out_of_memory:
        return result
    why = f"a process was killed at {request.limits.memory}: raise limits.memory in matrix.yaml"
    # a forecast that raised may only have missed the process that was killed: no evidence against the cache
    changes: dict[str, Any] = {"evidence": {suite: blameless(one, why) for suite, one in result.evidence.items()}}
    failures = [result.failure, *(evidence.failure for evidence in result.evidence.values())]
    if not any(failure is not None and failure.kind in ("out_of_memory", "interrupted") for failure in failures):
        # the cell may have gone on as if nothing had happened, or have waited for a dead compile worker
        then = f" (then: {result.failure.message})" if result.failure else ""
        changes["failure"] = Failure(kind="out_of_memory", message=why + then, last_lines=end.process.last_lines)
    return result.model_copy(update=changes)
