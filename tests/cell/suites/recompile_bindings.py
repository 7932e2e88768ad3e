"""Bindings as a user's file has them: what they compile, and when, is what the recompile suite must see."""

import concurrent.futures
from typing import Any, Self

import torch
from torch import Tensor
from toto.model.backbone import TotoBackbone

from toto_compat.model.compile_step import Run
from toto_compat.model.series import Series
from toto_compat.model.static_model import StaticModel
from toto_compat.model.static_step import PlainStep, StaticStep


class Honest(StaticModel):
    @classmethod
    def bind(cls, backbone: TotoBackbone, *, compile_spec: Any, max_patches: int, batch_sizes: tuple[int, ...]) -> Self:
        return cls(backbone, compile_spec, max_patches, batch_sizes)


class _BreakingStep(StaticStep):
    def advance(self) -> Tensor:
        torch._dynamo.graph_break()
        return super().advance()


class BreaksAndWarmsUpInBind(Honest):
    """Breaks its graph in every step, and has compiled everything before anybody watches."""

    step_class = _BreakingStep

    def _compile(self, module: Any, name: str) -> Run:
        if self._compile_spec is None or not isinstance(module, PlainStep):
            return super()._compile(module, name)
        compiled: Run = torch.compile(module.forward, dynamic=False, **self._compile_spec.torch_compile_arguments())
        return compiled

    @classmethod
    def bind(cls, backbone: TotoBackbone, **announced: Any) -> Self:
        model = super().bind(backbone, **announced)
        for batch in announced["batch_sizes"] if model.compiled else ():
            steps = 2 * model.patch_size
            values = torch.randn(batch, 1, steps)
            present, ids = torch.ones_like(values, dtype=torch.bool), torch.zeros(batch, 1, steps, dtype=torch.int)
            model.generate_mean(Series(values, present, ids, ids, ids[..., 0], values[..., :0]), steps)
        return model


class CompiledOnlyWhileObserved(Honest):
    def _compile(self, module: Any, name: str) -> Run:
        run = super()._compile(module, name)
        calls = iter(range(1_000_000))

        def choose() -> Any:
            first = next(calls) == 0  # which makes the bucket
            return run() if first or self.observer is not None else module.forward()

        return choose


class EagerInAThread(Honest):
    """Compiled code for one addition in the caller's thread, the step itself in another."""

    def _compile(self, module: Any, name: str) -> Run:
        if self._compile_spec is None or not isinstance(module, PlainStep):
            return super()._compile(module, name)
        add = torch.compile(lambda value: value + 1, fullgraph=True, dynamic=False)
        pool = concurrent.futures.ThreadPoolExecutor(1)

        def eager() -> tuple[Tensor, ...]:
            with torch.inference_mode(False), torch.no_grad():
                outputs: tuple[Tensor, ...] = module.forward()
                return outputs

        def run() -> tuple[Tensor, ...]:
            add(module.patch)
            return pool.submit(eager).result()

        return run
