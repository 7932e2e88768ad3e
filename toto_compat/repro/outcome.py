"""What came of running an incident again: every part of it held, not held, not judged, or not looked for here."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from toto_compat.contract.events import Event, EventKind
from toto_compat.contract.failure_messages import FAILURE_KINDS
from toto_compat.contract.gate_limit import GateLimit
from toto_compat.contract.request import Device, Environment
from toto_compat.contract.result import CellResult, Kind, Outcome, SuiteEvidence
from toto_compat.contract.suites import Suite
from toto_compat.logs.parse import parse_lines
from toto_compat.matrix.gates import Gate
from toto_compat.repro.incident import (
    Expectation,
    ExpectedEvent,
    FailedGate,
    Incident,
    Match,
    RaisedForecast,
    applies_to,
    describe_left_out,
    describe_match,
    is_like,
    match_event,
    wanted,
)
from toto_compat.verdict.judge import JudgedGate, Status, judge, one_line

_OF_CUDA_GRAPHS = frozenset({EventKind.CUDAGRAPH_SKIP, EventKind.CUDAGRAPH_PARTITION})


class Verdict(StrEnum):
    REPRODUCED = "REPRODUCED"  # everything that was looked for is as in production
    PARTLY = "PARTLY"  # some of it
    NOT_REPRODUCED = "NOT REPRODUCED"  # none of it, and all that was looked for was judged
    NOT_JUDGED = "NOT JUDGED"  # none of it, and something could not be judged


@dataclass(frozen=True)
class Place:
    """Says where something expected is looked for. Without a suite it is not, and `why_not` says why."""

    suite: Suite | None
    predicted: bool = False
    why_not: str = ""


@dataclass(frozen=True)
class GateMatch:
    """One gate that the incident broke, or an error that it raised, as judged again. `holds` None: it could not be."""

    expected: FailedGate | RaisedForecast
    holds: bool | None
    told: str  # the figure and its limit, what was raised, or what is missing
    predicted: bool = False
    passes: bool = False  # it kept its limit, or raised nothing; else it may fail as well, in another way


@dataclass(frozen=True)
class Unseen:
    """Something expected that nobody could have seen here, and why."""

    expected: Expectation
    why: str


@dataclass(frozen=True)
class Reproduction:
    """Holds what came of running an incident again."""

    incident: Incident
    result: CellResult
    events: tuple[Event, ...]
    matches: tuple[Match, ...]
    gates: tuple[GateMatch, ...] = ()
    unseen: tuple[Unseen, ...] = ()  # needs a GPU
    unjudged: tuple[Unseen, ...] = ()  # its suite did not finish
    predicted: tuple[Expectation, ...] = ()  # those of `matches` that were predicted
    raised: str = ""  # what the compiled forecast raised: that something did not occur says nothing then
    log: str = ""  # the cell's log on this machine
    stored: str = ""  # when the cell ran, if it was not run for this
    seconds: float = 0.0

    @property
    def held(self) -> tuple[Expectation, ...]:
        return tuple(
            [match.expected for match in self.matches if match.holds]
            + [gate.expected for gate in self.gates if gate.holds]
        )

    @property
    def symptoms(self) -> tuple[Expectation, ...]:
        """List what held and can be ended: that an event stays away is no symptom."""
        return tuple(expected for expected in self.held if not is_absence(expected))

    @property
    def predictions(self) -> int:
        """Count those that held and were only predicted."""
        return sum(match.holds for match in self.matches if match.expected in self.predicted) + sum(
            bool(gate.holds) for gate in self.gates if gate.predicted
        )

    @property
    def not_held(self) -> tuple[Expectation, ...]:
        return tuple(
            [match.expected for match in self.matches if not match.holds]
            + [gate.expected for gate in self.gates if gate.holds is False]
        )

    @property
    def not_judged(self) -> tuple[Expectation, ...]:
        return tuple(
            [one.expected for one in self.unjudged] + [gate.expected for gate in self.gates if gate.holds is None]
        )

    @property
    def verdict(self) -> Verdict:
        only_absences = all(map(is_absence, (*self.held, *self.not_held, *self.not_judged)))
        if self.symptoms or (self.held and only_absences):
            return Verdict.PARTLY if self.not_held or self.not_judged else Verdict.REPRODUCED
        if self.not_judged or self.result.failure is not None:
            return Verdict.NOT_JUDGED
        return Verdict.NOT_REPRODUCED

    @property
    def reproduced(self) -> bool:
        return self.verdict is Verdict.REPRODUCED

    @property
    def looked(self) -> bool:
        """Tell if anything at all was looked for."""
        return bool(self.matches or self.gates or self.unjudged)

    @property
    def ended(self) -> bool:
        """Tell if the symptom is gone: judged in whole, none of it there, and the forecast was compiled and ran."""
        return (
            self.verdict is Verdict.NOT_REPRODUCED
            and self.looked
            and all(symptom_left(expected, self) == "" for expected in self.not_held)
            and not any(evidence.skipped for evidence in self.result.evidence.values())
            and not self.raised
            and self.compiled
        )

    @property
    def compiled(self) -> bool:
        return has_compiled(self.result)

    def place_of(self, expected: Expectation) -> Place:
        """Say where something expected was looked for."""
        return place_of(expected, self.result.request.environment, self.result.request.device)

    @property
    def left_out(self) -> tuple[Expectation, ...]:
        """List what is expected on another release than the one that ran."""
        torch = self.result.provenance.torch or self.result.request.environment.torch
        return tuple(one for one in expectations(self.incident) if not applies_to(one, torch))


def expectations(incident: Incident) -> tuple[Expectation, ...]:
    return (*incident.expect, *incident.gates, *incident.raised)


def is_absence(expected: Expectation) -> bool:
    """Say whether nothing has to be seen for it: an event that may stay away, or must."""
    return isinstance(expected, ExpectedEvent) and expected.at_least == 0


def has_compiled(result: CellResult) -> bool:
    """Tell if dynamo compiled anything: what runs eager has no symptoms either. True where nobody counted."""
    evidence = result.evidence.get(Suite.RECOMPILE)
    figure = evidence.figures.get("compilations") if evidence else None
    return figure is None or figure.value is None or figure.value > 0


def place_of(expected: Expectation, environment: Environment, device: Device) -> Place:
    """Say where it is looked for: a suite that shows it on this device, one that predicts it, or nowhere here."""
    if isinstance(expected, FailedGate):
        suite, of_cuda = expected.gate.rule.suite, expected.gate.rule.only_on is Device.CUDA
    elif isinstance(expected, RaisedForecast):
        suite, of_cuda = expected.suite, False
    else:
        assert isinstance(expected, ExpectedEvent)
        of_cuda = expected.kind in _OF_CUDA_GRAPHS
        suite = Suite.CUDAGRAPH if of_cuda else Suite.RECOMPILE
    if device is Device.CUDA or not (of_cuda or expected.needs == "cuda"):
        return Place(suite)
    for predictor in expected.predicted_by:
        if predictor == Suite.CUDAGRAPH.value or environment.device is Device.CUDA:
            return Place(Suite(predictor), predicted=True)
    lowering = ", or a CUDA build of torch to compile for one" if expected.predicted_by else ""
    return Place(None, why_not=f"needs a GPU{lowering}")


def suites_of(incident: Incident, environment: Environment, device: Device) -> tuple[Suite, ...]:
    """Choose an incident's suites on this device: those that show or predict its parts, and those asked for."""
    needed = {place_of(one, environment, device).suite for one in expectations(incident)}
    needed |= set(incident.suites)
    return tuple(suite for suite in Suite if suite in needed) or (Suite.RECOMPILE,)


def look_at(incident: Incident, result: CellResult, limits: Mapping[Gate, GateLimit]) -> Reproduction:
    """Hold a cell's result against the incident; `limits` are those of the gates that name none of their own."""
    request = result.request
    torch = result.provenance.torch or request.environment.torch
    matches: list[Match] = []
    gates: list[GateMatch] = []
    unseen: list[Unseen] = []
    unjudged: list[Unseen] = []
    predicted: list[Expectation] = []
    for expected in expectations(incident):
        if not applies_to(expected, torch):
            continue
        place = place_of(expected, request.environment, request.device)
        if place.suite is None:
            unseen.append(Unseen(expected, place.why_not))
        elif problem := _no_evidence(result, place.suite) or _nothing_to_predict(expected, place, result):
            unjudged.append(Unseen(expected, problem))
        elif isinstance(expected, FailedGate):
            gates.append(_judged(expected, place, result, limits))
        elif isinstance(expected, RaisedForecast):
            gates.append(_raised_again(expected, result.evidence[place.suite]))
        else:
            assert isinstance(expected, ExpectedEvent)
            match = match_event(expected, events_of(result.evidence[place.suite]))
            more = _why_more(match, result.evidence[place.suite])
            if not more and is_absence(expected) and match.holds and not has_compiled(result):
                more = "nothing was compiled, which shows no events"
            if more:
                unjudged.append(Unseen(expected, more))
                continue
            matches.append(match)
            if place.predicted:
                predicted.append(expected)
    seen = [event for suite in result.evidence for event in events_of(result.evidence[suite])]
    return Reproduction(
        incident=incident,
        result=result,
        events=tuple(seen),
        matches=tuple(matches),
        gates=tuple(gates),
        unseen=tuple(unseen),
        unjudged=tuple(unjudged),
        predicted=tuple(predicted),
        raised=_raised(result),
    )


def events_of(evidence: SuiteEvidence) -> tuple[Event, ...]:
    """Return the events of a suite; of a forecast that raised, also what its error would have said in a log."""
    if evidence.outcome is not Outcome.MODEL_FAILED or evidence.failure is None:
        return evidence.events
    said = [*evidence.failure.last_lines, *evidence.failure.message.splitlines()]
    failures = {event.reason: event for event in parse_lines(said, "live") if event.kind in FAILURE_KINDS}
    return (*evidence.events, *failures.values())


def _why_more(match: Match, evidence: SuiteEvidence) -> str:
    """Say why there may be more events than were found, where more of them would change what is said of them."""
    expected = match.expected
    too_few = len(match.events) < expected.at_least
    at_most = match.holds and expected.at_most is not None
    if (too_few or at_most) and _were_dropped(expected.kind, evidence):
        return "the cell kept only some of its events: there may be more"
    if at_most and evidence.outcome is Outcome.MODEL_FAILED and expected.kind not in FAILURE_KINDS:
        return "the compiled forecast raised: there may have been more"
    return ""


def _were_dropped(kind: EventKind, evidence: SuiteEvidence) -> bool:
    """Tell if a cell left out events of a kind. Limits that were hit go last: beside others all of them are there."""
    seen = evidence.details.get("events_seen")
    kept_all = kind is EventKind.RECOMPILE_LIMIT and any(event.kind is not kind for event in evidence.events)
    return isinstance(seen, int) and seen > len(evidence.events) and not kept_all


def _no_evidence(result: CellResult, suite: Suite) -> str:
    """Say why a suite tells nothing; empty where it does. A forecast that raises is evidence too."""
    if result.failure is not None:
        return f"{result.failure.kind}: {result.failure.message}"
    evidence = result.evidence.get(suite)
    if evidence is None:
        return f"the cell left no evidence of the {suite.value} suite"
    if evidence.outcome in (Outcome.ERROR, Outcome.NOT_RUN):
        return evidence.failure.message if evidence.failure else evidence.outcome.value
    return ""


def _nothing_to_predict(expected: Expectation, place: Place, result: CellResult) -> str:
    """Say why a prediction about CUDA graphs says nothing: none would be captured, or there was no graph to look at."""
    if not place.predicted or not is_of_cuda_graphs(expected):
        return ""
    if result.request.cell.mode in Gate.CUDAGRAPHS.rule.not_in_modes:
        return f"mode {result.request.cell.mode} has no CUDA graphs that could be skipped"
    assert place.suite is not None
    figure = result.evidence[place.suite].figures.get(Gate.CUDAGRAPHS.figure)
    if figure is not None and figure.value is None and not result.evidence[place.suite].events:
        return figure.missing or "no graph was predicted"
    return ""


def _judged(expected: FailedGate, place: Place, result: CellResult, limits: Mapping[Gate, GateLimit]) -> GateMatch:
    limit = expected.limit or limits.get(expected.gate) or expected.gate.rule.default
    assert limit is not None and place.suite is not None
    if result.evidence[place.suite].outcome is Outcome.MODEL_FAILED:
        # every gate of a forecast that raised is FAIL, and that is another symptom than a figure beyond its limit
        return GateMatch(expected, None, f"the compiled forecast raised: {_raised(result)}", predicted=place.predicted)
    if place.predicted:
        return _judged_by_prediction(expected, limit, result.evidence[place.suite])
    judged = judge(result, {expected.gate: limit}).gates[expected.gate]
    if judged.status in (Status.INCONCLUSIVE, Status.NOT_APPLICABLE):
        return GateMatch(expected, None, judged.reason)
    holds = judged.status is Status.FAIL and _figure_is_there(expected, judged)
    return GateMatch(expected, holds, f"{judged.status.value}: {judged.reason}", passes=judged.status is Status.PASS)


def _raised_again(expected: RaisedForecast, evidence: SuiteEvidence) -> GateMatch:
    if evidence.outcome is not Outcome.MODEL_FAILED:
        return GateMatch(expected, holds=False, told="it raised nothing", passes=True)
    said = error_of(evidence)
    return GateMatch(expected, is_like(expected.error_like, said), f"raised {said}")


def error_of(evidence: SuiteEvidence) -> str:
    """Tell what a forecast raised, in one line."""
    return one_line(evidence.failure.message) if evidence.failure else "no error was recorded"


def _figure_is_there(expected: FailedGate, judged: JudgedGate) -> bool:
    if expected.figure is None:
        return True
    return judged.value is not None and expected.figure.admits(judged.value)


def _judged_by_prediction(expected: FailedGate, limit: GateLimit, evidence: SuiteEvidence) -> GateMatch:
    figure = evidence.figures.get(expected.gate.figure)
    if figure is None or figure.value is None:
        return GateMatch(expected, None, figure.missing if figure else "no figure was predicted", predicted=True)
    assert figure.kind is not Kind.MEASURED, "a prediction is asked for where nothing can be measured"
    passes = limit.admits(figure.value)
    holds = not passes and (expected.figure is None or expected.figure.admits(figure.value))
    told = f"{figure.value:g} {figure.kind.value}, limit {limit.text}"
    return GateMatch(expected, holds, told, predicted=True, passes=passes)


def _raised(result: CellResult) -> str:
    for suite, evidence in result.evidence.items():
        if evidence.outcome is Outcome.MODEL_FAILED:
            return f"{error_of(evidence)} ({suite.value} suite)"
    return ""


def is_of_cuda_graphs(expected: Expectation) -> bool:
    """Say whether something expected is about CUDA graphs that are skipped or split."""
    if isinstance(expected, FailedGate):
        return expected.gate == Gate.CUDAGRAPHS
    return isinstance(expected, ExpectedEvent) and expected.kind in _OF_CUDA_GRAPHS


def symptom_left(expected: Expectation, tried: Reproduction) -> str | None:
    """Say what is left of something expected in another run of it: empty if it is gone, None if that was not judged.

    An event of the same kind elsewhere, or a gate that fails with another figure, is left: the symptom only moved.
    """
    for match in tried.matches:
        if match.expected == expected:
            if match.holds:
                return "the same"
            if match.nearest is not None:
                where = f" in {match.nearest.function}" if match.nearest.function else ""
                return one_line(f"another {match.nearest.kind.value}{where}: {match.nearest.reason}")
            return ""
    for gate in tried.gates:
        if gate.expected == expected and gate.holds is not None:
            again = gate.holds and isinstance(expected, RaisedForecast)
            return "" if gate.passes else "the same" if again else gate.told
    return None


def describe_parts(reproduction: Reproduction) -> Iterator[str]:
    """Describe every part of the incident and what became of it, in a line or two each."""
    for match in reproduction.matches:
        yield from describe_match(match, predicted=match.expected in reproduction.predicted)
    for gate in reproduction.gates:
        yield from _describe_gate(gate)
    for one in reproduction.unjudged:
        yield f"not judged         {wanted(one.expected)}"
        yield f"                   {one_line(one.why)}"
    for one in reproduction.unseen:
        yield f"not looked for     {wanted(one.expected)}: {one.why}"
    for expected in reproduction.left_out:
        yield describe_left_out(expected)


def _describe_gate(gate: GateMatch) -> Iterator[str]:
    state = {True: "as in production", False: "different", None: "not judged"}[gate.holds]
    if gate.predicted and gate.holds:
        state = "predicted"
    yield f"{state:<19}{wanted(gate.expected)}"
    yield f"                   {gate.told} here"
