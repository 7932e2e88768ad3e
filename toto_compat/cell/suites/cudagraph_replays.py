"""What a GPU shows of CUDA graphs: which steps replayed one, by two witnesses, and how often the host waited.

CUPTI, which the profiler listens to, sees the calls of the CUDA runtime; torch itself knows when one of its recorded
graphs runs. A step that records its graph anew launches one too, so that a launch alone proves nothing.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch._inductor.cudagraph_trees import CUDAGraphNode
from torch.profiler import ProfilerActivity, profile

from toto_compat.contract.result import Figure

REPLAY_METHOD = (
    "a step replays if CUPTI saw cudaGraphLaunch and no cudaStreamBeginCapture in it, and torch ran a recorded graph "
    "(CUDAGraphNode.run_graph) and recorded none"
)
SYNC_METHOD = "warnings of torch.cuda.set_sync_debug_mode in one warm forecast"
_SYNC_WARNING = "called a synchronizing"


@dataclass(frozen=True)
class SeenStep:
    """Counts what both witnesses saw in one step. What is CUPTI's is None where the profiler saw no CUDA runtime."""

    index: int  # 0 is the pass over the context, and what is done before the steps of a round of samples
    launches: int | None
    captures: int | None
    replays: int
    recordings: int

    @property
    def was_replayed(self) -> bool:
        """Tell if a recorded graph ran and none was recorded; what CUPTI did not see is left to torch's own count."""
        by_torch = self.replays > 0 and self.recordings == 0
        by_cupti = self.launches is None or (self.launches > 0 and self.captures == 0)
        return by_torch and by_cupti


@dataclass
class _Counts:
    replays: int = 0
    recordings: int = 0


_COUNTED = {"replays": "run_graph", "recordings": "_record"}  # of CUDAGraphNode


@contextmanager
def _listening_to_torch() -> Iterator[_Counts]:
    """Count where torch runs and records the graphs of its trees; recording launches once by itself."""
    counts = _Counts()

    def counting(name: str) -> Callable[..., Any]:
        original = getattr(CUDAGraphNode, _COUNTED[name])

        def counted(*arguments: Any, **named: Any) -> Any:
            setattr(counts, name, getattr(counts, name) + 1)
            return original(*arguments, **named)

        return counted

    with ExitStack() as undo:
        undo.enter_context(mock.patch.object(CUDAGraphNode, "run_graph", counting("replays")))
        undo.enter_context(mock.patch.object(CUDAGraphNode, "_record", counting("recordings")))
        yield counts


def witnessing(steps: list[SeenStep]) -> Callable[[int], Any]:
    """Make an observer of steps that writes down what both witnesses saw in each.

    A release that has renamed what is counted raises here, and not in a forecast, where it would be the cache's fault.
    """
    for name in _COUNTED.values():
        getattr(CUDAGraphNode, name)

    @contextmanager
    def step(index: int) -> Iterator[None]:
        with (
            _listening_to_torch() as torch_saw,
            profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler,
        ):
            yield
            torch.cuda.synchronize()  # of the CUDA runtime itself: it is in every profile that sees the runtime
        of_runtime = [event.name for event in profiler.events() if event.name.startswith("cuda")]
        steps.append(
            SeenStep(
                index=index,
                launches=_count(of_runtime, "cudaGraphLaunch"),
                captures=_count(of_runtime, "cudaStreamBeginCapture"),
                replays=torch_saw.replays,
                recordings=torch_saw.recordings,
            )
        )

    return step


def _count(names: Sequence[str], wanted: str) -> int | None:
    # older releases of CUPTI have a version at the end of the name
    return sum(name.startswith(wanted) for name in names) if names else None


def replay_figure(*forecasts: Sequence[SeenStep]) -> Figure:
    """Count the steps of warm forecasts that replayed no CUDA graph; without CUPTI that is not proven.

    A pass over the context counts where there is no decode step, as in a forecast of one patch. Of every forecast there
    must be something to see: a model that calls its observer while it answers with means alone could hide the rest.
    """
    decoding = [[step for step in steps if step.index > 0] for steps in forecasts]
    what = "decode steps" if any(decoding) else "passes over the context"
    parts = [decoded or steps for decoded, steps in zip(decoding, forecasts, strict=True)]
    if not all(parts):
        return Figure(value=None, missing="no step was seen: the model calls no observer")
    judged = [step for part in parts for step in part]
    without = sum(not step.was_replayed for step in judged)
    if without == 0 and any(step.launches is None for step in judged):
        return Figure(
            value=None,
            missing="CUPTI is missing: the profiler delivered no event of the CUDA runtime. By torch's own count all "
            f"{len(judged)} {what} replayed a CUDA graph, which one witness alone does not prove; let this user "
            "profile the GPU",
        )
    return Figure(value=without, method=f"of {len(judged)} {what} after warm-up: {REPLAY_METHOD}")


@contextmanager
def counting_host_syncs(found: list[str]) -> Iterator[None]:
    """Collect where the host waits for the GPU, as 'file.py:line', while the block runs."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for one in caught:
        if _SYNC_WARNING in str(one.message):
            found.append(f"{one.filename.rpartition('/')[2]}:{one.lineno}")
