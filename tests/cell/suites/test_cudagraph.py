"""CUDA graphs: what Inductor would refuse, on graphs made to be refused, and what is made of a GPU's measurements."""

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.backends.cudagraphs import find_input_mutations
from torch._inductor import cudagraph_utils

from tests.cell.small_trials import WORKLOAD, trial_of
from toto_compat.cell.live import CompilerWatch
from toto_compat.cell.lowering.strays import Stray, cpu_finding_backend
from toto_compat.cell.session import Session
from toto_compat.cell.suites import cudagraph
from toto_compat.cell.suites.cudagraph import (
    GraphChecked,
    KeptOut,
    checking_backend,
    counting_kept_out,
    measure,
    measured_figures,
    predict,
    run_cudagraph,
)
from toto_compat.cell.suites.cudagraph_replays import SeenStep
from toto_compat.cell.trial import Trial
from toto_compat.contract.events import EventKind
from toto_compat.contract.request import CellProfile
from toto_compat.contract.result import Figure, Kind, Outcome

pytestmark = pytest.mark.cell


needs_graph_partition = pytest.mark.skipif(
    not hasattr(torch._inductor.utils, "is_cudagraph_unsafe_fx_node"), reason="this torch does not split every graph"
)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def checked(function: object, *arguments: torch.Tensor) -> list[GraphChecked]:
    graphs: list[GraphChecked] = []
    with torch.no_grad():
        torch.compile(function, backend=checking_backend(graphs))(*arguments)
    return graphs


def test_arithmetic_on_symbolic_sizes_is_no_mutation_and_hides_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to torch 2.4 torch asks every call of a graph for its schema, and operator.add has none."""

    def of_2_4(graph: torch.fx.Graph) -> set[int]:
        for node in graph.nodes:
            if node.op == "call_function" and node.target is not operator.getitem:
                _ = node.target._schema
        return set(find_input_mutations(graph))

    monkeypatch.setattr(cudagraph, "find_input_mutations", of_2_4)
    graphs: list[GraphChecked] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        return x.add_(1).sum() * (x.shape[0] * 2 + 1)

    with torch.no_grad():
        torch.compile(step, backend=checking_backend(graphs), dynamic=True)(torch.ones(5, 3))
    assert [(graph.dynamic, graph.mutated_inputs) for graph in graphs] == [(True, 1)]


def test_a_plain_function_gives_no_reason_and_still_computes() -> None:
    graphs: list[GraphChecked] = []
    doubled = torch.compile(lambda x: x * 2 + 1, backend=checking_backend(graphs))(torch.ones(3))
    assert doubled.tolist() == [3.0, 3.0, 3.0]
    assert [graph.reasons for graph in graphs] == [[]]


def test_what_inductor_has_in_its_caches_is_checked_all_the_same() -> None:
    def compute(x: torch.Tensor) -> torch.Tensor:
        return (x * 3).sin() + 1

    with torch.no_grad():
        torch.compile(compute)(torch.ones(5))
    for _ in range(2):
        torch._dynamo.reset()
        assert len(checked(compute, torch.ones(5))) == 1


def test_a_mutated_input_is_a_reason_unless_its_address_is_static() -> None:
    def write(buffer: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        buffer.copy_(value)
        return buffer + 1

    [loose] = checked(write, torch.zeros(4), torch.ones(4))
    assert loose.reasons == ["mutated inputs (1 instances)"]
    torch._dynamo.reset()
    fixed = torch.zeros(4)
    torch._dynamo.mark_static_address(fixed)
    [static] = checked(write, fixed, torch.ones(4))
    assert static.reasons == []
    assert static.mutated_inputs == 1


def test_torch_2_4_is_asked_with_the_nodes_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no `get_placeholder_info` before 2.5: its lack was told as the cache's own error."""
    newer = cudagraph_utils.get_placeholder_info
    monkeypatch.delattr(cudagraph_utils, "get_placeholder_info")
    monkeypatch.setattr(cudagraph_utils, "get_placeholders", newer, raising=False)
    [graph] = checked(lambda buffer: buffer.add_(1), torch.zeros(4))
    assert graph.reasons == ["mutated inputs (1 instances)"]


def test_torch_2_3_is_too_old_to_be_asked_and_no_cache_is_blamed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delattr(cudagraph_utils, "WrappedFunction")
    session = Session(trial_of("fixed_size"), CellProfile(iterations=1), work=tmp_path)
    evidence = run_cudagraph(session)
    assert evidence.outcome is Outcome.NOT_RUN
    assert evidence.failure is not None and "too old" in evidence.failure.message


def read_a_number(x: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
    return torch.zeros(length.item()) + x.sum()


def checked_reading() -> GraphChecked:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        [graph] = checked(read_a_number, torch.ones(3), torch.tensor(2))
    return graph


def partitioned(on: bool) -> Any:
    return torch._inductor.config.patch(graph_partition=on)


def test_reading_a_number_from_the_device_is_a_reason_where_graphs_are_not_split() -> None:
    if hasattr(torch._inductor.config, "graph_partition"):
        with partitioned(False):
            graph = checked_reading()
    else:
        graph = checked_reading()
    assert any("_local_scalar_dense" in reason for reason in graph.reasons), graph
    assert (graph.kept_out, graph.partitions) == ([], None)


@needs_graph_partition
def test_where_graphs_are_split_reading_a_number_is_a_part_outside_and_no_skip() -> None:
    with partitioned(True):
        graph = checked_reading()
    assert graph.reasons == []
    assert graph.kept_out == ["incompatible op aten._local_scalar_dense.default"]
    assert graph.partitions == 1


@needs_graph_partition
def test_where_only_some_graphs_are_split_reading_a_number_costs_the_whole_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in torch 2.9, where production's log had both a skip for this op and parts without a GPU's ops."""
    monkeypatch.setattr(cudagraph, "_splits_around_every_op", lambda: False)
    with partitioned(True):
        graph = checked_reading()
    assert "incompatible op aten._local_scalar_dense.default" in graph.reasons
    assert graph.kept_out == []


@needs_graph_partition
def test_a_split_graph_and_a_stray_tensor_count_and_are_told_as_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = [GraphChecked(nodes=3), GraphChecked(nodes=3, kept_out=["incompatible op x"], partitions=2)]
    monkeypatch.setattr(cudagraph, "graphs_of_one_forecast", lambda _trial: graphs)
    monkeypatch.setattr(cudagraph, "stray_tensors", lambda _trial: ([Stray("arange")], ""))
    with partitioned(True):
        evidence = predict(trial_of("upstream"))
    assert evidence.figures["cudagraphs"].value == 2
    assert {(event.kind, event.reason) for event in evidence.events} == {
        (EventKind.CUDAGRAPH_PARTITION, "incompatible op x"),
        (EventKind.CUDAGRAPH_PARTITION, "cpu device (arange)"),
    }


def test_a_tensor_left_on_the_cpu_is_found_on_meta() -> None:
    found: list[Stray] = []

    def stray(x: torch.Tensor) -> torch.Tensor:
        return x + torch.arange(3).to(x.device)

    torch.compile(stray, backend=cpu_finding_backend(found))(torch.ones(3, device="meta"))
    assert any(one.line and one.line.function == "stray" for one in found)


def test_list_index_is_predicted_to_skip_as_production_s_log_says() -> None:
    evidence = predict(trial_of("list_index"))
    figure = evidence.figures["cudagraphs"]
    assert figure.kind is Kind.PREDICTED
    assert figure.value is not None and figure.value > 0
    assert {event.kind for event in evidence.events} == {EventKind.CUDAGRAPH_SKIP}
    assert any(event.reason == "mutated inputs (2 instances)" for event in evidence.events), evidence.events


def test_fixed_size_gives_inductor_no_reason() -> None:
    evidence = predict(trial_of("fixed_size"))
    assert evidence.figures["cudagraphs"].value == 0, evidence.details
    assert evidence.details["stray_cpu_tensors"] == []


@needs_graph_partition
def test_parts_that_the_scheduler_keeps_out_are_counted() -> None:
    """Without a GPU that is all of a graph."""
    with torch.no_grad(), counting_kept_out() as kept_out:
        torch.compile(lambda x: x + 1, mode="reduce-overhead")(torch.ones(4))
    assert kept_out == KeptOut(parts=1, partitions=[[False]])


@needs_graph_partition
@pytest.mark.parametrize(("wanted", "parts"), [(True, 2), (False, 0)])
def test_parts_count_only_where_cuda_graphs_are_wanted(
    monkeypatch: pytest.MonkeyPatch, wanted: bool, parts: int
) -> None:
    from torch._inductor.scheduler import Scheduler

    signatures = [SimpleNamespace(skip_cudagraph=skip) for skip in (True, False, True)]
    monkeypatch.setattr(Scheduler, "graph_partition", lambda _scheduler: ([[], [], []], signatures))
    with torch._inductor.config.patch({"triton.cudagraphs": wanted}), counting_kept_out() as kept_out:
        assert Scheduler.graph_partition(None)[1] == signatures
    assert kept_out == KeptOut(parts=parts, partitions=[[False, True, False]] if wanted else [])


@needs_graph_partition
@pytest.mark.parametrize(("reasons", "graphs"), [(["non-Tensor inputs"], 1), ([], 0)])
def test_a_graph_left_out_without_a_word_is_counted(reasons: list[str], graphs: int) -> None:
    """Inductor's own function on a graph without partitions: it says and counts nothing."""
    from torch._inductor import output_code
    from torch._inductor.utils import BoxedBool

    graph = SimpleNamespace(
        cudagraph_info=SimpleNamespace(cudagraph_fail_reasons=reasons),
        partition_maps=[],
        current_callable=print,
        fx_kwargs={"is_backward": False},
    )
    wanted = BoxedBool(True)
    with CompilerWatch() as watch, counting_kept_out() as kept_out:
        output_code.cudagraph_partition_post_compile([], graph, wanted, {}, None)
    assert not wanted
    assert (watch.events, watch.total.cudagraph_skips) == ([], 0)
    assert kept_out == KeptOut(graphs=graphs)


def test_a_step_that_is_captured_whole_gives_zero() -> None:
    assert measured_figures(0, KeptOut(), Figure(value=0))["cudagraphs"].value == 0


@pytest.mark.parametrize(
    ("skips", "kept_out", "without_replay", "value"),
    [
        (1, KeptOut(), 0, 1),
        (0, KeptOut(parts=2), 0, 2),
        (0, KeptOut(graphs=1), 0, 1),
        (0, KeptOut(), 1, 1),
        (1, KeptOut(parts=1), 1, 3),
        (1, KeptOut(), None, 1),
    ],
)
def test_whatever_runs_outside_cuda_graphs_counts(
    skips: int, kept_out: KeptOut, without_replay: int | None, value: float
) -> None:
    assert measured_figures(skips, kept_out, Figure(value=without_replay))["cudagraphs"].value == value


def test_what_could_not_be_seen_decides_nothing() -> None:
    figures = measured_figures(0, KeptOut(), Figure(value=None, missing="no decode step ran"))
    assert figures["cudagraphs"].value is figures["steps_without_replay"].value is None
    assert "no decode step" in figures["cudagraphs"].missing


@pytest.fixture
def eager_candidate(monkeypatch: pytest.MonkeyPatch) -> Trial:
    """A trial whose candidate compiles nothing: quick, where the compiler is not the point."""
    monkeypatch.setattr(Trial, "compiled", lambda trial, **_options: trial.eager())
    return replace(trial_of("upstream"), mode="reduce-overhead")


@pytest.fixture
def a_gpu_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both witnesses see one replay in every step, and the host never waits: what they do is tested beside this."""

    def witnessing(steps: list[SeenStep]) -> Any:
        @contextmanager
        def step(index: int) -> Iterator[None]:
            yield
            steps.append(SeenStep(index=index, launches=1, captures=0, replays=1, recordings=0))

        return step

    monkeypatch.setattr(cudagraph, "witnessing", witnessing)
    monkeypatch.setattr(cudagraph, "counting_host_syncs", lambda found: nullcontext(found.append("sampling.py:12")))


@pytest.mark.usefixtures("a_gpu_that_is_none")
@pytest.mark.parametrize("horizon", [1, 2])
def test_a_horizon_of_one_patch_is_judged_by_its_pass(horizon: int, eager_candidate: Trial) -> None:
    workload = WORKLOAD.model_copy(update={"horizon": (32 * horizon,)})
    evidence = measure(replace(eager_candidate, workload=workload))
    assert len(evidence.details["steps"]) == horizon
    assert evidence.figures["cudagraphs"].value == 0


@pytest.mark.usefixtures("a_gpu_that_is_none")
def test_sampled_forecasts_are_watched_as_the_mean_is_and_announced(
    eager_candidate: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are what production asks for: graphs of many rows, and draws between the steps."""
    announced: list[tuple[int, ...]] = []
    watched: list[bool] = []

    def compiled(trial: Trial, *, batch_sizes: tuple[int, ...] = ()) -> Any:
        announced.append(batch_sizes)
        model = trial.eager()
        draw = model.generate_samples

        def generate_samples(*arguments: Any, **named: Any) -> Any:
            watched.append(model.observer is not None)
            return draw(*arguments, **named)

        monkeypatch.setattr(model, "generate_samples", generate_samples)
        return model

    monkeypatch.setattr(Trial, "compiled", compiled)
    evidence = measure(eager_candidate)
    assert announced == [(1, 4)]
    # while graphs are recorded, under both witnesses, and where syncs are counted
    assert watched == [False] * cudagraph.WARM_UP_FORECASTS + [True, False]
    assert [step["index"] for step in evidence.details["sampled_steps"]] == [0, 1, 2, 3]
    assert "of 6 decode steps" in evidence.figures["steps_without_replay"].method


@pytest.mark.usefixtures("a_gpu_that_is_none")
def test_a_sampled_step_that_replays_nothing_counts(eager_candidate: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [SeenStep(index=1, launches=1, captures=0, replays=1, recordings=0)]
    eager = SeenStep(index=1, launches=0, captures=0, replays=0, recordings=0)
    left = iter([seen, [*seen, eager]])

    def witnessing(steps: list[SeenStep]) -> Any:
        steps += next(left)
        return lambda _index: nullcontext()

    monkeypatch.setattr(cudagraph, "witnessing", witnessing)
    assert measure(eager_candidate).figures["cudagraphs"].value == 1


@pytest.mark.usefixtures("a_gpu_that_is_none")
def test_where_nothing_is_sampled_no_wait_is_counted(eager_candidate: Trial) -> None:
    workload = WORKLOAD.model_copy(update={"sampling": ()})
    evidence = measure(replace(eager_candidate, workload=workload))
    assert evidence.figures["host_syncs_sampled"].value is None
    assert evidence.details["sampled_steps"] == []


@pytest.mark.usefixtures("a_gpu_that_is_none")
def test_where_the_host_waits_is_counted_and_named_in_every_mode(eager_candidate: Trial) -> None:
    evidence = measure(replace(eager_candidate, mode="default"))
    assert evidence.figures["host_syncs"].value == evidence.figures["host_syncs_sampled"].value == 1
    assert evidence.details["host_syncs"] == {"sampling.py:12": 1}
    assert "mode default" in evidence.figures["cudagraphs"].missing


@pytest.mark.usefixtures("a_gpu_that_is_none")
def test_what_is_measured_finds_the_autotuning_of_the_other_suites(
    eager_candidate: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only graphs are compiled anew: with all caches off other kernels would be chosen than those that are timed."""
    seen: list[tuple[bool, bool]] = []
    config = torch._inductor.config

    def forecast(*_arguments: object) -> None:
        seen.append((config.force_disable_caches, config.fx_graph_cache))

    monkeypatch.setattr(cudagraph, "_forecast", forecast)
    monkeypatch.setattr(cudagraph, "_sampled_forecast", forecast)
    kept = config.force_disable_caches
    measure(eager_candidate)
    warm_up_and_measured = 2 * (cudagraph.WARM_UP_FORECASTS + 1)  # of the mean and of samples
    assert seen[:warm_up_and_measured] == [(kept, False)] * warm_up_and_measured


@pytest.mark.parametrize("run", [predict, measure])
def test_a_series_that_cannot_be_made_is_not_held_against_the_cache(
    run: Callable[[Trial], object], monkeypatch: pytest.MonkeyPatch, eager_candidate: Trial
) -> None:
    def no_series(*_arguments: object, **_options: object) -> None:
        raise ValueError("too short")

    monkeypatch.setattr(Trial, "series", no_series)
    with pytest.raises(ValueError, match="too short"):
        run(eager_candidate)
