"""One thing compared: how far off it was, and what that was held against."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Errors:
    mae: float
    rmse: float
    mape: float
    max: float


@dataclass(frozen=True)
class Comparison:
    """One thing compared. `ratio` above 1 means that the candidate is worse than eager's own noise allows."""

    scenario: str
    quantity: str
    error: float
    limit: float
    ratio: float
    to_eager: Errors | None = None
    elements: int = 0
    told: str = ""


def sizes_of(forecast: Tensor) -> Tensor:
    """How large a forecast is, RMS over time, for each series and variate; 1 where it is nothing but zeros."""
    sizes = forecast.double().square().mean(dim=-1, keepdim=True).sqrt()
    return sizes.masked_fill(sizes == 0.0, 1.0)
