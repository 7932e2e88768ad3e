"""What of the static model is compiled, how, and why.

One thing is compiled: a decode step, once for every bucket of shapes. The prefill runs once a forecast, at lengths that
differ from one to the next, and draws from a distribution must be toto-ts's own: both stay eager.

- `fullgraph=True`: a break in the graph is an error here, not a slow step that nobody notices.
- `dynamic=False`: every shape is a constant. What grows is a position in a tensor, so nothing is ever compiled again.
- `size_asserts=False`: shapes are fixed and guarded, inductor need not check them again in every layer of every step.
- `inplace_buffers=False`: a kernel that never writes in place is the same kernel in more places, of which only one has
  to be compiled.
- A code object of its own for every bucket: dynamo's limit of 8 compiles is per code object, and a ninth bucket would
  reach it. So dynamo neither logs nor limits new buckets: the model does both (`MAX_BUCKETS`).
"""

import contextlib
import gc
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from toto_compat.model.bound import CompileSpec, apply_settings
from toto_compat.model.compiler_head_start import give_compiler_head_start
from toto_compat.model.static_step import PlainStep

RunStep = Callable[[], tuple[Tensor, ...]]


def prepare_compiler(spec: CompileSpec, device: torch.device) -> None:
    """Apply the cell's settings, and begin what the first compile on a CPU would otherwise wait for."""
    apply_settings(spec.settings)
    if device.type == "cpu" and spec.torch_compile_arguments()["backend"] == "inductor":
        give_compiler_head_start()


def compile_step(step: PlainStep, spec: CompileSpec) -> RunStep:
    """Give the step compiled; what takes long happens at its first call."""
    name = f"decode_step_batch{step.batch}_variates{step.variates}_capacity{step.capacity}"
    forward = type(step).forward
    function = types.FunctionType(forward.__code__.replace(co_name=name), forward.__globals__, name)
    compiled = torch.compile(types.MethodType(function, step), fullgraph=True, dynamic=False, **_lowering(spec))
    if spec.mode == "default":
        return compiled

    def replay() -> tuple[Tensor, ...]:
        torch.compiler.cudagraph_mark_step_begin()
        return compiled()

    return replay


def _lowering(spec: CompileSpec) -> dict[str, Any]:
    """Give torch.compile's arguments: the mode's own options, and the step's two where inductor compiles it."""
    arguments = spec.torch_compile_arguments()
    if arguments["backend"] != "inductor":
        return arguments
    of_mode = torch._inductor.list_mode_options(arguments["mode"]) if arguments["mode"] else {}
    return {"backend": "inductor", "options": {**of_mode, "size_asserts": False, "inplace_buffers": False}}


_NEVER = 1_000_000_000


@contextlib.contextmanager
def no_full_collections() -> Iterator[None]:
    """A compile makes so many objects that Python would search all of torch's, again and again, for garbage."""
    young, middle, old = gc.get_threshold()
    if old == _NEVER:  # another thread compiles, and will put it back
        yield
        return
    gc.set_threshold(young, middle, _NEVER)
    try:
        yield
    finally:
        gc.set_threshold(young, middle, old)
