"""Matrix products with large weights on a CPU, by oneDNN instead of by torch's own choice.

In single precision `F.linear` goes to MKL. A forecast multiplies a few rows with weights that are read once from
memory, and oneDNN reads them up to twice as fast: 8 rows on the layers of `base`, two threads, AMD EPYC, torch 2.13.0:
14 to 17 GB/s instead of 9; one row, 25 instead of 12. Production's forecast takes 32 ms with it and 55 ms without.

Inductor knows oneDNN's products, but takes them only for weights that it has copied and packed (`freezing`): the model
would be held twice, and whoever writes to a weight would not be noticed. oneDNN takes weights as they are, too. So this
is a pass over inductor's graph: what was multiplied is multiplied still, and the model knows nothing of it.

It adds up in another order: the largest error of one product of 1,024 was twice MKL's (1.7e-6 and 8e-7 to double
precision), that of whole forecasts of `base` 0.9 to 1.2 times eager's (results/reference/shapes).
"""

import functools
from typing import Any

import torch

# Larger than a core's own cache. Smaller weights stay there from step to step, and then a call of oneDNN costs 10 us
# more than one of MKL: `tiny` has no larger ones, of `base` the patch embedding alone is smaller.
SMALLEST_WEIGHT = 1 << 19

_library = torch.library.Library("toto_compat", "FRAGMENT")


def onednn_options() -> dict[str, Any]:
    """Give inductor's options that put the pass in; none where torch has no oneDNN or no such pass."""
    if not torch.backends.mkldnn.is_available():
        return {}
    try:
        return {"post_grad_custom_pre_pass": _made_pass()}
    except (ImportError, AttributeError):  # inductor's insides, which other releases have elsewhere
        return {}


@functools.cache
def _made_pass() -> Any:
    # inductor takes seconds to import, and is wanted only where something is compiled
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    _define_product()

    class Products(CustomGraphPass):
        """The pass in inductor's terms; what it does is a part of the key of what was compiled."""

        def __call__(self, graph: torch.fx.Graph) -> None:
            replace_products(graph)

        def uuid(self) -> Any:
            return get_hash_for_files((__file__,)), SMALLEST_WEIGHT

    return Products()


def _define_product() -> None:
    """Define the product, and how inductor writes it: oneDNN's call, past the packing that inductor's own asks for."""
    # see above
    from torch._inductor.ir import TensorBox
    from torch._inductor.lowering import register_lowering
    from torch._inductor.mkldnn_ir import LinearBinary, LinearUnary

    _library.define("product(Tensor rows, Tensor weight, Tensor? added) -> Tensor")
    _library.impl("product", lambda rows, weight, added: rows.new_empty(len(rows), len(weight)), "Meta")  # noqa: ARG005

    @register_lowering(torch.ops.toto_compat.product.default, type_promotion_kind=None)
    def lower(rows: Any, weight: Any, added: Any) -> Any:
        if added is None or len(added.get_size()) == 1:  # nothing, or a bias
            return TensorBox.create(LinearUnary.create(rows, weight, added, "none", [], ""))
        return TensorBox.create(LinearBinary.create(rows, added, weight, None, "add"))


def replace_products(graph: torch.fx.Graph) -> int:
    """Let oneDNN multiply where it is worth it; gives how many products those are."""
    replaced = 0
    for node in list(graph.nodes):
        found = _product(node)
        if found is None:
            continue
        with graph.inserting_before(node):
            new = graph.call_function(torch.ops.toto_compat.product.default, found)
        new.meta.update(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        replaced += 1
    return replaced


def _product(node: torch.fx.Node) -> tuple[Any, Any, Any] | None:
    """Tell the rows and the weight that a node multiplies and what it adds; None if that is not for oneDNN."""
    aten = torch.ops.aten
    added: Any = None
    if node.target is aten.addmm.default and not node.kwargs:  # beta and alpha would stand there
        added, rows, turned = node.args
        if added.meta["val"].shape not in {node.meta["val"].shape, node.meta["val"].shape[1:]}:
            return None
    elif node.target is aten.mm.default and not node.kwargs:
        rows, turned = node.args
    else:
        return None
    if turned.target is not aten.permute.default or list(turned.args[1]) != [1, 0]:
        return None
    (weight, _), value = turned.args, turned.args[0].meta["val"]
    by_onednn = value.device.type == "cpu" and value.dtype == torch.float32 and value.is_contiguous()
    is_weight = weight.op in {"placeholder", "get_attr"} and value.numel() >= SMALLEST_WEIGHT
    return (rows, weight, added) if by_onednn and is_weight else None
