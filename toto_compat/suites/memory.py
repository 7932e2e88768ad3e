"""Memory: what a process holds once it is warm; upstream eager and the compiled cell each in a process of their own."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from toto_compat.evidence.schema import Figure, Outcome, SuiteEvidence
from toto_compat.matrix.schema import Gate, Suite
from toto_compat.strict_model import StrictModel

if TYPE_CHECKING:
    from toto_compat.model.bound import BoundModel
    from toto_compat.suites.trial import Trial

METHOD = (
    "at the smallest context three forecasts of the compiled model, told of every batch of the workload, and two of "
    "upstream eager, each in a process that has done nothing else; garbage collected, then the process's resident "
    "memory (CUDA: what torch has reserved once its cache is emptied, which the pools of CUDA graphs are part of); "
    "compiled over upstream eager"
)
# Of Python, torch, the C++ library and compilers; the last two of a compiler that the kernel killed.
OUT_OF_MEMORY_TEXTS = (
    "MemoryError",
    "not enough memory",
    "std::bad_alloc",
    "Cannot allocate memory",
    "can't allocate memory",
    "CUDA out of memory",
    "CUDA error: out of memory",
    "out of memory allocating",
    "Killed signal terminated program",
    "unable to execute command: Killed",
)
_PAGE = os.sysconf("SC_PAGE_SIZE")


class MemoryRun(StrictModel):
    """What one process held. Bytes."""

    steady_rss: int
    peak_tree_rss: int  # over this process and its children, compile included
    cuda_allocated: int | None = None
    cuda_reserved: int | None = None
    cuda_peak_allocated: int | None = None


class TreePeak:
    """The largest resident memory seen over this process and everything it started."""

    def __init__(self) -> None:
        self.peak = 0

    def look(self) -> None:
        self.peak = max(self.peak, tree_rss(os.getpid()))


@contextmanager
def watching_the_tree(every_seconds: float = 0.2) -> Iterator[TreePeak]:
    """Compilers run in child processes: sample the whole tree from a thread while the block runs."""
    peak, stop = TreePeak(), threading.Event()

    def sample() -> None:
        while not stop.wait(every_seconds):
            peak.look()

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()
        peak.look()


def resident_bytes(pid: int) -> int:
    """Resident memory of one process; 0 when it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    except (OSError, IndexError, ValueError):
        return 0


def tree_rss(root: int) -> int:
    """Resident memory of a process and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # the command, in parentheses, may hold spaces: the parent's pid is the second field after it
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError, ValueError):
                continue
            children.setdefault(parent, []).append(int(entry.name))
    total, pending = 0, [root]
    while pending:
        pid = pending.pop()
        total += resident_bytes(pid)
        pending.extend(children.get(pid, []))
    return total


def run_memory(trial: "Trial", model: "BoundModel") -> MemoryRun:
    """Forecast with the one model of this process and look at what the process holds."""
    import torch

    from toto_compat.suites.trial import blaming_the_candidate, free_memory, synchronise

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


def memory_evidence(reference: MemoryRun, compiled: MemoryRun, *, cold_peak: int | None) -> SuiteEvidence:
    """The ratio that decides, and beside it what each process held. `cold_peak`: of the process that compiled cold."""
    on_cuda = reference.cuda_reserved is not None and compiled.cuda_reserved is not None
    held = (
        (compiled.cuda_reserved or 0, reference.cuda_reserved or 0)
        if on_cuda
        else (compiled.steady_rss, reference.steady_rss)
    )
    figures = {
        Gate.MEMORY.value: Figure(value=held[0] / held[1], unit="x", method=METHOD)
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
