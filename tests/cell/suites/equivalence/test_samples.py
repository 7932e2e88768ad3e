"""Places of drawn points: uniform ones raise no alarm, whatever is wrong with others is named."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from toto_compat.cell.suites.equivalence.samples import findings

pytestmark = pytest.mark.cell


def ratios(below: Tensor) -> dict[str, float]:
    return {finding.test: finding.ratio for finding in findings(below, patch_size=32)}


def uniform(seed: int, rows: int = 32, points: int = 320) -> Tensor:
    return torch.rand(rows, 1, points, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_right_draws_raise_no_alarm_in_two_hundred_cells() -> None:
    assert max(max(ratios(uniform(seed)).values()) for seed in range(200)) <= 1.0


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("location", lambda u: u**1.2),
        ("uniform", lambda u: u**1.3),
        ("spread", lambda u: torch.special.ndtr(0.8 * torch.special.ndtri(u))),
        ("below the lowest hundredth", lambda u: u.clamp_min(0.01)),
        ("above the highest hundredth", lambda u: u.clamp_max(0.99)),
        ("rows and rounds", lambda u: torch.cat([u[:16], u[:16]])),
        ("neighbouring points", lambda u: u.sort(dim=-1).values),
    ],
)
def test_what_is_wrong_with_draws_is_named(name: str, spoil: Callable[[Tensor], Tensor]) -> None:
    assert ratios(spoil(uniform(1)))[name] > 1.0
