"""Places of drawn points: uniform ones raise no alarm, whatever is wrong with others is named."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from toto_compat.cell.suites.equivalence.samples import (
    drawn_closer,
    findings,
    findings_over_all,
    number_of_tests,
    seen_from,
    tail_weighted,
)

pytestmark = pytest.mark.cell

EVERY_OTHER = 1.0 - 2.0 * torch.arange(320, dtype=torch.float64).remainder(2)
EVERY_OTHER_ROW = EVERY_OTHER[:32].view(-1, 1, 1)
LAST_OF_EIGHT = torch.where(torch.arange(32).remainder(8) == 7, 0.8, 1.0).double().view(-1, 1, 1)


def ratios(below: Tensor) -> dict[str, float]:
    return {finding.test: finding.ratio for finding in findings(below, patch_size=32, round_rows=8)}


def uniform(seed: int, rows: int = 32, points: int = 320) -> Tensor:
    return torch.rand(rows, 1, points, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def signed_anew(below: Tensor) -> Tensor:
    """As far from the middle as before, on either side by chance."""
    return torch.where(uniform(2, *below.shape[::2]) < 0.5, below, 1.0 - below)


def test_right_draws_raise_no_alarm_in_two_hundred_cells() -> None:
    assert max(max(ratios(uniform(seed)).values()) for seed in range(200)) <= 1.0


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("location", lambda u: u**1.2),
        ("uniform", lambda u: u**1.3),
        ("spread", lambda u: torch.special.ndtr(0.8 * torch.special.ndtri(u))),
        ("uniform in the tails", lambda u: torch.where(u < 0.1, 10 * u * u, u)),
        ("locations of points", lambda u: torch.special.ndtr(torch.special.ndtri(u) + 0.3 * EVERY_OTHER)),
        ("spreads of points", lambda u: torch.special.ndtr(torch.special.ndtri(u) * (1 + 0.15 * EVERY_OTHER))),
        (
            "spreads of rows",
            lambda u: torch.special.ndtr(torch.special.ndtri(u) * (1 + 0.15 * EVERY_OTHER_ROW)),
        ),
        ("spreads of a batch's rows", lambda u: torch.special.ndtr(torch.special.ndtri(u) * LAST_OF_EIGHT)),
        ("below the lowest 0.01", lambda u: u.clamp_min(0.01)),
        ("above the highest 0.01", lambda u: u.clamp_max(0.99)),
        ("rows and rounds", lambda u: torch.cat([u[:16], u[:16]])),
        ("neighbouring points", lambda u: u.sort(dim=-1).values),
        ("rows and rounds, either side", lambda u: torch.cat([u[:16], signed_anew(u[:16])])),
        ("neighbouring points, either side", lambda u: signed_anew(u.sort(dim=-1).values)),
        ("patches, either side", lambda u: signed_anew(u[..., :32].repeat(1, 1, 10))),
    ],
)
def test_what_is_wrong_with_draws_is_named(name: str, spoil: Callable[[Tensor], Tensor]) -> None:
    assert ratios(spoil(uniform(1)))[name] > 1.0


def test_of_two_rows_what_is_shared_but_for_the_sign_is_seen_by_one_test_alone() -> None:
    below = torch.cat([uniform(1), signed_anew(uniform(1)[:1])])
    assert [name for name, ratio in ratios(below).items() if ratio > 1.0] == ["rows and rounds, either side"]


def test_the_false_alarms_of_anderson_and_darling_are_no_more_than_said() -> None:
    """Of a thousand draws, as many are that far out as the formula says, within what chance allows."""
    chances = [tail_weighted(uniform(seed, rows=1).flatten()).chance for seed in range(1000)]
    assert 20 <= sum(chance < 0.05 for chance in chances) <= 80
    assert sum(chance < 0.001 for chance in chances) <= 6


def test_what_is_said_to_be_seen_is_seen_and_half_of_it_is_not() -> None:
    below = uniform(3, rows=100, points=1000)
    spread, _ = seen_from(below.numel(), number_of_tests(2), missed=1e-6)
    for share, seen in ((spread, True), (spread / 2, False)):
        found = findings_over_all([drawn_closer(below, share)], drawings=2)
        assert (max(one.ratio for one in found) > 1.0) is seen
