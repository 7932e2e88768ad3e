"""Which torch releases the matrix lacks. pip is asked for real, against small indexes made here."""

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result
from packaging.version import Version

from toto_compat.errors import EnvironmentBuildError, ExitCode
from toto_compat.matrix.load import load_matrix
from toto_compat.matrix.releases import (
    available_torch_releases,
    default_build,
    missing_releases,
    parse_versions,
    release_stanza,
    releases_command,
)

MATRIX_PATH = Path(__file__).parents[2] / "matrix.yaml"
MATRIX = load_matrix(MATRIX_PATH)
IN_MATRIX = sorted({environment.torch for environment in MATRIX.environments.values()})


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all pip can see; a wheel in it is a name, since only names are read."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    monkeypatch.delenv("PIP_INDEX_URL", raising=False)
    return folder


def publish(index: Path, *versions: str) -> None:
    for version in versions:
        (index / f"torch-{version}-py3-none-any.whl").touch()


def run(*options: str) -> Result:
    return CliRunner().invoke(releases_command, ["--matrix", str(MATRIX_PATH), *options])


def test_pip_is_asked_and_local_builds_count_as_their_release(index: Path) -> None:
    publish(index, "2.13.0+cpu", "2.13.0", "2.15.0", "2.16.0rc1")
    assert available_torch_releases() == [Version("2.15.0"), Version("2.13.0")]
    assert available_torch_releases(include_prereleases=True)[0] == Version("2.16.0rc1")


def test_an_index_without_torch_is_an_environment_error_with_a_next_step(index: Path) -> None:
    with pytest.raises(EnvironmentBuildError, match="finds no torch") as caught:
        available_torch_releases()
    assert "pip config list" in caught.value.hint


def test_an_interpreter_that_cannot_be_started_is_an_environment_error(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentBuildError, match="cannot start"):
        available_torch_releases(python=str(tmp_path / "python"))


def test_output_without_versions_is_an_environment_error() -> None:
    with pytest.raises(EnvironmentBuildError, match="not with a list"):
        parse_versions("torch (2.15.0)\n")


def test_names_that_are_no_versions_are_passed_over() -> None:
    assert parse_versions("Available versions: 2.15.0, banana, 2.9.1\n") == [Version("2.15.0"), Version("2.9.1")]


def test_an_index_that_lacks_what_the_matrix_has_is_not_taken_for_an_answer() -> None:
    with pytest.raises(EnvironmentBuildError, match=r"does not list torch 2\.15\.0"):
        missing_releases(MATRIX, [Version("2.13.0")])


def test_releases_older_than_the_oldest_of_the_matrix_do_not_count() -> None:
    missing = missing_releases(MATRIX, [Version(text) for text in ("2.6.0", "2.7.1", "2.15.0", "2.15.1")])
    assert [(release.torch, release.newer_than_matrix) for release in missing] == [("2.15.1", True), ("2.7.1", False)]


@pytest.mark.parametrize(
    "release",
    ["2.7.1", "2.9.1", "2.10.0", "2.12.0", "2.14.1", "2.16.0rc1", "2.16.0.dev20261116", "2.15.1", "2.16.0", "3.0.0"],
)
def test_the_lines_to_add_make_a_matrix_that_loads(tmp_path: Path, release: str) -> None:
    stanza = release_stanza(MATRIX, Version(release))
    text = MATRIX_PATH.read_text().replace("environments:\n", f"environments:\n{stanza}", 1)
    (tmp_path / "matrix.yaml").write_text(text)
    matrix = load_matrix(tmp_path / "matrix.yaml")
    [name] = set(matrix.environments) - set(MATRIX.environments)
    assert name == f"torch-{release}-{default_build(Version(release))}"
    assert matrix.environments[name].pins["numpy"] == "1.26.4", "production's pins are production's alone"
    assert missing_releases(matrix, [Version(release), Version("2.15.0")]) == []


def test_a_release_newer_than_the_known_ones_says_what_to_check() -> None:
    assert "check the CUDA tag" in release_stanza(MATRIX, Version("2.16.0"))
    assert "check" not in release_stanza(MATRIX, Version("2.15.1"))


@pytest.mark.parametrize(
    ("release", "build"),
    [("2.4.1", "cu121"), ("2.6.0", "cu124"), ("2.7.1", "cu126"), ("2.10.0", "cu128"), ("2.14.0", "cu130")],
)
def test_the_default_wheel_of_a_release_has_its_cuda_tag(release: str, build: str) -> None:
    assert default_build(Version(release)) == build


def test_every_cuda_environment_shipped_is_the_default_wheel_of_its_release() -> None:
    builds = {
        environment.torch: environment.build
        for environment in MATRIX.environments.values()
        if environment.gpu_architectures
    }
    assert builds == {torch: default_build(Version(torch)) for torch in builds}


def test_check_fails_only_on_a_release_newer_than_everything_in_the_matrix(index: Path) -> None:
    publish(index, *IN_MATRIX)
    complete = run("--check")
    assert (complete.exit_code, "has every torch release" in complete.output) == (ExitCode.OK, True)
    publish(index, "2.14.1", "2.12.1")  # left out on purpose
    between = run("--check")
    assert between.exit_code == ExitCode.OK
    assert "newer than everything in it: none" in between.output
    assert "between releases that it has: 2.14.1, 2.12.1" in between.output
    assert run("--check", "--json").exit_code == ExitCode.OK
    publish(index, "2.15.1")
    assert run("--check", "--json").exit_code == ExitCode.FINDINGS
    assert run("--check").exit_code == ExitCode.FINDINGS
    lacking = run()
    assert lacking.exit_code == ExitCode.OK
    assert "torch-2.15.1-cu132:" in lacking.output


def test_json_holds_the_stanza_as_yaml(index: Path) -> None:
    publish(index, *IN_MATRIX, "2.15.1")
    [missing] = json.loads(run("--json").output)["missing"]
    assert missing["newer_than_matrix"] is True
    assert yaml.safe_load(missing["stanza"])["torch-2.15.1-cu132"]["torch"] == "2.15.1"


def test_a_release_candidate_is_shown_only_when_asked_for(index: Path) -> None:
    publish(index, *IN_MATRIX, "2.16.0rc1")
    assert json.loads(run("--json").output)["missing"] == []
    [candidate] = json.loads(run("--json", "--pre").output)["missing"]
    assert candidate["torch"] == "2.16.0rc1"
