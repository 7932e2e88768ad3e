"""Caches broken on purpose, one fault each. A suite that stays green on one of these proves nothing."""

from typing import Any

import torch
from torch import Tensor
from toto.model.backbone import TotoBackbone
from toto.model.util import KVCache

from toto_compat.caches.fixed_size import FixedSizeKVCache
from toto_compat.contract.request import CompileSettings
from toto_compat.model.bound import CompileSpec, apply_settings
from toto_compat.model.buckets import StepShape
from toto_compat.model.compile_step import Run, compile_module
from toto_compat.model.context_pass import Context
from toto_compat.model.layer import CALLED
from toto_compat.model.sampling import PatchDraws
from toto_compat.model.static_model import StaticModel
from toto_compat.model.static_step import PlainStep, StaticStep


class PositionOffByOne(KVCache):
    """Decode steps are rotated as if they stood one patch later; the prefill is right."""

    def seq_len(self, layer_idx: int) -> int:
        length = super().seq_len(layer_idx)
        return length + 1 if length else 0


class StaleValues(KVCache):
    """A decode step keeps the values of the step before it and stores its own keys only."""

    def append(self, layer_idx: int, kv: tuple[Tensor, Tensor]) -> None:
        keys, values = kv
        if super().seq_len(layer_idx):
            _, kept = self[layer_idx]
            time_axis = 1 if self.use_memory_efficient_attention else 2
            values = kept.narrow(time_axis, kept.shape[time_axis] - 1, 1).clone()
        super().append(layer_idx, (keys, values))


class _LeakyCache(FixedSizeKVCache):
    def bias(self) -> Tensor:
        return torch.zeros_like(self.slots, dtype=self.keys_values[0].dtype).view(1, 1, 1, -1)


class _ForgetfulCache(FixedSizeKVCache):
    def begin(self, context_patches: int) -> None:
        self.position.remainder_(context_patches)  # stays inside the buffer: wrong, not crashing


class _HalfPrecisionCache(FixedSizeKVCache):
    def write(self, layer: int, keys_values: Tensor) -> Tensor:
        return super().write(layer, keys_values.half().to(keys_values.dtype))


class _LeakyStep(StaticStep):
    def make_cache(self, **shape: Any) -> FixedSizeKVCache:
        return _LeakyCache(**shape)


class _ForgetfulStep(StaticStep):
    def make_cache(self, **shape: Any) -> FixedSizeKVCache:
        return _ForgetfulCache(**shape)


class _HalfPrecisionStep(StaticStep):
    def make_cache(self, **shape: Any) -> FixedSizeKVCache:
        return _HalfPrecisionCache(**shape)


class _CountingStep(StaticStep):
    """Reads a Python string that changes at every step: a guard that fails at every step."""

    label = "step 0"

    def advance(self) -> Tensor:
        return self.cache.advance() + (1 if self.label == "never" else 0)


class LeakingMask(StaticModel):
    step_class = _LeakyStep


class ForgetfulReset(StaticModel):
    step_class = _ForgetfulStep


class SilentDowncast(StaticModel):
    step_class = _HalfPrecisionStep


class RecompileEveryStep(StaticModel):
    step_class = _CountingStep

    def __init__(self, backbone: TotoBackbone, compile_spec: CompileSpec | None, *shapes: Any, **named: Any) -> None:
        super().__init__(backbone, compile_spec, *shapes, **named)
        # Past the limit of 8 dynamo would raise; the point is the recompile, not the limit.
        apply_settings(CompileSettings(recompile_limit=100_000, accumulated_recompile_limit=100_000))

    def _compile(self, module: Any, name: str) -> Run:
        run, calls = super()._compile(module, name), iter(range(1_000_000))
        if not isinstance(module, PlainStep):
            return run

        def relabelled() -> tuple[Tensor, ...]:
            module.label = f"step {next(calls)}"
            return run()

        return relabelled


class CodeObjectPerStep(StaticModel):
    def _compile(self, module: Any, name: str) -> Run:
        if self._compile_spec is None or not isinstance(module, PlainStep):
            return super()._compile(module, name)
        spec, calls = self._compile_spec, iter(range(1_000_000))

        def fresh() -> Any:
            return compile_module(module, f"decode_step_{next(calls)}", spec)()

        return fresh


class BucketPerLength(StaticModel):
    """No length fits a bucket that was made for another one; dynamo's recompile log stays empty."""

    def _capacity(self, patches: int) -> int:
        return patches

    def _fits(self, shape: StepShape, batch: int, variates: int, patches: int) -> bool:
        return (shape.batch, shape.variates, shape.capacity) == (batch, variates, patches)


class CompiledCrumb(StaticModel):
    """Calls compiled code in every step and pass, for one addition."""

    def _compile(self, module: Any, name: str) -> Run:
        if self._compile_spec is None or isinstance(module, PatchDraws):
            return super()._compile(module, name)
        add = torch.compile(lambda value: value + 0.0, dynamic=False, **self._compile_spec.torch_compile_arguments())

        def crumbling() -> tuple[Tensor, ...]:
            first, *others = module.forward()
            return add(first), *others

        return crumbling


class EagerInDisguise(StaticModel):
    def _compile(self, module: Any, name: str) -> Run:  # noqa: ARG002 - what everybody overrides
        run: Run = module.forward
        return run


class EagerPrefill(StaticModel):
    """Compiles the decode step and leaves the pass over the context and its draws eager: all that production runs."""

    def _compile(self, module: Any, name: str) -> Run:
        return super()._compile(module, name) if isinstance(module, PlainStep) else module.forward


class HoardsMemory(StaticModel):
    """Keeps four more copies of every buffer, as if to undo forecasts."""

    def __init__(self, backbone: TotoBackbone, compile_spec: CompileSpec | None, *shapes: Any, **named: Any) -> None:
        super().__init__(backbone, compile_spec, *shapes, **named)
        self._copies: list[Tensor] = []

    def _compile(self, module: Any, name: str) -> Run:
        if isinstance(module, PlainStep):
            self._copies += [buffer.clone() for buffer in module.cache.tensors() for _ in range(4)]
        return super()._compile(module, name)


class LeaksMemory(StaticModel):
    """Keeps 1 MB of every forecast, where the model is: on a GPU that is what its memory is counted by."""

    def __init__(self, backbone: TotoBackbone, compile_spec: CompileSpec | None, *shapes: Any, **named: Any) -> None:
        super().__init__(backbone, compile_spec, *shapes, **named)
        self._leaked: list[Tensor] = []

    def _notice_changed_weights(self, context: Context) -> None:
        # not zeros: the kernel gives those when written to
        self._leaked.append(torch.ones(1 << 20, dtype=torch.uint8, device=context.inputs.device))
        super()._notice_changed_weights(context)


class Slow(StaticModel):
    """Runs every layer twenty times more, eager, and throws the result away."""

    def _compile(self, module: Any, name: str) -> Run:
        run = super()._compile(module, name)
        if isinstance(module, PatchDraws):
            return run
        weight = self.backbone.unembed.weight
        hidden = weight.new_zeros(8, self.backbone.embed_dim)

        def wasteful() -> tuple[Tensor, ...]:
            for _ in range(20):
                for layer in module.layers:
                    CALLED.finish(layer, hidden, hidden)
            return run()

        return wasteful
