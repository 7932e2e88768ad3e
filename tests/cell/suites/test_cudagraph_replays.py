"""A replay is believed if CUPTI and torch both saw it, and nothing was recorded anew."""

import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor.cudagraph_trees import CUDAGraphNode

from toto_compat.cell.suites import cudagraph_replays as module
from toto_compat.cell.suites.cudagraph_replays import SeenStep, counting_host_syncs, replay_figure, witnessing

pytestmark = pytest.mark.cell

REPLAYED = SeenStep(index=1, launches=1, captures=0, replays=1, recordings=0)
# what would pass for a replay if only one witness were asked, or only launches counted
NOT_REPLAYED = {
    "recorded anew": SeenStep(index=1, launches=1, captures=1, replays=0, recordings=1),
    "recorded beside a replay": SeenStep(index=1, launches=2, captures=1, replays=1, recordings=1),
    "captured behind torch's back": SeenStep(index=1, launches=1, captures=1, replays=1, recordings=0),
    "claimed by torch alone": SeenStep(index=1, launches=0, captures=0, replays=1, recordings=0),
    "launched by somebody else": SeenStep(index=1, launches=1, captures=0, replays=0, recordings=0),
    "eager": SeenStep(index=1, launches=0, captures=0, replays=0, recordings=0),
    "eager, unseen by CUPTI": SeenStep(index=1, launches=None, captures=None, replays=0, recordings=0),
    "recorded anew, unseen by CUPTI": SeenStep(index=1, launches=None, captures=None, replays=0, recordings=1),
}


def test_steps_that_both_witnesses_saw_are_replays() -> None:
    assert replay_figure([REPLAYED, SeenStep(index=1, launches=3, captures=0, replays=3, recordings=0)]).value == 0


@pytest.mark.parametrize("step", NOT_REPLAYED.values(), ids=list(NOT_REPLAYED))
def test_a_step_that_one_witness_denies_is_none(step: SeenStep) -> None:
    assert replay_figure([REPLAYED, REPLAYED, step, REPLAYED]).value == 1


def test_without_cupti_nothing_is_proven_and_that_is_said() -> None:
    unseen = SeenStep(index=1, launches=None, captures=None, replays=1, recordings=0)
    figure = replay_figure([unseen, unseen])
    assert figure.value is None
    assert "CUPTI is missing" in figure.missing
    assert "all 2 decode steps" in figure.missing


def test_without_a_decode_step_the_pass_over_the_context_is_judged() -> None:
    replayed, eager = replace(REPLAYED, index=0), replace(NOT_REPLAYED["eager"], index=0)
    figure = replay_figure([replayed])
    assert (figure.value, "1 passes over the context" in figure.method) == (0, True)
    assert replay_figure([eager]).value == 1
    assert replay_figure([eager, REPLAYED]).value == 0  # the prefill of a longer forecast
    assert replay_figure([eager, REPLAYED, eager, REPLAYED]).value == 0  # and that of another
    assert "no step was seen" in replay_figure([]).missing


def test_samples_that_nobody_saw_are_no_replays() -> None:
    """Of a model that tells of its steps only while it forecasts means."""
    assert "no step was seen" in replay_figure([REPLAYED, REPLAYED], []).missing
    assert replay_figure([REPLAYED], [NOT_REPLAYED["eager"]]).value == 1


def test_a_pass_over_the_context_stands_for_no_decode_step_of_other_samples() -> None:
    eager_pass = replace(NOT_REPLAYED["eager"], index=0)
    assert replay_figure([REPLAYED], [eager_pass]).value == 1


class Profiled:
    """The profiler of a machine with a GPU, which this one is not."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def __call__(self, **_activities: Any) -> "Profiled":
        return self

    def __enter__(self) -> "Profiled":
        return self

    def __exit__(self, *_error: object) -> None: ...

    def events(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(name=name) for name in self.names]


@pytest.mark.parametrize(
    ("names", "seen"),
    [
        (("aten::add", "cudaGraphLaunch", "cudaDeviceSynchronize"), (1, 0)),
        (("cudaStreamBeginCapture", "cudaGraphLaunch_v10000", "cudaDeviceSynchronize"), (1, 1)),
        (("aten::add",), (None, None)),
    ],
)
def test_both_witnesses_are_heard_in_each_step(
    names: tuple[str, ...], seen: tuple[int | None, int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(module, "profile", Profiled(*names))
    # 2.15 leaves a graph without kernels alone
    wrapped = SimpleNamespace(kernel_free_cudagraph=False)
    node = SimpleNamespace(graph=SimpleNamespace(replay=lambda: None), wrapped_function=wrapped)
    run_graph = CUDAGraphNode.run_graph
    steps: list[SeenStep] = []
    with witnessing(steps)(1):
        CUDAGraphNode.run_graph(node)
        CUDAGraphNode.run_graph(node)
    assert steps == [SeenStep(index=1, launches=seen[0], captures=seen[1], replays=2, recordings=0)]
    assert CUDAGraphNode.run_graph is run_graph


def test_a_recording_of_torchs_own_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CUDAGraphNode, "_record", lambda *_: "recorded")
    with module._listening_to_torch() as counts:
        assert CUDAGraphNode._record(None, None, None) == "recorded"
    assert (counts.replays, counts.recordings) == (0, 1)


def test_a_release_that_renamed_what_is_counted_says_so_before_any_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a forecast it would be an error of the cache's, and its row FAIL."""
    monkeypatch.delattr(CUDAGraphNode, "_record")
    with pytest.raises(AttributeError, match="_record"):
        witnessing([])


def test_where_the_host_waits_is_named_once_per_time(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[object] = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    found: list[str] = []
    with counting_host_syncs(found):
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    assert len(found) == 3
    assert found[0].startswith("test_cudagraph_replays.py:")
    assert modes == ["warn", 0]
