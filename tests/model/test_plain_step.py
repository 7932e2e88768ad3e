"""The fast step is the plain one: in double precision, whole and trick by trick; and the plain one is toto-ts's."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.model.small_backbone import ADAPTATIONS, Small, agree, series_of  # noqa: E402
from toto_compat.contract.request import CacheRequest, CompileSettings  # noqa: E402
from toto_compat.model.binding import bind  # noqa: E402
from toto_compat.model.bound import CompileSpec  # noqa: E402
from toto_compat.model.head import FusedHead  # noqa: E402
from toto_compat.model.layer import CALLED, TAKEN_APART, WayThrough, can_be_taken_apart  # noqa: E402
from toto_compat.model.rotation import context_tables, decode_tables, rotate  # noqa: E402
from toto_compat.model.series import Series  # noqa: E402
from toto_compat.model.static_model import StaticModel  # noqa: E402
from toto_compat.model.static_step import PlainStep, StaticStep  # noqa: E402

pytestmark = pytest.mark.cell

TIGHT = 1e-11  # relative to the largest value: both run in double precision


class PlainModel(StaticModel):
    step_class = PlainStep
    pass_class = None


def assert_equal(fast: Any, plain: Any) -> None:
    assert fast.shape == plain.shape
    assert float((fast - plain).abs().max()) <= TIGHT * float(plain.abs().max())


def steps_of(model: StaticModel) -> list[PlainStep]:
    """Give the decode steps that a model holds, in the order of their use."""
    return [bucket.module for bucket in model._buckets.values() if isinstance(bucket.module, PlainStep)]


def ways_of(model: StaticModel) -> set[WayThrough]:
    """Give the ways through its layers that a model's passes and steps take."""
    return {bucket.module.way for bucket in model._buckets.values() if hasattr(bucket.module, "way")}


def assert_same_forecasts(fast: StaticModel, plain: StaticModel, series: Series) -> None:
    """Compare every parameter of every step, the mean that is fed back, draws, and what is left in the buffers."""
    forced = zip(fast.teacher_forced(series, series.truth), plain.teacher_forced(series, series.truth), strict=True)
    for ours, definition in forced:
        assert ours.keys() == definition.keys()
        for name in ours:
            assert_equal(ours[name], definition[name])
    assert_equal(fast.generate_mean(series, 30), plain.generate_mean(series, 30))
    drawn = []
    for model in (fast, plain):
        torch.manual_seed(3)
        drawn.append(model.generate_samples(series, 20, num_samples=4, samples_per_batch=2))
    assert_equal(*drawn)
    for ours, definition in zip(steps_of(fast), steps_of(plain), strict=True):
        for left, left_by_plain in zip(ours.cache.tensors(), definition.cache.tensors(), strict=True):
            assert_equal(left, left_by_plain)
        assert_equal(ours.patch, definition.patch)


@pytest.mark.parametrize("distribution", ["MixtureOfStudentTsOutput", "StudentTOutput"])
@pytest.mark.parametrize("spacewise_first", [False, True], ids=["time first", "space first"])
@pytest.mark.parametrize(("batch", "variates"), [(1, 1), (3, 1), (2, 3), (1, 4)])
def test_the_fast_step_is_the_plain_one(distribution: str, spacewise_first: bool, batch: int, variates: int) -> None:
    backbone = Small(distribution=distribution, spacewise_first=spacewise_first).build()
    fast, series = StaticModel(backbone, None), series_of(batch=batch, variates=variates)
    assert_same_forecasts(fast, PlainModel(backbone, None), series)
    assert ways_of(fast) == {TAKEN_APART}


@pytest.mark.parametrize("scaler", ["CausalPatchStdMeanScaler", "CausalStdMeanScaler", "StdMeanScaler"])
def test_the_plain_step_is_toto_ts_own(scaler: str) -> None:
    backbone, series = Small(scaler).build(), series_of(variates=3)
    upstream = bind(backbone, CacheRequest(name="upstream", source="builtin"))
    assert agree(PlainModel(backbone, None).generate_mean(series, 30), upstream.generate_mean(series, 30))


def test_the_series_of_these_tests_have_groups_that_do_not_attend_to_each_other() -> None:
    plain = PlainModel(Small().build(), None)
    plain.generate_mean(series_of(variates=3), 16)
    (step,) = steps_of(plain)
    assert {0.0, -torch.inf} == set(step.group_bias.flatten().tolist())


@pytest.mark.parametrize("how", ADAPTATIONS)
@pytest.mark.parametrize("changed", [slice(None), slice(1, 2), slice(2, 3)], ids=["all", "over time", "over variates"])
def test_the_fast_step_is_the_plain_one_for_layers_that_somebody_changed(how: str, changed: slice) -> None:
    backbone, series = Small().build(), series_of(variates=3)
    untouched = PlainModel(backbone, None).generate_mean(series, 30)
    for layer in backbone.transformer.layers[changed]:
        ADAPTATIONS[how](layer)
    fast, plain = StaticModel(backbone, None), PlainModel(backbone, None)
    assert_same_forecasts(fast, plain, series)
    assert not agree(plain.generate_mean(series, 30), untouched)
    assert ways_of(fast) == {CALLED}


@pytest.mark.parametrize("step_class", [PlainStep, StaticStep])
@pytest.mark.parametrize("hooked", [False, True], ids=["untouched", "hooked"])
def test_both_are_traced_in_one_graph(step_class: type[PlainStep], hooked: bool) -> None:
    """The model compiles with fullgraph=True: a break would raise."""
    backbone, series = Small().build(), series_of(variates=3)
    if hooked:
        ADAPTATIONS["attention's output hooked"](backbone.transformer.layers[0])
    traced = StaticModel(backbone, CompileSpec(settings=CompileSettings(backend="aot_eager")))
    traced.step_class = step_class
    assert_equal(traced.generate_mean(series, 30), PlainModel(backbone, None).generate_mean(series, 30))


# Trick by trick


@pytest.mark.parametrize("distribution", ["MixtureOfStudentTsOutput", "StudentTOutput"])
def test_the_fused_head_is_unembed_and_projections(distribution: str) -> None:
    head = FusedHead(Small(distribution=distribution).build())
    hidden = torch.randn(2, 3, 4, 32, dtype=torch.float64)
    for fused, plain in zip(head(hidden), head.plain(hidden), strict=True):
        assert fused.shape[:3] == (2, 3, 4 * 8)
        assert_equal(fused, plain)


def test_a_layer_taken_apart_is_the_layer_called() -> None:
    layer = Small().build().transformer.layers[0]
    hidden, attended = torch.randn(2, 6, 32, dtype=torch.float64)
    assert can_be_taken_apart(layer)
    apart, called = (way.finish(layer, way.begin(layer, hidden), attended) for way in (TAKEN_APART, CALLED))
    assert_equal(apart, called)


def test_a_contexts_tables_rotate_it_as_toto_ts_does() -> None:
    rotary = Small().build().transformer.rotary_emb
    positions = torch.arange(7, dtype=torch.float64)
    joint = torch.randn(3, 5, 2, 7, 16, dtype=torch.float64)  # queries, keys and values of 5 rows, 2 heads, 7 patches
    query, key = rotary.rotate_queries_and_keys(joint[0], joint[1], seq_pos=positions)
    tables = context_tables(rotary, 7, torch.float64, torch.device("cpu"))
    by_patch = (table[:7].transpose(0, 1)[:, None, None] for table in tables)  # [3, 1, 1, 7, 16]
    rotated = rotate(joint, *by_patch)
    assert_equal(rotated[0], query * 16**-0.5)
    assert_equal(rotated[1], key)
    assert_equal(rotated[2], joint[2])


def test_each_row_of_the_tables_rotates_as_toto_ts_does_at_that_position() -> None:
    rotary = Small().build().transformer.rotary_emb
    joint = torch.randn(3, 5, 2, 16, dtype=torch.float64)  # queries, keys and values of 5 rows and 2 heads
    cosines, sines = decode_tables(rotary, 6, torch.float64, torch.device("cpu"))
    assert len(cosines) == len(sines) == 6 + 1
    for_attention = 16**-0.5
    for row in range(7):
        query, key, value = rotate(joint, *(table[row].view(3, 1, 1, -1) for table in (cosines, sines)))
        plain_query, plain_key = joint[0], joint[1]
        if row < 6:
            position = torch.tensor([float(row)], dtype=torch.float64)
            rotated = rotary.rotate_queries_and_keys(joint[0, :, :, None], joint[1, :, :, None], seq_pos=position)
            plain_query, plain_key = (x.squeeze(2) for x in rotated)
        assert_equal(query, plain_query * for_attention)
        assert_equal(key, plain_key)
        assert_equal(value, joint[2])
