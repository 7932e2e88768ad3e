"""A backbone with a KV cache bound to it: the thing every suite takes. toto-ts itself is never edited."""

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from toto.inference.forecaster import TotoForecaster
from toto.model.backbone import TotoBackbone
from toto.model.util import KVCache

from toto_compat.contract.request import CompileSettings
from toto_compat.contract.torch_releases import config_name
from toto_compat.model.series import Series

StepObserver = Callable[[int], AbstractContextManager[None]]


@dataclass(frozen=True)
class CompileSpec:
    """Says how to compile. `backend` replaces the settings' one: the CUDA-graph predictor listens there.

    In `cache_dir` fixed_size keeps what it compiled, for the next process.
    """

    mode: str = "default"
    settings: CompileSettings = field(default_factory=CompileSettings)
    backend: Callable[..., Any] | None = None
    cache_dir: Path | None = None

    def torch_compile_arguments(self) -> dict[str, Any]:
        if self.backend is not None:
            return {"backend": self.backend}
        return {"backend": self.settings.backend, "mode": None if self.mode == "default" else self.mode}


class BoundModel(Protocol):
    """A model that forecasts with one particular cache, eager or compiled.

    It may also have a `forecaster` with toto-ts's `forecast()`, which is then put on trial as well.
    """

    patch_size: int
    cache_class: str
    compiled: bool
    draws: str  # 'toto-ts': a seed gives toto-ts's own samples; anything else: only their distribution
    observer: StepObserver | None  # entered around every model step; 0 is the prefill

    def generate_mean(self, series: Series, horizon_steps: int) -> Tensor: ...

    def generate_samples(
        self, series: Series, horizon_steps: int, *, num_samples: int, samples_per_batch: int
    ) -> Tensor: ...

    def teacher_forced(self, series: Series, truth: Tensor) -> list[dict[str, Tensor]]:
        """The base distribution's parameters for each patch of `truth`, given the context and the truth before it."""
        ...


def class_name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def apply_settings(settings: CompileSettings) -> None:
    """Set what the settings change, process-wide as production does; what they leave alone stays PyTorch's default."""
    config = torch._dynamo.config
    if settings.capture_scalar_outputs:
        config.capture_scalar_outputs = True
    for name in ("recompile_limit", "accumulated_recompile_limit"):
        value = getattr(settings, name)
        if value is not None:
            setattr(config, config_name(name, torch.__version__), value)


class _ObservedModel:
    """Stands in for the backbone inside toto-ts's forecaster and tells the observer when a step runs."""

    def __init__(self, owner: "WholeModel") -> None:
        self._owner = owner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._owner.model, name)

    def __call__(self, **arguments: Any) -> Any:
        owner = self._owner
        if owner.mark_dynamic:
            for name in ("inputs", "input_padding_mask", "id_mask"):
                torch._dynamo.mark_dynamic(arguments[name], 2)
        if owner.observer is None:
            return owner.model(**arguments)
        step = (arguments["inputs"].shape[-1] - arguments["scaling_prefix_length"]) // owner.patch_size
        with owner.observer(step):
            return owner.model(**arguments)


class WholeModel:
    """toto-ts's own forecaster and forward with another cache class, compiled whole as production did."""

    draws = "toto-ts"

    def __init__(self, backbone: TotoBackbone, cache_class: type, compile_spec: CompileSpec | None) -> None:
        # A shallow copy shares every weight, so several bindings of one backbone can stand side by side.
        self.model = copy.copy(backbone)
        self.patch_size: int = backbone.patch_embed.stride
        self.cache_class = class_name(cache_class)
        self.compiled = compile_spec is not None
        self.observer: StepObserver | None = None
        self.mark_dynamic = compile_spec is not None and compile_spec.settings.mark_dynamic
        if cache_class is not KVCache:
            self.model.allocate_kv_cache = _allocator(self.model, cache_class)
        if compile_spec is not None:
            apply_settings(compile_spec.settings)
            self.model.compile(**compile_spec.torch_compile_arguments())
        self.forecaster = TotoForecaster(_ObservedModel(self))

    def generate_mean(self, series: Series, horizon_steps: int) -> Tensor:
        return self.forecaster.generate_mean(prediction_length=horizon_steps, use_kv_cache=True, **_arguments(series))

    def generate_samples(
        self, series: Series, horizon_steps: int, *, num_samples: int, samples_per_batch: int
    ) -> Tensor:
        return self.forecaster.generate_samples(
            prediction_length=horizon_steps,
            num_samples=num_samples,
            sampling_batch_size=samples_per_batch,
            use_kv_cache=True,
            **_arguments(series),
        )

    def teacher_forced(self, series: Series, truth: Tensor) -> list[dict[str, Tensor]]:
        return [_last_patch_parameters(output.distribution, self.patch_size) for output in self._forced(series, truth)]

    def predictive(self, series: Series, truth: Tensor) -> list[dict[str, Tensor]]:
        """The same with the location and scale that turn the distribution into the series' own units."""
        predicted = []
        for output in self._forced(series, truth):
            parameters = _last_patch_parameters(output.distribution, self.patch_size)
            last = slice(-self.patch_size, None) if output.loc.shape[-1] > 1 else slice(None)
            predicted.append(
                {**parameters, "affine_loc": output.loc[..., last], "affine_scale": output.scale[..., last]}
            )
        return predicted

    @torch.no_grad()
    def _forced(self, series: Series, truth: Tensor) -> list[Any]:
        """The model's output for each patch of `truth`, given the context and the truth before it."""
        batch, variates, context = series.inputs.shape
        values = torch.cat([series.inputs, truth.to(series.inputs)], dim=-1)
        padding = torch.cat([series.padding_mask, torch.ones_like(truth, dtype=torch.bool)], dim=-1)
        ids = torch.cat([series.id_mask, series.id_mask[..., -1:].expand(-1, -1, truth.shape[-1])], dim=-1)
        cache = self.model.allocate_kv_cache(
            batch_size=batch,
            num_variates=variates,
            max_time_steps=values.shape[-1],
            device=values.device,
            dtype=values.dtype,
        )
        return [
            self.forecaster.model(
                inputs=values[..., :end].contiguous(),
                input_padding_mask=padding[..., :end].contiguous(),
                id_mask=ids[..., :end].contiguous(),
                kv_cache=cache,
                scaling_prefix_length=context,
            )
            for end in range(context, context + truth.shape[-1], self.patch_size)
        ]


def _arguments(series: Series) -> dict[str, Tensor]:
    return {
        "inputs": series.inputs,
        "timestamp_seconds": series.timestamp_seconds,
        "time_interval_seconds": series.time_interval_seconds,
        "input_padding_mask": series.padding_mask,
        "id_mask": series.id_mask,
    }


def _last_patch_parameters(distribution: Any, patch_size: int) -> dict[str, Tensor]:
    """df, loc, scale (and probs of a mixture) of the newest patch, cut loose from any buffer."""
    components = getattr(distribution, "component_distribution", distribution)
    parameters = {name: getattr(components, name) for name in ("df", "loc", "scale")}
    if components is not distribution:
        parameters["probs"] = distribution.mixture_distribution.probs
    return {name: value[:, :, -patch_size:].clone() for name, value in parameters.items()}


def _allocator(model: TotoBackbone, cache_class: type) -> Callable[..., Any]:
    """toto-ts's `allocate_kv_cache` with another class."""

    def allocate(batch_size: int, num_variates: int, max_time_steps: int, device: Any, dtype: Any) -> Any:
        return cache_class(
            batch_size=batch_size,
            num_variates=num_variates,
            transformer_layers=list(model.transformer.layers),
            num_layers=model.num_layers,
            embed_dim=model.embed_dim,
            num_heads=model.transformer.layers[0].num_heads,
            max_seq_len=ceil(max_time_steps / model.patch_embed.stride),
            device=device,
            dtype=dtype,
            use_memory_efficient_attention=model.use_memory_efficient_attention,
        )

    return allocate


_CHECKS_ARE_OFF = threading.RLock()


@contextlib.contextmanager
def unchecked_distributions() -> Iterator[None]:
    """Turn torch's checks of distributions off, as compiling does.

    Weights of a mixture that were made in half precision add up to one within a thousandth, and torch wants a
    millionth: on a CPU, where autocast leaves softmax in half precision, toto-ts's eager forecast of `base` raises on
    every third series or so under float16 (torch 2.13.0). The numbers are the same with and without.
    """
    with _CHECKS_ARE_OFF:  # one for the whole process: two threads would put back what the other one had set
        before = torch.distributions.Distribution._validate_args
        torch.distributions.Distribution.set_default_validate_args(False)
        try:
            yield
        finally:
            torch.distributions.Distribution.set_default_validate_args(before)


@contextlib.contextmanager
def observed(model: BoundModel, observer: StepObserver) -> Iterator[None]:
    """Watch the model's steps for a while."""
    before, model.observer = model.observer, observer
    try:
        yield
    finally:
        model.observer = before
