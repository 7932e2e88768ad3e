"""The rules of a replayed CUDA graph, on a CPU: what breaks one of them on a GPU breaks it here, and says so.

A replay runs on the memory of its recording. So, around every graph that is compiled within `Rehearsal`:

- An input that was called static must stay where it was: a replay reads and writes the old place.
- Any other input is copied into memory of the graph's own; one that the graph writes to would lose what it wrote, and
  Inductor runs such a graph without CUDA graphs.
- Outputs come from the same memory every time. When the next step begins they are filled with NaN first: whoever kept
  one without a copy reads that, where a GPU would give it the next step's numbers or raise.
- The host cannot read a value while a graph runs, or choose by one.

Steps are torch's own generations: `torch.compiler.cudagraph_mark_step_begin()`, and where nobody calls that every call
of a compiled function. A graph that runs twice in one generation has outputs for each, as in torch's tree of graphs.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch._dynamo.mutation_guard import GenerationTracker
from torch._inductor.cudagraph_trees import MarkStepBox
from torch.utils._python_dispatch import TorchDispatchMode

from toto_compat.cell.lowering.capture import BoxedRun, CapturedGraph, Compiler, emptied, run_as_it_is


class ReplayError(RuntimeError):
    """Says which rule of a replayed CUDA graph was broken, and by what."""


@dataclass
class Rehearsal:
    """Compiles graphs with another compiler and runs them by a replayed graph's rules."""

    compiler: Compiler = run_as_it_is
    graphs: list["ReplayedGraph"] = field(default_factory=list)
    poisonings: int = 0
    _generation: int = 0
    _calls: int = 0  # within the generation

    def __call__(self, graph: CapturedGraph) -> BoxedRun:
        return self.replayed(graph, self.compiler(graph))

    def replayed(self, graph: CapturedGraph, run: BoxedRun) -> BoxedRun:
        """Run what a graph was compiled to by these rules."""
        replayed = ReplayedGraph(self, graph, run)
        self.graphs.append(replayed)
        return replayed

    def next_call(self) -> int:
        """Give the place of this call in its generation; a new one begins by poisoning the outputs of the last."""
        generation = MarkStepBox.mark_step_counter or GenerationTracker.generation
        if generation != self._generation:
            self._generation, self._calls = generation, 0
            for graph in self.graphs:
                self.poisonings += graph.poison_outputs()
        self._calls += 1
        return self._calls


class ReplayedGraph:
    """One compiled graph, called as its recording would be replayed."""

    def __init__(self, rehearsal: Rehearsal, graph: CapturedGraph, run: BoxedRun) -> None:
        self.calls = 0
        self._rehearsal, self._graph, self._run = rehearsal, graph, run
        self._static = frozenset(graph.static_inputs)
        self._addresses: dict[int, int] = {}
        self._inputs: dict[int, torch.Tensor] = {}
        self._outputs: dict[tuple[int, int], torch.Tensor] = {}
        loose = [position for position in graph.mutated_inputs if position not in self._static]
        if loose:
            names = ", ".join(graph.input_name(position) for position in loose)
            raise ReplayError(f"graph {graph.number} writes to inputs that are not static: {names}")

    def __call__(self, arguments: list[Any]) -> Any:
        place = self._rehearsal.next_call()
        given = [self._taken(position, value) for position, value in enumerate(emptied(arguments))]
        memory = {_storage(value) for value in given if isinstance(value, torch.Tensor)}
        self.calls += 1
        with NoHostReads(self._graph.number):
            outputs = self._run(given)
        return type(outputs)(
            self._kept(place, position, value, memory) if isinstance(value, torch.Tensor) else value
            for position, value in enumerate(outputs)
        )

    def poison_outputs(self) -> int:
        """Overwrite what the last step left; the number of tensors."""
        for buffer in self._outputs.values():
            poison(buffer)
        return len(self._outputs)

    def _taken(self, position: int, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if position in self._static:
            recorded = self._addresses.setdefault(position, value.data_ptr())
            if recorded != value.data_ptr():
                raise ReplayError(
                    f"input {self._graph.input_name(position)} of graph {self._graph.number} is called static and has "
                    "moved: a replay would use its old memory"
                )
            return value
        return self._into(self._inputs, position, value)

    def _kept(self, place: int, position: int, value: torch.Tensor, memory: set[int]) -> torch.Tensor:
        if _storage(value) in memory and value.numel():  # a view of an input, which is the caller's own memory
            return value
        return self._into(self._outputs, (place, position), value)

    def _into(self, buffers: dict[Any, torch.Tensor], key: Any, value: torch.Tensor) -> torch.Tensor:
        """Copy into the memory that this value had the last time; another shape is another recording."""
        buffer = buffers.get(key)
        # no tensor of inference mode: those cannot be poisoned outside of it
        with torch.inference_mode(False), torch.no_grad():
            if buffer is None or (buffer.shape, buffer.stride(), buffer.dtype) != (
                value.shape,
                value.stride(),
                value.dtype,
            ):
                buffer = buffers[key] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
            buffer.copy_(value)
            return buffer.detach()


def _storage(value: torch.Tensor) -> int:
    return value.untyped_storage().data_ptr()


def poison(tensor: torch.Tensor) -> None:
    """Fill with what cannot be taken for a result: NaN, or the largest number where there is none."""
    with torch.inference_mode(False), torch.no_grad():
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(torch.nan)
        elif tensor.dtype is torch.bool:
            tensor.logical_not_()
        else:
            tensor.fill_(torch.iinfo(tensor.dtype).max)


class NoHostReads(TorchDispatchMode):
    """Raises where an operation gives a value of a tensor, or a shape that depends on one, to Python."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if reads_a_value(func, args):
            raise ReplayError(f"graph {self._number} reads a value on the host ({func}): it cannot be captured")
        return func(*args, **(kwargs or {}))


def reads_a_value(operation: Any, arguments: Any) -> bool:
    """Tell by torch's own tags; an index by numbers has its mark for the one by a mask, which does depend on values."""
    tags = set(operation.tags)
    if operation is torch.ops.aten.index.Tensor:
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in arguments[1])
    return bool(tags & {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
