"""Progress is a live line per cell on a terminal and plain lines elsewhere."""

import io
import re

import pytest
from rich.console import Console

from toto_compat.contract.result import Failure
from toto_compat.runtimes.progress import LiveProgress, PlainProgress, parse_suite_line

CELL = "torch-2.13.0-cpu/upstream/default"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def plain() -> tuple[PlainProgress, list[str], Clock]:
    lines: list[str] = []
    clock = Clock()
    return PlainProgress(2, write=lines.append, clock=clock), lines, clock


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("::suite recompile start", ("recompile", "start")),
        ("::suite speed", ("speed", "")),
        ("::suite ", None),
        ("suite recompile", None),
        ("W1030 torch._dynamo hit config.recompile_limit (8)", None),
    ],
)
def test_only_protocol_lines_are_progress(line: str, found: tuple[str, str] | None) -> None:
    assert parse_suite_line(line) == found


def test_start_suite_and_finish_are_a_line_each() -> None:
    progress, lines, _ = plain()
    progress.started(CELL)
    progress.line(CELL, "::suite recompile start")
    progress.line(CELL, "noise of the compiler")
    progress.finished(CELL, None, 12.3)
    assert [line.split(" ", 1)[1] for line in lines] == [
        f"{CELL}: started",
        f"{CELL}: recompile start",
        f"{CELL}: finished after 12 s (1 of 2)",
    ]


def test_a_cell_that_could_not_be_run_says_why() -> None:
    progress, lines, _ = plain()
    progress.finished(CELL, Failure(kind="timeout", message="no end after 30 minutes\nmore"), 1800)
    assert "could not be run (timeout: no end after 30 minutes)" in lines[0]


def test_a_failure_without_a_message_is_told_by_its_kind() -> None:
    progress, lines, _ = plain()
    progress.finished(CELL, Failure(kind="crash", message=""), 1)
    assert "could not be run (crash) after 1 s" in lines[0]


def test_a_heartbeat_comes_only_after_half_a_minute_of_silence() -> None:
    progress, lines, clock = plain()
    progress.started(CELL)
    clock.now = 29
    progress.heartbeat()
    assert len(lines) == 1
    clock.now = 31
    progress.heartbeat()
    progress.heartbeat()
    assert len(lines) == 2
    assert lines[1].endswith("starting, 31 s so far")


def test_nothing_running_has_no_heartbeat() -> None:
    progress, lines, clock = plain()
    clock.now = 100
    progress.heartbeat()
    assert lines == []


def test_the_live_display_shows_cell_suite_elapsed_and_count() -> None:
    clock = Clock()
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    progress = LiveProgress(3, console, clock)
    progress.started(CELL)
    progress.line(CELL, "::suite speed start")
    clock.now = 75
    shown = Console(file=io.StringIO(), width=100, record=True)
    shown.print(progress.render())
    text = shown.export_text()
    assert f"{CELL}  speed start  1:15" in text
    assert "0 of 3 cells finished, 1:15" in text


def test_the_live_display_shows_what_a_cell_says_and_obeys_none_of_it() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    progress = LiveProgress(1, console, Clock())
    progress.started("a/b/\x1b]0;cell\x07c")
    progress.line("a/b/\x1b]0;cell\x07c", "::suite \x1b[2Jspeed \u202estart")
    console.print(progress.render())
    progress.note("\x1b]52;c;bHM=\x07said\x9b2J")
    progress.finished("d", Failure(kind="crash", message="\x1b[31mred"), float("nan"))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", shown) is None
    assert "a/b/c  speed start" in shown and "said" in shown and "crash: red" in shown


def test_a_name_with_brackets_is_not_markup() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    progress = LiveProgress(1, console, Clock())
    progress.note("[red]not markup[/red]")
    assert isinstance(console.file, io.StringIO)
    assert "[red]not markup[/red]" in console.file.getvalue()
