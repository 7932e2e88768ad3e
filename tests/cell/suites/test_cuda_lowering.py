"""The suite that compiles for CUDA without a GPU: what becomes of its reports, and real graphs where torch can."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cell.lowering.cuda_build import needs_cuda_build
from tests.cell.small_trials import TWO_LAYERS, trial_of
from toto_compat.cell.lowering.capture import BoxedRun, CapturedGraph, every_graph_goes_to, run_as_it_is
from toto_compat.cell.lowering.described_gpu import why_not_here
from toto_compat.cell.lowering.kernels import AssembledKernel
from toto_compat.cell.lowering.lower import LoweredGraph, Objection, Partition
from toto_compat.cell.lowering.source_lines import SourceLine
from toto_compat.cell.session import Session
from toto_compat.cell.suites.cuda_equivalence import run_cuda_equivalence, scenarios_to_interpret
from toto_compat.cell.suites.cuda_lowering import (
    as_asked,
    buckets_named,
    forecast_both_ways,
    lowering_evidence,
    run_cuda_lowering,
)
from toto_compat.cell.suites.cudagraph import predicted_by_lowering, run_cudagraph
from toto_compat.contract.cell_name import CellName
from toto_compat.contract.events import EventKind
from toto_compat.contract.request import CacheRequest, CellProfile, CellRequest, Device, Environment, Workload
from toto_compat.contract.result import Kind, Outcome, SuiteEvidence
from toto_compat.contract.suites import Group, Suite
from toto_compat.model.backbone import SHAPES

pytestmark = pytest.mark.cell

LINE = SourceLine("toto_compat/model/step.py", 12, "forward")


def report(number: int = 0, architecture: str = "sm_90", **changes: Any) -> LoweredGraph:
    whole = LoweredGraph(
        number,
        architecture,
        nodes=40,
        partitions=[Partition(9, captured=True)],
        kernels=[AssembledKernel("triton_poi_fused_0", 2, registers=40, spilled_bytes=0, shared_bytes=0)],
        library_calls={"extern_kernels.mm": 2},
        seconds=1.5,
    )
    return replace(whole, **changes)


def evidence_of(*reports: LoweredGraph, strays: list[str] | None = None) -> SuiteEvidence:
    architectures = list(dict.fromkeys(one.architecture for one in reports))
    return lowering_evidence(reports, architectures, [] if strays is None else strays, "")


def session_of(cache: str, folder: Path, *, architectures: tuple[str, ...] = ("sm_90",), mode: str) -> Session:
    trial = replace(trial_of(cache), mode=mode)
    return Session(trial, CellProfile(iterations=1, architectures=architectures), work=folder)


def test_graphs_that_are_taken_whole_on_every_architecture_are_no_objection() -> None:
    found = evidence_of(report(), report(architecture="sm_120"))
    figure = found.figures["cudagraphs"]
    assert (figure.value, figure.kind) == (0, Kind.PREDICTED)
    assert [row["architecture"] for row in found.details["architectures"]] == ["sm_90", "sm_120"]
    assert found.events == ()


def test_the_worst_architecture_counts() -> None:
    spilling = [AssembledKernel("triton_red_fused_1", 1, registers=255, spilled_bytes=64, shared_bytes=0)]
    found = evidence_of(report(), report(architecture="sm_120", kernels=spilling, error="PTXASError: no"))
    assert found.figures["cudagraphs"].value == 1
    assert found.figures["graphs_not_lowered"].value == 1
    assert found.figures["spilling_kernels"].value == 1


def test_a_second_partition_and_a_skip_are_events_with_their_lines() -> None:
    split = [Partition(4, captured=True), Partition(1, captured=False, objections=(Objection("cpu ops", LINE),))]
    skipped = [Objection("mutated inputs (1 instances)", LINE)]
    found = evidence_of(report(partitions=split), report(1, skipped=skipped))
    assert found.figures["cudagraphs"].value == 2
    assert [(event.kind, event.reason, event.file, event.line) for event in found.events] == [
        (EventKind.CUDAGRAPH_SKIP, "mutated inputs (1 instances)", LINE.file, 12),
        (EventKind.CUDAGRAPH_PARTITION, "cpu ops", LINE.file, 12),
    ]


def test_a_stray_tensor_is_told_and_nothing_is_claimed_where_they_cannot_be_looked_for() -> None:
    found = evidence_of(report(), strays=[f"full, {LINE}"])
    assert found.figures["values_on_cpu"].value == 1
    assert any(str(LINE) in event.reason for event in found.events)
    unknown = lowering_evidence([report()], ["sm_90"], None, "the forecast cannot be traced on meta")
    assert unknown.figures["cudagraphs"].value is None
    assert "cannot be traced" in unknown.figures["cudagraphs"].missing


def test_no_graph_at_all_is_no_good_news() -> None:
    assert evidence_of().figures["cudagraphs"].value is None


def test_it_takes_the_place_of_the_prediction_for_the_cpu(tmp_path: Path) -> None:
    lowered = evidence_of(report(skipped=[Objection("mutated inputs (1 instances)", LINE)]))
    left = {"evidence": {Suite.CUDA_LOWERING.value: lowered.model_dump(mode="json")}}
    session = session_of("fixed_size", tmp_path, mode="default")
    (tmp_path / f"{Group.CUDA_LOWERING.value}.json").write_text(json.dumps(left), encoding="utf-8")
    predicted = run_cudagraph(session)
    assert predicted == predicted_by_lowering(lowered)
    assert predicted.figures["cudagraphs"].value == 1
    assert predicted.suite is Suite.CUDAGRAPH


@pytest.mark.parametrize("autocast", [None, "float16"])
def test_a_short_forecast_asks_for_passes_draws_and_decode_steps_of_every_row_count(
    autocast: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In half precision too, where upstream cannot draw on a CPU and nothing would be sampled otherwise."""
    monkeypatch.setitem(SHAPES, "tiny", TWO_LAYERS)
    whole = trial_of("fixed_size")
    workload = whole.workload.model_copy(update={"autocast": autocast, "sampling": ("4/4",)})
    request = whole_request(workload, tmp_path)
    session = Session.of(request, whole.quiet)
    seen: list[str] = []

    def compiler(graph: CapturedGraph) -> BoxedRun:
        seen.append(buckets[-1])
        return run_as_it_is(graph)

    with buckets_named() as buckets, every_graph_goes_to(compiler):
        forecast_both_ways(as_asked(session), upstream_draws=not session.no_samples)
    assert [name.partition(",")[0] for name in seen if "decode step" in name] == [
        "decode step for batch 1",
        "decode step for batch 4",
    ]
    assert any("context pass" in name for name in seen)
    assert any("patch draws" in name for name in seen)
    assert all(("autocast float16" in name) is (autocast is not None) for name in seen if "draws" not in name)


def whole_request(workload: Workload, folder: Path) -> CellRequest:
    return CellRequest(
        cell=CellName("torch-2.13.0-cpu/fixed_size/reduce-overhead"),
        environment=Environment(torch="2.13.0", build="cpu"),
        cache=CacheRequest(name="fixed_size", source="builtin"),
        device=Device.CPU,
        profile_name="lowered",
        profile=CellProfile(iterations=1),
        workload=workload,
        work_folder=str(folder),
    )


@pytest.mark.skipif(not why_not_here(), reason="this is a CUDA build")
def test_a_cpu_build_says_that_it_is_one(tmp_path: Path) -> None:
    session = session_of("fixed_size", tmp_path, mode="default")
    for run in (run_cuda_lowering, run_cuda_equivalence):
        found = run(session)
        assert found.outcome is Outcome.NOT_RUN
        assert found.failure is not None and "CPU build" in found.failure.message


def test_what_is_interpreted_is_a_whole_forecast_the_longest_context_and_the_rows_of_samples() -> None:
    first, longest, rows = scenarios_to_interpret(Workload(sampling=("256/128",)))
    assert (first.context, first.horizon, first.batch) == (16, 10, 1)
    assert longest.context == 64
    assert rows.batch == 16


@needs_cuda_build
def test_fixed_size_is_one_captured_partition_a_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "tiny", TWO_LAYERS)
    found = run_cuda_lowering(session_of("fixed_size", tmp_path, mode="reduce-overhead"))
    assert found.figures["cudagraphs"].value == 0, found
    assert {tuple(part["captured"] for part in graph["partitions"]) for graph in found.details["graphs"]} == {(True,)}


@needs_cuda_build
def test_list_index_is_not_with_productions_reasons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "tiny", TWO_LAYERS)
    found = run_cuda_lowering(session_of("list_index", tmp_path, mode="reduce-overhead"))
    assert found.figures["cudagraphs"].value
    assert any(event.reason.startswith("mutated inputs") and event.line for event in found.events), found.events
