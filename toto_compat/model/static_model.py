"""Forecasting with static graphs: one pass over the context, draws, a decode loop, and no host sync but at the end."""

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import ceil
from typing import Any

import torch
from torch import Tensor
from toto.model.backbone import TotoBackbone
from toto.model.util import KVCache

from toto_compat.model.bound import CompileSpec, WholeModel
from toto_compat.model.buckets import Bucket, DrawShape, Shape
from toto_compat.model.context_pass import Context, PlainPass, Prefilled, group_bias
from toto_compat.model.coverage import why_not_static
from toto_compat.model.sampling import TOTO_TS, draw_patch, without_extremes
from toto_compat.model.series import Series
from toto_compat.model.static_graphs import StaticGraphs


def _forecasting(method: Callable[..., Any]) -> Callable[..., Any]:
    """Without gradients, and out of the caller's inference mode: buffers made there could not be written outside it."""

    @functools.wraps(method)
    def run(*arguments: Any, **named: Any) -> Any:
        with torch.inference_mode(False), torch.no_grad():
            return method(*arguments, **named)

    return run


class StaticModel(StaticGraphs):
    """The fixed_size cache bound to a backbone. One forecast at a time: the buffers are shared, a lock guards them.

    A second thread waits for the first. Modes with CUDA graphs: forecast from one thread. Some releases of torch keep
    such graphs per thread.
    """

    # The interface the suites use

    def generate_mean(self, series: Series, horizon_steps: int) -> Tensor:
        return self.mean(Context(series.inputs, series.padding_mask, series.id_mask), horizon_steps)

    def generate_samples(
        self, series: Series, horizon_steps: int, *, num_samples: int, samples_per_batch: int
    ) -> Tensor:
        context = Context(series.inputs, series.padding_mask, series.id_mask)
        return self.samples(context, horizon_steps, num_samples=num_samples, samples_per_batch=samples_per_batch)

    def teacher_forced(self, series: Series, truth: Tensor) -> list[dict[str, Tensor]]:
        return self.forced(Context(series.inputs, series.padding_mask, series.id_mask), truth)

    @_forecasting
    def forced(self, context: Context, truth: Tensor) -> list[dict[str, Tensor]]:
        """Predict each patch of `truth` from the context and the truth before it.

        `truth` has as many rows as the context has series, or a multiple: then each series serves several rows.
        """
        patches, (contexts, variates, _) = truth.shape[-1] // self.patch_size, context.inputs.shape
        copies = len(truth) // contexts
        with self._one_forecast(context, patches):
            if copies > 1:
                at_once = contexts * self._samples_at_once(contexts, variates, context, patches, copies)
                turns = [truth[begin : begin + at_once] for begin in range(0, len(truth), at_once)]
                parts = [self._forced(context, turn, patches) for turn in turns]
            else:
                parts = [
                    self._forced(context.part(part), truth[part], patches)
                    for part in self._in_batches(context, patches)
                ]
        return [
            {name: torch.cat([part[index][name] for part in parts]) for name in parts[0][index]}
            for index in range(patches)
        ]

    def _forced(self, context: Context, truth: Tensor, patches: int) -> list[dict[str, Tensor]]:
        rows, size = len(truth), self.patch_size
        with self._observed(0):
            prefilled = self._prefill(context, patches)
        first = self._named(prefilled.parameters)
        copies = rows // len(context.inputs)
        parameters = [{name: value.repeat(copies, *[1] * (value.dim() - 1)) for name, value in first.items()}]
        if patches == 1:
            return parameters
        step = self._begin(prefilled, rows, context, patches, sampling=False)
        for index in range(1, patches):
            step.module.patch[:rows].copy_(truth[..., (index - 1) * size : index * size])
            with self._observed(index):
                outputs = step.run()
            parameters.append(self._named([value[:rows] for value in outputs[:4]]))
        return parameters

    def take_unchecked(self) -> list[Shape]:
        """Give the shapes that were made since this was last asked."""
        shapes, self._buckets.unchecked = self._buckets.unchecked, []
        return shapes

    # The forecasts themselves

    @_forecasting
    def mean(self, context: Context, horizon_steps: int) -> Tensor:
        """Feed the mean of each predicted patch back; batch, variate, horizon."""
        batch, variates, _ = context.inputs.shape
        patches = ceil(horizon_steps / self.patch_size)
        forecast = context.inputs.new_empty(batch, variates, patches * self.patch_size)
        with self._one_forecast(context, patches):
            for part in self._in_batches(context, patches):
                self._mean_of(context.part(part), patches, forecast[part])
        return forecast[..., :horizon_steps]

    def _mean_of(self, context: Context, patches: int, forecast: Tensor) -> None:
        batch, size = len(forecast), self.patch_size
        with self._observed(0):
            prefilled = self._prefill(context, patches)
            _, loc, _, probs = prefilled.parameters
            mean = (probs * loc).sum(-1).to(forecast.dtype)
            mean = without_extremes(mean * prefilled.affine_scale + prefilled.affine_loc)
            self._inject_future(mean, context.future, 0, copies=1)
            forecast[..., :size].copy_(mean)
        outputs: Sequence[Tensor] = prefilled.parameters
        if patches > 1:
            step = self._begin(prefilled, batch, context, patches, sampling=False)
            patch = step.module.patch[:batch]
            patch.copy_(mean)
            for index in range(1, patches):
                with self._observed(index):
                    outputs = [value[:batch] for value in step.run()]
                self._inject_future(patch, context.future, index, copies=1)
                forecast[..., index * size : (index + 1) * size].copy_(patch)
        self._refuse_unfit(prefilled, outputs)

    @_forecasting
    def samples(self, context: Context, horizon_steps: int, *, num_samples: int, samples_per_batch: int) -> Tensor:
        """Feed a draw of each patch back; batch, variate, horizon, sample."""
        assert num_samples % samples_per_batch == 0, "num_samples must be divisible by sampling_batch_size"
        with self._one_forecast(context, ceil(horizon_steps / self.patch_size)):
            if self.draws == TOTO_TS:
                return self._samples_of_toto_ts(context, horizon_steps, num_samples, samples_per_batch)
            return self._samples(context, horizon_steps, num_samples, samples_per_batch)

    def _samples(self, context: Context, horizon_steps: int, num_samples: int, samples_per_batch: int) -> Tensor:
        """Draw what is asked for: of the first patch for all samples at once, since they all begin with it."""
        contexts, variates, _ = context.inputs.shape
        patches, size = ceil(horizon_steps / self.patch_size), self.patch_size
        with self._observed(0):
            prefilled = self._prefill(context, patches)
            points = horizon_steps if patches == 1 else size
            first = self._draw_first(prefilled, points, num_samples)  # [contexts, variates, points, samples]
            if context.future is not None:
                known = context.future[..., :points].unsqueeze(-1)
                first[:, -context.future.shape[1] :, : known.shape[2]].copy_(known.expand(-1, -1, -1, num_samples))
        if patches == 1:
            self._refuse_unfit(prefilled, prefilled.parameters)
            return first
        at_once = self._samples_at_once(contexts, variates, context, patches, samples_per_batch)
        drawn = first.new_empty(contexts, variates, patches * size, num_samples)
        drawn[:, :, :size].copy_(first)
        outputs: Sequence[Tensor] = ()
        for begin in range(0, num_samples, at_once):
            part = drawn[..., begin : begin + at_once]
            samples = part.shape[-1]
            rows = samples * contexts
            with self._observed(0):
                step = self._begin(prefilled, rows, context, patches, sampling=True)
                patch = step.module.patch[:rows]  # rows are samples times contexts, as toto-ts has them
                by_sample = patch.unflatten(0, (samples, contexts)).permute(1, 2, 3, 0)  # as `drawn`
                by_sample.copy_(part[:, :, :size])
            for index in range(1, patches):
                with self._observed(index):
                    step.module.uniforms.uniform_()
                    outputs = [value[:rows] for value in step.run()]
                self._inject_future(patch, context.future, index, copies=samples)
                part[:, :, index * size : (index + 1) * size].copy_(by_sample)
        self._refuse_unfit(prefilled, outputs)
        return drawn[:, :, :horizon_steps]

    def _draw_first(self, prefilled: Prefilled, points: int, num_samples: int) -> Tensor:
        """Draw the first patch's points, as many as are asked for, for every sample of every series."""
        contexts, variates = prefilled.affine_loc.shape[:2]
        drawn = prefilled.affine_loc.new_empty(contexts, variates, points, num_samples)
        bucket = self._take(DrawShape(variates), announced=True)
        for one in range(contexts):
            parameters = tuple(value[one] for value in prefilled.parameters)
            affine = prefilled.affine_loc[one], prefilled.affine_scale[one]
            at_once = bucket.module.begin(parameters, *affine, points)
            for begin in range(0, num_samples, at_once):
                bucket.module.uniforms.uniform_()
                part = drawn[one, ..., begin : begin + at_once]
                values = bucket.run()[: variates * points * at_once].view(variates, points, at_once)
                part.copy_(values[..., : part.shape[-1]])
        return drawn

    def _samples_of_toto_ts(
        self, context: Context, horizon_steps: int, num_samples: int, samples_per_batch: int
    ) -> Tensor:
        """Draw with toto-ts's random stream: for every context patch and component, and keep one of the newest."""
        contexts, variates, _ = context.inputs.shape
        rows, rounds = contexts * samples_per_batch, num_samples // samples_per_batch
        patches, size = ceil(horizon_steps / self.patch_size), self.patch_size
        drawn = context.inputs.new_empty(rounds, rows, variates, patches * size)
        with self._observed(0):
            prefilled = self._prefill(context, patches, whole=True)
        first = (*prefilled.parameters, prefilled.affine_loc, prefilled.affine_scale)
        assert self._head is not None
        mixture = self._head.mixture
        outputs: Sequence[Tensor] = prefilled.parameters
        for current_round in range(rounds):
            values = draw_patch(*first, patch_size=size, mixture=mixture, copies=samples_per_batch)
            values = self._kept(values, drawn[current_round], context, 0)
            if patches == 1:
                continue
            with self._observed(0):
                step = self._begin(prefilled, rows, context, patches, sampling=False)
            for index in range(1, patches):
                step.module.patch[:rows].copy_(values)
                with self._observed(index):
                    outputs = [value[:rows] for value in step.run()]
                values = draw_patch(*outputs, patch_size=size, mixture=mixture)
                values = self._kept(values, drawn[current_round], context, index)
        self._refuse_unfit(prefilled, outputs)
        by_sample = drawn.view(num_samples, contexts, variates, -1)
        return by_sample.permute(1, 2, 3, 0)[:, :, :horizon_steps]

    def _kept(self, values: Tensor, drawn: Tensor, context: Context, index: int) -> Tensor:
        """Keep a drawn patch of one round, as toto-ts feeds it back."""
        values, size = without_extremes(values.to(drawn.dtype)), self.patch_size
        self._inject_future(values, context.future, index, copies=len(drawn) // len(context.inputs))
        drawn[..., index * size : (index + 1) * size].copy_(values)
        return values

    # One forecast, piece by piece

    @contextmanager
    def _one_forecast(self, context: Context, patches: int) -> Iterator[None]:
        """Take the lock and look at what there is; if memory runs out, make no buffers as large as these again."""
        steps = context.inputs.shape[-1]
        assert steps % self.patch_size == 0, (
            f"series length {steps} must be a multiple of the patch size {self.patch_size}"
        )
        with self._lock:
            self._notice_changed_weights(context)
            self._rows_asked = len(context.inputs)
            try:
                self._make_announced(context, patches)
                yield
            except torch.OutOfMemoryError:
                self._buckets.forget_batches_from(self._rows_asked)
                raise

    def _prefill(self, context: Context, patches: int, *, whole: bool = False) -> Prefilled:
        """The one pass over the context, or as many as its series take; a forecast of one patch needs no keys after."""
        series, variates, steps = context.inputs.shape
        if self.pass_class is None:
            return PlainPass(self.backbone, self._made_head()).run(context, whole=whole)
        length = steps // self.patch_size
        bucket = self._pass_bucket(series, variates, length, whole=whole)
        at_once = bucket.module.fits(length)
        parts = [context.part(slice(begin, begin + at_once)) for begin in range(0, series, at_once)]
        prefilled = []
        for part in parts:
            bucket.module.put(part)
            prefilled.append(bucket.module.result(bucket.run(), part, keep_keys=patches > 1))
        return Prefilled.joined(prefilled)

    def _begin(
        self, prefilled: Prefilled, rows: int, context: Context, horizon_patches: int, *, sampling: bool
    ) -> Bucket:
        """Lay what the pass left into a decode step's buffers, for as many rows as go on from each series."""
        contexts, variates, steps = context.inputs.shape
        length, copies = steps // self.patch_size, rows // contexts
        self._rows_asked = rows
        bucket = self._bucket(rows, variates, length + horizon_patches)
        step = bucket.module
        for layer, keys_values in enumerate(prefilled.keys_values):
            step.cache.fill(layer, keys_values)
        step.cache.begin(length)
        bias = group_bias(prefilled.groups, step.group_bias.dtype).unsqueeze(1)  # [contexts, 1, variates, variates]
        step.group_bias[:rows].unflatten(0, (copies, contexts)).copy_(bias)
        step.scaler.begin(prefilled.scaler_state, copies)
        step.sampling.fill_(sampling)
        return bucket

    def _refuse_unfit(self, prefilled: Prefilled, outputs: Sequence[Tensor]) -> None:
        """Ask the device once, at the end. NaN that came up on the way stays: the last step tells.

        toto-ts's mixture raises on NaN in every step. Once anything was compiled in the process, dynamo has switched
        that check off; this one stays on.
        """
        finite = torch.stack([value.isfinite().all() for value in outputs]).all()
        if self._made_head().mixture and not (prefilled.fit & finite):
            assert prefilled.fit, "Patches cannot span multiple datasets"
            raise ValueError(
                "the predicted distribution is not finite: the series or its known future values hold NaN or infinity"
            )
        assert self._made_head().mixture or prefilled.fit, "Patches cannot span multiple datasets"

    def _inject_future(self, patch: Tensor, future: Tensor | None, index: int, *, copies: int) -> None:
        if future is not None:
            known = future[..., index * self.patch_size : (index + 1) * self.patch_size]
            patch[:, -future.shape[1] :, : known.shape[-1]].copy_(known.repeat(copies, 1, 1))

    def _observed(self, step: int) -> AbstractContextManager[None]:
        return nullcontext() if self.observer is None else self.observer(step)

    def _named(self, parameters: Sequence[Tensor]) -> dict[str, Tensor]:
        values = {name: value.clone() for name, value in zip(("df", "loc", "scale", "probs"), parameters, strict=True)}
        if not self._made_head().mixture:
            return {name: values[name].squeeze(-1) for name in ("df", "loc", "scale")}
        return values


def bind_static(
    backbone: TotoBackbone,
    compile_spec: CompileSpec | None,
    max_patches: int | None = None,
    batch_sizes: tuple[int, ...] = (),
    max_buckets: int | None = None,
    *,
    draws: str | None = None,
    max_context: int | None = None,
) -> StaticModel | WholeModel:
    """The static model; where it does not cover the backbone, toto-ts's own cache, eager, with a warning."""
    not_covered = why_not_static(backbone)
    if not not_covered:
        return StaticModel(
            backbone, compile_spec, max_patches, batch_sizes, max_buckets, draws=draws, max_context=max_context
        )
    warnings.warn(f"fixed_size does not cover {not_covered}: running toto-ts's own cache, eager", stacklevel=2)
    return WholeModel(backbone, KVCache, None)
