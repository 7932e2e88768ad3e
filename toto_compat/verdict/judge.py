"""Gates: stored evidence in, a status out. Pure, so that an old run can be judged again by other limits."""

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from toto_compat.contract.demands import broken_demand
from toto_compat.contract.gate_limit import GateLimit
from toto_compat.contract.request import Device
from toto_compat.contract.result import CellResult, Figure, Kind, Outcome, SuiteEvidence
from toto_compat.contract.suites import Suite
from toto_compat.matrix.demands import demands_of
from toto_compat.matrix.gates import Gate
from toto_compat.verdict.disturbances import disturbed_by
from toto_compat.verdict.without_gpu import told_without_gpu

# letters of a reason: reports have their own limits, and a cell's error can be a line of megabytes
_LONGEST_LINE = 2000


class Status(StrEnum):
    PASS = "PASS"  # noqa: S105 - a verdict, not a password
    FAIL = "FAIL"
    INCONCLUSIVE = "INCONCLUSIVE"
    NOT_APPLICABLE = "NOT_APPLICABLE"


@dataclass(frozen=True)
class JudgedGate:
    """One gate of one cell. `reason` is one line: what was found against the limit, or what is missing."""

    gate: Gate
    status: Status
    limit: GateLimit
    figure: Figure | None
    reason: str
    next_command: str = ""  # what would get the missing evidence
    version: int = 0  # of the suite that measured it

    @property
    def value(self) -> float | None:
        return self.figure.value if self.figure else None

    @property
    def kind(self) -> Kind | None:
        return self.figure.kind if self.figure else None


@dataclass(frozen=True)
class JudgedCell:
    """A cell with its verdict: never PASS unless every demanded gate that applies was measured and passed."""

    result: CellResult
    gates: Mapping[Gate, JudgedGate]
    verdict: Status
    decided_by: Gate | None

    @property
    def deciding(self) -> JudgedGate | None:
        return self.gates[self.decided_by] if self.decided_by else None

    @property
    def reason(self) -> str:
        """Say why it is not PASS, in one line; empty for PASS."""
        if self.deciding:
            return self.deciding.reason
        if self.result.failure:
            return one_line(
                f"the cell did not finish ({self.result.failure.kind}): {_first_line(self.result.failure.message)}"
            )
        return "" if self.verdict is Status.PASS else "no gate applies"

    def figure(self, suite: Suite, name: str) -> Figure | None:
        """Return any figure of the cell, also one that no gate judges."""
        evidence = self.result.evidence.get(suite)
        return evidence.figures.get(name) if evidence and evidence.outcome is Outcome.MEASURED else None


def judge(result: CellResult, gates: Mapping[Gate, GateLimit]) -> JudgedCell:
    """Judge one cell by its stored evidence alone."""
    demands = demands_of(gates, device=result.request.speaks_of, mode=result.request.cell.mode)
    is_lost = bool(broken_demand(demands, result.evidence))
    # gates of the user's own series decide where there are some
    asked = [
        gate for gate in Gate if gate in gates and (result.request.symbols or not gate.rule.suite.rule.needs_symbols)
    ]
    judged = {gate: _judge_gate(result, gate, gates[gate], is_lost=is_lost) for gate in asked}
    for status in (Status.FAIL, Status.INCONCLUSIVE):
        for gate, one in judged.items():
            if one.status is status:
                return JudgedCell(result=result, gates=judged, verdict=status, decided_by=gate)
    if result.failure or not any(one.status is Status.PASS for one in judged.values()):
        return JudgedCell(result=result, gates=judged, verdict=Status.INCONCLUSIVE, decided_by=None)
    return JudgedCell(result=result, gates=judged, verdict=Status.PASS, decided_by=None)


def draws_of(cell: JudgedCell) -> str:
    """Name the random stream that samples were drawn with, as the binding or else the workload said."""
    evidence = cell.result.evidence.get(Suite.EQUIVALENCE)
    said = evidence.details.get("draws") if evidence else None
    return str(said or cell.result.request.workload.draws or "")


def forecast_text(cell: JudgedCell) -> str:
    """Write the workload with its precision and draws: 'production, float16 autocast, direct draws'."""
    request, draws = cell.result.request, draws_of(cell)
    parts = [request.workload_name, request.workload.precision, f"{draws} draws" if draws else ""]
    return ", ".join(part for part in parts if part)


def rerun_command(result: CellResult, *, profile: str = "") -> str:
    """Write the exact command that runs this cell again."""
    request = result.request
    # where the user's series lay is not kept in a result
    data = (
        f" --data YOUR_DATA --symbols {shlex.quote(','.join(s.name for s in request.symbols))}"
        if request.symbols
        else ""
    )
    return (
        f"toto-compat matrix '{result.cell}' --profile {profile or request.profile_name} "
        f"--device {request.speaks_of.value} --fresh{data}"
    )


def _judge_gate(result: CellResult, gate: Gate, limit: GateLimit, *, is_lost: bool) -> JudgedGate:
    suite = gate.rule.suite
    evidence = result.evidence.get(suite)
    figure = evidence.figures.get(gate.figure) if evidence else None

    def judged(status: Status, reason: str, next_command: str = "") -> JudgedGate:
        version = evidence.version if evidence else 0
        return JudgedGate(gate, status, limit, figure, one_line(reason), next_command, version)

    if why := _does_not_apply(result, gate, figure):
        return judged(Status.NOT_APPLICABLE, why)
    if missing := (
        _only_lowered(result)
        or _not_evidence(result, gate, evidence)
        or _no_figure(gate, evidence, figure)
        or _reference_is_no_better(gate, evidence, limit)
        or disturbed(gate, evidence)
        or _measured_in_part(gate, evidence, is_lost=is_lost)
        or (unseen_steps(result) if gate is Gate.CUDAGRAPHS and figure is not None and not figure.value else "")
        or _not_shown(gate, figure, limit)
    ):
        would_be_skipped_again = is_lost and _was_skipped(evidence)
        return judged(
            Status.INCONCLUSIVE, missing, "" if would_be_skipped_again else _command_for_missing(result, suite)
        )
    assert evidence is not None
    if evidence.outcome is Outcome.MODEL_FAILED:
        return judged(Status.FAIL, f"the compiled forecast raised: {_failure_line(evidence)}")
    assert figure is not None and figure.value is not None
    if math.isnan(figure.value):
        return judged(Status.FAIL, f"the forecast holds NaN{_of_which(gate, evidence)}")
    told = f"{figure.value:g}{' ' + figure.unit if figure.unit else ''}, limit {limit.text}{_of_which(gate, evidence)}"
    if limit.admits(figure.value):
        return judged(Status.PASS, told)
    return judged(Status.FAIL, told + _what_torch_said(gate, evidence))


def _does_not_apply(result: CellResult, gate: Gate, figure: Figure | None) -> str:
    """Say why the gate decides nothing on this device or in this mode, with what is predicted; empty where it does."""
    rule, request = gate.rule, result.request
    if figure is not None and figure.value is None and figure.does_not_apply:
        return figure.does_not_apply
    if rule.only_on is not None and request.speaks_of is not rule.only_on:
        why = rule.elsewhere or f"decides on {rule.only_on.value} only"
        if figure is None or figure.value is None:
            return why
        value = rule.prediction.format(figure.value) if figure.value else rule.prediction_of_none
        return f"{why}; {figure.kind.value} for a GPU: {value}"
    if request.cell.mode in rule.not_in_modes and (figure is None or figure.value is None):
        return rule.in_those_modes or f"does not apply to mode {request.cell.mode}"
    return ""


def _of_which(gate: Gate, evidence: SuiteEvidence) -> str:
    """Name the symbol that a figure of the user's own series is of: the worst one."""
    worst = evidence.details.get("worst")
    symbol = worst.get(gate.figure) if gate.rule.suite.rule.needs_symbols and isinstance(worst, dict) else None
    return f"; {symbol} is the worst" if symbol else ""


def _what_torch_said(gate: Gate, evidence: SuiteEvidence) -> str:
    """Quote the first event behind a failed count: what came later may only follow from it."""
    events = [event for event in evidence.events if event.kind in gate.rule.explained_by]
    if not events:
        return ""
    first = events[0]
    where = f" in {first.function}" if first.function else ""
    source = f" ({first.file}:{first.line})" if first.file and first.line is not None else ""
    return f"; first{where}{source}: {_first_line(first.reason)}"


def _only_lowered(result: CellResult) -> str:
    """Say what is known of a cell that was compiled for CUDA without a GPU, and what is not; '' if it was run."""
    return told_without_gpu(result) if result.request.lower_only else ""


def _not_evidence(result: CellResult, gate: Gate, evidence: SuiteEvidence | None) -> str:
    """Say why what is stored says nothing about the model, or '' if it does."""
    suite = gate.rule.suite.value
    if evidence is None or evidence.outcome is Outcome.NOT_RUN:
        if result.failure:
            return f"the cell could not be run ({result.failure.kind}): {_first_line(result.failure.message)}"
        if gate.rule.suite not in result.request.profile.suites:
            return f"profile {result.request.profile_name} does not run the {suite} suite"
        told = f": {_first_line(evidence.failure.message)}" if evidence and evidence.failure else ""
        what = "skipped when the cell was run" if _was_skipped(evidence) else "not run"
        return f"the {suite} suite was {what}{told}"
    if result.request.speaks_of is Device.CUDA and not result.provenance.gpu:
        return "asked for CUDA, but the cell saw no GPU: CPU evidence never decides a CUDA verdict"
    if evidence.outcome is Outcome.ERROR:
        return f"the {suite} suite could not finish: {_failure_line(evidence)}"
    return ""


def _was_skipped(evidence: SuiteEvidence | None) -> bool:
    return evidence is not None and evidence.failure is not None and evidence.failure.kind == "skipped"


def _no_figure(gate: Gate, evidence: SuiteEvidence | None, figure: Figure | None) -> str:
    """Say why a suite that ran still gives nothing to judge, or '' if it does."""
    if evidence is not None and evidence.outcome is Outcome.MODEL_FAILED:
        return ""
    if figure is None or figure.value is None:
        told = figure.missing if figure else ""
        return f"not measured: {told or f'the {gate.rule.suite.value} suite left no figure for {gate.value}'}"
    if figure.kind is not Kind.MEASURED:
        return f"only {figure.kind.value} ({figure.value:g}), and only a measured figure decides"
    if math.isnan(figure.value) and not gate.rule.nan_is_a_fault:
        return "the figure is not a number"
    return ""


def _reference_is_no_better(gate: Gate, evidence: SuiteEvidence | None, limit: GateLimit) -> str:
    """Say that upstream eager breaks the limit too, so that the compiled forecast is not to blame; '' if it holds."""
    if not gate.rule.reference or evidence is None or evidence.outcome is not Outcome.MEASURED:
        return ""
    reference = evidence.figures.get(gate.rule.reference)
    if reference is None or reference.value is None:
        return f"not measured: upstream eager's own {gate.value}"
    if limit.admits(reference.value):
        return ""
    unit = f" {reference.unit}" if reference.unit else ""
    return f"upstream eager itself has {reference.value:g}{unit}, limit {limit.text}"


def disturbed(gate: Gate, evidence: SuiteEvidence | None) -> str:
    """Say what kept a time or a GPU's memory from meaning anything: then it decides nothing; '' if nothing did."""
    if evidence is None or evidence.outcome is not Outcome.MEASURED:
        return ""
    if gate.rule.suite is Suite.MEMORY and (others := evidence.details.get("other_programs")):
        return (
            f"the GPU's memory was used by others as well while it was measured ({', '.join(map(str, others))}): "
            "end them, or run it on a GPU of its own"
        )
    conditions, others = evidence.details.get("conditions"), evidence.details.get("other_programs")
    return disturbed_by(conditions, others) if gate.rule.is_a_time else ""


def _measured_in_part(gate: Gate, evidence: SuiteEvidence | None, *, is_lost: bool) -> str:
    """Say what was skipped in a cell that these limits no longer rule out; '' if all is there."""
    if is_lost or evidence is None or not evidence.skipped:
        return ""
    if gate.rule.is_a_time:
        return f"timed in part when the cell was run, {evidence.skipped}"
    if gate.rule.suite is Suite.EQUIVALENCE:
        return f"compared in part when the cell was run, without {evidence.skipped}"
    if gate.rule.suite is Suite.RECOMPILE:
        return f"counted in part when the cell was run, without {evidence.skipped}"
    return ""


def unseen_steps(result: CellResult) -> str:
    """Say that fewer steps of a sampled forecast were watched for replays than of a mean one; '' if it is not so.

    A step that nobody sees is counted nowhere: a cache that tells of none while it samples would replay them all.
    """
    evidence = result.evidence.get(Suite.CUDAGRAPH)
    if evidence is None or evidence.outcome is not Outcome.MEASURED or not result.request.workload.samples_per_batch:
        return ""
    mean, sampled = (evidence.details.get(name) for name in ("steps", "sampled_steps"))
    if not isinstance(mean, list) or not isinstance(sampled, list) or len(sampled) >= len(mean) > 0:
        return ""
    return f"{len(mean)} steps of a mean forecast were seen, {len(sampled)} of a sampled one"


def _not_shown(gate: Gate, figure: Figure | None, limit: GateLimit) -> str:
    """Say that a figure is past its limit and its interval is not: too little was measured to tell; '' if it tells."""
    if not gate.rule.has_to_be_shown or figure is None or figure.value is None or limit.admits(figure.value):
        return ""
    if figure.low is None or figure.high is None or not (limit.admits(figure.low) or limit.admits(figure.high)):
        return ""
    unit = f" {figure.unit}" if figure.unit else ""
    return (
        f"{figure.value:g}{unit}, limit {limit.text}, but it may be anything from {figure.low:g} to {figure.high:g}: "
        "time more forecasts"
    )


def _command_for_missing(result: CellResult, suite: Suite) -> str:
    needs_other_profile = suite not in result.request.profile.suites and not result.request.lower_only
    return rerun_command(result, profile="production-check" if needs_other_profile else "")


def one_line(text: str) -> str:
    """Make text from a log fit for a table: one line of a possible length, which tells no terminal what to do."""
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}..."


def _failure_line(evidence: SuiteEvidence) -> str:
    if evidence.failure is None:
        return "no error was recorded"
    return f"{evidence.failure.kind}: {_first_line(evidence.failure.message)}"


def _first_line(message: str) -> str:
    return next((line.strip() for line in message.splitlines() if line.strip()), "no message")
