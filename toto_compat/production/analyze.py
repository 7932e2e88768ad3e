"""`toto-compat analyze`: what the compiler complained about in production logs, grouped, with what to do about it."""

import io
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import cast

import click

from toto_compat.contract.events import Event, Severity
from toto_compat.contract.log_line import printable
from toto_compat.errors import ExitCode, InputError
from toto_compat.logs.follow import follow
from toto_compat.logs.parse import parse_stream
from toto_compat.logs.source import STANDARD_INPUT, opened_log
from toto_compat.production.advice import guide_page
from toto_compat.production.analysis import RANK, Analysis, Grouping, analyze_events
from toto_compat.production.analysis_output import as_html, as_json, as_markdown, as_text
from toto_compat.production.same_in_matrix import Seen, seen_in, stored_runs
from toto_compat.production.torch_trace import is_trace_folder, trace_events

FORMATS: dict[str, Callable[[Analysis, Sequence[Seen]], str]] = {
    "text": as_text,
    "json": lambda analysis, seen: json.dumps(as_json(analysis, seen), indent=2),
    "md": as_markdown,
    "html": as_html,
}
_BETWEEN_LOOKS = 0.5  # seconds


def analyze_logs(paths: Sequence[str]) -> Analysis:
    """Read logs one after another; '-' is standard input. Raises InputError for what is not a readable log."""
    names = _names(paths)

    def events() -> Iterator[tuple[int, Event]]:
        for index, path in enumerate(paths):
            for event in _events_in(path, names[index]):
                yield index, event

    return analyze_events(names, events())


def _names(paths: Sequence[str]) -> list[str]:
    return [STANDARD_INPUT if path == "-" else printable(path) for path in paths]


def _events_in(path: str, name: str) -> Iterator[Event]:
    if is_trace_folder(path):
        yield from trace_events(Path(path), name)
        return
    with opened_log(path, name) as stream:
        yield from parse_stream(stream, name)


def followed(paths: Sequence[str], wait: Callable[[], bool]) -> Iterator[tuple[int, Event]]:
    """Yield the events of logs as they come, until `wait` says that it is enough or standard input ends."""
    names = _names(paths)
    if list(paths) == ["-"]:
        # unbuffered: what a pipe holds now is read now
        yield from ((0, event) for event in parse_stream(cast(io.BufferedReader, sys.stdin.buffer).raw, names[0]))
        return
    for path in paths:
        if path == "-" or Path(path).is_dir() or path.endswith(".gz"):
            raise InputError(
                f"{printable(path)} cannot be followed: it is not a plain file",
                hint="Follow the log that is being written; a pipe alone: ... | toto-compat analyze --follow -",
            )
    yield from follow([Path(path) for path in paths], names, wait)


def _event_line(event: Event) -> str:
    about = " ".join(part for part in (event.function, event.reason and f"({event.reason[:200]})") if part)
    return printable(f"{event.time or '-'} {event.severity.upper()} {event.kind} {about} [{event.source}]")


def _follow_and_tell(logs: Sequence[str], output: str, fail_on: Severity | None) -> Analysis:
    """Print each event when it is complete, until interrupted, or until one is as severe as `fail_on`."""

    def wait() -> bool:
        time.sleep(_BETWEEN_LOOKS)
        return True

    grouping = Grouping(_names(logs))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for index, event in followed(logs, wait):
            grouping.add(index, event)
            click.echo(event.model_dump_json() if output == "json" else _event_line(event))
            sys.stdout.flush()
            if fail_on and RANK[event.severity] <= RANK[fail_on]:
                break
    except KeyboardInterrupt:
        pass
    return grouping.result()


def _print_kinds(context: click.Context, _parameter: click.Parameter, asked: bool) -> None:
    if asked:
        click.echo(guide_page(), nl=False)
        context.exit()


@click.command("analyze")
@click.argument("logs", metavar="LOG...", nargs=-1, required=True, type=click.Path(allow_dash=True))
@click.option(
    "output", "--format", type=click.Choice(list(FORMATS)), default="text", show_default=True, help="What to print."
)
@click.option("as_json_output", "--json", is_flag=True, help="The same as --format json.")
@click.option(
    "--fail-on",
    type=click.Choice([severity.value for severity in Severity]),
    help=f"Exit with {ExitCode.FINDINGS.value} if an event of this severity or worse was found.",
)
@click.option("follow_logs", "--follow", is_flag=True, help="Wait for more, through rotation, and tell events at once.")
@click.option(
    "runs",
    "--run",
    metavar="RUN",
    multiple=True,
    help="Stored runs to look for the same in.  [default: results/reference]",
)
@click.option(
    "--kinds", is_flag=True, is_eager=True, expose_value=False, callback=_print_kinds,
    help="Print how to read each kind of line, as Markdown.",
)  # fmt: skip
def analyze_command(  # noqa: PLR0917 - click passes its options by name
    logs: tuple[str, ...],
    output: str,
    as_json_output: bool,
    fail_on: str | None,
    follow_logs: bool,
    runs: tuple[str, ...],
) -> None:
    """Read production logs for compiler events and group them by function and reason.

    LOG is a text file, plain or gzipped, with any logging prefix before torch's lines; - is standard input; a folder
    that TORCH_TRACE wrote is read through tlparse. With --follow events are printed as they come, groups at the end.
    """
    output = "json" if as_json_output else output
    severity = Severity(fail_on) if fail_on else None
    folders = stored_runs(runs)
    analysis = _follow_and_tell(logs, output, severity) if follow_logs else analyze_logs(logs)
    if not (follow_logs and output == "json"):
        click.echo(FORMATS[output](analysis, seen_in(folders) if analysis.groups else []))
    if severity and analysis.at_least(severity):
        sys.exit(ExitCode.FINDINGS)
