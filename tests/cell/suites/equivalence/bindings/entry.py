"""Bindings that are wrong through `forecast()`."""

from typing import Any

from torch import Tensor
from toto.data.util.dataset import MaskedTimeseries
from toto.inference.forecaster import Forecast, TotoForecaster

from tests.cell.suites.equivalence.bindings.honest import Honest


class WithAForecaster(Honest):
    @property
    def forecaster(self) -> TotoForecaster:
        return self.eager.forecaster


class _OneStepEarly(TotoForecaster):  # type: ignore[misc] # toto-ts has no types
    """Forecasts by one step less of the series: right again where that fills the same patches."""

    def forecast(self, inputs: MaskedTimeseries, *arguments: Any, **named: Any) -> Forecast:
        shorter = MaskedTimeseries(*(values[..., :-1] for values in inputs[:4]), *inputs[4:])
        return super().forecast(shorter, *arguments, **named)


class _MeanForMedian(TotoForecaster):  # type: ignore[misc] # toto-ts has no types
    """Says the median where the mean was asked for."""

    def forecast(self, *arguments: Any, **named: Any) -> Forecast:
        forecast = super().forecast(*arguments, **named)
        return forecast if forecast.samples is None else Forecast(forecast.median, forecast.samples)


class _TwoOfTen(TotoForecaster):  # type: ignore[misc] # toto-ts has no types
    """Draws two samples and gives them five times."""

    def generate_samples(self, *arguments: Any, **named: Any) -> Tensor:
        samples: Tensor = super().generate_samples(*arguments, **named)
        return samples[..., :2].repeat(1, 1, 1, samples.shape[-1] // 2)


class ForecastsByOneStepLess(Honest):
    @property
    def forecaster(self) -> TotoForecaster:
        return _OneStepEarly(self.eager.forecaster.model)


class TakesTheMedianForTheMean(Honest):
    @property
    def forecaster(self) -> TotoForecaster:
        return _MeanForMedian(self.eager.forecaster.model)


class RepeatsSamplesByDefault(Honest):
    draws = "own"

    @property
    def forecaster(self) -> TotoForecaster:
        return _TwoOfTen(self.eager.forecaster.model)
