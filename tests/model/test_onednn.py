"""oneDNN's products in compiled graphs: where they are taken, and that nothing but the speed is another."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.model.small_backbone import Small, series_of  # noqa: E402
from toto_compat.contract.request import CacheRequest  # noqa: E402
from toto_compat.model import onednn  # noqa: E402
from toto_compat.model.binding import bind  # noqa: E402
from toto_compat.model.bound import CompileSpec  # noqa: E402

pytestmark = [
    pytest.mark.cell,
    pytest.mark.skipif(not onednn.onednn_options(), reason="this torch has no oneDNN, or no pass that inductor calls"),
]

FIXED_SIZE = CacheRequest(name="fixed_size", source="builtin")


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The number of products taken in each graph; weights of any size are, and nothing comes from earlier compiles."""
    counts: list[int] = []
    replace = onednn.replace_products

    def counting(graph: Any) -> int:
        counts.append(replace(graph))
        return counts[-1]

    monkeypatch.setattr(onednn, "SMALLEST_WEIGHT", 1)
    monkeypatch.setattr(onednn, "replace_products", counting)
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        yield counts
    torch._dynamo.reset()


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    made: Callable[..., Any] = torch.compile(function, fullgraph=True, dynamic=False, options=onednn.onednn_options())
    return made


def test_a_forecast_of_several_patches_is_as_near_to_double_precision_as_eagers(replaced: list[int]) -> None:
    series = series_of(context=5, horizon=4, dtype=torch.float32)
    truth = bind(Small().build(torch.float64), FIXED_SIZE).generate_mean(series.to(dtype=torch.float64), 32)
    backbone = Small().build(torch.float32)
    eager = bind(backbone, FIXED_SIZE).generate_mean(series, 32)
    ours = bind(backbone, FIXED_SIZE, compile_spec=CompileSpec()).generate_mean(series, 32)

    def error(forecast: Any) -> float:
        return float((forecast.double() - truth).abs().max() / truth.abs().max())

    # of a region each: joint projection; attention's output and the MLP's two; outside: embedding and head
    assert sum(replaced) >= 2 * (1 + 3 + 2)
    assert error(ours) <= 2 * error(eager)


def test_bias_residual_and_plain_products_are_all_taken_and_right(replaced: list[int]) -> None:
    rows, weight, bias, rest = torch.randn(8, 64), torch.randn(48, 64), torch.randn(48), torch.randn(8, 48)

    def products() -> tuple[Any, ...]:
        linear = torch.nn.functional.linear
        return linear(rows, weight, bias), linear(rows, weight), torch.addmm(rest, rows, weight.t())

    expected = products()
    for ours, theirs in zip(compiled(products)(), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert replaced == [3]


def test_a_weight_that_is_written_to_afterwards_is_the_one_that_is_read(replaced: list[int]) -> None:
    layer = torch.nn.Linear(64, 48).requires_grad_(False)
    rows, run = torch.randn(8, 64), compiled(layer)
    run(rows)
    layer.weight.mul_(2)
    torch.testing.assert_close(run(rows), layer(rows))
    assert replaced == [1]


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda a, w: torch.addmm(a @ w.t(), a, w.t(), alpha=2) - a @ w.t(), id="scaled"),
        pytest.param(lambda a, w: a.double() @ w.double().t(), id="double precision"),
        pytest.param(lambda a, w: a @ (w * 2).t(), id="no weight but something computed"),
        pytest.param(lambda a, w: a @ w.t()[:, ::2], id="a part of a weight"),
        pytest.param(lambda a, w: torch.addmm(a[:, :1], a, w.t()), id="a column added"),
    ],
)
def test_what_only_looks_like_a_layers_product_stays_right(function: Any, replaced: list[int]) -> None:
    rows, weight = torch.randn(8, 64), torch.randn(48, 64)
    torch.testing.assert_close(compiled(function)(rows, weight), function(rows, weight))
    assert len(replaced) == 1


def test_small_weights_stay_with_torchs_own_choice(replaced: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "SMALLEST_WEIGHT", 48 * 64 + 1)
    compiled(torch.nn.Linear(64, 48).requires_grad_(False))(torch.randn(8, 64))
    assert replaced == [0]
