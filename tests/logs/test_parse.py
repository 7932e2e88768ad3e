"""The parser on the lines that production and real torch releases wrote, in every disguise a log gives them."""

import io
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toto_compat.contract.bucket_messages import compiling_bucket, dropping_bucket
from toto_compat.contract.events import Event, EventKind, Severity
from toto_compat.contract.log_line import normalise_reason
from toto_compat.contract.torch_messages import BEGINNING
from toto_compat.logs.parse import BYTE_LITERALS, BlockParser, parse_lines, parse_stream
from toto_compat.logs.scan import Scanner, finding_scanner, hyperscan_scanner

LOGS = Path(__file__).parent.parent / "fixtures" / "logs"
GLOG = "W1104 10:14:14.409000 101341 torch/_dynamo/convert_frame.py:1358] [6/8] "
LIMIT = (
    "torch._dynamo hit config.recompile_limit (8)",
    "   function: 'positional_embedding' (/path/to/toto/model/attention.py:105)",
    "   last reason: 6/7: kv_cache._current_idx[7] == 0",
)
RECOMPILE = (
    "Recompiling function forward in /venv/lib/python3.11/site-packages/toto/model/transformer.py:121",
    "    triggered by the following guard failure(s):",
    "    - 6/0: layer_idx == 0",
)
GRAPH_BREAK = (
    "Graph break in user code at /srv/app/idx.py:14",
    "Graph Break Reason: Call to `torch._dynamo.graph_break()`",
    "User code traceback:",
    '  File "/srv/app/idx.py", line 14, in append',
    "    torch._dynamo.graph_break()",
)


QUIET = "2025-11-04 10:14:14 | INFO | forecast BTCUSD done"


def events_of(lines: Iterable[str]) -> list[Event]:
    return list(parse_lines(lines, "log"))


def only(lines: Iterable[str]) -> Event:
    (event,) = events_of(lines)
    return event


def essence(event: Event) -> tuple[object, ...]:
    """What must not depend on the logging prefix."""
    return (event.kind, event.function, event.file, event.line, event.reason, event.limit, event.count)


def essences(events: Iterable[Event]) -> Counter[tuple[object, ...]]:
    return Counter(essence(event) for event in events)


def fixture_events(name: str) -> list[Event]:
    with (LOGS / name).open(encoding="utf-8") as log:
        return sorted(parse_lines(log, name), key=lambda event: int(event.source.rpartition(":")[2]))


def test_every_line_of_the_production_log_is_recognised() -> None:
    found = [
        (event.kind.value, event.function, event.file, event.reason, event.limit, event.count)
        for event in fixture_events("production.log")
    ]
    reason = "6/7: kv_cache._current_idx[7] == 0"
    unnamed_limit = ("recompile_limit", "", "", "", 8, 1)
    assert found == [
        ("recompile_limit", "positional_embedding", "toto/model/attention.py", reason, 8, 1),
        ("cudagraph_skip", "", "", "mutated inputs (2 instances)", None, 2),
        ("recompile_limit", "positional_embedding", "", reason, 8, 1),
        ("dynamic_shape", "", "", "Eq(s43, 1) | Eq(s34*s85, s43)", None, 1),
        ("cudagraph_skip", "", "", "mutated inputs (8 instances)", None, 8),
        ("cudagraph_skip", "", "", "incompatible op aten._local_scalar_dense.default", None, 1),
        ("cudagraph_partition", "", "", "non gpu ops", None, 1),
        unnamed_limit,
        unnamed_limit,
        ("cudagraph_skip", "", "", "mutated inputs (8 instances)", None, 8),
        unnamed_limit,
        ("compile_setting", "Toto", "", "mode=reduce-overhead, backend=inductor", None, 1),
    ]


def test_the_lines_of_other_releases_are_recognised() -> None:
    recompile, limit, old_limit, graph_break = fixture_events("releases.log")
    assert (recompile.kind, recompile.function, recompile.file, recompile.line) == (
        EventKind.RECOMPILE,
        "forward",
        "toto/model/transformer.py",
        121,
    )
    assert (recompile.reason, recompile.compile_id) == ("6/0: layer_idx == 0", "6/1")
    assert recompile.logged_from == "torch/_dynamo/guards.py:2997"
    assert (limit.function, limit.file, limit.line, limit.reason) == ("forward", "idx.py", 5, "0/7: s.idx[0] == 7")
    assert (limit.limit, limit.limit_name) == (8, "recompile_limit")
    assert (old_limit.limit, old_limit.limit_name) == (8, "cache_size_limit")
    assert old_limit.logged_from == "torch/_dynamo/convert_frame.py:844"
    assert (graph_break.kind, graph_break.file, graph_break.line) == (EventKind.GRAPH_BREAK, "idx.py", 14)


def test_a_real_log_of_torch_2_13_gives_each_event_once() -> None:
    events = fixture_events("torch-2.13.0.log")
    kinds = Counter(event.kind for event in events)
    assert kinds == {EventKind.RECOMPILE: 14, EventKind.RECOMPILE_LIMIT: 1, EventKind.GRAPH_BREAK: 9}
    limit = next(event for event in events if event.kind is EventKind.RECOMPILE_LIMIT)
    assert (limit.function, limit.reason, limit.limit) == ("forward", "0/7: s.idx[0] == 7", 8)
    assert limit.stack == ("script.py:6 in forward",)
    breaks = [event.reason for event in events if event.kind is EventKind.GRAPH_BREAK]
    assert breaks[0] == "Call to `torch._dynamo.graph_break()`"
    assert breaks[-1] == "Failed to trace builtin operator"


def test_a_real_log_of_torch_2_5_gives_the_reason_from_the_traceback_and_the_frame_of_the_user() -> None:
    events = fixture_events("torch-2.5.1.log")
    breaks = [event for event in events if event.kind is EventKind.GRAPH_BREAK]
    assert [(event.line, event.function) for event in breaks] == [
        (9, "gb"),
        (11, "torch_dynamo_resume_in_gb_at_9"),
        (16, "loop"),
    ]
    assert breaks[1].reason == "Tensor.item"
    assert all(frame.startswith("script.py:") for event in breaks for frame in event.stack)
    assert sum(event.kind is EventKind.RECOMPILE for event in events) == 7


def test_of_several_failed_guards_the_first_is_the_reason_and_all_are_kept() -> None:
    event = only([*RECOMPILE, "    - 6/1: layer_idx == 1", "    - 6/2: layer_idx == 2"])
    assert event.reason == "6/0: layer_idx == 0"
    assert event.reasons == ("6/0: layer_idx == 0", "6/1: layer_idx == 1", "6/2: layer_idx == 2")


def test_a_cut_list_of_failed_guards_says_so() -> None:
    event = only([*RECOMPILE, *(f"    - 6/{number}: layer_idx == {number}" for number in range(1, 40))])
    assert event.reasons[-1] == "(and 24 more)"


def test_source_line_and_hint_behind_a_guard_are_not_part_of_the_reason() -> None:
    line = (
        "    - 0/0: s.idx[0] == 0              # return x+s.idx[0]  # app/script.py:6 in forward (HINT: use a tensor)"
    )
    assert only([*RECOMPILE[:2], line]).reason == "0/0: s.idx[0] == 0"


PREFIXES = [
    "",
    GLOG,
    "W1030 09:08:09.060000 ",
    "W1107 09:47:09 ",
    "W1104 10:14:14.409000 torch/_dynamo/convert_frame.py:1358] [6/8] ",
    "[rank0]:W1104 10:14:14.409000 101341 torch/_dynamo/convert_frame.py:1358] [6/8] ",
    "2025-11-04 10:14:14 | INFO | ",
    "2025-11-04 10:14:14,123 - root - WARNING - ",
    "2025-11-04T10:14:14.123456789Z stderr F ",
    "2025-11-04T10:14:14.123456789Z ",
    "bot-1  | 2025-11-04 10:14:14 | WARNING | ",
    "[pod/bot-7f9/forecaster] ",
    "\x1b[33mWARNING\x1b[0m ",
    "WARNING  torch._dynamo.convert_frame:convert_frame.py:1358 ",
    "E   ",
    "Nov 04 10:14:14 host python[4711]: ",
]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_any_prefix_gives_the_same_events(prefix: str) -> None:
    for lines in (LIMIT, RECOMPILE, GRAPH_BREAK, ("skipping cudagraphs due to mutated inputs (8 instances)",)):
        assert essence(only(prefix + line for line in lines)) == essence(only(lines))


def test_lines_of_one_block_may_carry_different_prefixes() -> None:
    lines = [GLOG + LIMIT[0], "2025-11-04 10:14:14 | WARNING | " + LIMIT[1], LIMIT[2]]
    assert essence(only(lines)) == essence(only(LIMIT))


def test_a_json_log_with_the_whole_block_in_one_message() -> None:
    record = json.dumps({"level": "WARNING", "message": GLOG + "\n".join(LIMIT), "pid": 7})
    assert essence(only([record])) == essence(only(LIMIT))


def test_a_container_log_with_one_json_record_per_line() -> None:
    lines = [
        json.dumps({"log": f"{GLOG}{line}\n", "stream": "stderr", "time": "2025-11-04T10:14:14Z"}) for line in LIMIT
    ]
    assert essence(only(lines)) == essence(only(LIMIT))


def test_a_block_with_escaped_newlines_that_is_not_json() -> None:
    assert essence(only(["msg='" + "\\n".join(LIMIT) + "\\nTo log all recompilation reasons'"])) == essence(only(LIMIT))


@pytest.mark.parametrize(
    "lines",
    [
        ["torch._dynamo hit", "config.recompile_limit (8)", *LIMIT[1:]],
        ["torch._dynamo hit config.recompile_limit", "(8)", *LIMIT[1:]],
        ["torch._dynamo hit config.recompi", "le_limit (8)", *LIMIT[1:]],
        [GLOG + "torch._dynamo hit", GLOG + "config.recompile_limit (8)", *LIMIT[1:]],
        [LIMIT[0], "   function: 'positional_embedding'", "   (/path/to/toto/model/attention.py:105)", LIMIT[2]],
        [*LIMIT[:2], "   last reason: 6/7: kv_cache._current_idx[7] ==", "   0"],
        [*LIMIT[:2], "   last reason:", "   6/7: kv_cache._current_idx[7] == 0"],
    ],
)
def test_wrapped_lines_are_joined(lines: list[str]) -> None:
    assert essence(only(lines)) == essence(only(LIMIT))


def test_interleaved_processes_do_not_mix() -> None:
    def block(pid: int, name: str, guard: str) -> list[str]:
        prefix = f"W1104 10:14:14.409000 {pid} torch/_dynamo/convert_frame.py:1358] [6/8] "
        return [
            prefix + line for line in (LIMIT[0], f"   function: '{name}' (/x/{name}.py:1)", f"   last reason: {guard}")
        ]

    first, second = block(11, "one", "6/7: a == 0"), block(22, "two", "6/7: b == 0")
    woven = [line for pair in zip(first, second, strict=True) for line in pair]
    found = sorted((event.function, event.file, event.reason) for event in events_of(woven))
    assert found == [("one", "one.py", "6/7: a == 0"), ("two", "two.py", "6/7: b == 0")]


def test_services_of_one_compose_log_do_not_mix() -> None:
    first = [f"bot-1  | {line}" for line in LIMIT]
    second = [f"bot-2  | {line.replace('positional_embedding', 'forward')}" for line in LIMIT]
    woven = [line for pair in zip(first, second, strict=True) for line in pair]
    swapped = [line for pair in zip(second, first, strict=True) for line in pair]
    for lines in (woven, [woven[0], *swapped[:1], *woven[2:4], *swapped[4:]]):
        found = [(event.function, event.source) for event in events_of(lines)]
        assert sorted(found) == [("forward", "log:2"), ("positional_embedding", "log:1")]


def test_a_block_cut_by_log_rotation_is_still_a_limit_hit() -> None:
    event = only(GLOG + line for line in LIMIT[1:])
    assert (event.kind, event.function, event.limit) == (EventKind.RECOMPILE_LIMIT, "positional_embedding", None)


def test_advice_on_scalar_outputs_and_the_break_it_is_about_are_one_event() -> None:
    advice = [
        "Graph break from `Tensor.item()`, consider setting:",
        "    torch._dynamo.config.capture_scalar_outputs = True",
        "Graph break: from user code at:",
        '  File "/srv/app/idx.py", line 11, in forward',
    ]
    alone = only(advice)
    assert (alone.kind, alone.reason, alone.line) == (EventKind.GRAPH_BREAK, "Tensor.item()", 11)
    followed = only([*advice, "Graph break in user code at /srv/app/idx.py:11", "Graph Break Reason: Tensor.item"])
    assert followed.reason == "Tensor.item"


def test_a_repeated_graph_break_is_an_event_of_its_own() -> None:
    text = "Graph break (user stack suppressed due to duplicate graph break) in user code at /srv/app/idx.py:14"
    event = only([text, "Graph Break Reason: Encountered graph break when attempting to trace CALL:", "", "Call to x"])
    assert (event.line, event.reason) == (14, "Call to x")


def test_a_skip_with_a_stack_names_where_the_input_is_written() -> None:
    lines = [
        "skipping cudagraphs due to mutated inputs (1 instances). Found from : ",
        '   File "/venv/lib/python3.11/site-packages/toto/model/util.py", line 88, in append',
        "    self._keys[layer_idx] = keys",
    ]
    event = only(lines)
    assert (event.reason, event.stack) == ("mutated inputs (1 instances)", ("toto/model/util.py:88 in append",))


def test_partitions_of_torch_2_13_count_those_without_cudagraphs() -> None:
    event = only(
        [
            "Created 3 graph partitions: 2 cudagraphable, 1 non-cudagraphable",
            "    buf3: reason=CPU ops, ir=ComputedBuffer",
        ]
    )
    assert (event.kind, event.count, event.reason) == (EventKind.CUDAGRAPH_PARTITION, 1, "CPU ops")
    assert events_of(["Created 1 graph partitions: 1 cudagraphable, 0 non-cudagraphable"]) == []


@pytest.mark.parametrize(
    "line",
    [
        "consider increasing torch._dynamo.config.recompile_limit to an appropriate value",
        "set torch._dynamo.config.cache_size_limit = 64",
        "last reason: the broker closed the connection",
        "order function: 'limit' (rate_limit exceeded)",
        "cudagraphs enabled",
        "see the docs on graph breaks",
    ],
)
def test_a_line_that_only_mentions_the_words_is_no_event(line: str) -> None:
    assert events_of([line]) == []


BUCKETS = [
    "INFO toto_compat.buckets: "
    + compiling_bucket("decode step for batch 16, variates 1, capacity 80", 3, 16, announced=True),
    "WARNING toto_compat.buckets: "
    + compiling_bucket("decode step for batch 3, variates 2, capacity 80", 4, 16, announced=False),
    "2026-11-17 09:00:00,120 WARNING toto_compat.buckets "
    + dropping_bucket("decode step for batch 16, variates 1, capacity 80", 16),
]


def test_the_model_s_own_lines_about_buckets_are_events_as_it_writes_them() -> None:
    for events in (events_of(BUCKETS), list(parse_stream(io.BytesIO("\n".join(BUCKETS).encode()), "log"))):
        assert [(event.kind, event.severity, event.function, event.reason, event.limit) for event in events] == [
            (EventKind.BUCKET_COMPILE, Severity.INFO, "decode_step", "batch 16, variates 1, capacity 80", 16),
            (
                EventKind.BUCKET_COMPILE,
                Severity.WARNING,
                "decode_step",
                "batch 3, variates 2, capacity 80, not announced",
                16,
            ),
            (EventKind.BUCKET_DROP, Severity.WARNING, "decode_step", "batch 16, variates 1, capacity 80", 16),
        ]


def test_severities_put_a_limit_hit_above_a_recompile() -> None:
    assert only(LIMIT).severity is Severity.ERROR
    assert only(RECOMPILE).severity is Severity.WARNING


def test_nothing_in_an_event_can_steer_a_terminal() -> None:
    event = only([LIMIT[0], LIMIT[1], "   last reason: 6/7: \x1b[2J\x1b]0;gone\x07x\u202e == \x9b0m 0\x00"])
    assert event.reason == "6/7: x == 0m 0"


@pytest.mark.parametrize(
    ("reason", "normalised"),
    [
        ("6/7: kv_cache._current_idx[7] == 0", "kv_cache._current_idx[N] == N"),
        ("mutated inputs (8 instances)", "mutated inputs (N instances)"),
        (
            "tensor 'x' size mismatch at index 0. expected 3, actual 4",
            "tensor 'x' size mismatch at index N. expected N, actual N",
        ),
        ("Eq(s43, 1) | Eq(s34*s85, s43)", "Eq(sN, N) | Eq(sN*sN, sN)"),
        ("___check_obj_id(L['f'], 140231)", "___check_obj_id(L['f'], N)"),
        ("<function f at 0x7f00aa>", "<function f at ADDRESS>"),
        ("dtype float32 expected", "dtype float32 expected"),
        ("skip function g in file /a/b/c.py:12", "skip function g in file PATH"),
    ],
)
def test_normalised_reasons_keep_names_and_lose_what_varies(reason: str, normalised: str) -> None:
    assert normalise_reason(reason) == normalised


def test_memory_does_not_grow_with_what_never_ends() -> None:
    endless = (GLOG.replace("101341", str(pid)) + LIMIT[0] for pid in range(1000))
    events = parse_lines(endless, "log")
    # the first comes out long before the input ends
    assert next(events).limit == 8
    assert int(next(endless).split()[2]) < 200


# Any text that is one line and says none of the words by itself.
noise = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n\r"), max_size=60).filter(
    lambda text: (
        not any(word in text for word in ("\\n", "{", "'", '"', "- ", "(", ")", ":", "[", "_", "\x1b", "Reason", "NaN"))
    )
)


@settings(deadline=None)
@given(prefix=noise)
def test_an_arbitrary_prefix_never_changes_the_events(prefix: str) -> None:
    for lines in (LIMIT, RECOMPILE, GRAPH_BREAK):
        assert essence(only(f"{prefix} {line}" for line in lines)) == essence(only(lines))


@settings(deadline=None)
@given(garbage=st.lists(noise, max_size=6), place=st.integers(0, 2))
def test_garbage_between_the_lines_never_changes_the_events(garbage: list[str], place: int) -> None:
    for lines in (LIMIT, RECOMPILE):
        woven = [*lines[: place + 1], *garbage, *lines[place + 1 :]]
        assert essences(events_of(woven)) == essences(events_of(lines))


@settings(deadline=None)
@given(st.lists(st.text(max_size=120), max_size=20))
def test_garbage_alone_never_crashes_the_parser(lines: list[str]) -> None:
    events_of(lines)


FAILURE = (
    "Traceback (most recent call last):",
    '  File "/srv/app/bot.py", line 7, in forecast',
    "torch._dynamo.exc.BackendCompilerFailed: backend='inductor' raised:",
    "CompilationError: at 2:16:",
    "The above exception was the direct cause of the following exception:",
    "from user code:",
    "ValueError: no such symbol",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB.",
)
fragments = st.sampled_from(
    [*LIMIT, *RECOMPILE, *GRAPH_BREAK, *FAILURE, "torch._dynamo hit", "skipping cudagraphs due to x", ""]
)
pieces = st.tuples(st.sampled_from(PREFIXES), fragments, st.text(max_size=10)).map("".join)


def read_in_blocks(data: bytes, block: int, scan: Scanner) -> list[Event]:
    parser = BlockParser("log", scan, block)
    return [*parser.read(io.BytesIO(data)), *parser.close()]


SCANNERS = [finding_scanner(BYTE_LITERALS), *filter(None, [hyperscan_scanner(BYTE_LITERALS)])]


@settings(deadline=None)
@given(st.lists(pieces, max_size=30), st.integers(1, 300), st.sampled_from(["\n", "\r\n"]))
def test_any_mixture_of_fragments_reads_the_same_as_lines_and_as_blocks(lines: list[str], block: int, end: str) -> None:
    data = end.join(lines).encode("utf-8", "replace")
    from_lines = list(parse_lines(data.decode("utf-8").split("\n"), "log"))
    for scan in SCANNERS:
        assert read_in_blocks(data, block, scan) == from_lines


@pytest.mark.parametrize("name", sorted(path.name for path in LOGS.glob("*.log")))
def test_a_real_log_reads_the_same_in_blocks_of_any_size(name: str) -> None:
    data = (LOGS / name).read_bytes()
    from_lines = list(parse_lines(data.decode().split("\n"), "log"))
    for scan in SCANNERS:
        for block in (100, 4096):
            assert read_in_blocks(data, block, scan) == from_lines


@pytest.mark.parametrize(
    "line",
    [
        LIMIT[0],
        "Graph break in user code at /srv/app/idx.py:14",
        "Graph break (user stack suppressed due to duplicate graph break) in user code at /srv/app/idx.py:14",
        "Graph break: from user code at:",
        "Graph break: torch.compile cannot properly resume",
        "Recompiling function forward in /srv/app/idx.py:14",
        "skipping cudagraphs due to x",
        "cudagraph partition due to x",
        "Created 3 graph partitions: 2 cudagraphable, 1 non-cudagraphable",
        "_maybe_guard_rel() was called on non-relation expression Eq(s43, 1)",
        "Using torch.compile for Toto (mode=default)",
        compiling_bucket("decode step for batch 16, variates 1, capacity 80", 3, 16, announced=True),
        dropping_bucket("decode step for batch 16, variates 1, capacity 80", 16),
        compiling_bucket("patch draws for variates 3", 3, 16, announced=True),
        compiling_bucket("context pass for 8 patches, variates 1, series 1", 3, 16, announced=True),
        dropping_bucket("context pass for 8 patches, variates 1, series 1, predicting all, autocast float16", 16),
    ],
)
def test_a_beginning_is_found_wherever_it_is_wrapped(line: str) -> None:
    whole = only([line])
    begins, ends = BEGINNING.search(line).span()  # type: ignore[union-attr]
    # A number or a reason at the end of the line may be cut without a trace; up to it nothing is lost.
    ends = next((ends - len(last) for last in (":14", "x", "Eq(s43, 1)") if line.endswith(last)), ends)
    for cut in range(begins + 1, ends + 1):
        wrapped = [QUIET, line[:cut], line[cut:], QUIET]
        assert [essence(event) for event in events_of(wrapped)] == [essence(whole)], wrapped
        data = "\n".join(wrapped).encode()
        for scan in SCANNERS:
            assert essences(read_in_blocks(data, 64, scan)) == essences([whole]), wrapped


def test_positions_stay_right_across_skipped_megabytes() -> None:
    filler = b"2025-11-04 10:14:14 | INFO | forecast done\n" * 60_000
    log = filler + b"skipping cudagraphs due to cpu device (x)\n" + filler + "\n".join(LIMIT).encode()
    assert [event.source for event in parse_stream(io.BytesIO(log), "log")] == ["log:60001", "log:120002"]
