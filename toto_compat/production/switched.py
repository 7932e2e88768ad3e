"""`forecaster`: one call that gives a service what the verdict allows, and eager where it allows nothing.

This module runs in the service: it imports torch and toto-ts.
"""

import contextlib
import json
import logging
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from toto.inference.forecaster import Forecast, TotoForecaster
from toto.model.backbone import TotoBackbone

from toto_compat.contract.request import CompileSettings, Device
from toto_compat.errors import InputError
from toto_compat.model.forecaster import compile_toto
from toto_compat.production.configuration import Bound, Configuration, Plan, configure, dynamo_settings

_LOG = logging.getLogger("toto_compat.production")


def forecaster(
    model: Any,
    configuration: Configuration | None = None,
    *,
    verdict: str | Path | None = None,
    env_file: str | Path | None = None,
    **announced: Any,
) -> "SwitchedForecaster":
    """Make a forecaster with toto-ts's `forecast()`: compiled as the verdict allows, else toto-ts's own eager one.

    `model` is a Toto, its backbone or a TotoForecaster. `announced` goes to `compile_toto`: `max_context`,
    `max_horizon`, `batch_sizes` and what else it takes. `print(forecaster.configuration)` shows what is in force.
    The switch is asked before each forecast: off takes effect at the next one, and on again too; what was not
    compiled at the start is compiled at the next start.
    """
    settled = configuration or configure(env_file, verdict)
    backbone = _backbone_of(model)
    weight = next(backbone.parameters())
    device = Device.CUDA if weight.device.type == "cuda" else Device.CPU
    gpu = torch.cuda.get_device_name(weight.device) if device is Device.CUDA else None
    plan = settled.plan(device, gpu)
    eager = TotoForecaster(backbone)
    compiled, eager_because = None, plan.why
    if plan.cache is not None:
        compiled, eager_because = _bind(backbone, plan, announced)
    made = SwitchedForecaster(eager, compiled, settled, plan)
    settled.bound = Bound(
        device=gpu or device.value,
        cache_class=cache_class_of(compiled or eager),
        mode=plan.mode if compiled is not None else None,
        settings=plan.settings,
        why=plan.why,
        eager_because=eager_because,
    )
    told = {"event": "forecaster", "runs": "eager" if compiled is None else plan.mode or "cache only", "why": plan.why}
    if eager_because:
        told["eager_because"] = eager_because
    _LOG.info(json.dumps(told))
    return made


def _bind(backbone: TotoBackbone, plan: Plan, announced: Mapping[str, Any]) -> tuple[Any, str]:
    """Bind what the plan says; a binding that fails leaves the service eager, with the reason."""
    # dynamo's own settings are applied around each forecast, not process-wide: see LocalSettings
    own = CompileSettings(backend=plan.settings.backend, mark_dynamic=plan.settings.mark_dynamic)
    try:
        compiled = compile_toto(backbone, plan.cache_source, plan.mode, settings=own, **announced)
    except TypeError:
        raise  # an argument that compile_toto does not take is the caller's mistake
    except Exception as error:  # whatever a binding raises, the service starts
        return None, f"binding the cache {plan.cache} failed: {type(error).__name__}: {error}"
    not_covered = getattr(compiled, "eager_because", "")
    return (None, f"the cache {plan.cache} does not cover {not_covered}") if not_covered else (compiled, "")


class SwitchedForecaster:
    """toto-ts's `forecast()` behind the switch. `compiled` is None where nothing may run but eager."""

    def __init__(
        self, eager: TotoForecaster, compiled: TotoForecaster | None, configuration: Configuration, plan: Plan
    ) -> None:
        self.eager = eager
        self.compiled = compiled
        self.configuration = configuration
        values = dynamo_settings(plan.settings, torch.__version__) if plan.mode is not None else {}
        self.settings = LocalSettings(values)

    @property
    def model(self) -> TotoBackbone:
        return self.eager.model

    def eager_now(self) -> str:
        """Say why the next forecast is eager; '' if it is not."""
        if self.compiled is None:
            bound = self.configuration.bound
            return bound.eager_because if bound else "nothing is bound"
        return self.configuration.eager_now()

    def forecast(self, *arguments: Any, **named: Any) -> Forecast:
        compiled = self.compiled
        if compiled is None or self.eager_now():
            return self.eager.forecast(*arguments, **named)
        return self.run_compiled(compiled, *arguments, **named)

    def run_compiled(self, compiled: TotoForecaster, *arguments: Any, **named: Any) -> Forecast:
        if not self.settings.values:
            return compiled.forecast(*arguments, **named)
        with self.settings.applied():
            return compiled.forecast(*arguments, **named)


class LocalSettings:
    """Dynamo's settings while a forecast of ours runs, and the process's own again afterwards.

    Several threads may forecast at a time: the first one in sets them, the last one out puts them back.
    """

    def __init__(self, values: Mapping[str, object]) -> None:
        self.values = dict(values)
        self._lock = threading.Lock()
        self._inside = 0
        self._before: dict[str, object] = {}

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        config = torch._dynamo.config
        with self._lock:
            if self._inside == 0:
                self._before = {name: getattr(config, name) for name in self.values}
                for name, value in self.values.items():
                    setattr(config, name, value)
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if self._inside == 0:
                    for name, value in self._before.items():
                        setattr(config, name, value)


def cache_class_of(made: Any) -> str:
    """Name the class of the cache that a forecaster decodes with, as its own objects tell it."""
    for holder in (made, getattr(made, "_static", None), getattr(getattr(made, "model", None), "_owner", None)):
        named = getattr(holder, "cache_class", "")
        if isinstance(named, str) and named:
            return named
    return "toto.model.util:KVCache"


def _backbone_of(model: Any) -> TotoBackbone:
    candidates = [model]
    for _ in range(2):
        candidates.append(getattr(candidates[-1], "model", None))
    for candidate in candidates:
        if isinstance(candidate, TotoBackbone):
            return candidate
    raise InputError(
        f"forecaster() cannot use a {type(model).__name__}", hint="give a Toto, a TotoBackbone or a TotoForecaster"
    )
