"""Metrics as Prometheus reads them: its own parser and its own client see the same numbers."""

import pytest

from toto_compat.production.metrics import PREFIX, ROWS, Metrics


def filled() -> Metrics:
    metrics = Metrics(lambda: {"gpu_memory_bytes": {"allocated": 5.0}})
    for number in range(1, 101):
        metrics.timed("compiled", number / 1000)
    metrics.count("fallbacks_total", reason='odd "reason"\\\n')
    metrics.set("shadow_mae", 0.25)
    return metrics


def test_quantiles_are_of_the_newest_forecasts() -> None:
    metrics = filled()
    assert metrics.quantiles("compiled") == {0.5: 0.051, 0.95: 0.096, 0.99: 0.1}
    for _ in range(2000):
        metrics.timed("compiled", 1.0)
    assert metrics.quantiles("compiled")[0.5] == 1.0
    assert metrics.value("forecasts_total", path="compiled") == 2100


def test_prometheus_reads_the_text_and_its_client_gives_the_same() -> None:
    parser = pytest.importorskip("prometheus_client.parser", reason="pip install prometheus-client")
    client = pytest.importorskip("prometheus_client")
    metrics = filled()
    from_text = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in parser.text_string_to_metric_families(metrics.text())
        for sample in family.samples
    }
    registry = client.CollectorRegistry()
    registry.register(metrics)
    from_client = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in registry.collect()
        for sample in family.samples
    }
    assert from_text == from_client
    assert from_text[f"{PREFIX}forecast_latency_seconds", ("path", "compiled"), ("quantile", "0.99")] == 0.1
    assert from_text[f"{PREFIX}fallbacks_total", ("reason", 'odd "reason"\\\n')] == 1
    assert client.generate_latest(registry)


def test_a_gpu_that_does_not_answer_leaves_the_other_metrics() -> None:
    def broken() -> dict[str, dict[str, float]]:
        raise RuntimeError("no driver")

    metrics = Metrics(broken)
    metrics.count("errors_total")
    assert "errors_total 1.0" in metrics.text()


def test_every_metric_is_described_once() -> None:
    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names)
    assert all(row.help.endswith(".") and row.kind in ("counter", "gauge", "summary") for row in ROWS)
