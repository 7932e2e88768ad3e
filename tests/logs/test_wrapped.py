"""Logs that were cut at some width give the events of the lines that were written, and others are left as they are."""

import io
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toto_compat.contract.events import Event
from toto_compat.logs.parse import parse_lines, parse_stream
from toto_compat.logs.wrapped import may_be_cut, mended

PRODUCTION = (
    (Path(__file__).parent.parent / "fixtures" / "logs" / "production.log").read_text(encoding="utf-8").splitlines()
)
WIDTHS = range(60, 201)
PLACE = "W1104 10:14:14.409000 101341 torch/_dynamo/convert_frame.py:1358] [6/8] "
LIMIT = (
    "torch._dynamo hit config.recompile_limit (8)",
    "   function: 'positional_embedding' (/path/to/toto/model/attention.py:105)",
    "   last reason: 6/7: kv_cache._current_idx[7] == 0",
)
PREFIXES = [
    "",
    PLACE,
    f"[rank0]:{PLACE}",
    f"bot-1  | {PLACE}",
    f"2025-11-04T10:14:14.123456789Z stderr F {PLACE}",
    "2025-11-04 10:14:14 | WARNING | ",
    "2025-11-04 10:14:14,123 - root - WARNING - ",
]


def cut(lines: Sequence[str], width: int) -> tuple[list[str], dict[int, int]]:
    """Cut lines as a terminal does; which piece is the first of which line, both counted from 1."""
    pieces: list[str] = []
    first: dict[int, int] = {}
    for number, line in enumerate(lines, start=1):
        first[number] = len(pieces) + 1
        pieces += [line[place : place + width] for place in range(0, len(line), width)]
    return pieces, first


def told(events: Iterable[Event]) -> list[dict[str, object]]:
    return sorted((event.model_dump() for event in events), key=lambda one: int(str(one["source"])[len("log:") :]))


def both_ways(lines: Sequence[str]) -> list[dict[str, object]]:
    """Read lines one by one and as blocks of bytes, which must tell the same."""
    events = told(parse_lines(lines, "log"))
    assert told(parse_stream(io.BytesIO("\n".join(lines).encode()), "log")) == events
    return events


def expected(lines: Sequence[str], first: dict[int, int]) -> list[dict[str, object]]:
    """Tell the events of the lines as written, each at the piece that its line begins with."""
    return [
        {**event, "source": f"log:{first[int(str(event['source'])[len('log:') :])]}"}
        for event in told(parse_lines(lines, "log"))
    ]


@pytest.mark.parametrize("width", WIDTHS)
def test_production_s_lines_lose_nothing_at_any_width(width: int) -> None:
    pieces, first = cut(PRODUCTION, width)
    assert both_ways(pieces) == expected(PRODUCTION, first)


@pytest.mark.parametrize("width", WIDTHS)
def test_pieces_without_the_spaces_at_their_ends_lose_nothing(width: int) -> None:
    """A copy from a terminal leaves them out."""
    pieces, first = cut(PRODUCTION, width)
    assert both_ways([piece.rstrip() for piece in pieces]) == expected(PRODUCTION, first)


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_limit_behind_any_prefix_loses_nothing_at_any_width(prefix: str) -> None:
    lines = [prefix + line for line in LIMIT]
    for width in WIDTHS:
        pieces, first = cut(lines, width)
        assert both_ways(pieces) == expected(lines, first), width


def test_colours_around_a_cut_line_and_returns_at_its_end_change_nothing() -> None:
    for width in WIDTHS:
        pieces, first = cut(PRODUCTION, width)
        begins = set(first.values())
        coloured = [
            "\x1b[33m" * (number in begins) + piece + "\x1b[0m" * (number + 1 in begins)
            for number, piece in enumerate(pieces, start=1)
        ]
        assert both_ways(coloured) == expected(PRODUCTION, first), width
        assert both_ways([f"{piece}\r" for piece in pieces]) == expected(PRODUCTION, first), width


# What services write between the compiler's lines, with and without a prefix of its own.
ORDINARY = (
    "2025-11-04 10:14:14 | INFO | forecast BTCUSD done",
    "INFO: started",
    "W1104 10:14:14.409000 something else",
    "forecast BTCUSD done",
    "Epoch 3: loss 0.21",
    "done (8 instances)",
    "loss == 3",
    "== 0",
    "0",
    "12",
    "(8)",
    "x",
    "torch",
    "| a | b |",
    "| total (8)",
    "- 3",
    "  indented",
    '"quoted"',
    "{'a': 1}",
    "100%|####| 8/8 [00:01<00:00, 7.5it/s]",
)


@pytest.mark.parametrize("ordinary", ORDINARY)
def test_an_ordinary_line_is_not_joined_to_what_is_complete(ordinary: str) -> None:
    woven = [piece for line in PRODUCTION for piece in (line, ordinary)]
    first = {number: 2 * number - 1 for number in range(1, len(PRODUCTION) + 1)}
    assert both_ways(woven) == expected(PRODUCTION, first)


@pytest.mark.parametrize("ordinary", ORDINARY)
def test_an_ordinary_line_is_joined_to_no_line_of_the_compiler(ordinary: str) -> None:
    assert [line for line in PRODUCTION if mended(line, ordinary) is not None] == []


def test_lines_that_follow_each_other_uncut_are_not_joined() -> None:
    assert [pair for pair in pairwise(PRODUCTION) if mended(*pair) is not None] == []
    assert [pair for pair in pairwise(ORDINARY) if mended(*pair) is not None] == []


def test_what_is_complete_is_not_held_back() -> None:
    """An event is told at once by a log that is followed."""
    expression = [line for line in PRODUCTION if may_be_cut(line)]
    assert all("non-relation expression" in line for line in expression)


def test_a_reason_that_only_words_could_go_on_keeps_the_next_line_out() -> None:
    lines = ["skipping cudagraphs due to reasons of its own", "forecast BTCUSD done"]
    [event] = both_ways(lines)
    assert event["reason"] == "reasons of its own"


@settings(deadline=None)
@given(
    st.lists(
        st.one_of(
            st.sampled_from(ORDINARY),
            st.tuples(st.sampled_from(PREFIXES), st.sampled_from([*LIMIT, *PRODUCTION])).map("".join),
        ),
        max_size=20,
    ),
    st.integers(20, 120),
)
def test_any_cut_log_reads_the_same_as_lines_and_as_blocks(lines: list[str], width: int) -> None:
    both_ways(cut(lines, width)[0])
