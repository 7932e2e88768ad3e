"""The suite that compiles for CUDA without a GPU: what becomes of its reports, and real graphs where torch can."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from tests.cell.lowering.cuda_build import needs_cuda_build
from tests.cell.small_trials import TWO_LAYERS, trial_of
from toto_compat.cell.live import noting_graph_breaks
from toto_compat.cell.lowering.capture import BoxedRun, CapturedGraph, every_graph_goes_to, run_as_it_is
from toto_compat.cell.lowering.described_gpu import CARDS, why_not_here
from toto_compat.cell.lowering.interpreter import Interpreter, InterpreterGapError
from toto_compat.cell.lowering.kernels import AssembledKernel
from toto_compat.cell.lowering.lower import LoweredGraph, Objection, Partition
from toto_compat.cell.lowering.source_lines import SourceLine
from toto_compat.cell.lowering.strays import Stray
from toto_compat.cell.session import Session
from toto_compat.cell.suites.cuda_equivalence import (
    evidence_of_error,
    interpreted_architecture,
    run_cuda_equivalence,
    scenarios_to_interpret,
)
from toto_compat.cell.suites.cuda_lowering import (
    as_asked,
    buckets_named,
    forecast_both_ways,
    lowering_evidence,
    run_cuda_lowering,
)
from toto_compat.cell.suites.cudagraph import predicted_by_lowering, run_cudagraph
from toto_compat.cell.trial import CandidateError
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


def evidence_of(*reports: LoweredGraph, strays: Sequence[Stray] = ()) -> SuiteEvidence:
    architectures = list(dict.fromkeys(one.architecture for one in reports))
    return lowering_evidence(reports, architectures, strays, "")


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
    refused = [Objection("mutated inputs (1 instances)", LINE)]
    found = evidence_of(report(), report(architecture="sm_120", kernels=spilling, skipped=refused))
    assert found.figures["cudagraphs"].value == 1
    assert found.figures["spilling_kernels"].value == 1


def test_a_graph_that_torch_cannot_compile_is_not_one_that_cuda_graphs_refuse() -> None:
    found = evidence_of(report(), report(1, error="PTXASError: no such instruction"))
    assert found.figures["graphs_not_lowered"].value == 1
    assert found.figures["cudagraphs"].value is None
    assert "1 of 2 graphs could not be compiled" in found.figures["cudagraphs"].missing
    assert "PTXASError: no such instruction" in found.figures["cudagraphs"].missing


def test_beside_one_that_is_refused_it_is_not_counted_and_told() -> None:
    refused = report(skipped=[Objection("mutated inputs (1 instances)", LINE)])
    figure = evidence_of(refused, report(1, error="PTXASError: no")).figures["cudagraphs"]
    assert figure.value == 1
    assert "1 could not be compiled" in figure.method


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
    found = evidence_of(report(left_on_cpu=(f"full_1, {LINE}",)), strays=[Stray("full", LINE)])
    assert found.figures["values_on_cpu"].value == 1
    assert found.figures["cudagraphs"].value == 0  # Inductor saw it there, and took the graph all the same
    assert any(str(LINE) in event.reason for event in found.events)
    unknown = lowering_evidence([report()], ["sm_90"], None, "the forecast cannot be traced on meta")
    assert unknown.figures["cudagraphs"].value is None
    assert "cannot be traced" in unknown.figures["cudagraphs"].missing


@pytest.mark.parametrize("line", [None, SourceLine("toto_compat/model/step.py", 1, "forward")])
def test_a_stray_that_no_graph_could_be_given_counts_by_itself(line: SourceLine | None) -> None:
    """Without its line, or with one that another trace names, the lowered graph has it on CUDA and says nothing."""
    found = evidence_of(report(left_on_cpu=(f"full_1, {LINE}",)), strays=[Stray("full", LINE), Stray("arange", line)])
    assert found.figures["cudagraphs"].value == 1
    assert "1 values left on the CPU" in found.figures["cudagraphs"].method


def reads_a_number(x: Tensor) -> Tensor:
    return x * 2 + x.sum().item()


def branches_on_a_value(x: Tensor) -> Tensor:
    return x + 1 if (x > 0).any() else x - 1


@pytest.mark.parametrize("step", [reads_a_number, branches_on_a_value])
def test_a_value_that_is_read_between_two_graphs_is_named_with_its_line(step: Callable[[Tensor], Tensor]) -> None:
    """As the settings are by default: each of the two graphs would be taken whole, and nobody would hear of it."""
    torch._dynamo.reset()
    graphs: list[CapturedGraph] = []

    def compiler(graph: CapturedGraph) -> BoxedRun:
        graphs.append(graph)
        return run_as_it_is(graph)

    with every_graph_goes_to(compiler), noting_graph_breaks() as breaks:
        torch.compile(step)(torch.ones(3))
    torch._dynamo.reset()
    assert len(graphs) == 2
    found = lowering_evidence([report(), report(1)], ["sm_90"], (), "", breaks=breaks)
    [(told, count)] = found.details["graph_breaks"].items()
    assert count == 1
    assert "test_cuda_lowering.py:" in told and told.endswith(f" in {step.__name__})")
    assert "\n" not in told


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


def test_what_could_not_be_compiled_at_all_leaves_the_prediction_for_the_cpu(tmp_path: Path) -> None:
    lowered = evidence_of(report(error="AttributeError: no such driver"))
    left = {"evidence": {Suite.CUDA_LOWERING.value: lowered.model_dump(mode="json")}}
    (tmp_path / f"{Group.CUDA_LOWERING.value}.json").write_text(json.dumps(left), encoding="utf-8")
    predicted = run_cudagraph(session_of("fixed_size", tmp_path, mode="default"))
    assert predicted.figures["cudagraphs"].value == 0
    assert "predicted_by" not in predicted.details


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


def of_a_release(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Let this torch be a CUDA build of another release."""
    monkeypatch.setattr(torch.version, "cuda", "12.1")
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))


@pytest.mark.parametrize("version", ["2.3.1+cu121", "2.8.0+cu128"])
def test_a_release_that_is_too_old_says_so_and_is_no_error(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_a_release(monkeypatch, version)
    session = session_of("fixed_size", tmp_path, mode="default")
    for run in (run_cuda_lowering, run_cuda_equivalence):
        found = run(session)
        assert found.outcome is Outcome.NOT_RUN
        assert found.failure is not None and f"torch {version} is too old" in found.failure.message
    of_a_release(monkeypatch, "2.9.0+cu128")
    assert why_not_here() == ""


def test_the_suites_can_be_imported_where_torch_lacks_what_they_need() -> None:
    """As in torch 2.3, where the process ended with an ImportError in the place of that word."""
    script = """
import sys
import torch._inductor.compile_fx, torch._inductor.cudagraph_trees
for name in list(sys.modules):
    if name.startswith(("torch._inductor.runtime", "torch._inductor.async_compile")):
        sys.modules[name] = None
for name in ("runtime", "async_compile"):
    vars(torch._inductor).pop(name, None)
import toto_compat.cell.suites.cuda_lowering, toto_compat.cell.suites.cuda_equivalence
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]


def test_an_architecture_that_no_card_is_described_of_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_a_release(monkeypatch, "2.9.0+cu128")
    found = run_cuda_lowering(session_of("fixed_size", tmp_path, architectures=("sm_37",), mode="default"))
    assert found.outcome is Outcome.NOT_RUN
    assert found.failure is not None and "no GPU of sm_37 is described here" in found.failure.message


@pytest.mark.parametrize(
    ("asked", "taken"),
    [(("sm_80", "sm_90", "sm_120"), "sm_90"), (("sm_80",), "sm_80"), (("sm_103",), "sm_103"), (("sm_37",), "sm_90")],
)
def test_any_described_architecture_will_do_to_be_interpreted(asked: tuple[str, ...], taken: str) -> None:
    assert interpreted_architecture(asked) == taken


def test_what_the_interpreter_lacks_is_named_and_not_held_against_the_cache() -> None:
    interpreter = Interpreter(CARDS["sm_90"])
    gap = InterpreterGapError("kernel triton_poi_fused_0: AttributeError: no erfinv")
    behind = RuntimeError("backend='inductor' raised:")
    behind.__cause__ = gap
    found = evidence_of_error(CandidateError(behind), interpreter, "sm_90")
    assert found.outcome is Outcome.MEASURED
    figure = found.figures["cuda_equivalence"]
    assert figure.value is None
    assert "cannot be interpreted" in figure.missing and "no erfinv" in figure.missing
    raised = evidence_of_error(CandidateError(RuntimeError("index out of bounds")), interpreter, "sm_90")
    assert raised.outcome is Outcome.MODEL_FAILED


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
