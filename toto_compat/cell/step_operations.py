"""How much of each step of a forecast runs in compiled code: operations counted with torch's profiler, not timed.

An operation is one call through torch's dispatcher, those that another one makes included: whatever way eager code is
wrapped (a custom operator, a traced module, a backend that compiles nothing), its kernels are reached through there.
They are not weighed. What compile takes away from a step of this size is the overhead of each call, so that a small
operation left outside costs about what a large one does.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

try:
    from torch._inductor.output_code import CompiledFxGraph
except ImportError:  # torch 2.4 and 2.5
    from torch._inductor.codecache import CompiledFxGraph

from toto_compat.model.bound import BoundModel, observed

_STEP, _COMPILED = "toto_compat step ", "toto_compat compiled graph"
# What Inductor's own code calls. Anyone else's operator in a graph is opaque to Inductor and runs as it would eager.
_TORCH_OPERATORS = ("aten", "prim", "prims", "mkl", "mkldnn", "onednn", "inductor", "_c10d_functional", "quantized")


@dataclass(frozen=True)
class StepOperations:
    """Counts the operations of one step."""

    outside: int = 0  # of compiled graphs
    inside: int = 0  # kernels that a compiled graph calls instead of having them fused
    compiled_calls: int = 0


@dataclass(frozen=True)
class Interval:
    """One event of a profile. Times in any unit."""

    name: str
    start: float
    end: float
    thread: int = 0


def count_operations(model: BoundModel, forecast: Callable[[], Any]) -> dict[int, StepOperations]:
    """Take a forecast under the profiler and count by step. Call it once before, so that nothing is met first here."""

    @contextmanager
    def marked(step: int) -> Iterator[None]:
        with record_function(f"{_STEP}{step}"):
            yield

    with observed(model, marked):
        return _profiled(forecast)


def count_unobserved(forecast: Callable[[], Any]) -> StepOperations:
    """Take a forecast as anybody does, without an observer, and count its operations in one."""

    def as_one_step() -> None:
        with record_function(f"{_STEP}0"):
            forecast()

    return _profiled(as_one_step)[0]


def _profiled(forecast: Callable[[], Any]) -> dict[int, StepOperations]:
    with (
        compiled_graphs_marked(),
        profile(activities=[ProfilerActivity.CPU], experimental_config=_of_every_thread()) as profiled,
    ):
        forecast()
    return operations_by_step(
        Interval(event.name, event.time_range.start, event.time_range.end, event.thread)
        for event in profiled.events() or ()
        if event.device_type == torch.autograd.DeviceType.CPU
    )


def _of_every_thread() -> Any:
    """What a worker thread does counts too; releases that cannot look there see the calling thread alone."""
    try:
        return torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    except TypeError:
        return None


@contextmanager
def compiled_graphs_marked() -> Iterator[None]:
    """Mark in a profile where a graph that Inductor compiled is entered, on all releases; a graph that is only wrapped,
    or that dynamo gave up on, is not. Torch's own marks come with 2.6 and differ from release to release."""
    original = CompiledFxGraph.__call__

    def call_marked(self: Any, *args: Any, **kwargs: Any) -> Any:
        with record_function(_COMPILED):
            return original(self, *args, **kwargs)

    CompiledFxGraph.__call__ = call_marked
    try:
        yield
    finally:
        CompiledFxGraph.__call__ = original


def operations_by_step(events: Iterable[Interval]) -> dict[int, StepOperations]:
    """Count the operations of a profile by step.

    A step lasts until the next one begins, the first one from the beginning on: the model itself says when its steps
    begin, and nothing that it does in between may be left out.
    """
    # of two that begin together the longer one is around the other
    in_order = sorted(events, key=lambda event: (event.start, -event.end))
    steps = [(event.start, int(event.name.removeprefix(_STEP))) for event in in_order if event.name.startswith(_STEP)]
    starts = [start for start, _ in steps]
    counted: dict[int, Counter[str]] = {step: Counter() for _, step in steps}
    around: dict[int, list[Interval]] = {}  # per thread
    for event in in_order if steps else ():
        outer = around.setdefault(event.thread, [])
        while outer and outer[-1].end <= event.start:
            outer.pop()
        _, step = steps[max(0, bisect_right(starts, event.start) - 1)]
        if event.name == _COMPILED:
            counted[step]["compiled_calls"] += 1
        elif _is_operator(event.name):
            counted[step]["inside" if _is_inside(outer) else "outside"] += 1
        if event.name == _COMPILED or _is_operator(event.name):
            outer.append(event)
    return {step: StepOperations(**counts) for step, counts in counted.items()}


def _is_operator(name: str) -> bool:
    namespace, colons, operator = name.partition("::")
    return bool(colons and operator) and namespace.isidentifier()


def _is_inside(outer: list[Interval]) -> bool:
    """Tell whether a compiled graph is around it, and nothing in between that the compiler does not look into."""
    for event in reversed(outer):
        if event.name == _COMPILED:
            return True
        if event.name.partition("::")[0] not in _TORCH_OPERATORS:
            return False
    return False


def active_share(compiled: StepOperations, *eager: StepOperations) -> float:
    """The share of an eager step's operations that compiled code took over; of several eager ones the shortest counts.

    0 where no compiled graph was called: a step without operations may as well be one that was looked up.
    """
    shortest = min(step.outside for step in eager)
    if not compiled.compiled_calls or not shortest:
        return 0.0
    return max(0.0, 1.0 - compiled.outside / shortest)


def active_shares(compiled: Mapping[int, StepOperations], *eager: Mapping[int, StepOperations]) -> dict[int, float]:
    """The same for every step of the eager forecasts; one that the compiled forecast leaves out counts 0.

    Empty if it shows no step at all: then the model calls no observer, and nothing is known.
    """
    if not compiled:
        return {}
    steps = sorted(set.intersection(*(set(one) for one in eager)))
    return {step: active_share(compiled.get(step, StepOperations()), *(one[step] for one in eager)) for step in steps}
