"""What a job is given and what it leaves: the variables it needs, and no password for others to read."""

from pathlib import Path

import pytest

from tests.runtimes.slurm.small_slurm import TWO_ARRAYS, SmallSlurm
from tests.runtimes.stub_runtime import MATRIX_TEXT, StubRuntime
from toto_compat.evidence.files import read_model
from toto_compat.evidence.store import load_run
from toto_compat.runtimes.slurm.cluster import passed_on
from toto_compat.runtimes.slurm.exchange import NodeResult
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


def test_a_variable_with_an_odd_name_is_not_passed_on() -> None:
    odd = ["LC_A\nB", "LC_A,HF_TOKEN", "LC_A=B", "LC_\u0663"]
    good = ["BASH_FUNC_module%%", "LC_ALL", "PATH"]
    assert passed_on(dict.fromkeys([*odd, *good], "")) == good
