"""The graphs that fixed_size holds for a model, and which of them a forecast takes."""

import threading
from math import ceil
from typing import Any

import torch
from toto.model.attention import AttentionAxis
from toto.model.backbone import TotoBackbone

from toto_compat.caches.fixed_size import FixedSizeKVCache
from toto_compat.errors import InputError
from toto_compat.model.artifact_key import artifact_key
from toto_compat.model.artifacts import Artifacts
from toto_compat.model.bound import CompileSpec, StepObserver, class_name
from toto_compat.model.buckets import (
    MAX_BUCKETS,
    SMALLEST_PASS,
    Bucket,
    Buckets,
    DrawShape,
    PassShape,
    Shape,
    StepShape,
    cheapest_batch,
    room_for,
)
from toto_compat.model.compile_step import Run, compile_module, prepare_compiler
from toto_compat.model.context_pass import Context, StaticPass
from toto_compat.model.coverage import why_not_static
from toto_compat.model.head import FusedHead
from toto_compat.model.sampling import DIRECT, TOTO_TS, PatchDraws
from toto_compat.model.static_step import PlainStep, StaticStep

DRAWS = (DIRECT, TOTO_TS)
# A context this many times shorter than the room there is gets a pass of its own: on `base`, 16 patches in a room for
# 64 take twice as long as in one for 16 (torch 2.13.0, CPU).
_WORTH_A_PASS = 4
# What a decode step may hold of keys and values: 148 rows of `base` at 16 patches, which weigh 1.1 MB each. More rows
# are decoded in several turns of one step: buffers for 384 of them are as large as two thirds of the model, and a step
# of 128 takes a third of the time (`base`, CPU, torch 2.13.0), since it multiplies and no longer waits for weights.
_MOST_STEP_BYTES = 160 << 20


class NotCoveredError(TypeError):
    """The model is, or has become, one that the static graphs do not cover."""


class StaticGraphs:
    """Graphs over buffers that stay where they are: passes over contexts, decode steps, draws.

    A forecast takes what fits; `StaticModel` is what it does with them.
    """

    step_class: type[PlainStep] = StaticStep
    pass_class: type[StaticPass] | None = StaticPass  # None: the definition, which compiles nothing

    def __init__(
        self,
        backbone: TotoBackbone,
        compile_spec: CompileSpec | None,
        max_patches: int | None = None,
        batch_sizes: tuple[int, ...] = (),
        max_buckets: int | None = None,
        *,
        draws: str | None = None,
        max_context: int | None = None,
    ) -> None:
        most = MAX_BUCKETS if max_buckets is None else max_buckets
        if most < max(1, len(set(batch_sizes))):
            raise InputError(
                f"max_buckets {most} is less than the {len(set(batch_sizes))} batch sizes announced",
                hint="announce fewer batch_sizes, or raise max_buckets",
            )
        if draws is not None and draws not in DRAWS:
            raise InputError(f"draws {draws!r} is unknown", hint=f"accepted: {', '.join(DRAWS)}")
        self.backbone = backbone
        self.patch_size: int = backbone.patch_embed.stride
        self.cache_class = class_name(FixedSizeKVCache)
        self.compiled = compile_spec is not None
        self.draws = draws or DIRECT
        self.observer: StepObserver | None = None
        over_time = sum(layer.attention_axis == AttentionAxis.TIME for layer in backbone.transformer.layers)
        self._values_a_slot = 2 * over_time * backbone.embed_dim  # keys and values of one patch
        self._compile_spec = compile_spec
        self._max_patches, self._max_context = max_patches or 0, max_context or 0
        self._batch_sizes = tuple(sorted(set(batch_sizes)))
        self._buckets = Buckets(most)
        self.artifacts: Artifacts | None = None
        if compile_spec is not None and compile_spec.cache_dir is not None:
            announced = f"{max_patches} patches, context {max_context}, batches {self._batch_sizes}, draws {self.draws}"
            key = artifact_key(backbone, compile_spec, announced)
            self.artifacts = Artifacts(compile_spec.cache_dir, key)
            self._buckets = Buckets(most, self.artifacts.compiling)
        self._announced_are_made = False
        self._head: FusedHead | None = None
        self._weights_seen: tuple[Any, ...] = ()
        self._versions_seen: tuple[int, ...] = ()
        self._lock = threading.Lock()
        if compile_spec is not None:
            prepare_compiler(compile_spec, next(backbone.parameters()).device)

    @property
    def precision(self) -> torch.dtype:
        """Give the precision that matrix products have now: autocast's, or the weights'."""
        return self._mixed() or self.backbone.unembed.weight.dtype

    def _mixed(self) -> torch.dtype | None:
        """Give the precision that autocast asks for now, or None."""
        kind = self.backbone.unembed.weight.device.type
        has_autocast = torch.amp.autocast_mode.is_autocast_available(kind)  # tensors without a device have none
        return torch.get_autocast_dtype(kind) if has_autocast and torch.is_autocast_enabled(kind) else None

    def _make_announced(self, context: Context, horizon_patches: int) -> None:
        """Make all that was announced at the first forecast that is within it, for its variates and precision.

        Any other shape comes alone when it is first met.
        """
        _, variates, steps = context.inputs.shape
        length, mixed = steps // self.patch_size, self._mixed()
        within = length <= (self._max_context or length) and length + horizon_patches <= (self._max_patches or 0)
        if not within or self._announced_are_made:
            return
        self._announced_are_made = True
        if self._max_context and self.compiled and self.pass_class is not None:
            longest = self._pass_shape(self._max_context, variates, 1, whole=False)
            self._take(longest, announced=True)
            own = self._pass_shape(length, variates, 1, whole=False)
            if own.patches * _WORTH_A_PASS <= longest.patches:
                self._take(own, announced=True)
        if self._max_patches - (self._max_context or self._max_patches - 2) > 1:
            capacity = self._capacity(self._max_patches)
            for batch in self._announced_batches(variates, capacity, mixed):
                self._take(StepShape(batch, variates, capacity, mixed), announced=True)

    def _pass_shape(self, length: int, variates: int, series: int, *, whole: bool) -> PassShape:
        room = room_for(length) if self.compiled else length * series  # eager, no shape costs anything
        return PassShape(room, variates, room // SMALLEST_PASS if self.compiled else series, whole, self._mixed())

    def _pass_bucket(self, series: int, variates: int, length: int, *, whole: bool) -> Bucket:
        """Find the pass that takes least: room for one context at least; several passes if it takes no more."""
        own = self._pass_shape(length, variates, series, whole=whole)
        if not self.compiled:
            return self._take(own, announced=True)
        known = [
            shape
            for shape in self._buckets.passes()
            if (shape.variates, shape.whole, shape.mixed) == (own.variates, own.whole, own.mixed)
            and shape.patches >= length
        ]
        announced = length <= self._max_context
        if not known or (not announced and min(shape.patches for shape in known) > _WORTH_A_PASS * own.patches):
            return self._take(own, announced=announced or not len(self._buckets))

        def cost(shape: PassShape) -> tuple[int, int]:
            passes = ceil(series / min(shape.series, shape.patches // length))
            return passes * (shape.patches + 2 * SMALLEST_PASS), shape.patches

        return self._take(min(known, key=cost), announced=True)

    def _in_batches(self, context: Context, patches: int) -> list[slice]:
        """Split the series of a mean forecast over the announced batches, where it decodes at all."""
        series, variates, steps = context.inputs.shape
        at_once = series if patches == 1 else self._rows_at_once(series, 1, variates, steps, patches)
        return [slice(begin, begin + at_once) for begin in range(0, series, at_once)]

    def _samples_at_once(self, contexts: int, variates: int, context: Context, patches: int, wanted: int) -> int:
        steps = context.inputs.shape[-1]
        return max(1, self._rows_at_once(contexts * wanted, contexts, variates, steps, patches) // contexts)

    def _rows_at_once(self, rows: int, unit: int, variates: int, steps: int, patches: int) -> int:
        """Tell how many rows to decode together, a multiple of `unit`: all, or what an announced batch holds."""
        capacity, mixed = steps // self.patch_size + patches, self._mixed()
        usable = [
            shape.batch
            for shape in self._buckets.steps()
            if (shape.variates, shape.mixed) == (variates, mixed)
            and shape.capacity >= capacity
            and self._buckets.allows(shape.batch)
            and self._was_announced(shape)
            and shape.batch >= unit
        ]
        if usable and rows <= self._batch_sizes[-1]:
            return min(rows, cheapest_batch(rows, usable) // unit * unit)
        return min(rows, ceil(self._step_batch(rows, variates, self._capacity(capacity), mixed) / unit) * unit)

    def _step_batch(self, rows: int, variates: int, capacity: int, mixed: torch.dtype | None) -> int:
        """Give the batch of a step that decodes so many rows: all at once, or in even turns where they would hold much.

        toto-ts's random stream goes over all rows of a batch patch by patch: there is no taking turns then.
        """
        if self.draws == TOTO_TS:
            return rows
        of_each = (mixed or self.backbone.unembed.weight.dtype).itemsize
        held = rows * variates * capacity * self._values_a_slot * of_each
        return ceil(rows / ceil(held / _MOST_STEP_BYTES))

    def _announced_batches(self, variates: int, capacity: int, mixed: torch.dtype | None) -> tuple[int, ...]:
        """Give the batches of the steps that decode what was announced, each once."""
        batches = (self._step_batch(batch, variates, capacity, mixed) for batch in self._batch_sizes)
        return tuple(dict.fromkeys(batches))

    def _was_announced(self, shape: StepShape) -> bool:
        return shape.batch in self._announced_batches(shape.variates, shape.capacity, shape.mixed)

    def _bucket(self, batch: int, variates: int, patches: int) -> Bucket:
        """Find a decode step for these rows: one that fits, an announced one that holds them, or one of its own."""
        mixed = self._mixed()
        fitting = [
            shape
            for shape in self._buckets.steps()
            if shape.mixed == mixed
            and self._buckets.allows(shape.batch)
            and self._fits(shape, batch, variates, patches)
        ]
        if fitting:
            return self._take(min(fitting, key=lambda shape: (shape.batch, shape.capacity)), announced=True)
        own = StepShape(batch, variates, self._capacity(patches), mixed)
        return self._take(own, announced=not self._buckets.steps())

    def _fits(self, shape: StepShape, batch: int, variates: int, patches: int) -> bool:
        # padding rows costs less than a compile, and what was announced is there to be used
        rows_fit = batch <= shape.batch and (shape.batch <= 2 * batch or self._was_announced(shape))
        return rows_fit and shape.variates == variates and shape.capacity >= patches

    def _capacity(self, patches: int) -> int:
        """The announced maximum; past it the next power of two, so that a growing series does not compile anew."""
        wanted = self._max_patches if patches <= self._max_patches else 1 << (patches - 1).bit_length()
        return max(16, ceil(wanted / 16) * 16)

    def _take(self, shape: Shape, *, announced: bool) -> Bucket:
        return self._buckets.take(shape, self._make, compiled=self.compiled, announced=announced)

    def _make(self, shape: Shape) -> Bucket:
        """Make the buffers and compile over them, the one moment for both: forecasts only overwrite."""
        if isinstance(shape, StepShape):
            module: Any = self.step_class(
                self.backbone,
                self._made_head(),
                batch=shape.batch,
                variates=shape.variates,
                capacity=shape.capacity,
                mixed=shape.mixed,
            )
        elif isinstance(shape, DrawShape):
            weight, components = self.backbone.unembed.weight, self._made_head().components
            module = PatchDraws(shape.variates, self.patch_size, components, weight.dtype, weight.device)
        else:
            assert self.pass_class is not None
            module = self.pass_class(
                self.backbone,
                self._made_head(),
                room=shape.patches,
                variates=shape.variates,
                series=shape.series,
                whole=shape.whole,
                mixed=shape.mixed,
            )
        return Bucket(module, self._compile(module, str(shape)))

    def _compile(self, module: Any, name: str) -> Run:
        run = module.forward if self._compile_spec is None else compile_module(module, name, self._compile_spec)
        return torch.inference_mode()(run) if self._compile_spec is None and isinstance(module, StaticPass) else run

    def _made_head(self) -> FusedHead:
        if self._head is None:
            self._head = FusedHead(self.backbone)
        return self._head

    def _notice_changed_weights(self, context: Context) -> None:
        """Other tensors, another device or dtype: all buffers go. Other values in the same tensors: what was computed
        from them is computed again."""
        not_covered = why_not_static(self.backbone)
        if not_covered:
            raise NotCoveredError(f"fixed_size has no static graphs for {not_covered}")
        parameters = list(self.backbone.parameters())
        seen = tuple((id(p), p.data_ptr()) for p in parameters)
        # a tensor of inference mode has no version; it cannot be written to outside of that mode either
        versions = tuple(0 if p.is_inference() else p._version for p in parameters)
        if seen != self._weights_seen:
            self._buckets.clear()
            self._announced_are_made = False
            self._head = None
            self._weights_seen = seen
        elif self._head is not None and (versions != self._versions_seen or self._head.is_stale()):
            self._head.refresh()
            for bucket in self._buckets.values():
                bucket.module.refresh()
        self._versions_seen = versions
        weight = parameters[0]
        if context.inputs.dtype != weight.dtype or context.inputs.device != weight.device:
            raise TypeError(
                f"the series is {context.inputs.dtype} on {context.inputs.device}, "
                f"the model {weight.dtype} on {weight.device}"
            )
