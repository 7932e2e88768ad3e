"""`compile_toto`, the one line a user changes: toto-ts's own forecaster interface, compiled on a chosen cache."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from toto.inference.forecaster import TotoForecaster
from toto.model.backbone import TotoBackbone

from toto_compat.contract.caches import CACHES
from toto_compat.contract.request import CacheRequest, CompileSettings
from toto_compat.errors import InputError
from toto_compat.model.binding import bind
from toto_compat.model.bound import BoundModel, CompileSpec, WholeModel
from toto_compat.model.context_pass import Context
from toto_compat.model.coverage import why_not_static
from toto_compat.model.first_check import first_difference
from toto_compat.model.static_graphs import NotCoveredError
from toto_compat.model.static_model import StaticModel

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def compile_toto(
    model: Any,
    cache: str = "fixed_size",
    mode: str | None = "reduce-overhead",
    *,
    settings: CompileSettings | None = None,
    max_context: int | None = None,
    max_horizon: int | None = None,
    batch_sizes: tuple[int, ...] = (),
    max_buckets: int | None = None,
    draws: str | None = None,
    check_first: bool = True,
    cache_dir: str | Path | None = None,
) -> TotoForecaster:
    """A forecaster that forecasts like toto-ts's, compiled.

    `model` is a Toto, its backbone or a TotoForecaster; it is shared, not copied, and put into evaluation mode as
    toto-ts does. `cache` is the name of a built-in cache or 'path/to/file.py:Class'; with `mode` None it is used
    eager, nothing is compiled. `settings` are set process-wide.
    `max_context` and `max_horizon` (time steps) and `batch_sizes` (series times samples per batch) say what is to come:
    those shapes are compiled at the first forecast, with its number of variates and its precision, and nothing within
    them is compiled again; others when they are first met, which the logger `toto_compat.buckets` says. At most
    `max_buckets` shapes (16) are held, the least recently used goes.
    In `cache_dir` fixed_size keeps what it compiles, and a later process on the same machine and software takes it from
    there. It is code: a folder that others own or can write to is refused. The logger `toto_compat.artifacts` says what
    was used and kept, and why not.
    `draws` is 'direct' (the default): samples of the same distribution, as many numbers drawn as are asked for; or
    'toto-ts': toto-ts's own random stream, so that a seed gives toto-ts's own samples.
    A model that fixed_size does not cover runs eager, with a warning, and `eager_because` says why. With `check_first`
    the first forecast of every shape is held against eager, parameter by parameter, and if they differ it runs eager
    from there on, too; `stepped_aside` counts those forecasts.
    """
    if mode is not None and mode not in MODES:
        raise InputError(f"compile mode {mode!r} is unknown", hint=f"accepted: {', '.join(MODES)}")
    if cache not in CACHES and ":" not in cache:
        raise InputError(f"cache {cache!r} is unknown", hint=f"accepted: {', '.join(CACHES)} or path/to/file.py:Class")
    if cache_dir is not None and cache != "fixed_size":
        raise InputError(f"cache_dir is of no use to cache {cache}", hint="only fixed_size keeps what it compiles")
    kept = None if cache_dir is None else Path(cache_dir).expanduser()
    backbone = _backbone_of(model)
    patch_size = backbone.patch_embed.stride
    max_patches = None
    if max_context is not None or max_horizon is not None:
        max_patches = ceil((max_context or 0) / patch_size) + ceil((max_horizon or 0) / patch_size)
    both_said = max_context is not None and max_horizon is not None
    bound = bind(
        backbone,
        CacheRequest(name=cache, source="builtin" if cache in CACHES else cache),
        compile_spec=None if mode is None else CompileSpec(mode, settings or CompileSettings(), cache_dir=kept),
        max_patches=max_patches,
        batch_sizes=batch_sizes,
        max_buckets=max_buckets,
        draws=draws,
        max_context=ceil((max_context or 0) / patch_size) if both_said else None,
    )
    forecaster = forecaster_of(bound, check_first=check_first)
    if forecaster is None:
        raise InputError(
            f"cache {cache}: it binds itself and comes with no forecaster of toto-ts's",
            hint="call its own bind(), or give what it returns a member `forecaster`",
        )
    if isinstance(bound, WholeModel):
        forecaster.eager_because = why_not_static(backbone) if cache == "fixed_size" else ""
    return forecaster


def forecaster_of(bound: BoundModel, *, check_first: bool = False) -> Any:
    """What a user of a bound model calls `forecast()` of: toto-ts's interface, or None where a user's own has none."""
    own = getattr(bound, "forecaster", None)
    if own is None and isinstance(bound, StaticModel):
        return StaticForecaster(bound.backbone, bound, check_first=check_first)
    return own


def _backbone_of(model: Any) -> TotoBackbone:
    for candidate in (model, getattr(model, "model", None), getattr(getattr(model, "model", None), "model", None)):
        if isinstance(candidate, TotoBackbone):
            return candidate
    raise InputError(
        f"compile_toto cannot use a {type(model).__name__}", hint="give a Toto, a TotoBackbone or a TotoForecaster"
    )


class StaticForecaster(TotoForecaster):
    """toto-ts's forecaster with static graphs for cached decoding. Without the cache it is toto-ts's own.

    With `check_first`, the first forecast of every shape is held against eager. If the two differ, or the model has
    become one that fixed_size does not cover, it steps aside: a warning, and toto-ts's own cache, eager, from there on.
    """

    def __init__(self, backbone: TotoBackbone, static: StaticModel, *, check_first: bool = False) -> None:
        super().__init__(backbone)
        self._static = static
        self._check_first = check_first
        self.eager_because = ""  # what made it step aside
        self.stepped_aside = 0  # forecasts that ran eager for that reason

    def generate_mean(  # noqa: PLR0917 - toto-ts's signature
        self,
        inputs: Tensor,
        prediction_length: int,
        timestamp_seconds: Tensor,
        time_interval_seconds: Tensor,
        input_padding_mask: Tensor | None = None,
        id_mask: Tensor | None = None,
        use_kv_cache: bool = False,
        future_exogenous_variables: Tensor | None = None,
        num_exogenous_variables: int = 0,
    ) -> Tensor:
        if use_kv_cache and not self.eager_because:
            context = self._context(
                inputs=inputs,
                padding_mask=input_padding_mask,
                id_mask=id_mask,
                future=future_exogenous_variables,
                num_exogenous_variables=num_exogenous_variables,
                prediction_length=prediction_length,
            )
            with self._stepping_aside():
                forecast = self._static.mean(context, prediction_length)
                if self._agrees(context, forecast):
                    return forecast
        self.stepped_aside += bool(use_kv_cache)
        return super().generate_mean(
            inputs=inputs,
            prediction_length=prediction_length,
            timestamp_seconds=timestamp_seconds,
            time_interval_seconds=time_interval_seconds,
            input_padding_mask=input_padding_mask,
            id_mask=id_mask,
            use_kv_cache=use_kv_cache,
            future_exogenous_variables=future_exogenous_variables,
            num_exogenous_variables=num_exogenous_variables,
        )

    def generate_samples(  # noqa: PLR0917 - toto-ts's signature
        self,
        inputs: Tensor,
        prediction_length: int,
        num_samples: int,
        timestamp_seconds: Tensor,
        time_interval_seconds: Tensor,
        input_padding_mask: Tensor | None = None,
        id_mask: Tensor | None = None,
        sampling_batch_size: int = 10,
        use_kv_cache: bool = False,
        future_exogenous_variables: Tensor | None = None,
        num_exogenous_variables: int = 0,
    ) -> Tensor:
        if use_kv_cache and not self.eager_because:
            context = self._context(
                inputs=inputs,
                padding_mask=input_padding_mask,
                id_mask=id_mask,
                future=future_exogenous_variables,
                num_exogenous_variables=num_exogenous_variables,
                prediction_length=prediction_length,
            )
            with self._stepping_aside():
                drawn = self._static.samples(
                    context, prediction_length, num_samples=num_samples, samples_per_batch=sampling_batch_size
                )
                # rows of one batch, as the model has them: samples times series
                path = drawn[..., :sampling_batch_size].permute(3, 0, 1, 2).flatten(0, 1)
                if self._agrees(context, path):
                    return drawn
        self.stepped_aside += bool(use_kv_cache)
        return super().generate_samples(
            inputs=inputs,
            prediction_length=prediction_length,
            num_samples=num_samples,
            timestamp_seconds=timestamp_seconds,
            time_interval_seconds=time_interval_seconds,
            input_padding_mask=input_padding_mask,
            id_mask=id_mask,
            sampling_batch_size=sampling_batch_size,
            use_kv_cache=use_kv_cache,
            future_exogenous_variables=future_exogenous_variables,
            num_exogenous_variables=num_exogenous_variables,
        )

    def _agrees(self, context: Context, path: Tensor) -> bool:
        """Hold a forecast against eager if it met shapes that nobody has checked; where they differ, step aside."""
        shapes = self._static.take_unchecked()
        if not shapes or not self._check_first:
            return True
        size = self._static.patch_size
        missing = -path.shape[-1] % size
        rows = path if path.shape[-1] > size else path[: len(context.inputs)]  # of one patch there are no decode steps
        difference = first_difference(self._static, context, torch.nn.functional.pad(rows, (0, missing)))
        if difference is None:
            self._static.take_unchecked()
            return True
        self._step_aside(f"with {shapes[-1]} it differs from eager: {difference}")
        return False

    @contextmanager
    def _stepping_aside(self) -> Iterator[None]:
        """Go on behind the block if the model is not covered any more."""
        try:
            yield
        except NotCoveredError as error:
            self._step_aside(str(error))

    def _step_aside(self, reason: str) -> None:
        self.eager_because = reason
        warnings.warn(f"fixed_size steps aside, toto-ts's own cache runs, eager, from here on: {reason}", stacklevel=4)

    def _context(
        self,
        *,
        inputs: Tensor,
        padding_mask: Tensor | None,
        id_mask: Tensor | None,
        future: Tensor | None,
        num_exogenous_variables: int,
        prediction_length: int,
    ) -> Context:
        if padding_mask is None:
            padding_mask = torch.ones_like(inputs, dtype=torch.bool)
        if id_mask is None:
            id_mask = torch.zeros_like(inputs, dtype=torch.int)
        if id_mask.shape[-1] == 1:
            id_mask = id_mask.expand_as(inputs)
        if future is not None:
            self.assert_ev_compatibility(inputs, future, prediction_length, num_exogenous_variables)
            patch_size = self.model.patch_embed.stride
            future = self.round_ft_ev(future, ceil(prediction_length / patch_size) * patch_size)
        return Context(inputs, padding_mask, id_mask, future)
