"""The static pass over a context is the plain one: at every length that fits its room, for several series at once."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.model.small_backbone import Small, series_of  # noqa: E402
from toto_compat.model.buckets import cheapest_batch, room_for  # noqa: E402
from toto_compat.model.context_pass import Context, PlainPass, Prefilled, StaticPass  # noqa: E402
from toto_compat.model.head import FusedHead  # noqa: E402

pytestmark = pytest.mark.cell

TIGHT = 1e-11  # relative to the largest value: both run in double precision


def context_of(length: int, series: int, variates: int) -> Context:
    made = series_of(length, 1, batch=series, variates=variates)
    return Context(made.inputs, made.padding_mask, made.id_mask)


def run(static: StaticPass, context: Context) -> Prefilled:
    static.put(context)
    return static.result(static.forward(), context, keep_keys=True)


def assert_same(ours: Prefilled, plain: Prefilled) -> None:
    pairs = [*zip(ours.parameters, plain.parameters, strict=True)]
    pairs += zip(ours.keys_values, plain.keys_values, strict=True)
    pairs += [(ours.scaler_state[name], plain.scaler_state[name]) for name in plain.scaler_state]
    pairs += [(ours.affine_loc.expand_as(plain.affine_loc), plain.affine_loc)]
    pairs += [(ours.affine_scale.expand_as(plain.affine_scale), plain.affine_scale)]
    for mine, theirs in pairs:
        assert mine.shape == theirs.shape
        assert float((mine - theirs).abs().max()) <= TIGHT * float(theirs.abs().max())
    assert torch.equal(ours.groups, plain.groups)
    assert bool(ours.fit) is True


@pytest.mark.parametrize("whole", [False, True], ids=["newest", "whole"])
@pytest.mark.parametrize("scaler", ["CausalPatchStdMeanScaler", "CausalStdMeanScaler", "StdMeanScaler"])
@pytest.mark.parametrize("variates", [1, 3])
def test_one_room_serves_every_length_and_number_of_series(scaler: str, whole: bool, variates: int) -> None:
    backbone = Small(scaler).build()
    head = FusedHead(backbone)
    static = StaticPass(backbone, head, room=16, variates=variates, series=3, whole=whole)
    for length, series in [(16, 1), (5, 3), (8, 2), (5, 1), (1, 3), (16, 1), (2, 2)]:
        context = context_of(length, series, variates)
        assert_same(run(static, context), PlainPass(backbone, head).run(context, whole=whole))


def test_what_an_earlier_context_left_is_not_seen() -> None:
    backbone = Small().build()
    head = FusedHead(backbone)
    static = StaticPass(backbone, head, room=16, variates=2, series=2, whole=False)
    broken = context_of(16, 1, 2)
    broken.inputs.fill_(torch.nan)
    run(static, broken)
    context = context_of(5, 2, 2)
    assert_same(run(static, context), PlainPass(backbone, head).run(context, whole=False))


def test_a_patch_of_two_groups_is_told() -> None:
    backbone = Small().build()
    static = StaticPass(backbone, FusedHead(backbone), room=8, variates=2, series=1, whole=False)
    context = context_of(4, 1, 2)
    context.id_mask[0, 1, 3] += 1
    assert bool(run(static, context).fit) is False


@pytest.mark.parametrize("gone", [slice(0, 8), slice(0, 20), slice(3, 4), slice(0, 39)])
def test_missing_values_count_as_toto_ts_counts_them(gone: slice) -> None:
    """Whole patches at the front, as padding leaves them, a gap, and all but the newest value."""
    backbone = Small().build()
    head = FusedHead(backbone)
    context = context_of(5, 2, 2)
    context.padding_mask[..., gone] = False
    context.inputs[..., gone] = 0.0
    static = StaticPass(backbone, head, room=16, variates=2, series=2, whole=False)
    assert_same(run(static, context), PlainPass(backbone, head).run(context, whole=False))


@pytest.mark.parametrize("factor", [1e-5, 1.0, 1e5, 1e12])
def test_series_of_every_size_are_scaled_alike(factor: float) -> None:
    backbone = Small().build()
    head = FusedHead(backbone)
    made = context_of(5, 1, 1)
    context = Context(made.inputs * factor, made.padding_mask, made.id_mask)
    static = StaticPass(backbone, head, room=8, variates=1, series=1, whole=False)
    assert_same(run(static, context), PlainPass(backbone, head).run(context, whole=False))


@pytest.mark.parametrize(("patches", "room"), [(1, 8), (5, 8), (8, 8), (9, 16), (64, 64), (65, 128)])
def test_a_room_is_the_next_power_of_two(patches: int, room: int) -> None:
    assert room_for(patches) == room


@pytest.mark.parametrize(
    ("rows", "batches", "chosen"),
    [
        (3, [1, 512], 1),
        (40, [1, 512], 512),
        (300, [128, 512], 128),
        (400, [128, 512], 512),
        (130, [128, 512], 128),
        (4, [1, 2, 16], 16),
    ],
)
def test_rows_go_where_the_fewest_weights_are_read(rows: int, batches: list[int], chosen: Any) -> None:
    assert cheapest_batch(rows, batches) == chosen
