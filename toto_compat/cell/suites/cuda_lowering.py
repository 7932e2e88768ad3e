"""The cache's graphs compiled for described GPUs, in a CUDA build of torch and with no GPU at all.

The model really runs, on the CPU; every graph that it gives to Inductor is moved to CUDA, lowered and assembled for
each architecture. What comes out is a prediction: it names what CUDA graphs would take, in Inductor's own words, and
never proves that a capture happened.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

from toto_compat.cell.live import noting_graph_breaks
from toto_compat.cell.lowering.capture import BoxedRun, CapturedGraph, every_graph_goes_to, run_as_it_is
from toto_compat.cell.lowering.described_gpu import CARDS, why_not_here
from toto_compat.cell.lowering.lower import LoweredGraph, Objection, lower
from toto_compat.cell.lowering.source_lines import line_in
from toto_compat.cell.lowering.strays import Stray, stray_tensors
from toto_compat.cell.session import Session
from toto_compat.cell.trial import CandidateError, Trial, blaming_the_candidate, telling_line
from toto_compat.contract.bucket_messages import BUCKET_LOGGER
from toto_compat.contract.events import Event, EventKind
from toto_compat.contract.result import Failure, Figure, Kind, Outcome, SuiteEvidence
from toto_compat.contract.suites import Suite
from toto_compat.contract.torch_messages import SEVERITIES
from toto_compat.model.sampling import TOTO_TS

METHOD = (
    "every graph of a mean and of a sampled forecast on the CPU, moved to CUDA and compiled by Inductor for described "
    "GPUs, kernels assembled; CUDA graphs asked for in every mode, what max-autotune would choose by timing left at "
    "its default; a value counts as left on the CPU where the forecast traced on meta leaves one there"
)
OF_AUTOCAST = "; the operations that autocast lowers are those of a CPU's list, as captured: CUDA's differs in some"
_DECODE_PATCHES = 2  # the first pass and one decode step: all that follows runs the same graphs
_HEAVIEST = 5  # kernels told by name, of those that take the most registers


def run_cuda_lowering(session: Session) -> SuiteEvidence:
    """Lower every graph of the cache for every architecture of the profile."""
    asked = session.profile.architectures
    architectures = [name for name in asked if name in CARDS]
    undescribed = f"no GPU of {', '.join(one for one in asked if one not in CARDS)} is described here"
    if why := why_not_here() or ("" if architectures else f"{undescribed}, only of {', '.join(CARDS)}"):
        lacking = Failure(kind="environment", message=why)
        return SuiteEvidence(suite=Suite.CUDA_LOWERING, outcome=Outcome.NOT_RUN, failure=lacking)
    trial = as_asked(session)
    strays, untraceable = stray_tensors(trial)
    lines = {stray.line for stray in strays or () if stray.line is not None}
    reports: list[LoweredGraph] = []

    def compiler(graph: CapturedGraph) -> BoxedRun:
        lowered = [lower(graph, CARDS[name], strays=lines).report for name in architectures]
        reports.extend(replace(report, made_for=buckets[-1]) for report in lowered)
        return run_as_it_is(graph)

    failure: Failure | None = None
    try:
        with buckets_named() as buckets, every_graph_goes_to(compiler), noting_graph_breaks() as breaks:
            forecast_both_ways(trial, upstream_draws=not session.no_samples)
    except CandidateError as error:
        failure = failure_with_its_line(error.cause)
    method = METHOD + (OF_AUTOCAST if trial.workload.autocast else "")
    if len(architectures) < len(asked):
        method += f"; {undescribed}"
    evidence = lowering_evidence(reports, architectures, strays, untraceable, failure, breaks=breaks)
    return evidence.model_copy(update={"method": method})


def as_asked(session: Session) -> Trial:
    """Return the trial with the request's own samples: nothing is compared here, so upstream need not draw them."""
    workload = session.trial.workload
    sampling = session.asked_sampling or workload.sampling
    return replace(session.trial, device="cpu", workload=workload.model_copy(update={"sampling": sampling}))


@contextmanager
def buckets_named() -> Iterator[list[str]]:
    """Listen to a cache that says what it compiles a graph for; the last is that of now, '' of one that does not."""
    told = [""]

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            what, _, _ = record.getMessage().removeprefix("compiling ").partition(" (")
            told.append(what)

    logger, listener = logging.getLogger(BUCKET_LOGGER), Listener()
    before = logger.level
    logger.addHandler(listener)
    logger.setLevel(logging.INFO)
    try:
        yield told
    finally:
        logger.setLevel(before)
        logger.removeHandler(listener)


def forecast_both_ways(trial: Trial, *, upstream_draws: bool = True) -> None:
    """Ask for all graphs of a short forecast, of the mean and of one round of samples.

    A cache that draws as toto-ts does is not asked for samples where that cannot draw on a CPU; on a GPU it can.
    """
    workload = trial.workload
    samples = workload.samples_per_batch
    rows = tuple(dict.fromkeys((workload.batch, workload.batch * samples)))
    model = trial.compiled(batch_sizes=rows)
    series = trial.series(model.patch_size, workload.context_patches[0], _DECODE_PATCHES)
    steps = _DECODE_PATCHES * model.patch_size
    with blaming_the_candidate():
        model.generate_mean(series, steps)
        if upstream_draws or model.draws != TOTO_TS:
            model.generate_samples(series, steps, num_samples=samples, samples_per_batch=samples)


def failure_with_its_line(error: BaseException) -> Failure:
    """What torch said, and the line of Python that it points to."""
    line = line_in(str(error))
    return Failure(kind="exception", message=telling_line(error) + (f" ({line})" if line else ""))


def lowering_evidence(
    reports: Sequence[LoweredGraph],
    architectures: Sequence[str],
    strays: Sequence[Stray] | None,
    untraceable: str,
    failure: Failure | None = None,
    *,
    breaks: Sequence[Event] = (),
) -> SuiteEvidence:
    """Put the graphs' reports together; the worst architecture gives each figure."""
    by_architecture = {name: [one for one in reports if one.architecture == name] for name in architectures}
    return SuiteEvidence(
        suite=Suite.CUDA_LOWERING,
        outcome=Outcome.MODEL_FAILED if failure is not None else Outcome.MEASURED,
        failure=failure,
        method=METHOD,
        figures=_figures(by_architecture, strays, untraceable),
        events=tuple(_events(by_architecture, strays or ())),
        details={
            "architectures": [_summary(name, graphs) for name, graphs in by_architecture.items()],
            "graphs": [_graph_details(report) for report in reports],
            "stray_cpu_tensors": None if strays is None else [str(one) for one in strays],
            "meta_trace": untraceable or "traced",
            # between graphs that CUDA graphs may well take whole, the host may read what the last one computed
            "graph_breaks": dict(Counter(map(_told_break, breaks))),
        },
    )


def _told_break(event: Event) -> str:
    reason, *_ = event.reason.splitlines() or [""]
    return f"{reason.rstrip('.')} ({event.file}:{event.line} in {event.function})"


def _figures(
    by_architecture: dict[str, list[LoweredGraph]], strays: Sequence[Stray] | None, untraceable: str
) -> dict[str, Figure]:
    every = [one for found in by_architecture.values() for one in found]
    errors = Counter(one.error for one in every if one.error)
    graphs = _most(by_architecture, lambda _: True)
    refused = _most(by_architecture, lambda one: not one.error and not one.captured_whole)
    not_lowered = _most(by_architecture, lambda one: bool(one.error))
    unplaced = len(_unplaced(strays or (), every))
    unknown = ""
    if not graphs:
        unknown = "no graph reached Inductor: nothing was compiled"
    elif not refused and not unplaced and errors:
        unknown = f"{not_lowered} of {graphs} graphs could not be compiled for CUDA here: {errors.most_common(1)[0][0]}"
    elif not refused and strays is None:
        unknown = f"compiled whole, but tensors left on the CPU cannot be ruled out: {untraceable}"
    method = (
        f"of {graphs} graphs compiled for {', '.join(by_architecture)}, those that CUDA graphs would not take whole"
    )
    method += f"; and {unplaced} values left on the CPU by lines that none of these graphs names" if unplaced else ""
    method += f"; {not_lowered} could not be compiled and are not counted" if errors else ""
    spilling = {kernel.name for one in every for kernel in one.kernels if kernel.spilled_bytes}
    return {
        "cudagraphs": _predicted(None if unknown else refused + unplaced, "" if unknown else method, unknown),
        "graphs_lowered": _predicted(graphs - not_lowered, f"of {graphs} graphs, on the architecture with the fewest"),
        "graphs_not_lowered": _predicted(not_lowered, "graphs that this release cannot compile for CUDA here"),
        "spilling_kernels": _predicted(len(spilling), "kernels that spill registers on some architecture"),
        "values_on_cpu": _predicted(
            None if strays is None else len(strays), "values left on the CPU", missing=untraceable
        ),
    }


def _most(by_architecture: dict[str, list[LoweredGraph]], counts: Callable[[LoweredGraph], bool]) -> int:
    """Count such graphs on the architecture that has the most of them."""
    return max((sum(map(counts, found)) for found in by_architecture.values()), default=0)


def _unplaced(strays: Sequence[Stray], reports: Sequence[LoweredGraph]) -> list[Stray]:
    """Find the strays that no lowered graph has on the CPU: without a line, or with one that the graphs do not name."""
    placed = {told.partition(", ")[2] for one in reports for told in one.left_on_cpu}
    return [stray for stray in strays if stray.line is None or str(stray.line) not in placed]


def _predicted(value: float | None, method: str, missing: str = "") -> Figure:
    return Figure(value=value, kind=Kind.PREDICTED, method=method, missing=missing if value is None else "")


def _events(by_architecture: dict[str, list[LoweredGraph]], strays: Iterable[Stray]) -> Iterable[Event]:
    """Tell each objection once, with how many graphs it was raised to on the architecture with most of it."""
    for kind, of_graph in (
        (EventKind.CUDAGRAPH_SKIP, lambda one: one.skipped),
        (EventKind.CUDAGRAPH_PARTITION, lambda one: [found for part in one.partitions for found in part.objections]),
    ):
        counted: Counter[Objection] = Counter()
        for found in by_architecture.values():
            counted |= Counter(objection for one in found for objection in of_graph(one))
        for objection, count in counted.items():
            yield _event(kind, objection, count)
    for stray in strays:
        yield _event(EventKind.CUDAGRAPH_PARTITION, Objection(f"cpu device ({stray})"), 1)


def _event(kind: EventKind, objection: Objection, count: int) -> Event:
    line = objection.line
    return Event(
        kind=kind,
        severity=SEVERITIES[kind],
        reason=objection.reason,
        normalised_reason=objection.reason,
        count=count,
        file=line.file if line else "",
        line=line.line if line else None,
        function=line.function if line else "",
    )


def _summary(architecture: str, graphs: Sequence[LoweredGraph]) -> dict[str, Any]:
    """One row of the page's block: what was compiled for an architecture, and what came out."""
    lowered = [one for one in graphs if not one.error]
    kernels = [kernel for one in lowered for kernel in one.kernels]
    calls: Counter[str] = Counter()
    for one in lowered:
        calls.update(one.library_calls)
    return {
        "architecture": architecture,
        "card": CARDS[architecture].card,
        "graphs": len(graphs),
        "lowered": len(lowered),
        "captured_whole": sum(one.captured_whole for one in graphs),
        "partitions": sum(len(one.partitions) for one in lowered),
        "captured_partitions": sum(part.captured for one in lowered for part in one.partitions),
        "kernels": len(kernels),
        "configurations": sum(kernel.configurations for kernel in kernels),
        "most_registers": max((kernel.registers or 0 for kernel in kernels), default=0),
        "spilling_kernels": sum(bool(kernel.spilled_bytes) for kernel in kernels),
        "library_calls": dict(calls),
        "values_on_cpu": sum(len(one.left_on_cpu) for one in lowered),
        "seconds": round(sum(one.seconds for one in graphs), 1),
        "errors": dict(Counter(one.error for one in graphs if one.error)),
    }


def _graph_details(report: LoweredGraph) -> dict[str, Any]:
    heaviest = sorted(report.kernels, key=lambda kernel: -(kernel.registers or 0))[:_HEAVIEST]
    spilling = [kernel for kernel in report.kernels if kernel.spilled_bytes and kernel not in heaviest]
    return {
        "number": report.number,
        "made_for": report.made_for,
        "architecture": report.architecture,
        "nodes": report.nodes,
        "partitions": [{"nodes": part.nodes, "captured": part.captured} for part in report.partitions],
        "objections": sorted({f"{one.reason} ({one.line})" if one.line else one.reason for one in report.objections}),
        "kernels": len(report.kernels),
        "heaviest_kernels": [asdict(kernel) for kernel in (*heaviest, *spilling)],
        "library_calls": report.library_calls,
        "left_on_cpu": list(report.left_on_cpu),
        "seconds": report.seconds,
        "error": report.error,
    }
