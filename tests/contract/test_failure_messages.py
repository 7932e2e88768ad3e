"""Failures in a log: each kind as torch, Triton, NumPy and the kernel word it, with the traceback that leads to it."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from toto_compat.contract.events import Event, EventKind, Severity
from toto_compat.logs.parse import parse_lines

LOGS = Path(__file__).parent.parent / "fixtures" / "logs"
OVERWRITTEN = (
    "RuntimeError: Error: accessing tensor output of CUDAGraphs that has been overwritten by a subsequent run. "
    'Stack trace: File "/srv/app/model.py", line 12, in decode'
)
TRACEBACK = (
    "Traceback (most recent call last):",
    '  File "/srv/app/bot.py", line 7, in forecast',
    "    return model(x)",
    '  File "/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1773, in _call_impl',
    "    return forward_call(*args, **kwargs)",
)
MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 24 GiB."
)


def events_of(lines: Iterable[str]) -> list[Event]:
    return list(parse_lines(lines, "log"))


def only(lines: Iterable[str]) -> Event:
    (event,) = events_of(lines)
    return event


@pytest.mark.parametrize(
    ("line", "kind", "reason"),
    [
        (OVERWRITTEN, "cudagraph_overwritten", "tensor output of CUDAGraphs overwritten by a subsequent run"),
        (MEMORY, "out_of_memory", "Tried to allocate 20.00 MiB"),
        (MEMORY.replace("torch.Out", "torch.cuda.Out"), "out_of_memory", "Tried to allocate 20.00 MiB"),
        ("RuntimeError: CUDA error: out of memory", "out_of_memory", "out of memory"),
        ("kernel: Out of memory: Killed process 4711 (python3)", "out_of_memory", "killed by the kernel"),
        (
            "torch._inductor.exc.InductorError: LoweringException: x",
            "backend_error",
            "InductorError: LoweringException",
        ),
        ("torch._inductor.exc.InductorError: CompilationError: at 2:16:", "triton_error", "InductorError: Compilation"),
        ("triton.compiler.errors.CompilationError: at 2:16:", "triton_error", "CompilationError: at 2:16:"),
        ("triton.runtime.errors.OutOfResources: out of resource: shared memory", "triton_error", "OutOfResources: out"),
        ("RuntimeError: Triton Error [CUDA]: an illegal memory access", "triton_error", "CUDA: an illegal memory"),
        ("torch._dynamo.exc.InternalTorchDynamoError: IndexError: x", "dynamo_error", "InternalTorchDynamoError: Ind"),
        ("RuntimeWarning: All-NaN slice encountered", "not_a_number", "All-NaN slice encountered"),
        ("RuntimeWarning: invalid value encountered in divide", "not_a_number", "invalid value encountered in divide"),
        ("2025-11-04 10:14:14 | WARNING | forecast contains NaN for BTCUSD", "not_a_number", "contains NaN"),
        ("WARNING NaN in forecast of BTCUSD", "not_a_number", "NaN in"),
    ],
)
def test_every_wording_of_a_failure_is_its_kind(line: str, kind: str, reason: str) -> None:
    event = only([line])
    assert event.kind == kind
    assert event.reason.startswith(reason)


@pytest.mark.parametrize(
    "line",
    [
        "2025-11-04 10:14:14 | INFO | memory: 3 GB, not out of memory at all",
        "2025-11-04 10:14:14 | INFO | mae=nan NaN=0",
        "    except torch._dynamo.exc.Unsupported as error:",
        "    raise torch._inductor.exc.InductorError(error)",
        "import triton.compiler.errors",
        "loading Triton Error handlers",
        "ValueError: invalid value for horizon",
    ],
)
def test_a_line_that_only_mentions_a_failure_is_no_event(line: str) -> None:
    assert events_of([line]) == []


def test_a_failure_is_told_of_the_innermost_frame_of_the_applications_own_code() -> None:
    event = only([*TRACEBACK, MEMORY])
    assert (event.function, event.file, event.line) == ("forecast", "bot.py", 7)
    assert event.stack == ("bot.py:7 in forecast", "torch/nn/modules/module.py:1773 in _call_impl")
    assert event.severity is Severity.ERROR


def test_a_traceback_of_something_else_is_no_event_and_lends_no_frames() -> None:
    assert events_of([*TRACEBACK, "ValueError: no such symbol"]) == []
    event = only([*TRACEBACK, "ValueError: no such symbol", "INFO going on", MEMORY])
    assert (event.function, event.stack) == ("", ())


def test_a_chain_of_tracebacks_is_one_failure_with_its_first_cause() -> None:
    cause = "triton.compiler.errors.CompilationError: at 2:16:"
    outer = "torch._dynamo.exc.BackendCompilerFailed: backend='inductor' raised:"
    direct = "The above exception was the direct cause of the following exception:"
    event = only([*TRACEBACK, cause, "", direct, "", *TRACEBACK, outer, "CompilationError: at 2:16:", "INFO going on"])
    assert (event.kind, event.reason) == (EventKind.TRITON_ERROR, "CompilationError: at 2:16:")


def test_a_second_failure_right_after_the_first_is_a_second_event() -> None:
    first, second = events_of([*TRACEBACK, MEMORY, *TRACEBACK, OVERWRITTEN])
    assert (first.kind, second.kind) == (EventKind.OUT_OF_MEMORY, EventKind.CUDAGRAPH_OVERWRITTEN)
    assert (first.function, second.function) == ("forecast", "decode")


def test_what_a_backend_raised_is_taken_from_the_next_line() -> None:
    event = only(["torch._dynamo.exc.BackendCompilerFailed: backend='inductor' raised:", "PTXASError: sm_120"])
    assert event.kind is EventKind.TRITON_ERROR
    assert event.reason == "BackendCompilerFailed: backend='inductor' raised: PTXASError: sm_120"


def test_tracebacks_of_two_services_do_not_mix() -> None:
    one = [f"bot-1  | {line}" for line in (*TRACEBACK, MEMORY)]
    two = [f"bot-2  | {line.replace('forecast', 'score')}" for line in (*TRACEBACK, OVERWRITTEN.partition("File")[0])]
    woven = [line for pair in zip(one, two, strict=True) for line in pair]
    found = {event.kind: event.function for event in events_of(woven)}
    assert found == {EventKind.OUT_OF_MEMORY: "forecast", EventKind.CUDAGRAPH_OVERWRITTEN: "score"}


def test_the_exception_that_a_graph_break_is_logged_with_is_no_failure() -> None:
    events = list(parse_lines((LOGS / "torch-2.5.1.log").open(encoding="utf-8"), "log"))
    assert not [event for event in events if event.kind is EventKind.DYNAMO_ERROR]


@pytest.mark.parametrize("release", ["2.5.1", "2.9.0", "2.13.0", "2.15.0"])
def test_failures_of_real_releases_are_told_with_the_function_that_failed(release: str) -> None:
    with (LOGS / f"failures-{release}.log").open(encoding="utf-8") as log:
        found = [(event.kind.value, event.function) for event in parse_lines(log, "log")]
    # A backend of one's own: up to 2.5 its frame is of the exception before, in a traceback of its own.
    backend = "broken_backend" if release == "2.5.1" else "backend"
    expected = [
        ("backend_error", "broken_compiler"),
        ("dynamo_error", "append"),
        ("backend_error", backend),
        ("not_a_number", "nan_parameters"),
    ]
    # The CPU build of 2.13.0 has no Triton; that of 2.5.1 raises a plain AttributeError for a kernel that is misspelt.
    triton = [("triton_error", "triton_error")] if release in ("2.9.0", "2.15.0") else []
    assert found == expected + triton
