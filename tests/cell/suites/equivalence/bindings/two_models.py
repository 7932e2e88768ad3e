"""Bindings that are right for the only model of a process, and in the order in which it is usually asked."""

from typing import Any, Self

from torch import Tensor
from toto.model.backbone import TotoBackbone

from tests.cell.suites.equivalence.bindings.honest import Honest
from toto_compat.model.bound import WholeModel
from toto_compat.model.series import Series

_KNOWN: dict[Any, WholeModel] = {}  # for all models of the process
_NEWEST: list[WholeModel] = []


def shapes_of(backbone: TotoBackbone) -> tuple[Any, ...]:
    return tuple(tuple(parameter.shape) for parameter in backbone.parameters())


class KeepsModelsByShape(Honest):
    """What was made for one checkpoint answers for the next one of its shape."""

    @classmethod
    def bind(cls, backbone: TotoBackbone, **told: Any) -> Self:
        bound = super().bind(backbone, **told)
        bound.eager = _KNOWN.setdefault(shapes_of(backbone), bound.eager)
        return bound


class SamplesByTheFirstModel(Honest):
    """The same, but only what samples are drawn with."""

    @classmethod
    def bind(cls, backbone: TotoBackbone, **told: Any) -> Self:
        bound = super().bind(backbone, **told)
        bound.sampled = _KNOWN.setdefault(shapes_of(backbone), bound.eager)  # type: ignore[attr-defined]
        return bound

    def generate_samples(self, series: Series, horizon_steps: int, **asked: int) -> Tensor:
        return self.sampled.generate_samples(series, horizon_steps, **asked)  # type: ignore[attr-defined]


class MeansByTheNewestModel(Honest):
    """One place for the weights: the model that was bound last has written to it."""

    @classmethod
    def bind(cls, backbone: TotoBackbone, **told: Any) -> Self:
        bound = super().bind(backbone, **told)
        _NEWEST[:] = [bound.eager]
        return bound

    def generate_mean(self, series: Series, horizon_steps: int) -> Tensor:
        return _NEWEST[0].generate_mean(series, horizon_steps)


class SamplesWrongBeforeAMean(Honest):
    """Its buffers are filled by the first mean; until then it samples from what lies there."""

    filled = False

    def generate_mean(self, series: Series, horizon_steps: int) -> Tensor:
        self.filled = True
        return super().generate_mean(series, horizon_steps)

    def generate_samples(self, series: Series, horizon_steps: int, **asked: int) -> Tensor:
        samples = super().generate_samples(series, horizon_steps, **asked)
        return samples if self.filled else samples + samples.std(dim=-1, keepdim=True)
