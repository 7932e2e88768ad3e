"""`toto-compat matrix` with everything real but pip and torch: plan, resume, reuse, interruption, exit codes."""

import json
import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from pydantic import BaseModel

from tests.runtimes.stub_runtime import MATRIX_TEXT, StubRuntime
from toto_compat import workflow
from toto_compat.cli import cli
from toto_compat.contract.request import CellRequest, Environment
from toto_compat.contract.result import CellResult
from toto_compat.errors import (
    EnvironmentBuildError,
    ExitCode,
    InputError,
    MatrixFileError,
    SelectionError,
    StorageError,
)
from toto_compat.evidence import files, store
from toto_compat.evidence.store import find_run, load_run
from toto_compat.matrix.asked import Asked
from toto_compat.runtimes import device
from toto_compat.runtimes.seam import OnLine, PreparedEnvironment
from toto_compat.runtimes.source import PACKAGE, CellSource

ROOT = Path(__file__).parents[1]
ENVIRONMENT = "torch-2.13.0-cpu"


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "matrix.yaml").write_text(MATRIX_TEXT, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOTO_COMPAT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(device, "find_gpus", tuple)
    return tmp_path


def matrix(runtime: StubRuntime | None, *arguments: str) -> Result:
    with pytest.MonkeyPatch.context() as patch:
        if runtime:
            patch.setattr(workflow, "open_runtime", lambda *_, **__: runtime)
        return CliRunner().invoke(cli, ["matrix", *arguments])


def stored_cells(run: str = "latest") -> dict[str, Any]:
    return {cell.cell: cell for cell in load_run(find_run(run)).cells}


def test_the_default_is_the_newest_cpu_environment_and_says_what_a_gpu_would_add() -> None:
    result = matrix(StubRuntime())
    assert result.exit_code == ExitCode.OK, result.output
    assert set(stored_cells()) == {f"{ENVIRONMENT}/upstream/default", f"{ENVIRONMENT}/fixed_size/default"}
    assert "a GPU runner would add 2 cells on torch-2.9.0-cu128" in result.stderr


def test_a_dry_run_prints_the_plan_and_leaves_nothing(project: Path) -> None:
    result = matrix(StubRuntime("exit"), "--dry-run")
    assert result.exit_code == ExitCode.OK
    assert "2 cells, runtime venv, device cpu" in result.stderr
    assert "rule of thumb" in result.stderr
    assert not (project / "results").exists()


def test_a_dry_run_as_json_names_what_is_built_downloaded_and_guessed() -> None:
    plan = json.loads(matrix(StubRuntime(broken=(ENVIRONMENT,)), "--dry-run", "--json").stdout)
    assert plan["environments_to_build"] == [ENVIRONMENT]
    assert plan["download_bytes"] > 0
    assert plan["disk_bytes"] == 2 * 10**9
    assert plan["estimated_seconds"] > 0


def test_the_gpus_that_are_compiled_for_can_be_named_and_make_another_cell_of_a_cuda_build() -> None:
    selector = "torch-2.9.0-cu128/upstream/default"
    keys = []
    for options in ((), ("--architecture", "sm_90"), ("--architecture", "sm_90", "--architecture", "sm_80")):
        planned = matrix(StubRuntime(), selector, "--device", "cpu", *options, "--dry-run", "--json")
        keys += [cell["key"] for cell in json.loads(planned.stdout)["cells"]]
    assert len(set(keys)) == 3
    error = matrix(StubRuntime(), selector, "--architecture", "sm_91").exception
    assert isinstance(error, SelectionError)
    assert "sm_91: no such GPU is described" in error.message


def test_a_second_run_takes_unchanged_cells_from_the_store() -> None:
    matrix(StubRuntime(), "--run", "first")
    # a stub that would fail every cell: if one were run, it would show
    result = matrix(StubRuntime("exit"), "--run", "second")
    assert result.exit_code == ExitCode.OK
    again = stored_cells("second")
    assert {(cell.reused, cell.ran_in) for cell in again.values()} == {(True, "first")}
    assert {cell.stored for cell in again.values()} == {cell.stored for cell in stored_cells("first").values()}
    assert "2 of 2 cells are unchanged" in result.stderr


@pytest.mark.parametrize("change", ["lock", "request", "fresh"])
def test_what_changed_is_run_again(project: Path, change: str) -> None:
    matrix(StubRuntime(), "--run", "first")
    options = ["--fresh"] if change == "fresh" else []
    if change == "request":
        changed = MATRIX_TEXT.replace("iterations: 1", "iterations: 2")
        (project / "matrix.yaml").write_text(changed, encoding="utf-8")
    matrix(StubRuntime(lock="other" if change == "lock" else "lock"), "--run", "second", *options)
    assert {cell.reused for cell in stored_cells("second").values()} == {False}


def test_other_gate_limits_do_not_run_anything_again(project: Path) -> None:
    matrix(StubRuntime(), "--run", "first")
    (project / "matrix.yaml").write_text(MATRIX_TEXT + "gates: {speedup: {min: 3}}\n", encoding="utf-8")
    matrix(StubRuntime("exit"), "--run", "second")
    assert {cell.reused for cell in stored_cells("second").values()} == {True}
    rows = json.loads((project / "results/second/compatibility.json").read_text(encoding="utf-8"))["rows"]
    assert {row["gates"]["speedup"]["limit"]["min"] for row in rows} == {3}


def test_a_cell_file_holds_evidence_and_no_verdict(project: Path) -> None:
    matrix(StubRuntime(), "--run", "one")
    for path in (project / "results/one/cells").rglob("*.json"):
        assert {"verdict", "decided_by", "gates"}.isdisjoint(json.loads(path.read_text(encoding="utf-8")))


def test_a_cell_file_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []

    def write_and_note(path: Path, model: BaseModel) -> None:
        written.append(str(path))
        files.write_model(path, model)

    monkeypatch.setattr(store, "write_model", write_and_note)
    matrix(StubRuntime(), "--run", "one")
    cells = [path for path in written if "/cells/" in path]
    assert len(cells) == len(set(cells)) == 2


@pytest.mark.parametrize(
    ("edited", "reused"),
    [
        ("workflow.py", True),
        ("report/table.py", True),
        ("matrix/gates.py", True),
        ("runtimes/local.py", True),
        ("logs/lines.py", True),
        ("cell/suites/speed.py", False),
        ("model/static_step.py", False),
        ("caches/index_variants.py", False),
        ("contract/torch_messages.py", False),
        ("errors.py", False),
    ],
)
def test_only_a_change_to_what_cells_run_runs_them_again(project: Path, edited: str, reused: bool) -> None:
    package = project / "toto_compat"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    matrix(StubRuntime(source=CellSource(package)), "--run", "first")
    with (package / edited).open("a", encoding="utf-8") as file:
        file.write("\n# another line\n")
    matrix(StubRuntime(source=CellSource(package)), "--run", "second")
    assert {cell.reused for cell in stored_cells("second").values()} == {reused}


def test_a_dry_run_fetches_no_checkpoint_and_touches_no_container(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = MATRIX_TEXT.replace("  quick: {}", "  quick: {checkpoint: Datadog/Toto-Open-Base-1.0@main}")
    (project / "matrix.yaml").write_text(text, encoding="utf-8")
    monkeypatch.setenv("HF_HUB_CACHE", str(project / "hub"))
    monkeypatch.setattr("toto_compat.runtimes.prepare.resolve_checkpoint", lambda *_, **__: pytest.fail("fetched"))
    monkeypatch.setattr(StubRuntime, "prepare", lambda *_: pytest.fail("prepared"))
    result = matrix(StubRuntime(), "--dry-run")
    assert result.exit_code == ExitCode.OK, result.output
    assert "downloads the checkpoint Datadog/Toto-Open-Base-1.0@main" in result.stderr


@pytest.mark.parametrize("behaviour", ["exit", "error"])
def test_a_cell_that_could_not_be_run_is_an_exit_code_and_is_tried_again(behaviour: str) -> None:
    result = matrix(StubRuntime({"upstream": behaviour}), "--run", "first")
    assert result.exit_code == ExitCode.CELL_NOT_RUN
    matrix(StubRuntime(), "--run", "second")
    second = stored_cells("second")
    assert second[f"{ENVIRONMENT}/upstream/default"].reused is False
    assert second[f"{ENVIRONMENT}/fixed_size/default"].reused is True


def test_a_cell_that_could_not_be_run_is_told_with_its_last_lines_and_log() -> None:
    result = matrix(StubRuntime({"upstream": "exit"}), "--run", "first")
    assert f"could not be run: {ENVIRONMENT}/upstream/default: crash" in result.stderr
    assert "about to leave" in result.stderr
    log = Path("results/first/logs") / ENVIRONMENT / "upstream" / "default.log"
    assert str(log) in result.stderr
    assert "about to leave" in log.read_text()


def test_a_required_row_that_is_not_pass_is_an_exit_code() -> None:
    result = matrix(StubRuntime(), "--require", "*/fixed_size")
    assert result.exit_code == ExitCode.REQUIREMENT
    assert f"required to be PASS and are not: {ENVIRONMENT}/fixed_size/default" in result.stderr


def test_a_requirement_that_is_not_selected_is_an_error_before_anything_runs(project: Path) -> None:
    result = matrix(StubRuntime(), "*/upstream", "--require", "*/fixed_size")
    assert isinstance(result.exception, SelectionError)
    assert not (project / "results").exists()


def test_an_environment_that_cannot_be_built_does_not_stop_the_others() -> None:
    result = matrix(StubRuntime(broken=("torch-2.12.0-cpu",)), "*-cpu/*", "--run", "first")
    assert result.exit_code == ExitCode.ENVIRONMENT
    cells = stored_cells("first")
    failures = {name: cell.failure.kind for name, cell in cells.items() if cell.failure}
    assert failures == {f"torch-2.12.0-cpu/{cache}/default": "environment" for cache in ("upstream", "fixed_size")}
    assert len(cells) == 4


def test_where_no_environment_can_be_built_nothing_is_left(project: Path) -> None:
    result = matrix(StubRuntime(broken=(ENVIRONMENT,)))
    assert isinstance(result.exception, EnvironmentBuildError)
    assert list((project / "results").iterdir()) == []


def test_results_that_cannot_be_written_are_told_before_anything_runs(project: Path) -> None:
    (project / "results").write_text("a file where the folder should be")
    result = matrix(StubRuntime())
    assert isinstance(result.exception, StorageError)
    assert "results" in result.exception.message
    assert "--results" in result.exception.hint


def test_a_run_under_an_old_name_holds_only_its_own_cells() -> None:
    matrix(StubRuntime(), f"{ENVIRONMENT}/*", "--run", "nightly")
    assert len(stored_cells("nightly")) == 2
    matrix(StubRuntime(), f"{ENVIRONMENT}/upstream", "--run", "nightly")
    assert set(stored_cells("nightly")) == {f"{ENVIRONMENT}/upstream/default"}


def test_a_stored_cell_names_no_folder_of_this_machine(project: Path) -> None:
    matrix(StubRuntime(), "--run", "one")
    text = "".join(path.read_text(encoding="utf-8") for path in (project / "results/one/cells").rglob("*.json"))
    assert str(project) not in text


def test_a_required_cell_that_nobody_selected_is_told_as_that() -> None:
    result = matrix(StubRuntime(), "torch-2.13.0-cpu/*", "--require", "torch-2.12.0-cpu/upstream/default")
    assert isinstance(result.exception, SelectionError)
    assert "torch-2.12.0-cpu/upstream/default is not among the 2 cells" in result.exception.message
    assert "select it" in result.exception.hint


def test_the_plan_says_what_cannot_be_built_before_anything_is_tried(project: Path) -> None:
    text = MATRIX_TEXT.replace('torch: "2.13.0", build: cpu', 'torch: "2.13.0", build: cpu, python: "3.99"')
    (project / "matrix.yaml").write_text(text, encoding="utf-8")
    result = matrix(None, "torch-2.13.0-cpu/*", "--dry-run", "--runtime", "venv")
    assert result.exit_code == 0
    assert "torch-2.13.0-cpu (cannot be built)" in result.stderr
    assert "Python 3.99 is not on this machine" in result.stderr


def test_cuda_without_a_gpu_is_an_error_that_names_the_way_out() -> None:
    result = matrix(StubRuntime(), "--device", "cuda")
    assert isinstance(result.exception, EnvironmentBuildError)
    assert "--device cpu" in result.exception.hint


def test_a_cuda_environment_without_a_gpu_runs_its_build_on_the_cpu() -> None:
    result = matrix(StubRuntime(), "torch-2.9.0-cu128/upstream", "--device", "cpu")
    assert "its CUDA build on the CPU" in result.stderr
    assert stored_cells()["torch-2.9.0-cu128/upstream/default"].request.device == "cpu"


@pytest.mark.parametrize("name", ["latest", "../elsewhere", ".hidden", "a b"])
def test_a_run_name_that_is_no_folder_name_is_refused(name: str) -> None:
    assert isinstance(matrix(StubRuntime(), "--run", name).exception, SelectionError)


def test_stdout_is_the_json_alone() -> None:
    shown = json.loads(matrix(StubRuntime(), "--json").stdout)
    assert [row["cache"] for row in shown["rows"]] == ["upstream", "fixed_size"]


def test_a_run_that_is_part_of_something_leaves_its_table_on_disk_and_prints_none(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(workflow, "open_runtime", lambda *_, **__: StubRuntime("exit"))
    asked = Asked(run="part", as_part=True)
    assert workflow.run_matrix(asked) is ExitCode.CELL_NOT_RUN
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "could not be run" in printed.err
    assert (project / "results" / "part" / "compatibility.html").is_file()


def test_no_scratch_is_left_behind(project: Path) -> None:
    matrix(StubRuntime({"upstream": "killed"}))
    assert [path.name for path in (project / "cache" / "s").iterdir() if path.is_dir()] == []


# --- interrupted and killed: a run in a process of its own ----------------------------------------------------------


def start_run(project: Path) -> tuple[subprocess.Popen[str], int]:
    """A run whose first cell has finished and whose second hangs; with the pid of that cell's child."""
    behaviour = json.dumps({"fixed_size": "hang"})
    arguments = ["matrix", f"{ENVIRONMENT}/*", "--device", "cpu", "--jobs", "1", "--run", "first"]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.runtimes.stub_runtime", behaviour, *arguments],
        cwd=project,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if "fixed_size/default: recompile start" in line:
            break
    children = list((project / "cache" / "s").glob("*/cell.log"))
    assert len(children) == 1, seen
    pid = next(int(line.split()[1]) for line in children[0].read_text().splitlines() if line.startswith("child "))
    return process, pid


def assert_ends(pid: int) -> None:
    """Wait for a process that is not ours to end; the kernel tells, nobody polls."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        ready, _, _ = select.select([handle], [], [], 30)
        assert ready, f"process {pid} is still alive"
    finally:
        os.close(handle)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_stops_its_children_keeps_what_is_finished_and_resumes(
    project: Path, number: signal.Signals
) -> None:
    process, child = start_run(project)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == ExitCode.INTERRUPTED
    assert "1 of 2 cells are kept" in output
    assert "the same command again" in output
    assert_ends(child)
    assert set(stored_cells("first")) == {f"{ENVIRONMENT}/upstream/default"}

    result = matrix(StubRuntime(), f"{ENVIRONMENT}/*", "--device", "cpu", "--run", "first")
    assert result.exit_code == ExitCode.OK
    resumed = {cell.request.cache.name: cell.reused for cell in stored_cells("first").values()}
    assert resumed == {"upstream": True, "fixed_size": False}


def test_cells_do_not_outlive_a_runner_that_was_killed(project: Path) -> None:
    process, child = start_run(project)
    process.kill()
    process.communicate(timeout=60)
    assert_ends(child)
    # and the next run removes the scratch folder that nobody could
    matrix(StubRuntime(), f"{ENVIRONMENT}/*", "--device", "cpu")
    assert [path.name for path in (project / "cache" / "s").iterdir() if path.is_dir()] == []


def test_a_checkpoint_that_is_to_be_downloaded_leaves_keys_open(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = MATRIX_TEXT.replace("  quick: {}", "  quick: {checkpoint: Datadog/Toto-Open-Base-1.0@main}")
    (project / "matrix.yaml").write_text(text, encoding="utf-8")
    monkeypatch.setenv("HF_HUB_CACHE", str(project / "hub"))
    plan = json.loads(matrix(StubRuntime(), "--dry-run", "--json").stdout)
    assert plan["checkpoint_to_download"] == "Datadog/Toto-Open-Base-1.0@main"
    assert {cell["key"] for cell in plan["cells"]} == {""}


class EditingRuntime(StubRuntime):
    """Writes into the user's cache file while its cell runs, or already while it starts."""

    def __init__(self, path: Path, text: str, *, at_start: bool = False) -> None:
        super().__init__()
        self.path, self.text, self.at_start = path, text, at_start

    def run_cell(self, prepared: PreparedEnvironment, request: CellRequest, *rest: Any, **options: Any) -> CellResult:
        mine = request.cell.cache == "mine"
        if mine and self.at_start:
            self.path.write_text(self.text, encoding="utf-8")
        done = super().run_cell(prepared, request, *rest, **options)
        if mine:
            self.path.write_text(self.text, encoding="utf-8")
        return done


@pytest.fixture
def mine(project: Path) -> Path:
    text = MATRIX_TEXT.replace("caches:\n", "caches:\n  mine: {source: 'mine.py:Mine'}\n")
    (project / "matrix.yaml").write_text(text, encoding="utf-8")
    (project / "mine.py").write_text("class Mine: pass\n", encoding="utf-8")
    return project / "mine.py"


@pytest.mark.parametrize("at_start", [False, True])
def test_a_half_saved_cache_file_stops_no_run(mine: Path, at_start: bool) -> None:
    runtime = EditingRuntime(mine, "class Mine(:\n", at_start=at_start)
    assert matrix(runtime, "--run", "one", "--jobs", "1").exit_code == ExitCode.OK
    assert len(stored_cells("one")) == 3


def test_a_file_that_was_edited_meanwhile_is_run_again(mine: Path) -> None:
    matrix(EditingRuntime(mine, "class Mine: x = 1\n"), "--run", "one")
    matrix(StubRuntime(), "--run", "two")
    again = {cell.cell.cache: cell.reused for cell in stored_cells("two").values()}
    assert again == {"mine": False, "upstream": True, "fixed_size": True}


def test_a_users_cache_is_stored_without_the_folder_it_lay_in(mine: Path, project: Path) -> None:
    matrix(StubRuntime(), "--run", "one")
    [cell] = [cell for cell in stored_cells("one").values() if cell.cell.cache == "mine"]
    assert cell.request.cache.source == "mine.py:Mine"


def test_a_source_edited_while_an_environment_is_built_is_not_mixed_in(project: Path) -> None:
    package = project / "toto_compat"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))

    class Slow(StubRuntime):
        def prepare(self, environment_name: str, environment: Environment, say: OnLine) -> PreparedEnvironment:
            with (package / "cell" / "run.py").open("a", encoding="utf-8") as file:
                file.write("# edited\n")
            return super().prepare(environment_name, environment, say)

    matrix(Slow(source=CellSource(package)), "--run", "one")
    run = load_run(find_run("one"))
    assert {cell.provenance.source_hash for cell in run.cells} == {run.info.source_hash}


def test_a_store_file_nested_too_deeply_is_run_again(project: Path) -> None:
    matrix(StubRuntime(), "--run", "one")
    for path in (project / "cache" / "evidence").glob("*/*.json"):
        path.write_text("[" * 200_000, encoding="utf-8")
    assert matrix(StubRuntime(), "--run", "two").exit_code == ExitCode.OK
    assert {cell.reused for cell in stored_cells("two").values()} == {False}


def test_a_cell_stored_by_another_run_while_an_environment_was_built_is_taken(project: Path) -> None:
    class JustBuilt(StubRuntime):
        """Its lock is known only once it is prepared."""

        def lock_of(self, environment_name: str, environment: Environment) -> str | None:  # noqa: ARG002
            return None

    matrix(StubRuntime(), "--run", "one")
    matrix(JustBuilt("exit"), "--run", "two")
    assert {cell.reused for cell in stored_cells("two").values()} == {True}


@pytest.mark.parametrize(
    ("arguments", "error"), [(["--matrix", "nope.yaml"], MatrixFileError), (["--profile", "nope"], SelectionError)]
)
def test_a_mistake_of_the_users_is_told_before_the_machine_is_asked(
    arguments: list[str], error: type[Exception]
) -> None:
    assert isinstance(matrix(StubRuntime(), "--device", "cuda", *arguments).exception, error)


def test_a_checkpoint_folder_that_is_not_there_is_told_in_a_dry_run(project: Path) -> None:
    text = MATRIX_TEXT.replace("  quick: {}", "  quick: {checkpoint: ./weights}")
    (project / "matrix.yaml").write_text(text, encoding="utf-8")
    assert isinstance(matrix(StubRuntime(), "--dry-run").exception, InputError)


def test_only_lowering_takes_cuda_builds_on_a_machine_without_a_gpu() -> None:
    result = matrix(
        StubRuntime(), "--device", "cuda", "--lower-only", "--dry-run", "--matrix", str(ROOT / "matrix.yaml")
    )
    assert result.exit_code == ExitCode.OK, result.output
    assert "torch-2.9.0-cu128/fixed_size/reduce-overhead" in result.output
    assert "-cpu/" not in result.output


def test_only_lowering_of_a_cpu_build_is_an_error_that_says_what_to_select() -> None:
    result = matrix(
        StubRuntime(), "torch-2.13.0-cpu/*", "--lower-only", "--dry-run", "--matrix", str(ROOT / "matrix.yaml")
    )
    assert isinstance(result.exception, SelectionError)
    assert "CPU builds" in str(result.exception)
