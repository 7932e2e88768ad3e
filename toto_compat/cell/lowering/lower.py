"""One graph compiled for a described GPU by Inductor: what CUDA graphs would take of it, its kernels, its calls."""

import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch._inductor.config as inductor_config
from torch._guards import TracingContext
from torch._inductor import compile_fx as inductor
from torch._inductor import cudagraph_utils
from torch._inductor import scheduler as inductor_scheduler
from torch._inductor.scheduler import Scheduler

from toto_compat.cell.lowering.capture import CapturedGraph
from toto_compat.cell.lowering.described_gpu import DescribedGpu, described
from toto_compat.cell.lowering.kernels import AssembledKernel, keeping_kernels
from toto_compat.cell.lowering.retarget import RetargetedGraph, retargeted
from toto_compat.cell.lowering.source_lines import SourceLine, line_in, line_of
from toto_compat.cell.suites.cudagraph import wrapped_function
from toto_compat.cell.trial import telling_line
from toto_compat.contract.log_line import without_its_source

# What cannot be had without a device, or would hide what is looked for.
_SETTINGS: dict[str, Any] = {
    "triton.cudagraphs": True,  # in every mode: what they would take of it is the question
    "compile_threads": 1,
    "force_disable_caches": True,
    "joint_graph_constant_folding": False,  # makes real tensors on the device
    "use_static_cuda_launcher": False,  # keeps no binaries
    "use_static_triton_launcher": False,  # its name in newer releases
    # choose by timing on the device
    "max_autotune": False,
    "max_autotune_gemm": False,
    "max_autotune_pointwise": False,
    "coordinate_descent_tuning": False,
    "benchmark_combo_kernel": False,
}
_LIBRARY_CALL = re.compile(r"\b(extern_kernels\.\w+|torch\.ops\.\w+\.\w+\.\w+)\(")


@dataclass(frozen=True)
class Objection:
    """Why something stays out of CUDA graphs, in torch's words, and the line behind it."""

    reason: str
    line: SourceLine | None = None


@dataclass(frozen=True)
class Partition:
    """One piece of a graph, between operations that cannot be captured."""

    nodes: int
    captured: bool
    objections: tuple[Objection, ...] = ()


@dataclass
class LoweredGraph:
    """What Inductor made of one graph for one architecture."""

    number: int
    architecture: str
    nodes: int
    partitions: list[Partition] = field(default_factory=list)
    skipped: list[Objection] = field(default_factory=list)  # reasons to run all of it without CUDA graphs
    kernels: list[AssembledKernel] = field(default_factory=list)
    library_calls: dict[str, int] = field(default_factory=dict)
    left_on_cpu: tuple[str, ...] = ()
    seconds: float = 0.0
    error: str = ""  # what torch said where it could not
    made_for: str = ""  # as the cache calls it, such as 'decode step for batch 1, variates 1, capacity 16'

    @property
    def objections(self) -> list[Objection]:
        """Why CUDA graphs would not take all of it."""
        return [*self.skipped, *(one for part in self.partitions for one in part.objections)]

    @property
    def captured_whole(self) -> bool:
        return not self.error and not self.skipped and [part.captured for part in self.partitions] in ([], [True])


@dataclass(frozen=True)
class Lowered:
    """The report, and the code itself with the graph it was made from; None where torch raised."""

    report: LoweredGraph
    source: str = ""
    graph: RetargetedGraph | None = None


def lower(
    graph: CapturedGraph, gpu: DescribedGpu, *, strays: Collection[SourceLine] = (), assemble: bool = True
) -> Lowered:
    """Compile a captured graph for a GPU that is not there. `assemble`: its kernels too, down to machine code."""
    report = LoweredGraph(graph.number, gpu.architecture, nodes=len(graph.module.graph.nodes))
    start = time.perf_counter()
    source, moved = "", None
    try:
        with described(gpu), keeping_kernels(assemble=assemble) as kernels, partitions_seen(report.partitions):
            moved = retargeted(graph, strays)
            report.left_on_cpu = moved.left_on_cpu
            report.skipped += mutation_objections(moved)
            compiled = _compiled(graph, moved)
            source = str(getattr(compiled, "source_code", ""))
            report.skipped += _refusals(compiled)
        report.kernels = kernels.assembled()
        report.library_calls = dict(Counter(_LIBRARY_CALL.findall(source)))
    except Exception as error:  # what torch says where a release or an operation cannot do it is the answer
        report.error = telling_line(error)[:500]
        line = line_in(str(error))
        if line is not None:
            report.error += f" ({line})"
    report.seconds = round(time.perf_counter() - start, 3)
    return Lowered(report, source, moved)


def _compiled(graph: CapturedGraph, moved: RetargetedGraph) -> Any:
    options = {**graph.options, "static_input_idxs": list(moved.static_inputs), "cudagraphs": inductor.BoxedBool(True)}
    with inductor_config.patch(known_settings(_SETTINGS)), _trace_left_alone():
        return inductor.compile_fx_inner(moved.module, list(moved.inputs), **options)


@contextmanager
def _trace_left_alone() -> Iterator[None]:
    """Keep what Inductor notes down for dynamo's trace of the real run, which takes one compilation of a graph."""
    trace = TracingContext.try_get()
    if trace is None or trace.output_strides is None:
        yield
        return
    with mock.patch.object(trace, "output_strides", []):
        yield


def known_settings(wanted: dict[str, Any]) -> dict[str, Any]:
    """Leave out what this release does not have."""

    def has(name: str) -> bool:
        owner: Any = inductor_config
        for part in name.split("."):
            if not hasattr(owner, part):
                return False
            owner = getattr(owner, part)
        return True

    return {name: value for name, value in wanted.items() if has(name)}


def mutation_objections(moved: RetargetedGraph) -> list[Objection]:
    """Ask Inductor's own check, which it makes when it records: inputs that are written and may move."""
    graph = moved.module.graph
    function = wrapped_function(
        cudagraph_utils,
        mutated=tuple(sorted(inductor_mutations(graph))),
        static=moved.static_inputs,
        placeholders=cudagraph_utils.get_placeholder_info(graph),
    )
    refused = cudagraph_utils.check_for_mutation(function, list(moved.inputs), lambda _tensor: False)
    return [_objection(refused)] if refused else []


def inductor_mutations(graph: torch.fx.Graph) -> set[int]:
    # here, for it imports half of dynamo's backends
    from torch._dynamo.backends.cudagraphs import find_input_mutations

    return set(find_input_mutations(graph))


def _refusals(compiled: Any) -> list[Objection]:
    """Return why Inductor runs the whole graph without CUDA graphs, as it kept it with the compiled graph."""
    told = [
        getattr(compiled, "disabled_cudagraphs_reason", None),
        *getattr(getattr(compiled, "cudagraph_info", None), "cudagraph_fail_reasons", ()),
    ]
    return [_objection(str(reason)) for reason in dict.fromkeys(filter(None, told))]


def _objection(message: str) -> Objection:
    reason = without_its_source(message.partition("\n")[0])
    for frame in ("skipping cudagraphs due to ", "disabling cudagraphs due to "):
        reason = reason.removeprefix(frame)
    return Objection(reason, line_in(message))


# Partitions


@contextmanager
def partitions_seen(seen: list[Partition]) -> Iterator[None]:
    """Look on where Inductor's scheduler splits a graph (torch 2.9 and later): before it makes any kernel."""
    with ExitStack() as undo:
        original = getattr(Scheduler, "graph_partition", None)
        if original is not None:

            def graph_partition(scheduler: Any) -> Any:
                partitions, signatures = original(scheduler)
                seen.extend(_partitions(scheduler, partitions, signatures))
                return partitions, signatures

            undo.enter_context(mock.patch.object(Scheduler, "graph_partition", graph_partition))
        yield


def _partitions(scheduler: Any, partitions: Sequence[Any], signatures: Sequence[Any]) -> list[Partition]:
    return [
        Partition(
            nodes=len(nodes),
            captured=not signature.skip_cudagraph,
            objections=_objections_to(scheduler, nodes) if signature.skip_cudagraph else (),
        )
        for nodes, signature in zip(partitions, signatures, strict=True)
    ]


def _objections_to(scheduler: Any, nodes: Sequence[Any]) -> tuple[Objection, ...]:
    found = [_objection_to(scheduler, one) for node in nodes for one in node.get_nodes()]
    return tuple(dict.fromkeys(one for one in found if one is not None))


def _objection_to(scheduler: Any, node: Any) -> Objection | None:
    """Ask the scheduler again about one node: newer releases return the reason, 2.9 logs it."""
    logged: list[str] = []

    def log(message: str, node: Any) -> None:  # noqa: ARG001 - torch's signature, by name
        logged.append(message)

    with ExitStack() as undo:
        logs = hasattr(inductor_scheduler, "maybe_log_cudagraph_partition")
        if logs:
            undo.enter_context(mock.patch.object(inductor_scheduler, "maybe_log_cudagraph_partition", log))
        ask: Callable[..., Any] = scheduler.should_partition
        answer = ask(node, should_log=True) if logs else ask(node)
    if not answer:
        return None
    reason = answer if isinstance(answer, str) else "; ".join(logged) or "kept out"
    origin = _origin(node)
    operation = f" ({origin.target})" if origin is not None else ""
    return Objection(f"{reason}{operation}", line_of(origin) if origin is not None else None)


def _origin(node: Any) -> torch.fx.Node | None:
    """The node of the graph that a scheduler's node was made from; the last of several."""
    inner = node.node
    if inner is None:
        return None
    origin = inner.get_origin_node() if hasattr(inner, "get_origin_node") else None
    if origin is not None:
        return origin
    origins = [one for one in getattr(inner, "origins", ()) if line_of(one)]
    return origins[-1] if origins else None
