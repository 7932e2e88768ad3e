"""The watch on a real torch: known recompiles, graph breaks and limit hits, counted right on every release from 2.4."""

import logging
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from torch._dynamo.utils import counters  # noqa: E402
from torch._logging._internal import log_state  # noqa: E402

from toto_compat.cell.live import WITHOUT_DYNAMO, CompilerWatch  # noqa: E402
from toto_compat.contract.bucket_messages import BUCKET_LOGGER, compiling_bucket  # noqa: E402
from toto_compat.contract.events import EventKind  # noqa: E402
from toto_compat.contract.torch_releases import config_name  # noqa: E402

pytestmark = pytest.mark.cell

LIMIT_NAME = config_name("recompile_limit", torch.__version__)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def mode_dependent(x: Any, mode: str) -> Any:
    return x + len(mode)


def plain_step(x: Any) -> Any:
    return x * 2 + 1


def with_breaks(x: Any) -> Any:
    y = x + 1
    torch._dynamo.graph_break()
    z = y * 2
    if z.sum().item() > 3:
        return z + 1
    return z


def branching(x: Any) -> Any:
    y = x + 1
    if y.sum() > 3:
        return y * 2
    return y - 1


def branching_in_a_loop(x: Any) -> Any:
    for _ in range(2):
        if x.sum() > 3:
            x = x * 2
    return x


def breaking_where_it_cannot_resume(x: Any) -> Any:
    y = x + 1
    y = y * 2
    try:
        torch._dynamo.graph_break()
        y = y + 3
    except ValueError:
        pass
    return y


class Watchful:
    def __setattr__(self, name: str, value: Any) -> None:
        torch._dynamo.graph_break()
        object.__setattr__(self, name, value)


def storing(x: Any, watchful: Watchful) -> Any:
    y = x + 1
    watchful.seen = y
    return y * 2


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    return torch.compile(function, backend="eager", **options)


def compile_mode_dependent(times: int) -> None:
    # a string is never made dynamic: each new one is exactly one compilation, on every release
    run = compiled(mode_dependent)
    for number in range(times):
        run(torch.ones(2), f"mode{number}")


def test_each_new_constant_is_one_recompile_and_one_compile_start() -> None:
    with CompilerWatch() as watch:
        compile_mode_dependent(4)
    recompiles = watch.total.of_kind(EventKind.RECOMPILE)
    assert len(recompiles) == 3
    assert len(watch.compile_starts) == 4
    assert watch.graphs == 4
    assert {(event.function, event.file) for event in recompiles} == {("mode_dependent", "test_live.py")}
    assert all("mode" in event.reason and event.source == "live" for event in recompiles)
    assert [event.compile_id for event in recompiles] == [start.compile_id for start in watch.compile_starts[1:]]
    assert len({event.normalised_reason for event in recompiles}) <= 3


def test_a_call_with_what_was_compiled_before_counts_nothing() -> None:
    run = compiled(mode_dependent)
    with CompilerWatch("warm-up") as watch:
        run(torch.ones(2), "a")
        run(torch.ones(2), "bc")
        measured = watch.mark("measured")
        run(torch.ones(2), "a")
        run(torch.ones(2), "bc")
    assert (measured.events, measured.compile_starts, measured.graphs) == ([], [], 0)
    assert len(watch.phase("warm-up").compile_starts) == 2


def test_the_limit_is_one_event_with_function_reason_and_limit() -> None:
    with CompilerWatch() as watch, torch._dynamo.config.patch({LIMIT_NAME: 3}):
        compile_mode_dependent(6)
    (limit,) = watch.total.of_kind(EventKind.RECOMPILE_LIMIT)
    assert (limit.function, limit.file, limit.limit, limit.limit_name) == (
        "mode_dependent",
        "test_live.py",
        3,
        LIMIT_NAME,
    )
    assert "mode" in limit.reason
    assert watch.graphs == 3
    # the attempt that was refused is a recompile in torch's log and a compilation started here
    assert watch.total.count(EventKind.RECOMPILE) == 3
    assert len(watch.compile_starts) == 4


def test_a_fresh_code_object_per_step_shows_although_the_recompile_log_is_silent() -> None:
    with CompilerWatch("warm-up") as watch:
        watch.mark("measured")
        for _ in range(4):
            compiled(FunctionType(plain_step.__code__.replace(), globals()))(torch.ones(3))
    measured = watch.phase("measured")
    assert measured.count(EventKind.RECOMPILE) == 0
    assert len(measured.compile_starts) == 4
    assert {start.function for start in measured.compile_starts} == {"plain_step"}


def test_every_graph_break_is_an_event_also_where_the_same_place_broke_before() -> None:
    run = compiled(with_breaks)
    with CompilerWatch() as watch:
        for shape in ((3,), (3, 3), (3, 3, 3)):
            run(torch.ones(shape))
    breaks = watch.total.of_kind(EventKind.GRAPH_BREAK)
    assert (
        len(breaks)
        == 6
        == sum(value for name, value in watch.total.counters.items() if name.startswith("graph_break."))
    )
    assert len({event.line for event in breaks}) == 2
    assert all(event.file == "test_live.py" and event.reason and event.stack for event in breaks)
    assert any("item" in event.reason for event in breaks)


@pytest.mark.parametrize(
    ("function", "others"),
    [(branching, ()), (branching_in_a_loop, ()), (breaking_where_it_cannot_resume, ()), (storing, (Watchful(),))],
)
def test_a_graph_break_is_one_event_also_where_torchs_log_leaves_it_out(
    function: Callable[..., Any], others: tuple[Any, ...]
) -> None:
    with CompilerWatch() as watch:
        compiled(function)(torch.ones(5), *others)
    (event,) = watch.total.of_kind(EventKind.GRAPH_BREAK)
    assert (event.file, event.source) == ("test_live.py", "live")
    assert event.function and event.line and event.reason and event.stack
    assert event.compile_id.partition("_")[0] == watch.compile_starts[0].compile_id


def test_recompiles_agree_with_torchs_own_log() -> None:
    counted: list[str] = []

    class Counting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            counted.append(record.getMessage())

    logger = logging.getLogger("torch._dynamo.guards.__recompiles")
    handler = Counting()
    with CompilerWatch() as watch:
        logger.addHandler(handler)
        try:
            compile_mode_dependent(5)
        finally:
            logger.removeHandler(handler)
    assert watch.total.count(EventKind.RECOMPILE) == len(counted) == 4


def test_the_watch_prints_nothing_and_puts_logging_back(capfd: pytest.CaptureFixture[str]) -> None:
    names = ("torch._dynamo.guards.__recompiles", "torch._dynamo.symbolic_convert.__graph_breaks", "torch._dynamo")
    loggers = [logging.getLogger(name) for name in names]

    def state() -> list[Any]:
        return [(logger.level, logger.propagate, list(logger.handlers)) for logger in loggers] + [
            sorted(log_state.artifact_names)
        ]

    before = state()
    with CompilerWatch():
        compile_mode_dependent(3)
    assert state() == before
    assert "Recompiling" not in "".join(capfd.readouterr())
    with CompilerWatch() as silent:
        pass
    compile_mode_dependent(9)
    assert (silent.events, silent.compile_starts) == ([], [])


def test_what_was_already_logged_is_still_logged_and_counted_once(capfd: pytest.CaptureFixture[str]) -> None:
    torch._logging.set_logs(recompiles=True)
    try:
        with CompilerWatch() as watch:
            compile_mode_dependent(3)
    finally:
        torch._logging.set_logs()
        log_state.artifact_names.discard("recompiles")
        torch._logging._internal._init_logs()
    assert watch.total.count(EventKind.RECOMPILE) == 2
    assert "".join(capfd.readouterr()).count("Recompiling function") == 2


def test_an_exception_inside_the_watch_leaves_nothing_behind() -> None:
    original = torch._dynamo.convert_frame._compile
    with pytest.raises(ZeroDivisionError), CompilerWatch():
        raise ZeroDivisionError
    assert torch._dynamo.convert_frame._compile is original


def test_a_watch_within_a_watch_sees_the_same() -> None:
    with CompilerWatch() as outer, CompilerWatch() as inner:
        compile_mode_dependent(3)
    assert inner.total.count(EventKind.RECOMPILE) == outer.total.count(EventKind.RECOMPILE) == 2
    assert len(inner.compile_starts) == len(outer.compile_starts) == 3


def test_counters_cleared_in_between_do_not_make_graphs_negative() -> None:
    with CompilerWatch() as watch:
        compile_mode_dependent(2)
        assert watch.graphs == 2
        counters.clear()
        torch._dynamo.reset()
        compile_mode_dependent(1)
    assert watch.graphs == 3


def test_a_skipped_cudagraph_is_an_event_with_its_reason_and_count() -> None:
    from torch._inductor.cudagraph_utils import log_cudagraph_skip_and_bump_counter

    with CompilerWatch() as watch:
        log_cudagraph_skip_and_bump_counter("skipping cudagraphs due to mutated inputs (8 instances)")
    (skip,) = watch.total.of_kind(EventKind.CUDAGRAPH_SKIP)
    assert (skip.reason, skip.count, watch.total.cudagraph_skips) == ("mutated inputs (8 instances)", 8, 1)


def test_what_fixed_size_says_about_its_buckets_is_an_event_and_not_printed(capfd: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger(BUCKET_LOGGER)
    before = (logger.level, logger.propagate, list(logger.handlers))
    with CompilerWatch() as watch:
        logger.info(compiling_bucket("decode step for batch 16, variates 1, capacity 80", 3, 16, announced=True))
        logger.warning(compiling_bucket("decode step for batch 3, variates 1, capacity 80", 4, 16, announced=False))
    assert [event.reason for event in watch.total.of_kind(EventKind.BUCKET_COMPILE)] == [
        "batch 16, variates 1, capacity 80",
        "batch 3, variates 1, capacity 80, not announced",
    ]
    assert (logger.level, logger.propagate, list(logger.handlers)) == before
    assert "decode step" not in "".join(capfd.readouterr())


def test_a_graph_that_is_compiled_without_dynamo_is_counted_where_it_was_handed_over() -> None:
    from torch._inductor.compile_fx import compile_fx_inner
    from torch.fx.experimental.proxy_tensor import make_fx

    def wave(x: Any) -> Any:
        return (torch.sin(x) + x,)

    x = torch.ones(4)
    with torch.no_grad(), CompilerWatch() as watch:
        for _ in range(2):
            compile_fx_inner(make_fx(wave, tracing_mode="fake")(x), [x])
    starts = watch.compile_starts
    assert [start.compile_id for start in starts] == [WITHOUT_DYNAMO] * 2
    assert {start.file.rpartition("/")[2] for start in starts} == {"test_live.py"}
    assert len({start.line for start in starts}) == 1


def test_what_dynamo_hands_to_inductor_is_counted_once() -> None:
    torch._dynamo.reset()
    with CompilerWatch() as watch:
        torch.compile(lambda x: torch.cos(x) + 3)(torch.ones(4))
    assert len(watch.compile_starts) == 1
