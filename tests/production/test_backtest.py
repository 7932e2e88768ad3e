"""A real backtest in torch's own environment: compiled graphs are counted, and a cache that compiles nothing shows."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from toto_compat.production.backtest import BacktestRequest, Window, run
from toto_compat.production.compare import not_active

pytestmark = pytest.mark.cell


def windows() -> tuple[Window, ...]:
    values = [10.0 + (number % 7) for number in range(192)]
    return tuple(
        Window(
            symbol="A",
            context=tuple(values[start : start + 96]),
            truth=tuple(values[start + 96 : start + 160]),
            first_timestamp=0,
            interval_seconds=60,
        )
        for start in (0, 32)
    )


def test_compiled_really_is_compiled_and_forecasts_what_eager_does(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def gain(forecast, truth, context):\n    return forecast[-1] - context[-1]\n", encoding="utf-8"
    )
    request = BacktestRequest(windows=windows(), model="tiny", score=f"{tmp_path}/mine.py:gain")
    result = run(request)
    assert not_active(result) == ""
    assert result.graph_calls >= len(request.windows)
    assert result.cache_class.endswith("FixedSizeKVCache")
    assert result.largest_difference < 1e-4
    assert result.eager.absolute == pytest.approx(result.compiled.absolute, rel=1e-3)
    assert len(result.eager.score) == 2
    assert result.lock.startswith("here:")
