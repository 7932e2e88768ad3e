"""A contest of real models, eager: quick, and the same code the bench runs compiled."""

import pytest

pytest.importorskip("torch")

from toto_compat.bench.contest import Contest, run

pytestmark = pytest.mark.cell


def test_every_contestant_is_timed_once_a_round_and_eager_spends_no_time_in_graphs() -> None:
    names = ("upstream eager", "fixed_size eager")
    result = run(Contest(model="tiny", contestants=names, context_steps=128, horizon_steps=64, rounds=3))
    assert tuple(result.timings) == names
    assert all(len(times) == 3 and min(times) > 0 for times in result.timings.values())
    assert all(set(times) == {0.0} for times in result.kernels_ms.values())
    assert result.peak_rss_bytes > 10**8
