"""The whole of `--explain`, with a stand-in for the cells: everything but pip and torch is real."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.repro.production_events import LIMIT_HIT
from tests.runtimes.stub_runtime import StubRuntime
from toto_compat.contract.request import CellRequest
from toto_compat.contract.result import CellResult, Failure, Figure, Outcome, Provenance, SuiteEvidence
from toto_compat.contract.suites import Suite
from toto_compat.errors import ExitCode
from toto_compat.evidence.references import KnownReferences
from toto_compat.evidence.store import CellStore
from toto_compat.matrix.load import load_matrix
from toto_compat.repro.command import repro_command
from toto_compat.repro.incident import load_incident
from toto_compat.repro.reproduce import incident_request, reproduce_in
from toto_compat.runtimes.seam import OnLine, PreparedEnvironment

ROOT = Path(__file__).parents[2]
INCIDENT = ROOT / "incidents" / "2025-10-30-recompile-limit.yaml"
OPTIONS = ["--environment", "torch-2.13.0-cpu", "--device", "cpu", "--matrix", str(ROOT / "matrix.yaml")]


class ActedRuntime(StubRuntime):
    """Plays the incident: the list index hits torch's own limit, upstream raises, fixed_size is quiet."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[str] = []
        self.interrupted_by = ""  # the cache at which somebody presses Ctrl-C

    def run_cell(
        self,
        prepared: PreparedEnvironment,
        request: CellRequest,
        folder: Path,  # noqa: ARG002 - the protocol's
        on_line: OnLine,  # noqa: ARG002
        *,
        gpu: str | None = None,  # noqa: ARG002
        references: KnownReferences | None = None,  # noqa: ARG002
    ) -> CellResult:
        if request.cache.name == self.interrupted_by:
            raise KeyboardInterrupt
        self.ran.append(request.cache.name)
        hit = request.cache.name == "list_index" and request.settings.recompile_limit is None
        raises = request.cache.name == "upstream"
        counts = {"recompiles_total": 0 if request.cache.name == "fixed_size" else 63, "compilations": 9}
        evidence = SuiteEvidence(
            suite=Suite.RECOMPILE,
            outcome=Outcome.MODEL_FAILED if raises else Outcome.MEASURED,
            failure=Failure(kind="exception", message="IndexError: 3") if raises else None,
            figures={name: Figure(value=count) for name, count in counts.items()},
            events=(LIMIT_HIT,) if hit else (),
        )
        return CellResult(
            cell=request.cell,
            request=request,
            provenance=Provenance(torch="2.13.0+cpu", runtime="venv", lock=prepared.lock),
            evidence={Suite.RECOMPILE: evidence},
        )


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ActedRuntime:
    acted = ActedRuntime()
    monkeypatch.setenv("TOTO_COMPAT_CACHE", str(tmp_path))
    monkeypatch.setattr("toto_compat.repro.explain.open_runtime", lambda *_, **__: acted)
    monkeypatch.setattr("toto_compat.repro.reproduce.open_runtime", lambda *_, **__: acted)
    return acted


def test_the_plan_comes_first_then_the_table_and_the_sentence(runtime: ActedRuntime) -> None:
    run = CliRunner().invoke(repro_command, [str(INCIDENT), "--explain", "cache,settings", *OPTIONS])
    assert run.exit_code == ExitCode.OK, run.output  # of the incident as it is: REPRODUCED
    assert run.stdout.splitlines()[-1] == (
        "The smallest change that ends it is recompile_limit 256 (63 recompiles). "
        "So do cache fixed_size (0 recompiles), cache compile_friendly (63 recompiles)."
    )
    assert "raises: IndexError: 3" in run.stdout
    assert run.stderr.startswith("the incident itself: to run, about ")
    assert sorted(runtime.ran) == ["compile_friendly", "fixed_size", *["list_index"] * 3, "upstream"]


def test_a_run_that_was_broken_off_goes_on_where_it_was(runtime: ActedRuntime) -> None:
    runtime.interrupted_by = "compile_friendly"
    arguments = [str(INCIDENT), "--explain", "cache", "--json", *OPTIONS]
    assert CliRunner().invoke(repro_command, arguments).exit_code != 0
    before, runtime.interrupted_by = list(runtime.ran), ""
    run = CliRunner().invoke(repro_command, arguments)
    again = runtime.ran[len(before) :]
    assert "list_index" in before and "list_index" not in again
    assert not {"upstream", "fixed_size"} & set(before) & set(again)
    told = json.loads(run.stdout)
    assert told["verdict"] == "REPRODUCED" and told["stored"]
    assert told["explanation"]["smallest"] == "cache fixed_size"


def test_a_log_that_was_rotated_away_does_not_keep_its_incident_from_being_run(
    runtime: ActedRuntime, tmp_path: Path
) -> None:
    incident = tmp_path / "incident.yaml"
    incident.write_text(f"{INCIDENT.read_text(encoding='utf-8')}log: logs/prod.log\n", encoding="utf-8")
    run = CliRunner().invoke(repro_command, [str(incident), *OPTIONS])
    assert run.stdout.splitlines()[-1] == "REPRODUCED" and runtime.ran == ["list_index"]
    assert "its log logs/prod.log is not there; it runs without" in run.stderr


def test_without_explain_it_is_really_run_again_unless_what_is_stored_is_asked_for(runtime: ActedRuntime) -> None:
    for extra, runs in ((), 1), ((), 2), (("--stored",), 2):
        run = CliRunner().invoke(repro_command, [str(INCIDENT), *OPTIONS, *extra])
        assert run.stdout.splitlines()[-1] == "REPRODUCED"
        assert len(runtime.ran) == runs
        assert ("stored 2" in run.stdout) is bool(extra)


def test_an_incidents_variables_reach_the_cells_process_and_nothing_of_the_shell_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOTO_COMPAT_CACHE", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_MAX_AUTOTUNE", "1")
    matrix = load_matrix(ROOT / "matrix.yaml")
    variables = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    incident = load_incident(INCIDENT).model_copy(update={"variables": variables})
    request = incident_request(incident, ROOT, matrix, ROOT / "matrix.yaml", environment="torch-2.13.0-cpu")
    told = reproduce_in(StubRuntime("environment"), CellStore(tmp_path), incident, request, matrix).result
    seen = told.evidence[Suite.RECOMPILE].details["environment"]
    assert seen["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert "TORCHINDUCTOR_MAX_AUTOTUNE" not in seen
