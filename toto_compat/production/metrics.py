"""Counters and latency quantiles of a guarded forecaster, as Prometheus reads them. Standard library only."""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

QUANTILES = (0.5, 0.95, 0.99)
_WINDOW = 1024  # the newest forecasts of each path: what a quantile is of
PREFIX = "toto_compat_"


@dataclass(frozen=True)
class MetricRow:
    """Describes a metric; the guide's reference is made from these."""

    name: str
    kind: str  # counter, gauge or summary
    help: str


ROWS = (
    MetricRow("forecast_latency_seconds", "summary", "Latency by path, quantiles over the newest 1024 forecasts."),
    MetricRow("forecasts_total", "counter", "Forecasts by path: compiled or eager."),
    MetricRow("compilations_total", "counter", "Compilations that a forecast waited for, warm-up included."),
    MetricRow("recompiles_total", "counter", "Compilations after the warm-up: each one stalled a forecast."),
    MetricRow("fallbacks_total", "counter", "Times the guard went back to eager, by reason."),
    MetricRow("errors_total", "counter", "Forecasts that raised compiled and eager alike: the caller's input."),
    MetricRow("shadow_checks_total", "counter", "Forecasts that were compared with eager."),
    MetricRow("shadow_alarms_total", "counter", "Shadow checks past the limit."),
    MetricRow("shadow_mae", "gauge", "MAE of the newest shadow check over its limit: 1 is the alarm."),
    MetricRow("shadow_trend_alarm", "gauge", "1 while the daily MAE rises from day to day."),
    MetricRow("compiled", "gauge", "1 while forecasts run compiled, 0 when they run eager."),
    MetricRow("bookkeeping_failures_total", "counter", "Failures of this bookkeeping itself; no forecast was lost."),
    MetricRow("gpu_memory_bytes", "gauge", "GPU memory of this process: allocated, reserved, peak."),
    MetricRow("gpu_utilization_ratio", "gauge", "How busy the GPU is, where its driver says."),
)
_KINDS = {row.name: row for row in ROWS}
Sample = tuple[str, Mapping[str, str], float]  # suffix, labels, value


class Metrics:
    """Holds the numbers of one guard. Safe to use from several threads."""

    def __init__(self, gpu: Callable[[], Mapping[str, Mapping[str, float]]] | None = None) -> None:
        self._lock = threading.Lock()
        self._counters: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self._latencies: dict[str, tuple[deque[float], list[float]]] = {}
        self._gpu = gpu

    def count(self, name: str, amount: float = 1.0, **labels: str) -> None:
        key = (name, tuple(sorted(labels.items())))
        with self._lock:
            self._counters[key] = self._counters.get(key, 0.0) + amount

    def set(self, name: str, value: float, **labels: str) -> None:
        with self._lock:
            self._counters[name, tuple(sorted(labels.items()))] = value

    def value(self, name: str, **labels: str) -> float:
        with self._lock:
            return self._counters.get((name, tuple(sorted(labels.items()))), 0.0)

    def timed(self, path: str, seconds: float) -> None:
        """Take one forecast's latency; this is on every forecast's way."""
        key = ("forecasts_total", (("path", path),))
        with self._lock:
            held = self._latencies.get(path)
            if held is None:
                held = self._latencies[path] = (deque(maxlen=_WINDOW), [0.0, 0.0])
            held[0].append(seconds)
            held[1][0] += 1
            held[1][1] += seconds
            self._counters[key] = self._counters.get(key, 0.0) + 1.0

    def quantiles(self, path: str) -> dict[float, float]:
        """Return the quantiles of the newest forecasts of a path, by the nearest rank."""
        with self._lock:
            held = self._latencies.get(path)
            ordered = sorted(held[0]) if held else []
        if not ordered:
            return {}
        return {q: ordered[min(len(ordered) - 1, int(q * len(ordered)))] for q in QUANTILES}

    def families(self) -> Iterator[tuple[MetricRow, list[Sample]]]:
        """Yield every metric with its samples, in the order of the table; one that has none is left out."""
        with self._lock:
            counters = dict(self._counters)
            totals = {path: tuple(held[1]) for path, held in self._latencies.items()}
        gpu = self._read_gpu()
        for row in ROWS:
            if row.kind == "summary":
                samples = [sample for path in sorted(totals) for sample in self._summary(path, totals[path])]
            else:
                found = {key[1]: value for key, value in counters.items() if key[0] == row.name}
                found |= {(("kind", kind),): value for kind, value in gpu.get(row.name, {}).items()}
                samples = [("", dict(labels), value) for labels, value in sorted(found.items())]
            if samples:
                yield row, samples

    def _summary(self, path: str, totals: tuple[float, ...]) -> Iterator[Sample]:
        for quantile, value in self.quantiles(path).items():
            yield "", {"path": path, "quantile": f"{quantile:g}"}, value
        yield "_sum", {"path": path}, totals[1]
        yield "_count", {"path": path}, totals[0]

    def _read_gpu(self) -> Mapping[str, Mapping[str, float]]:
        if self._gpu is None:
            return {}
        try:
            return self._gpu()
        except Exception:  # a driver that does not answer must not take the other metrics with it
            return {}

    def text(self) -> str:
        """Write all of it in Prometheus's text format."""
        lines = []
        for row, samples in self.families():
            lines += [f"# HELP {PREFIX}{row.name} {row.help}", f"# TYPE {PREFIX}{row.name} {row.kind}"]
            for suffix, labels, value in samples:
                told = ",".join(f'{name}="{_escaped(text)}"' for name, text in sorted(labels.items()))
                lines.append(f"{PREFIX}{row.name}{suffix}{'{' + told + '}' if told else ''} {value!r}")
        return "\n".join(lines) + "\n"

    def collect(self) -> Iterator[Any]:
        """Give the same to `prometheus_client`: `REGISTRY.register(guard.metrics)`."""
        # here and not above: it is the service's own choice to install it
        from prometheus_client.core import Metric

        for row, samples in self.families():
            # the client takes a counter's name without `_total`, which it then writes itself
            metric = Metric(PREFIX + row.name.removesuffix("_total"), row.help, row.kind)
            for suffix, labels, value in samples:
                metric.add_sample(PREFIX + row.name + suffix, dict(labels), value)
            yield metric

    def describe(self) -> list[Any]:
        """Tell a registry nothing beforehand: what is there depends on what happened."""
        return []


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
