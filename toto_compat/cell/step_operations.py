"""How much of each step of a forecast runs in compiled code: operations counted with torch's profiler, not timed.

An operation is one call through torch's dispatcher, those that another one makes included: whatever way eager code is
wrapped (a custom operator, a traced module, a backend that compiles nothing), its kernels are reached through there.
They are not weighed. What compile takes away from a step of this size is the overhead of each call, so that a small
operation left outside costs about what a large one does.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
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
# Of a step's time in a profile that must lie in compiled graphs. They take 0.65 and more of fixed_size's on `tiny`,
# 0.24 of one with two layers; of an addition beside a step they take 0.01. This project's choice.
LEAST_TIME_COMPILED = 0.05
# What Inductor's own code calls. Anyone else's operator in a graph is opaque to Inductor and runs as it would eager.
_TORCH_OPERATORS = ("aten", "prim", "prims", "mkl", "mkldnn", "onednn", "inductor", "_c10d_functional", "quantized")


@dataclass(frozen=True)
class StepOperations:
    """Counts the operations of one step."""

    outside: int = 0  # of compiled graphs
    inside: int = 0  # kernels that a compiled graph calls instead of having them fused
    compiled_calls: int = 0
    # of the profile, which slows all down: good for telling a crumb from a step, and for nothing finer
    microseconds: float = field(default=0.0, compare=False)
    compiled_microseconds: float = field(default=0.0, compare=False)

    @property
    def is_a_crumb(self) -> bool:
        """Say whether compiled graphs took so little of the step that something else must have done its work."""
        return self.compiled_microseconds < LEAST_TIME_COMPILED * self.microseconds


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
    remember_operators()
    with (
        compiled_graphs_marked(),
        profile(activities=[ProfilerActivity.CPU], experimental_config=_of_every_thread()) as profiled,
    ):
        forecast()
    events = [
        Interval(event.name, event.time_range.start, event.time_range.end, event.thread)
        for event in profiled.events() or ()
        if event.device_type == torch.autograd.DeviceType.CPU
    ]
    return operations_by_step(events, opaque=touched_operators({event.name for event in events}))


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


_operators: dict[str, str] = {}  # as they were when this process first counted: a candidate comes after upstream


def remember_operators() -> None:
    """Note once what every operator runs, before anybody's file could define or override one."""
    if not _operators:
        _operators.update({name: _kernels_of(name) for name in torch._C._dispatch_get_all_op_names()})


def touched_operators(names: Iterable[str]) -> frozenset[str]:
    """Name those of torch's namespaces that were defined or given another kernel since: they may run anything."""
    overloads: dict[str, list[str]] = {}
    for name in torch._C._dispatch_get_all_op_names():
        overloads.setdefault(name.partition(".")[0], []).append(name)
    return frozenset(
        name
        for name in names
        if _is_operator(name)
        and any(_operators.get(overload) != _kernels_of(overload) for overload in overloads.get(name, ()))
    )


def _kernels_of(operator: str) -> str:
    """What torch's dispatcher says of it; not what tracing runs, which torch itself registers when it first traces."""
    lines = torch._C._dispatch_dump(operator).splitlines()
    return "\n".join(line for line in lines if not line.startswith("Meta"))


def operations_by_step(
    events: Iterable[Interval], *, opaque: frozenset[str] = frozenset()
) -> dict[int, StepOperations]:
    """Count the operations of a profile by step; what an `opaque` operator calls is not the compiler's.

    A step lasts until the next one begins, the first one from the beginning on: the model itself says when its steps
    begin, and nothing that it does in between may be left out.
    """
    # of two that begin together the longer one is around the other
    in_order = sorted(events, key=lambda event: (event.start, -event.end))
    steps = [(event.start, int(event.name.removeprefix(_STEP))) for event in in_order if event.name.startswith(_STEP)]
    starts = [start for start, _ in steps]
    counted: dict[int, Counter[str]] = {step: Counter() for _, step in steps}
    compiled_time: Counter[int] = Counter()
    around: dict[int, list[Interval]] = {}  # per thread
    for event in in_order if steps else ():
        outer = around.setdefault(event.thread, [])
        while outer and outer[-1].end <= event.start:
            outer.pop()
        _, step = steps[max(0, bisect_right(starts, event.start) - 1)]
        if event.name == _COMPILED:
            counted[step]["compiled_calls"] += 1
            if all(one.name != _COMPILED for one in outer):
                compiled_time[step] += event.end - event.start  # type: ignore[assignment] # a Counter of floats
        elif _is_operator(event.name):
            counted[step]["inside" if _is_inside(outer, opaque) else "outside"] += 1
        if event.name == _COMPILED or _is_operator(event.name):
            outer.append(event)
    lengths = _lengths(steps, max((event.end for event in in_order), default=0.0))
    return {
        step: StepOperations(**counts, microseconds=lengths[step], compiled_microseconds=float(compiled_time[step]))
        for step, counts in counted.items()
    }


def _lengths(steps: Sequence[tuple[float, int]], end: float) -> dict[int, float]:
    """How long each step lasted, summed if it was taken more than once."""
    lengths: dict[int, float] = {}
    for number, (start, step) in enumerate(steps):
        next_start = steps[number + 1][0] if number + 1 < len(steps) else end
        lengths[step] = lengths.get(step, 0.0) + next_start - start
    return lengths


def _is_operator(name: str) -> bool:
    namespace, colons, operator = name.partition("::")
    return bool(colons and operator) and namespace.isidentifier()


def _is_inside(outer: list[Interval], opaque: frozenset[str]) -> bool:
    """Tell whether a compiled graph is around it, and nothing in between that the compiler does not look into."""
    for event in reversed(outer):
        if event.name == _COMPILED:
            return True
        if event.name.partition("::")[0] not in _TORCH_OPERATORS or event.name in opaque:
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

    So do all decode steps where compiled graphs took a crumb of the time in every one of them, which no machine's
    hiccup explains: code that calls no operator, an extension's for one, is in no profile, and must have done the rest.
    Empty if it shows no step at all: then the model calls no observer, and nothing is known.
    """
    if not compiled:
        return {}
    steps = sorted(set.intersection(*(set(one) for one in eager)))
    shares = {step: active_share(compiled.get(step, StepOperations()), *(one[step] for one in eager)) for step in steps}
    decode = [operations for step, operations in compiled.items() if step > 0]
    if decode and all(operations.is_a_crumb for operations in decode):
        shares |= dict.fromkeys((step for step in steps if step > 0), 0.0)
    return shares
