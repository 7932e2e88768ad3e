"""Stands where Inductor's inner compiler stands: gets every graph of a real run with what is known about its inputs."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol
from unittest import mock

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch._dynamo.backends.cudagraphs import find_input_mutations
from torch._inductor import compile_fx as inductor

BoxedRun = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class CapturedGraph:
    """ATen as Inductor gets it, with its example inputs and Inductor's own options, on the device of the real run."""

    number: int  # in the order in which they came
    module: torch.fx.GraphModule
    inputs: tuple[Any, ...]  # fake tensors and numbers
    options: dict[str, Any]

    @property
    def static_inputs(self) -> tuple[int, ...]:
        """Positions of inputs that keep their memory; up to torch 2.3 these were the first `num_fixed`."""
        static = self.options.get("static_input_idxs")
        return tuple(static) if static is not None else tuple(range(self.options.get("num_fixed", 0)))

    @property
    def mutated_inputs(self) -> tuple[int, ...]:
        return tuple(sorted(find_input_mutations(self.module.graph)))

    def input_name(self, position: int) -> str:
        """The name that the graph has for an input, and the line that made it one where torch knows."""
        nodes = [node for node in self.module.graph.nodes if node.op == "placeholder"]
        return str(nodes[position].target)


class Compiler(Protocol):
    """Takes a graph and gives what runs in its place, called with a list that it empties."""

    def __call__(self, graph: CapturedGraph) -> BoxedRun: ...


@contextmanager
def every_graph_goes_to(compiler: Compiler) -> Iterator[None]:
    """Compile what `torch.compile` gives to Inductor by another compiler; mode and options stay those of the caller."""
    numbers = iter(range(1_000_000))
    original = inductor.compile_fx

    def inner_compile(module: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> BoxedRun:
        return boxed(compiler(CapturedGraph(next(numbers), module, tuple(inputs), options)))

    def compile_fx(model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
        # with the mode's options it calls itself once more, the inner compiler then wrapped in them
        if not rest and "inner_compile" not in named:
            named["inner_compile"] = inner_compile
        return original(model, inputs, *rest, **named)

    with caches_off(), mock.patch.object(inductor, "compile_fx", compile_fx):
        yield


def run_as_it_is(graph: CapturedGraph) -> BoxedRun:
    """Run the graph itself, operation by operation."""
    forward = with_regions_called(graph.module).forward
    return lambda arguments: forward(*emptied(arguments))


def with_regions_called(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Copy a graph so that it calls its regions as plain functions: a mode that watches operations sees theirs too."""
    copied = torch.fx.GraphModule(module, copy.deepcopy(module.graph))
    for node in copied.graph.nodes:
        if node.op == "call_function" and is_region_call(node.target):
            node.target = _call_region
    copied.recompile()
    return copied


def is_region_call(target: Any) -> bool:
    """Tell whether a node calls a region of `nested_compile_region` (torch 2.8 and later)."""
    return str(target) == "invoke_subgraph"


def _call_region(region: torch.fx.GraphModule, _identifier: str, *operands: Any) -> Any:
    return region(*operands)


def emptied(arguments: list[Any]) -> list[Any]:
    """Take over the references, as the boxed calling convention wants it."""
    given = list(arguments)
    arguments.clear()
    return given


def boxed(run: BoxedRun) -> BoxedRun:
    """Mark a function of a list as one: a wrapper of its own, since not every callable takes an attribute."""

    def call(arguments: list[Any]) -> Any:
        return run(arguments)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


@contextmanager
def caches_off() -> Iterator[None]:
    """Compile every graph: a hit in one of torch's caches would skip the inner compiler."""
    with ExitStack() as undo:
        off = {"force_disable_caches": True} if hasattr(inductor_config, "force_disable_caches") else {}
        undo.enter_context(inductor_config.patch({"fx_graph_cache": False, **off}))
        if hasattr(functorch_config, "enable_autograd_cache"):
            undo.enter_context(functorch_config.patch({"enable_autograd_cache": False}))
        yield
