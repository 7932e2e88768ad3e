"""docs/claims.md says what the evidence says, and nothing is confirmed or refuted by what cannot decide it."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from toto_compat.contract.gate_limit import GateLimit
from toto_compat.contract.request import Device
from toto_compat.contract.result import Figure, Kind, Outcome, SuiteEvidence
from toto_compat.contract.suites import Suite
from toto_compat.errors import SelectionError
from toto_compat.evidence.store import Run, StoredCell, load_run
from toto_compat.matrix.gates import Gate
from toto_compat.repro.claims import Claim, Finding, audit, claims_command, claims_markdown, read_claims

ROOT = Path(__file__).parents[2]
REFERENCE = load_run(ROOT / "results" / "reference" / "cpu")
RECOMPILES = Claim(
    document="d",
    said="about 8",
    on="any",
    cache="compile_friendly",
    suite=Suite.RECOMPILE,
    figure="recompiles_total",
    limit=GateLimit(max=12),
)
TIME = RECOMPILES.model_copy(
    update={"on": "cuda", "suite": Suite.SPEED, "figure": "p50_ms", "limit": GateLimit(max=240)}
)


def stored(**changes: Any) -> StoredCell:
    (cell,) = [one for one in REFERENCE.cells if one.cell == "torch-2.13.0-cpu/compile_friendly/default"]
    return cell.model_copy(update=changes)


def with_figure(suite: Suite, name: str, figure: Figure, *, gpu: str | None = None) -> StoredCell:
    cell = stored(evidence={suite: SuiteEvidence(suite=suite, outcome=Outcome.MEASURED, figures={name: figure})})
    device = Device.CUDA if gpu else Device.CPU
    return cell.model_copy(
        update={
            "request": cell.request.model_copy(update={"device": device}),
            "provenance": cell.provenance.model_copy(update={"gpu": gpu}),
        }
    )


def finding(claim: Claim, *cells: StoredCell) -> Finding:
    (audited,) = audit([claim], {"run": Run(ROOT, REFERENCE.info, cells)})
    return audited.finding


def test_the_page_is_what_the_command_prints_from_the_committed_evidence() -> None:
    printed = CliRunner().invoke(claims_command, ["--results", str(ROOT / "results")])
    assert printed.exit_code == 0, printed.output
    again = "write it anew: toto-compat claims > docs/claims.md"
    assert (ROOT / "docs" / "claims.md").read_text(encoding="utf-8") == printed.output, again


def test_every_claim_that_names_a_cell_names_the_figure_of_a_suite_that_measures_it() -> None:
    figures: dict[Suite, set[str]] = {suite: set() for suite in Suite}
    for info in sorted((ROOT / "results" / "reference").glob("*/run.json")):
        for cell in load_run(info.parent).cells:
            for suite, evidence in cell.evidence.items():
                figures[suite] |= set(evidence.figures)
    for claim in read_claims():
        assert claim.suite is None or claim.figure in figures[claim.suite], claim.said


def test_a_cpu_decides_what_dynamo_does_and_nothing_else() -> None:
    recompiles = with_figure(Suite.RECOMPILE, "recompiles_total", Figure(value=54))
    quick = with_figure(Suite.SPEED, "p50_ms", Figure(value=40, unit="ms"))
    assert finding(RECOMPILES, recompiles) is Finding.REFUTED
    assert finding(TIME, quick) is Finding.WAITING


def test_a_gpu_decides_both_ways() -> None:
    for value, expected in ((40.0, Finding.CONFIRMED), (400.0, Finding.REFUTED)):
        cell = with_figure(Suite.SPEED, "p50_ms", Figure(value=value, unit="ms"), gpu="NVIDIA RTX 5090")
        assert finding(TIME, cell) is expected


@pytest.mark.parametrize("kind", [Kind.PREDICTED, Kind.INTERPRETED, Kind.REPORTED])
def test_what_was_not_measured_confirms_nothing(kind: Kind) -> None:
    cell = with_figure(Suite.SPEED, "p50_ms", Figure(value=40, unit="ms", kind=kind), gpu="NVIDIA RTX 5090")
    assert finding(TIME, cell) is Finding.WAITING


def test_a_cell_that_asked_for_cuda_and_saw_no_gpu_confirms_nothing() -> None:
    cell = with_figure(Suite.SPEED, "p50_ms", Figure(value=40, unit="ms"), gpu="x")
    blind = cell.model_copy(update={"provenance": cell.provenance.model_copy(update={"gpu": None})})
    assert finding(TIME, blind) is Finding.WAITING


def test_a_claim_about_a_series_is_decided_by_that_series_alone() -> None:
    own = TIME.model_copy(update={"symbol": "BTCUSD", "column": "mae_compiled", "limit": GateLimit(max=110000)})
    cell = with_figure(Suite.SPEED, "p50_ms", Figure(value=40, unit="ms"), gpu="NVIDIA RTX 5090")
    assert finding(own, cell) is Finding.WAITING
    for symbol, expected in (("ETHUSD", Finding.WAITING), ("BTCUSD", Finding.CONFIRMED)):
        rows = [{"symbol": symbol, "mae_compiled": 109453.0}]
        evidence = SuiteEvidence(suite=Suite.SYMBOLS, outcome=Outcome.MEASURED, details={"symbols": rows})
        assert finding(own, cell.model_copy(update={"evidence": {Suite.SYMBOLS: evidence}})) is expected


def test_another_row_says_nothing_and_the_command_for_the_missing_one_is_told() -> None:
    scalar = RECOMPILES.model_copy(update={"settings": "production"})
    (audited,) = audit([scalar], {"run": Run(ROOT, REFERENCE.info, (stored(),))})
    assert audited.finding is Finding.NO_EVIDENCE
    assert (
        audited.said_by == "run `nox -s matrix -- 'torch-2.13.0-cpu/compile_friendly/default+production' --device cpu`"
    )


def test_a_row_that_passes_on_a_cpu_does_not_confirm_a_verdict_about_a_gpu() -> None:
    passed = Claim(document="d", said="11 of 11", on="any", cache="fixed_size", verdict="PASS")
    assert finding(passed, *REFERENCE.cells) is Finding.WAITING
    assert finding(passed.model_copy(update={"cache": "compile_friendly"}), *REFERENCE.cells) is Finding.REFUTED


def test_a_green_verdict_is_refuted_by_its_own_figures_if_they_break_a_limit() -> None:
    green = Claim(document="d", said="no major issues", on="any", own_figures={Gate.SPEEDUP: 0.03})
    assert finding(green) is Finding.REFUTED
    assert finding(green.model_copy(update={"own_figures": {Gate.SPEEDUP: 4.0}})) is Finding.CONFIRMED


def test_a_claim_that_nothing_could_decide_is_a_mistake_in_the_file() -> None:
    with pytest.raises(ValueError, match="held against a figure with a limit"):
        Claim(document="d", said="fast", on="cuda", cache="fixed_size")


def test_text_of_evidence_cannot_break_the_table() -> None:
    hostile = RECOMPILES.model_copy(update={"said": "a | b\n<script>"})
    page = claims_markdown(audit([hostile], {"run": Run(ROOT, REFERENCE.info, (stored(),))}))
    assert "a \\| b &lt;script>" in page


def test_without_a_reference_run_the_command_says_so(tmp_path: Path) -> None:
    run = CliRunner().invoke(claims_command, ["--results", str(tmp_path)])
    assert isinstance(run.exception, SelectionError)


def test_graphs_compiled_for_cuda_without_a_gpu_say_what_they_predict_and_decide_nothing() -> None:
    (claim,) = (one for one in read_claims() if one.said == "CUDA graphs are skipped with scalar capture on top")
    (audited,) = audit([claim], {"refused": load_run(ROOT / "results/reference/cuda-refused")})
    assert audited.finding is Finding.WAITING
    assert audited.seen_on_cpu.endswith("(refused): cudagraphs 73 predicted")
