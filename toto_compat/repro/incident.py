"""A production incident as data: what ran, and which compiler events it showed. Matching is by the fields it names."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from toto_compat.contract.events import Event, EventKind
from toto_compat.contract.request import TORCH_RELEASE, CompileSettings, Workload
from toto_compat.contract.strict_model import StrictModel
from toto_compat.errors import InputError, MatrixFileError
from toto_compat.matrix.document import describe_mistakes, read_document
from toto_compat.matrix.load import schema_mistakes

# In the order in which a near miss is judged: the same place matters more than the same words.
_COMPARED = ("function", "file", "line", "limit", "compile_id", "reason", "normalised_reason", "logged_from")

_HINT = "an incident is a YAML file in UTF-8; those in incidents/ show the form"


class ExpectedEvent(StrictModel):
    """An event the incident showed. Only the fields that are given must agree."""

    kind: EventKind
    function: str | None = None
    file: str | None = Field(default=None, description="from the package on: toto/model/attention.py")
    line: int | None = None
    limit: int | None = None
    compile_id: str | None = None
    reason: str | None = None
    normalised_reason: str | None = None
    logged_from: str | None = Field(default=None, description="torch's own source line; needs `torch` below to agree")
    torch: str | None = Field(
        default=None, description="the one exact torch release it is expected on, such as 2.9.0", pattern=TORCH_RELEASE
    )
    at_least: int = Field(default=1, ge=1, description="how often")


class Incident(StrictModel):
    """One incident file."""

    schema_version: Literal[1] = Field(alias="schema", description="version of this file's format: 1")
    title: str = Field(description="what happened, in a few words")
    date: str = Field(description='the day it happened, in quotes: "2025-10-30"')
    source: str = Field(default="", description="where it was seen")
    environment: str = Field(description="name of the environment in matrix.yaml that production ran")
    cache: str = Field(description="name of the cache in matrix.yaml that production used")
    mode: Literal["default", "reduce-overhead", "max-autotune"] = "default"
    settings: CompileSettings = CompileSettings()
    workload: Workload = Workload()
    expect: tuple[ExpectedEvent, ...] = Field(
        min_length=1, description="a list of the compiler events it showed: {kind, function, ...}"
    )


@dataclass(frozen=True)
class Match:
    """One expected event: the events that agree, or the nearest one and how it differs."""

    expected: ExpectedEvent
    events: tuple[Event, ...]
    nearest: Event | None = None

    @property
    def holds(self) -> bool:
        return len(self.events) >= self.expected.at_least


def load_incident(path: Path) -> Incident:
    """Read and check the file; InputError lists every mistake in it, as for matrix.yaml."""
    if path.is_dir() or not path.exists():
        what = "is a folder, not a file" if path.is_dir() else "does not exist"
        raise InputError(f"{path} {what}", hint="incidents/ holds those that ship with the project")
    try:
        document = read_document(path)
    except MatrixFileError as error:
        raise InputError(error.message, hint=_HINT) from error
    mistakes = list(document.mistakes)
    try:
        incident = Incident.model_validate(document.data)
    except ValidationError as error:
        mistakes += schema_mistakes(document, Incident, error)
    if mistakes:
        raise InputError(describe_mistakes(path, mistakes), hint=_HINT)
    return incident


def match_incident(incident: Incident, events: Sequence[Event], torch: str) -> list[Match]:
    """Look every expected event up among those that occurred; `torch` is the release that really ran."""
    release = torch.partition("+")[0]
    expected = [one for one in incident.expect if one.torch is None or one.torch == release]
    return [match_event(one, events) for one in expected]


def match_event(expected: ExpectedEvent, events: Iterable[Event]) -> Match:
    same_kind = [event for event in events if event.kind is expected.kind]
    agreeing = tuple(event for event in same_kind if not differences(expected, event))
    nearest = None
    if len(agreeing) < expected.at_least and same_kind:
        nearest = min(same_kind, key=lambda event: _distance(expected, event))
    return Match(expected, agreeing, nearest)


def differences(expected: ExpectedEvent, event: Event) -> list[str]:
    """Names of the fields in which an event is not what was expected."""
    asked = {name: getattr(expected, name) for name in _COMPARED}
    return [name for name, value in asked.items() if value is not None and getattr(event, name) != value]


def _distance(expected: ExpectedEvent, event: Event) -> tuple[int, list[int]]:
    different = differences(expected, event)
    return len(different), [_COMPARED.index(name) for name in different]


def describe_match(match: Match) -> list[str]:
    """One expected event and what became of it, for a reader."""
    expected = match.expected
    head = _wanted(expected)
    if match.holds:
        return [f"as in production   {head}{f' ({len(match.events)} times)' if len(match.events) > 1 else ''}"]
    if match.events:
        return [f"too few            {head}", f"                   found only {len(match.events)}"]
    if match.nearest is None:
        return [f"missing            {head}", f"                   no {expected.kind.value} at all"]
    lines = [f"different          {head}"]
    for name in differences(expected, match.nearest):
        lines.append(f"                   {name}: {getattr(match.nearest, name)!r} here")
    return lines


def describe_left_out(expected: ExpectedEvent) -> str:
    """An expected event that was not looked for, since another release ran."""
    return f"does not apply     {_wanted(expected)}, on torch {expected.torch} only"


def _wanted(expected: ExpectedEvent) -> str:
    asked = ", ".join(
        f"{name} {getattr(expected, name)!r}" for name in _COMPARED if getattr(expected, name) is not None
    )
    times = f", at least {expected.at_least} times" if expected.at_least > 1 else ""
    return f"{expected.kind.value}: {asked}{times}"
