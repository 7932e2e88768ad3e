"""What a job is given and what it leaves: the variables it needs, and no password for others to read."""

import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.runtimes.slurm.small_slurm import TWO_ARRAYS, SmallSlurm
from tests.runtimes.stub_runtime import MATRIX_TEXT, StubRuntime
from toto_compat.contract.result import CellResult
from toto_compat.evidence.files import read_model
from toto_compat.evidence.store import load_run
from toto_compat.runtimes.seam import Runtime
from toto_compat.runtimes.slurm import node
from toto_compat.runtimes.slurm.cluster import passed_on
from toto_compat.runtimes.slurm.exchange import NodeResult, Task
from toto_compat.runtimes.slurm.node import run_task

PASSWORD = "s3cr3t"  # noqa: S105 - of nobody
WITH_PASSWORD = MATRIX_TEXT.replace("build: cpu}", f'build: cpu, index: "https://me:{PASSWORD}@host/simple"}}')


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SmallSlurm:
    slurm = SmallSlurm(tmp_path, monkeypatch)
    slurm.configure(TWO_ARRAYS, WITH_PASSWORD)
    return slurm


def files_with(text: str, folder: Path) -> list[str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [str(path.relative_to(folder)) for path in files if text.encode() in path.read_bytes()]


def test_what_nodes_are_told_is_for_the_user_alone_and_gone_at_the_end(slurm: SmallSlurm) -> None:
    slurm.submit()
    assert slurm.exchange.folder.stat().st_mode & 0o777 == 0o700
    assert files_with(PASSWORD, slurm.exchange.folder / "tasks")
    for task in slurm.submitted.cells:
        run_task(str(slurm.exchange.task(task.number)), open_with=lambda _: StubRuntime())
        result = read_model(slurm.exchange.result(task.number), NodeResult)
        assert result.nonce == slurm.submitted.nonce
    assert files_with(PASSWORD, slurm.exchange.folder / "results") == []
    slurm.call("status", "one")
    assert len(load_run(slurm.run).cells) == 4
    assert files_with(PASSWORD, slurm.run) == []
    assert not (slurm.exchange.folder / "tasks").exists()


def test_a_job_that_is_put_back_after_it_left_its_result_runs_nothing(slurm: SmallSlurm) -> None:
    slurm.submit()
    path, opened = str(slurm.exchange.task(slurm.submitted.cells[0].number)), list[str]()

    def open_stub(task: Task) -> Runtime:
        opened.append(task.request.cell)
        return StubRuntime()

    for _ in range(2):
        run_task(path, open_with=open_stub)
    assert len(opened) == 1


def test_a_source_that_is_not_what_was_submitted_runs_nothing(slurm: SmallSlurm) -> None:
    slurm.submit()
    number = slurm.submitted.cells[0].number
    source = Path(read_model(slurm.exchange.task(number), Task).source)
    (source / "errors.py").write_bytes(b"")  # as after a loss of power
    run_task(str(slurm.exchange.task(number)))
    failure = read_model(slurm.exchange.result(number), NodeResult).result.failure
    assert failure is not None
    assert (failure.kind, "not what was submitted any more" in failure.message) == ("environment", True)


def test_what_an_earlier_run_left_is_no_result_of_a_job(slurm: SmallSlurm) -> None:
    slurm.submit()
    number = slurm.submitted.cells[0].number
    slurm.leave_result(number, nonce="0" * 32)
    run_task(str(slurm.exchange.task(number)), open_with=lambda _: StubRuntime())
    assert read_model(slurm.exchange.result(number), NodeResult).nonce == slurm.submitted.nonce


def test_a_job_whose_shared_folder_is_away_waits_with_its_result(
    slurm: SmallSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.submit()
    number, results = slurm.submitted.cells[0].number, slurm.exchange.folder / "results"
    results.rename(tmp_path / "away")
    waited = list[float]()

    def wait(seconds: float) -> None:
        waited.append(seconds)
        assert not results.exists()  # nothing is written into the place where nothing is mounted
        (tmp_path / "away").rename(results)

    monkeypatch.setattr(node, "time", SimpleNamespace(monotonic=time.monotonic, sleep=wait))
    run_task(str(slurm.exchange.task(number)), open_with=lambda _: StubRuntime())
    assert len(waited) == 1
    assert read_model(slurm.exchange.result(number), NodeResult).result.failure is None


def test_cells_lie_on_the_nodes_own_disk(slurm: SmallSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Locks of some shared file systems hold on one node alone: there another node would take a cell for abandoned."""
    slurm.submit()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    places = set[Path]()

    class Looks(StubRuntime):
        def run_cell(self, *asked: Any, **given: Any) -> CellResult:
            places.add(asked[2])
            return super().run_cell(*asked, **given)

    first, second = (task.number for task in slurm.submitted.cells[:2])
    run_task(str(slurm.exchange.task(first)), open_with=lambda _: Looks())
    assert {place.is_relative_to(tmp_path / "tmp") for place in places} == {True}
    places.clear()
    of_the_job = tmp_path / "job"
    of_the_job.mkdir()
    monkeypatch.setenv("SLURM_TMPDIR", str(of_the_job))
    run_task(str(slurm.exchange.task(second)), open_with=lambda _: Looks())
    assert {place.is_relative_to(of_the_job) for place in places} == {True}


def test_a_cancelled_run_leaves_no_password(slurm: SmallSlurm) -> None:
    slurm.submit()
    slurm.call("cancel", "one")
    assert files_with(PASSWORD, slurm.run) == []


def test_a_job_gets_the_variables_that_it_needs_and_no_tokens(
    slurm: SmallSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "MY_OWN", "https_proxy"):
        monkeypatch.setenv(name, "x")
    slurm.submit()
    for script in slurm.scripts:
        (line,) = [line for line in script.splitlines() if line.startswith("#SBATCH --export=")]
        names = set(line.partition("=")[2].split(","))
        assert {"PATH", "HOME", "TOTO_COMPAT_CACHE", "https_proxy"} <= names
        assert not names & {"HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "MY_OWN", "ALL", "NONE"}


def dependencies(slurm: SmallSlurm) -> list[str]:
    lines = [line for script in slurm.scripts for line in script.splitlines() if "--dependency=" in line]
    return [line.partition("=")[2] for line in lines]


def test_jobs_at_a_time_are_those_of_the_whole_run_and_not_of_each_array(slurm: SmallSlurm) -> None:
    slurm.submit("--jobs", "1")
    # 201 and 202: the references of each release; 203 and 204: its cells
    assert dependencies(slurm) == ["afterany:201", "afterany:201:202", "afterany:202:203"]


def test_without_a_limit_no_array_waits_for_another(slurm: SmallSlurm) -> None:
    slurm.submit()
    assert dependencies(slurm) == ["afterany:201", "afterany:202"]


def test_a_variable_with_an_odd_name_is_not_passed_on() -> None:
    odd = ["LC_A\nB", "LC_A,HF_TOKEN", "LC_A=B", "LC_\u0663"]
    good = ["BASH_FUNC_module%%", "LC_ALL", "PATH"]
    assert passed_on(dict.fromkeys([*odd, *good], "")) == good
