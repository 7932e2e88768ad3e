"""The real toto-ts model: weights, checkpoints, series, and caches bound to it."""

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import safetensors.torch  # noqa: E402
from toto.model.toto import Toto  # noqa: E402
from toto.model.util import KVCache  # noqa: E402

from toto_compat.contract.request import CacheRequest, CsvSeries, Workload  # noqa: E402
from toto_compat.errors import InputError  # noqa: E402
from toto_compat.model.backbone import SHAPES, build_backbone  # noqa: E402
from toto_compat.model.binding import bind, load_user_cache  # noqa: E402
from toto_compat.model.bound import observed  # noqa: E402
from toto_compat.model.series import make_series  # noqa: E402

pytestmark = pytest.mark.cell

WORKLOAD = Workload(context=(96, 128))


def bound(name: str, **kwargs: Any) -> Any:
    backbone = build_backbone(WORKLOAD, dtype=torch.float32, device="cpu")
    return bind(backbone, CacheRequest(name=name, source="builtin"), **kwargs)


def test_every_dtype_has_the_same_weights() -> None:
    single = build_backbone(WORKLOAD, dtype=torch.float32, device="cpu").state_dict()
    double = build_backbone(WORKLOAD, dtype=torch.float64, device="cpu").state_dict()
    assert all(torch.equal(single[name].double(), double[name]) for name in single)


def test_building_a_model_leaves_the_callers_random_stream_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    build_backbone(WORKLOAD, dtype=torch.float32, device="cpu")
    assert torch.equal(torch.rand(1), expected)


def test_a_checkpoint_goes_through_toto_ts_own_loader(tmp_path: Path) -> None:
    torch.manual_seed(5)
    shape = dict(SHAPES["tiny"]) | {"embed_dim": 32, "num_heads": 2, "mlp_hidden_dim": 32}
    saved = Toto(**shape, use_memory_efficient_attention=False)
    safetensors.torch.save_file(saved.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    loaded = build_backbone(WORKLOAD, dtype=torch.float32, device="cpu", checkpoint_folder=str(tmp_path))
    assert loaded.embed_dim == 32
    assert torch.equal(loaded.unembed.weight, saved.model.unembed.weight)
    other = Workload(model="base", context=(256, 512))
    with pytest.raises(InputError, match="its patch has 32 points, that of model base 64"):
        build_backbone(other, dtype=torch.float32, device="cpu", checkpoint_folder=str(tmp_path))


def test_a_checkpoint_without_weights_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no config\.json"):
        build_backbone(WORKLOAD, dtype=torch.float32, device="cpu", checkpoint_folder=str(tmp_path))


@pytest.mark.parametrize("name", ["list_index", "compile_friendly"])
def test_eager_caches_forecast_exactly_like_upstream(name: str) -> None:
    series = make_series(WORKLOAD, patch_size=32, context_patches=4, horizon_patches=3, variates=2, groups=2)
    reference, other = bound("upstream"), bound(name)
    assert torch.equal(other.generate_mean(series, 96), reference.generate_mean(series, 96))
    draws = []
    for model in (reference, other):
        torch.manual_seed(2)
        draws.append(model.generate_samples(series, 64, num_samples=4, samples_per_batch=2))
    assert torch.equal(*draws)


def test_binding_a_cache_leaves_the_backbone_as_it_was() -> None:
    backbone = build_backbone(WORKLOAD, dtype=torch.float32, device="cpu")
    bind(backbone, CacheRequest(name="list_index", source="builtin"))
    series = make_series(WORKLOAD, patch_size=32, context_patches=3, horizon_patches=1)
    cache = backbone.allocate_kv_cache(1, 1, 64, torch.device("cpu"), torch.float32)
    assert type(cache) is KVCache
    assert bind(backbone, CacheRequest(name="upstream", source="builtin")).generate_mean(series, 32).shape[-1] == 32


def test_the_observer_sees_prefill_and_every_decode_step() -> None:
    import contextlib

    series = make_series(WORKLOAD, patch_size=32, context_patches=3, horizon_patches=4)
    for name in ("upstream", "fixed_size"):
        seen: list[int] = []

        @contextlib.contextmanager
        def observer(step: int, seen: list[int] = seen) -> Any:
            seen.append(step)
            yield

        model = bound(name)
        with observed(model, observer):
            model.generate_mean(series, 128)
        assert seen == [0, 1, 2, 3], name


def test_a_users_own_cache_is_bound(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("from toto.model.util import KVCache\n\nclass Mine(KVCache):\n    pass\n", encoding="utf-8")
    backbone = build_backbone(WORKLOAD, dtype=torch.float32, device="cpu")
    model = bind(backbone, CacheRequest(name="mine", source=f"{path}:Mine"))
    assert model.cache_class.endswith(":Mine")
    with pytest.raises(InputError, match="no class 'Yours'"):
        load_user_cache(f"{path}:Yours")


def test_series_are_reproducible_and_a_nudge_moves_present_values_only() -> None:
    arguments: dict[str, Any] = {
        "patch_size": 32,
        "context_patches": 4,
        "horizon_patches": 2,
        "batch": 2,
        "variates": 3,
        "groups": 2,
    }
    series, again = make_series(WORKLOAD, **arguments), make_series(WORKLOAD, **arguments)
    assert torch.equal(series.inputs, again.inputs)
    assert series.id_mask[0, :, 0].tolist() == [0, 0, 1]
    assert not series.padding_mask.all()
    moved = series.nudged(1).inputs != series.inputs
    assert torch.equal(moved, series.padding_mask)


def test_a_csv_becomes_a_series(tmp_path: Path) -> None:
    path = tmp_path / "prices.csv"
    rows = [f"{60 * i},{i if i % 7 else ''}" for i in range(200)]
    path.write_text("\n".join(["time,price", *rows]), encoding="utf-8")
    csv = CsvSeries(path=str(path), time_column="time", value_columns=("price",))
    series = make_series(WORKLOAD, patch_size=32, context_patches=4, horizon_patches=2, csv=csv)
    assert series.truth[0, 0, -1] == 199
    assert series.time_interval_seconds.tolist() == [[60]]
    with pytest.raises(InputError, match="has 200 rows"):
        make_series(WORKLOAD, patch_size=32, context_patches=40, horizon_patches=2, csv=csv)


def test_a_series_has_the_strides_of_its_own_shape() -> None:
    series = make_series(WORKLOAD, patch_size=32, context_patches=4, horizon_patches=2, batch=1, variates=1)
    for name in ("inputs", "padding_mask", "id_mask", "timestamp_seconds"):
        assert getattr(series, name).stride() == (128, 128, 1), name
