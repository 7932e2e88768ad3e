"""What is running now: a live line per cell on a terminal, plain timestamped lines elsewhere."""

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from toto_compat.contract.log_line import printable
from toto_compat.contract.result import Failure
from toto_compat.contract.suites import SUITE_LINE

_HEARTBEAT_SECONDS = 30.0


def say(text: str) -> None:
    """Print to stderr: stdout is for the table or the JSON alone. What a log brought along is shown and not obeyed."""
    click.echo(as_text(text), err=True)


def print_out(text: str, *, end_line: bool = True) -> None:
    """Print to stdout what was asked for, with the same care; JSON stays as it is, it has no such letters."""
    click.echo(as_text(text), nl=end_line)


def as_text(text: str) -> str:
    return "\n".join(printable(line) for line in text.split("\n"))


def parse_suite_line(line: str) -> tuple[str, str] | None:
    """Read a progress line as ('recompile', 'running'); None for any other line."""
    if not line.startswith(SUITE_LINE):
        return None
    suite, _, state = line[len(SUITE_LINE) :].strip().partition(" ")
    return (suite, state.strip()) if suite else None


class Progress(Protocol):
    """Told what happens, from any thread; a context manager around the run."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def note(self, text: str) -> None: ...

    def started(self, cell: str) -> None: ...

    def line(self, cell: str, line: str) -> None: ...

    def finished(self, cell: str, failure: Failure | None, seconds: float) -> None: ...

    def heartbeat(self) -> None: ...


@dataclass
class _RunningCell:
    since: float
    suite: str = "starting"


@dataclass
class _State:
    total: int
    done: int = 0
    running: dict[str, _RunningCell] = field(default_factory=dict)


class PlainProgress:
    """One line per start, suite, finish; if nothing happened for a while, one line that says what still runs."""

    def __init__(
        self,
        total: int,
        *,
        write: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state = _State(total)
        self._write = write or say
        self._clock = clock
        self._guard = threading.RLock()
        self._last_line = clock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return None

    def note(self, text: str) -> None:
        with self._guard:
            self._last_line = self._clock()
            self._write(f"{time.strftime('%H:%M:%S')} {text}")

    def started(self, cell: str) -> None:
        with self._guard:
            self._state.running[cell] = _RunningCell(self._clock())
            self.note(f"{cell}: started")

    def line(self, cell: str, line: str) -> None:
        suite = parse_suite_line(line)
        if suite is None:
            return
        with self._guard:
            name, state = suite
            running = self._state.running.get(cell)
            if running:
                running.suite = name
                self.note(f"{cell}: {name} {state}".rstrip())

    def finished(self, cell: str, failure: Failure | None, seconds: float) -> None:
        with self._guard:
            self._state.running.pop(cell, None)
            self._state.done += 1
            self.note(f"{cell}: {_outcome(failure)} after {seconds:.0f} s ({self._state.done} of {self._state.total})")

    def heartbeat(self) -> None:
        with self._guard:
            if not self._state.running or self._clock() - self._last_line < _HEARTBEAT_SECONDS:
                return
            now = self._clock()
            for cell, running in self._state.running.items():
                self.note(f"{cell}: {running.suite}, {now - running.since:.0f} s so far")


class LiveProgress:
    """A line per running cell - cell, suite, elapsed - and the count, redrawn in place."""

    def __init__(self, total: int, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._state = _State(total)
        self._console = console or Console(stderr=True)
        self._clock = clock
        self._guard = threading.RLock()
        self._began = clock()
        self._live = Live(
            console=self._console,
            get_renderable=self.render,
            refresh_per_second=2,
            transient=True,
            redirect_stdout=False,
        )

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, traceback)

    def render(self) -> RenderableType:
        with self._guard:
            now = self._clock()
            lines = [
                Text.assemble(
                    (printable(cell), "bold"),
                    f"  {printable(running.suite)}  ",
                    (_clock_time(now - running.since), "dim"),
                )
                for cell, running in self._state.running.items()
            ]
            count = f"{self._state.done} of {self._state.total} cells finished, {_clock_time(now - self._began)}"
        return Group(*lines, Text(count, style="dim"))

    def note(self, text: str) -> None:
        self._console.print(Text(as_text(text)))

    def started(self, cell: str) -> None:
        with self._guard:
            self._state.running[cell] = _RunningCell(self._clock())

    def line(self, cell: str, line: str) -> None:
        suite = parse_suite_line(line)
        if suite is None:
            return
        with self._guard:
            running = self._state.running.get(cell)
            if running:
                running.suite = " ".join(suite)

    def finished(self, cell: str, failure: Failure | None, seconds: float) -> None:
        with self._guard:
            self._state.running.pop(cell, None)
            self._state.done += 1
        self.note(f"{cell}: {_outcome(failure)} after {_clock_time(seconds)}")

    def heartbeat(self) -> None:
        return None


def progress_for(total: int) -> Progress:
    """Choose live progress where a person looks at a terminal, plain lines in CI and in files."""
    console = Console(stderr=True)
    return (
        LiveProgress(total, console) if console.is_terminal and not console.is_dumb_terminal else PlainProgress(total)
    )


def _outcome(failure: Failure | None) -> str:
    if failure is None:
        return "finished"
    first_line = next(iter(failure.message.splitlines()), "")
    return f"could not be run ({failure.kind}{f': {first_line}' if first_line else ''})"


def _clock_time(seconds: float) -> str:
    minutes, rest = divmod(int(seconds) if math.isfinite(seconds) else 0, 60)
    return f"{minutes}:{rest:02d}"
