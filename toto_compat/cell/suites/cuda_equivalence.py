"""Whole forecasts by the code that Inductor makes for CUDA, executed without a GPU and held to eager's own noise.

Every graph of the cache is lowered for CUDA and run in Triton's interpreter, in the place of the compiled graph:
prefill, decode steps and draws are the real loops around it. A graph that CUDA graphs would take runs by the rules of a
replay. The figure is `interpreted`: stronger than a prediction, and no word about speed, memory, capture or races.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace

import torch

from toto_compat.cell.lowering.capture import BoxedRun, CapturedGraph, every_graph_goes_to
from toto_compat.cell.lowering.described_gpu import CARDS, why_not_here
from toto_compat.cell.lowering.interpreter import Interpreter, InterpreterGapError
from toto_compat.cell.lowering.replay import Rehearsal
from toto_compat.cell.lowering.strays import stray_tensors
from toto_compat.cell.session import Session
from toto_compat.cell.suites.cuda_lowering import OF_AUTOCAST, failure_with_its_line
from toto_compat.cell.suites.equivalence.compare import (
    CONTROL,
    compare,
    compare_control,
    equivalence_figure,
    worst_ratio,
)
from toto_compat.cell.suites.equivalence.comparison import Comparison
from toto_compat.cell.suites.equivalence.reference import Reference, quantities, reference_on
from toto_compat.cell.suites.equivalence.samples import findings, places
from toto_compat.cell.suites.equivalence.scenarios import Scenario, series_of
from toto_compat.cell.trial import CandidateError, Trial, all_behind, blaming_the_candidate
from toto_compat.contract.request import Workload
from toto_compat.contract.result import Failure, Figure, Kind, Outcome, SuiteEvidence
from toto_compat.contract.suites import Suite
from toto_compat.model.bound import BoundModel, WholeModel

METHOD = (
    "the code that Inductor made for CUDA, executed kernel by kernel in Triton's interpreter, library calls on the CPU"
    ", graphs by the rules of a replay (static inputs stay, the last outputs are poisoned); distribution parameters "
    "under teacher forcing and the mean forecast, RMSE to a float64 upstream-eager reference over what equivalence "
    "allows; samples by their places in eager's distributions; worst ratio"
)
_SHORT = 3  # patches of the forecasts after the first: prefill and two decode steps
_MOST_ROWS = 16  # of samples: a program of a kernel takes the interpreter milliseconds


def run_cuda_equivalence(session: Session) -> SuiteEvidence:
    """Forecast by interpreted CUDA code and compare, for the last of the profile's common architectures."""
    if why := why_not_here():
        failure = Failure(kind="environment", message=why)
        return SuiteEvidence(suite=Suite.CUDA_EQUIVALENCE, outcome=Outcome.NOT_RUN, failure=failure)
    trial = replace(session.trial, device="cpu")
    architecture = interpreted_architecture(session.profile.architectures)
    strays, _ = stray_tensors(trial)
    lines = {stray.line for stray in strays or () if stray.line is not None}
    interpreter = Interpreter(CARDS[architecture], strays=lines)
    try:
        comparisons, control = interpreted_comparisons(trial, interpreter)
    except CandidateError as error:
        return evidence_of_error(error, interpreter, architecture)
    evidence = equivalence_evidence(interpreter, architecture, comparisons, control)
    return evidence.model_copy(update={"method": METHOD + (OF_AUTOCAST if trial.workload.autocast else "")})


def evidence_of_error(error: CandidateError, interpreter: Interpreter, architecture: str) -> SuiteEvidence:
    """Hold what the forecast raised against the cache, but for what the interpreter itself does not have."""
    gap = next((one for one in all_behind(error.cause) if isinstance(one, InterpreterGapError)), None)
    missing = Figure(value=None, kind=Kind.INTERPRETED, missing=f"it cannot be interpreted ({gap})")
    return SuiteEvidence(
        suite=Suite.CUDA_EQUIVALENCE,
        outcome=Outcome.MODEL_FAILED if gap is None else Outcome.MEASURED,
        failure=failure_with_its_line(error.cause) if gap is None else None,
        method=METHOD,
        figures={} if gap is None else {"cuda_equivalence": missing},
        details=_details(interpreter, architecture, [], []),
    )


def interpreted_architecture(architectures: Sequence[str]) -> str:
    """Choose one: what is executed differs between architectures in block sizes only, so any will do."""
    known = [name for name in architectures if name in CARDS]
    return known[-1] if known and "sm_90" not in known else "sm_90"


def equivalence_evidence(
    interpreter: Interpreter, architecture: str, comparisons: Sequence[Comparison], control: Sequence[Comparison]
) -> SuiteEvidence:
    """Make the figures of what was compared; nothing where no CUDA code ran."""
    done = [report for report in interpreter.reports if not report.error]
    figure = equivalence_figure(comparisons, [control])
    if not interpreter.launches:
        told = next((report.error for report in interpreter.reports if report.error), "no graph reached Inductor")
        figure = Figure(value=None, missing=f"no CUDA code was executed: {told}")
    elif len(done) < len(interpreter.reports):
        left = len(interpreter.reports) - len(done)
        figure = figure.model_copy(update={"method": f"{figure.method}; {left} graphs, not lowered, ran on the CPU"})
    return SuiteEvidence(
        suite=Suite.CUDA_EQUIVALENCE,
        outcome=Outcome.MEASURED,
        method=METHOD,
        figures={
            "cuda_equivalence": figure.model_copy(update={"kind": Kind.INTERPRETED}),
            "cuda_equivalence_control": _interpreted(worst_ratio(control), f"{CONTROL.name}, eager: must exceed 1"),
            "graphs_executed": _interpreted(len(done), f"of {len(interpreter.reports)} graphs"),
            "kernel_launches": _interpreted(interpreter.launches, "Triton kernels executed"),
        },
        details=_details(interpreter, architecture, comparisons, control),
    )


def _interpreted(value: float, method: str) -> Figure:
    return Figure(value=value, kind=Kind.INTERPRETED, method=method)


def _details(
    interpreter: Interpreter, architecture: str, comparisons: Sequence[Comparison], control: Sequence[Comparison]
) -> dict[str, object]:
    return {
        "architecture": architecture,
        "comparisons": [asdict(one) for one in comparisons],
        "control": [asdict(one) for one in control],
        "replayed_graphs": sum(report.captured_whole for report in interpreter.reports),
        "not_lowered": sorted({report.error for report in interpreter.reports if report.error}),
    }


def interpreted_comparisons(trial: Trial, interpreter: Interpreter) -> tuple[list[Comparison], list[Comparison]]:
    """Compare on every scenario, and a cache that is wrong on purpose on the first: it must not pass."""
    eager, exact = trial.eager(), trial.eager(dtype=torch.float64)
    assert isinstance(eager, WholeModel)
    first, *others = scenarios_to_interpret(trial.workload)
    references = {one: reference_on(trial, eager, exact, one) for one in (first, *others)}
    rehearsal = Rehearsal()

    def compiler(graph: CapturedGraph) -> BoxedRun:
        run = interpreter(graph)
        return rehearsal.replayed(graph, run) if interpreter.reports[-1].captured_whole else run

    comparisons: list[Comparison] = []
    with every_graph_goes_to(compiler):
        model = trial.compiled(batch_sizes=tuple(dict.fromkeys((1, rows_of_samples(trial.workload)))))
        for scenario, reference in references.items():
            comparisons += _compared(trial, model, scenario, reference)
        if trial.workload.sampling:  # upstream, whose distributions they are held to, may not draw in half precision
            comparisons += _compared_draws(trial, model, eager, first)
    return comparisons, compare_control(trial, first, references[first])


def scenarios_to_interpret(workload: Workload) -> tuple[Scenario, ...]:
    """The first announced forecast in full, the longest context, and as many rows as samples are drawn in."""
    shape = (1, workload.variates, workload.groups)
    shortest, longest, horizon = workload.context_patches[0], workload.context_patches[-1], workload.horizon_patches[0]
    rows = rows_of_samples(workload)
    return (
        Scenario(f"context {shortest}", shortest, horizon, *shape),
        Scenario(f"context {longest}", longest, min(_SHORT, horizon), *shape),
        Scenario(f"{rows} rows", shortest, min(_SHORT, horizon), rows, *shape[1:]),
    )


def rows_of_samples(workload: Workload) -> int:
    """Say how many samples of a series are drawn together."""
    return max(1, min(_MOST_ROWS, workload.samples_per_batch))


def _compared(trial: Trial, model: BoundModel, scenario: Scenario, reference: Reference) -> list[Comparison]:
    series = series_of(trial, scenario, model.patch_size)
    with blaming_the_candidate():
        answers = quantities(model, scenario, series, reference.truth)
    return compare(scenario.name, answers, reference)


def _compared_draws(trial: Trial, model: BoundModel, eager: WholeModel, first: Scenario) -> list[Comparison]:
    """Draw one round of samples and ask eager for the place of every point."""
    drawn_from = replace(first, name="samples", horizon=min(2, first.horizon))
    series = series_of(trial, drawn_from, model.patch_size)
    count = rows_of_samples(trial.workload)
    torch.manual_seed(trial.workload.seed)
    with blaming_the_candidate():
        steps = drawn_from.horizon * model.patch_size
        samples = model.generate_samples(series, steps, num_samples=count, samples_per_batch=count)
    finite = bool(samples.isfinite().all())
    if not finite:
        return [Comparison(drawn_from.name, "samples", error=torch.inf, limit=1.0, ratio=torch.inf, told="not finite")]
    found = findings(places(eager, series, samples), patch_size=model.patch_size, series=series.inputs.shape[0])
    return [
        Comparison(drawn_from.name, one.test, error=one.ratio, limit=1.0, ratio=one.ratio, told=one.told)
        for one in found
    ]
