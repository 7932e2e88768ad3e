"""CUDA graphs: on a GPU, did every decode step replay one? Without a GPU, would Inductor refuse? (No proof, then.)"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from toto_compat.evidence.schema import Figure, Kind, Outcome, SuiteEvidence
from toto_compat.matrix.schema import Gate, Suite
from toto_compat.model.bound import observed
from toto_compat.observe.events import Event, EventKind, Severity
from toto_compat.observe.live import CompilerWatch
from toto_compat.suites.trial import Trial, blaming_the_candidate, telling_line

PREDICTED_METHOD = (
    "Inductor's own checks on every graph of one forecast, without lowering it; its 'cpu device' reason ignored; the "
    "forecast traced on meta tensors as well, where a value on the CPU is a stray one"
)
MEASURED_METHOD = "cudagraph skips by Inductor's counter after warm-up, and decode steps without a cudaGraphLaunch"
# A graph is recorded on its second call and replayed from the third on.
WARM_UP_FORECASTS = 3


@dataclass
class GraphChecked:
    """What Inductor's checks say about one graph."""

    nodes: int
    reasons: list[str] = field(default_factory=list)
    mutated_inputs: int = 0
    static_inputs: int = 0
    dynamic: bool = False
    partitions: int | None = None  # pieces between ops that cannot be captured; None before torch 2.9


def run_cudagraph(trial: Trial) -> SuiteEvidence:
    return measure(trial) if trial.device == "cuda" else predict(trial)


# Prediction


def predict(trial: Trial) -> SuiteEvidence:
    """One forecast through a backend that asks Inductor's checks and then runs the graph as it is."""
    with blaming_the_candidate():
        graphs = graphs_of_one_forecast(trial)
    strays, untraceable = stray_tensors(trial)
    reasons = Counter(reason for graph in graphs for reason in graph.reasons)
    reasons.update({f"cpu device ({name})": 1 for name in strays or ()})
    return SuiteEvidence(
        suite=Suite.CUDAGRAPH,
        outcome=Outcome.MEASURED,
        method=PREDICTED_METHOD,
        figures={Gate.CUDAGRAPHS.value: _predicted_figure(graphs, reasons, strays, untraceable)},
        events=tuple(_skip_event(reason, count) for reason, count in reasons.items()),
        details={
            "graphs": [asdict(graph) for graph in graphs],
            "dynamic_graphs": sum(graph.dynamic for graph in graphs),  # recorded anew for every shape
            "partitions": [graph.partitions for graph in graphs],
            "stray_cpu_tensors": strays,
            "meta_trace": untraceable or "traced",
        },
    )


def _predicted_figure(
    graphs: Sequence[GraphChecked], reasons: Counter[str], strays: list[str] | None, untraceable: str
) -> Figure:
    if not graphs:
        return Figure(value=None, kind=Kind.PREDICTED, missing="no graph reached Inductor: nothing was compiled")
    if not reasons and strays is None:
        return Figure(
            value=None,
            kind=Kind.PREDICTED,
            missing=f"no reason found on the CPU, but stray CPU tensors cannot be ruled out: {untraceable}; "
            "run this cell on a GPU",
        )
    return Figure(
        value=sum(bool(graph.reasons) for graph in graphs) + len(strays or ()),
        kind=Kind.PREDICTED,
        method=f"of {len(graphs)} graphs, those that Inductor would run without CUDA graphs",
    )


def graphs_of_one_forecast(trial: Trial) -> list[GraphChecked]:
    """Compile one mean forecast at the smallest context and check every graph it is made of."""
    graphs: list[GraphChecked] = []
    _one_forecast(trial, checking_backend(graphs))
    return graphs


def _one_forecast(trial: Trial, backend: Callable[..., Any]) -> None:
    model = trial.compiled(backend=backend)
    horizon = trial.workload.horizon_patches[0]
    series = trial.series(model.patch_size, trial.workload.context_patches[0], horizon)
    model.generate_mean(series, horizon * model.patch_size)


def stray_tensors(trial: Trial) -> tuple[list[str] | None, str]:
    """Names of values that stay on the CPU when everything given is elsewhere; or None and why it cannot be traced."""
    found: list[str] = []
    torch._dynamo.reset()
    try:
        with _meta_tensors_are_true():
            _one_forecast(replace(trial, device="meta"), cpu_finding_backend(found))
    except Exception as error:  # a step that reads values cannot run on meta at all: that is an answer, not a fault
        return None, f"the forecast cannot be traced on meta ({telling_line(getattr(error, 'cause', error))[:200]})"
    finally:
        torch._dynamo.reset()
    return found, ""


@contextmanager
def _meta_tensors_are_true() -> Iterator[None]:
    """toto-ts asserts on tensors outside the compiled step; without values every assertion holds."""
    original = torch.Tensor.__bool__
    torch.Tensor.__bool__ = lambda tensor: tensor.is_meta or original(tensor)
    try:
        yield
    finally:
        torch.Tensor.__bool__ = original


def cpu_finding_backend(found: list[str]) -> Callable[..., Any]:
    """AOTAutograd alone: Inductor's own passes throw away what is computed on meta, and then trip over it."""
    from torch._dynamo.backends.common import aot_autograd

    def compiler(graph_module: torch.fx.GraphModule, _inputs: Sequence[Any]) -> Any:
        found.extend(_values_on_cpu(graph_module))
        return _run_as_it_is(graph_module)

    backend: Callable[..., Any] = aot_autograd(fw_compiler=compiler)
    return backend


def checking_backend(graphs: list[GraphChecked]) -> Callable[..., Any]:
    """A torch.compile backend: Inductor up to the point where it would lower, then Inductor's questions, then eager."""

    def backend(graph_module: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        from torch._inductor.compile_fx import compile_fx

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
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config

    off: dict[str, Any] = {"fx_graph_cache": False}
    if hasattr(inductor_config, "force_disable_caches"):
        off["force_disable_caches"] = True
    with inductor_config.patch(off):
        if hasattr(functorch_config, "enable_autograd_cache"):
            with functorch_config.patch({"enable_autograd_cache": False}):
                yield
        else:
            yield


def check_graph(
    graph_module: torch.fx.GraphModule, example_inputs: Sequence[Any], options: dict[str, Any]
) -> GraphChecked:
    """Ask what Inductor asks before it captures: mutated inputs, ops that cannot be, dynamic shapes, devices."""
    from torch._dynamo.backends.cudagraphs import find_input_mutations
    from torch._inductor import cudagraph_utils
    from torch._inductor.utils import any_is_symbolic, get_first_incompatible_cudagraph_node

    graph = graph_module.graph
    # up to torch 2.3 this was num_fixed: the first inputs were the static ones
    static = options.get("static_input_idxs")
    static_indices = tuple(static) if static is not None else tuple(range(options.get("num_fixed", 0)))
    mutated = tuple(sorted(find_input_mutations(graph)))
    checked = GraphChecked(
        nodes=len(graph.nodes), mutated_inputs=len(mutated), static_inputs=len(static_indices), dynamic=False
    )
    checked.dynamic = bool(any_is_symbolic(*example_inputs))
    function = _wrapped_function(
        cudagraph_utils,
        mutated=mutated,
        static=static_indices,
        placeholders=cudagraph_utils.get_placeholder_info(graph),
    )
    if refused := cudagraph_utils.check_for_mutation(function, list(example_inputs), lambda _tensor: False):
        checked.reasons.append(_plain(refused))
    if _has_graph_partition():
        checked.partitions = _partitions(graph_module)
    for part in _with_regions(graph_module):
        incompatible = get_first_incompatible_cudagraph_node(part)
        if incompatible is not None:
            checked.reasons.append(f"incompatible op {getattr(incompatible, 'target', incompatible)}")
    return checked


def _with_regions(graph_module: torch.fx.GraphModule) -> list[torch.fx.GraphModule]:
    """The graph and the regions it calls (nested_compile_region, torch 2.8 and later), each once."""
    return [module for module in graph_module.modules() if isinstance(module, torch.fx.GraphModule)]


def _wrapped_function(module: Any, *, mutated: tuple[int, ...], static: tuple[int, ...], placeholders: Any) -> Any:
    """Inductor's record of a function to capture; its fields grew over the releases, those since 2.15 are settings."""
    import torch._inductor.config as inductor_config

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
    import torch._inductor.config as inductor_config

    return bool(getattr(inductor_config, "graph_partition", False))


def _partitions(graph_module: torch.fx.GraphModule) -> int:
    """How many pieces are left to capture when Inductor splits the graph around every op that cannot be."""
    from torch._inductor.utils import get_first_incompatible_cudagraph_node

    pieces, in_piece = 0, False
    for node in graph_module.graph.nodes:
        if node.op != "call_function":
            continue
        capturable = get_first_incompatible_cudagraph_node(_OneNode(node)) is None
        if capturable and not in_piece:
            pieces += 1
        in_piece = capturable
    return pieces


class _OneNode:
    """A graph module of a single node, as far as Inductor's check looks at one."""

    def __init__(self, node: torch.fx.Node) -> None:
        self.graph = self
        self.nodes = [node]


def _values_on_cpu(graph_module: torch.fx.GraphModule) -> list[str]:
    """Names of the values on the CPU that something uses."""
    return [
        node.name
        for part in _with_regions(graph_module)
        for node in part.graph.nodes
        if isinstance(value := node.meta.get("val"), torch.Tensor) and value.device.type == "cpu" and node.users
    ]


def _plain(message: str) -> str:
    """'skipping cudagraphs due to mutated inputs (2 instances). Found from : ...' without the frame around it."""
    return message.partition("\n")[0].removeprefix("skipping cudagraphs due to ").partition(". Found from")[0].strip()


def _skip_event(reason: str, count: int) -> Event:
    return Event(
        kind=EventKind.CUDAGRAPH_SKIP, severity=Severity.WARNING, reason=reason, normalised_reason=reason, count=count
    )


# Measurement


def measure(trial: Trial) -> SuiteEvidence:
    """Warm up until graphs are recorded, then profile one forecast step by step."""
    if trial.mode == "default":
        figure = Figure(value=None, missing="mode default does not use CUDA graphs")
        return SuiteEvidence(
            suite=Suite.CUDAGRAPH,
            outcome=Outcome.MEASURED,
            method=MEASURED_METHOD,
            figures={Gate.CUDAGRAPHS.value: figure},
        )
    launches: list[int] = []
    with CompilerWatch("warm-up") as watch, blaming_the_candidate():
        model = trial.compiled()
        horizon = trial.workload.horizon_patches[0]
        series = trial.series(model.patch_size, trial.workload.context_patches[0], horizon)
        for _ in range(WARM_UP_FORECASTS):
            model.generate_mean(series, horizon * model.patch_size)
        after = watch.mark("measured")
        with observed(model, counting_launches(launches)):
            model.generate_mean(series, horizon * model.patch_size)
    decode = launches[1:]
    without_replay = sum(count == 0 for count in decode)
    skips = watch.total.cudagraph_skips
    return SuiteEvidence(
        suite=Suite.CUDAGRAPH,
        outcome=Outcome.MEASURED,
        method=MEASURED_METHOD,
        figures={
            Gate.CUDAGRAPHS.value: Figure(value=skips + without_replay, method=MEASURED_METHOD),
            "cudagraph_skips": Figure(value=skips, method='counters["inductor"]["cudagraph_skips"], warm-up included'),
            "steps_without_replay": Figure(value=without_replay, method=f"of {len(decode)} decode steps after warm-up"),
        },
        events=tuple(
            event
            for event in watch.total.events
            if event.kind in (EventKind.CUDAGRAPH_SKIP, EventKind.CUDAGRAPH_PARTITION)
        ),
        details={"launches_per_step": launches, "skips_after_warm_up": after.cudagraph_skips},
    )


def counting_launches(launches: list[int]) -> Callable[[int], Any]:
    """An observer that profiles each step and counts the CUDA graphs it launched."""

    @contextmanager
    def step(_index: int) -> Iterator[None]:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            yield
            torch.cuda.synchronize()
        launches.append(sum(event.name == "cudaGraphLaunch" for event in profiler.events()))

    return step
