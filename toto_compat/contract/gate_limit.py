"""What a figure is held to."""

from pydantic import Field, model_validator

from toto_compat.contract.strict_model import StrictModel


class GateLimit(StrictModel):
    """A figure passes when min <= figure <= max."""

    min: float | None = Field(default=None, allow_inf_nan=False)
    max: float | None = Field(default=None, allow_inf_nan=False)

    @model_validator(mode="after")
    def _has_a_limit(self) -> "GateLimit":
        if self.min is None and self.max is None:
            raise ValueError("a gate needs min or max")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError("min must not be above max: nothing could pass")
        return self

    def admits(self, value: float) -> bool:
        return (self.min is None or value >= self.min) and (self.max is None or value <= self.max)

    @property
    def text(self) -> str:
        """The limit as a person writes it: '<= 0', '>= 2', '0 to 1'."""
        match self.min, self.max:
            case (None, high):
                return f"<= {high:g}"
            case (low, None):
                return f">= {low:g}"
            case (low, high):
                return f"{low:g} to {high:g}"
