"""CUDA graphs: on a GPU, did every decode step replay one? Without a GPU, would Inductor refuse? (No proof, then.)"""

import inspect
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import groupby
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch._dynamo.backends.cudagraphs import find_input_mutations
from torch._inductor import cudagraph_utils
from torch._inductor import utils as inductor_utils
from torch._inductor.compile_fx import compile_fx
from torch._inductor.scheduler import Scheduler

from toto_compat.cell.live import CompilerWatch
from toto_compat.cell.lowering.strays import Stray, stray_tensors
from toto_compat.cell.session import Session
from toto_compat.cell.suites.cudagraph_replays import (
    SYNC_METHOD,
    SeenStep,
    counting_host_syncs,
    replay_figure,
    witnessing,
)
from toto_compat.cell.trial import Trial, blaming_the_candidate
from toto_compat.contract.events import Event, EventKind
from toto_compat.contract.log_line import without_its_source
from toto_compat.contract.result import Failure, Figure, Kind, Outcome, SuiteEvidence
from toto_compat.contract.suites import Group, Suite
from toto_compat.contract.torch_messages import SEVERITIES
from toto_compat.model.bound import BoundModel, observed
from toto_compat.model.series import Series

PREDICTED_METHOD = (
    "Inductor's own checks on every graph of one forecast, without lowering it; its 'cpu device' reason ignored; the "
    "forecast traced on meta tensors as well, where a value on the CPU is a stray one"
)
MEASURED_METHOD = (
    "graphs that Inductor skipped, by its counter, and parts of graphs that it kept out of CUDA graphs, both with the "
    "warm-up; and steps after it (the pass over the context where there is no decode step) that replayed no graph, by "
    "CUPTI and by torch itself; of a mean forecast and of one round of samples"
)
# A graph is recorded on its second call and replayed from the third on.
WARM_UP_FORECASTS = 3


@dataclass
class GraphChecked:
    """Holds what Inductor's checks say about one graph."""

    nodes: int
    reasons: list[str] = field(default_factory=list)  # to run all of it without CUDA graphs
    kept_out: list[str] = field(default_factory=list)  # ops it would be split around: they run outside CUDA graphs
    mutated_inputs: int = 0
    static_inputs: int = 0
    dynamic: bool = False
    partitions: int | None = None  # pieces between ops that cannot be captured; None before torch 2.9


def run_cudagraph(session: Session) -> SuiteEvidence:
    trial = session.trial
    if trial.device == "cuda":
        return measure(trial)
    lowered = session.evidence(Suite.CUDA_LOWERING, Group.CUDA_LOWERING)
    if lowered is not None and (known := lowered.figures.get("graphs_lowered")) and known.value:
        return predicted_by_lowering(lowered)
    if not hasattr(cudagraph_utils, "WrappedFunction"):
        why = f"torch {torch.__version__} is too old to be asked: its checks need the compiled graph, up to torch 2.3"
        lacking = Failure(kind="environment", message=why)
        return SuiteEvidence(suite=Suite.CUDAGRAPH, outcome=Outcome.NOT_RUN, failure=lacking)
    return predict(trial)


# Prediction


def predicted_by_lowering(lowered: SuiteEvidence) -> SuiteEvidence:
    """Take over what was compiled for CUDA in this cell: it says more than checks on graphs for the CPU."""
    return SuiteEvidence(
        suite=Suite.CUDAGRAPH,
        outcome=lowered.outcome,
        method=lowered.method,
        figures={"cudagraphs": lowered.figures["cudagraphs"]},
        events=lowered.events,
        failure=lowered.failure,
        details={"predicted_by": Suite.CUDA_LOWERING.value},
    )


def predict(trial: Trial) -> SuiteEvidence:
    """One forecast through a backend that asks Inductor's checks and then runs the graph as it is."""
    graphs = graphs_of_one_forecast(trial)
    strays, untraceable = stray_tensors(trial)
    reasons = Counter(reason for graph in graphs for reason in graph.reasons)
    kept_out = Counter(reason for graph in graphs for reason in graph.kept_out)
    (kept_out if _has_graph_partition() else reasons).update({f"cpu device ({stray})": 1 for stray in strays or ()})
    return SuiteEvidence(
        suite=Suite.CUDAGRAPH,
        outcome=Outcome.MEASURED,
        method=PREDICTED_METHOD,
        figures={"cudagraphs": _predicted_figure(graphs, strays, untraceable)},
        events=(
            *(_event(EventKind.CUDAGRAPH_SKIP, reason, count) for reason, count in reasons.items()),
            *(_event(EventKind.CUDAGRAPH_PARTITION, reason, count) for reason, count in kept_out.items()),
        ),
        details={
            "graphs": [asdict(graph) for graph in graphs],
            "dynamic_graphs": sum(graph.dynamic for graph in graphs),  # recorded anew for every shape
            "partitions": [graph.partitions for graph in graphs],
            "stray_cpu_tensors": None if strays is None else [str(stray) for stray in strays],
            "meta_trace": untraceable or "traced",
        },
    )


def _predicted_figure(graphs: Sequence[GraphChecked], strays: Sequence[Stray] | None, untraceable: str) -> Figure:
    if not graphs:
        return Figure(value=None, kind=Kind.PREDICTED, missing="no graph reached Inductor: nothing was compiled")
    skipped = sum(bool(graph.reasons) for graph in graphs)
    split = sum(bool(graph.kept_out) and not graph.reasons for graph in graphs)
    if not skipped and not split and strays is None:
        return Figure(
            value=None,
            kind=Kind.PREDICTED,
            missing=f"no reason found on the CPU, but stray CPU tensors cannot be ruled out: {untraceable}; "
            "run this cell on a GPU",
        )
    return Figure(
        value=skipped + split + len(strays or ()),
        kind=Kind.PREDICTED,
        method=f"of {len(graphs)} graphs, {skipped} that Inductor would run without CUDA graphs and {split} that it "
        f"would split around ops outside them; and {len(strays or ())} values left on the CPU",
    )


def graphs_of_one_forecast(trial: Trial) -> list[GraphChecked]:
    """Compile one mean forecast at the smallest context and check every graph it is made of."""
    graphs: list[GraphChecked] = []
    _one_forecast(trial, checking_backend(graphs))
    return graphs


def _one_forecast(trial: Trial, backend: Callable[..., Any]) -> None:
    model = trial.compiled(backend=backend)
    series = _series(trial, model)
    with blaming_the_candidate():
        _forecast(model, series)


def _series(trial: Trial, model: BoundModel) -> Series:
    return trial.series(model.patch_size, trial.workload.context_patches[0], trial.workload.horizon_patches[0])


def _forecast(model: BoundModel, series: Series) -> None:
    model.generate_mean(series, series.truth.shape[-1])


def checking_backend(graphs: list[GraphChecked]) -> Callable[..., Any]:
    """A torch.compile backend: Inductor up to the point where it would lower, then Inductor's questions, then eager."""

    def backend(graph_module: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        with _caches_off():
            return compile_fx(graph_module, example_inputs, inner_compile=inner_compile)

    def inner_compile(graph_module: torch.fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
        graphs.append(check_graph(graph_module, example_inputs, options))
        return _run_as_it_is(graph_module)

    return backend


def _run_as_it_is(graph_module: torch.fx.GraphModule) -> Callable[[list[Any]], Any]:
    def run(arguments: list[Any]) -> Any:
        given = list(arguments)
        arguments.clear()  # the boxed calling convention: the caller gives its references away
        return graph_module.forward(*given)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


@contextmanager
def _caches_off() -> Iterator[None]:
    """A cache hit would skip the hook."""
    off = {"force_disable_caches": True} if hasattr(inductor_config, "force_disable_caches") else {}
    with inductor_config.patch(off), _graph_caches_off():
        yield


@contextmanager
def _graph_caches_off() -> Iterator[None]:
    """Compile every graph, but leave alone what else torch keeps: a measured forecast is to run as it always does."""
    with ExitStack() as undo:
        undo.enter_context(inductor_config.patch({"fx_graph_cache": False}))
        if hasattr(functorch_config, "enable_autograd_cache"):
            undo.enter_context(functorch_config.patch({"enable_autograd_cache": False}))
        yield


def check_graph(
    graph_module: torch.fx.GraphModule, example_inputs: Sequence[Any], options: dict[str, Any]
) -> GraphChecked:
    """Ask what Inductor asks before it captures: mutated inputs, ops that cannot be, dynamic shapes, devices."""
    graph = graph_module.graph
    # up to torch 2.3 this was num_fixed: the first inputs were the static ones
    static = options.get("static_input_idxs")
    static_indices = tuple(static) if static is not None else tuple(range(options.get("num_fixed", 0)))
    mutated = tuple(sorted(find_input_mutations(_without_arithmetic(graph))))
    checked = GraphChecked(
        nodes=len(graph.nodes), mutated_inputs=len(mutated), static_inputs=len(static_indices), dynamic=False
    )
    checked.dynamic = bool(inductor_utils.any_is_symbolic(*example_inputs))
    # up to torch 2.4 these were the nodes themselves
    placeholders = getattr(cudagraph_utils, "get_placeholder_info", None) or cudagraph_utils.get_placeholders
    function = wrapped_function(
        cudagraph_utils, mutated=mutated, static=static_indices, placeholders=placeholders(graph)
    )
    if refused := cudagraph_utils.check_for_mutation(function, list(example_inputs), lambda _tensor: False):
        checked.reasons.append(_plain(refused))
    regions = _with_regions(graph_module)
    if _has_graph_partition():
        checked.partitions = _partitions(graph_module)
        checked.kept_out = [_incompatible(node) for part in regions for node in part.graph.nodes if _split_off(node)]
    if not (_has_graph_partition() and _splits_around_every_op()):
        first_incompatible = [inductor_utils.get_first_incompatible_cudagraph_node(part) for part in regions]
        checked.reasons += [_incompatible(node) for node in first_incompatible if node is not None]
    return checked


def _without_arithmetic(graph: torch.fx.Graph) -> Any:
    """What torch looks for mutations in, but for Python's own arithmetic on symbolic sizes: up to torch 2.4 it asks
    every call for a schema, which that has not."""
    nodes = [
        node
        for node in graph.nodes
        if node.op != "call_function" or node.target is operator.getitem or hasattr(node.target, "_schema")
    ]
    return SimpleNamespace(nodes=nodes)


def _incompatible(node: Any) -> str:
    return f"incompatible op {getattr(node, 'target', node)}"


def _with_regions(graph_module: torch.fx.GraphModule) -> list[torch.fx.GraphModule]:
    """The graph and the regions it calls (nested_compile_region, torch 2.8 and later), each once."""
    return [module for module in graph_module.modules() if isinstance(module, torch.fx.GraphModule)]


def wrapped_function(module: Any, *, mutated: tuple[int, ...], static: tuple[int, ...], placeholders: Any) -> Any:
    """Inductor's record of a function to capture; its fields grew over the releases, those since 2.15 are settings."""
    given = {
        "model": lambda *_: None,
        "static_input_idxs": static,
        "id": module.FunctionID(0),
        "constants": (),
        "placeholders": placeholders,
        "mutated_input_idxs": mutated,
    }
    fields = inspect.signature(module.WrappedFunction).parameters
    settings = {
        name: getattr(inductor_config.triton, name)
        for name, parameter in fields.items()
        if name not in given and parameter.default is inspect.Parameter.empty
    }
    return module.WrappedFunction(**settings, **{name: value for name, value in given.items() if name in fields})


def _has_graph_partition() -> bool:
    return bool(getattr(inductor_config, "graph_partition", False))


def _splits_around_every_op() -> bool:
    """Tell whether graph partition deals with all ops that cannot be captured; in 2.9 most cost the whole graph."""
    return hasattr(inductor_utils, "is_cudagraph_unsafe_fx_node")


def _split_off(node: torch.fx.Node) -> bool:
    """Tell whether graph partition leaves this op outside CUDA graphs; devices apart, which only a GPU's graph has."""
    if node.op != "call_function":
        return False
    if _splits_around_every_op():
        return bool(inductor_utils.is_cudagraph_unsafe_fx_node(node) or node.meta.get("unbacked_bindings"))
    return getattr(torch.Tag, "cudagraph_unsafe", None) in getattr(node.target, "tags", ())


def _partitions(graph_module: torch.fx.GraphModule) -> int:
    """Tell how many pieces are left to capture when Inductor splits the graph around every op that cannot be."""
    calls = [node for node in graph_module.graph.nodes if node.op == "call_function"]
    return sum(captured for captured, _ in groupby(not _split_off(node) for node in calls))


def _plain(message: str) -> str:
    """'skipping cudagraphs due to mutated inputs (2 instances). Found from : ...' without the frame around it."""
    return without_its_source(message.partition("\n")[0].removeprefix("skipping cudagraphs due to "))


def _event(kind: EventKind, reason: str, count: int) -> Event:
    return Event(kind=kind, severity=SEVERITIES[kind], reason=reason, normalised_reason=reason, count=count)


# Measurement


def measure(trial: Trial) -> SuiteEvidence:
    """Warm up until graphs are recorded, look at forecasts step by step, then at where the host waits."""
    samples, batch = trial.workload.samples_per_batch, trial.workload.batch
    steps: list[SeenStep] = []
    sampled_steps: list[SeenStep] = []
    of_mean, of_samples = witnessing(steps), witnessing(sampled_steps)
    with CompilerWatch("warm-up") as watch, counting_kept_out() as kept_out:
        model = trial.compiled(batch_sizes=tuple(dict.fromkeys((batch, batch * max(1, samples)))))
        series = _series(trial, model)
        with blaming_the_candidate():
            for _ in range(WARM_UP_FORECASTS):
                _forecast(model, series)
                _sampled_forecast(model, series, samples)
            after = watch.mark("measured")
            with observed(model, of_mean):
                _forecast(model, series)
            with observed(model, of_samples):
                _sampled_forecast(model, series, samples)
    mean_syncs = _host_syncs(lambda: _forecast(model, series))
    sampled_syncs = _host_syncs(lambda: _sampled_forecast(model, series, samples))
    if trial.mode == "default":
        figures = {"cudagraphs": Figure(value=None, missing="mode default does not use CUDA graphs")}
    else:
        forecasts = (steps, sampled_steps) if samples else (steps,)
        figures = measured_figures(watch.total.cudagraph_skips, kept_out, replay_figure(*forecasts))
    figures["host_syncs"] = Figure(value=len(mean_syncs), method=f"a mean forecast: {SYNC_METHOD}")
    figures["host_syncs_sampled"] = (
        Figure(value=len(sampled_syncs), method=f"a sampled forecast: {SYNC_METHOD}")
        if samples
        else Figure(value=None, missing="nothing is sampled in this workload")
    )
    return SuiteEvidence(
        suite=Suite.CUDAGRAPH,
        outcome=Outcome.MEASURED,
        method=MEASURED_METHOD,
        figures=figures,
        events=tuple(
            event
            for event in watch.total.events
            if event.kind in (EventKind.CUDAGRAPH_SKIP, EventKind.CUDAGRAPH_PARTITION)
        ),
        details={
            "steps": [asdict(step) for step in steps],
            "sampled_steps": [asdict(step) for step in sampled_steps],
            "partitions": kept_out.partitions,
            "skips_after_warm_up": after.cudagraph_skips,
            "host_syncs": dict(Counter(mean_syncs)),
            "host_syncs_sampled": dict(Counter(sampled_syncs)),
        },
    )


def _host_syncs(forecast: Callable[[], None]) -> list[str]:
    found: list[str] = []
    with blaming_the_candidate(), counting_host_syncs(found):
        forecast()
    return found


def _sampled_forecast(model: BoundModel, series: Series, samples: int) -> None:
    """Draw one round of samples: as many as the workload announces together; where it asks for none, nothing."""
    if samples:
        model.generate_samples(series, series.truth.shape[-1], num_samples=samples, samples_per_batch=samples)


@dataclass
class KeptOut:
    """Counts what Inductor leaves out of CUDA graphs without counting a skip: graph partition, on from 2.9."""

    parts: int = 0
    graphs: int = 0
    partitions: list[list[bool]] = field(default_factory=list)  # of every graph: captured or not, piece by piece


def measured_figures(skips: int, kept_out: KeptOut, replay: Figure) -> dict[str, Figure]:
    """The gate's figure and what it is the sum of. `replay`: steps without one, by both witnesses."""
    outside = kept_out.parts + kept_out.graphs
    seen = skips + outside
    if replay.value is not None:
        gate = Figure(value=seen + replay.value, method=MEASURED_METHOD)
    elif seen:
        gate = Figure(value=seen, method=f"{MEASURED_METHOD}; of those nothing is known: {replay.missing}")
    else:
        gate = replay
    return {
        "cudagraphs": gate,
        "cudagraph_skips": Figure(value=skips, method='counters["inductor"]["cudagraph_skips"], warm-up included'),
        "parts_kept_out": Figure(
            value=outside,
            method=f"{kept_out.parts} parts that Inductor's scheduler kept out of CUDA graphs and {kept_out.graphs} "
            "whole graphs, warm-up included",
        ),
        "steps_without_replay": replay,
    }


@contextmanager
def counting_kept_out() -> Iterator[KeptOut]:
    """Count where Inductor decides it: its log leaves some of it out, and a graph from a cache is not decided again."""
    kept_out = KeptOut()
    with ExitStack() as undo:
        undo.enter_context(_graph_caches_off())
        if hasattr(Scheduler, "graph_partition"):
            counting = _counting_parts(Scheduler.graph_partition, kept_out)
            undo.enter_context(mock.patch.object(Scheduler, "graph_partition", counting))
        with suppress(ImportError):  # torch 2.4 and 2.5
            # here, since these releases lack it
            from torch._inductor import output_code

            if hasattr(output_code, "cudagraph_partition_post_compile"):
                counting = _counting_graphs(output_code.cudagraph_partition_post_compile, kept_out)
                undo.enter_context(mock.patch.object(output_code, "cudagraph_partition_post_compile", counting))
        yield kept_out


def _counting_parts(original: Callable[..., Any], kept_out: KeptOut) -> Callable[..., Any]:
    def graph_partition(scheduler: Any) -> Any:
        partitions, signatures = original(scheduler)
        # for a graph compiled without CUDA graphs it is one part, and no news
        if torch._inductor.config.triton.cudagraphs:
            captured = [not signature.skip_cudagraph for signature in signatures]
            kept_out.parts += captured.count(False)
            kept_out.partitions.append(captured)
        return partitions, signatures

    return graph_partition


def _counting_graphs(original: Callable[..., Any], kept_out: KeptOut) -> Callable[..., Any]:
    def post_compile(example_inputs: Any, compiled_graph: Any, *rest: Any, **named: Any) -> None:
        original(example_inputs, compiled_graph, *rest, **named)
        kept_out.graphs += bool(compiled_graph.cudagraph_info.cudagraph_fail_reasons)

    return post_compile
