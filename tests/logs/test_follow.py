"""Following a log: grown, rotated, cut and not there yet. `wait` is where the service writes: nothing here sleeps."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from toto_compat.contract.events import Event
from toto_compat.logs.follow import follow

LIMIT = "torch._dynamo hit config.recompile_limit (8)\n"
SKIP = "skipping cudagraphs due to mutated inputs (1 instances)\n"
QUIET = "2025-11-04 10:14:14 | INFO | forecast done\n"


def told(path: Path, steps: Sequence[Callable[[], object]]) -> list[list[Event]]:
    """What is told before each step, and after the last until it ends."""
    rounds: list[list[Event]] = [[]]
    waiting = iter(steps)

    def wait() -> bool:
        step = next(waiting, None)
        if step is None:
            return False
        step()
        rounds.append([])
        return True

    for index, event in follow([path], ["log"], wait):
        assert index == 0
        rounds[-1].append(event)
    return rounds


def append(path: Path, text: str) -> Callable[[], object]:
    def write() -> None:
        with path.open("a", encoding="utf-8") as log:
            log.write(text)

    return write


def reasons(rounds: list[list[Event]]) -> list[list[str]]:
    return [[f"{event.kind} {event.source}" for event in one] for one in rounds]


def test_what_is_there_comes_first_and_what_is_appended_when_it_comes(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text(QUIET + SKIP)
    assert reasons(told(log, [append(log, QUIET), append(log, SKIP)])) == [
        ["cudagraph_skip log:2"],
        [],
        ["cudagraph_skip log:4"],
    ]


def test_a_line_that_is_written_in_two_halves_is_one_event(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text(SKIP[:20])
    rounds = told(log, [append(log, SKIP[20:30]), append(log, SKIP[30:])])
    assert [[event.reason for event in one] for one in rounds] == [[], [], ["mutated inputs (1 instances)"]]


def test_an_event_that_waits_for_more_is_told_after_a_while_without_news(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text(LIMIT)
    rounds = reasons(told(log, [lambda: None] * 6))
    assert [told for one in rounds for told in one] == ["recompile_limit log:1"]
    assert rounds[0] == []
    assert rounds[-1] == []


def test_rotation_by_renaming_loses_nothing(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text(SKIP)

    def rotate() -> None:
        append(log, SKIP)()  # the last words, written after the last look
        log.rename(tmp_path / "a.log.1")
        log.write_text(QUIET + SKIP)

    assert reasons(told(log, [rotate])) == [["cudagraph_skip log:1"], ["cudagraph_skip log:2", "cudagraph_skip log:2"]]


def test_a_rotation_seen_between_its_two_steps_loses_nothing(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text(SKIP)
    rounds = told(
        log,
        [
            lambda: log.rename(tmp_path / "a.log.1"),
            append(tmp_path / "a.log.1", SKIP),
            append(log, SKIP),
        ],
    )
    assert reasons(rounds) == [["cudagraph_skip log:1"], [], ["cudagraph_skip log:2"], ["cudagraph_skip log:1"]]


def test_a_log_that_is_cut_is_read_from_its_new_beginning(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text(QUIET * 3 + SKIP)

    def cut() -> None:
        os.truncate(log, 0)
        append(log, SKIP)()

    assert reasons(told(log, [cut])) == [["cudagraph_skip log:4"], ["cudagraph_skip log:1"]]


def test_a_log_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    assert reasons(told(log, [lambda: None, append(log, SKIP)])) == [[], [], ["cudagraph_skip log:1"]]
