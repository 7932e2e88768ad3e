"""The code that Inductor made for CUDA, run without a GPU: each Triton kernel in Triton's interpreter, one after the
other, and what is left to libraries (matrix products, attention) by the CPU's own.

The interpreter is chosen when triton is imported: this needs a process with TRITON_INTERPRET=1. Blocks are Inductor's
own for the described GPU, enlarged where many programs would do the same: the code and its masks hold for any block. It
says whether the code is right, not whether it is fast or can be captured: programs run one by one, so no race shows,
and arithmetic is numpy's.
"""

import importlib.util
import inspect
import math
import os
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from toto_compat.cell.lowering.capture import BoxedRun, CapturedGraph, emptied, run_as_it_is
from toto_compat.cell.lowering.described_gpu import DescribedGpu, described
from toto_compat.cell.lowering.lower import LoweredGraph, lower
from toto_compat.cell.lowering.source_lines import SourceLine
from toto_compat.cell.trial import all_behind, telling_line

INTERPRET = "TRITON_INTERPRET"
# A program takes the interpreter milliseconds however many elements it has: few large ones take seconds where many
# small ones took minutes. Eight along each axis: a wrong offset between programs still shows.
_MOST_PROGRAMS = 8
_MOST_ELEMENTS = 2**17  # of a program; Triton allows 2**20


class InterpreterGapError(Exception):
    """Names what the interpreter, or a library on the CPU, does not have: no word about the code."""


@dataclass
class Interpreter:
    """A compiler of graphs that runs what Inductor makes of them for CUDA."""

    gpu: DescribedGpu
    strays: Collection[SourceLine] = ()
    alter: Callable[[str], str] = str  # the code before it runs: what a sabotage changes
    reports: list[LoweredGraph] = field(default_factory=list)
    launches: int = 0  # of kernels
    _folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="interpreted-")))
    _files: Iterator[int] = field(default_factory=count)

    def __call__(self, graph: CapturedGraph) -> BoxedRun:
        """Lower a graph and give its code to run; the graph itself where that cannot be had or be loaded."""
        if os.environ.get(INTERPRET) != "1":
            raise RuntimeError(f"{INTERPRET}=1 must be set before triton is imported")
        lowered = lower(graph, self.gpu, strays=self.strays, assemble=False)
        self.reports.append(lowered.report)
        if lowered.report.error or lowered.graph is None:
            return run_as_it_is(graph)
        try:
            with described(self.gpu), self._kernels_interpreted():
                wrapper = self._module(self.alter(lowered.source))
        except Exception as error:  # such as a kernel in C++, of a value that was left on the CPU
            lowered.report.error = f"cannot be interpreted: {telling_line(error)}"
            return run_as_it_is(graph)
        constants = list(lowered.graph.constants)

        def run(arguments: list[Any]) -> Any:
            given = [*emptied(arguments), *constants]
            on_the_cpu = _no_device(), _combining_whole_blocks(), _OnCpu(), _LibrariesOnCpu()
            with ExitStack() as undo, _naming_what_lacks("a library call"):
                for one in on_the_cpu:
                    undo.enter_context(one)
                return wrapper.call(given)

        return run

    def _module(self, source: str) -> ModuleType:
        """Import code from a file: the interpreter reads the source of a kernel again."""
        path = self._folder / f"interpreted_{next(self._files)}.py"
        path.write_text(source, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
        return module

    @contextmanager
    def _kernels_interpreted(self) -> Iterator[None]:
        """Stand where Inductor would compile kernels, ask for a stream and allocate."""
        # imported here: torch 2.3 has neither
        from torch._inductor import async_compile
        from torch._inductor.runtime import triton_helpers, triton_heuristics

        compiler = _kernel_compiler(self._module)
        guards = torch._C._dynamo.guards
        with ExitStack() as undo:
            for owner, name, value in (
                (async_compile, "AsyncCompile", compiler),
                (triton_heuristics, "cached_autotune", self._launched_by),
                (triton_helpers, "set_driver_to_gpu", lambda: None),
                (triton_helpers, "libdevice", Libdevice()),
                (torch._C, "_cuda_getCurrentRawStream", lambda _device: 0),
                (guards, "_empty_strided_cuda", _empty_strided),
            ):
                undo.enter_context(mock.patch.object(owner, name, value, create=True))
            yield

    def _launched_by(self, _size_hints: Any, configs: Sequence[Any], *_: Any, **named: Any) -> Callable[[Any], Any]:
        """Stand in for Inductor's autotuner: the largest of the configurations it would try, its own grid."""
        # imported here: torch 2.3 lacks it
        from torch._inductor.runtime.triton_heuristics import GridExpr

        inductor_meta = named["inductor_meta"]
        config = max(configs, key=lambda one: sum(one.kwargs.values()))

        def launcher(kernel: Any) -> Any:
            names = list(inspect.signature(kernel.fn).parameters)

            class Launched:
                """What a wrapper calls in place of a compiled kernel."""

                @staticmethod
                def run(*arguments: Any, stream: Any = None, **_: Any) -> None:  # noqa: ARG004 - the wrapper's
                    self.launches += 1
                    sizes = {
                        name: value for name, value in zip(names, arguments, strict=False) if isinstance(value, int)
                    }
                    blocks = enlarged(config.kwargs, sizes)
                    grid = GridExpr.from_meta(inductor_meta, blocks)
                    constants = {name: value for name, value in blocks.items() if name in names}
                    with _naming_what_lacks(f"kernel {kernel.fn.__name__}", Exception):
                        kernel[grid.eval_slow({**blocks, **sizes})](*arguments, **constants)

            return Launched()

        return launcher


def enlarged(blocks: Mapping[str, int], sizes: Mapping[str, int]) -> dict[str, int]:
    """Enlarge the blocks of a kernel until few programs do its work, as far as Inductor leaves out masks by its rules.

    It leaves a mask out where its largest block divides the number of elements, so that no larger one would be safe.
    """
    # imported here: torch 2.3 lacks it
    from torch._inductor.runtime.hints import TRITON_MAX_BLOCK

    larger = dict(blocks)
    reductions = [blocks.get(f"{axis}BLOCK") or sizes.get(f"{axis.lower()}numel", 1) for axis in ("R", "R0_", "R1_")]
    reduced = math.prod(_power_of_2_from(size) for size in reductions)
    for axis in ("X", "Y", "Z"):
        own, elements = blocks.get(f"{axis}BLOCK"), sizes.get(f"{axis.lower()}numel")
        if own is None or elements is None:
            continue
        others = math.prod(size for name, size in larger.items() if name in {"XBLOCK", "YBLOCK", "ZBLOCK"}) // own
        wanted = _power_of_2_from(-(-elements // _MOST_PROGRAMS))
        room = _MOST_ELEMENTS // (reduced * others)
        larger[f"{axis}BLOCK"] = max(own, min(wanted, room, TRITON_MAX_BLOCK[axis]))
    return larger


def _power_of_2_from(number: int) -> int:
    return 1 << (number - 1).bit_length()


@contextmanager
def _naming_what_lacks(where: str, errors: type[Exception] = NotImplementedError) -> Iterator[None]:
    """Tell what the interpreter cannot do from what the code does wrong: only its own assertions speak of the code."""
    try:
        yield
    except errors as error:
        if any(isinstance(one, AssertionError) for one in all_behind(error)):
            raise
        raise InterpreterGapError(f"{where}: {telling_line(error.__cause__ or error)}") from error


def _kernel_compiler(load: Callable[[str], ModuleType]) -> type:
    class InterpretingCompile:
        """Stands in for Inductor's AsyncCompile."""

        def triton(self, name: str, source: str, *_: Any, **__: Any) -> Any:
            module = load(source)
            vars(module)["libdevice"] = Libdevice()
            return getattr(module, name)

        def wait(self, scope: Any) -> None:
            pass

    return InterpretingCompile


def _empty_strided(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    """Give memory that holds nothing to rely on: on a GPU it would be another graph's."""
    memory = torch.empty_strided(size, stride, dtype=dtype)
    return memory.fill_(torch.nan) if dtype.is_floating_point else memory


class Libdevice:
    """NVIDIA's math library by Triton's own functions, looked up when called: the interpreter replaces them there."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        # imported here: not every environment has it
        import triton.language as tl

        known: dict[str, Callable[..., Any]] = {
            "isnan": lambda x: x != x,  # noqa: PLR0124 - of a kernel's value, not Python's
            "isinf": lambda x: tl.abs(x) == float("inf"),
            "log1p": lambda x: tl.log(1.0 + x),
            "expm1": lambda x: tl.exp(x) - 1.0,
            "tanh": lambda x: 2.0 / (1.0 + tl.exp(-2.0 * x)) - 1.0,
            "pow": _power,
        }
        return known[name] if name in known else getattr(tl, name)


def _power(x: Any, y: Any) -> Any:
    # imported here: not every environment has it
    import triton.language as tl

    sums = x + y
    somewhere = (sums == sums) | (sums != sums)  # noqa: PLR0124 - true, in the shape of both
    base, exponent = tl.where(somewhere, x, x), tl.where(somewhere, y, y)  # one of them may be a plain number
    size = tl.exp(exponent * tl.log(tl.abs(base)))
    whole, odd = tl.floor(exponent) == exponent, 2.0 * tl.floor(exponent / 2.0) != exponent
    negative = tl.where(whole, tl.where(odd, -size, size), float("nan"))
    return tl.where(exponent == 0, 1.0, tl.where(base < 0, negative, size))


@contextmanager
def _no_device() -> Iterator[None]:
    with (
        mock.patch.object(torch.cuda, "_DeviceGuard", lambda *_: nullcontext()),
        mock.patch.object(torch.cuda, "set_device", lambda *_: None),
    ):
        yield


@contextmanager
def _combining_whole_blocks() -> Iterator[None]:
    """Reduce and scan parts of a block at a time, as a GPU's threads do: the interpreter goes through it number by
    number, which took hours where Inductor combines by functions of its own (softmax, sums along the context)."""
    # imported here: not every environment has it
    from triton.runtime.interpreter import ReduceOps, ScanOps

    def taken(scope: Any, parts: Sequence[Any], places: Any, axis: int) -> list[Any]:
        return [scope.to_tensor(part.handle.data.take(places, axis), part.dtype) for part in parts]

    def combined(scope: Any, ahead: Sequence[Any], behind: Sequence[Any]) -> Sequence[Any]:
        answer = scope.combine_fn.fn(*ahead, *behind)
        return answer if isinstance(answer, tuple) else (answer,)

    def reduced(self: Any, given: Sequence[Any]) -> list[Any]:
        parts, axis = self.unravel(given, self.axis)
        while (length := parts[0].handle.data.shape[axis]) > 1:  # a power of two, as every block of Triton's
            first, second = numpy.arange(length).reshape(2, -1)
            parts = combined(self, taken(self, parts, first, axis), taken(self, parts, second, axis))
        shape = [1] * len(given[0].shape) if self.axis is None else list(parts[0].handle.data.shape)
        if not self.keep_dims:
            del shape[slice(None) if self.axis is None else axis]
        return [
            self.to_tensor(part.handle.data.reshape(shape) if shape else part.handle.data.item(), one.dtype)
            for part, one in zip(parts, given, strict=True)
        ]

    def scanned(self: Any, given: Sequence[Any]) -> list[Any]:
        parts, places, step = list(given), numpy.arange(given[0].handle.data.shape[self.axis]), 1
        while step < len(places):  # each number then stands for twice as many before it
            added = combined(self, taken(self, parts, numpy.maximum(places - step, 0), self.axis), parts)
            behind = numpy.expand_dims(places >= step, tuple(range(1, parts[0].handle.data.ndim - self.axis)))
            parts = [
                self.to_tensor(numpy.where(behind, new.handle.data, old.handle.data), one.dtype)
                for new, old, one in zip(added, parts, given, strict=True)
            ]
            step *= 2
        return parts

    with (
        mock.patch.object(ReduceOps, "generic_reduce", reduced),
        mock.patch.object(ScanOps, "generic_scan", scanned),
    ):
        yield


def _cpu_for_cuda(argument: Any) -> Any:
    if isinstance(argument, torch.device) and argument.type == "cuda":
        return torch.device("cpu")
    return "cpu" if isinstance(argument, str) and argument.partition(":")[0] == "cuda" else argument


class _OnCpu(TorchFunctionMode):
    """Makes on the CPU what the wrapper makes on CUDA."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*tree_map(_cpu_for_cuda, args), **tree_map(_cpu_for_cuda, kwargs or {}))


class _LibrariesOnCpu(TorchDispatchMode):
    """Runs by the CPU what only CUDA has: attention, and operations that name their device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten, given = torch.ops.aten, dict(kwargs or {})
        if func is aten._scaled_dot_product_efficient_attention.default:
            query, key, value, mask, _, _, *causal = args
            return _attention(query, key, value, mask, causal=causal[:1] == [True], scale=given.get("scale"))
        if func is aten._scaled_dot_product_flash_attention.default:
            query, key, value, _, *causal = args
            attended = _attention(query, key, value, None, causal=causal[:1] == [True], scale=given.get("scale"))
            return (*attended[:2], None, None, 0, 0, *attended[2:], attended[1])
        return func(*tree_map(_cpu_for_cuda, args), **tree_map(_cpu_for_cuda, given))


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, *, causal: bool, scale: Any
) -> tuple[torch.Tensor, ...]:
    """Attend on the CPU, in the layout of CUDA's kernels: heads next to the last dimension in memory."""
    attended = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scale
    )
    nothing = query.new_empty(0)
    return attended.transpose(1, 2).contiguous().transpose(1, 2), nothing, nothing, nothing
