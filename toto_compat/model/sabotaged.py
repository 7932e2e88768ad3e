"""Caches broken on purpose, one fault each. A suite that stays green on one of these proves nothing."""

import types
from typing import Any

import torch
from torch import Tensor
from toto.model.backbone import TotoBackbone
from toto.model.util import KVCache

from toto_compat.caches.fixed_size import FixedSizeKVCache
from toto_compat.contract.request import CompileSettings
from toto_compat.model.bound import CompileSpec, apply_settings
from toto_compat.model.compile_step import RunStep
from toto_compat.model.layer import CALLED
from toto_compat.model.static_model import Context, StaticModel
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

    def __init__(self, backbone: TotoBackbone, compile_spec: CompileSpec | None, *shapes: Any) -> None:
        super().__init__(backbone, compile_spec, *shapes)
        # Past the limit of 8 dynamo would raise; the point is the recompile, not the limit.
        apply_settings(CompileSettings(recompile_limit=100_000, accumulated_recompile_limit=100_000))

    def _compile(self, step: PlainStep) -> RunStep:
        run, calls = super()._compile(step), iter(range(1_000_000))

        def relabelled() -> tuple[Tensor, ...]:
            step.label = f"step {next(calls)}"
            return run()

        return relabelled


class CodeObjectPerStep(StaticModel):
    def _compile(self, step: PlainStep) -> RunStep:
        if self._compile_spec is None:
            return step.forward
        arguments, calls, plain = (
            self._compile_spec.torch_compile_arguments(),
            iter(range(1_000_000)),
            type(step).forward,
        )

        def fresh() -> tuple[Tensor, ...]:
            name = f"decode_step_{next(calls)}"
            function = types.FunctionType(plain.__code__.replace(co_name=name), plain.__globals__, name)
            return torch.compile(types.MethodType(function, step), fullgraph=True, dynamic=False, **arguments)()

        return fresh


class BucketPerLength(StaticModel):
    """No length fits a bucket that was made for another one; dynamo's recompile log stays empty."""

    def _capacity(self, patches: int) -> int:
        return patches

    def _fits(self, shape: tuple[int, int, int], batch: int, variates: int, patches: int) -> bool:
        return shape == (batch, variates, patches)


class CompiledCrumb(StaticModel):
    """Calls compiled code in every step, for one addition."""

    def _compile(self, step: PlainStep) -> RunStep:
        if self._compile_spec is None:
            return step.forward
        add = torch.compile(lambda value: value + 0.0, dynamic=False, **self._compile_spec.torch_compile_arguments())

        def crumbling() -> tuple[Tensor, ...]:
            first, *others = step.forward()
            return add(first), *others

        return crumbling


class EagerInDisguise(StaticModel):
    def _compile(self, step: PlainStep) -> RunStep:
        return step.forward


class HoardsMemory(StaticModel):
    """Keeps four more copies of every buffer, as if to undo forecasts."""

    def __init__(self, backbone: TotoBackbone, compile_spec: CompileSpec | None, *shapes: Any) -> None:
        super().__init__(backbone, compile_spec, *shapes)
        self._copies: list[Tensor] = []

    def _compile(self, step: PlainStep) -> RunStep:
        self._copies += [buffer.clone() for buffer in step.cache.tensors() for _ in range(4)]
        return super()._compile(step)


class LeaksMemory(StaticModel):
    """Keeps 1 MB of every forecast."""

    def __init__(self, backbone: TotoBackbone, compile_spec: CompileSpec | None, *shapes: Any) -> None:
        super().__init__(backbone, compile_spec, *shapes)
        self._kept: list[Tensor] = []

    def _bucket(self, context: Context, batch: int, horizon_patches: int) -> Any:
        self._kept.append(torch.ones(1 << 20, dtype=torch.uint8))  # not zeros: the kernel gives those when written to
        return super()._bucket(context, batch, horizon_patches)


class Slow(StaticModel):
    """Runs every layer twenty times more, eager, and throws the result away."""

    def _compile(self, step: PlainStep) -> RunStep:
        run = super()._compile(step)
        hidden = step.patch.new_zeros(step.batch * step.variates, self.backbone.embed_dim)

        def wasteful() -> tuple[Tensor, ...]:
            for _ in range(20):
                for layer in step.layers:
                    CALLED.finish(layer, hidden, hidden)
            return run()

        return wasteful
