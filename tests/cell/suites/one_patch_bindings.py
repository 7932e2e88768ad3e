"""Bindings for forecasts of one patch, as a user's file has them: what runs compiled there, and what only says so."""

from typing import Any, Self

import torch
from torch import Tensor
from toto.model.backbone import TotoBackbone
from toto.model.util import KVCache

from toto_compat.model.bound import CompileSpec, WholeModel
from toto_compat.model.series import Series


class CompiledPass:
    """Upstream behind the interface; a mean forecast of one patch is one compiled graph over the context."""

    draws = "toto-ts"
    cache_class = "tests:CompiledPass"

    def __init__(self, backbone: TotoBackbone, spec: CompileSpec | None) -> None:
        self.eager = WholeModel(backbone, KVCache, None)
        self.patch_size = self.eager.patch_size
        self.compiled = spec is not None
        self.observer: Any = None
        self._pass = self.passed(spec)

    @classmethod
    def bind(cls, backbone: TotoBackbone, *, compile_spec: CompileSpec | None, **_announced: Any) -> Self:
        return cls(backbone, compile_spec)

    def passed(self, spec: CompileSpec | None) -> Any:
        def over_the_context(inputs: Tensor, mask: Tensor, ids: Tensor) -> Tensor:
            output = self.eager.model(inputs, mask, ids, None, scaling_prefix_length=inputs.shape[-1])
            mean = output.distribution.mean[..., -self.patch_size :]
            return mean * output.scale[..., -1:] + output.loc[..., -1:]

        if spec is None:
            return over_the_context
        return torch.compile(over_the_context, dynamic=False, fullgraph=True, **spec.torch_compile_arguments())

    def generate_mean(self, series: Series, horizon_steps: int) -> Tensor:
        if horizon_steps > self.patch_size:
            return self.eager.generate_mean(series, horizon_steps)
        with torch.no_grad(), self._observed():
            answer: Tensor = self._pass(series.inputs, series.padding_mask, series.id_mask)
            return answer[..., :horizon_steps]

    def generate_samples(self, series: Series, horizon_steps: int, *, num_samples: int, **_: Any) -> Tensor:
        """No samples worth the name: the mean again and again. What is compiled of them is all that is looked at."""
        return torch.stack([self.generate_mean(series, horizon_steps)] * num_samples, dim=-1)

    def teacher_forced(self, series: Series, truth: Tensor) -> list[dict[str, Tensor]]:
        return self.eager.teacher_forced(series, truth)

    def _observed(self) -> Any:
        return self.observer(0) if self.observer is not None else torch.no_grad()


class EagerPass(CompiledPass):
    """The same with the pass left eager, beside a compiled addition: compiled by name."""

    def passed(self, spec: CompileSpec | None) -> Any:
        eager = super().passed(None)
        add = self._addition(spec)

        def run(inputs: Tensor, mask: Tensor, ids: Tensor) -> Tensor:
            add(inputs)
            answer: Tensor = eager(inputs, mask, ids)
            return answer

        return run

    @staticmethod
    def _addition(spec: CompileSpec | None) -> Any:
        def add(values: Tensor) -> Tensor:
            return values + 1

        if spec is None:
            return add
        return torch.compile(add, dynamic=False, **spec.torch_compile_arguments())


class CompiledWhileObserved(CompiledPass):
    """Compiled as long as somebody looks."""

    def passed(self, spec: CompileSpec | None) -> Any:
        compiled, eager = super().passed(spec), super().passed(None)

        def run(inputs: Tensor, mask: Tensor, ids: Tensor) -> Tensor:
            answer: Tensor = (compiled if self.observer is not None else eager)(inputs, mask, ids)
            return answer

        return run
