"""Operations by step on a real torch: what compiled code took over, and what only looks as if."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from toto_compat.cell.live import CompilerWatch  # noqa: E402
from toto_compat.cell.step_operations import (  # noqa: E402
    Interval,
    StepOperations,
    active_share,
    active_shares,
    count_operations,
    operations_by_step,
)
from toto_compat.contract.torch_releases import config_name  # noqa: E402

pytestmark = pytest.mark.cell


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


class Stepping:
    """Runs one function per step, as a model with an observer does."""

    observer: Callable[[int], AbstractContextManager[None]] | None = None

    def __init__(self, *steps: Callable[[], Any]) -> None:
        self.steps = steps

    def forecast(self) -> None:
        for index, step in enumerate(self.steps):
            assert self.observer is not None
            with self.observer(index):
                step()


def counted(*steps: Callable[[], Any]) -> dict[int, StepOperations]:
    for step in steps:
        step()
    model: Any = Stepping(*steps)
    return count_operations(model, model.forecast)


X = torch.ones(8, 8)


def wave(x: Any) -> Any:
    return torch.neg(torch.sin(x)) + x  # no scalars, which some releases wrap in operations of their own


def test_eager_operations_are_counted_by_step_and_none_is_inside() -> None:
    operations = counted(lambda: wave(X), lambda: (wave(X), wave(X)))
    assert operations == {0: StepOperations(outside=3), 1: StepOperations(outside=6)}


def test_a_compiled_step_leaves_nothing_outside() -> None:
    fast = torch.compile(wave)
    (step,) = counted(lambda: fast(X)).values()
    assert (step.outside, step.compiled_calls) == (0, 1)
    assert active_share(step, StepOperations(outside=3)) == 1.0


def test_a_kernel_that_compiled_code_calls_is_inside() -> None:
    fast = torch.compile(lambda x: torch.mm(x, x))
    (step,) = counted(lambda: fast(X)).values()
    assert step.outside == 0
    assert step.inside > 0


def test_a_compiled_crumb_beside_eager_work_is_a_small_share() -> None:
    crumb = torch.compile(lambda x: x + 1)
    (step,) = counted(lambda: wave(wave(wave(crumb(X))))).values()
    assert step == StepOperations(outside=9, compiled_calls=1)
    assert active_share(step, StepOperations(outside=10)) == pytest.approx(0.1)


def test_a_backend_that_only_wraps_eager_code_is_outside() -> None:
    wrapped = torch.compile(wave, backend="eager")
    (step,) = counted(lambda: wrapped(X)).values()
    assert step == StepOperations(outside=3)


def test_a_function_past_its_limit_is_outside() -> None:
    fast = torch.compile(lambda x, mode: x + len(mode))
    limit = config_name("recompile_limit", torch.__version__)
    with CompilerWatch(), torch._dynamo.config.patch({limit: 1}):
        operations = counted(lambda: fast(X, "a"), lambda: fast(X, "bc"))
    assert [step.compiled_calls for step in operations.values()] == [1, 0]
    assert operations[1].outside > 0


def test_an_operator_of_ones_own_in_a_compiled_graph_hides_nothing() -> None:
    def run_eager(x: torch.Tensor) -> torch.Tensor:
        return wave(x)

    opaque = torch.library.custom_op("toto_compat_tests::opaque", run_eager, mutates_args=())
    opaque.register_fake(torch.empty_like)
    fast = torch.compile(lambda x: opaque(x) + 1)
    (step,) = counted(lambda: fast(X)).values()
    assert step.compiled_calls == 1
    assert step.outside >= 3


def test_counting_compiles_nothing_anew() -> None:
    fast = torch.compile(wave)
    with CompilerWatch("warm-up") as watch:
        fast(X)
        watch.mark("measured")
        counted(lambda: fast(X))
        fast(X)
    assert watch.phase("measured").compile_starts == []


def test_work_between_the_steps_belongs_to_the_step_before_and_work_before_them_to_the_first() -> None:
    events = [
        Interval("aten::add", 0, 1),
        Interval("toto_compat step 0", 2, 4),
        Interval("aten::mul", 5, 6),
        Interval("toto_compat step 1", 7, 9),
        Interval("aten::cat", 7, 8, thread=2),
        Interval("aten::sin", 10, 11),
        Interval("TorchDynamo Cache Lookup", 10, 11),
    ]
    assert operations_by_step(events) == {0: StepOperations(outside=2), 1: StepOperations(outside=2)}


def test_work_of_another_thread_beside_a_compiled_graph_is_outside() -> None:
    events = [
        Interval("toto_compat step 0", 0, 9),
        Interval("toto_compat compiled graph", 1, 8, thread=1),
        Interval("aten::mm", 2, 3, thread=1),
        Interval("aten::mm", 2, 3, thread=2),
    ]
    assert operations_by_step(events) == {0: StepOperations(outside=1, inside=1, compiled_calls=1)}


def test_a_step_without_any_compiled_call_has_no_share_however_few_its_operations() -> None:
    assert active_share(StepOperations(outside=0), StepOperations(outside=100)) == 0.0


def test_the_shortest_eager_step_is_the_measure() -> None:
    compiled = StepOperations(outside=20, compiled_calls=1)
    assert active_share(compiled, StepOperations(outside=1000), StepOperations(outside=40)) == 0.5


def test_a_step_that_the_compiled_forecast_does_not_show_counts_nothing() -> None:
    eager = {0: StepOperations(outside=10), 1: StepOperations(outside=10)}
    assert active_shares({0: StepOperations(outside=1, compiled_calls=1)}, eager) == {0: 0.9, 1: 0.0}


def test_a_forecast_that_shows_no_step_has_no_shares() -> None:
    assert active_shares({}, {0: StepOperations(outside=10)}) == {}


def test_what_compiled_graphs_take_a_crumb_of_was_done_by_somebody_else() -> None:
    eager = {0: StepOperations(outside=10), 1: StepOperations(outside=10)}
    crumb = StepOperations(outside=1, compiled_calls=1, microseconds=1000.0, compiled_microseconds=10.0)
    step = StepOperations(outside=1, compiled_calls=1, microseconds=1000.0, compiled_microseconds=700.0)
    assert active_shares({0: crumb, 1: crumb}, eager) == {0: 0.9, 1: 0.0}
    assert active_shares({0: crumb, 1: step}, eager) == {0: 0.9, 1: 0.9}


def test_one_step_that_the_machine_held_up_is_no_crumb() -> None:
    eager = {step: StepOperations(outside=10) for step in (1, 2)}
    held_up = StepOperations(outside=1, compiled_calls=1, microseconds=90_000.0, compiled_microseconds=300.0)
    step = StepOperations(outside=1, compiled_calls=1, microseconds=1000.0, compiled_microseconds=700.0)
    assert active_shares({1: held_up, 2: step}, eager) == {1: 0.9, 2: 0.9}


def test_work_that_calls_no_operator_leaves_a_crumb_of_the_time_to_compiled_code() -> None:
    values = X.numpy()
    crumb = torch.compile(lambda x: x + 1)

    def step() -> None:
        crumb(X)
        sum(float(value) for _ in range(400) for value in values.flat)  # as an extension would: no operator of torch

    operations = counted(step, step)
    eager = {number: StepOperations(outside=10) for number in (0, 1)}
    assert active_shares(operations, eager)[1] == 0.0


def test_an_operator_that_was_defined_in_a_namespace_of_torchs_own_hides_nothing() -> None:
    counted(lambda: wave(X))  # as upstream's are, before anybody's file is imported
    with torch.library._scoped_library("inductor", "FRAGMENT") as library:
        library.define("toto_compat_tests_step(Tensor x) -> Tensor")
        library.impl("toto_compat_tests_step", lambda x: wave(wave(x)), "CPU")
        library.impl("toto_compat_tests_step", torch.empty_like, "Meta")
        fast = torch.compile(lambda x: torch.ops.inductor.toto_compat_tests_step(x) + 1)
        (step,) = counted(lambda: fast(X)).values()
    assert step.compiled_calls == 1
    assert step.outside >= 6


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_an_operator_of_torchs_own_that_was_given_another_kernel_hides_nothing() -> None:
    counted(lambda: wave(X))
    with torch.library._scoped_library("aten", "IMPL") as library:
        # what Inductor's own code calls of it
        library.impl("mm.out", lambda x, _, *, out: out.copy_(wave(wave(x))), "CPU")
        fast = torch.compile(lambda x: torch.mm(x, x))
        (step,) = counted(lambda: fast(X)).values()
    assert step.compiled_calls == 1
    assert step.outside >= 6
