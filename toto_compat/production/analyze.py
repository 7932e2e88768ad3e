"""`toto-compat analyze`: what the compiler complained about in production logs, grouped, with what to do about it."""

import codecs
import gzip
import io
import json
import sys
import textwrap
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import click

from toto_compat.contract.events import Event, EventKind, Severity
from toto_compat.contract.torch_messages import printable
from toto_compat.errors import ExitCode, InputError
from toto_compat.logs.parse import parse_lines, parse_stream
from toto_compat.logs.release_hint import ReleaseHint, release_hint
from toto_compat.production.advice import Advice, advice_for

_RANK = {Severity.ERROR: 0, Severity.WARNING: 1, Severity.INFO: 2}
_WIDTH = 100
_MOST_GROUPS = 2_000
_MOST_COMPILE_IDS = 8
_STANDARD_INPUT = "standard input"
_OTHER = "(more kinds of reasons than are kept apart)"


@dataclass
class Group:
    """Events of one kind with one function and one normalised reason."""

    kind: EventKind
    severity: Severity
    function: str
    normalised_reason: str
    example: Event
    first: tuple[int, int]  # file index, line
    last: tuple[int, int]
    events: int = 0
    instances: int = 0  # summed counts: 'mutated inputs (8 instances)' is one event with eight
    compile_ids: list[str] = field(default_factory=list)
    limits: set[int] = field(default_factory=set)

    @property
    def advice(self) -> Advice:
        return advice_for(self.kind, self.normalised_reason)


@dataclass
class Analysis:
    """Holds what was found in some logs."""

    files: list[str]
    groups: list[Group]  # worst first, then most frequent
    releases: list[tuple[ReleaseHint, int]]  # how many limit warnings point at each, most first

    @property
    def events(self) -> int:
        return sum(group.events for group in self.groups)

    def at_least(self, severity: Severity) -> int:
        """Tell how many events are at least this severe."""
        return sum(group.events for group in self.groups if _RANK[group.severity] <= _RANK[severity])


def analyze_events(files: Sequence[str], events: Iterable[tuple[int, Event]]) -> Analysis:
    """Group events; each comes with the index of its file. Memory grows with the groups, not with the events."""
    groups: dict[tuple[str, str, str], Group] = {}
    hints: Counter[ReleaseHint] = Counter()
    for file_index, event in events:
        reason = event.normalised_reason
        key = (event.kind.value, event.function, reason)
        if key not in groups and len(groups) >= _MOST_GROUPS:
            reason, key = _OTHER, (event.kind.value, "", _OTHER)
        position = (file_index, int(event.source.rpartition(":")[2]))
        group = groups.setdefault(
            key, Group(event.kind, event.severity, key[1], reason, example=event, first=position, last=position)
        )
        group.events += 1
        group.instances += event.count
        group.first, group.last = min(group.first, position), max(group.last, position)
        if (
            event.compile_id
            and len(group.compile_ids) < _MOST_COMPILE_IDS
            and event.compile_id not in group.compile_ids
        ):
            group.compile_ids.append(event.compile_id)
        # A place, or the whole of a wrapped reason, may be known from only some of the events of a group.
        if event.file and not group.example.file:
            group.example = event
        if event.limit is not None:
            group.limits.add(event.limit)
        if event.kind is EventKind.RECOMPILE_LIMIT and (hint := release_hint(event.logged_from, event.limit_name)):
            hints[hint] += 1
    ranked = sorted(groups.values(), key=lambda group: (_RANK[group.severity], -group.events, group.first))
    # What the wording allows is worth saying only where no line number says it exactly.
    exact = [(hint, count) for hint, count in hints.most_common() if hint.exact]
    return Analysis(list(files), ranked, exact or hints.most_common())


def analyze_logs(paths: Sequence[str]) -> Analysis:
    """Read log files one after another; '-' is standard input. Raises InputError for what is not a readable log."""
    names = [_STANDARD_INPUT if path == "-" else printable(path) for path in paths]

    def events() -> Iterator[tuple[int, Event]]:
        for index, path in enumerate(paths):
            for event in _events_in(path, names[index]):
                yield index, event

    return analyze_events(names, events())


def _events_in(path: str, name: str) -> Iterator[Event]:
    with explained(name), _opened(path) as stream:
        head = stream.peek(8192)[:8192]
        if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            yield from parse_lines(io.TextIOWrapper(stream, "utf-16", errors="replace"), name)
            return
        if _is_binary(head):
            raise InputError(
                f"{name} is not a log: it holds binary data",
                hint="Give the text log of the application (plain or .gz), not a core dump, trace or database file.",
            )
        yield from parse_stream(stream, name)


@contextmanager
def _opened(path: str) -> Iterator[io.BufferedReader]:
    if path == "-":
        yield _unpacked(io.BufferedReader(cast(io.RawIOBase, sys.stdin.buffer)))
        return
    with Path(path).open("rb") as file:
        yield _unpacked(file)


def _unpacked(stream: io.BufferedReader) -> io.BufferedReader:
    if stream.peek(2)[:2] == b"\x1f\x8b":
        return io.BufferedReader(cast(io.RawIOBase, gzip.GzipFile(fileobj=stream)))
    return stream


@contextmanager
def explained(name: str) -> Iterator[None]:
    """Turn what can be wrong with a file into what to do about it."""
    try:
        yield
    except FileNotFoundError:
        raise InputError(f"{name}: there is no such file", hint="Check the path; '-' reads standard input.") from None
    except IsADirectoryError:
        raise InputError(f"{name} is a folder", hint=f"Name the logs in it: toto-compat analyze {name}/*.log") from None
    except PermissionError:
        raise InputError(
            f"{name}: no permission to read it", hint="Read it as its owner and pipe it: ... | toto-compat analyze -"
        ) from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(
            f"{name}: the gzip data is damaged or cut off ({error})",
            hint=f"Unpack what is left and pipe it: zcat {name} | toto-compat analyze -",
        ) from None
    except OSError as error:
        raise InputError(
            f"{name} cannot be read: {error.strerror or error}", hint="Copy the log to a local disk and try again."
        ) from None


def _is_binary(head: bytes) -> bool:
    # A log that was cut while its writer kept its position begins with a run of zero bytes and is still a log.
    text = head.lstrip(b"\x00")
    if not text:
        return bool(head)
    return b"\x00" in text or sum(byte < 9 or 13 < byte < 27 for byte in text) > len(text) // 10


def as_json(analysis: Analysis) -> dict[str, Any]:
    """The analysis for programs. Positions are '<file>:<line>'."""

    def position(where: tuple[int, int]) -> str:
        return f"{analysis.files[where[0]]}:{where[1]}"

    return {
        "schema": 1,
        "files": analysis.files,
        "events": analysis.events,
        "by_severity": {
            severity.value: sum(group.events for group in analysis.groups if group.severity is severity)
            for severity in Severity
        },
        "torch_releases": [
            {"release": hint.release, "because": hint.because, "events": count} for hint, count in analysis.releases
        ],
        "groups": [
            {
                "kind": group.kind.value,
                "severity": group.severity.value,
                "function": group.function,
                "file": group.example.file,
                "line": group.example.line,
                "reason": group.normalised_reason,
                "example": group.example.reason,
                "events": group.events,
                "instances": group.instances,
                "limits": sorted(group.limits),
                "compile_ids": group.compile_ids,
                "stack": list(group.example.stack),
                "first": position(group.first),
                "last": position(group.last),
                "meaning": group.advice.meaning,
                "next": group.advice.next_step,
            }
            for group in analysis.groups
        ],
    }


def as_text(analysis: Analysis) -> str:
    """The analysis for people: at most 100 columns, nothing that a terminal would obey."""
    many = f"{len(analysis.files)} logs" if len(analysis.files) > 1 else analysis.files[0]
    if not analysis.groups:
        return _wrapped(
            f"{many}: no compiler events. Limit hits and skipped CUDA graphs are logged by default; recompiles "
            "and graph "
            "breaks only where the application ran with TORCH_LOGS=recompiles,graph_breaks."
        )
    parts = [
        _wrapped(f"{many}: {_counted(analysis.events, 'event')} in {_counted(len(analysis.groups), 'group')}"),
        *(
            _wrapped(f"torch {hint.release}: {hint.because} ({_counted(count, 'event')})")
            for hint, count in analysis.releases
        ),
    ]
    parts += [_group_text(group, analysis) for group in analysis.groups]
    return "\n".join(parts)


def _group_text(group: Group, analysis: Analysis) -> str:
    example = group.example
    place = f"{example.file}:{example.line}" if example.file and example.line else example.file
    first, last = (f"{analysis.files[where[0]]}:{where[1]}" for where in (group.first, group.last))
    facts = [
        f"limit {', '.join(map(str, sorted(group.limits)))}" if group.limits else "",
        f"{group.instances} instances" if group.instances > group.events else "",
        f"compile ids {', '.join(group.compile_ids)}" if group.compile_ids else "",
        f"first {first}, last {last}" if group.first != group.last else f"at {first}",
    ]
    where = f" in {group.function}" if group.function else ""
    lines = [
        "",
        _wrapped(f"{group.severity.upper()} {group.kind} x{group.events}{where}{f' ({place})' if place else ''}"),
        _wrapped(group.normalised_reason, indent=2) if group.normalised_reason else "",
        _wrapped(f"for example: {example.reason}", indent=2) if example.reason != group.normalised_reason else "",
        _wrapped("; ".join(fact for fact in facts if fact), indent=2),
        _wrapped(group.advice.meaning, indent=2),
        _wrapped(f"next: {group.advice.next_step}", indent=2),
    ]
    return "\n".join([lines[0], *(line for line in lines[1:] if line)])


def _wrapped(text: str, indent: int = 0) -> str:
    space = " " * indent
    shortened = text if len(text) <= 600 else f"{text[:600]} [...]"
    return textwrap.fill(
        printable(shortened),
        _WIDTH,
        initial_indent=space,
        subsequent_indent=space + ("  " if indent else ""),
        break_on_hyphens=False,
    )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


@click.command("analyze")
@click.argument("logs", metavar="LOG...", nargs=-1, required=True, type=click.Path(allow_dash=True))
@click.option("as_json_output", "--json", is_flag=True, help="Print JSON instead of text.")
@click.option(
    "--fail-on",
    type=click.Choice([severity.value for severity in Severity]),
    help=f"Exit with {ExitCode.FINDINGS.value} if an event of this severity or worse was found.",
)
def analyze_command(logs: tuple[str, ...], as_json_output: bool, fail_on: str | None) -> None:
    """Read production logs for compiler events and group them by function and reason.

    LOG is a text file, plain or gzipped, with any logging prefix before torch's lines; - is standard input.
    """
    analysis = analyze_logs(logs)
    click.echo(json.dumps(as_json(analysis), indent=2) if as_json_output else as_text(analysis))
    if fail_on and analysis.at_least(Severity(fail_on)):
        sys.exit(ExitCode.FINDINGS)
