"""Forecasting with the static step: shapes in buckets, one pass over the context, a decode loop without host syncs."""

import contextlib
import functools
import logging
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from math import ceil
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor
from toto.model.backbone import TotoBackbone
from toto.model.util import KVCache

from toto_compat.caches.fixed_size import FixedSizeKVCache
from toto_compat.contract.bucket_messages import BUCKET_LOGGER, compiling_bucket, dropping_bucket
from toto_compat.errors import InputError
from toto_compat.model.bound import CompileSpec, StepObserver, WholeModel, class_name
from toto_compat.model.compile_step import RunStep, compile_step, no_full_collections, prepare_compiler
from toto_compat.model.head import SUPPORTED_DISTRIBUTIONS, FusedHead
from toto_compat.model.sampling import draw_patch
from toto_compat.model.scaler_state import SUPPORTED_SCALERS
from toto_compat.model.series import Series
from toto_compat.model.static_step import PlainStep, StaticStep, without_extremes

# The limit that a code object per bucket takes away from dynamo. A bucket holds compiled code that took 10 to 20 s of a
# forecast, and its buffers (94 MB at 16 series of 80 patches on the base model). 16 is five times the three batches of
# the matrix: a service that needs more should pad its batches to fewer sizes.
MAX_BUCKETS = 16
_LOG = logging.getLogger(BUCKET_LOGGER)
_Shape = tuple[int, int, int]  # batch, variates, capacity in patches


@dataclass(frozen=True)
class Context:
    """Holds what a forecast starts from, in toto-ts's terms. `future` holds known values of the last variates."""

    inputs: Tensor
    padding_mask: Tensor
    id_mask: Tensor
    future: Tensor | None = None


@dataclass(frozen=True)
class _Bucket:
    step: PlainStep
    run: RunStep


def why_not_static(backbone: TotoBackbone) -> str:
    """Empty if the static step covers this model, else the name of what it does not cover."""
    dtype = backbone.unembed.weight.dtype
    reasons = {
        f"toto-ts {version('toto-ts')}": Version(version("toto-ts")) < Version("0.2"),
        "exogenous variates with fusion tokens": getattr(backbone, "fusion", None) is not None,
        "the memory-efficient attention layout": backbone.use_memory_efficient_attention,
        f"dtype {dtype}": dtype not in (torch.float32, torch.float64),
        f"scaler {type(backbone.scaler).__name__}": not isinstance(backbone.scaler, SUPPORTED_SCALERS),
        f"distribution {type(backbone.output_distribution).__name__}": not isinstance(
            backbone.output_distribution, SUPPORTED_DISTRIBUTIONS
        ),
    }
    return ", ".join(name for name, holds in reasons.items() if holds)


def _forecasting(method: Callable[..., Any]) -> Callable[..., Any]:
    """Without gradients, and out of the caller's inference mode: buffers made there could not be written outside it."""

    @functools.wraps(method)
    def run(*arguments: Any, **named: Any) -> Any:
        with torch.inference_mode(False), torch.no_grad():
            return method(*arguments, **named)

    return run


class StaticModel:
    """The fixed_size cache bound to a backbone. One forecast at a time: the buffers are shared, a lock guards them.

    Modes with CUDA graphs: forecast from one thread. Some releases of torch keep such graphs per thread.
    """

    draws = "toto-ts"
    step_class: type[PlainStep] = StaticStep

    def __init__(
        self,
        backbone: TotoBackbone,
        compile_spec: CompileSpec | None,
        max_patches: int | None = None,
        batch_sizes: tuple[int, ...] = (),
        max_buckets: int | None = None,
    ) -> None:
        self._max_buckets = MAX_BUCKETS if max_buckets is None else max_buckets
        if self._max_buckets < max(1, len(set(batch_sizes))):
            raise InputError(
                f"max_buckets {self._max_buckets} is less than the {len(set(batch_sizes))} batch sizes announced",
                hint="announce fewer batch_sizes, or raise max_buckets",
            )
        self.backbone = backbone
        self.patch_size: int = backbone.patch_embed.stride
        self.cache_class = class_name(FixedSizeKVCache)
        self.compiled = compile_spec is not None
        self.observer: StepObserver | None = None
        self._compile_spec = compile_spec
        self._max_patches = max_patches or 0
        self._batch_sizes = batch_sizes
        self._buckets: dict[_Shape, _Bucket] = {}  # the least recently used first
        self._announced_are_made = False
        self._head: FusedHead | None = None
        self._weights_seen: tuple[Any, ...] = ()
        self._versions_seen: tuple[int, ...] = ()
        self._rewind_to = 0
        self._lock = threading.Lock()
        if compile_spec is not None:
            prepare_compiler(compile_spec, next(backbone.parameters()).device)

    # The interface the suites use

    def generate_mean(self, series: Series, horizon_steps: int) -> Tensor:
        return self.mean(Context(series.inputs, series.padding_mask, series.id_mask), horizon_steps)

    def generate_samples(
        self, series: Series, horizon_steps: int, *, num_samples: int, samples_per_batch: int
    ) -> Tensor:
        context = Context(series.inputs, series.padding_mask, series.id_mask)
        return self.samples(context, horizon_steps, num_samples=num_samples, samples_per_batch=samples_per_batch)

    @_forecasting
    def teacher_forced(self, series: Series, truth: Tensor) -> list[dict[str, Tensor]]:
        context = Context(series.inputs, series.padding_mask, series.id_mask)
        batch, steps = series.inputs.shape[0], truth.shape[-1] // self.patch_size
        with self._lock:
            bucket = self._bucket(context, batch, steps)
            with self._observed(0):
                outputs = self._prefill(bucket.step, context, copies=1, whole=False)
            parameters = [self._named(outputs, batch)]
            for index in range(1, steps):
                bucket.step.patch[:batch].copy_(truth[..., (index - 1) * self.patch_size : index * self.patch_size])
                with self._observed(index):
                    outputs = bucket.run()
                parameters.append(self._named(outputs, batch))
        return parameters

    # The forecasts themselves

    @_forecasting
    def mean(self, context: Context, horizon_steps: int) -> Tensor:
        """Feed the mean of each predicted patch back; batch, variate, horizon."""
        batch, variates, _ = context.inputs.shape
        patches, size = ceil(horizon_steps / self.patch_size), self.patch_size
        forecast = context.inputs.new_empty(batch, variates, patches * size)
        with self._lock:
            bucket = self._bucket(context, batch, patches)
            patch = bucket.step.patch[:batch]
            for index in range(patches):
                with self._observed(index):
                    if index == 0:
                        _, loc, _, probs, affine_loc, affine_scale = self._prefill(
                            bucket.step, context, copies=1, whole=False
                        )
                        patch.copy_(without_extremes((probs * loc).sum(-1) * affine_scale + affine_loc))
                    else:
                        step_outputs = bucket.run()
                self._inject_future(patch, context.future, index, copies=1)
                forecast[..., index * size : (index + 1) * size].copy_(patch)
            if patches > 1:
                self._refuse_not_finite(step_outputs, batch)
        return forecast[..., :horizon_steps]

    @_forecasting
    def samples(self, context: Context, horizon_steps: int, *, num_samples: int, samples_per_batch: int) -> Tensor:
        """Feed a draw of each patch back; batch, variate, horizon, sample. Seed for seed the draws are toto-ts's."""
        assert num_samples % samples_per_batch == 0, "num_samples must be divisible by sampling_batch_size"
        contexts, variates, _ = context.inputs.shape
        rows, rounds = contexts * samples_per_batch, num_samples // samples_per_batch
        patches, size = ceil(horizon_steps / self.patch_size), self.patch_size
        drawn = context.inputs.new_empty(rounds, rows, variates, patches * size)
        with self._lock:
            bucket = self._bucket(context, rows, patches)
            step, patch = bucket.step, bucket.step.patch[:rows]
            mixture = step.head.mixture
            for current_round in range(rounds):
                for index in range(patches):
                    with self._observed(index):
                        if index == 0 and current_round == 0:
                            first = self._prefill(step, context, copies=samples_per_batch, whole=True)
                        elif index == 0:
                            self._rewind(step)
                        else:
                            outputs = bucket.run()
                    if index == 0:
                        # toto-ts draws for every context patch here and keeps the last: the random stream must agree.
                        expanded = [value.repeat(samples_per_batch, *[1] * (value.dim() - 1)) for value in first]
                        values = draw_patch(*expanded, patch_size=size, mixture=mixture)
                    else:
                        values = draw_patch(*(value[:rows] for value in outputs), patch_size=size, mixture=mixture)
                    patch.copy_(without_extremes(values))
                    self._inject_future(patch, context.future, index, copies=samples_per_batch)
                    drawn[current_round, ..., index * size : (index + 1) * size].copy_(patch)
        by_sample = drawn.view(num_samples, contexts, variates, -1)
        return by_sample.permute(1, 2, 3, 0)[:, :, :horizon_steps]

    # Buckets

    def _bucket(self, context: Context, batch: int, horizon_patches: int) -> _Bucket:
        """Find buffers and graph for these shapes. The first forecast makes all announced ones, others come alone."""
        self._notice_changed_weights(context)
        variates, steps = context.inputs.shape[1:]
        assert steps % self.patch_size == 0, (
            f"series length {steps} must be a multiple of the patch size {self.patch_size}"
        )
        patches = steps // self.patch_size + horizon_patches
        if not self._announced_are_made:
            # what was announced is announced whatever the first forecast asks for
            capacity = self._capacity(min(patches, self._max_patches) if self._max_patches else patches)
            for announced in sorted(set(self._batch_sizes)):
                self._make_bucket((announced, variates, capacity), announced=True)
            self._announced_are_made = True
        fitting = [shape for shape in self._buckets if self._fits(shape, batch, variates, patches)]
        if fitting:
            shape = min(fitting, key=lambda shape: (shape[0], shape[2]))
        else:
            shape = (batch, variates, self._capacity(patches))
            self._make_bucket(shape, announced=not self._buckets)
        self._buckets[shape] = self._buckets.pop(shape)  # the most recently used is the last
        return self._buckets[shape]

    def _fits(self, shape: _Shape, batch: int, variates: int, patches: int) -> bool:
        # padding rows costs less than a compile
        return batch <= shape[0] <= 2 * batch and shape[1] == variates and shape[2] >= patches

    def _capacity(self, patches: int) -> int:
        """The announced maximum; past it the next power of two, so that a growing series does not compile anew."""
        wanted = self._max_patches if patches <= self._max_patches else 1 << (patches - 1).bit_length()
        return max(16, ceil(wanted / 16) * 16)

    def _make_bucket(self, shape: _Shape, *, announced: bool) -> None:
        """Make the buffers and compile the step over them, the one moment for both: forecasts only overwrite."""
        if shape in self._buckets:  # a first forecast that was broken off
            return
        while len(self._buckets) >= self._max_buckets:
            oldest = next(iter(self._buckets))
            del self._buckets[oldest]
            _LOG.warning(dropping_bucket(oldest, self._max_buckets))
        if self.compiled:
            line = compiling_bucket(shape, len(self._buckets) + 1, self._max_buckets, announced=announced)
            _LOG.log(logging.INFO if announced else logging.WARNING, line)
        if self._head is None:
            self._head = FusedHead(self.backbone)
        batch, variates, capacity = shape
        step = self.step_class(self.backbone, self._head, batch=batch, variates=variates, capacity=capacity)
        bucket = _Bucket(step, self._compile(step))
        with no_full_collections():
            bucket.run()  # compiles here, on empty buffers, rather than in the middle of a forecast
        self._buckets[shape] = bucket

    def _compile(self, step: PlainStep) -> RunStep:
        return step.forward if self._compile_spec is None else compile_step(step, self._compile_spec)

    def _notice_changed_weights(self, context: Context) -> None:
        """Other tensors, another device or dtype: all buffers go. Other values in the same tensors: what was computed
        from them is computed again."""
        parameters = list(self.backbone.parameters())
        seen = tuple((id(p), p.data_ptr()) for p in parameters)
        # a tensor of inference mode has no version; it cannot be written to outside of that mode either
        versions = tuple(0 if p.is_inference() else p._version for p in parameters)
        if seen != self._weights_seen:
            self._buckets.clear()
            self._announced_are_made = False
            self._head = None
            not_covered = why_not_static(self.backbone)
            if not_covered:
                raise TypeError(f"fixed_size has no static step for {not_covered}")
            self._weights_seen = seen
        elif self._head is not None and (versions != self._versions_seen or self._head.is_stale()):
            self._head.refresh()
            for bucket in self._buckets.values():
                bucket.step.refresh()
        self._versions_seen = versions
        weight = parameters[0]
        if context.inputs.dtype != weight.dtype or context.inputs.device != weight.device:
            raise TypeError(
                f"the series is {context.inputs.dtype} on {context.inputs.device}, "
                f"the model {weight.dtype} on {weight.device}"
            )

    # One forecast

    @torch.inference_mode()  # a tenth faster than without gradients: most of the pass is call overhead
    def _prefill(self, step: PlainStep, context: Context, *, copies: int, whole: bool) -> tuple[Tensor, ...]:
        """The one pass over the context, filling the buffers; the distribution of the newest patch or of all."""
        backbone, inputs = self.backbone, context.inputs
        scaled, loc, scale = backbone.scaler(
            inputs,
            weights=torch.ones_like(inputs),
            padding_mask=context.padding_mask,
            prefix_length=inputs.shape[-1],
        )
        embeddings, ids = backbone.patch_embed(scaled, context.id_mask)
        heads = backbone.transformer.layers[0].num_heads
        group_mask = backbone.transformer._get_mask(num_heads=heads, dtype=inputs.dtype, id_mask=ids)
        hidden = step.prefill(embeddings, group_mask, whole=whole)
        newest_ids = ids[:, None, :, -1]
        bias = torch.zeros_like(step.group_bias[: inputs.shape[0]])
        bias.masked_fill_(newest_ids.unsqueeze(2) != newest_ids.unsqueeze(3), -torch.inf)
        step.group_bias[: copies * inputs.shape[0]].unflatten(0, (copies, -1)).copy_(bias)
        step.scaler.begin(inputs, context.padding_mask, loc, scale, copies)
        self._rewind_to = inputs.shape[-1] // self.patch_size
        step.cache.begin(self._rewind_to)
        parameters = step.predict(hidden)
        self._refuse_not_finite(parameters, inputs.shape[0])
        last = slice(-self.patch_size, None) if loc.shape[-1] > 1 else slice(None)
        return *parameters, loc[..., last], scale[..., last]

    def _refuse_not_finite(self, outputs: Sequence[Tensor], rows: int) -> None:
        """toto-ts's mixture raises on NaN in every step. One that came up on the way stays: the last step tells.

        Once anything was compiled in the process, dynamo has switched toto-ts's own check off; this one stays on.
        """
        assert self._head is not None
        if self._head.mixture and not torch.stack([value[:rows].isfinite().all() for value in outputs]).all():
            raise ValueError(
                "the predicted distribution is not finite: the series or its known future values hold NaN or infinity"
            )

    def _rewind(self, step: PlainStep) -> None:
        """Back to the end of the context for the next batch of samples: nothing of the context was overwritten."""
        step.scaler.rewind()
        step.cache.begin(self._rewind_to)

    def _inject_future(self, patch: Tensor, future: Tensor | None, index: int, *, copies: int) -> None:
        if future is not None:
            known = future[..., index * self.patch_size : (index + 1) * self.patch_size]
            patch[:, -future.shape[1] :, : known.shape[-1]].copy_(known.repeat(copies, 1, 1))

    def _observed(self, step: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.observer is None else self.observer(step)

    def _named(self, outputs: tuple[Tensor, ...], batch: int) -> dict[str, Tensor]:
        names = ("df", "loc", "scale", "probs")
        values = {name: value[:batch].clone() for name, value in zip(names, outputs, strict=False)}
        if self._head is not None and not self._head.mixture:
            return {name: values[name].squeeze(-1) for name in ("df", "loc", "scale")}
        return values


def bind_static(
    backbone: TotoBackbone,
    compile_spec: CompileSpec | None,
    max_patches: int | None = None,
    batch_sizes: tuple[int, ...] = (),
    max_buckets: int | None = None,
) -> StaticModel | WholeModel:
    """The static model; where it does not cover the backbone, toto-ts's own cache, eager, with a warning."""
    not_covered = why_not_static(backbone)
    if not not_covered:
        return StaticModel(backbone, compile_spec, max_patches, batch_sizes, max_buckets)
    warnings.warn(f"fixed_size does not cover {not_covered}: running toto-ts's own cache, eager", stacklevel=2)
    return WholeModel(backbone, KVCache, None)
