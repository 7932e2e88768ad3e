"""The tables of `SuiteEvidence.details` that the host reads, as it takes them for granted; all others are only shown.

The cell side writes them freely. They are checked where a result comes in, so that a damaged one is told as damage.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from toto_compat.contract.result import SuiteEvidence
from toto_compat.contract.suites import Suite


class _Told(BaseModel):
    """Gives the names that are read here their types; what has another name is left alone."""

    model_config = ConfigDict(strict=True)


class _Architecture(_Told):
    architecture: str
    card: str
    graphs: int
    lowered: int
    captured_whole: int
    partitions: int
    captured_partitions: int
    kernels: int
    most_registers: int
    spilling_kernels: int
    library_calls: dict[str, int]
    values_on_cpu: int
    seconds: float
    errors: dict[str, int]


class _Partition(_Told):
    captured: bool


class _Graph(_Told):
    partitions: list[_Partition]


class _Lowering(_Told):
    architectures: list[_Architecture] = []
    graphs: list[_Graph] = []
    graph_breaks: dict[str, int] = {}


class _CudaGraphs(_Told):
    # how many in each graph, None before torch 2.9, which splits none; on a GPU each, captured or not
    partitions: list[int | None] | list[list[bool]] = []
    steps: list[Any] = []
    sampled_steps: list[Any] = []


class _Reason(_Told):
    count: int = 1


class _Recompiles(_Told):
    reasons: list[_Reason] = []


class _Speed(_Told):
    timings: dict[str, list[float]] = {}
    other_programs: list[str] = []


class _Memory(_Told):
    other_programs: list[str] = []


class _Symbols(_Told):
    symbols: list[dict[str, Any]] = []


_TOLD: Mapping[Suite, type[_Told]] = {
    Suite.CUDA_LOWERING: _Lowering,
    Suite.CUDAGRAPH: _CudaGraphs,
    Suite.RECOMPILE: _Recompiles,
    Suite.SPEED: _Speed,
    Suite.MEMORY: _Memory,
    Suite.SYMBOLS: _Symbols,
}


def mistake_in_details(evidence: Mapping[Suite, SuiteEvidence]) -> str:
    """Say which table of a result is not what it is taken for; '' if all are."""
    for suite, told in _TOLD.items():
        try:
            told.model_validate(evidence[suite].details if suite in evidence else {})
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, ("evidence", suite.value, "details", *first["loc"])))
            return f"{where}: {first['msg']}"
    return ""
