"""Whether a shape that was just made forecasts as eager does: asked of every shape once, before anybody relies on it.

Not the samples are compared but the parameters of the distributions, patch by patch, given the forecast itself as what
came before: that needs no random numbers and says at which patch and by how much two models part.
"""

import math
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from toto.model.util import KVCache

from toto_compat.model.bound import WholeModel, unchecked_distributions
from toto_compat.model.context_pass import Context
from toto_compat.model.series import Series
from toto_compat.model.static_model import StaticModel

_MOST_ROWS = 3  # that eager goes through: the first, one in the middle, the last


@dataclass(frozen=True)
class Difference:
    """Says where a static forecast parts from eager's, relative to the largest value of that parameter."""

    parameter: str
    patch: int
    error: float
    allowed: float

    def __str__(self) -> str:
        return f"{self.parameter} of patch {self.patch + 1} by {self.error:.1e} where {self.allowed:.1e} is allowed"


def allowed_error(precision: torch.dtype) -> float:
    """Allow the square root of the precision's step: 3e-4 in float32.

    This project's choice, halfway in powers of ten between rounding (1e-6 over ten patches of `tiny`) and the faults
    that its sabotages make (6e-4 and more).
    """
    return math.sqrt(torch.finfo(precision).eps)


def first_difference(static: StaticModel, context: Context, path: Tensor) -> Difference | None:
    """Force both through `path`, the patches of a forecast, [rows, variates, time]; None if they agree.

    Rows are samples times series. The first parameter that differs by more than is allowed is told, NaN included.
    """
    rows, contexts = len(path), len(context.inputs)
    chosen = sorted({0, rows // 2, rows - 1})[:_MOST_ROWS]
    ours = static.forced(context, path)
    series = _series(context, [row % contexts for row in chosen])
    with unchecked_distributions() if static.precision.itemsize < 4 else nullcontext():
        eager = WholeModel(static.backbone, KVCache, None).teacher_forced(series, path[chosen])
    allowed = allowed_error(static.precision)
    for patch, (mine, theirs) in enumerate(zip(ours, eager, strict=True)):
        for name, value in theirs.items():
            error = float((mine[name][chosen].double() - value.double()).abs().max() / value.double().abs().max())
            if not error <= allowed:
                return Difference(name, patch, error, allowed)
    return None


def _series(context: Context, rows: list[int]) -> Series:
    inputs, present = context.inputs[rows], context.padding_mask[rows]
    ids = context.id_mask[rows].expand_as(inputs)
    no_time = torch.zeros(inputs.shape[:2], dtype=torch.int, device=inputs.device)
    return Series(inputs, present, ids, no_time.unsqueeze(-1), no_time, inputs[..., :0])
