"""What is known of CUDA where no GPU was used: compiled for described GPUs, executed in an interpreter; no verdict."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from packaging.version import Version

from toto_compat.contract.result import CellResult, Outcome, SuiteEvidence
from toto_compat.contract.suites import Suite

_NOT_MEASURED = "speed, memory and the replay of CUDA graphs"
_NOT_EXECUTED = f"the values of its forecasts, {_NOT_MEASURED}"
_RIGHT = 1.0  # errors over what eager's own noise allows


@dataclass(frozen=True)
class KnownWithoutGpu:
    """Two sentences' worth of a cell that was compiled for CUDA."""

    compiled: str
    executed: str
    objections: int | None  # graphs that CUDA graphs would not take whole; None: not known
    right: bool | None  # None: not executed, or in part

    @property
    def not_measured(self) -> str:
        """Name what a GPU would add: also whether the forecasts are right, where the code was only compiled."""
        return _NOT_EXECUTED if self.right is None else _NOT_MEASURED

    @property
    def text(self) -> str:
        return f"{self.compiled}; {self.executed}" if self.executed else self.compiled


def known_without_gpu(result: CellResult) -> KnownWithoutGpu | None:
    """Say what a cell found out about CUDA without a GPU; None where it did not try."""
    lowered = result.evidence.get(Suite.CUDA_LOWERING)
    executed = result.evidence.get(Suite.CUDA_EQUIVALENCE)
    if lowered is None or (lowered.outcome is Outcome.NOT_RUN and executed is None):
        return None
    figure = lowered.figures.get("cudagraphs")
    value = figure.value if figure else None
    ratio = executed.figures.get("cuda_equivalence") if executed else None
    right = ratio.value <= _RIGHT if ratio and ratio.value is not None else None
    if right and executed is not None and _left_out(executed):
        right = None
    if executed is not None and executed.outcome is Outcome.MODEL_FAILED:
        right = False
    return KnownWithoutGpu(
        compiled=_compiled_text(lowered),
        executed=_executed_text(executed),
        objections=int(value) if value is not None and math.isfinite(value) else None,
        right=right,
    )


def told_without_gpu(result: CellResult) -> str:
    """Say in one line what is not measured of a cell without a GPU, and what is known of it."""
    known = known_without_gpu(result)
    if known is None:
        return f"{_NOT_EXECUTED} are not measured without a GPU; the code for CUDA was not compiled"
    return f"{known.not_measured} are not measured without a GPU; {known.text}"


def _compiled_text(lowered: SuiteEvidence) -> str:
    if lowered.outcome is not Outcome.MEASURED:
        told = lowered.failure.message if lowered.failure else "no reason was recorded"
        return f"not compiled for CUDA: {told}"
    rows = lowered.details.get("architectures", [])
    names = _listed([str(row["architecture"]) for row in rows])
    graphs = max((int(row["graphs"]) for row in rows), default=0)
    done = min((int(row.get("lowered", row["graphs"])) for row in rows), default=0)
    whole = min((int(row["captured_whole"]) for row in rows), default=0)
    text = f"compiled for {names} without a GPU, CUDA graphs would take {whole} of {done} graphs whole (predicted)"
    first = next(iter(lowered.events), None)
    if whole < done and first is not None:
        where = f" ({first.file}:{first.line})" if first.file and first.line is not None else ""
        text += f", the rest not: {first.reason}{where}"
    breaks: dict[str, int] = lowered.details.get("graph_breaks", {})
    if breaks:
        most = max(breaks, key=breaks.__getitem__)
        text += f", with {sum(breaks.values())} graph breaks between them, most of them {most}"
    if done < graphs:
        errors: Counter[str] = Counter()
        for row in rows:
            errors |= Counter(row.get("errors", {}))
        told = errors.most_common(1)[0][0] if errors else "no reason was recorded"
        text += f", {graphs - done} more could not be compiled: {told}"
    return text


def _executed_text(executed: SuiteEvidence | None) -> str:
    if executed is None or executed.outcome in (Outcome.NOT_RUN, Outcome.ERROR):
        return ""
    if executed.outcome is Outcome.MODEL_FAILED:
        told = executed.failure.message if executed.failure else "no reason was recorded"
        return f"its CUDA code raised when it was executed: {told}"
    figure = executed.figures.get("cuda_equivalence")
    if figure is None or figure.value is None:
        return f"not executed: {figure.missing if figure else 'no figure'}"
    verdict = "right" if figure.value <= _RIGHT else "WRONG"
    noise = f"({figure.value:.2g} of eager's own noise, interpreted)"
    if left_out := _left_out(executed):
        done = executed.figures.get("graphs_executed")
        told = f"{done.value:g} {done.method}" if done and done.value is not None else "some graphs"
        others = f"the others on the CPU ({left_out[0]})"
        return f"executed in part in Triton's interpreter, {told}, {others}: {verdict} so far as that goes {noise}"
    return f"executed in Triton's interpreter and {verdict} {noise}"


def _left_out(executed: SuiteEvidence) -> list[str]:
    """Say why graphs of it were not executed as CUDA code; empty where all were."""
    told = executed.details.get("not_lowered")
    return [str(one) for one in told] if isinstance(told, list) else []


def best_known(results: Sequence[CellResult]) -> tuple[CellResult, KnownWithoutGpu] | None:
    """Choose the cell that says the most for compile on CUDA: right, whole graphs, the newest release."""
    known = [(result, one) for result in results if (one := known_without_gpu(result)) is not None]
    if not known:
        return None

    def merit(pair: tuple[CellResult, KnownWithoutGpu]) -> tuple[int, float, int, Version]:
        result, one = pair
        objections = float("-inf") if one.objections is None else -one.objections
        return (
            -1 if one.right is False else 0,
            objections,
            int(one.right is True),
            Version(result.request.environment.torch),
        )

    return max(known, key=merit)


def _listed(names: Sequence[str]) -> str:
    if not names:
        return "no architecture"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
