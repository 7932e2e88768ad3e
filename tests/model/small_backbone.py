"""A small real backbone, series for it, and what people do to its layers: for the tests of the static model."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils import prune
from toto.data.util.dataset import MaskedTimeseries
from toto.model.backbone import TotoBackbone

from toto_compat.contract.request import Workload
from toto_compat.model.backbone import SHAPES
from toto_compat.model.series import Series, make_series

WORKLOAD = Workload(variates=2, groups=2, context=(128, 256))
RELATIVE = 1e-9  # in double precision


@dataclass(frozen=True)
class Small:
    """A backbone of three layers: every kind of layer, quick to run."""

    scaler: str = "CausalPatchStdMeanScaler"
    distribution: str = "MixtureOfStudentTsOutput"
    spacewise_first: bool = False

    def build(self, dtype: Any = torch.float64) -> TotoBackbone:
        shape = dict(SHAPES["tiny"]) | {
            "patch_size": 8,
            "stride": 8,
            "embed_dim": 32,
            "num_layers": 3,
            "num_heads": 2,
            "mlp_hidden_dim": 48,
            "spacewise_every_n_layers": 3,
            "spacewise_first": self.spacewise_first,
            "scaler_cls": f"<class 'model.scaler.{self.scaler}'>",
            "output_distribution_classes": [f"<class 'model.distribution.{self.distribution}'>"],
        }
        if self.distribution == "StudentTOutput":
            shape["output_distribution_kwargs"] = {}
        torch.manual_seed(7)
        backbone = TotoBackbone(**shape, use_memory_efficient_attention=False)
        return backbone.to(dtype).eval().requires_grad_(False)


def series_of(context: int = 5, horizon: int = 4, *, batch: int = 2, variates: int = 2, dtype: Any = None) -> Series:
    series = make_series(
        WORKLOAD, patch_size=8, context_patches=context, horizon_patches=horizon, batch=batch, variates=variates
    )
    return series.to(dtype=dtype or torch.float64)


def timeseries(series: Series, exogenous: int = 0) -> MaskedTimeseries:
    return MaskedTimeseries(
        series.inputs,
        series.padding_mask,
        series.id_mask,
        series.timestamp_seconds,
        series.time_interval_seconds,
        exogenous,
    )


def agree(ours: Any, theirs: Any) -> bool:
    return bool(torch.allclose(ours, theirs, rtol=RELATIVE, atol=RELATIVE))


def _with_tanh(module: Any) -> Any:
    return torch.nn.Sequential(module, torch.nn.Tanh())


def _halved(_module: Any, _inputs: Any, output: Any) -> Any:
    return output / 2


# What people do to a layer: adapters in the place of linear layers, hooks, another MLP.
ADAPTATIONS: dict[str, Callable[[Any], Any]] = {
    "attention's output replaced": lambda layer: setattr(layer.attention, "wO", _with_tanh(layer.attention.wO)),
    "MLP's output replaced": lambda layer: setattr(layer.mlp, "2", _with_tanh(layer.mlp[2])),
    "attention's output hooked": lambda layer: layer.attention.wO.register_forward_hook(_halved),
    "MLP's output hooked": lambda layer: layer.mlp[2].register_forward_hook(_halved),
    "MLP patched": lambda layer: setattr(layer.mlp, "forward", _with_tanh(type(layer.mlp)(*layer.mlp)).forward),
    "MLP longer": lambda layer: layer.mlp.append(torch.nn.Tanh()),
    "weights computed anew by a hook": lambda layer: prune.identity(layer.attention.wO, "weight").weight_orig.div_(2),
}
