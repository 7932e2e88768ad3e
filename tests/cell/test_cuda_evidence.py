"""Every gate of fixed_size's row can PASS on a GPU: evidence as a CUDA cell leaves it, walked through all of them.

The figures are made by the code that makes them on a GPU. What that is given is modelled: CUDA's allocator by its
rules, launches and recordings as both witnesses count them, and the snapshots of an nvidia-smi in a container.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.cell.suites.test_memory import fixed_size_on_tiny
from tests.verdict.sample_cells import GATES, good_result, speed_of, speed_run, with_suite
from toto_compat.cell.group import failure_of, measured
from toto_compat.cell.suites.cudagraph import KeptOut, measured_figures
from toto_compat.cell.suites.cudagraph_replays import SeenStep, replay_figure
from toto_compat.cell.suites.memory import memory_evidence
from toto_compat.cell.trial import blaming_the_candidate
from toto_compat.contract.gate_limit import GateLimit
from toto_compat.contract.result import CellResult, Figure, Outcome, SuiteEvidence
from toto_compat.contract.suites import Suite
from toto_compat.matrix.gates import Gate
from toto_compat.verdict.judge import Status, judge

pytestmark = pytest.mark.cell

REPLAYED = SeenStep(index=1, launches=1, captures=0, replays=1, recordings=0)
IN_A_CONTAINER = {
    "gpu": {"clocks.sm": "1410", "throttled_by": ["gpu_idle", "sw_power_cap"]},
    "gpu_processes": [{"pid": 41, "name": "python", "gpu_percent": 60, "own": None}],
}
CONDITIONS = [{"before": {"clock_s": 1.0, **IN_A_CONTAINER}, "after": {"clock_s": 21.0, **IN_A_CONTAINER}}]


def row(mode: str, *, decode: Sequence[SeenStep] = (REPLAYED,) * 9, copies: int = 1) -> CellResult:
    """The result of fixed_size on `tiny` on a GPU in this mode."""
    result = good_result(torch="2.9.0", build="cu128", mode=mode)
    figures = {"cudagraphs": Figure(value=None, missing="mode default does not use CUDA graphs")}
    if mode != "default":
        figures = measured_figures(0, KeptOut(), replay_figure(decode))
    figures |= {"host_syncs": Figure(value=0), "host_syncs_sampled": Figure(value=9)}  # torch.multinomial, before 2.12
    graphs = SuiteEvidence(suite=Suite.CUDAGRAPH, outcome=Outcome.MEASURED, figures=figures)
    reference, compiled = fixed_size_on_tiny(graphs=mode != "default", copies=copies)
    memory = memory_evidence(reference, compiled, cold_peak=None)
    speed = speed_of(speed_run(upstream_ms=52.0, cache_ms=40.0, compiled_ms=9.0))
    speed = speed.model_copy(update={"details": {**speed.details, "conditions": CONDITIONS}})
    for suite, evidence in ((Suite.CUDAGRAPH, graphs), (Suite.MEMORY, memory), (Suite.SPEED, speed)):
        result = with_suite(result, suite, evidence)
    return result


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_every_row_of_fixed_size_can_pass_on_a_gpu(mode: str) -> None:
    judged = judge(row(mode), GATES)
    told = {gate.value: one.reason for gate, one in judged.gates.items() if one.status is not Status.PASS}
    assert told == ({"cudagraphs": "mode default does not use CUDA graphs"} if mode == "default" else {})
    assert judged.verdict is Status.PASS


# Those of the profile production-check, which are stricter than the general ones.
PRODUCTION_CHECK = {
    **GATES,
    Gate.RECOMPILES_TOTAL: GateLimit(max=2),
    Gate.LATENCY_STABILITY: GateLimit(max=1.5),
    Gate.SPEEDUP: GateLimit(min=2.0),
}


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_a_forecast_of_one_patch_can_pass_a_production_check_by_its_pass_over_the_context(mode: str) -> None:
    """It has no decode step: the one pass is what a graph is captured of."""
    judged = judge(row(mode, decode=(replace(REPLAYED, index=0),)), PRODUCTION_CHECK)
    assert judged.verdict is Status.PASS, judged.reason
    eager = SeenStep(index=0, launches=0, captures=0, replays=0, recordings=0)
    judged = judge(row(mode, decode=(eager,)), PRODUCTION_CHECK)
    assert (judged.verdict, judged.decided_by) == (Status.FAIL, Gate.CUDAGRAPHS)


def test_a_step_that_records_anew_fails_it() -> None:
    recorded = SeenStep(index=1, launches=1, captures=1, replays=0, recordings=1)
    judged = judge(row("reduce-overhead", decode=(REPLAYED, recorded)), GATES)
    assert (judged.verdict, judged.decided_by) == (Status.FAIL, Gate.CUDAGRAPHS)


def test_without_cupti_it_is_inconclusive_and_says_so() -> None:
    unseen = SeenStep(index=1, launches=None, captures=None, replays=1, recordings=0)
    judged = judge(row("reduce-overhead", decode=(unseen,) * 9), GATES)
    assert (judged.verdict, judged.decided_by) == (Status.INCONCLUSIVE, Gate.CUDAGRAPHS)
    assert "CUPTI is missing" in judged.reason


def test_four_more_copies_of_its_buffers_fail_it() -> None:
    judged = judge(row("reduce-overhead", copies=5), GATES)
    assert (judged.verdict, judged.decided_by) == (Status.FAIL, Gate.MEMORY)


def test_a_fault_of_the_machine_fails_nothing() -> None:
    error = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")

    def suite() -> SuiteEvidence:
        with blaming_the_candidate():
            raise error

    evidence = measured(Suite.SPEED, suite)
    assert isinstance(evidence, SuiteEvidence)
    assert evidence.failure is not None and evidence.failure.kind == failure_of(error).kind == "environment"
    judged = judge(with_suite(row("reduce-overhead"), Suite.SPEED, evidence), GATES)
    assert judged.verdict is Status.INCONCLUSIVE
    assert "memory is used up" in judged.reason
