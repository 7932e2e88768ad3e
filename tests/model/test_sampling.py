"""Direct draws have the distribution that toto-ts draws from: component by component, in the tails, independently."""

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")
stats = pytest.importorskip("scipy.stats")

from tests.model.small_backbone import Small, series_of  # noqa: E402
from toto_compat.contract.request import CompileSettings  # noqa: E402
from toto_compat.model.bound import CompileSpec  # noqa: E402
from toto_compat.model.context_pass import Context  # noqa: E402
from toto_compat.model.sampling import PatchDraws, draw_directly, student_t  # noqa: E402
from toto_compat.model.static_model import StaticModel  # noqa: E402

pytestmark = pytest.mark.cell

MANY = 200_000
# The chance that a right implementation fails one test: seeds are fixed, so it passes always or never.
RARE = 1e-4


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(20251030)


def uniforms(*shape: int) -> Any:
    return torch.rand(3, *shape, dtype=torch.float64)


def p_value(values: Any, df: float) -> float:
    return float(stats.kstest(values.double().numpy(), stats.t(df).cdf).pvalue)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("df", [2.0000002, 2.1, 3.0, 7.5, 30.0, 1e3, 1e6])
def test_each_number_of_degrees_of_freedom_gives_its_student_t(df: float, dtype: Any) -> None:
    drawn = student_t(torch.full((MANY,), df, dtype=dtype), *uniforms(MANY)[1:])
    assert p_value(drawn, df) > RARE


@pytest.mark.parametrize("wrong", ["normal", "fewer degrees", "narrower"])
def test_these_tests_see_a_wrong_distribution(wrong: str) -> None:
    radius, angle = uniforms(MANY)[1:]
    drawn = {
        "normal": lambda: torch.randn(MANY),
        "fewer degrees": lambda: student_t(torch.full((MANY,), 2.5), radius, angle),
        "narrower": lambda: 0.98 * student_t(torch.full((MANY,), 3.0), radius, angle),
    }[wrong]()
    assert p_value(drawn, 3.0) < RARE


@pytest.mark.parametrize("df", [2.1, 5.0])
def test_the_tails_are_there(df: float) -> None:
    drawn = student_t(torch.full((4_000_000,), df), *uniforms(4_000_000)[1:]).double().abs()
    for probability in (1e-3, 1e-5):
        limit = float(stats.t(df).isf(probability / 2))
        seen, expected = int((drawn > limit).sum()), probability * len(drawn)
        assert abs(seen - expected) < 4 * math.sqrt(expected)


def test_the_largest_uniform_gives_a_finite_value_and_zero_gives_zero() -> None:
    df = torch.tensor([2.0 + 2e-7] * 2)
    drawn = student_t(df, torch.tensor([1 - 2.0**-53, 0.0], dtype=torch.float64), torch.zeros(2, dtype=torch.float64))
    assert math.isfinite(float(drawn[0]))
    assert float(drawn[0]) > 1e7
    assert float(drawn[1]) == 0.0


def test_components_come_as_often_as_their_weights_say_and_each_with_its_own_distribution() -> None:
    probs = torch.tensor([0.5, 0.0, 0.3, 0.2 - 1e-6, 1e-6])
    df = torch.tensor([2.5, 3.0, 4.0, 50.0, 8.0])
    loc = torch.tensor([-1e4, 0.0, 0.0, 1e4, 1e5])  # so far apart that a draw tells its component
    scale = torch.tensor([1.0, 1.0, 2.0, 0.5, 1.0])
    df_of_all, loc_of_all, scale_of_all, cumulative = (x.expand(MANY, 5) for x in (df, loc, scale, probs.cumsum(-1)))
    drawn = draw_directly(df_of_all, loc_of_all, scale_of_all, cumulative, uniforms(MANY))
    nearest = (drawn.unsqueeze(-1) - torch.tensor([-1e4, 0.0, 1e4, 1e5])).abs().argmin(-1)
    counts = torch.bincount(nearest, minlength=4)[:3].double()
    weights = probs[[0, 2, 3]].double()
    assert float(stats.chisquare(counts.numpy(), (weights / weights.sum() * counts.sum()).numpy()).pvalue) > RARE
    for index, component in enumerate((0, 2, 3)):
        own = (drawn[nearest == index].double() - float(loc[component])) / float(scale[component])
        assert p_value(own[own.abs() < 4e3], float(df[component])) > RARE


def test_sums_that_end_below_one_leave_the_rest_to_the_last_component() -> None:
    cumulative = torch.tensor([[0.25, 0.99]])
    u = torch.tensor([[0.995], [0.0], [0.0]], dtype=torch.float64)
    loc = torch.tensor([[1.0, 2.0]])
    assert float(draw_directly(torch.full((1, 2), 3.0), loc, torch.ones(1, 2), cumulative, u)) == 2.0


def test_points_rows_and_rounds_are_independent() -> None:
    """The ranks of neighbours in every direction are uncorrelated, and no value comes twice."""
    static = StaticModel(Small().build(torch.float32), None)
    series = series_of(batch=1, variates=2, dtype=torch.float32)
    drawn = static.generate_samples(series, 8, num_samples=4096, samples_per_batch=512)[0]  # [2, 8, 4096]
    ranks = drawn.argsort(-1).argsort(-1).double() / 4096
    for one, other in ((ranks[:, :-1], ranks[:, 1:]), (ranks[0], ranks[1]), (ranks[..., :-1], ranks[..., 1:])):
        correlation = float(torch.corrcoef(torch.stack((one.flatten(), other.flatten())))[0, 1])
        assert abs(correlation) < 4 / math.sqrt(one.numel())
    halves = drawn[..., :512], drawn[..., 512:1024]
    assert not torch.equal(*halves)
    assert len(torch.unique(drawn)) > 0.99 * drawn.numel()


@pytest.mark.parametrize("horizon", [1, 5, 8, 20])
def test_a_forecasts_samples_are_the_predicted_mixtures(horizon: int) -> None:
    """The first patch's points: their probability integral transforms by toto-ts's own parameters are uniform."""
    backbone = Small().build(torch.float64)
    static, series = StaticModel(backbone, None), series_of(batch=2, variates=2)
    drawn = static.generate_samples(series, horizon, num_samples=2000, samples_per_batch=500)
    parameters = static.teacher_forced(series, series.truth[..., :8])[0]
    points = min(horizon, 8)
    prefilled = static._prefill(Context(series.inputs, series.padding_mask, series.id_mask), 1)
    standard = (drawn[:, :, :points] - prefilled.affine_loc.unsqueeze(-1)) / prefilled.affine_scale.unsqueeze(-1)
    df, loc, scale, probs = (parameters[name][:, :, :points].unsqueeze(3) for name in ("df", "loc", "scale", "probs"))
    by_component = stats.t(df.numpy()).cdf(((standard.unsqueeze(-1) - loc) / scale).numpy())
    transformed = (torch.from_numpy(by_component) * probs).sum(-1).flatten().numpy()
    assert float(stats.kstest(transformed, stats.uniform.cdf).pvalue) > RARE


@pytest.mark.parametrize("variates", [1, 700])
def test_any_number_of_points_and_samples_is_drawn_from_its_own_row(variates: int) -> None:
    """Locations tell the row that a value was drawn from: the scale is nothing beside them."""
    draws = PatchDraws(variates, 8, 2, torch.float32, torch.device("cpu"))
    loc = torch.arange(variates * 8.0).view(variates, 8, 1).expand(-1, -1, 2)
    flat = torch.full((variates, 8, 2), 3.0)
    for points in (1, 5, 8):
        affine = torch.zeros(variates, 1), torch.ones(variates, 1)
        at_once = draws.begin((flat, loc, flat * 1e-9, flat / 6), *affine, points)
        draws.uniforms.uniform_()
        values = draws()[: variates * points * at_once].view(variates, points, at_once)
        assert at_once >= 1
        assert torch.equal(values.round(), loc[:, :points, :1].expand_as(values))


def test_a_seed_gives_the_same_samples_traced_and_eager_and_another_seed_others() -> None:
    backbone, series = Small().build(torch.float64), series_of(batch=2)
    drawn = []
    for spec, seed in [(None, 1), (CompileSpec(settings=CompileSettings(backend="aot_eager")), 1), (None, 2)]:
        torch.manual_seed(seed)
        model = StaticModel(backbone, spec)
        model.generate_mean(series, 20)  # whatever is made is made before the draws
        model.generate_samples(series, 20, num_samples=2, samples_per_batch=1)
        torch.manual_seed(seed)
        drawn.append(model.generate_samples(series, 20, num_samples=6, samples_per_batch=3))
    assert torch.allclose(drawn[0], drawn[1], rtol=1e-9, atol=1e-9)
    assert not torch.allclose(drawn[0], drawn[2])
