"""Memory: what a process holds once it is warm; upstream eager and the compiled cell each in a process of their own."""

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from toto_compat.cell.process_tree import resident_bytes, watching_the_tree
from toto_compat.contract.result import Figure, Outcome, SuiteEvidence
from toto_compat.contract.strict_model import StrictModel
from toto_compat.contract.suites import Group, Suite

if TYPE_CHECKING:
    from toto_compat.cell.session import Session
    from toto_compat.cell.trial import Trial
    from toto_compat.model.bound import BoundModel

METHOD = (
    "at the smallest context three forecasts of the compiled model, told of every batch of the workload, and two of "
    "upstream eager, each in a process that has done nothing else; garbage collected, then the process's resident "
    "memory (CUDA: what torch has reserved once its cache is emptied, which the pools of CUDA graphs are part of); "
    "compiled over upstream eager"
)


class MemoryRun(StrictModel):
    """Holds what one process held. Bytes."""

    steady_rss: int
    peak_tree_rss: int  # over this process and its children, compile included
    cuda_allocated: int | None = None
    cuda_reserved: int | None = None
    cuda_peak_allocated: int | None = None


def run_compiled(session: "Session") -> MemoryRun:
    """Look at what the compiled model's process holds, first forecast and all."""
    session.first_forecast_seconds()
    return hold_memory(session.trial, session.candidate)


def run_reference(session: "Session") -> MemoryRun:
    """Look at what upstream eager's process holds."""
    return hold_memory(session.trial, session.trial.eager())


def hold_memory(trial: "Trial", model: "BoundModel") -> MemoryRun:
    """Forecast with the one model of this process and look at what the process holds."""
    # here and not above: the process that puts evidence together does without torch
    import torch

    from toto_compat.cell.trial import blaming_the_candidate, free_memory, synchronise

    workload = trial.workload
    horizon = workload.horizon_patches[0]
    series = trial.series(model.patch_size, workload.context_patches[0], horizon, batch=workload.batches[0])
    with watching_the_tree() as tree:
        for _ in range(2):
            if model.compiled:
                with blaming_the_candidate():
                    model.generate_mean(series, horizon * model.patch_size)
            else:
                model.generate_mean(series, horizon * model.patch_size)
        synchronise(trial.device)
        free_memory(trial.device)
        steady = resident_bytes(os.getpid())
    cuda = trial.device == "cuda"
    return MemoryRun(
        steady_rss=steady,
        peak_tree_rss=tree.peak,
        cuda_allocated=torch.cuda.memory_allocated() if cuda else None,
        cuda_reserved=torch.cuda.memory_reserved() if cuda else None,
        cuda_peak_allocated=torch.cuda.max_memory_allocated() if cuda else None,
    )


def combine(
    measurements: Mapping[Group, Sequence[Mapping[str, Any]]], evidence: Mapping[Suite, SuiteEvidence]
) -> SuiteEvidence:
    """Make evidence of what the two processes held; the cold compile's peak comes from the process that compiled."""
    compiled = MemoryRun.model_validate(measurements[Group.SPEED][0])
    reference = MemoryRun.model_validate(measurements[Group.MEMORY_REFERENCE][0])
    observed = evidence.get(Suite.RECOMPILE)
    peak = observed.figures.get("compile_peak_bytes") if observed is not None else None
    cold_peak = int(peak.value) if peak is not None and peak.value is not None else None
    return memory_evidence(reference, compiled, cold_peak=cold_peak)


def memory_evidence(reference: MemoryRun, compiled: MemoryRun, *, cold_peak: int | None) -> SuiteEvidence:
    """The ratio that decides, and beside it what each process held. `cold_peak`: of the process that compiled cold."""
    on_cuda = reference.cuda_reserved is not None and compiled.cuda_reserved is not None
    held = (
        (compiled.cuda_reserved or 0, reference.cuda_reserved or 0)
        if on_cuda
        else (compiled.steady_rss, reference.steady_rss)
    )
    figures = {
        "memory": Figure(value=held[0] / held[1], unit="x", method=METHOD)
        if held[1]
        else Figure(value=None, unit="x", missing="the reference process held nothing measurable"),
        "steady_bytes": _bytes(compiled.steady_rss, "resident, compiled process, warm"),
        "reference_steady_bytes": _bytes(reference.steady_rss, "resident, upstream eager process, warm"),
        "compile_peak_bytes": _bytes(cold_peak, "largest resident sum over the process tree during the cold compile"),
        "warm_peak_bytes": _bytes(compiled.peak_tree_rss, "the same with a filled inductor cache"),
    }
    if cold_peak is not None:
        figures["compile_peak"] = Figure(
            value=cold_peak / reference.steady_rss, unit="x", method="cold compile peak / upstream eager, warm"
        )
    if on_cuda:
        figures["cuda_allocated"] = Figure(
            value=(compiled.cuda_allocated or 0) / max(1, reference.cuda_allocated or 0),
            unit="x",
            method="torch.cuda.memory_allocated, compiled over upstream eager; the pools of CUDA graphs are not in it",
        )
        figures["cuda_peak_bytes"] = _bytes(compiled.cuda_peak_allocated, "torch.cuda.max_memory_allocated")
    return SuiteEvidence(
        suite=Suite.MEMORY,
        outcome=Outcome.MEASURED,
        method=METHOD,
        figures=figures,
        details={"reference": reference.model_dump(), "compiled": compiled.model_dump()},
    )


def _bytes(value: int | None, method: str) -> Figure:
    if value is None:
        return Figure(value=None, unit="bytes", missing="the group that would have measured it did not finish")
    return Figure(value=value, unit="bytes", method=method)
