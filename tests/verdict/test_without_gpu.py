"""What a row says that was compiled for CUDA without a GPU: what is known, what is not, and no verdict either way."""

from pathlib import Path
from typing import Any

import pytest

from tests.verdict.sample_cells import GATES, GOOD_FIGURES, cell_request, provenance
from tests.verdict.stored_runs import store_run
from toto_compat.contract.cell_name import CellName
from toto_compat.contract.events import Event, EventKind, Severity
from toto_compat.contract.request import Device
from toto_compat.contract.result import CellResult, Failure, Figure, Kind, Outcome, SuiteEvidence
from toto_compat.contract.suites import WITHOUT_GPU, Suite
from toto_compat.evidence.store import load_run, write_run_info
from toto_compat.matrix.gates import Gate
from toto_compat.verdict.decision import Answer, DecisionRules, decide
from toto_compat.verdict.judge import JudgedCell, Status, judge
from toto_compat.verdict.judged_run import judge_run
from toto_compat.verdict.without_gpu import best_known, known_without_gpu


def lowered_evidence(*, kept_out: int = 0, graphs: int = 3, **changes: Any) -> SuiteEvidence:
    events = (
        Event(
            kind=EventKind.CUDAGRAPH_SKIP,
            severity=Severity.WARNING,
            reason="mutated inputs (2 instances)",
            normalised_reason="mutated inputs (2 instances)",
            count=kept_out,
            file="toto/model/util.py",
            line=119,
        ),
    )
    rows = [
        {"architecture": name, "graphs": graphs, "captured_whole": graphs - kept_out}
        for name in ("sm_80", "sm_90", "sm_120")
    ]
    return SuiteEvidence(
        suite=Suite.CUDA_LOWERING,
        outcome=Outcome.MEASURED,
        figures={"cudagraphs": Figure(value=kept_out, kind=Kind.PREDICTED)},
        events=events if kept_out else (),
        details={"architectures": rows},
    ).model_copy(update=changes)


def executed_evidence(ratio: float | None = 0.6) -> SuiteEvidence:
    figure = Figure(
        value=ratio, kind=Kind.INTERPRETED, missing="" if ratio is not None else "no CUDA code was executed"
    )
    return SuiteEvidence(suite=Suite.CUDA_EQUIVALENCE, outcome=Outcome.MEASURED, figures={"cuda_equivalence": figure})


def lowered_cell(*evidence: SuiteEvidence, torch: str = "2.15.0", cache: str = "fixed_size") -> CellResult:
    request = cell_request(
        torch=torch, build="cu132", cache=cache, mode="reduce-overhead", device=Device.CPU, suites=WITHOUT_GPU
    ).model_copy(update={"lower_only": True})
    return CellResult(
        cell=request.cell,
        request=request,
        provenance=provenance(request, gpu=None),
        evidence={one.suite: one for one in evidence or (lowered_evidence(), executed_evidence())},
    )


def judged(result: CellResult) -> JudgedCell:
    return judge(result, GATES)


def test_a_row_that_was_only_compiled_is_inconclusive_and_names_speed_memory_and_replay() -> None:
    row = judged(lowered_cell())
    assert row.verdict is Status.INCONCLUSIVE
    assert row.result.request.speaks_of is Device.CUDA
    for told in ("speed, memory and the replay of CUDA graphs", "sm_80, sm_90 and sm_120", "3 of 3", "right"):
        assert told in row.reason
    assert {one.status for one in row.gates.values()} <= {Status.INCONCLUSIVE, Status.NOT_APPLICABLE}


@pytest.mark.parametrize("figure", [*GOOD_FIGURES])
def test_not_even_perfect_figures_let_such_a_row_pass(figure: Gate) -> None:
    """A cell without a GPU that carries every figure of a passing one, under whatever kind, still decides nothing."""
    faked = [
        SuiteEvidence(
            suite=suite,
            outcome=Outcome.MEASURED,
            figures={
                gate.figure: Figure(value=value) for gate, value in GOOD_FIGURES.items() if gate.rule.suite is suite
            },
        )
        for suite in dict.fromkeys(gate.rule.suite for gate in GOOD_FIGURES)
    ]
    row = judged(lowered_cell(lowered_evidence(), *faked))
    assert row.gates[figure].status is not Status.PASS
    assert row.verdict is Status.INCONCLUSIVE


def test_a_graph_that_is_not_taken_is_told_with_its_reason_and_line() -> None:
    known = known_without_gpu(lowered_cell(lowered_evidence(kept_out=2)))
    assert known is not None
    assert "1 of 3" in known.text
    assert "mutated inputs (2 instances) (toto/model/util.py:119)" in known.text


def test_what_the_host_does_between_the_graphs_is_told_with_its_line() -> None:
    """Each of them may be taken whole, and the forecast wait for the GPU in every step."""
    breaks = {"a loop (my_cache.py:3 in reset)": 1, "Tensor.item() (my_cache.py:12 in forward)": 9}
    details = {**lowered_evidence().details, "graph_breaks": breaks}
    known = known_without_gpu(lowered_cell(lowered_evidence(details=details)))
    assert known is not None
    assert (
        "3 of 3 graphs whole (predicted), with 10 graph breaks between them, most of them Tensor.item()" in known.text
    )
    assert known.text.count("my_cache.py:12 in forward") == 1


def test_what_torch_could_not_compile_is_told_apart_from_what_cuda_graphs_refuse() -> None:
    rows = [
        {
            "architecture": "sm_90",
            "graphs": 5,
            "lowered": 3,
            "captured_whole": 3,
            "errors": {"PTXASError: no such instruction": 2},
        }
    ]
    figure = Figure(value=None, kind=Kind.PREDICTED, missing="2 of 5 graphs could not be compiled")
    lowered = lowered_evidence(figures={"cudagraphs": figure}, details={"architectures": rows})
    known = known_without_gpu(lowered_cell(lowered))
    assert known is not None
    assert "would take 3 of 3 graphs whole (predicted), 2 more could not be compiled: PTXASError: no such" in known.text
    assert "the rest not" not in known.text


def test_a_forecast_whose_graphs_ran_on_the_cpu_in_part_is_not_called_right() -> None:
    whole = executed_evidence()
    executed = Figure(value=3, kind=Kind.INTERPRETED, method="of 5 graphs")
    details = {"not_lowered": ["PTXASError: no such instruction"]}
    partly = whole.model_copy(update={"figures": {**whole.figures, "graphs_executed": executed}, "details": details})
    known = known_without_gpu(lowered_cell(lowered_evidence(), partly))
    assert known is not None
    assert known.right is None
    assert known.not_measured.startswith("the values of its forecasts")
    told = "executed in part in Triton's interpreter, 3 of 5 graphs, the others on the CPU (PTXASError: no such"
    assert told in known.text
    wrong = partly.model_copy(update={"figures": executed_evidence(40.0).figures})
    assert (known_without_gpu(lowered_cell(lowered_evidence(), wrong)) or known).right is False


def test_wrong_numbers_are_told_as_wrong() -> None:
    known = known_without_gpu(lowered_cell(lowered_evidence(), executed_evidence(40.0)))
    assert known is not None
    assert known.right is False
    assert "WRONG" in known.text


def test_what_could_not_be_compiled_is_told_in_torchs_words() -> None:
    failure = Failure(kind="exception", message="Unsupported: Tensor.item (toto_compat/model/step.py:12)")
    known = known_without_gpu(lowered_cell(lowered_evidence(outcome=Outcome.MODEL_FAILED, failure=failure)))
    assert known is not None
    assert "not compiled for CUDA: Unsupported: Tensor.item (toto_compat/model/step.py:12)" in known.text


def test_a_cell_that_did_not_try_says_nothing() -> None:
    request = cell_request()
    cell = CellResult(cell=request.cell, request=request, provenance=provenance(request), evidence={})
    assert known_without_gpu(cell) is None
    assert best_known([cell]) is None


def test_the_best_known_is_right_then_whole_then_new() -> None:
    wrong = lowered_cell(lowered_evidence(), executed_evidence(40.0), torch="2.16.0")
    split = lowered_cell(lowered_evidence(kept_out=1), torch="2.16.0", cache="list_index")
    old, new = lowered_cell(torch="2.9.0"), lowered_cell(torch="2.15.0")
    found = best_known([wrong, split, old, new])
    assert found is not None and found[0] is new


@pytest.mark.parametrize(
    "evidence",
    [
        (lowered_evidence(),),
        (lowered_evidence(), executed_evidence(None)),
        (lowered_evidence(outcome=Outcome.NOT_RUN),),
        (),
    ],
    ids=["only compiled", "executed without a figure", "not compiled", "nothing"],
)
def test_what_was_not_executed_is_not_known_to_be_right_and_that_is_named(evidence: tuple[SuiteEvidence, ...]) -> None:
    cell = lowered_cell().model_copy(update={"evidence": {one.suite: one for one in evidence}})
    row = judged(cell)
    assert row.verdict is Status.INCONCLUSIVE
    assert "the values of its forecasts, speed, memory and the replay of CUDA graphs are not measured" in row.reason
    sentence = decide([row], DecisionRules()).devices[Device.CUDA].sentence
    assert "would add" not in sentence or "would add the values of its forecasts, speed" in sentence


def test_code_that_was_executed_and_is_wrong_is_named_and_still_no_verdict() -> None:
    row = judged(lowered_cell(lowered_evidence(), executed_evidence(float("nan"))))
    assert row.verdict is Status.INCONCLUSIVE
    assert "WRONG" in row.reason
    assert "values of its forecasts" not in row.reason


@pytest.mark.parametrize("finished", [True, False])
def test_a_run_that_was_stopped_while_it_compiled_for_cuda_says_nothing_of_the_cpu(
    finished: bool, tmp_path: Path
) -> None:
    """And its next command is the one that goes on."""
    cells = [lowered_cell(lowered_evidence(details={}), executed_evidence())] if finished else []
    missing = CellName("torch-2.9.0-cu128/fixed_size/reduce-overhead")
    store_run(tmp_path, "stopped", cells, gates=GATES, device="cpu")
    info = load_run(tmp_path / "stopped").info
    named = {"cells": (*info.cells, missing), "command": ("toto-compat", "matrix", "--lower-only")}
    write_run_info(tmp_path / "stopped", info.model_copy(update=named))
    decision = judge_run(load_run(tmp_path / "stopped")).decision
    assert set(decision.devices) == {Device.CUDA}
    on_cuda = decision.devices[Device.CUDA]
    assert on_cuda.next_commands[0] == f"toto-compat matrix '{missing}' --profile quick --lower-only"
    assert ("was compiled for" in on_cuda.sentence) is finished


def test_the_decision_says_what_is_known_and_what_an_hour_on_a_gpu_would_add() -> None:
    decision = decide([judged(lowered_cell())], DecisionRules()).devices[Device.CUDA]
    assert decision.answer is Answer.NOT_ENOUGH_EVIDENCE
    for told in (
        "nothing was measured on CUDA, but fixed_size/reduce-overhead on torch 2.15.0 was compiled for",
        "executed in Triton's interpreter and right",
        "an hour on a GPU would add speed, memory and the replay of CUDA graphs",
        "run nox -s matrix -- --device cuda on a machine with an NVIDIA GPU",
    ):
        assert told in decision.sentence
