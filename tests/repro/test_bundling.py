"""Bundles on the command line: of a red cell, and what is told where one cannot be made or replayed."""

import os
import shlex
import signal
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from click.testing import CliRunner, Result

from tests.verdict.sample_cells import good_result, production_incident, suite_error, with_figures, with_suite
from tests.verdict.stored_runs import judged_run, store_run
from toto_compat.contract.request import Device
from toto_compat.contract.result import Outcome
from toto_compat.contract.suites import Suite
from toto_compat.errors import BundleError, EnvironmentBuildError, ExitCode, InputError, SelectionError
from toto_compat.evidence.store import StoredCell, load_run, log_path
from toto_compat.matrix.gates import Gate
from toto_compat.matrix.load import load_matrix
from toto_compat.report.page_data import cell_details
from toto_compat.repro.archive import Manifest, unpack, write_bundle
from toto_compat.repro.command import repro_command
from toto_compat.repro.incident import load_incident
from toto_compat.repro.outcome import Verdict, look_at
from toto_compat.repro.red_cell import command_of, incident_of
from toto_compat.repro.replay import ToRun, compared_with_bundle
from toto_compat.repro.reproduce import limits_of
from toto_compat.verdict.judge import Status

ROOT = Path(__file__).parents[2]
RED = "torch-2.13.0-cpu/list_index/default"
SECRET = "hf_abcdefghijklmnopqrstuvwxyz0123"  # noqa: S105 - it must not come out


@pytest.fixture
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with a red and a green cell in the results folder of an otherwise empty place."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOTO_COMPAT_CACHE", str(tmp_path / "cache"))
    folder = store_run(tmp_path / "results", "run", [production_incident(), good_result()])
    log = log_path(folder, RED)
    log.parent.mkdir(parents=True)
    log.write_text(f"HF_TOKEN={SECRET}\nhit config.recompile_limit (8)\n", encoding="utf-8")
    return folder


def repro(*words: str) -> Result:
    return CliRunner().invoke(repro_command, [*words, "--runtime", "venv"])


def with_matrix(*words: str) -> Result:
    return repro(*words, "--matrix", str(ROOT / "matrix.yaml"))


def test_a_red_cell_goes_into_one_file_with_all_that_is_known_of_it(run_folder: Path, tmp_path: Path) -> None:
    made = with_matrix("run", RED)
    assert made.exit_code == 0, made.output
    bundle = tmp_path / "torch-2.13.0-cpu_list_index_default.bundle.zip"
    manifest = unpack(bundle, tmp_path / "out")
    assert manifest.cell == RED
    assert manifest.shows == "FAIL by recompile_limit"
    assert {
        "incident.yaml",
        "matrix.yaml",
        "result.json",
        "cell.log",
        "command.txt",
        "request.json",
        "minimal.py",
        "README.txt",
        "environment/lock.txt",
        "environment/packages.txt",
        "environment/variables.json",
    } <= set(manifest.files)
    incident = load_incident(tmp_path / "out" / "incident.yaml")
    assert incident.expect[0].function == "positional_embedding"
    assert incident.cache == "list_index"
    assert "recompiles_total" in {gate.gate.value for gate in incident.gates}
    assert list(load_matrix(tmp_path / "out" / "matrix.yaml").environments) == ["torch-2.13.0-cpu"]
    result = StoredCell.model_validate_json((tmp_path / "out" / "result.json").read_bytes())
    assert result.cell == RED


def test_the_command_of_a_red_cell_is_the_one_that_ran_it(run_folder: Path) -> None:
    run, (cell, *_) = load_run(run_folder), judged_run(production_incident()).cells
    again = ["toto-compat", "matrix", RED, "--profile", "quick", "--device", "cpu", "--fresh"]
    assert command_of(run, cell) == again  # this run does not say
    typed = ("toto-compat", "matrix", "*/list_index", "--jobs", "1")
    run = replace(run, info=run.info.model_copy(update={"command": typed}))
    assert command_of(run, cell) == list(typed)
    elsewhere = replace(cell, result=cell.result.model_copy(update={"reused": True}))
    assert command_of(run, elsewhere) == again


def test_without_the_environment_the_bundle_says_why_it_has_no_trace(run_folder: Path) -> None:
    made = with_matrix("run", RED)
    assert "nothing was run for a trace: torch-2.13.0-cpu is not built in venv here" in made.output
    made = with_matrix("run", RED, "--no-trace", "-o", "b.zip")
    assert "nothing was run for a trace: --no-trace was given" in made.output


def test_no_secret_of_the_log_is_in_the_bundle(run_folder: Path, tmp_path: Path) -> None:
    assert with_matrix("run", RED, "--no-trace", "-o", "b.zip").exit_code == 0
    unpack(tmp_path / "b.zip", tmp_path / "out")
    everything = b"".join(path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert SECRET.encode() not in everything
    assert b"hit config.recompile_limit (8)" in everything


def test_the_same_cell_makes_the_same_file_and_an_existing_one_stays(run_folder: Path, tmp_path: Path) -> None:
    for name in ("a.zip", "b.zip"):
        assert with_matrix("run", RED, "--no-trace", "-o", name).exit_code == 0
    first, second = (unpack(tmp_path / name, tmp_path / f"out-{name}") for name in ("a.zip", "b.zip"))
    assert first.files == second.files
    again = with_matrix("run", RED, "--no-trace", "-o", "a.zip")
    assert isinstance(again.exception, InputError)
    assert "not overwritten" in again.exception.message


@pytest.mark.parametrize("output", ["there.zip", "no/such/folder/b.zip"])
def test_where_no_bundle_can_be_written_nothing_is_run_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str
) -> None:
    (tmp_path / "there.zip").touch()
    monkeypatch.setattr("toto_compat.repro.command.reproduce", lambda *_, **__: pytest.fail("it was run"))
    incident = ROOT / "incidents" / "2025-10-30-recompile-limit.yaml"
    made = with_matrix(str(incident), "--bundle", "-o", str(tmp_path / output))
    assert isinstance(made.exception, InputError), made.output
    assert output in made.exception.message


def test_what_pip_said_of_an_environment_is_in_no_note_with_its_password(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = EnvironmentBuildError(f"pip failed: Looking in indexes: https://me:{SECRET}@host/simple")
    monkeypatch.setattr("toto_compat.repro.bundling.open_runtime", Mock(side_effect=said))
    made = with_matrix("run", RED, "-o", "b.zip")
    (note,) = (one for one in unpack(tmp_path / "b.zip", tmp_path / "out").notes if "pip failed" in one)
    assert "@host/simple" in note
    assert SECRET not in note + made.output


def test_a_cell_of_a_toto_ts_that_is_gone_has_no_bundle_and_that_is_told(run_folder: Path, tmp_path: Path) -> None:
    result = production_incident()
    environment = result.request.environment.model_copy(update={"toto_ts": str(tmp_path / "gone")})
    request = result.request.model_copy(update={"environment": environment})
    store_run(tmp_path / "results", "fork", [result.model_copy(update={"request": request})])
    refused = with_matrix("fork", RED)
    assert isinstance(refused.exception, InputError), refused.output
    assert "with a toto-ts of its own that is not here" in refused.exception.message


def test_what_a_gpu_measured_is_looked_for_on_a_gpu_alone(run_folder: Path) -> None:
    slow = {Gate.SPEEDUP: 0.5, Gate.RECOMPILES_TOTAL: 50}
    for device, needs in ((Device.CPU, None), (Device.CUDA, "cuda")):
        cell = judged_run(with_figures(good_result(torch="2.9.0", build="cu128", device=device), slow)).cells[0]
        found = {one.gate: one.needs for one in incident_of(load_run(run_folder), cell).gates}
        assert found == {Gate.SPEEDUP: needs, Gate.RECOMPILES_TOTAL: None}


def test_a_red_cell_whose_forecast_raised_is_the_same_again_where_it_raises_again(run_folder: Path) -> None:
    message = f"IndexError: no slot 3 in <Cache object at 0x7f00aa> of /srv/bot/kv.py, token={SECRET}"
    result = with_suite(good_result(), Suite.RECOMPILE, suite_error(Suite.RECOMPILE, Outcome.MODEL_FAILED, message))
    cell = judged_run(result).cells[0]
    assert cell.verdict is Status.FAIL
    incident = incident_of(load_run(run_folder), cell)
    assert [(one.suite, one.error_like) for one in incident.raised] == [
        (Suite.RECOMPILE, "IndexError: no slot 3 in <Cache object at *> of *, token=*")
    ]
    assert not incident.gates
    limits = limits_of(load_matrix(ROOT / "matrix.yaml"))
    assert look_at(incident, result, limits).verdict is Verdict.REPRODUCED
    assert look_at(incident, good_result(), limits).verdict is Verdict.NOT_REPRODUCED


def test_a_green_cell_an_unknown_one_and_an_unknown_run_have_no_bundle(run_folder: Path) -> None:
    for words, told in (
        (("run", "torch-2.13.0-cpu/fixed_size/default"), "nothing in it is broken"),
        (("run", "torch-2.13.0-cpu/list_indx/default"), "has no cell"),
        (("walk", RED), "no such run"),
    ):
        refused = with_matrix(*words)
        assert isinstance(refused.exception, SelectionError), refused.output
        assert told in refused.exception.message


def test_the_page_shows_the_command_for_red_cells_alone(tmp_path: Path) -> None:
    red, green = judged_run(production_incident(), good_result()).cells
    details = [cell_details(cell, [], 0, tmp_path / "my run") for cell in (red, green)]
    target = "results/my run/torch-2.13.0-cpu_list_index_default.bundle.zip"
    assert {one["name"]: (one["bundle"], one["bundleFile"]) for one in details} == {
        RED: (f"toto-compat repro 'my run' {RED} -o '{target}'", ""),
        "torch-2.13.0-cpu/fixed_size/default": ("", ""),
    }


def test_the_page_links_the_bundle_that_its_command_made_beside_it(run_folder: Path) -> None:
    (cell, _) = judged_run(production_incident(), good_result()).cells
    words = shlex.split(cell_details(cell, [], 0, run_folder)["bundle"])
    made = with_matrix(*words[2:], "--no-trace")
    assert made.exit_code == 0, made.output
    linked = cell_details(cell, [], 0, run_folder)["bundleFile"]
    assert linked == "torch-2.13.0-cpu_list_index_default.bundle.zip"
    assert unpack(run_folder / linked, run_folder.parent / "out").cell == RED


def test_a_tampered_bundle_is_refused_with_its_own_exit_code(run_folder: Path, tmp_path: Path) -> None:
    assert with_matrix("run", RED, "--no-trace", "-o", "b.zip").exit_code == 0
    content = bytearray((tmp_path / "b.zip").read_bytes())
    content[len(content) // 2] ^= 0xFF
    (tmp_path / "b.zip").write_bytes(content)
    refused = repro("b.zip")
    assert isinstance(refused.exception, BundleError)
    assert refused.exception.code is ExitCode.BUNDLE
    assert not list((tmp_path / "cache").glob("bundle-*"))


def test_a_bundle_without_an_incident_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOTO_COMPAT_CACHE", str(tmp_path / "cache"))
    write_bundle(tmp_path / "b.zip", {"made_by": "1", "cell": "x"}, {"matrix.yaml": b""})
    refused = repro(str(tmp_path / "b.zip"))
    assert isinstance(refused.exception, BundleError)
    assert "no incident.yaml in it" in refused.exception.message


def test_words_that_ask_for_nothing_are_a_usage_error(tmp_path: Path) -> None:
    assert repro().exit_code == ExitCode.USAGE
    assert repro("a", "b", "c").exit_code == ExitCode.USAGE
    assert repro("a.yaml", "--from-log", "x.log").exit_code == ExitCode.USAGE
    for option in ("--torch", "--freeze", "--env"):
        assert "--from-log" in (unheard := repro("a.yaml", option, "2.9.0")).output
        assert unheard.exit_code == ExitCode.USAGE
    assert repro("a.yaml", "--explain", "all", "--bundle").exit_code == ExitCode.USAGE
    assert "the incident comes before --explain" in repro("--explain", "a.yaml").output


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("a.yaml", "--with-wheels"), "--with-wheels: it is for a bundle"),
        (("a.yaml", "--no-trace"), "--no-trace: it is for a bundle"),
        (("a.yaml", "-o", "b.zip"), "-o: it is for a bundle"),
        (("--from-log", "x.log", "--bundle"), "--bundle: --from-log writes an incident file"),
        (("--from-log", "x.log", "--with-wheels"), "--with-wheels: --from-log writes an incident file"),
        (("--from-log", "x.log", "--explain", "all"), "--explain: --from-log writes an incident file"),
        (("run", RED, "--cache", "fixed_size"), "--cache: a red cell is put into a bundle"),
        (("run", RED, "--explain", "all"), "--explain: a red cell is put into a bundle"),
        (("run", RED, "--stored"), "--stored: a red cell is put into a bundle"),
    ],
)
def test_an_option_that_would_be_passed_over_is_a_usage_error(words: tuple[str, ...], told: str) -> None:
    refused = repro(*words)
    assert refused.exit_code == ExitCode.USAGE
    assert told in refused.output


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    refused = repro(str(tmp_path / "pipe"))
    assert isinstance(refused.exception, InputError)
    assert "a pipe" in refused.exception.message


def test_a_bundle_that_is_told_to_go_while_it_is_written_leaves_nothing(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(_: str) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    before = set(tmp_path.iterdir())
    monkeypatch.setattr("toto_compat.repro.archive._entry", stopped)
    assert with_matrix("run", RED, "--no-trace", "-o", "b.zip").exit_code != 0
    assert set(tmp_path.iterdir()) - before <= {tmp_path / "cache"}


def test_a_cell_that_failed_on_series_of_the_users_own_alone_has_no_bundle(run_folder: Path) -> None:
    cell = judged_run(production_incident()).cells[0]
    (judged, *_) = (one for one in cell.gates.values() if one.status is Status.FAIL)
    of_series = next(gate for gate in Gate if gate.rule.suite.rule.needs_symbols)
    result = cell.result.model_copy(update={"evidence": {}})
    alone = replace(cell, result=result, decided_by=of_series, gates={of_series: replace(judged, gate=of_series)})
    with pytest.raises(SelectionError, match="a replay could look for nothing in it") as caught:
        incident_of(load_run(run_folder), alone)
    assert "workload.csv" in caught.value.hint


def test_a_replay_tells_which_packages_differ() -> None:
    manifest = Manifest.model_validate({"schema": 1, "made_by": "1", "cell": "x", "files": {}})
    here = production_incident()
    provenance = here.provenance.model_copy(update={"packages": {"numpy": "1.26.4", "torch": "2.13.0"}})
    result = here.model_copy(update={"provenance": provenance})
    same = ToRun(Path("i"), None, manifest, ("numpy==1.26.4", "torch==2.13.0"))
    other = ToRun(Path("i"), None, manifest, ("numpy==2.0.0", "torch==2.13.0", "gone==1"))
    assert compared_with_bundle(same, result) == ["  packages  the bundle's own, all 2"]
    (line,) = compared_with_bundle(other, result)
    assert "2 differ" in line
    assert "numpy 2.0.0 there, 1.26.4 here" in line
    assert "gone 1 there, absent here" in line
    assert compared_with_bundle(ToRun(Path("i"), None), result) == []


def test_a_bundle_whose_name_is_too_long_for_a_file_is_refused_before_anything_is_run(run_folder: Path) -> None:
    refused = with_matrix("run", RED, "-o", f"{'n' * 300}.zip")
    assert isinstance(refused.exception, InputError)
    assert "nnn.zip: cannot be written: File name too long" in refused.exception.message
