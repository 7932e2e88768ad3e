"""Rotary position embedding with xPos's scale: toto-ts's own is the definition, here is its form for the compiler.

toto-ts's `rotate_queries_and_keys` turns dimensions 2i and 2i + 1 of a head, a pair, by an angle that grows with the
position, and multiplies queries by a scale that it divides keys by. It computes angles and scales anew in every layer
of every step. They depend on positions alone, so they are computed once, into tables that all layers read: a decode
step reads the row of its position (`decode_tables`), a pass over a context one row per patch (`context_tables`).
"""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
from torch import Tensor

Tables = tuple[Tensor, Tensor]  # cosines and sines, each [rows, query key value, head_dim]


def context_tables(rotary: Any, patches: int, dtype: torch.dtype, device: torch.device) -> Tables:
    """Make the tables of a context that toto-ts takes in one chunk: [patches + 1, 3, head_dim].

    xPos's scale depends on the largest position of the chunk, so a context of another length has other tables.
    """
    return _tables(*_rotation_of_chunk(rotary, torch.arange(patches, device=device, dtype=dtype)))


def decode_tables(rotary: Any, capacity: int, dtype: torch.dtype, device: torch.device) -> Tables:
    """Make the tables of all slots, each slot a chunk of its own: [capacity + 1, 3, head_dim]."""
    positions = torch.arange(capacity, device=device, dtype=dtype)
    chunks = [_rotation_of_chunk(rotary, position.view(1)) for position in positions]
    return _tables(*(torch.cat(parts, dim=-2) for parts in zip(*chunks, strict=True)))


def _rotation_of_chunk(rotary: Any, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Compute what toto-ts rotates a chunk with: angles [positions, head_dim], scales [2, positions, head_dim].

    The two scales are for queries and keys; toto-ts's is not the same for both dimensions of a pair.
    """
    angles = rotary.forward(positions)
    scale = rotary.get_scale(positions).to(positions.dtype)
    return angles.to(positions.dtype), torch.stack((scale, scale**-1))


def _tables(angles: Tensor, scales: Tensor) -> Tables:
    """Bring turns and scales into one form: the 3 are query, key and value, and values are turned by nothing.

    So is all of a layer that attends over variates: the last row is for those. One kernel then rotates everything in
    every layer. Queries are scaled for attention on the way. The sine of a pair's first dimension is the negative one.
    """
    signs = torch.tensor([-1.0, 1.0], dtype=angles.dtype, device=angles.device).repeat(angles.shape[-1] // 2)
    tables = (
        _with_nothing_turned(angles.cos() * scales, 1.0),
        _with_nothing_turned(angles.sin() * signs * scales, 0.0),
    )
    for table in tables:
        table[:, 0] *= table.shape[-1] ** -0.5
    return tables


def _with_nothing_turned(table: Tensor, nothing: float) -> Tensor:
    """Add values to queries and keys, and a last row: [2, rows, head_dim] -> [rows + 1, 3, head_dim]."""
    return F.pad(table.transpose(0, 1), (0, 0, 0, 1, 0, 1), value=nothing)


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turn and scale the last dimension in one, as the compiler likes it: sums of products, no complex numbers.

    Under autocast `x` has less precision than the tables and keeps it, as it does in toto-ts.
    """
    swapped = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)  # the two dimensions of each pair change places
    return (x * cosines + swapped * sines).to(x.dtype)
