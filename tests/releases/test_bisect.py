"""bisect from stored evidence, and through releases that do not install: what is asked, seen, skipped and told."""

import json
import os
from pathlib import Path
from unittest.mock import ANY

import pytest
from click.testing import CliRunner, Result

from tests.releases.local_index import LocalIndex
from tests.verdict.sample_cells import cell_request, good_result, with_figures
from tests.verdict.stored_runs import store_run
from toto_compat.cli import cli
from toto_compat.contract.cell_name import CellName
from toto_compat.contract.gate_limit import GateLimit
from toto_compat.contract.request import Device
from toto_compat.contract.result import CellResult
from toto_compat.contract.suites import Suite
from toto_compat.errors import ExitCode, SelectionError
from toto_compat.evidence.store import can_be_reused
from toto_compat.matrix.demands import demands_of
from toto_compat.matrix.gates import Gate
from toto_compat.matrix.load import load_matrix
from toto_compat.matrix.request import matrix_request
from toto_compat.releases.bisect import PROFILE, narrowed

REPOSITORY = Path(__file__).parents[2]
MATRIX = load_matrix(REPOSITORY / "matrix.yaml")
BUILDS = {one.torch: one.build for one in MATRIX.environments.values()}
REFERENCE = REPOSITORY / "results" / "reference"
RELEASES = ("2.4.1", "2.5.1", "2.6.0", "2.7.0", "2.8.0", "2.9.0")


def cell(torch: str, *, total: float = 0.0, breaks: float = 0.0, reasons: dict[str, int] | None = None) -> CellResult:
    """A finished cell of the upstream cache as the current suites leave it, of the workload of quick."""
    result = good_result(torch=torch, build=BUILDS[torch], cache="upstream", device=Device.CPU)
    result = with_figures(result, {Gate.RECOMPILES_TOTAL: total, Gate.GRAPH_BREAKS: breaks})
    listed = [
        {"kind": "recompile", "function": "forward", "reason": one, "count": count}
        for one, count in (reasons or {}).items()
    ]
    evidence = {
        suite: found.model_copy(update={"version": suite.rule.version, "details": {**found.details, "reasons": listed}})
        for suite, found in result.evidence.items()
    }
    asked = {"workload": MATRIX.workloads["quick"], "workload_name": "quick"}
    environment = MATRIX.environments[f"torch-{torch}-{BUILDS[torch]}"]
    request = result.request.model_copy(update={**asked, "environment": environment})
    return result.model_copy(update={"evidence": evidence, "request": request})


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOTO_COMPAT_CACHE", str(tmp_path / "cache"))
    # evidence that is not found here must not become gigabytes that are installed
    for name, value in {"CONFIG_FILE": os.devnull, "INDEX_URL": "http://127.0.0.1:9/none", "RETRIES": "0"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    return tmp_path / "results"


def bisect(results: Path, *words: str, matrix: Path = REPOSITORY / "matrix.yaml") -> Result:
    options = ["--device", "cpu", "--results", str(results), "--matrix", str(matrix)]
    return CliRunner().invoke(cli, ["bisect", *words, *options])


def stored(results: Path, *words: str) -> dict[str, object]:
    result = bisect(results, *words, "--stored-only", "--json")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    answer: dict[str, object] = json.loads(result.stdout)
    return answer


def test_the_release_at_which_a_gate_flips_is_found_in_stored_runs(results: Path) -> None:
    for torch in RELEASES:
        store_run(results, f"reference/{torch}", [cell(torch, total=12.0 if torch >= "2.7" else 4.0)])
    answer = stored(results, "recompiles_total", "upstream/default", "--good", "2.4.1", "--bad", "2.9.0")
    assert answer["answer"] == {
        "kind": "Found", "before": "2.6.0", "after": "2.7.0", "skipped": [], "other_changes": []
    }  # fmt: skip
    assert answer["path"] == [], "everything was known: nothing had to be run"
    assert stored(results, "recompiles_total", "upstream/default", "--good", "2.6", "--bad", "2.9") == {
        **answer, "releases": ["2.6.0", "2.7.0", "2.8.0", "2.9.0"], "stored": ANY
    }  # fmt: skip


def test_a_figure_that_changes_below_or_above_its_limit_needs_any_change_or_another_limit(results: Path) -> None:
    for torch in RELEASES:
        store_run(results, f"reference/{torch}", [cell(torch, total={"2.4.1": 38.0}.get(torch, 47.0))])
    ends = ("recompiles_total", "upstream/default", "--good", "2.4.1", "--bad", "2.9.0")
    assert bisect(results, *ends, "--stored-only").exit_code == ExitCode.NOT_REPRODUCED, "it fails everywhere"
    assert stored(results, *ends, "--any-change")["answer"]["after"] == "2.5.1"  # type: ignore[index]
    assert stored(results, *ends, "--limit", "40")["answer"]["after"] == "2.5.1"  # type: ignore[index]
    assert bisect(results, *ends, "--stored-only", "--limit", "50").exit_code == ExitCode.NOT_REPRODUCED


def test_both_sides_and_what_changed_are_told(results: Path) -> None:
    store_run(results, "reference/a", [cell("2.4.1", total=38, breaks=25, reasons={"L['x'] == N": 5, "gone": 1})])
    store_run(results, "reference/b", [cell("2.5.1", total=47, breaks=30, reasons={"L['x'] == N": 9, "fresh": 2})])
    words = ("recompiles_total", "upstream/default", "--good", "2.4.1", "--bad", "2.5.1", "--any-change")
    text = bisect(results, *words, "--stored-only").stdout
    assert "changed with torch 2.5.1 from 38 to 47, 2.4.1 is the one before it" in text
    assert "2.4.1: recompiles_total 38 (reference/a)" in text and "2.5.1: recompiles_total 47 (reference/b)" in text
    assert "graph breaks 25 before, 30 now" in text
    assert "recompile in forward: fresh: 0 before, 2 now" in text
    assert "recompile in forward: gone: 1 before, 0 now" in text


def test_releases_without_evidence_are_named_and_a_row_that_changes_twice_is_called_so(results: Path) -> None:
    for torch, total in {"2.4.1": 4, "2.6.0": 12, "2.8.0": 3}.items():
        store_run(results, f"reference/{torch}", [cell(torch, total=total)])
    text = bisect(
        results, "recompiles_total", "upstream/default", "--good", "2.4.1", "--bad", "2.9.0", "--stored-only"
    ).stdout
    assert (
        "changed between torch 2.4.1 and 2.6.0 from PASS to FAIL; 2.5.1 could not be looked at and may be the one"
        in text
    )
    assert "not the only change: also between 2.6.0 and 2.8.0 from FAIL to PASS" in text


def test_the_committed_runs_name_the_release_at_which_upstreams_counts_change(results: Path) -> None:
    """2.5 compiles once for all layers what 2.4 compiled for each: inline_inbuilt_nn_modules."""
    results.mkdir()
    (results / "reference").symlink_to(REFERENCE)
    words = ("recompiles_total", "upstream/default", "--good", "2.4.1", "--bad", "2.6.0", "--any-change")
    text = bisect(results, *words, "--stored-only").stdout
    assert "changed with torch 2.5.1 from " in text and "2.4.1 is the one before it" in text
    assert "releases that matrix.yaml lacks were not asked about" in text, "2.5.0 is one"
    assert "(reference/cpu)" in text and "path: 0 of 3 releases were run" in text
    assert "dynamo.inline_inbuilt_nn_modules: False -> True" in text


@pytest.mark.parametrize("difference", ["suite version", "workload", "device", "pins"])
def test_evidence_of_another_question_is_not_taken(results: Path, difference: str) -> None:
    other = cell("2.5.1", total=99)
    match difference:
        case "suite version":
            old = other.evidence[Suite.RECOMPILE].model_copy(update={"version": 1})
            other = other.model_copy(update={"evidence": {**other.evidence, Suite.RECOMPILE: old}})
        case "workload":
            change = {"workload": MATRIX.workloads["smoke"]}
            other = other.model_copy(update={"request": other.request.model_copy(update=change)})
        case "pins":
            environment = other.request.environment.model_copy(update={"pins": {"numpy": "2.2.0"}})
            other = other.model_copy(update={"request": other.request.model_copy(update={"environment": environment})})
        case "device":
            change = {"device": Device.CUDA}  # type: ignore[dict-item]
            other = other.model_copy(update={"request": other.request.model_copy(update=change)})
    store_run(results, "reference/a", [cell("2.4.1")])
    store_run(results, "reference/b", [other])
    answer = stored(results, "recompiles_total", "upstream/default", "--good", "2.4.1", "--bad", "2.5.1")
    assert [one["torch"] for one in answer["stored"]] == ["2.4.1"]  # type: ignore[attr-defined]


def test_a_gate_that_was_not_decided_is_skipped_and_not_taken_for_good(results: Path) -> None:
    undecided = with_figures(cell("2.5.1"), {Gate.RECOMPILES_TOTAL: None})
    store_run(results, "reference/a", [cell("2.4.1")])
    store_run(results, "reference/b", [undecided])
    result = bisect(
        results, "recompiles_total", "upstream/default", "--good", "2.4.1", "--bad", "2.5.1", "--stored-only"
    )
    assert result.exit_code == ExitCode.NOT_REPRODUCED
    assert "fewer than two releases" in result.stdout


def cut(cell: CellResult, *, given_up: float, demanded: bool = True) -> CellResult:
    """The cell as it is where counting ended early: at a limit of the matrix, or since dynamo gave a function up."""
    counted = with_figures(cell, {Gate.RECOMPILE_LIMIT: given_up})
    evidence = counted.evidence[Suite.RECOMPILE].model_copy(update={"skipped": "series of other kinds: cannot PASS"})
    demands = demands_of({Gate.RECOMPILES_TOTAL: GateLimit(max=9)}, device=Device.CPU, mode="default")
    return counted.model_copy(
        update={
            "evidence": {**counted.evidence, Suite.RECOMPILE: evidence},
            "request": counted.request.model_copy(update={"demands": demands if demanded else ()}),
        }
    )


@pytest.mark.parametrize("question", [("--any-change",), ("--limit", "40")])
def test_a_cache_that_dynamo_gives_up_ends_early_on_every_release_and_is_compared_as_that(
    results: Path, question: tuple[str, ...]
) -> None:
    for torch in RELEASES:
        store_run(results, f"reference/{torch}", [cut(cell(torch, total=38 if torch == "2.4.1" else 47), given_up=4)])
    ends = ("recompiles_total", "upstream/default", "--good", "2.4.1", "--bad", "2.9.0")
    assert stored(results, *ends, *question)["answer"]["after"] == "2.5.1"  # type: ignore[index]


def test_what_was_counted_up_to_a_limit_of_the_matrix_is_no_answer_to_another_question(results: Path) -> None:
    """It would have gone on without that limit: 12 may be any number from 12 on."""
    store_run(results, "reference/a", [cell("2.4.1", total=38)])
    store_run(results, "reference/b", [cut(cell("2.5.1", total=12), given_up=0)])
    ends = ("recompiles_total", "upstream/default", "--good", "2.4.1", "--bad", "2.5.1")
    for question, answers in ((("--any-change",), 1), (("--limit", "40"), 1), (("--limit", "10"), 2)):
        seen = [one["torch"] for one in stored(results, *ends, *question)["stored"] if one["stored"]]  # type: ignore[attr-defined]
        assert seen == ["2.4.1", "2.5.1"][:answers], question


def test_a_look_stops_counting_at_no_limit_and_is_kept_as_it_is() -> None:
    matrix = narrowed(MATRIX, "quick", Gate.RECOMPILES_TOTAL)
    name = CellName("torch-2.4.1-cu121/upstream/default")
    assert matrix_request(MATRIX, REPOSITORY / "matrix.yaml", name, "quick", Device.CPU).demands
    assert matrix_request(matrix, REPOSITORY / "matrix.yaml", name, PROFILE, Device.CPU).demands == ()
    ended_by_itself = cut(cell("2.4.1", total=38), given_up=4, demanded=False)
    assert can_be_reused(ended_by_itself, ())
    assert not can_be_reused(cut(cell("2.4.1", total=12), given_up=0), ())


def test_releases_that_do_not_install_are_skipped_with_the_reason(results: Path, tmp_path: Path) -> None:
    text = (REPOSITORY / "matrix.yaml").read_text()
    # a Python that no machine has: the environment fails before anything is downloaded
    broken = text.replace(
        'torch: "2.5.1"\n    build: cu124\n    python: "3.11"', 'torch: "2.5.1"\n    build: cu124\n    python: "3.1"'
    )
    assert broken != text
    (tmp_path / "matrix.yaml").write_text(broken)
    store_run(results, "reference/a", [cell("2.4.1", total=1)])
    store_run(results, "reference/b", [cell("2.6.0", total=30)])
    words = ("recompiles_total", "upstream/default", "--good", "2.4.1", "--bad", "2.6.0")
    result = bisect(results, *words, matrix=tmp_path / "matrix.yaml")
    assert result.exit_code == ExitCode.OK, result.exception
    assert (
        "changed between torch 2.4.1 and 2.6.0 from PASS to FAIL; 2.5.1 could not be looked at and may be the one"
        in result.stdout
    )
    assert "2.5.1: skipped: it does not install: Python 3.1 is not on this machine" in result.stdout
    [record] = results.glob("bisects/*/bisect.json")
    assert json.loads(record.read_text())["path"][0]["skipped"] is True


def test_releases_of_the_index_that_the_matrix_lacks_are_looked_at_too(
    results: Path, index: LocalIndex, matrix_file: Path
) -> None:
    index.torch("2.5.0", cuda="12.4")
    index.torch("2.5.9", cuda="12.4", yanked="broken")
    before = matrix_file.read_bytes()
    store_run(results, "reference/a", [cell("2.4.1", total=1)])
    store_run(results, "reference/b", [cell("2.6.0", total=30)])
    words = ("recompiles_total", "upstream/default", "--good", "2.4.1", "--bad", "2.6.0", "--stored-only", "--json")
    found = json.loads(bisect(results, *words, "--all-releases", matrix=matrix_file).stdout)
    assert found["releases"] == ["2.4.1", "2.5.0", "2.5.1", "2.6.0"]
    assert found["answer"]["skipped"] == ["2.5.0", "2.5.1"]
    assert "matrix.yaml lacks" not in bisect(results, *words[:-1], "--all-releases", matrix=matrix_file).stdout
    assert matrix_file.read_bytes() == before


def test_only_the_suite_of_the_gate_is_run() -> None:
    profile = narrowed(MATRIX, "quick", Gate.RECOMPILES_TOTAL).profiles[PROFILE]
    assert profile.suites == (Suite.RECOMPILE,)
    assert profile.workloads == MATRIX.profiles["quick"].workloads
    assert not profile.unannounced_shapes


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("recompile_totals", "upstream/default"), "did you mean recompiles_total"),
        (("recompiles_total", "*/*"), "bisect follows one cache in one mode"),
        (("recompiles_total", "upstraem/default"), "upstream"),
        (("recompiles_total", "upstream/default", "--good", "2.0.0"), "releases --add 2.0.0"),
        (("mae_delta", "upstream/default"), "--limit N"),
        (("recompiles_total", "upstream/default", "--good", "2.9.0", "--bad", "2.9.0"), "two releases at least"),
    ],
)
def test_a_question_that_cannot_be_asked_is_told(results: Path, words: tuple[str, ...], told: str) -> None:
    error = bisect(results, *words, "--stored-only").exception
    assert isinstance(error, SelectionError)
    assert told in str(error)


def test_two_questions_at_once_are_a_mistake_of_the_command_line(results: Path) -> None:
    words = ("recompiles_total", "upstream/default", "--limit", "3", "--any-change")
    assert bisect(results, *words).exit_code == ExitCode.USAGE


def test_the_sample_cells_are_named_as_the_matrix_names_them() -> None:
    assert {f"torch-{torch}-{BUILDS[torch]}" for torch in RELEASES} <= set(MATRIX.environments)
    assert cell_request(torch="2.4.1", build="cu121").cell.environment == "torch-2.4.1-cu121"


# --- what the ends are ------------------------------------------------------------------------------------------------


def test_one_end_alone_goes_with_the_default_of_the_other(results: Path) -> None:
    for torch in RELEASES:
        store_run(results, f"reference/{torch}", [cell(torch, total=12.0 if torch >= "2.6" else 4.0)])
    words = ("recompiles_total", "upstream/default")
    oldest, newest = "2.3.1", "2.15.0"
    assert stored(results, *words, "--bad", "2.6.0")["releases"] == [oldest, "2.4.1", "2.5.1", "2.6.0"]
    upwards = stored(results, *words, "--good", "2.6.0")["releases"]
    assert isinstance(upwards, list) and (upwards[0], upwards[-1]) == ("2.6.0", newest)


def test_an_end_that_is_not_what_it_was_called_is_told(results: Path) -> None:
    for torch in RELEASES:
        store_run(results, f"reference/{torch}", [cell(torch, total=4.0 if torch >= "2.6" else 12.0)])
    words = ("recompiles_total", "upstream/default", "--stored-only")
    swapped = bisect(results, *words, "--good", "2.4.1", "--bad", "2.9.0").stdout
    assert "changed with torch 2.6.0 from FAIL to PASS" in swapped
    assert "torch 2.4.1 was called good and is FAIL here" in swapped
    assert "torch 2.9.0 was called bad and is PASS here" in swapped
    assert "was called" not in bisect(results, *words, "--good", "2.9.0", "--bad", "2.4.1").stdout


def test_of_two_runs_of_a_release_the_newer_counts_whatever_they_are_called(results: Path) -> None:
    store_run(results, "reference/cpu", [cell("2.4.1", total=4), cell("2.5.1", total=4)])
    store_run(results, "2026-11-17T10-00-00", [cell("2.5.1", total=12)], started="2026-11-17T10:00:00Z")
    answer = stored(results, "recompiles_total", "upstream/default", "--good", "2.4.1", "--bad", "2.5.1")
    assert answer["answer"]["after"] == "2.5.1"  # type: ignore[index]


def test_what_is_missing_is_named_in_one_line(results: Path) -> None:
    store_run(results, "reference/a", [cell("2.4.1")])
    text = bisect(results, "recompiles_total", "upstream/default", "--bad", "2.6.0", "--stored-only").stdout
    assert "no stored evidence: 2.3.1, 2.5.1, 2.6.0; without --stored-only" in text
    assert text.count("2.5.1") == 1


# --- questions that have no answer, refused before anything is built --------------------------------------------------


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("cudagraphs", "fixed_size/reduce-overhead"), "decides nothing on cpu: no CUDA graphs on a CPU"),
        (("symbol_mae", "fixed_size/default"), "series of yours"),
        (("speedup", "fixed_size/default", "--any-change"), "differs a little between any two runs"),
        (("equivalence", "fixed_size/default", "--any-change"), "differs a little between any two runs"),
    ],
)
def test_a_gate_that_would_decide_nothing_is_refused(results: Path, words: tuple[str, ...], told: str) -> None:
    error = bisect(results, *words).exception
    assert isinstance(error, SelectionError)
    assert told in error.message and error.hint


@pytest.mark.parametrize("limit", ["nan", "inf"])
def test_a_limit_that_nothing_crosses_is_a_mistake_of_the_command_line(results: Path, limit: str) -> None:
    assert bisect(results, "recompiles", "upstream/default", "--limit", limit).exit_code == ExitCode.USAGE
