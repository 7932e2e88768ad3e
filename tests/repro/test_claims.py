"""docs/claims.md says what the evidence says, and nothing is confirmed or refuted by what cannot decide it."""

from collections.abc import Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.verdict.sample_cells import good_result, production_incident, with_figures
from tests.verdict.stored_runs import info_of_run
from tests.verdict.stored_runs import stored as stored_cell
from toto_compat.contract.gate_limit import GateLimit
from toto_compat.contract.request import CsvSeries, Device, SymbolSeries
from toto_compat.contract.result import CellResult, Figure, Kind, Outcome, SuiteEvidence
from toto_compat.contract.suites import Suite
from toto_compat.errors import SelectionError
from toto_compat.evidence.store import Run, StoredCell, load_run
from toto_compat.matrix.gates import Gate
from toto_compat.repro.claims import (
    AuditedClaim,
    Claim,
    ClaimsFile,
    Finding,
    audit,
    claims_command,
    claims_markdown,
    claims_page,
    read_claims,
)

ROOT = Path(__file__).parents[2]
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
    update={
        "on": "cuda",
        "suite": Suite.SPEED,
        "figure": "p50_ms",
        "limit": GateLimit(max=240),
        "workload": "production-float16",
    }
)


def stored(result: CellResult, *, when: str = "2026-11-16T10:00:00Z", **of_request: Any) -> StoredCell:
    request = result.request.model_copy(update=of_request)
    return stored_cell(result.model_copy(update={"request": request}), when)


def with_figure(
    suite: Suite,
    name: str,
    figure: Figure,
    *,
    gpu: bool = False,
    torch: str = "2.9.0",
    workload: str = "production-float16",
    when: str = "2026-11-16T10:00:00Z",
) -> StoredCell:
    device = Device.CUDA if gpu else Device.CPU
    result = good_result(torch=torch, build="cu128", cache="compile_friendly", device=device)
    evidence = {suite: SuiteEvidence(suite=suite, outcome=Outcome.MEASURED, figures={name: figure})}
    return stored(result.model_copy(update={"evidence": evidence}), when=when, workload_name=workload)


def audited(claim: Claim, cells: Sequence[StoredCell], *others: Sequence[StoredCell]) -> AuditedClaim:
    runs = {
        f"run {number}": Run(ROOT, info_of_run("run", run), tuple(run)) for number, run in enumerate((cells, *others))
    }
    (one,) = audit(ClaimsFile(release="2.9.0", claims=(claim,)), runs)
    return one


def finding(claim: Claim, *cells: StoredCell) -> Finding:
    return audited(claim, cells).finding


def test_a_count_of_a_cell_that_left_shapes_out_says_so() -> None:
    page = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")
    counted = next(line for line in page.splitlines() if "recompile warnings before the fix" in line)
    assert "of announced shapes alone; recompiles_total" in counted


def test_the_page_is_what_the_command_prints_from_the_committed_evidence() -> None:
    printed = CliRunner().invoke(claims_command, ["--results", str(ROOT / "results")])
    assert printed.exit_code == 0, printed.output
    again = "write it anew: toto-compat claims > docs/claims.md"
    assert (ROOT / "docs" / "claims.md").read_text(encoding="utf-8") == printed.output, again
    assert claims_page(ROOT / "results") == printed.output  # for whoever writes the evidence anew
    one = CliRunner().invoke(claims_command, ["reference/cuda-refused", "--results", str(ROOT / "results")])
    assert one.output == claims_page(ROOT / "results", ["reference/cuda-refused"]) != printed.output


def test_every_claim_that_names_a_cell_names_the_figure_of_a_suite_that_measures_it() -> None:
    figures: dict[Suite, set[str]] = {suite: set() for suite in Suite}
    for info in sorted((ROOT / "results" / "reference").glob("*/run.json")):
        for cell in load_run(info.parent).cells:
            for suite, evidence in cell.evidence.items():
                figures[suite] |= set(evidence.figures)
    for claim in read_claims().claims:
        for figure in filter(None, (claim.figure, claim.beside)):
            assert claim.suite is not None and figure in figures[claim.suite], claim.said


def test_a_cpu_decides_what_dynamo_does_and_nothing_else() -> None:
    recompiles = with_figure(Suite.RECOMPILE, "recompiles_total", Figure(value=54))
    quick = with_figure(Suite.SPEED, "p50_ms", Figure(value=40, unit="ms"))
    assert finding(RECOMPILES, recompiles) is Finding.REFUTED
    assert finding(TIME, quick) is Finding.WAITING


def test_a_gpu_decides_both_ways() -> None:
    for value, expected in ((40.0, Finding.CONFIRMED), (400.0, Finding.REFUTED)):
        cell = with_figure(Suite.SPEED, "p50_ms", Figure(value=value, unit="ms"), gpu=True)
        assert finding(TIME, cell) is expected


@pytest.mark.parametrize("kind", [Kind.PREDICTED, Kind.INTERPRETED, Kind.REPORTED])
def test_what_was_not_measured_confirms_nothing(kind: Kind) -> None:
    cell = with_figure(Suite.SPEED, "p50_ms", Figure(value=40, unit="ms", kind=kind), gpu=True)
    assert finding(TIME, cell) is Finding.WAITING


def test_a_cell_that_asked_for_cuda_and_saw_no_gpu_confirms_nothing() -> None:
    cell = with_figure(Suite.SPEED, "p50_ms", Figure(value=40, unit="ms"), gpu=True)
    blind = cell.model_copy(update={"provenance": cell.provenance.model_copy(update={"gpu": None})})
    assert finding(TIME, blind) is Finding.WAITING


@pytest.mark.parametrize("workload", ["quick", "production", "production-bfloat16", ""])
def test_a_time_of_another_forecast_than_productions_says_nothing(workload: str) -> None:
    quick = with_figure(Suite.SPEED, "p50_ms", Figure(value=4, unit="ms"), gpu=True, workload=workload)
    assert finding(TIME, quick) is Finding.WAITING


def test_every_claim_about_a_time_a_size_or_an_error_names_productions_forecast() -> None:
    for claim in read_claims().claims:
        of_production = (Suite.SPEED, Suite.MEMORY, Suite.EQUIVALENCE, Suite.DETERMINISM)
        if claim.suite in of_production or claim.figure == "cold_compile_s":
            assert claim.workload == "production-float16", claim.said
        assert bool(claim.symbol) is ("BTCUSD" in claim.said)


SERIES = CsvSeries(path="x.csv", time_column="time", value_columns=("close",))


def test_a_claim_about_a_series_is_decided_by_a_cell_with_that_series_alone() -> None:
    slow = with_figure(Suite.SPEED, "p50_ms", Figure(value=400, unit="ms"), gpu=True)
    own = TIME.model_copy(update={"symbol": "BTCUSD"})
    for symbol, expected in (("", Finding.WAITING), ("ETHUSD", Finding.WAITING), ("BTCUSD", Finding.REFUTED)):
        symbols = (SymbolSeries(name=symbol, series=SERIES),) if symbol else ()
        request = slow.request.model_copy(update={"symbols": symbols})
        assert finding(own, slow.model_copy(update={"request": request})) is expected


@pytest.mark.parametrize(
    ("symbol", "checkpoint", "expected"),
    [
        ("BTCUSD", "Datadog/Toto-Open-Base-1.0@1", Finding.CONFIRMED),
        ("BTCUSD", "", Finding.WAITING),  # weights drawn from a seed
        ("ETHUSD", "Datadog/Toto-Open-Base-1.0@1", Finding.WAITING),
    ],
)
def test_the_error_of_a_forecast_of_a_series_takes_the_weights_as_well(
    symbol: str, checkpoint: str, expected: Finding
) -> None:
    own = TIME.model_copy(update={"symbol": "BTCUSD", "column": "mae_compiled", "limit": GateLimit(max=110000)})
    cell = with_figure(Suite.SPEED, "p50_ms", Figure(value=40, unit="ms"), gpu=True)
    rows = [{"symbol": symbol, "mae_compiled": 109453.0}]
    evidence = SuiteEvidence(suite=Suite.SYMBOLS, outcome=Outcome.MEASURED, details={"symbols": rows})
    symbols = (SymbolSeries(name=symbol, series=SERIES),)
    changed = {
        "request": cell.request.model_copy(update={"symbols": symbols}),
        "provenance": cell.provenance.model_copy(update={"checkpoint": checkpoint}),
        "evidence": {Suite.SYMBOLS: evidence},
    }
    assert finding(own, cell.model_copy(update=changed)) is expected


def test_the_documents_release_decides_whenever_the_cells_were_run_and_the_newest_where_there_is_none() -> None:
    def counted(torch: str, value: float, when: str) -> StoredCell:
        figure = Figure(value=value)
        return with_figure(Suite.RECOMPILE, "recompiles_total", figure, torch=torch, when=when, workload="quick")

    cells = [
        counted("2.3.1", 0, "2026-11-20T10:00:00Z"),
        counted("2.9.0", 54, "2026-11-16T10:00:00Z"),
        counted("2.13.0", 3, "2026-11-21T10:00:00Z"),
        counted("2.10.0", 99, "2026-11-22T10:00:00Z"),
    ]
    for order in permutations(cells):
        found = audited(RECOMPILES, order[:2], order[2:])
        assert found.finding is Finding.REFUTED and "recompiles_total 54" in found.said_by
    for order in permutations([cells[0], *cells[2:]]):
        found = audited(RECOMPILES, order)
        assert found.finding is Finding.CONFIRMED and "recompiles_total 3" in found.said_by


def test_what_an_older_version_of_a_suite_counted_gives_way_to_what_todays_counts() -> None:
    old, new = (
        with_figure(Suite.RECOMPILE, "recompiles_total", Figure(value=value), torch=torch)
        for value, torch in ((2, "2.9.0"), (54, "2.13.0"))
    )
    counted_today = new.evidence[Suite.RECOMPILE].model_copy(update={"version": 5})
    assert finding(RECOMPILES, old, new.model_copy(update={"evidence": {Suite.RECOMPILE: counted_today}})) is (
        Finding.REFUTED
    )
    assert finding(RECOMPILES, old) is Finding.CONFIRMED


def test_of_one_release_the_larger_model_decides_and_another_release_not_in_its_place() -> None:
    tiny = with_figure(Suite.RECOMPILE, "recompiles_total", Figure(value=54))
    base = tiny.model_copy(
        update={
            "request": tiny.request.model_copy(
                update={"workload": tiny.request.workload.model_copy(update={"model": "base"})}
            ),
        }
    )
    missing = Figure(value=None, missing="not measured")
    base = base.model_copy(update={"evidence": with_figure(Suite.RECOMPILE, "recompiles_total", missing).evidence})
    older = with_figure(Suite.RECOMPILE, "recompiles_total", Figure(value=1), torch="2.8.0")
    assert finding(RECOMPILES, base, tiny, older) is Finding.REFUTED
    assert finding(RECOMPILES, base, older) is Finding.WAITING


def test_a_recompile_warning_is_a_limit_that_was_hit_and_the_recompiles_stand_beside_it() -> None:
    before, after = (one for one in read_claims().claims if "recompile warnings" in one.said)
    for claim, cache, hits, expected in (
        (before, "list_index", 2, Finding.REFUTED),
        (before, "list_index", 8, Finding.CONFIRMED),
        (after, "compile_friendly", 2, Finding.CONFIRMED),
        (after, "compile_friendly", 3, Finding.REFUTED),
    ):
        figures = {Gate.RECOMPILE_LIMIT: float(hits), Gate.RECOMPILES_TOTAL: 54.0}
        found = audited(claim, [stored(with_figures(good_result(torch="2.9.0", cache=cache), figures))])
        assert found.finding is expected
        assert f"recompile_limit {hits}, read as" in found.said_by and "; recompiles_total 54" in found.said_by


def test_another_row_says_nothing_and_the_command_for_the_missing_one_is_told() -> None:
    scalar = RECOMPILES.model_copy(update={"settings": "production"})
    found = audited(scalar, [stored(good_result(cache="compile_friendly"))])
    assert found.finding is Finding.NO_EVIDENCE
    assert found.said_by == "run `nox -s matrix -- 'torch-2.13.0-cpu/compile_friendly/default+production' --device cpu`"


def test_a_row_that_passes_on_a_cpu_does_not_confirm_a_verdict_about_a_gpu() -> None:
    passed = Claim(document="d", said="11 of 11", on="any", cache="fixed_size", verdict="PASS")
    green, on_gpu = (
        stored(good_result(torch="2.9.0", build="cu128", device=device)) for device in (Device.CPU, Device.CUDA)
    )
    # the release of the documents decides, and an older one that dynamo gave up on does not in its place
    old = stored(with_figures(good_result(torch="2.4.1"), {Gate.RECOMPILE_LIMIT: 2.0}))
    assert finding(passed, green, old) is Finding.WAITING
    assert finding(passed, old) is Finding.REFUTED
    assert finding(passed, green, on_gpu) is Finding.CONFIRMED
    red = stored(production_incident(torch="2.9.0", build="cu128", device=Device.CPU))
    assert finding(passed.model_copy(update={"cache": "list_index"}), red) is Finding.REFUTED


def test_a_green_verdict_is_refuted_by_its_own_figures_if_they_break_a_limit() -> None:
    green = Claim(document="d", said="no major issues", on="any", own_figures={Gate.SPEEDUP: 0.03})
    assert finding(green) is Finding.REFUTED
    assert finding(green.model_copy(update={"own_figures": {Gate.SPEEDUP: 4.0}})) is Finding.CONFIRMED


def test_a_claim_that_nothing_could_decide_is_a_mistake_in_the_file() -> None:
    with pytest.raises(ValueError, match="held against a figure with a limit"):
        Claim(document="d", said="fast", on="cuda", cache="fixed_size")


def test_text_of_evidence_cannot_break_the_table() -> None:
    hostile = RECOMPILES.model_copy(update={"said": "a | b\n<script>"})
    page = claims_markdown([audited(hostile, [stored(good_result(cache="compile_friendly"))])], "2.9.0")
    assert "a \\| b &lt;script>" in page


def test_without_a_reference_run_the_command_says_so(tmp_path: Path) -> None:
    run = CliRunner().invoke(claims_command, ["--results", str(tmp_path)])
    assert isinstance(run.exception, SelectionError)


def test_graphs_compiled_for_cuda_without_a_gpu_say_what_they_predict_and_decide_nothing() -> None:
    (claim,) = (one for one in read_claims().claims if one.said == "CUDA graphs are skipped with scalar capture on top")
    run = load_run(ROOT / "results/reference/cuda-refused")
    (found,) = audit(ClaimsFile(release="2.9.0", claims=(claim,)), {"refused": run})
    assert found.finding is Finding.WAITING
    assert found.seen_on_cpu.startswith("`torch-2.9.0-cu128/")
    assert found.seen_on_cpu.endswith("(refused): cudagraphs 73 predicted")
