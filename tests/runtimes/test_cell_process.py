"""Whatever happens to a cell's process is a result, and nothing of it stays alive."""

import os
from pathlib import Path
from typing import Literal

import pytest

from tests.runtimes.stub_runtime import StubRuntime, prepared
from tests.verdict.sample_cells import cell_request
from toto_compat.contract.request import CellRequest, Device, Limits
from toto_compat.contract.result import CellResult, Failure, Outcome, Provenance, SuiteEvidence
from toto_compat.contract.suites import Suite
from toto_compat.errors import EnvironmentBuildError
from toto_compat.evidence.files import write_model
from toto_compat.matrix.request import cell_variables
from toto_compat.runtimes import cell_process
from toto_compat.runtimes.cell_process import (
    CGROUP_VARIABLE,
    LOG_FILE,
    RESULT_FILE,
    ProcessEnd,
    check_control_group,
    collect_result,
)
from toto_compat.runtimes.source import CellSource
from toto_compat.runtimes.venv import VenvRuntime


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOTO_COMPAT_CACHE", str(tmp_path_factory.mktemp("cache")))


def request(*, minutes: float = 5, memory: str = "8g", device: Device = Device.CPU) -> CellRequest:
    plain = cell_request()
    profile = plain.profile.model_copy(
        update={"timeout_minutes": minutes, "suites": (Suite.RECOMPILE, Suite.EQUIVALENCE)}
    )
    limits = Limits(memory=memory)
    variables = cell_variables(limits, device)
    return plain.model_copy(update={"profile": profile, "limits": limits, "device": device, "variables": variables})


def run(
    behaviour: str, folder: Path, asked: CellRequest | None = None, runtime: StubRuntime | None = None, **options: str
) -> tuple[CellResult, list[str]]:
    asked = asked or request()
    lines: list[str] = []
    runtime = runtime or StubRuntime(behaviour)
    environment = prepared(asked.cell.environment, asked.environment)
    return runtime.run_cell(environment, asked, folder, lines.append, gpu=options.get("gpu")), lines


def assert_gone(lines: list[str]) -> None:
    """The grandchild that had a session of its own is dead too."""
    pid = next(int(line.split()[1]) for line in lines if line.startswith("child "))
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_measured_cell_is_returned_with_lock_runtime_and_source(tmp_path: Path) -> None:
    result, lines = run("measure", tmp_path)
    assert result.failure is None
    assert set(result.evidence) == {Suite.RECOMPILE, Suite.EQUIVALENCE}
    known = result.provenance
    assert (known.lock, known.runtime, known.source_hash) == ("lock", "venv", CellSource().hash)
    assert "::suite recompile start" in lines
    assert "an ordinary line" in (tmp_path / LOG_FILE).read_text()


@pytest.mark.parametrize(
    ("behaviour", "kind", "says"),
    [
        ("exit", "crash", "exit code 3"),
        ("segfault", "crash", "SIGSEGV"),
        ("killed", "out_of_memory", "SIGKILL"),
        ("garbage", "crash", "not valid"),
        ("other cell", "crash", "another/one/default"),
    ],
)
def test_a_cell_that_dies_is_a_result_that_says_how(tmp_path: Path, behaviour: str, kind: str, says: str) -> None:
    result, _ = run(behaviour, tmp_path)
    assert result.failure is not None
    assert result.failure.kind == kind
    assert says in result.failure.message
    assert result.evidence == {}


@pytest.mark.parametrize(
    ("left", "says"), [("link", "it is a link"), ("pipe", "not a regular file"), ("folder", "not a regular file")]
)
def test_only_a_regular_file_is_read_as_a_result(tmp_path: Path, left: str, says: str) -> None:
    run("measure", tmp_path)
    (tmp_path / RESULT_FILE).rename(tmp_path / "elsewhere.json")
    match left:
        case "link":
            (tmp_path / RESULT_FILE).symlink_to(tmp_path / "elsewhere.json")
        case "pipe":
            os.mkfifo(tmp_path / RESULT_FILE)
        case "folder":
            (tmp_path / RESULT_FILE).mkdir()
    result = collect_result(request(), tmp_path, ProcessEnd(code=0), Provenance())
    assert result.evidence == {}
    assert result.failure is not None
    assert says in result.failure.message


def test_a_result_too_large_to_be_one_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cell_process, "_LARGEST_RESULT", 10)
    result, _ = run("measure", tmp_path)
    assert result.failure is not None
    assert "it is larger than" in result.failure.message


def test_last_lines_of_a_dead_cell_are_kept(tmp_path: Path) -> None:
    result, _ = run("exit", tmp_path)
    assert result.failure is not None
    assert result.failure.last_lines == ("about to leave",)


# --- memory -----------------------------------------------------------------------------------------------------------


def left_by(folder: Path, evidence: SuiteEvidence, *, killed_for_memory: bool = False) -> SuiteEvidence:
    """What becomes of the evidence that a cell leaves which ended like this."""
    asked = request()
    good = SuiteEvidence(suite=Suite.EQUIVALENCE, outcome=Outcome.MEASURED)
    left = CellResult(
        cell=asked.cell,
        request=asked,
        provenance=Provenance(),
        evidence={Suite.RECOMPILE: evidence, Suite.EQUIVALENCE: good},
    )
    write_model(folder / RESULT_FILE, left)
    result = collect_result(asked, folder, ProcessEnd(code=0, killed_for_memory=killed_for_memory), Provenance())
    assert result.evidence[Suite.EQUIVALENCE] == good  # nobody of it died
    assert result.failure is None
    return result.evidence[Suite.RECOMPILE]


@pytest.mark.parametrize(
    ("outcome", "kind", "message"),
    [
        (Outcome.MODEL_FAILED, "exception", "A compilation subprocess exited unexpectedly"),
        (Outcome.ERROR, "crash", "the observe group was killed by SIGKILL"),
    ],
)
def test_what_a_process_killed_for_memory_leaves_behind_is_blamed_on_no_cache(
    tmp_path: Path, outcome: Outcome, kind: Literal["exception", "crash"], message: str
) -> None:
    failed = SuiteEvidence(suite=Suite.RECOMPILE, outcome=outcome, failure=Failure(kind=kind, message=message))
    assert left_by(tmp_path, failed) == failed
    found = left_by(tmp_path, failed, killed_for_memory=True)
    assert found.outcome is Outcome.ERROR
    assert found.failure is not None
    assert found.failure.kind == "out_of_memory"
    assert message in found.failure.message
    assert "limit of this session or job" in found.failure.message


def test_a_neighbour_killed_for_memory_changes_nothing_of_a_crash(tmp_path: Path) -> None:
    failure = Failure(kind="crash", message="the observe group was killed by SIGSEGV")
    crashed = SuiteEvidence(suite=Suite.RECOMPILE, outcome=Outcome.ERROR, failure=failure)
    assert left_by(tmp_path, crashed, killed_for_memory=True) == crashed


def test_a_control_group_that_is_none_is_told_before_anything_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder").mkdir()
    monkeypatch.setenv(CGROUP_VARIABLE, str(tmp_path / "folder"))
    asked, said = request(), list[str]()
    runtime = VenvRuntime(CellSource(), limits=Limits(), device=Device.CPU)
    with pytest.raises(EnvironmentBuildError, match="cells cannot have control groups there"):
        runtime.prepare(asked.cell.environment, asked.environment, said.append)
    assert said == []
    assert list((tmp_path / "folder").iterdir()) == []
    monkeypatch.delenv(CGROUP_VARIABLE)
    check_control_group()


def test_suites_that_finished_before_the_cell_died_are_kept(tmp_path: Path) -> None:
    result, _ = run("half", tmp_path)
    assert result.failure is not None
    assert set(result.evidence) == {Suite.RECOMPILE}


def test_a_cell_that_hangs_is_killed_with_all_its_children(tmp_path: Path) -> None:
    result, lines = run("hang", tmp_path, request(minutes=0.02))
    assert result.failure is not None
    assert result.failure.kind == "timeout"
    assert "0.02 minutes" in result.failure.message
    assert_gone(lines)


def test_a_cell_asked_to_stop_at_its_timeout_keeps_what_it_wrote(tmp_path: Path) -> None:
    result, lines = run("stop politely", tmp_path, request(minutes=0.02))
    assert result.failure is not None
    assert result.failure.kind == "timeout"
    assert set(result.evidence) == {Suite.RECOMPILE, Suite.EQUIVALENCE}
    assert_gone(lines)


def test_a_cell_over_its_memory_limit_is_out_of_memory(tmp_path: Path) -> None:
    result, lines = run("memory", tmp_path, request(memory="128m"))
    assert result.failure is not None
    assert result.failure.kind == "out_of_memory"
    assert "128m" in result.failure.message
    assert_gone(lines)


def test_stop_ends_running_cells_and_lets_none_start(tmp_path: Path) -> None:
    runtime = StubRuntime("hang")
    asked = request()
    lines: list[str] = []

    def on_line(line: str) -> None:
        lines.append(line)
        if line.startswith("::suite"):
            runtime.stop()

    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    environment = prepared(asked.cell.environment, asked.environment)
    for name in ("first", "second"):
        result = runtime.run_cell(environment, asked, tmp_path / name, on_line)
        assert result.failure is not None
        assert result.failure.kind == "interrupted"
    assert sum(line.startswith("child ") for line in lines) == 1
    assert_gone(lines)


def seen_environment(result: CellResult) -> dict[str, str]:
    found: dict[str, str] = result.evidence[Suite.RECOMPILE].details["environment"]
    return found


def test_nothing_of_the_users_shell_reaches_a_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCH_LOGS", "TORCHDYNAMO_DISABLE", "TOTO_DISABLE_COMPILE", "PYTHONSTARTUP", "PIP_INDEX_URL"):
        monkeypatch.setenv(name, "1")
    found = seen_environment(run("environment", tmp_path)[0])
    leaked = {name for name in found if name.startswith(("TORCH_", "TORCHDYNAMO", "TOTO_D", "PIP_", "PYTHONSTARTUP"))}
    assert leaked == set()
    assert found["OMP_NUM_THREADS"] == "1"
    assert found["HOME"] == str(tmp_path / "home")
    assert found["PYTHONPATH"] == str(CellSource().folder)


def test_a_cuda_build_on_the_cpu_sees_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert seen_environment(run("environment", tmp_path)[0])["CUDA_VISIBLE_DEVICES"] == ""


def test_a_cuda_cell_sees_the_one_gpu_it_was_given(tmp_path: Path) -> None:
    result, _ = run("environment", tmp_path, request(device=Device.CUDA), gpu="1")
    assert seen_environment(result)["CUDA_VISIBLE_DEVICES"] == "1"
