"""`toto-compat releases` against indexes on loopback: listing, checking and adding, with everything that goes wrong."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.releases.local_index import LocalIndex, wheel
from toto_compat.cli import cli
from toto_compat.environments.locks import lock_path, read_lock
from toto_compat.errors import EnvironmentBuildError, ExitCode, SelectionError, TotoCompatError
from toto_compat.matrix.load import load_matrix

NEWEST = "2.15.0"  # of the matrix that is shipped

Run = Callable[..., Result]


@pytest.fixture
def run(matrix_file: Path, index: LocalIndex) -> Run:
    index.torch(NEWEST, cuda="13.2")

    def invoke(*options: str) -> Result:
        return CliRunner().invoke(cli, ["releases", "--matrix", str(matrix_file), *options])

    return invoke


def listed(result: Result) -> dict[str, dict[str, object]]:
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return {one["torch"]: one for one in json.loads(result.stdout)["releases"]}


def error_of(result: Result) -> TotoCompatError:
    assert isinstance(result.exception, TotoCompatError), result.output
    return result.exception


def everything_written(matrix_file: Path) -> dict[str, bytes]:
    folder = matrix_file.parent
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "cache" not in path.relative_to(folder).parts
    }


# --- listing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_json", [True, False], ids=["PEP 691", "PEP 503"])
@pytest.mark.parametrize("metadata", [True, False], ids=["core metadata", "ranges"])
def test_a_release_is_told_with_its_state_cuda_and_python(
    run: Run, index: LocalIndex, as_json: bool, metadata: bool
) -> None:
    index.as_json = as_json
    index.torch("2.16.0", metadata=metadata)
    index.torch("2.16.0", python="cp312", metadata=metadata)
    index.torch("2.12.9", cuda="12.8", metadata=metadata)
    index.torch("1.9.0", cuda="10.2", metadata=metadata)
    found = listed(run("--json"))
    assert "1.9.0" not in found, "older than all of the matrix"
    new, between, known = found["2.16.0"], found["2.12.9"], found[NEWEST]
    assert (new["state"], new["build"], new["pythons"]) == ("new", "cu134", ["3.11", "3.12"])
    assert (between["state"], between["build"]) == ("not in the matrix", "cu128")
    assert (known["state"], known["environments"]) == ("known", ["torch-2.15.0-cu132"])
    assert new["read_from"] == ("core metadata" if metadata else "the wheel, by ranges")
    if metadata:
        assert not any(path.endswith("torch-2.16.0-cp311-cp311-manylinux_2_28_x86_64.whl") for path in index.asked)


def test_of_a_wheel_kilobytes_are_fetched_and_only_once(run: Run, index: LocalIndex) -> None:
    index.torch("2.16.0")
    listed(run("--json"))
    assert 0 < index.sent < 600_000
    before = len([path for path in index.asked if path.endswith(".whl")])
    listed(run("--json"))
    assert len([path for path in index.asked if path.endswith(".whl")]) == before


def test_metadata_that_is_promised_and_not_served_is_read_from_the_wheel(run: Run, index: LocalIndex) -> None:
    index.torch("2.16.0", metadata=True, metadata_served=False)
    assert listed(run("--json"))["2.16.0"]["build"] == "cu134"


def test_python_ends_where_triton_does(run: Run, index: LocalIndex) -> None:
    for python in ("cp311", "cp312"):
        index.torch("2.16.0", python=python, triton='triton==3.9.0; python_version < "3.12"')
    assert listed(run("--json"))["2.16.0"]["pythons"] == ["3.11"]


def test_wheels_for_other_systems_and_interpreters_make_no_release(run: Run, index: LocalIndex) -> None:
    for tags in ("cp312-cp312-win_amd64", "cp312-cp312-macosx_14_0_arm64", "cp313-cp313t-manylinux_2_28_x86_64"):
        index.publish(f"torch-2.16.0-{tags}.whl", b"never read")
    index.publish("torch-2.16.0.tar.gz", b"never read")
    assert "2.16.0" not in listed(run("--json"))


def test_a_release_whose_metadata_cannot_be_read_hides_no_other(run: Run, index: LocalIndex) -> None:
    index.publish("torch-2.16.1-cp311-cp311-manylinux_2_28_x86_64.whl", b"no wheel at all")
    index.torch("2.16.0")
    found = listed(run("--json"))
    assert found["2.16.0"]["build"] == "cu134"
    assert "cannot be read" in str(found["2.16.1"]["unreadable"])


def test_check_is_about_new_releases_alone(run: Run, index: LocalIndex) -> None:
    index.torch("2.12.9")
    assert run("--check").exit_code == ExitCode.OK
    index.torch("2.16.0", yanked="wrong CUDA")
    yanked = run("--check")
    assert (yanked.exit_code, "wrong CUDA" in yanked.stdout) == (ExitCode.OK, True)
    index.torch("2.17.0rc1")
    assert run("--check").exit_code == ExitCode.OK
    index.torch("2.16.1")
    new = run("--check")
    assert new.exit_code == ExitCode.FINDINGS
    assert "new: 2.16.1" in new.stdout
    index.torch("2.16.4")
    assert "new: 2.16.4, 2.16.1; `toto-compat releases --add 2.16.4` adds one" in run("--check").stdout


def test_a_patch_release_is_new_also_where_the_matrix_has_a_candidate_of_the_next_one(
    run: Run, index: LocalIndex, matrix_file: Path
) -> None:
    index.torch("2.16.0rc1")
    index.torch("2.15.1")
    assert run("--add", "2.16.0rc1", "--pre").exit_code == 0
    assert listed(run("--json"))["2.15.1"]["state"] == "new"
    assert run("--check").exit_code == ExitCode.FINDINGS
    # and a candidate is held against everything
    index.torch("2.16.0rc0+cu134", channel="test")
    found = listed(run("--json", "--pre", "--pytorch-index", f"{index.url}/whl"))
    assert found["2.16.0rc0"]["state"] == "not in the matrix"


def test_a_release_is_withdrawn_when_all_its_wheels_are(run: Run, index: LocalIndex) -> None:
    index.torch("2.16.0", python="cp311", yanked="")
    index.torch("2.16.0", python="cp312")
    assert listed(run("--json"))["2.16.0"]["state"] == "new"
    index.torch("2.16.0", python="cp312", yanked="broken")
    assert listed(run("--json"))["2.16.0"]["state"] == "yanked"


def test_a_withdrawn_release_that_the_matrix_has_is_told(run: Run, index: LocalIndex) -> None:
    index.torch(NEWEST, cuda="13.2", yanked="crashes")
    assert "known, yanked" in run().stdout


# --- an index that does not answer ------------------------------------------------------------------------------------


def test_an_index_that_is_down_is_an_error_without_its_password(
    run: Run, monkeypatch: pytest.MonkeyPatch, matrix_file: Path
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://me:secret@127.0.0.1:9/simple")
    before = everything_written(matrix_file)
    for options in ((), ("--check",), ("--add", "2.14.9")):
        error = error_of(run(*options))
        assert error.code is ExitCode.ENVIRONMENT
        assert "does not answer" in error.message and "secret" not in str(error)
    assert everything_written(matrix_file) == before


def test_an_index_that_fails_is_an_error_and_not_an_empty_list(run: Run, index: LocalIndex) -> None:
    index.status = 503
    assert "HTTP 503" in error_of(run("--check")).message


def test_an_index_that_lacks_what_the_matrix_has_is_not_taken_for_an_answer(run: Run, index: LocalIndex) -> None:
    del index.files["simple"][f"torch-{NEWEST}-cp311-cp311-manylinux_2_28_x86_64.whl"]
    index.torch("2.13.0")
    assert f"does not list torch {NEWEST}" in error_of(run("--check")).message


def test_an_extra_index_that_is_down_is_a_warning(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "http://127.0.0.1:9/extra")
    result = run("--json")
    assert "extra index does not answer" in result.stderr
    assert NEWEST in listed(result)


def test_the_password_in_an_address_reaches_the_index(
    run: Run, index: LocalIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", index.simple.replace("http://", "http://me:sec%40ret@"))
    listed(run("--json"))
    assert {headers.get("Authorization") for headers in index.headers} == {"Basic bWU6c2VjQHJldA=="}
    assert any(path.endswith(".whl") for path in index.asked), "and the files beside it"


# --- adding -----------------------------------------------------------------------------------------------------------


def test_an_added_release_is_an_environment_with_a_lock_and_everything_else_stays(
    run: Run, index: LocalIndex, matrix_file: Path
) -> None:
    original, before = matrix_file.read_text(), load_matrix(matrix_file)
    index.torch("2.16.0")
    result = run("--add", "2.16.0")
    assert result.exit_code == 0, result.exception
    after, name = load_matrix(matrix_file), "torch-2.16.0-cu134"
    environment = after.environments[name]
    assert (environment.torch, environment.build, environment.python) == ("2.16.0", "cu134", "3.11")
    assert environment.base_image == "python:3.11-slim"
    assert environment.gpu_architectures == ("sm_75", "sm_90", "sm_120"), "as the wheel's library says"
    assert {key: after.environments[key] for key in before.environments} == before.environments
    assert matrix_file.read_text().replace(f"\n{result.stdout}", "") == original, (
        "every comment and blank line is there"
    )
    assert "pins: *toto_imports" in result.stdout
    lock = read_lock(name, environment)
    assert {package.name for package in lock.layer("torch")} >= {"torch", "triton", "nvidia-cuda-runtime"}
    assert lock.layer("toto") == read_lock("torch-2.13.0-cpu", before.environments["torch-2.13.0-cpu"]).layer("toto")
    assert index.sent < 3_000_000, "the wheels themselves are not downloaded"


def test_a_second_release_stands_in_order_and_a_known_one_is_refused(
    run: Run, index: LocalIndex, matrix_file: Path
) -> None:
    index.torch("2.16.0")
    index.torch("2.12.9")
    assert run("--add", "2.16.0").exit_code == run("--add", "2.12.9").exit_code == 0
    names = [name for name in load_matrix(matrix_file).environments if not name.endswith("-cpu")]
    assert names.index("torch-2.11.0-cu130") + 1 == names.index("torch-2.12.9-cu134")
    assert names[-1] == "torch-2.16.0-cu134"
    assert "already" in error_of(run("--add", "2.16.0")).message


@pytest.mark.parametrize(
    ("version", "error_and_text"),
    [
        ("2.99.0", (SelectionError, "there is no torch 2.99.0")),
        ("2.16.0", (EnvironmentBuildError, "withdrawn from the index: wrong CUDA")),
        ("2.16.1", (EnvironmentBuildError, "cannot be read")),
        ("2.16.2", (EnvironmentBuildError, "no sha256")),
        ("2.16.3", (EnvironmentBuildError, "cannot be locked")),
        ("1.13.1", (SelectionError, "torch 1.13.1 has no torch.compile")),
    ],
)
def test_what_cannot_be_added_is_told_and_nothing_is_written(
    run: Run, index: LocalIndex, matrix_file: Path, version: str, error_and_text: tuple[type[TotoCompatError], str]
) -> None:
    kind, told = error_and_text
    index.torch("2.16.0", yanked="wrong CUDA")
    index.publish("torch-2.16.1-cp311-cp311-manylinux_2_28_x86_64.whl", b"no wheel at all")
    index.torch("2.16.2", hashed=False)
    index.torch("2.16.3", triton="triton==77.0")
    index.torch("1.13.1")
    before = everything_written(matrix_file)
    error = error_of(run("--add", version))
    assert isinstance(error, kind)
    assert told in error.message
    assert everything_written(matrix_file) == before


def test_what_is_no_version_is_a_mistake_of_the_command_line(run: Run) -> None:
    assert run("--add", "newest").exit_code == ExitCode.USAGE


@pytest.mark.parametrize(
    "words",
    [("--dry-run",), ("--add", "2.16.0", "--json"), ("--add", "2.16.0", "--check"), ("--add", "2.16.0", "--all")],
)
def test_an_option_that_would_be_passed_over_is_a_mistake_of_the_command_line(
    run: Run, matrix_file: Path, words: tuple[str, ...]
) -> None:
    before = everything_written(matrix_file)
    assert run(*words).exit_code == ExitCode.USAGE
    assert everything_written(matrix_file) == before


def test_a_matrix_that_cannot_be_written_leaves_no_lock_behind(
    run: Run, index: LocalIndex, matrix_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.torch("2.16.0")
    before = everything_written(matrix_file)
    real = Path.replace

    def refuse(self: Path, target: Path) -> Path:
        if Path(target).name == "matrix.yaml":
            raise PermissionError(13, "Permission denied")
        return real(self, target)

    monkeypatch.setattr(Path, "replace", refuse)
    assert "cannot be written" in error_of(run("--add", "2.16.0")).message
    assert everything_written(matrix_file) == before


def test_dry_run_writes_nothing(run: Run, index: LocalIndex, matrix_file: Path) -> None:
    index.torch("2.16.0")
    before = everything_written(matrix_file)
    assert "torch-2.16.0-cu134:" in run("--add", "2.16.0", "--dry-run").stdout
    assert everything_written(matrix_file) == before


# --- what is not released yet -----------------------------------------------------------------------------------------


def test_nightlies_come_from_pytorchs_own_index_and_are_valid_environments(
    run: Run, index: LocalIndex, matrix_file: Path
) -> None:
    for build, cuda in (("cu134", "13.4"), ("cu128", "12.8"), ("cpu", "")):
        index.torch(f"2.17.0.dev20261116+{build}", cuda=cuda, channel="nightly")
    index.publish(
        "nvidia_cuda_runtime-13.4.7-py3-none-any.whl", wheel("nvidia-cuda-runtime", "13.4.7"), channel="nightly"
    )
    place = ("--pytorch-index", f"{index.url}/whl")
    assert "2.17.0.dev20261116" not in listed(run("--json", *place))
    assert listed(run("--json", "--nightly", *place))["2.17.0.dev20261116"]["build"] == "cu134"
    assert run("--check", "--nightly", *place).exit_code == ExitCode.FINDINGS
    assert run("--add", "2.17.0.dev20261116", *place).exit_code == 0
    environment = load_matrix(matrix_file).environments["torch-2.17.0.dev20261116-cu134"]
    assert environment.index == f"{index.url}/whl/nightly/cu134"
    lock = read_lock("torch-2.17.0.dev20261116-cu134", environment)
    assert lock.version_of("torch") == "2.17.0.dev20261116+cu134"
    assert run("--add", "2.17.0.dev20261116", "--build", "cpu", *place).exit_code == 0
    assert load_matrix(matrix_file).environments["torch-2.17.0.dev20261116-cpu"].gpu_architectures == ()


def test_release_candidates_are_shown_only_when_asked_for(run: Run, index: LocalIndex) -> None:
    index.torch("2.16.0rc2")
    index.torch("2.16.0+cu134", channel="test")
    place = ("--pytorch-index", f"{index.url}/whl")
    assert set(listed(run("--json", *place))) == {NEWEST}
    found = listed(run("--json", "--pre", *place))
    assert (found["2.16.0rc2"]["channel"], found["2.16.0"]["channel"]) == ("release", "test")
    for version in ("2.16.0rc2", "2.16.0"):
        assert f"torch-{version}-cu134:" in run("--add", version, "--pre", "--dry-run", *place).stdout


def test_pytorchs_index_that_is_down_is_an_error_where_it_was_asked_for(run: Run) -> None:
    error = error_of(run("--nightly", "--pytorch-index", "http://127.0.0.1:9/whl"))
    assert "PyTorch's own index does not answer" in error.message
    assert "--pytorch-index" in error.hint


def test_locks_are_written_where_the_project_keeps_them(run: Run, index: LocalIndex, tmp_path: Path) -> None:
    index.torch("2.16.0")
    assert run("--add", "2.16.0").exit_code == 0
    assert lock_path("torch-2.16.0-cu134") == tmp_path / "docker" / "locks" / "torch-2.16.0-cu134.txt"
