"""What of the static model is compiled, how, and why.

Three things are compiled, each once for every bucket of shapes: the pass over the context, the decode step, and the
draws from a predicted patch. Between them nothing is left but copies into their buffers and uniform random numbers.

- `fullgraph=True`: a break in the graph is an error here, not a slow step that nobody notices.
- `dynamic=False`: every shape is a constant. What grows is a position in a tensor, so nothing is ever compiled again.
- `size_asserts=False`: shapes are fixed and guarded, inductor need not check them again in every layer of every step.
- `inplace_buffers=False`: a kernel that never writes in place is the same kernel in more places, of which only one has
  to be compiled.
- `reorder_for_locality=False`: what stands before a matrix product stays there, in one kernel instead of two.
- `fx_graph_cache=True`, `cpp_cache_precompile_headers=False` where compiled code is kept: the first is the default only
  in newer releases; with precompiled headers inductor calls the C++ compiler in every process, even if all kernels are
  there already (2.13.0), and puts them outside its cache folder.
- `cpp.vec_isa_ok=True` where torch itself runs with the processor's vectors (`compiler_head_start`): inductor's own
  proof of it builds three programs with all vector headers, one after the other, before the first kernel.
- `guard_filter_fn`, where torch has it: no guards on tensors. They are the module's own buffers, and weights, which the
  model looks at before every forecast (`StaticGraphs._notice_changed_weights`). All other guards stay: values, types,
  hooks, threads. Guards on tensors took 9 % of `tiny`'s mean forecast (torch 2.13.0, CPU: 13.8 ms with, 12.7 without).
- `post_grad_custom_pre_pass`, on a CPU: oneDNN multiplies with large weights (`onednn`).
- A code object of its own for every bucket: dynamo's limit of 8 compiles is per code object, and a ninth bucket would
  reach it. So dynamo neither logs nor limits new buckets: the model does both (`buckets`).
"""

import contextlib
import gc
import re
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from toto_compat.model.bound import CompileSpec, apply_settings
from toto_compat.model.compiler_head_start import give_compiler_head_start, vectors_are_known_to_work
from toto_compat.model.onednn import onednn_options

Run = Callable[[], Any]


def prepare_compiler(spec: CompileSpec, device: torch.device) -> None:
    """Apply the cell's settings, and begin what the first compile on a CPU would otherwise wait for."""
    apply_settings(spec.settings)
    if device.type == "cpu" and spec.cache_dir is None and spec.torch_compile_arguments()["backend"] == "inductor":
        give_compiler_head_start()


def compile_module(module: torch.nn.Module, name: str, spec: CompileSpec) -> Run:
    """Give the module's forward compiled, under a name of its own; what takes long happens at its first call."""
    forward = type(module).forward
    name = re.sub(r"\W+", "_", name)
    function = types.FunctionType(forward.__code__.replace(co_name=name), forward.__globals__, name)
    compiled = torch.compile(types.MethodType(function, module), fullgraph=True, dynamic=False, **_lowering(spec))
    if spec.mode == "default":
        return compiled

    def replay() -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return compiled()

    return replay


def _lowering(spec: CompileSpec) -> dict[str, Any]:
    """Give torch.compile's arguments: the mode's own options, and those above where inductor compiles."""
    arguments = spec.torch_compile_arguments()
    if arguments["backend"] != "inductor":
        return arguments
    of_mode = torch._inductor.list_mode_options(arguments["mode"]) if arguments["mode"] else {}
    ours: dict[str, Any] = {"size_asserts": False, "inplace_buffers": False, "reorder_for_locality": False}
    ours |= onednn_options()
    if hasattr(torch.compiler, "keep_tensor_guards_unsafe"):  # came together with the option itself
        ours["guard_filter_fn"] = _all_but_tensors
    if vectors_are_known_to_work() and hasattr(torch._inductor.config, "get_type"):
        # before 2.6 torch.compile takes nothing but None for an option that is None by default
        ours["cpp.vec_isa_ok"] = True
    if spec.cache_dir is not None:
        ours["fx_graph_cache"] = True
        if hasattr(torch._inductor.config, "cpp_cache_precompile_headers"):
            ours["cpp_cache_precompile_headers"] = False
    return {"backend": "inductor", "options": {**of_mode, **ours}}


def _all_but_tensors(guards: Sequence[Any]) -> list[bool]:
    return [guard.guard_type not in ("TENSOR_MATCH", "DUPLICATE_INPUT") for guard in guards]


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
