"""A production incident as data: what ran, and what it showed. Matching of events is by the fields it names."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from toto_compat.contract.events import Event, EventKind
from toto_compat.contract.gate_limit import GateLimit
from toto_compat.contract.request import TORCH_RELEASE, CompileSettings, Workload
from toto_compat.contract.strict_model import StrictModel
from toto_compat.contract.suites import Suite
from toto_compat.errors import InputError, MatrixFileError
from toto_compat.matrix.document import describe_mistakes, read_document
from toto_compat.matrix.gates import Gate
from toto_compat.matrix.load import schema_mistakes
from toto_compat.matrix.schema import Matrix
from toto_compat.repro.incident_check import incident_mistakes, name_mistakes
from toto_compat.repro.pins import Pins

# In the order in which a near miss is judged: the same place matters more than the same words.
_COMPARED = (
    *("function", "file", "line", "limit", "compile_id"),
    *("reason", "reason_like", "normalised_reason", "logged_from"),
)

INCIDENT_HINT = (
    "an incident is a YAML file in UTF-8; those in incidents/ show the form, `toto-compat schema --incident` every key"
)

_LARGEST_FILE = 2 << 20  # a whole freeze in it has a hundredth

Predictor = Literal["cuda_lowering", "cudagraph"]


class Expectation(StrictModel):
    """What an event and a failed gate have in common: where they can be looked for."""

    torch: str | None = Field(
        default=None, description="the one exact torch release it is expected on, such as 2.9.0", pattern=TORCH_RELEASE
    )
    needs: Literal["cuda"] | None = Field(default=None, description="cuda: only a GPU shows it; null: any device does")
    predicted_by: tuple[Predictor, ...] = Field(
        default=(),
        description="suites that predict it where there is no GPU, the first that can run here is asked: cuda_lowering "
        "(in a CUDA build of torch), cudagraph",
    )


class ExpectedEvent(Expectation):
    """An event the incident showed. Only the fields that are given must agree."""

    kind: EventKind
    function: str | None = None
    file: str | None = Field(default=None, description="from the package on: toto/model/attention.py")
    line: int | None = None
    limit: int | None = None
    compile_id: str | None = None
    reason: str | None = Field(default=None, description="the exact words of torch")
    reason_like: str | None = Field(
        default=None, description="the words of torch, with * for anything: 'mutated inputs (*'"
    )
    normalised_reason: str | None = None
    logged_from: str | None = Field(default=None, description="torch's own source line; needs `torch` below to agree")
    at_least: int = Field(default=1, ge=0, description="how often, at least; 0 only together with at_most")
    at_most: int | None = Field(default=None, ge=0, description="how often, at most; null: any number")

    def counts(self, times: int) -> bool:
        """Tell if so many of them are what was seen."""
        return times >= self.at_least and (self.at_most is None or times <= self.at_most)


class FailedGate(Expectation):
    """A gate that the incident broke: it must be FAIL again, with its figure where it was."""

    gate: Gate = Field(description="a gate of docs/gates.md, such as latency_stability")
    limit: GateLimit | None = Field(default=None, description="the limit that it broke; null: that of matrix.yaml")
    figure: GateLimit | None = Field(default=None, description="where the figure was: {min: 2} is at least 2")


class RaisedForecast(Expectation):
    """An error of the compiled forecast itself."""

    error_like: str = Field(description="its type and first line, with * for anything: 'IndexError: *'")
    suite: Suite = Field(default=Suite.RECOMPILE, description="the suite whose forecast raised it")


class Incident(StrictModel):
    """One incident file."""

    schema_version: Literal[1] = Field(alias="schema", description="version of this file's format: 1")
    title: str = Field(description="what happened, in a few words")
    date: str = Field(description='the day it happened, in quotes: "2025-10-30"')
    source: str = Field(default="", description="where it was seen")
    log: str | None = Field(default=None, description="the log it came from: a file, relative to this one")
    environment: str = Field(
        default="", description="name of the environment in matrix.yaml that production ran; or say pins"
    )
    pins: Pins | None = Field(
        default=None, description="what production ran, where matrix.yaml has no such environment: {torch, cuda, ...}"
    )
    cache: str = Field(description="name of the cache in matrix.yaml that production used")
    mode: Literal["default", "reduce-overhead", "max-autotune"] = "default"
    settings: CompileSettings = CompileSettings()
    variables: dict[str, str] = Field(
        default={}, description="environment variables of production that torch reads, by name"
    )
    workload: Workload = Workload()
    suites: tuple[Suite, ...] = Field(
        default=(), description="suites to run besides those that the expected events and gates need"
    )
    iterations: int = Field(
        default=3, ge=1, le=1000, description="rounds of ten timed forecasts, where a gate needs times"
    )
    expect: tuple[ExpectedEvent, ...] = Field(
        default=(), description="a list of the compiler events it showed: {kind, function, ...}"
    )
    gates: tuple[FailedGate, ...] = Field(
        default=(), description="a list of the gates it broke: {gate: latency_stability, ...}"
    )
    raised: tuple[RaisedForecast, ...] = Field(
        default=(), description="a list of the errors that the compiled forecast raised: {error_like: 'IndexError: *'}"
    )


@dataclass(frozen=True)
class Match:
    """One expected event: the events that agree, or the nearest one and how it differs."""

    expected: ExpectedEvent
    events: tuple[Event, ...]
    nearest: Event | None = None

    @property
    def holds(self) -> bool:
        return self.expected.counts(len(self.events))


def load_incident(path: Path) -> Incident:
    """Read and check the file; InputError lists every mistake in it, as for matrix.yaml."""
    hint = "incidents/ holds those that ship with the project"
    try:
        if path.is_dir() or not path.exists():
            what = "is a folder, not a file" if path.is_dir() else "does not exist"
            raise InputError(f"{path} {what}", hint=hint)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}", hint=hint) from error
    try:
        check_size(path)
        document = read_document(path)
    except MatrixFileError as error:
        raise InputError(error.message, hint=INCIDENT_HINT) from error
    mistakes = list(document.mistakes)
    try:
        incident = Incident.model_validate(document.data)
    except ValidationError as error:
        mistakes += schema_mistakes(document, Incident, error)
    mistakes += incident_mistakes(document, path.resolve().parent)
    if mistakes:
        raise InputError(describe_mistakes(path, mistakes), hint=INCIDENT_HINT)
    return incident


def check_size(path: Path) -> None:
    """Refuse what no person wrote: a megabyte of YAML takes seconds to read, and is read several times."""
    if (size := path.stat().st_size) > _LARGEST_FILE:
        raise InputError(
            f"{path}: {size / 1e6:.0f} MB, larger than any incident, which has {_LARGEST_FILE >> 20} at most",
            hint=INCIDENT_HINT,
        )


def check_names(path: Path, matrix: Matrix) -> None:
    """Hold the names in an incident against the matrix that it is to be run with; InputError tells line and key."""
    mistakes = list(name_mistakes(read_document(path), matrix))
    if mistakes:
        raise InputError(describe_mistakes(path, mistakes), hint=INCIDENT_HINT)


def match_incident(incident: Incident, events: Sequence[Event], torch: str) -> list[Match]:
    """Look every expected event up among those that occurred; `torch` is the release that really ran."""
    return [match_event(one, events) for one in incident.expect if applies_to(one, torch)]


def applies_to(expected: Expectation, torch: str) -> bool:
    """Tell if it is expected on this torch, which may have the local part of its build."""
    return expected.torch is None or expected.torch == torch.partition("+")[0]


def match_event(expected: ExpectedEvent, events: Iterable[Event]) -> Match:
    same_kind = [event for event in events if event.kind is expected.kind]
    agreeing = tuple(event for event in same_kind if not differences(expected, event))
    nearest = None
    if not expected.counts(len(agreeing)) and same_kind:
        nearest = min(same_kind, key=lambda event: _distance(expected, event))
    return Match(expected, agreeing, nearest)


def differences(expected: ExpectedEvent, event: Event) -> list[str]:
    """Name the fields in which an event is not what was expected."""
    return [
        name
        for name in _COMPARED
        if (wanted := getattr(expected, name)) is not None and not _agrees(name, wanted, event)
    ]


def _agrees(name: str, wanted: str | int, event: Event) -> bool:
    if name == "reason_like":
        return is_like(str(wanted), event.reason)
    return bool(getattr(event, name) == wanted)


def is_like(pattern: str, text: str) -> bool:
    """Tell if the whole text fits a pattern in which * stands for anything and nothing else is special.

    It looks each piece up once, so that no pattern of a file from elsewhere makes it slow.
    """
    first, *rest = pattern.split("*")
    if not rest:
        return text == first
    *middle, last = rest
    if not text.startswith(first) or not text.endswith(last) or len(text) < len(first) + len(last):
        return False
    at, end = len(first), len(text) - len(last)
    for piece in middle:
        found = text.find(piece, at, end)
        if found < 0:
            return False
        at = found + len(piece)
    return True


def _distance(expected: ExpectedEvent, event: Event) -> tuple[int, list[int]]:
    different = differences(expected, event)
    return len(different), [_COMPARED.index(name) for name in different]


def describe_match(match: Match, *, predicted: bool = False) -> list[str]:
    """Tell a reader about one expected event and what became of it."""
    expected = match.expected
    head, times = wanted(expected), len(match.events)
    if match.holds:
        as_seen = "predicted        " if predicted else "as in production "
        return [f"{as_seen}  {head}{f' ({times} times)' if times > 1 else ''}"]
    if expected.at_most is not None and times > expected.at_most:
        return [f"too many           {head}", f"                   found {times}"]
    if match.events:
        return [f"too few            {head}", f"                   found only {times}"]
    if match.nearest is None:
        return [f"missing            {head}", f"                   no {expected.kind.value} at all"]
    lines = [f"different          {head}"]
    for name in differences(expected, match.nearest):
        found = getattr(match.nearest, name.removesuffix("_like"))
        lines.append(f"                   {name.removesuffix('_like')}: {found!r} here")
    return lines


def describe_left_out(expected: Expectation) -> str:
    """Describe something expected that was not looked for, since another release ran."""
    return f"does not apply     {wanted(expected)}, on torch {expected.torch} only"


def wanted(expected: Expectation) -> str:
    """Name what is expected, in one line."""
    if isinstance(expected, FailedGate):
        limit = f", limit {expected.limit.text}" if expected.limit else ""
        figure = f", figure {expected.figure.text}" if expected.figure else ""
        return f"gate {expected.gate.value} FAIL{limit}{figure}"
    if isinstance(expected, RaisedForecast):
        return f"the compiled forecast raises {expected.error_like!r} in the {expected.suite.value} suite"
    assert isinstance(expected, ExpectedEvent)
    asked = ", ".join(
        f"{name.replace('_', ' ') if name == 'reason_like' else name} {getattr(expected, name)!r}"
        for name in _COMPARED
        if getattr(expected, name) is not None
    )
    times = f", at least {expected.at_least} times" if expected.at_least > 1 else ""
    times += f", at most {expected.at_most} times" if expected.at_most is not None else ""
    return f"{expected.kind.value}{': ' if asked else ''}{asked}{times}"
