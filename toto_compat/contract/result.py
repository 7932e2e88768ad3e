"""What a cell answers: the result file, and the evidence in it."""

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field

from toto_compat.contract.cell_name import CellName
from toto_compat.contract.events import Event
from toto_compat.contract.references import References
from toto_compat.contract.request import CellRequest, Origin
from toto_compat.contract.strict_model import StrictModel
from toto_compat.contract.suites import Suite

RESULT_SCHEMA = 3


class Kind(StrEnum):
    """Says how a figure came about. Only a measured one can decide a gate."""

    MEASURED = "measured"
    INTERPRETED = "interpreted"  # CUDA code that was executed without a GPU
    PREDICTED = "predicted"
    REPORTED = "reported"


class Figure(StrictModel):
    """One number with its origin. `value` None: it was not obtained, and `missing` says why and what would give it."""

    value: float | None
    unit: str = ""
    kind: Kind = Kind.MEASURED
    method: str = ""
    missing: str = ""
    does_not_apply: str = ""  # why nobody could have obtained it here: upstream eager itself cannot; decides nothing
    low: float | None = None  # ends of a 95 % interval, where there is one
    high: float | None = None


class Outcome(StrEnum):
    MEASURED = "measured"  # the suite ran; its figures stand
    MODEL_FAILED = "model_failed"  # the compiled forecast itself raised: evidence against the cell
    ERROR = "error"  # crash, hang, out of memory or a fault of the harness: evidence of nothing
    NOT_RUN = "not_run"  # not asked for, not possible on this device, or skipped in a cell that cannot PASS


class Failure(StrictModel):
    """Holds what went wrong, short enough for a table and long enough to act on."""

    kind: Literal[
        "exception", "crash", "timeout", "out_of_memory", "environment", "interrupted", "pointless", "skipped"
    ]
    message: str
    last_lines: tuple[str, ...] = ()


class SuiteEvidence(StrictModel):
    """Holds what one suite measured: numbers by name, events, tables. The cell does not know which of them decide."""

    suite: Suite
    version: int = 1  # of the suite that measured it
    outcome: Outcome
    method: str = ""
    figures: dict[str, Figure] = Field(default={})
    events: tuple[Event, ...] = ()
    details: dict[str, Any] = Field(default={})  # suite-specific tables: comparisons, timings, partitions
    failure: Failure | None = None
    skipped: str = ""  # which part of it was left out in a cell that cannot PASS, and why
    seconds: float = 0.0


def blameless(evidence: SuiteEvidence, why: str) -> SuiteEvidence:
    """Take back what a forecast that raised says against a cell: it may only have missed a process that was killed.

    `why` says what was killed and what to do; evidence of a forecast that did not raise stays as it is.
    """
    if evidence.outcome is not Outcome.MODEL_FAILED:
        return evidence
    then = f" (then: {evidence.failure.message})" if evidence.failure else ""
    failure = Failure(
        kind="out_of_memory",
        message=f"{why}{then}",
        last_lines=evidence.failure.last_lines if evidence.failure else (),
    )
    return evidence.model_copy(update={"outcome": Outcome.ERROR, "failure": failure})


class Provenance(Origin):
    """Says where evidence comes from, in enough detail to get it again."""

    torch: str = ""
    torch_git: str = ""
    cuda: str | None = None
    gpu: str | None = None
    gpu_architecture: str | None = None
    driver: str | None = None
    python: str = ""
    toto_ts: str = ""
    xformers: str | None = None
    packages: dict[str, str] = Field(default={})
    system_packages: dict[str, str] = Field(default={})
    compiler: str = ""
    cache_class: str = ""  # module:qualname of the class that was bound
    references: References | None = None  # what its forecasts were held to
    cpu: str = ""
    cores: int = 0
    memory_bytes: int = 0
    os: str = ""
    host: str = ""
    started: str = ""  # ISO 8601, UTC
    finished: str = ""


class CellResult(StrictModel):
    """Holds what a cell leaves behind, whatever happened to it."""

    schema_version: Annotated[Literal[3], Field(alias="schema")] = 3
    cell: CellName
    request: CellRequest
    provenance: Provenance
    evidence: dict[Suite, SuiteEvidence] = Field(default={})
    failure: Failure | None = None  # the cell as a whole could not be run

    @property
    def failures(self) -> Iterator[tuple[str, Failure]]:
        """Name what kept the cell or a suite from being run; a failure that several suites share is told once."""
        if self.failure:
            yield self.cell, self.failure
        told = [self.failure]
        for suite, evidence in self.evidence.items():
            if evidence.outcome is Outcome.ERROR and evidence.failure and evidence.failure not in told:
                told.append(evidence.failure)
                yield f"{self.cell}, {suite.value}", evidence.failure

    @property
    def skipped(self) -> dict[str, str]:
        """Name what was left out since the cell could not PASS any more: a suite, or part of it; and why."""
        whole = {
            suite.value: evidence.failure.message
            for suite, evidence in self.evidence.items()
            if evidence.failure and evidence.failure.kind == "skipped"
        }
        return whole | {f"{suite.value} in part": one.skipped for suite, one in self.evidence.items() if one.skipped}

    @property
    def could_not_run(self) -> bool:
        """Some of what was asked for is neither evidence nor left out on purpose."""
        return self.failure is not None or any(one.outcome is Outcome.ERROR for one in self.evidence.values())
