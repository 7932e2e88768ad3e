"""fixed_size by itself: it notices when it is wrong or the model is not toto-ts's any more, and lets eager forecast."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from toto.data.util.dataset import MaskedTimeseries  # noqa: E402
from toto.inference.forecaster import TotoForecaster  # noqa: E402
from toto.model import attention  # noqa: E402

from tests.model.small_backbone import Small, agree, series_of, timeseries  # noqa: E402
from toto_compat import compile_toto  # noqa: E402
from toto_compat.model import coverage  # noqa: E402
from toto_compat.model.buckets import StepShape  # noqa: E402
from toto_compat.model.coverage import why_not_static  # noqa: E402
from toto_compat.model.first_check import allowed_error  # noqa: E402
from toto_compat.model.forecaster import StaticForecaster  # noqa: E402
from toto_compat.model.sabotaged import ForgetfulReset, LeakingMask, SilentDowncast  # noqa: E402
from toto_compat.model.static_model import StaticModel  # noqa: E402

pytestmark = pytest.mark.cell


def both(backbone: Any, static: StaticModel) -> tuple[StaticForecaster, TotoForecaster]:
    return StaticForecaster(backbone, static, check_first=True), TotoForecaster(backbone)


def sampled(forecaster: TotoForecaster, series: MaskedTimeseries, horizon: int) -> Any:
    torch.manual_seed(5)
    return forecaster.forecast(series, horizon, num_samples=6, samples_per_batch=3).samples


def test_a_right_model_is_checked_once_for_every_shape_and_stays() -> None:
    backbone = Small().build()
    ours = compile_toto(backbone, mode=None)
    for horizon in (5, 20, 20):
        series = timeseries(series_of())
        assert agree(ours.forecast(series, horizon).mean, TotoForecaster(backbone).forecast(series, horizon).mean)
        ours.forecast(series, horizon, num_samples=6, samples_per_batch=3)
    assert (ours.eager_because, ours.stepped_aside) == ("", 0)
    assert ours._static.take_unchecked() == []


@pytest.mark.parametrize("wrong", [LeakingMask, ForgetfulReset])
def test_a_wrong_decode_step_steps_aside_at_its_first_forecast(wrong: type[StaticModel]) -> None:
    backbone, series = Small().build(), timeseries(series_of())
    ours, theirs = both(backbone, wrong(backbone, None))
    with pytest.warns(UserWarning, match=r"steps aside.*decode step for batch 2.* differs from eager: \w+ of patch"):
        mean = ours.forecast(series, 30).mean
    assert torch.equal(mean, theirs.forecast(series, 30).mean)
    assert torch.equal(sampled(ours, series, 30), sampled(theirs, series, 30))
    assert ours.stepped_aside == 2


def test_a_wrong_step_of_many_rows_steps_aside_too() -> None:
    backbone, series = Small().build(), timeseries(series_of())
    ours, theirs = both(backbone, LeakingMask(backbone, None))
    with pytest.warns(UserWarning, match="decode step for batch 6"):
        drawn = sampled(ours, series, 30)
    assert drawn.shape == sampled(theirs, series, 30).shape


class WrongPass(StaticModel):
    """Takes the patch before the newest one for the newest."""

    def _prefill(self, context: Any, patches: int, *, whole: bool = False) -> Any:
        shorter = type(context)(*(part[..., : -self.patch_size] for part in vars(context).values() if part is not None))
        return super()._prefill(shorter, patches, whole=whole)


def test_a_wrong_pass_steps_aside_in_a_forecast_of_one_patch() -> None:
    backbone, series = Small().build(), timeseries(series_of())
    ours, theirs = both(backbone, WrongPass(backbone, None))
    with pytest.warns(UserWarning, match="context pass"):
        assert torch.equal(ours.forecast(series, 5).mean, theirs.forecast(series, 5).mean)


def test_without_the_check_nothing_is_asked() -> None:
    backbone, series = Small().build(), timeseries(series_of())
    wrong = StaticForecaster(backbone, LeakingMask(backbone, None))
    assert not agree(wrong.forecast(series, 30).mean, TotoForecaster(backbone).forecast(series, 30).mean)
    assert wrong.stepped_aside == 0


def test_the_check_leaves_the_random_stream_alone() -> None:
    backbone, series = Small().build(), timeseries(series_of())
    checked, unchecked = compile_toto(backbone, mode=None), compile_toto(backbone, mode=None, check_first=False)
    drawn, after = [], []
    for forecaster in (checked, unchecked):
        drawn.append(sampled(forecaster, series, 30))
        after.append(torch.rand(3))
    assert torch.equal(*drawn)
    assert torch.equal(*after)


def test_half_a_precision_lost_is_more_than_is_allowed_in_double_precision() -> None:
    backbone, series = Small().build(), timeseries(series_of())
    ours, _ = both(backbone, SilentDowncast(backbone, None))
    with pytest.warns(UserWarning, match="differs from eager"):
        ours.forecast(series, 30)
    assert allowed_error(torch.float32) == pytest.approx(3.45e-4, rel=1e-2)


# What somebody did to toto-ts


def hooked(module: Any) -> None:
    module.register_forward_hook(lambda *_: None)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (hooked, "the model"),
        (lambda b: hooked(b.transformer), "transformer"),
        (lambda b: hooked(b.transformer.layers[1]), "transformer.layers.1"),
        (lambda b: hooked(b.transformer.layers[1].attention), "transformer.layers.1.attention"),
        (lambda b: hooked(b.patch_embed), "patch_embed"),
        (lambda b: hooked(b.unembed), "unembed"),
        (lambda b: hooked(b.output_distribution.loc_proj), "output_distribution.loc_proj"),
        (
            lambda b: setattr(b.transformer.layers[0].attention, "run_attention", print),
            "transformer.layers.0.attention",
        ),
        (lambda b: setattr(b.transformer.layers[0].attention, "forward", print), "transformer.layers.0.attention"),
        (lambda b: setattr(b, "unembed", torch.nn.Sequential(b.unembed)), "unembed"),
    ],
)
def test_a_part_that_the_graphs_go_past_is_not_covered_once_it_was_changed(change: Any, name: str) -> None:
    backbone = Small().build()
    assert why_not_static(backbone) == ""
    weight = backbone.unembed.weight
    change(backbone)
    if not hasattr(backbone.unembed, "weight"):
        backbone.unembed.weight = weight
    assert name in why_not_static(backbone).split(", ")


@pytest.mark.parametrize("method", ["run_attention", "positional_embedding", "forward"])
@pytest.mark.parametrize("cls", [attention.BaseMultiheadAttention, attention.TimeWiseMultiheadAttention])
def test_a_method_that_somebody_patched_is_named(cls: Any, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = Small().build()
    original = getattr(cls, method)

    def patched(self: Any, *arguments: Any, **named: Any) -> Any:
        return original(self, *arguments, **named)

    monkeypatch.setattr(cls, method, patched)
    assert f"toto.model.attention.TimeWiseMultiheadAttention.{method}, patched" in why_not_static(backbone)


def test_another_attention_function_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "scaled_dot_product_attention", lambda *_, **__: None)
    assert "scaled_dot_product_attention, patched" in why_not_static(Small().build())


def test_a_cache_of_ones_own_is_what_fixed_size_replaces() -> None:
    backbone = Small().build()
    backbone.allocate_kv_cache = lambda **_: None
    assert why_not_static(backbone) == ""


def test_another_release_is_covered_only_if_it_reads_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = Small().build()
    monkeypatch.setattr(coverage, "_installed", lambda: "0.3.0")
    assert why_not_static(backbone) == ""
    monkeypatch.setattr(attention.BaseMultiheadAttention, "get_qkv", lambda *_: None)
    assert why_not_static(backbone) == "toto-ts 0.3.0"


def test_a_hook_that_comes_later_is_noticed_and_heard() -> None:
    backbone, series = Small().build(), timeseries(series_of())
    ours, theirs = both(backbone, StaticModel(backbone, None))
    before = ours.forecast(series, 20).mean
    backbone.transformer.layers[1].register_forward_hook(lambda _m, _i, output: output * 1.5)
    with pytest.warns(UserWarning, match=r"steps aside.*transformer\.layers\.1"):
        after = ours.forecast(series, 20).mean
    assert torch.equal(after, theirs.forecast(series, 20).mean)
    assert not agree(after, before)


# Memory


def test_after_memory_ran_out_a_smaller_batch_gets_smaller_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Production halves its batch then: a bucket of the old size would run out of memory again."""
    backbone, series = Small().build(), series_of(batch=1)
    static = StaticModel(backbone, None, max_patches=12, batch_sizes=(8,))
    make = static._make

    def with_little_memory(shape: Any) -> Any:
        if isinstance(shape, StepShape) and shape.batch > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return make(shape)

    static.generate_samples(series, 16, num_samples=8, samples_per_batch=8)
    assert [shape.batch for shape in static._buckets.steps()] == [8]
    static._buckets.clear()
    monkeypatch.setattr(static, "_make", with_little_memory)
    with pytest.raises(torch.OutOfMemoryError):
        static.generate_samples(series, 16, num_samples=8, samples_per_batch=8)
    assert static.generate_samples(series, 16, num_samples=8, samples_per_batch=4).shape[-1] == 8
    assert [shape.batch for shape in static._buckets.steps()] == [4]
    assert not static._buckets.allows(8)
