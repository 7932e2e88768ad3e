"""A layer of Toto around its attention, for the fast step: two regions, and two ways through the layer.

In plain words a layer is, with `attend` for what happens between queries, keys and values:

    hidden = hidden + wO(attend(wQKV(norm1(hidden))))
    hidden = hidden + mlp(norm2(hidden))

**Two regions.** `project` is all before the cache is written, `attend` all after it: no region may write the cache.
From torch 2.8 a region is compiled once and used by all twelve layers. Measured on torch 2.13.0, CPU, one region for a
layer: 21 s cold and 3.9 s warm instead of 40 and 8.6 s for the whole graph in one piece, and at 2.2 ms the fastest
step of all. Before 2.8 the same functions are inlined.

**Two ways.** A layer TAKEN_APART gives its weights to `torch.addmm`, which adds the residual while it multiplies:
8 kernels to compile instead of 10 (torch 2.13.0, CPU). But whoever takes weights out of a module walks past everything
that was done to that module: a hook, a patched `forward`, a parametrisation, pruning, an adapter in its place. Such a
layer is CALLED, module by module, as the plain step does it; `can_be_taken_apart` tells. The step takes one way through
all of its layers, so that they share their regions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from toto.model.feed_forward import SwiGLU

from toto_compat.model.rotation import rotate

nested_compile_region: Callable[..., Any] | None = getattr(torch.compiler, "nested_compile_region", None)

_TOTO_MLP = [torch.nn.Linear, SwiGLU, torch.nn.Linear, torch.nn.Dropout]  # xformers' fused one is another


def joint_projection(layer: Any, hidden: Tensor) -> Tensor:
    """Norm and project at once: [..., width] -> [..., query key value, heads, head_dim]."""
    attention = layer.attention
    joint = attention.wQKV(layer.norm1(hidden))
    # toto-ts's own layout has its heads last
    return joint.unflatten(-1, (3, attention.head_dim, attention.num_heads)).transpose(-1, -2)


# Called: the definition


def _begin_with_copy(_layer: Any, hidden: Tensor) -> Tensor:
    return hidden.clone()  # a region must not hand back what it was given


def _finish_with_calls(layer: Any, begun: Tensor, attended: Tensor) -> Tensor:
    hidden = begun + layer.attention.wO(attended)
    return hidden + layer.mlp(layer.norm2(hidden))


# Taken apart: the same sums, in the matrix products


def _begin_with_bias(layer: Any, hidden: Tensor) -> Tensor:
    return hidden + layer.attention.wO.bias


def _finish_with_products(layer: Any, begun: Tensor, attended: Tensor) -> Tensor:
    """Let the matrix products add to the hidden state: no kernel for that, and one norm kernel for both norms.

    The bias comes before the norm, as it does where a layer begins: for inductor that is the order of the kernel.
    """
    hidden = torch.addmm(begun, attended, layer.attention.wO.weight.t())
    first, activation, last, _dropout = layer.mlp
    biased = hidden + last.bias
    return torch.addmm(biased, activation(first(layer.norm2(hidden))), last.weight.t())


def can_be_taken_apart(layer: Any) -> bool:
    """Tell whether its linear layers are toto-ts's own, and nobody hooked, patched, parametrised or replaced them."""
    output, mlp = layer.attention.wO, layer.mlp
    if type(mlp) is not torch.nn.Sequential or [type(module) for module in mlp] != _TOTO_MLP:
        return False
    added = [output, mlp[2]]
    return all(map(_is_untouched, (*added, mlp, mlp[3]))) and all(
        type(linear) is torch.nn.Linear and type(linear.weight) is type(linear.bias) is torch.nn.Parameter
        for linear in added
    )


def _is_untouched(module: Any) -> bool:
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


# Both, as regions


@dataclass(frozen=True)
class WayThrough:
    """A way through a layer: its two ends alone, for the prefill, and the regions of a decode step made from them.

    `begin` takes what the sum at the end needs of the hidden state, `finish` is all after attention; rows of width.
    `alone` is the whole layer for a single variate among variates.
    """

    begin: Callable[[Any, Tensor], Tensor]
    finish: Callable[[Any, Tensor, Tensor], Tensor]
    project: Callable[..., tuple[Tensor, Tensor, Tensor]]
    attend: Callable[..., Tensor]
    alone: Callable[..., Tensor]


def _way_through(begin: Callable[[Any, Tensor], Tensor], finish: Callable[[Any, Tensor, Tensor], Tensor]) -> WayThrough:
    """Put a decode step's projection and attention between the two ends, each a region where torch has them.

    A region's outputs must have memory of their own: inductor (2.13) takes the memory behind one for as large as its
    base, and a view into something larger gets written past its end.
    """

    def project(layer: Any, hidden: Tensor, row: Tensor, *tables: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # hidden [rows, width], row [rows, or 1 for all] of the tables [table rows, 3, head_dim]
        cosines, sines = (table.index_select(0, row).transpose(0, 1).unsqueeze(2) for table in tables)
        joint = joint_projection(layer, hidden).transpose(0, 1)  # [3, rows, heads, head_dim]
        rotated = rotate(joint, cosines, sines)
        query, keys_values = (x.clone(memory_format=torch.contiguous_format) for x in (rotated[0], rotated[1:]))
        return query, keys_values, begin(layer, hidden)

    def attend(layer: Any, begun: Tensor, *attention: Tensor) -> Tensor:
        # query [groups, heads, queries, head_dim], keys_values [2, groups, heads, keys, head_dim], a bias that fits
        # queries and keys, begun [groups * queries, width]; a group attends to itself
        query, keys_values, bias = attention
        keys, values = keys_values.unbind()
        # spelled out: fused attention kernels are made for many queries a row, here call overhead is all
        attended = (query @ keys.transpose(-1, -2) + bias).softmax(-1) @ values
        return finish(layer, begun, attended.transpose(1, 2).flatten(2).flatten(0, 1))  # [rows, width]

    if nested_compile_region is not None:
        project, attend = nested_compile_region(project), nested_compile_region(attend)

    def alone(layer: Any, hidden: Tensor, row: Tensor, *tables: Tensor) -> Tensor:
        # a layer over variates where there is one: it attends to itself, so its value is what it attends to; through
        # the region that is there already, a kernel less to compile than by itself
        _, keys_values, begun = project(layer, hidden, row, *tables)
        return finish(layer, begun, keys_values[1].flatten(1))

    return WayThrough(begin, finish, project, attend, alone)


CALLED = _way_through(_begin_with_copy, _finish_with_calls)
TAKEN_APART = _way_through(_begin_with_bias, _finish_with_products)
