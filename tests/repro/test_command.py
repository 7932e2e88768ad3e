"""`repro` says REPRODUCED, GONE or what differed, and its exit code says the same."""

from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from tests.repro.production_events import LIMIT_HIT
from toto_compat.contract.events import Event
from toto_compat.contract.request import CsvSeries, Device
from toto_compat.contract.result import CellResult, Failure, Figure, Outcome, Provenance, SuiteEvidence
from toto_compat.contract.suites import Suite
from toto_compat.errors import EnvironmentBuildError, ExitCode, InputError, SelectionError
from toto_compat.matrix.load import load_matrix
from toto_compat.repro.command import Reproduction, as_data, as_text, exit_code, incident_request, repro_command
from toto_compat.repro.incident import Incident, load_incident
from toto_compat.repro.outcome import look_at
from toto_compat.repro.reproduce import limits_of

ROOT = Path(__file__).parent.parent.parent
INCIDENT = ROOT / "incidents" / "2025-10-30-recompile-limit.yaml"


def reproduction(
    *events: Event,
    cache: str | None = None,
    outcome: Outcome = Outcome.MEASURED,
    failure: Failure | None = None,
    suite_failure: Failure | None = None,
    incident: Incident | None = None,
    figures: dict[str, Figure] | None = None,
) -> Reproduction:
    incident = incident or load_incident(INCIDENT)
    matrix = load_matrix(ROOT / "matrix.yaml")
    request = incident_request(
        incident, ROOT, matrix, ROOT / "matrix.yaml", cache=cache, environment="torch-2.13.0-cpu"
    )
    measured = SuiteEvidence(
        suite=Suite.RECOMPILE, outcome=outcome, events=events, failure=suite_failure, figures=figures or {}
    )
    provenance = Provenance(torch="2.13.0+cpu", runtime="docker", image="sha256:" + "1" * 64, lock="2" * 64)
    evidence = {Suite.RECOMPILE: measured}
    result = CellResult(cell=request.cell, request=request, provenance=provenance, evidence=evidence, failure=failure)
    return look_at(incident, result, limits_of(matrix))


def test_the_incident_asks_for_productions_environment_cache_and_settings() -> None:
    incident, matrix = load_incident(INCIDENT), load_matrix(ROOT / "matrix.yaml")
    request = incident_request(incident, ROOT, matrix, ROOT / "matrix.yaml", device=Device.CUDA)
    assert request.cell.environment == matrix.production
    assert request.cell.cache == "list_index"
    assert request.device is Device.CUDA
    assert request.settings.recompile_limit is None  # torch's own limit of 8
    assert request.profile.suites == (Suite.RECOMPILE,)


def test_the_incidents_own_checkpoint_and_series_are_what_is_forecast(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "config.json").touch()
    (weights / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    rows = "".join(f"{60 * row},{row % 7}.5\n" for row in range(400))
    (tmp_path / "prices.csv").write_text(f"time,close\n{rows}", encoding="utf-8")
    series = CsvSeries(path="prices.csv", time_column="time", value_columns=("close",))
    incident = load_incident(INCIDENT)
    workload = incident.workload.model_copy(update={"checkpoint": "weights", "csv": series})
    incident = incident.model_copy(update={"workload": workload})
    request = incident_request(incident, tmp_path, load_matrix(ROOT / "matrix.yaml"), ROOT / "matrix.yaml")
    assert request.checkpoint_folder == str(weights.resolve())
    assert request.csv is not None
    assert request.csv.path == str((tmp_path / "prices.csv").resolve())


def test_a_mistake_in_the_incidents_series_is_told_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "prices.csv").write_text("time,open\n0,1.0\n60,2.0\n", encoding="utf-8")
    series = CsvSeries(path="prices.csv", time_column="time", value_columns=("close",))
    incident = load_incident(INCIDENT)
    incident = incident.model_copy(update={"workload": incident.workload.model_copy(update={"csv": series})})
    with pytest.raises(InputError, match="no column 'close'"):
        incident_request(incident, tmp_path, load_matrix(ROOT / "matrix.yaml"), ROOT / "matrix.yaml")


def test_the_same_events_are_reproduced() -> None:
    same = reproduction(LIMIT_HIT)
    assert as_text(same).endswith("REPRODUCED")
    assert exit_code(same) is ExitCode.OK
    assert as_data(same)["reproduced"] is True


def test_counts_stand_there_only_if_something_counted() -> None:
    counted = reproduction(LIMIT_HIT)
    assert "in all 0 recompiles, 1 limit hit, 0 graph breaks" in as_text(counted)
    lowered = SuiteEvidence(suite=Suite.CUDA_LOWERING, outcome=Outcome.MEASURED)
    result = counted.result.model_copy(update={"evidence": {Suite.CUDA_LOWERING: lowered}})
    assert " recompiles, " not in as_text(
        look_at(counted.incident, result, limits_of(load_matrix(ROOT / "matrix.yaml")))
    )


def test_nothing_that_an_incident_says_reaches_the_terminal_as_a_command() -> None:
    hostile = load_incident(INCIDENT).model_copy(update={"title": "limit\n\x1b[2JREPRODUCED", "date": "\x1b]0;x\x07"})
    told = as_text(reproduction(incident=hostile))
    assert "\x1b" not in told and "\x07" not in told
    assert told.splitlines()[0].startswith("limit [2JREPRODUCED (")


def test_another_function_is_not_reproduced_and_says_so() -> None:
    other = reproduction(LIMIT_HIT.model_copy(update={"function": "forward"}))
    assert "function: 'forward' here" in as_text(other)
    assert as_text(other).endswith("NOT REPRODUCED")
    assert exit_code(other) is ExitCode.NOT_REPRODUCED


def test_another_cache_without_the_events_is_told_as_gone() -> None:
    gone = reproduction(cache="fixed_size")
    assert as_text(gone).splitlines()[-1].startswith("NOT REPRODUCED: gone with fixed_size")
    assert exit_code(gone) is ExitCode.NOT_REPRODUCED


def test_an_incident_whose_events_do_not_apply_here_is_neither_reproduced_nor_gone() -> None:
    whole = load_incident(INCIDENT)
    elsewhere = tuple(expected for expected in whole.expect if expected.torch == "2.9.0")
    unasked = reproduction(LIMIT_HIT, cache="fixed_size", incident=whole.model_copy(update={"expect": elsewhere}))
    told = as_text(unasked).splitlines()
    assert told[-1].endswith("nothing was looked for, nothing that is expected applies to torch 2.13.0+cpu")
    assert any("does not apply" in line and "on torch 2.9.0 only" in line for line in told)
    assert exit_code(unasked) is ExitCode.NOT_REPRODUCED
    assert as_data(unasked)["reproduced"] is False
    assert [expected["torch"] for expected in as_data(unasked)["left_out"]] == ["2.9.0"]


def test_events_of_another_release_are_told_and_do_not_stand_in_the_way() -> None:
    same = reproduction(LIMIT_HIT)
    assert "does not apply     recompile_limit: logged_from" in as_text(same)
    assert as_text(same).endswith("REPRODUCED")


def test_a_crash_is_neither_reproduced_nor_gone() -> None:
    crash = reproduction(cache="fixed_size", failure=Failure(kind="crash", message="died", last_lines=("the last",)))
    assert "NOT RUN: crash: died" in as_text(crash)
    assert "gone" not in as_text(crash)
    assert exit_code(crash) is ExitCode.CELL_NOT_RUN


def test_missing_evidence_is_not_taken_for_gone() -> None:
    nothing = reproduction(cache="fixed_size", outcome=Outcome.ERROR)
    assert exit_code(nothing) is ExitCode.CELL_NOT_RUN
    assert as_data(nothing)["reproduced"] is False


def test_a_forecast_that_raised_before_its_events_is_not_taken_for_gone() -> None:
    raised = Failure(kind="exception", message="IndexError: index 3 is out of bounds")
    broken = reproduction(cache="fixed_size", outcome=Outcome.MODEL_FAILED, suite_failure=raised)
    assert not broken.ended
    assert "gone" not in as_text(broken)
    assert "the compiled forecast raised: IndexError" in as_text(broken)


def test_a_cell_that_compiled_nothing_is_not_taken_for_gone() -> None:
    eager = reproduction(cache="fixed_size", figures={"compilations": Figure(value=0)})
    compiled = reproduction(cache="fixed_size", figures={"compilations": Figure(value=6)})
    assert (eager.ended, compiled.ended) == (False, True)


def test_a_limit_hit_elsewhere_is_not_taken_for_gone() -> None:
    moved = reproduction(LIMIT_HIT.model_copy(update={"function": "forward"}), cache="upstream")
    assert not moved.ended
    assert as_text(moved).endswith("NOT REPRODUCED")


def test_an_unknown_cache_is_refused_with_the_nearest_name() -> None:
    arguments = [str(INCIDENT), "--cache", "fixed_sise", "--matrix", str(ROOT / "matrix.yaml")]
    run = CliRunner().invoke(repro_command, arguments)
    assert isinstance(run.exception, SelectionError)
    assert "fixed_size" in run.exception.hint


@pytest.mark.parametrize("minutes", ["0", "-1", "nan", "inf", "-inf", "soon"])
def test_a_timeout_that_is_no_time_is_a_usage_error(minutes: str) -> None:
    run = CliRunner().invoke(repro_command, [str(INCIDENT), "--timeout", minutes])
    assert run.exit_code == ExitCode.USAGE
    assert "--timeout" in run.output and minutes in run.output


def test_cuda_without_a_gpu_is_refused_before_anything_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toto_compat.runtimes.device.find_gpus", tuple)
    monkeypatch.setattr("toto_compat.repro.command.reproduce", lambda *_, **__: pytest.fail("it was run"))
    arguments = [str(INCIDENT), "--device", "cuda", "--matrix", str(ROOT / "matrix.yaml")]
    run = CliRunner().invoke(repro_command, arguments)
    assert isinstance(run.exception, EnvironmentBuildError)
    assert "no NVIDIA GPU" in run.exception.message


def test_without_an_engine_docker_is_refused_and_not_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from toto_compat.errors import EngineError

    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    monkeypatch.setenv("TOTO_COMPAT_CACHE", str(tmp_path / "cache"))
    run = CliRunner().invoke(
        repro_command, [str(INCIDENT), "--runtime", "docker", "--matrix", str(ROOT / "matrix.yaml")]
    )
    assert isinstance(run.exception, EngineError)


def test_a_log_whose_name_is_too_long_for_a_file_is_one_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOTO_COMPAT_CACHE", str(tmp_path / "cache"))
    incident = yaml.safe_load(INCIDENT.read_text(encoding="utf-8")) | {"log": "n" * 300}
    (tmp_path / "i.yaml").write_text(yaml.safe_dump(incident), encoding="utf-8")
    where = ["--runtime", "venv", "--device", "cpu", "--environment", "torch-2.13.0-cpu", "--explain", "mode"]
    matrix = ["--dry-run", "--matrix", str(ROOT / "matrix.yaml")]
    run = CliRunner().invoke(repro_command, [str(tmp_path / "i.yaml"), *where, *matrix], catch_exceptions=False)
    assert run.exit_code == 0 and f"its log {'n' * 100}" in run.stderr and "is not there; it runs without" in run.stderr
