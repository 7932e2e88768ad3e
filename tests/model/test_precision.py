"""Half precision: fixed_size under torch.autocast and with bfloat16 weights is no further from the truth than eager."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from toto.inference.forecaster import TotoForecaster  # noqa: E402

from tests.model.small_backbone import Small, series_of, timeseries  # noqa: E402
from toto_compat import compile_toto  # noqa: E402
from toto_compat.contract.request import CacheRequest, CompileSettings  # noqa: E402
from toto_compat.model.binding import bind  # noqa: E402
from toto_compat.model.bound import CompileSpec  # noqa: E402
from toto_compat.model.series import Series  # noqa: E402
from toto_compat.model.static_model import StaticModel  # noqa: E402

pytestmark = pytest.mark.cell

UPSTREAM = CacheRequest(name="upstream", source="builtin")
TRACED = CompileSpec(settings=CompileSettings(backend="aot_eager"))
HALF = [torch.bfloat16, torch.float16]


def errors(model: Any, series: Series, exact: Any) -> tuple[float, float]:
    """Give the largest errors of the mean forecast and of the parameters under teacher forcing."""
    truth = exact.teacher_forced(series.to(dtype=torch.float64), series.truth.double())
    forced = model.teacher_forced(series, series.truth)
    parameters = max(
        float((ours[name].double() - theirs[name]).abs().max())
        for ours, theirs in zip(forced, truth, strict=True)
        for name in theirs
    )
    mean = model.generate_mean(series, 24).double() - exact.generate_mean(series.to(dtype=torch.float64), 24)
    return float(mean.abs().max()), parameters


@pytest.mark.parametrize("spec", [None, TRACED], ids=["eager", "traced"])
@pytest.mark.parametrize("precision", HALF)
@pytest.mark.parametrize("variates", [1, 3])
def test_under_autocast_it_is_as_near_to_the_truth_as_eager(precision: Any, spec: Any, variates: int) -> None:
    exact, series = bind(Small().build(), UPSTREAM), series_of(variates=variates, dtype=torch.float32)
    backbone = Small().build(torch.float32)
    static = StaticModel(backbone, spec)
    single = errors(static, series, exact)
    with torch.autocast("cpu", dtype=precision):
        eager, ours = errors(bind(backbone, UPSTREAM), series, exact), errors(static, series, exact)
    assert all(mine <= 2 * theirs for mine, theirs in zip(ours, eager, strict=True))
    assert all(mine > 10 * full for mine, full in zip(ours, single, strict=True)), "nothing ran in half precision"


@pytest.mark.parametrize("spec", [None, TRACED], ids=["eager", "traced"])
def test_bfloat16_weights_are_as_near_to_the_truth_as_eager(spec: Any) -> None:
    rounded = Small().build(torch.bfloat16)
    exact = bind(rounded.to(torch.float64), UPSTREAM)
    series = series_of(dtype=torch.bfloat16)
    backbone = Small().build(torch.bfloat16)
    eager, ours = errors(bind(backbone, UPSTREAM), series, exact), errors(StaticModel(backbone, spec), series, exact)
    assert all(mine <= 2 * theirs for mine, theirs in zip(ours, eager, strict=True))


def test_precisions_take_turns_on_one_model_and_each_has_buckets_of_its_own() -> None:
    backbone, series = Small().build(torch.float32), series_of(dtype=torch.float32)
    static = StaticModel(backbone, TRACED, max_patches=16, max_context=8, batch_sizes=(2,))
    first = static.generate_mean(series, 24)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = static.generate_mean(series, 24)
        made = len(static._buckets)
    assert made == 4
    assert not torch.equal(first, half)
    assert torch.equal(static.generate_mean(series, 24), first)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(static.generate_mean(series, 24), half)
    assert len(static._buckets) == made


def test_samples_are_drawn_under_autocast_where_toto_ts_itself_cannot() -> None:
    backbone, series = Small().build(torch.float32), timeseries(series_of(dtype=torch.float32))
    forecaster = compile_toto(backbone, mode=None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(RuntimeError, match="not implemented for 'BFloat16'"):
            TotoForecaster(backbone).forecast(series, 20, num_samples=4, samples_per_batch=2)
        samples = forecaster.forecast(series, 20, num_samples=2000, samples_per_batch=500).samples
    exact = forecaster.forecast(series, 20, num_samples=2000, samples_per_batch=500).samples
    assert samples.dtype == torch.float32
    spread = exact.quantile(0.75, dim=-1) - exact.quantile(0.25, dim=-1)
    moved = (samples.quantile(0.5, dim=-1) - exact.quantile(0.5, dim=-1)).abs() / spread
    assert float(moved.max()) < 0.25  # of 2,000 draws the median is good to about 0.03 of that
