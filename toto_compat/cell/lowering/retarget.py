"""A graph captured on the CPU, moved to CUDA: device arguments, constants, regions, and every value's metadata.

The real run's graph stays as it is. What the move cannot know is where a tensor would have been that the code made
without naming a device: on a CPU both look alike. So the lines where the same forecast, traced on another device, left
something on the CPU are given (`strays`), and what was made there stays there.
"""

import copy
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.utils import detect_fake_mode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils._pytree import tree_map

from toto_compat.cell.lowering.capture import CapturedGraph, is_region_call
from toto_compat.cell.lowering.described_gpu import GPU
from toto_compat.cell.lowering.source_lines import SourceLine, line_of
from toto_compat.cell.lowering.strays import values_on_cpu


@dataclass(frozen=True)
class RetargetedGraph:
    """The graph on CUDA. Constants became inputs at the end: Inductor would need them as real CUDA tensors."""

    module: torch.fx.GraphModule
    inputs: tuple[Any, ...]  # fake tensors on CUDA, and numbers
    static_inputs: tuple[int, ...]
    constants: tuple[torch.Tensor, ...]  # of the captured graph, in the order of the inputs at the end
    left_on_cpu: tuple[str, ...] = ()  # values that stray, with their lines


def retargeted(graph: CapturedGraph, strays: Collection[SourceLine] = ()) -> RetargetedGraph:
    """Copy the graph to CUDA and work out every value's shape, stride and device there."""
    mode = detect_fake_mode(list(graph.inputs))
    module = moved(graph.module, strays)
    constants = lift_constants(module, strays)
    with mode:
        inputs = [on_gpu(value) for value in (*graph.inputs, *(mode.from_tensor(one) for one in constants))]
    GpuPropagation(module, mode=mode).propagate_dont_convert_inputs(*inputs)
    first_constant = len(graph.inputs)
    return RetargetedGraph(
        module=module,
        inputs=tuple(inputs),
        static_inputs=(*graph.static_inputs, *range(first_constant, len(inputs))),
        constants=tuple(constants),
        left_on_cpu=tuple(map(str, values_on_cpu(module))),
    )


def on_gpu(value: Any) -> Any:
    """Make the fake tensor that stands for this one on CUDA; numbers stay."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=GPU)


def moved(module: torch.fx.GraphModule, strays: Collection[SourceLine]) -> torch.fx.GraphModule:
    """Copy a graph and its regions with every device argument on CUDA but for those of lines that stray."""
    copied = torch.fx.GraphModule(module, copy.deepcopy(module.graph))
    for name, region in list(copied.named_children()):
        if isinstance(region, torch.fx.GraphModule):
            setattr(copied, name, moved(region, strays))
    for node in copied.graph.nodes:
        if line_of(node) not in strays:
            node.args = torch.fx.node.map_aggregate(node.args, _moved_argument)
            node.kwargs = torch.fx.node.map_aggregate(node.kwargs, _moved_argument)
        if node.op == "call_function" and (substitute := _CUDA_OPERATIONS.get(node.target)):
            substitute(node)
    copied.recompile()
    return copied


def _moved_argument(argument: Any) -> Any:
    return GPU if isinstance(argument, torch.device) and argument.type == "cpu" else argument


def lift_constants(module: torch.fx.GraphModule, strays: Collection[SourceLine]) -> list[torch.Tensor]:
    """Make inputs of the graph's tensor constants, in place; those of lines that stray stay constants, on the CPU."""
    lifted: list[torch.Tensor] = []
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    for node in [node for node in module.graph.nodes if node.op == "get_attr"]:
        value = _attribute(module, str(node.target))
        if not isinstance(value, torch.Tensor) or any(line_of(user) in strays for user in (node, *node.users)):
            continue
        with module.graph.inserting_after(placeholders[-1]) if placeholders else module.graph.inserting_before():
            placeholder = module.graph.placeholder(f"constant_{len(lifted)}")
        placeholder.meta = dict(node.meta)
        node.replace_all_uses_with(placeholder)
        module.graph.erase_node(node)
        placeholders.append(placeholder)
        lifted.append(value)
    if lifted:
        module.recompile()
    return lifted


def _attribute(module: Any, path: str) -> Any:
    for part in path.split("."):
        module = getattr(module, part)
    return module


class GpuPropagation(FakeTensorProp):
    """Gives every node its value on CUDA; of regions too, which have metadata of their own."""

    def run_node(self, n: torch.fx.Node) -> Any:
        result = super().run_node(n)
        # what dynamo's trace gave the operation: Inductor takes devices and strides of a region's inputs from here
        if "eager_input_vals" in n.meta:
            with self._mode:
                n.meta["eager_input_vals"] = tree_map(on_gpu, n.meta["eager_input_vals"])
        return result

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if is_region_call(target):
            region, _identifier, *operands = args
            return GpuPropagation(region, mode=self._mode).propagate_dont_convert_inputs(*operands)
        return super().call_function(target, args, kwargs)


# Operations that exist for the CPU alone, and what CUDA has in their place.


def _attention_for_cuda(node: torch.fx.Node) -> None:
    """Take the kernel that torch takes on CUDA: flash for half precision without a mask, else memory-efficient."""
    query, key, value, *rest = node.args
    dropout = rest[0] if rest else 0.0
    causal = rest[1] if len(rest) > 1 else False
    mask, scale = node.kwargs.get("attn_mask"), node.kwargs.get("scale")
    aten = torch.ops.aten
    half = query.meta["val"].dtype in (torch.float16, torch.bfloat16)
    if half and mask is None:
        node.target = aten._scaled_dot_product_flash_attention.default
        node.args, node.kwargs = (query, key, value, dropout, causal, False), {"scale": scale}
    else:
        node.target = aten._scaled_dot_product_efficient_attention.default
        node.args, node.kwargs = (query, key, value, mask, False, dropout, causal), {"scale": scale}


_CUDA_OPERATIONS: Mapping[Any, Callable[[torch.fx.Node], None]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: _attention_for_cuda
}
