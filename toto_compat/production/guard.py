"""`guarded`: watches a compiled forecaster while it serves, and goes back to eager for good when it must.

This module runs in the service: it imports torch.
"""

import gc
import json
import logging
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from toto.inference.forecaster import Forecast, TotoForecaster

from toto_compat.production.metrics import Metrics
from toto_compat.production.shadow import ShadowHistory
from toto_compat.production.switched import SwitchedForecaster

LOGGER = "toto_compat.guard"
_LOG = logging.getLogger(LOGGER)


@dataclass(frozen=True)
class Budget:
    """Says what compiled forecasts may cost before the guard goes back to eager."""

    warm_up: int = 2  # forecasts at the start whose compilations and latencies are not counted
    recompiles: int = 10  # compilations after that, in all: production's own limit for a run
    latency_ms: float | None = None  # a forecast that takes longer is slow; None: none is
    slow_in_a_row: int = 3  # so many slow ones, one after the other
    shadow_alarms: int = 1  # so many shadow checks past their limit


@dataclass(frozen=True)
class Shadow:
    """Says how many forecasts are also run eager, and how far the two may be apart."""

    share: float = 0.01  # of the forecasts; the first after the warm-up is one of them
    mae: float = 1e-3  # of a mean forecast: over the mean size of eager's
    standard_errors: float = 3.0  # of a sampled one: in standard errors of the difference of two means
    history: Path | None = None  # the daily MAE, for a trend that outlives a restart


def guarded(
    forecaster: SwitchedForecaster | TotoForecaster,
    *,
    eager: TotoForecaster | None = None,
    budget: Budget | None = None,
    shadow: Shadow | None = None,
) -> "GuardedForecaster":
    """Guard what `forecaster()` gave, or any compiled forecaster together with its `eager` one.

    When compiled code raises, out of memory included, or a budget is exceeded, forecasts are eager from then on. The
    forecast that it happened in is returned eager, with the random state that it began with.
    """
    if isinstance(forecaster, SwitchedForecaster):
        return GuardedForecaster(forecaster, budget or Budget(), shadow or Shadow())
    return GuardedForecaster(
        _Unswitched(eager or TotoForecaster(forecaster.model), forecaster), budget or Budget(), shadow or Shadow()
    )


class _Unswitched:
    """A compiled forecaster of the caller's own, with no switch before it."""

    def __init__(self, eager: TotoForecaster, compiled: TotoForecaster) -> None:
        self.eager = eager
        self.compiled: TotoForecaster | None = compiled

    def eager_now(self) -> str:
        return ""

    def run_compiled(self, compiled: TotoForecaster, *arguments: Any, **named: Any) -> Forecast:
        return compiled.forecast(*arguments, **named)


class GuardedForecaster:
    """toto-ts's `forecast()`, guarded. `fallen_back` says why it went back to eager; '' while it has not."""

    def __init__(self, inner: SwitchedForecaster | _Unswitched, budget: Budget, shadow: Shadow) -> None:
        self.inner = inner
        self.fallen_back = ""
        self._budget, self._shadow = budget, shadow
        self._cuda = next(inner.eager.model.parameters()).device.type == "cuda"
        self.metrics = Metrics(_gpu_use if self._cuda else None)
        self.history = ShadowHistory(shadow.history)
        self._lock = threading.Lock()
        self._compiled_forecasts = 0
        self._recompiles = 0
        self._slow = 0
        self._alarms = 0
        self._limit_hit = False
        self._shadow_every = max(1, round(1 / shadow.share)) if shadow.share > 0 else 0
        self._was_eager: str | None = None
        self._watch = _CompilationWatch()
        self._bookkeeping_failed = False

    @property
    def model(self) -> Any:
        return self.inner.eager.model

    def metrics_text(self) -> str:
        """Write counters and quantiles in Prometheus's text format."""
        return self.metrics.text()

    def forecast(self, *arguments: Any, **named: Any) -> Forecast:
        compiled = self.inner.compiled
        why = self.fallen_back or self.inner.eager_now()
        if why != self._was_eager:
            self._note_switch(why)
        if why or compiled is None:
            return self._eager(*arguments, **named)
        state = _random_state(self._cuda)
        started = time.perf_counter()
        self._watch.begin()
        try:
            forecast = self.inner.run_compiled(compiled, *arguments, **named)
            if self._cuda:
                torch.cuda.current_stream().synchronize()  # else an error of the GPU's comes when nobody looks
        except Exception as error:  # whatever compiled code raises, eager answers
            self._watch.end()
            return self._after_failure(error, state, arguments, named)
        except BaseException:  # Ctrl-C and the like are not the model's
            self._watch.end()
            raise
        seconds = time.perf_counter() - started
        try:
            return self._account(forecast, _Run(seconds, *self._watch.end(), state, arguments, named))
        except Exception as error:  # bookkeeping must not cost a forecast
            self._note_bookkeeping(error)
            return forecast

    def _eager(self, *arguments: Any, **named: Any) -> Forecast:
        started = time.perf_counter()
        forecast = self.inner.eager.forecast(*arguments, **named)
        self.metrics.timed("eager", time.perf_counter() - started)
        return forecast

    def _after_failure(
        self, error: Exception, state: "_State", arguments: tuple[Any, ...], named: Mapping[str, Any]
    ) -> Forecast:
        """Answer eager. If eager raises too, the fault is the input's and compiled stays on, unless memory ran out."""
        out_of_memory = _is_out_of_memory(error)
        reason = "out_of_memory" if out_of_memory else "raised"
        detail = f"{type(error).__name__}: {_first_line(error)}"
        # its frames hold tensors, which eager needs the room of
        error.__traceback__ = None
        if out_of_memory:
            self._fall_back(reason, detail)
        _restore(state)
        try:
            forecast = self._eager(*arguments, **named)
        except Exception:
            self.metrics.count("errors_total")
            raise
        if not out_of_memory:
            self._fall_back(reason, detail)
        return forecast

    def _account(self, forecast: Forecast, run: "_Run") -> Forecast:
        seconds, compilations = run.seconds, run.compilations
        self.metrics.timed("compiled", seconds)
        budget = self._budget
        with self._lock:
            self._compiled_forecasts += 1
            number = self._compiled_forecasts
            warm = number > budget.warm_up
            if warm:
                self._recompiles += compilations
                slow = budget.latency_ms is not None and seconds * 1000 > budget.latency_ms
                self._slow = self._slow + 1 if slow else 0
        if compilations:
            self.metrics.count("compilations_total", compilations)
            if warm:
                self.metrics.count("recompiles_total", compilations)
                _say(
                    logging.WARNING, "recompile", compilations=compilations, seconds=round(seconds, 3), forecast=number
                )
        if run.limit_hit:
            self._fall_back("recompile_limit", "dynamo's limit was hit: from there on it runs the function eager")
        elif warm and self._recompiles > budget.recompiles:
            self._fall_back(
                "recompiles", f"{self._recompiles} compilations after the warm-up, {budget.recompiles} allowed"
            )
        elif warm and self._slow >= budget.slow_in_a_row:
            self._fall_back("latency", f"{self._slow} forecasts in a row over {budget.latency_ms:g} ms")
        elif warm and self._shadow_every and (number - budget.warm_up - 1) % self._shadow_every == 0:
            return self._check(forecast, run)
        return forecast

    def _check(self, forecast: Forecast, run: "_Run") -> Forecast:
        """Run the same forecast eager; the caller's random stream goes on as if nothing had happened."""
        after = _random_state(self._cuda)
        _restore(run.state)
        try:
            eager = self.inner.eager.forecast(*run.arguments, **run.named)
        finally:
            _restore(after)
        over_limit = distance(forecast, eager, self._shadow)
        self.metrics.count("shadow_checks_total")
        self.metrics.set("shadow_mae", over_limit)
        with self._lock:
            self.history.add(datetime.now(UTC).date().isoformat(), over_limit)
            rising = self.history.rises
        if rising and not self.metrics.value("shadow_trend_alarm"):
            _say(logging.WARNING, "shadow_trend", days=len(self.history.days), newest_over_limit=over_limit)
        self.metrics.set("shadow_trend_alarm", float(rising))
        if over_limit <= 1.0:
            return forecast
        self.metrics.count("shadow_alarms_total")
        _say(logging.ERROR, "shadow_alarm", mae_over_limit=over_limit)
        self._alarms += 1
        if self._alarms >= self._budget.shadow_alarms:
            self._fall_back("shadow", f"a forecast was {over_limit:.3g} times its limit away from eager's")
            return eager
        return forecast

    def _fall_back(self, reason: str, detail: str) -> None:
        with self._lock:
            if self.fallen_back:  # another thread was first
                return
            self.fallen_back = f"{reason}: {detail}"
        self.inner.compiled = None  # its buffers and graphs go when the last forecast in them ends
        if reason == "out_of_memory":
            gc.collect()
            if self._cuda:
                torch.cuda.empty_cache()
        try:
            self.metrics.count("fallbacks_total", reason=reason)
            _say(logging.ERROR, "fallback", reason=reason, detail=detail, forecasts=self._compiled_forecasts)
        except Exception as error:  # a log handler that raises must not cost a forecast
            self._note_bookkeeping(error)

    def _note_switch(self, why: str) -> None:
        self._was_eager = why
        try:
            self.metrics.set("compiled", float(not why))
            _say(logging.INFO, "eager" if why else "compiled", why=why)
        except Exception as error:  # a log handler that raises must not cost a forecast
            self._note_bookkeeping(error)

    def _note_bookkeeping(self, error: Exception) -> None:
        first, self._bookkeeping_failed = not self._bookkeeping_failed, True
        try:
            self.metrics.count("bookkeeping_failures_total")
            if first:
                _say(logging.ERROR, "bookkeeping_failed", error=f"{type(error).__name__}: {_first_line(error)}")
        except Exception:
            self._bookkeeping_failed = True  # there is nobody left to tell


@dataclass(frozen=True)
class _Run:
    """A compiled forecast that came to its end: what it took, and what it was asked."""

    seconds: float
    compilations: int
    limit_hit: bool
    state: "_State"
    arguments: tuple[Any, ...]
    named: Mapping[str, Any]


def distance(forecast: Forecast, eager: Forecast, shadow: Shadow) -> float:
    """Tell how far two forecasts are apart, over the limit: past 1 is an alarm. What is not a number is infinitely far.

    Samples need not be the same draws, so their means are compared in standard errors.
    """
    ours, theirs = forecast.mean.double(), eager.mean.double()
    if ours.shape != theirs.shape:
        return float("inf")
    apart = (ours - theirs).abs()
    if eager.samples is not None and eager.samples.shape[-1] > 1:
        spread = eager.samples.double().std(dim=-1) * (2 / eager.samples.shape[-1]) ** 0.5
        # a spread of nothing: the forecast is a constant, and its size the only measure
        scale = spread.clamp_min(1e-6 * theirs.abs().mean().clamp_min(1e-12))
        value = float((apart / scale).mean()) / shadow.standard_errors
    else:
        value = float(apart.mean() / theirs.abs().mean().clamp_min(1e-12)) / shadow.mae
    return value if value == value else float("inf")  # noqa: PLR0124 - NaN is not itself


_State = tuple[torch.Tensor, torch.Tensor | None]


def _random_state(cuda: bool) -> _State:
    return torch.get_rng_state(), torch.cuda.get_rng_state() if cuda else None


def _restore(state: _State) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1])


def _is_out_of_memory(error: BaseException) -> bool:
    """Tell it by class or words: torch's class moved, inductor wraps it, and a CPU allocator only says so."""
    seen: BaseException | None = error
    for _ in range(8):
        if seen is None:
            return False
        if isinstance(seen, MemoryError | torch.cuda.OutOfMemoryError):
            return True
        text = str(seen).lower()
        if "out of memory" in text or "can't allocate memory" in text or "cannot allocate memory" in text:
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")[:500]


def _say(level: int, event: str, **facts: Any) -> None:
    """Log one line of JSON per event."""
    _LOG.log(level, "%s", json.dumps({"event": event, **facts, "torch": torch.__version__}, default=str))


def _gpu_use() -> dict[str, dict[str, float]]:
    found = {
        "gpu_memory_bytes": {
            "allocated": float(torch.cuda.memory_allocated()),
            "reserved": float(torch.cuda.memory_reserved()),
            "peak": float(torch.cuda.max_memory_allocated()),
        }
    }
    try:
        found["gpu_utilization_ratio"] = {"gpu": torch.cuda.utilization() / 100}
    except Exception:  # needs NVIDIA's bindings, which most services lack
        return found
    return found


class _CompilationWatch:
    """Counts the compilations that a thread's forecast waits for, and sees dynamo's limit being hit.

    Dynamo's own start callbacks are asked: nothing is patched, and a forecast that compiles nothing pays nothing.
    """

    def __init__(self) -> None:
        self._here = threading.local()
        reference = weakref.ref(self)

        def started(*_: Any) -> None:
            watch = reference()
            if watch is not None and getattr(watch._here, "watching", False):
                watch._here.count += 1

        class LimitHandler(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                watch = reference()
                if watch is not None and getattr(watch._here, "watching", False):
                    text = record.getMessage()
                    if "recompile_limit" in text or "cache_size_limit" in text:
                        watch._here.limit_hit = True

        handler = torch._dynamo.callback.callback_handler
        handler.register_start_callback(started)
        self._handler, self._started = handler, started
        listener = LimitHandler(logging.WARNING)
        logger = logging.getLogger("torch._dynamo.convert_frame")
        logger.addHandler(listener)
        weakref.finalize(self, _stop_watching, handler, started, logger, listener)

    def begin(self) -> None:
        if self._started not in self._handler.start_callbacks:  # torch._dynamo.reset() throws them out
            self._handler.register_start_callback(self._started)
        here = self._here
        here.watching, here.count, here.limit_hit = True, 0, False

    def end(self) -> tuple[int, bool]:
        here = self._here
        here.watching = False
        return here.count, here.limit_hit


def _stop_watching(handler: Any, started: Any, logger: logging.Logger, listener: logging.Handler) -> None:
    if started in handler.start_callbacks:
        handler.remove_start_callback(started)
    logger.removeHandler(listener)
