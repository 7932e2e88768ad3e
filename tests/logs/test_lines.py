"""Log formats around one message: who said it, when, and in which encoding."""

import io
import json
from collections.abc import Callable, Iterable

import pytest

from toto_compat.contract.events import Event
from toto_compat.logs.parse import parse_lines, parse_stream

LIMIT = (
    "torch._dynamo hit config.recompile_limit (8)",
    "   function: 'positional_embedding' (/path/to/toto/model/attention.py:105)",
    "   last reason: 6/7: kv_cache._current_idx[7] == 0",
)
PLAIN = ("positional_embedding", "toto/model/attention.py", "6/7: kv_cache._current_idx[7] == 0", 8)


def only(lines: Iterable[str]) -> Event:
    (event,) = parse_lines(lines, "log")
    return event


def essence(event: Event) -> tuple[object, ...]:
    return (event.function, event.file, event.reason, event.limit)


def loguru(line: str) -> str:
    record = {
        "elapsed": {"repr": "0:00:01", "seconds": 1.0},
        "process": {"id": 4711, "name": "MainProcess"},
        "time": {"repr": "2025-11-04 10:14:14.409000+01:00", "timestamp": 1762247654.409},
        "message": line,
    }
    return json.dumps({"text": f"2025-11-04 10:14:14.409 | WARNING  | torch:f:1 - {line}\n", "record": record})


def journald(line: str) -> str:
    message = list(line.encode()) if "\x1b" in line else line
    return json.dumps({"__REALTIME_TIMESTAMP": "1762247654409000", "_PID": "4711", "MESSAGE": message})


def cloud(line: str) -> str:
    return json.dumps(
        {"severity": "WARNING", "jsonPayload": {"a": 1}, "timestamp": "2025-11-04T09:14:14Z", "msg": line}
    )


def docker(line: str) -> str:
    return json.dumps({"log": f"{line}\n", "stream": "stderr", "time": "2025-11-04T09:14:14.409000000Z"})


@pytest.mark.parametrize("wrapped", [loguru, journald, cloud, docker])
def test_json_lines_of_every_kind_give_the_event_and_its_time(wrapped: Callable[[str], str]) -> None:
    event = only(wrapped(line) for line in LIMIT)
    assert essence(event) == PLAIN
    assert event.time.startswith(("2025-11-04T10:14:14", "2025-11-04T09:14:14"))


def test_journald_writes_a_coloured_message_as_numbers() -> None:
    assert essence(only(journald(f"\x1b[33m{line}\x1b[0m") for line in LIMIT)) == PLAIN


def test_rich_colours_and_columns_do_not_hide_an_event() -> None:
    lines = [
        "[10:14:14] WARNING  torch._dynamo hit config.recompile_limit \x1b[1m(\x1b[0m\x1b[1;36m8\x1b[0m\x1b[1m)\x1b[0m",
        "                       function: \x1b[32m'positional_embedding'\x1b[0m "
        "\x1b[1m(\x1b[0m\x1b[35m/path/to/toto/model/\x1b[0m\x1b[95mattention.py\x1b[0m:\x1b[1;36m105\x1b[0m\x1b[1m)\x1b[0m",
        "                       last reason: \x1b[1;36m6\x1b[0m/\x1b[1;36m7\x1b[0m: kv_cache._current_idx[7] == 0",
    ]
    assert essence(only(lines)) == PLAIN
    (event,) = parse_stream(io.BytesIO("\n".join(lines).encode()), "log")
    assert essence(event) == PLAIN


def test_threads_of_one_process_do_not_mix() -> None:
    one = [f"2025-11-04 10:14:14 [Thread-1] WARNING {line}" for line in LIMIT]
    two = [f"2025-11-04 10:14:14 [Thread-2] WARNING {line.replace('positional_embedding', 'other')}" for line in LIMIT]
    woven = [line for pair in zip(one, two, strict=True) for line in pair]
    assert sorted(event.function for event in parse_lines(woven, "log")) == ["other", "positional_embedding"]


def test_ranks_of_one_job_do_not_mix() -> None:
    one = [f"[rank0]:W1104 10:14:14.409000 11 torch/_dynamo/convert_frame.py:1358] [6/8] {line}" for line in LIMIT]
    two = [line.replace("[rank0]", "[rank1]").replace("positional_embedding", "other") for line in one]
    woven = [line for pair in zip(one, two, strict=True) for line in pair]
    assert sorted(event.function for event in parse_lines(woven, "log")) == ["other", "positional_embedding"]


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le"])
def test_text_in_another_encoding_in_the_middle_of_a_log_is_read(encoding: str) -> None:
    log = b"started\n" + ("\n".join(LIMIT) + "\n").encode(encoding) + "Größe\n".encode("latin-1")
    (event,) = parse_stream(io.BytesIO(log), "log")
    assert essence(event) == PLAIN


@pytest.mark.parametrize("cut", range(1, len(LIMIT[2])))
def test_a_line_cut_short_keeps_what_it_says_and_the_limit(cut: int) -> None:
    event = only([*LIMIT[:2], LIMIT[2][:cut], "2025-11-04 10:14:14 | INFO | [next] forecast"])
    assert (event.function, event.limit) == ("positional_embedding", 8)


def test_time_is_that_of_the_first_line() -> None:
    lines = [f"2025-11-04T10:14:1{number}Z {line}" for number, line in enumerate(LIMIT)]
    assert only(lines).time == "2025-11-04T10:14:10+00:00"


@pytest.mark.parametrize("colour", ["\x1b[33m", "\x1b[1;33m", "\x1b[0m\x1b[38;5;214m"])
def test_a_coloured_line_keeps_its_time(colour: str) -> None:
    line = f"{colour}W1104 10:14:14.409000 torch/_dynamo/convert_frame.py:1358] [6/8] {LIMIT[0]}\x1b[0m"
    assert only([line]).time == "--11-04T10:14:14.409000"
    wrapped = [
        f"{colour}W1104 10:14:14.409000 torch._dynamo hit\x1b[0m",
        "W1104 10:14:14.409000 config.recompile_limit (8)",
    ]
    assert only(wrapped).time == "--11-04T10:14:14.409000"


PLACE = "W1104 10:14:14.409000 101341 torch/_dynamo/convert_frame.py:1358] [6/8] "


def row(line: str, *, first: str = "1762", last: str = "") -> str:
    quoted = line.replace('"', '""')
    return f'{first},"{quoted}"{last}'


@pytest.mark.parametrize("prefix", [PLACE, "", "2025-11-04 10:14:14 | WARNING | "])
@pytest.mark.parametrize(
    "columns",
    [{}, {"last": ",host-1"}, {"last": ',"host-1","x"'}, {"first": '"1762","bot"'}, {"first": "2025-11-04 10:14:14"}],
)
def test_rows_of_a_csv_export_give_what_their_field_says(prefix: str, columns: dict[str, str]) -> None:
    plain = only(prefix + line for line in LIMIT)
    event = only(row(prefix + line, **columns) for line in LIMIT)
    assert (essence(event), event.logged_from, event.compile_id) == (PLAIN, plain.logged_from, plain.compile_id)


def test_separators_of_other_exports_are_known() -> None:
    for separator in ";\t":
        assert essence(only(row(PLACE + line).replace(',"', f'{separator}"', 1) for line in LIMIT)) == PLAIN


def test_quotes_within_the_field_are_those_of_the_message() -> None:
    guard = '6/7: L["x"] == "a"'
    assert only(row(line) for line in (*LIMIT[:2], f"   last reason: {guard}")).reason == guard


def test_a_field_may_hold_all_lines_of_a_warning() -> None:
    lines = row("\n".join(PLACE + line for line in LIMIT), last=",host-1").split("\n")
    assert essence(only(lines)) == PLAIN
    assert essence(only([*lines, "2025-11-04 10:14:14 | INFO | done"])) == PLAIN


def test_a_row_that_holds_json_is_read_as_json() -> None:
    rows = [row(json.dumps({"message": PLACE + line})) for line in LIMIT]
    assert essence(only(rows)) == PLAIN


def test_a_row_that_was_cut_at_a_width_is_read_whole() -> None:
    for width in range(60, 201):
        pieces = [
            row(PLACE + line)[at : at + width] for line in LIMIT for at in range(0, len(row(PLACE + line)), width)
        ]
        assert essence(only(pieces)) == PLAIN, width


@pytest.mark.parametrize("guard", ['6/7: L["x"] in ["a","b","c"]', '6/7: f(a,"b",c) == "d"', '6/7: x == "a"'])
def test_quotes_of_a_message_that_is_in_no_field_stay(guard: str) -> None:
    assert only([*LIMIT[:2], f"   last reason: {guard}"]).reason == guard
