"""fixed_size against toto-ts itself, eager: the arithmetic is the same in every shape and feature."""

import contextlib
import dataclasses
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from toto.data.util.dataset import MaskedTimeseries  # noqa: E402
from toto.inference.forecaster import TotoForecaster  # noqa: E402
from toto.model.backbone import TotoBackbone  # noqa: E402

from tests.model.small_backbone import ADAPTATIONS, Small, agree, series_of, timeseries  # noqa: E402
from toto_compat import compile_toto  # noqa: E402
from toto_compat.contract.request import (  # noqa: E402
    CacheRequest,
    CompileSettings,
    Workload,
)
from toto_compat.errors import InputError  # noqa: E402
from toto_compat.model import static_graphs  # noqa: E402
from toto_compat.model.backbone import build_backbone  # noqa: E402
from toto_compat.model.binding import bind  # noqa: E402
from toto_compat.model.bound import CompileSpec  # noqa: E402
from toto_compat.model.forecaster import StaticForecaster  # noqa: E402
from toto_compat.model.series import Series, make_series  # noqa: E402
from toto_compat.model.static_model import StaticModel  # noqa: E402
from toto_compat.model.static_step import StaticStep  # noqa: E402

pytestmark = pytest.mark.cell


def upstream(backbone: TotoBackbone) -> Any:
    return bind(backbone, CacheRequest(name="upstream", source="builtin"))


@pytest.mark.parametrize("scaler", ["CausalPatchStdMeanScaler", "CausalStdMeanScaler", "StdMeanScaler"])
@pytest.mark.parametrize("distribution", ["MixtureOfStudentTsOutput", "StudentTOutput"])
@pytest.mark.parametrize("spacewise_first", [False, True])
def test_mean_forecast_is_upstreams_for_every_scaler_distribution_and_layer_order(
    scaler: str, distribution: str, spacewise_first: bool
) -> None:
    backbone = Small(scaler, distribution, spacewise_first).build()
    series = series_of()
    ours = StaticModel(backbone, None).generate_mean(series, 30)
    assert agree(ours, upstream(backbone).generate_mean(series, 30))


@pytest.mark.parametrize(("batch", "variates"), [(1, 1), (3, 1), (1, 4), (2, 3)])
def test_parameters_under_teacher_forcing_are_upstreams(batch: int, variates: int) -> None:
    backbone = Small().build()
    series = series_of(batch=batch, variates=variates)
    theirs = upstream(backbone).teacher_forced(series, series.truth)
    ours = StaticModel(backbone, None).teacher_forced(series, series.truth)
    assert len(ours) == len(theirs) == 4
    for mine, reference in zip(ours, theirs, strict=True):
        assert mine.keys() == reference.keys()
        assert all(agree(mine[name], reference[name]) for name in mine)


def test_samples_are_upstreams_seed_for_seed_over_several_batches() -> None:
    backbone = Small().build()
    series = series_of()
    torch.manual_seed(3)
    theirs = upstream(backbone).generate_samples(series, 20, num_samples=6, samples_per_batch=2)
    torch.manual_seed(3)
    static = StaticModel(backbone, None, draws="toto-ts")
    ours = static.generate_samples(series, 20, num_samples=6, samples_per_batch=2)
    assert ours.shape == theirs.shape == (2, 2, 20, 6)
    assert agree(ours, theirs)


def test_one_model_serves_changing_lengths_batches_and_horizons() -> None:
    backbone = Small().build()
    static = StaticModel(backbone, None, max_patches=12)
    for context, horizon, batch in [(5, 4, 2), (3, 1, 1), (8, 4, 3), (5, 4, 2), (20, 9, 2)]:
        series = series_of(context, horizon, batch=batch)
        assert agree(static.generate_mean(series, horizon * 8), upstream(backbone).generate_mean(series, horizon * 8))


def test_a_smaller_batch_uses_a_larger_buckets_rows() -> None:
    backbone = Small().build()
    static = StaticModel(backbone, None, batch_sizes=(4,))
    static.generate_mean(series_of(batch=4), 16)
    made = static._buckets.steps()
    series = series_of(batch=3)
    assert agree(static.generate_mean(series, 16), upstream(backbone).generate_mean(series, 16))
    assert static._buckets.steps() == made


def shapes_of(static: StaticModel) -> list[tuple[int, int, int]]:
    return [(shape.batch, shape.variates, shape.capacity) for shape in static._buckets.steps()]


def test_what_was_announced_is_made_once_and_any_other_shape_comes_alone() -> None:
    static = StaticModel(Small().build(), None, max_patches=12, batch_sizes=(1, 4))
    static.generate_mean(series_of(context=20, batch=1), 16)
    assert shapes_of(static) == [(1, 2, 32)]
    static.generate_mean(series_of(batch=1), 16)
    assert sorted(shapes_of(static)) == [(1, 2, 16), (1, 2, 32), (4, 2, 16)]
    static.generate_mean(series_of(context=20, batch=1, variates=3), 16)
    assert sorted(shapes_of(static))[-2:] == [(1, 3, 32), (4, 2, 16)]
    assert len(shapes_of(static)) == 4


def test_every_batch_up_to_the_announced_one_is_forecast_without_another_bucket() -> None:
    backbone = Small().build()
    static = StaticModel(backbone, None, max_patches=12, batch_sizes=(1, 8))
    static.generate_mean(series_of(batch=1), 16)
    for batch in range(1, 9):
        series = series_of(batch=batch)
        assert agree(static.generate_mean(series, 16), upstream(backbone).generate_mean(series, 16))
        samples = static.generate_samples(series, 16, num_samples=6, samples_per_batch=3)
        assert samples.shape == (batch, 2, 16, 6)
        if batch * 3 <= 8:
            assert sorted(shapes_of(static)) == [(1, 2, 16), (8, 2, 16)]


def test_rows_that_would_hold_too_much_are_decoded_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows of two variates weigh 64 KB here: six of them are decoded in three turns of one step."""
    backbone, series = Small().build(), series_of()
    whole, in_turns = (StaticModel(backbone, None, max_patches=12, batch_sizes=(2, 6)) for _ in range(2))
    truth = series_of(batch=6).inputs[..., :24]
    drawn_whole = drawn(whole, series, 6)
    forced_whole = whole.teacher_forced(series, truth)
    mean_whole = whole.generate_mean(series_of(batch=6), 24)
    monkeypatch.setattr(static_graphs, "_MOST_STEP_BYTES", 2 * 2 * 16 * 2 * 2 * 32 * 8)
    drawn_in_turns = drawn(in_turns, series, 6)
    assert [shape.batch for shape in in_turns._buckets.steps()] == [2]
    assert agree(in_turns.generate_mean(series_of(batch=6), 24), mean_whole)
    for ours, theirs in zip(in_turns.teacher_forced(series, truth), forced_whole, strict=True):
        assert all(agree(ours[name], theirs[name]) for name in theirs)
    in_turns.generate_samples(series, 24, num_samples=7, samples_per_batch=7)  # more than anybody announced
    assert [shape.batch for shape in in_turns._buckets.steps()] == [2]
    # the first patch is drawn for all samples at once; of the later ones every row has draws of its own
    assert torch.equal(drawn_in_turns[:, :, :8], drawn_whole[:, :, :8])
    assert drawn_in_turns.shape == drawn_whole.shape
    assert len(drawn_in_turns[..., 8:, :].flatten().unique()) == drawn_in_turns[..., 8:, :].numel()


def test_toto_ts_random_stream_takes_all_rows_of_a_batch_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone, series = Small().build(), series_of()
    static = StaticModel(backbone, None, max_patches=12, batch_sizes=(6,), draws="toto-ts")
    before = drawn(static, series, 3)
    static._buckets.clear()
    monkeypatch.setattr(static_graphs, "_MOST_STEP_BYTES", 1)
    assert torch.equal(drawn(static, series, 3), before)


def drawn(model: StaticModel, series: Any, samples_per_batch: int) -> Any:
    torch.manual_seed(3)
    return model.generate_samples(series, 24, num_samples=2 * samples_per_batch, samples_per_batch=samples_per_batch)


def test_a_forecast_of_one_patch_makes_no_decode_step() -> None:
    backbone = Small().build()
    static = StaticModel(backbone, None, max_patches=9, max_context=8, batch_sizes=(128, 384))
    series = series_of(batch=1)
    assert agree(static.generate_mean(series, 5), upstream(backbone).generate_mean(series, 5))
    static.generate_samples(series, 5, num_samples=256, samples_per_batch=128)
    assert shapes_of(static) == []


def test_the_least_recently_used_bucket_goes_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    backbone = Small().build()
    static = StaticModel(backbone, CompileSpec(settings=CompileSettings(backend="eager")), max_buckets=3)
    for batch in (1, 4, 1):
        static.generate_mean(series_of(batch=batch), 16)
    caplog.clear()
    series = series_of(batch=16)
    assert agree(static.generate_mean(series, 16), upstream(backbone).generate_mean(series, 16))
    assert [batch for batch, _, _ in shapes_of(static)] == [1, 16]
    assert [(record.name, record.levelname, record.getMessage()) for record in caplog.records][:1] == [
        (
            "toto_compat.buckets",
            "WARNING",
            "dropping decode step for batch 4, variates 2, capacity 16 (least recently used of at most 3)",
        )
    ]


def test_a_dropped_bucket_frees_its_buffers() -> None:
    static = StaticModel(Small().build(), CompileSpec(settings=CompileSettings(backend="eager")), max_buckets=2)
    static.generate_mean(series_of(batch=1), 16)
    (bucket,) = (bucket for bucket in static._buckets.values() if isinstance(bucket.module, StaticStep))
    step = weakref.ref(bucket.module)
    del bucket
    static.generate_mean(series_of(batch=4), 16)
    gc.collect()
    assert step() is None


def test_every_compiled_bucket_is_logged_and_one_that_was_not_announced_is_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="toto_compat.buckets")
    unlowered = CompileSpec(settings=CompileSettings(backend="eager"))
    static = StaticModel(Small().build(), unlowered, max_patches=12, batch_sizes=(1, 4), max_context=8)
    for batch in (1, 4, 1, 16, 16):
        static.generate_mean(series_of(batch=batch), 16)
    step = "compiling decode step for batch"
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "compiling context pass for 8 patches, variates 2, series 1 (bucket 1 of at most 16)"),
        ("INFO", f"{step} 1, variates 2, capacity 16 (bucket 2 of at most 16)"),
        ("INFO", f"{step} 4, variates 2, capacity 16 (bucket 3 of at most 16)"),
        ("WARNING", f"{step} 16, variates 2, capacity 16 (bucket 4 of at most 16, not announced)"),
    ]


def test_more_announced_batches_than_buckets_are_refused() -> None:
    with pytest.raises(InputError, match="max_buckets 2 is less than the 3 batch sizes"):
        compile_toto(Small().build(), mode=None, batch_sizes=(1, 2, 4), max_buckets=2)


def step_of(static: StaticModel) -> StaticStep:
    """Give the one decode step that the model holds."""
    (step,) = (bucket.module for bucket in static._buckets.values() if isinstance(bucket.module, StaticStep))
    return step


def test_what_was_returned_is_not_overwritten_by_the_next_forecast() -> None:
    static = StaticModel(Small().build(), None)
    first = static.generate_mean(series_of(), 30)
    kept = first.clone()
    static.generate_mean(series_of(batch=2, context=6), 30)
    assert torch.equal(first, kept)


def test_buffers_keep_their_addresses_across_forecasts() -> None:
    static = StaticModel(Small().build(), None)
    static.generate_mean(series_of(), 30)
    step = step_of(static)
    before = [tensor.data_ptr() for tensor in step.cache.tensors()]
    static.generate_mean(series_of(context=6), 16)
    assert [tensor.data_ptr() for tensor in step.cache.tensors()] == before


def test_new_weights_are_noticed() -> None:
    backbone = Small().build()
    static = StaticModel(backbone, None)
    series = series_of()
    before = static.generate_mean(series, 30)
    with torch.no_grad():
        backbone.unembed.weight.mul_(1.5)
    after = static.generate_mean(series, 30)
    assert not agree(after, before)
    assert agree(after, upstream(backbone).generate_mean(series, 30))


def test_a_model_moved_to_another_dtype_gets_new_buffers_and_a_wrong_series_an_error() -> None:
    backbone = Small().build()
    static = StaticModel(backbone, None)
    static.generate_mean(series_of(), 16)
    backbone.to(torch.float32)
    with pytest.raises(TypeError, match=r"series is torch.float64 .* model torch.float32"):
        static.generate_mean(series_of(), 16)
    single = series_of(dtype=torch.float32)
    ours, theirs = static.generate_mean(single, 16), upstream(backbone).generate_mean(single, 16)
    assert ours.dtype == torch.float32
    assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def with_value(series: Series, value: float) -> Series:
    """The series with one value replaced, early in the context of the first variate."""
    inputs = series.inputs.clone()
    inputs[0, 0, 9] = value
    return dataclasses.replace(series, inputs=inputs)


@pytest.fixture
def validating(monkeypatch: pytest.MonkeyPatch) -> None:
    """toto-ts as it is before anything was compiled: dynamo switches the distributions' own checks off."""
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)


@pytest.mark.usefixtures("validating")
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_series_that_is_not_finite_raises_as_it_does_in_toto_ts(value: float) -> None:
    backbone = Small().build()
    broken = with_value(series_of(), value)
    for model in (upstream(backbone), StaticModel(backbone, None)):
        with pytest.raises(ValueError, match=r"[Pp]arameter|not finite"):
            model.generate_mean(broken, 30)


@pytest.mark.usefixtures("validating")
def test_known_future_values_that_are_not_finite_raise_as_they_do_in_toto_ts() -> None:
    backbone = Small().build()
    series = timeseries(series_of(), exogenous=1)
    future = torch.full((2, 1, 24), float("nan"), dtype=torch.float64)
    for forecaster in (TotoForecaster(backbone), StaticForecaster(backbone, StaticModel(backbone, None))):
        with pytest.raises(ValueError, match=r"[Pp]arameter|not finite"):
            forecaster.forecast(series, 24, future_exogenous_variables=future)


@pytest.mark.parametrize("distribution", ["MixtureOfStudentTsOutput", "StudentTOutput"])
def test_a_forecast_that_is_not_finite_leaves_nothing_behind_for_the_next(distribution: str) -> None:
    """Masked slots of the cache are read: what lies there must be finite. A plain Student-t does not raise."""
    backbone = Small(distribution=distribution).build()
    static = StaticModel(backbone, None)
    with contextlib.suppress(ValueError):
        static.generate_mean(with_value(series_of(context=8), float("nan")), 30)
    static.generate_mean(series_of(context=8), 30)
    for buffer in step_of(static).cache.keys_values:
        buffer.fill_(torch.nan)
    series = series_of(context=5)
    assert agree(static.generate_mean(series, 30), upstream(backbone).generate_mean(series, 30))


@pytest.mark.parametrize("how", ADAPTATIONS)
def test_a_layer_that_somebody_changed_is_called_not_taken_apart(how: str) -> None:
    backbone = Small().build()
    plain = StaticModel(backbone, None).generate_mean(series_of(), 30)
    for layer in backbone.transformer.layers:
        ADAPTATIONS[how](layer)
    ours = StaticModel(backbone, None).generate_mean(series_of(), 30)
    assert agree(ours, upstream(backbone).generate_mean(series_of(), 30))
    assert not agree(ours, plain)


def test_a_layer_that_somebody_changed_compiles_too() -> None:
    """Traced in full: a region must not hand back what it was given."""
    backbone = Small().build()
    for layer in backbone.transformer.layers:
        ADAPTATIONS["attention's output replaced"](layer)
    traced = StaticModel(backbone, CompileSpec(settings=CompileSettings(backend="aot_eager")))
    assert agree(traced.generate_mean(series_of(), 30), upstream(backbone).generate_mean(series_of(), 30))


def test_what_a_forecast_returns_is_an_ordinary_tensor() -> None:
    static, series = StaticModel(Small().build(), None), series_of()
    samples = static.generate_samples(series, 16, num_samples=4, samples_per_batch=2)
    parameters = static.teacher_forced(series, series.truth[..., :24])
    returned = [static.generate_mean(series, 16), samples, *(value for step in parameters for value in step.values())]
    assert not any(tensor.is_inference() for tensor in returned)


def test_making_a_bucket_leaves_the_garbage_collector_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    before, during = gc.get_threshold(), []
    forward = StaticStep.forward

    def watched(step: StaticStep) -> Any:
        during.append(gc.get_threshold())
        return forward(step)

    monkeypatch.setattr(StaticStep, "forward", watched)
    StaticModel(Small().build(), None).generate_mean(series_of(), 16)
    assert during[0][2] > before[2]
    assert during[-1] == gc.get_threshold() == before


def test_a_model_that_is_no_longer_covered_is_refused_every_time() -> None:
    backbone = Small().build()
    static = StaticModel(backbone, None)
    static.generate_mean(series_of(), 16)
    backbone.enable_variate_labels()
    backbone.to(torch.float64)
    for _ in range(2):
        with pytest.raises(TypeError, match="fusion tokens"):
            static.generate_mean(series_of(), 16)


@pytest.mark.parametrize("through_data", [False, True], ids=["in place", "through .data"])
def test_new_values_in_the_same_weights_are_taken_over_without_new_buffers(through_data: bool) -> None:
    backbone = Small().build()
    static = StaticModel(backbone, None)
    series = series_of()
    static.generate_mean(series, 30)
    before = static._buckets.values()
    for weight in (backbone.unembed.weight, backbone.output_distribution.loc_proj.weight):
        (weight.data if through_data else weight).mul_(1.5)
    assert agree(static.generate_mean(series, 30), upstream(backbone).generate_mean(series, 30))
    assert static._buckets.values() == before[-1:] + before[:-1] or static._buckets.values() == before


def test_forecasts_inside_and_outside_of_inference_mode_follow_each_other() -> None:
    backbone = Small().build()
    static = StaticModel(backbone, None)
    with torch.inference_mode():
        inside = static.generate_mean(series_of(), 30)
    assert torch.equal(static.generate_mean(series_of(), 30), inside)


def test_threads_take_turns() -> None:
    backbone = Small().build()
    static = StaticModel(backbone, None)
    many = [series_of(context=context) for context in (3, 4, 5, 6)] * 3
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda series: static.generate_mean(series, 30), many))
    assert all(agree(ours, upstream(backbone).generate_mean(s, 30)) for ours, s in zip(found, many, strict=True))


def test_an_id_mask_of_one_step_holds_for_all() -> None:
    series = timeseries(series_of(batch=2))
    short = series._replace(id_mask=series.id_mask[..., :1])
    ours = StaticForecaster((backbone := Small().build()), StaticModel(backbone, None))
    assert torch.equal(ours.forecast(short, 16).mean, ours.forecast(series, 16).mean)


@pytest.mark.parametrize("model", ["tiny"])
def test_float32_error_to_double_precision_is_at_most_twice_eagers(model: str) -> None:
    workload = Workload(model="tiny")
    series = make_series(workload, patch_size=32, context_patches=16, horizon_patches=10)
    exact = upstream(build_backbone(workload, dtype=torch.float64, device="cpu"))
    single = build_backbone(workload, dtype=torch.float32, device="cpu")
    reference = exact.generate_mean(series.to(dtype=torch.float64), 320)
    eager = (upstream(single).generate_mean(series, 320) - reference).abs().max()
    ours = (StaticModel(single, None).generate_mean(series, 320) - reference).abs().max()
    assert ours <= 2 * eager


def test_the_forecaster_has_toto_ts_interface_and_forecasts() -> None:
    backbone = Small().build()
    theirs, ours = TotoForecaster(backbone), StaticForecaster(backbone, StaticModel(backbone, None, draws="toto-ts"))
    whole = series_of()
    unpadded = MaskedTimeseries(
        *(part[..., 3:] for part in timeseries(whole)[:4]),
        whole.time_interval_seconds,  # a length that is no multiple
    )
    assert agree(ours.forecast(unpadded, 21).mean, theirs.forecast(unpadded, 21).mean)
    for forecaster in (ours, theirs):
        torch.manual_seed(0)
        forecaster.drawn = forecaster.forecast(unpadded, 21, num_samples=4, samples_per_batch=2).samples
    assert agree(ours.drawn, theirs.drawn)
    with pytest.raises(AssertionError, match="divisible by sampling_batch_size"):
        ours.forecast(unpadded, 21, num_samples=5, samples_per_batch=2)


def test_known_future_values_are_injected_like_toto_ts_does() -> None:
    backbone = Small().build()
    theirs, ours = TotoForecaster(backbone), StaticForecaster(backbone, StaticModel(backbone, None, draws="toto-ts"))
    series = timeseries(series_of(), exogenous=1)
    future = torch.randn(2, 1, 21, dtype=torch.float64)
    expected = theirs.forecast(series, 21, future_exogenous_variables=future).mean
    assert agree(ours.forecast(series, 21, future_exogenous_variables=future).mean, expected)
    drawn = []
    for forecaster in (ours, theirs):
        torch.manual_seed(0)
        options = {"num_samples": 4, "samples_per_batch": 2, "future_exogenous_variables": future}
        drawn.append(forecaster.forecast(series, 21, **options).samples)
    assert agree(*drawn)


def test_without_the_cache_it_is_toto_ts_itself() -> None:
    backbone = Small().build()
    theirs, ours = TotoForecaster(backbone), StaticForecaster(backbone, StaticModel(backbone, None))
    series = timeseries(series_of())
    assert torch.equal(
        ours.forecast(series, 16, use_kv_cache=False).mean, theirs.forecast(series, 16, use_kv_cache=False).mean
    )


def test_what_is_not_covered_runs_eager_and_is_named() -> None:
    backbone = Small().build()
    backbone.enable_variate_labels()
    backbone.to(torch.float64)
    with pytest.warns(UserWarning, match="fusion tokens"):
        forecaster = compile_toto(backbone)
    assert "fusion tokens" in forecaster.eager_because
    series = timeseries(series_of())
    assert torch.equal(forecaster.forecast(series, 16).mean, TotoForecaster(backbone).forecast(series, 16).mean)
    with pytest.warns(UserWarning, match="float16"):
        assert "float16" in compile_toto(Small().build(torch.float16)).eager_because


def test_wrong_names_are_input_errors() -> None:
    backbone = Small().build()
    with pytest.raises(InputError, match="reduce_overhead"):
        compile_toto(backbone, mode="reduce_overhead")
    with pytest.raises(InputError, match="fixed-size"):
        compile_toto(backbone, cache="fixed-size")
    with pytest.raises(InputError, match="Linear"):
        compile_toto(torch.nn.Linear(2, 2))
