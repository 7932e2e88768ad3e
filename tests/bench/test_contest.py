"""A contest of real models, eager: quick, and the same code the bench runs compiled."""

from collections.abc import Iterator, Sequence

import pytest

pytest.importorskip("torch")

from toto_compat.bench import contest
from toto_compat.bench.contest import Contest, run
from toto_compat.contract.statistics import taking_turns

pytestmark = pytest.mark.cell


def test_every_contestant_is_timed_once_a_round_and_eager_spends_no_time_in_graphs() -> None:
    names = ("upstream eager", "fixed_size eager")
    result = run(Contest(model="tiny", contestants=names, context_steps=128, horizon_steps=64, rounds=3))
    assert tuple(result.timings) == names
    assert all(len(times) == 3 and min(times) > 0 for times in result.timings.values())
    assert all(set(times) == {0.0} for times in result.kernels_ms.values())
    assert result.peak_rss_bytes > 10**8


def test_contestants_take_turns_in_a_rotating_order(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def noting(contestants: Sequence[str], rounds: int) -> Iterator[str]:
        for name in taking_turns(contestants, rounds):
            order.append(name)
            yield name

    monkeypatch.setattr(contest, "taking_turns", noting)
    names = ("upstream eager", "fixed_size eager")
    run(Contest(model="tiny", contestants=names, context_steps=64, horizon_steps=32, rounds=2, one_off_first=False))
    assert order == [names[0], names[1], names[1], names[0]]


def test_who_takes_long_has_fewer_rounds_spread_over_the_others_and_a_service_calls_forecast() -> None:
    names = ("upstream eager", "fixed_size eager")
    service = Contest(
        model="tiny",
        contestants=names,
        context_steps=64,
        horizon_steps=8,
        samplings=((4, 2), (6, 6)),
        rounds=6,
        rounds_of={"upstream eager": 2},
        as_a_service=True,
        one_off_first=False,
    )
    assert [contest._takes_part(service, "upstream eager", number) for number in range(6)] == [False, False, True] * 2
    result = run(service)
    assert [len(result.timings[name]) for name in names] == [2, 6]
