"""A replayed CUDA graph's rules on the CPU: fixed_size keeps them and forecasts as eager; who breaks one is told."""

import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.model.small_backbone import Small, series_of
from toto_compat.cell.lowering.capture import every_graph_goes_to, run_as_it_is
from toto_compat.cell.lowering.replay import Rehearsal, ReplayError
from toto_compat.contract.request import CacheRequest
from toto_compat.model import static_graphs
from toto_compat.model.binding import bind
from toto_compat.model.bound import BoundModel, CompileSpec
from toto_compat.model.series import Series

pytestmark = pytest.mark.cell

RELATIVE = 1e-9  # in double precision
PATCHES = 4


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


@pytest.fixture
def rehearsal() -> Iterator[Rehearsal]:
    rules = Rehearsal()
    with every_graph_goes_to(rules):
        yield rules


def upstream() -> BoundModel:
    return bind(Small().build(), CacheRequest(name="upstream", source="builtin"))


def fixed_size(draws: str = "toto-ts", mode: str | None = "reduce-overhead") -> BoundModel:
    spec = CompileSpec(mode=mode) if mode else None
    request = CacheRequest(name="fixed_size", source="builtin")
    return bind(Small().build(), request, compile_spec=spec, max_patches=16, draws=draws)


def mean(model: BoundModel, series: Series, patches: int = PATCHES) -> list[Tensor]:
    return [model.generate_mean(series, patches * model.patch_size)]


def samples(model: BoundModel, series: Series, patches: int = PATCHES) -> list[Tensor]:
    torch.manual_seed(3)
    return [model.generate_samples(series, patches * model.patch_size, num_samples=4, samples_per_batch=2)]


def forced(model: BoundModel, series: Series, _patches: int = PATCHES) -> list[Tensor]:
    return [value for step in model.teacher_forced(series, series.truth) for value in step.values()]


LOOPS: dict[str, Callable[..., list[Tensor]]] = {
    "mean": mean,
    "samples": samples,
    "teacher-forced": forced,
}


def worst(ours: list[Tensor], theirs: list[Tensor]) -> float:
    assert len(ours) == len(theirs)
    distances = [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(ours, theirs, strict=True)]
    return float("nan") if any(map(math.isnan, distances)) else max(distances)


# One series is one pass, and what it left is read where it lies; several are joined.
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("loop", LOOPS)
def test_fixed_size_forecasts_as_eager_through_replayed_graphs(loop: str, batch: int, rehearsal: Rehearsal) -> None:
    model, eager = fixed_size(), upstream()
    for context in (5, 3, 5):
        series = series_of(context=context, horizon=PATCHES, batch=batch)
        assert worst(LOOPS[loop](model, series), LOOPS[loop](eager, series)) < RELATIVE
    assert sum(graph.calls for graph in rehearsal.graphs) >= 3 * (PATCHES - 1)
    assert rehearsal.poisonings > 0


@pytest.mark.parametrize("batch", [1, 2])
def test_direct_draws_are_the_same_through_replayed_graphs(batch: int, rehearsal: Rehearsal) -> None:
    model, eager = fixed_size("direct"), fixed_size("direct", mode=None)
    for context in (5, 3, 5):
        series = series_of(context=context, horizon=PATCHES, batch=batch)
        assert worst(samples(model, series), samples(eager, series)) < RELATIVE
    assert rehearsal.poisonings > 0


ROWS, AT_ONCE = 384, 128  # what production draws in a batch, and what `base` decodes of it in a turn


@pytest.mark.parametrize("loop", ["samples", "teacher-forced"])
def test_many_rows_in_turns_of_one_graph_are_those_of_eager(
    loop: str, rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn begins where the last one ended: with its outputs poisoned and its keys in the same buffers."""
    of_a_row = 16 * 2 * 2 * 32 * 8  # patches of room; keys and values of two layers over time, 32 wide, in float64
    monkeypatch.setattr(static_graphs, "_MOST_STEP_BYTES", AT_ONCE * of_a_row)
    told: dict[str, Any] = {"max_patches": 16, "batch_sizes": (ROWS,), "draws": "direct"}
    spec, request = CompileSpec(mode="reduce-overhead"), CacheRequest(name="fixed_size", source="builtin")
    compiled, eager = (bind(Small().build(), request, compile_spec=one, **told) for one in (spec, None))
    series = series_of(context=5, horizon=PATCHES, batch=1, variates=1)
    truth = series_of(context=5, horizon=PATCHES, batch=ROWS, variates=1).truth

    def asked(model: BoundModel) -> list[Tensor]:
        if loop == "samples":
            torch.manual_seed(3)
            steps = PATCHES * model.patch_size
            return [model.generate_samples(series, steps, num_samples=ROWS, samples_per_batch=ROWS)]
        return [value for step in model.teacher_forced(series, truth) for value in step.values()]

    assert worst(asked(compiled), asked(eager)) < RELATIVE
    before = max(graph.calls for graph in rehearsal.graphs)
    assert worst(asked(compiled), asked(eager)) < RELATIVE
    assert [shape.batch for shape in compiled._buckets.steps()] == [AT_ONCE]  # type: ignore[attr-defined]
    assert max(graph.calls for graph in rehearsal.graphs) - before == ROWS // AT_ONCE * (PATCHES - 1)
    assert rehearsal.poisonings > 0


@pytest.mark.parametrize("loop", LOOPS)
def test_a_forecast_of_one_patch_is_a_replay_too(loop: str, rehearsal: Rehearsal) -> None:
    """It has no decode step: what production forecasts is a pass over the context, and draws of it."""
    model, eager = fixed_size("direct"), fixed_size("direct", mode=None)
    for context in (5, 3, 5):
        series = series_of(context=context, horizon=1, batch=1)
        assert worst(LOOPS[loop](model, series, 1), LOOPS[loop](eager, series, 1)) < RELATIVE
    assert not model._buckets.steps()  # type: ignore[attr-defined]
    assert rehearsal.graphs and all(graph.calls for graph in rehearsal.graphs)
    assert rehearsal.poisonings > 0


@pytest.mark.parametrize("patches", [1, PATCHES])
def test_under_float16_autocast_a_replay_changes_no_number(patches: int) -> None:
    """Held to the same graphs run as they are: half precision hides little where nothing may differ."""
    told: list[list[Tensor]] = []
    rules = Rehearsal()
    for compiler in (rules, run_as_it_is):
        torch._dynamo.reset()
        with every_graph_goes_to(compiler), torch.autocast("cpu", dtype=torch.float16):
            spec, request = CompileSpec(mode="reduce-overhead"), CacheRequest(name="fixed_size", source="builtin")
            model = bind(Small().build(torch.float32), request, compile_spec=spec, max_patches=16, draws="direct")
            told.append([])
            for context in (5, 3):
                series = series_of(context=context, horizon=patches, dtype=torch.float32)
                told[-1] += [value for loop in LOOPS.values() for value in loop(model, series, patches)]
            assert model.precision is torch.float16  # type: ignore[attr-defined]
    replayed, plain = told
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(replayed, plain, strict=True))
    assert rules.poisonings > 0


def test_a_loop_that_keeps_an_old_output_reads_nan(rehearsal: Rehearsal) -> None:
    model, series = fixed_size(), series_of(horizon=PATCHES)
    honest, theirs = forced(model, series), forced(upstream(), series)
    assert worst(honest, theirs) < RELATIVE
    with mock.patch.object(torch.Tensor, "clone", lambda tensor, **_: tensor):
        kept = forced(model, series)
    assert not worst(kept, theirs) < RELATIVE
    assert rehearsal.poisonings > 0


class Counter(torch.nn.Module):  # type: ignore[misc]
    """A step with one static buffer that it advances."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3))
        torch._dynamo.mark_static_address(self.total)

    def forward(self, x: Tensor) -> Tensor:
        self.total.add_(x)
        return self.total * 2


def compiled(step: Any) -> Callable[..., Any]:
    run = torch.compile(step, mode="reduce-overhead")

    def with_mark(*arguments: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return run(*arguments)

    return with_mark


def test_an_output_lives_until_the_next_step_and_in_the_same_memory(rehearsal: Rehearsal) -> None:
    step = compiled(Counter())
    first = step(torch.ones(3))
    copied, address = first.clone(), first.data_ptr()
    second = step(torch.ones(3))
    assert (copied.tolist(), second.tolist()) == ([2.0] * 3, [4.0] * 3)
    assert second.data_ptr() == address
    assert first.tolist() == second.tolist()  # what was kept is overwritten
    assert [graph.calls for graph in rehearsal.graphs] == [2]


def test_an_output_of_a_graph_that_does_not_run_again_is_poisoned_when_the_next_step_begins(
    rehearsal: Rehearsal,
) -> None:
    double, triple = compiled(lambda x: x * 2), compiled(lambda x: x * 3)
    kept = double(torch.ones(2))
    assert triple(torch.ones(2)).tolist() == [3.0, 3.0]
    assert kept.isnan().all()
    assert rehearsal.poisonings == 1


@pytest.mark.usefixtures("rehearsal")
def test_graphs_of_one_step_may_read_each_others_outputs() -> None:
    double, triple = torch.compile(lambda x: x * 2), torch.compile(lambda x: x * 3)
    torch.compiler.cudagraph_mark_step_begin()
    kept = double(torch.ones(2))
    assert triple(kept).tolist() == [6.0, 6.0]
    assert double(kept).tolist() == [4.0, 4.0]  # once more in the same step: memory of its own
    assert kept.tolist() == [2.0, 2.0]


@pytest.mark.usefixtures("rehearsal")
def test_a_static_input_that_moves_is_named() -> None:
    counter = Counter()
    step = compiled(counter)
    step(torch.ones(3))
    with torch._dynamo.config.patch(error_on_recompile=False):
        counter.total.set_(torch.zeros(3))  # the same tensor, other memory
        with pytest.raises(ReplayError, match="called static and has moved"):
            step(torch.ones(3))


@pytest.mark.usefixtures("rehearsal")
def test_a_written_input_that_is_not_static_is_named() -> None:
    step = compiled(lambda buffer: buffer.add_(1).sum())
    with pytest.raises(Exception, match="writes to inputs that are not static"):
        step(torch.zeros(3))


@pytest.mark.usefixtures("rehearsal")
def test_a_value_read_on_the_host_during_a_step_is_named() -> None:
    step = compiled(lambda x, length: torch.zeros(length.item()).sum() + x)
    with (
        torch._dynamo.config.patch(capture_scalar_outputs=True),
        pytest.raises(ReplayError, match=r"reads a value on the host .*_local_scalar_dense"),
    ):
        step(torch.ones(3), torch.tensor(2))
