"""README's table, its picture and the committed evidence are those of the reference; what is stale is told."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from tests.verdict.sample_cells import good_result, suite_error, with_figures, with_suite
from tests.verdict.stored_runs import judged_run
from toto_compat.cli import cli
from toto_compat.contract.cell_name import CellName
from toto_compat.contract.request import Device
from toto_compat.contract.result import Failure, Figure, Kind, Outcome, SuiteEvidence
from toto_compat.contract.suites import Suite
from toto_compat.errors import ExitCode, InputError
from toto_compat.evidence.store import cell_path, load_run, read_cell, write_cell
from toto_compat.matrix.gates import Gate
from toto_compat.reference.showing import (
    BEGIN,
    END,
    identity,
    in_short,
    judged_reference,
    readme_block,
    release_table,
    show,
    stale_showing,
    stamp_of,
    stamped,
    thin_again,
    with_block,
)
from toto_compat.reference.torch_logs import LogCount, TwoCounts
from toto_compat.verdict.judged_run import JudgedRun

ROOT = Path(__file__).parent.parent.parent
REFERENCE = ROOT / "results" / "reference"


def test_nothing_committed_is_stale() -> None:
    """If this fails: `nox -s reference -- --dry-run` says what it takes, `--show-only` makes table and picture anew."""
    result = CliRunner().invoke(cli, ["reference", "--check"])
    stale = [line for line in result.stdout.splitlines() if line.startswith("stale: ")]
    assert stale == []
    assert result.exit_code == ExitCode.OK


def test_limits_that_moved_are_stale_and_judged_by_from_the_next_showing_on(tmp_path: Path) -> None:
    shutil.copytree(REFERENCE / "cpu", tmp_path / "cpu")
    plan = {"schema": 1, "releases": ["2.13.0"], "runs": {"cpu": {"profile": "quick"}}}
    (tmp_path / "plan.yaml").write_text(json.dumps(plan), encoding="utf-8")
    matrix = yaml.safe_load((ROOT / "matrix.yaml").read_text(encoding="utf-8"))
    matrix["gates"]["speedup"] = {"min": 100.0}
    (tmp_path / "matrix.yaml").write_text(yaml.safe_dump(matrix), encoding="utf-8")
    (tmp_path / "README.md").write_text(f"{BEGIN}{END}", encoding="utf-8")
    command = ["reference", "--plan", str(tmp_path / "plan.yaml"), "--matrix", str(tmp_path / "matrix.yaml")]
    checked = CliRunner().invoke(cli, [*command, "--check"])
    assert "stale: cpu: matrix.yaml has other limits now" in checked.stdout
    assert CliRunner().invoke(cli, [*command, "--show-only"]).exit_code == ExitCode.OK
    assert "FAIL speedup" in (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "other limits" not in CliRunner().invoke(cli, [*command, "--check"]).stdout


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of what is shown, to make it stale."""
    shutil.copytree(REFERENCE / "cpu", tmp_path / "reference" / "cpu")
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "report.png", tmp_path / "docs")
    shutil.copy(ROOT / "README.md", tmp_path)
    return tmp_path


def test_a_copy_is_no_staler_than_what_it_was_copied_from(project: Path) -> None:
    assert stale_showing(project / "reference", project) == []


def test_another_verdict_makes_table_and_picture_stale(project: Path) -> None:
    path = cell_path(project / "reference" / "cpu", "torch-2.13.0-cpu/fixed_size/default")
    cell = read_cell(path)
    suite = Gate.RECOMPILES.rule.suite
    figure = cell.evidence[suite].figures[Gate.RECOMPILES.figure].model_copy(update={"value": 3.0})
    figures = {**cell.evidence[suite].figures, Gate.RECOMPILES.figure: figure}
    changed = cell.evidence[suite].model_copy(update={"figures": figures})
    write_cell(project / "reference" / "cpu", cell.model_copy(update={"evidence": {**cell.evidence, suite: changed}}))
    told = stale_showing(project / "reference", project)
    assert [line.partition(":")[0] for line in told] == ["README.md", "docs/report.png"]


def test_a_word_changed_by_hand_in_the_table_is_seen(project: Path) -> None:
    readme = project / "README.md"
    readme.write_text(readme.read_text(encoding="utf-8").replace("**PASS**", "**PASSED**", 1), encoding="utf-8")
    assert stale_showing(project / "reference", project) == ["README.md: its table is not that of the reference"]


def test_a_picture_that_does_not_say_what_it_shows_is_stale(project: Path) -> None:
    picture = project / "docs" / "report.png"
    picture.write_bytes(stamped(picture.read_bytes()[:33] + b"", "another"))
    assert stale_showing(project / "reference", project) == ["docs/report.png: shows another reference"]


def test_the_table_does_not_change_because_time_passes() -> None:
    assert not judged_reference(REFERENCE).decision.stale
    assert len(identity(judged_reference(REFERENCE))) == 64


def test_a_stamp_is_read_back_and_leaves_the_picture_a_picture() -> None:
    png = (ROOT / "docs" / "report.png").read_bytes()
    again = stamped(png, "0" * 64)
    assert stamp_of(again) == "0" * 64
    assert len(again) == len(png) + 12 + len("toto-compat-reference") + 1 + 64
    assert stamp_of(b"\x89PNG") == ""


def test_a_readme_without_a_place_for_the_table_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no place"):
        with_block("# nothing here", "table", tmp_path / "README.md")
    assert with_block(f"a {BEGIN} old {END} b", "new", tmp_path) == f"a {BEGIN}\n\nnew\n\n{END} b"


def test_a_dry_run_says_time_and_disk_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOTO_COMPAT_CACHE", str(tmp_path))
    before = load_run(REFERENCE / "cpu")
    result = CliRunner().invoke(cli, ["reference", "--dry-run", "--only", "2.9.0"])
    assert result.exit_code == 0, result.output
    assert "GB of disk at a time" in result.stdout
    assert "min" in result.stdout
    assert load_run(REFERENCE / "cpu") == before


def test_what_was_kept_when_less_was_left_out_is_thinned_again(project: Path) -> None:
    folder = project / "reference" / "cpu"
    thin_again(folder)
    name = "torch-2.13.0-cpu/upstream/default"
    path, before = cell_path(folder, name), judged_reference(project / "reference")
    small, cell = path.read_bytes(), read_cell(path)
    recompile = cell.evidence[Suite.RECOMPILE]
    fatter = [one.model_copy(update={"reasons": (one.reason, "another")}) for one in recompile.events]
    evidence = {**cell.evidence, Suite.RECOMPILE: recompile.model_copy(update={"events": tuple(fatter)})}
    write_cell(folder, cell.model_copy(update={"evidence": evidence}))
    assert path.stat().st_size > len(small)
    thin_again(folder)
    assert path.read_bytes() == small
    assert identity(judged_reference(project / "reference")) == identity(before)


def in_order(**verdicts: str) -> JudgedRun:
    """Rows of fixed_size/default, by their release and their verdict."""
    releases = {f"2.{minor.removeprefix('r')}.0": verdict for minor, verdict in verdicts.items()}
    changes: dict[str, dict[Gate, float | None]] = {
        "good": {},
        "bad": {Gate.RECOMPILES: 3.0},
        "undecided": {Gate.EQUIVALENCE: None},
    }
    return judged_run(
        *(with_figures(good_result(torch=release), changes[verdict]) for release, verdict in releases.items())
    )


def test_the_answer_in_short_names_release_cache_mode_device_and_kind_of_evidence() -> None:
    assert in_short(in_order(r9="bad", r13="good", r15="good")) == (
        "on the CPU `fixed_size/default` is good since torch 2.13.0, measured on each of the 2 releases that were "
        "tried from there on, to 2.15.0 (before that: fails in 2.9.0); on CUDA nothing is measured."
    )


def test_good_since_a_release_means_that_every_one_from_there_on_is_good_and_decided() -> None:
    told = in_short(in_order(r6="bad", r7="good", r8="undecided", r9="good", r10="good"))
    assert (
        "good since torch 2.9.0, measured on each of the 2 releases that were tried from there on, to 2.10.0 " in told
    )
    assert "(before that: fails in 2.6.0, good in 2.7.0, not decided in 2.8.0)" in told


def test_good_on_one_release_alone_is_told_as_that() -> None:
    told = in_short(in_order(r13="bad", r15="good"))
    assert "good since torch 2.15.0, measured on this release alone, the newest that was tried (before that: " in told


def test_the_table_begins_with_the_newest_release_and_says_which_forecasts_raise() -> None:
    raised = suite_error(Suite.EQUIVALENCE, Outcome.MODEL_FAILED, "CppCompileError")
    lost = good_result(torch="2.5.1").model_copy(
        update={"evidence": {}, "failure": Failure(kind="crash", message="killed")}
    )
    judged = judged_run(
        with_suite(good_result(torch="2.9.0"), Suite.EQUIVALENCE, raised), lost, good_result(torch="2.13.0")
    )
    rows = [[cell.strip() for cell in line.split("|")[1:4]] for line in release_table(judged.cells).splitlines()[2:]]
    assert [row[:2] for row in rows] == [["2.13.0", "default"], ["2.9.0", "default"], ["2.5.1", "default"]]
    assert [row[2].partition(" ")[2] for row in rows[1:]] == ["raises", "could not be run"]
    assert rows[0][2].startswith("**PASS**")


def test_what_was_only_compiled_for_cuda_shows_its_prediction() -> None:
    figure = Figure(value=2.0, kind=Kind.PREDICTED)
    lowered = SuiteEvidence(suite=Suite.CUDA_LOWERING, outcome=Outcome.MEASURED, figures={"cudagraphs": figure})
    cell = good_result(torch="2.15.0", build="cu132")
    cell = cell.model_copy(
        update={
            "request": cell.request.model_copy(update={"lower_only": True}),
            "evidence": {Suite.CUDA_LOWERING: lowered},
        }
    )
    assert "INCONCLUSIVE ~2 graphs not captured whole" in release_table(judged_run(cell).cells)


def test_two_builds_of_a_release_are_told_apart() -> None:
    rows = release_table(judged_run(good_result(), good_result(build="cu130")).cells).splitlines()[2:]
    assert sorted(row.split("|")[1].strip() for row in rows) == ["2.13.0 (cpu)", "2.13.0 (cu130)"]


def test_a_command_can_be_copied_out_of_the_answer() -> None:
    assert "run `nox -s matrix -- --device cuda` on a machine" in readme_block(in_order(r13="good"), ())


def test_releases_without_a_second_count_are_named_beside_those_with_one() -> None:
    judged = judged_run(*(good_result(torch=torch, cache="upstream") for torch in ("2.9.0", "2.10.0", "2.13.0")))
    both = TwoCounts(by_log=40, by_cell=40)
    counted = LogCount(
        cell=CellName("torch-2.9.0-cpu/upstream/default"),
        torch="2.9.0+cpu",
        recompiles=both,
        graph_breaks=both,
        of_result="",
        log_lines=1,
        log_sha256="",
        taken="",
    )
    block = readme_block(judged, (counted,))
    assert "agree on 1 of 1 releases; in 2.10.0 and 2.13.0 there is none, since no forecast came to its end." in block
    assert "there is none" not in readme_block(judged_run(judged.cells[0].result), (counted,))


@pytest.mark.parametrize(("newest", "told"), [("bad", "fails in"), ("undecided", "not decided in")])
def test_a_cache_that_is_not_good_on_the_newest_release_is_good_since_none(newest: str, told: str) -> None:
    text = in_short(in_order(r13="good", r15=newest))
    assert f"nothing is good on the newest release that was tried; `fixed_size/default` good in 2.13.0, {told}" in text
    assert "since" not in text


def test_rows_of_a_cpu_that_are_not_decided_are_measured_and_not_compiled_for_it() -> None:
    text = in_short(in_order(r13="undecided", r15="undecided"))
    assert "on the CPU no cache passes on any release that was tried, and 2 of 2 rows are not decided" in text
    assert "compiled" not in text


def test_rows_that_were_only_compiled_for_cuda_measure_nothing_there() -> None:
    cell = good_result(torch="2.15.0", build="cu132", device=Device.CPU)
    lowered = cell.model_copy(update={"request": cell.request.model_copy(update={"lower_only": True})})
    assert "on CUDA nothing is measured; 1 row was compiled for it without a GPU" in in_short(judged_run(lowered))


def test_the_claims_are_made_anew_with_the_table_and_told_where_they_are_stale(project: Path) -> None:
    claims, reference = project / "docs" / "claims.md", project / "reference"
    claims.write_text("of another day", encoding="utf-8")
    assert stale_showing(reference, project) == ["docs/claims.md: says something else than the reference"]
    assert show(reference, project, ["cpu"]) == []
    assert stale_showing(reference, project) == []
    printed = CliRunner().invoke(cli, ["claims", "--results", str(project)])
    assert claims.read_text(encoding="utf-8") == printed.stdout
