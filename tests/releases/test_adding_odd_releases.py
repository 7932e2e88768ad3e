"""Releases that are odd, withdrawn in part, broken, or of another build than the one that was named."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.releases.local_index import LocalIndex, wheel
from toto_compat.cli import cli
from toto_compat.environments.locks import lock_path
from toto_compat.errors import EnvironmentBuildError, ExitCode, SelectionError, TotoCompatError
from toto_compat.matrix import add_environment
from toto_compat.matrix.load import load_matrix

Run = Callable[..., Result]


@pytest.fixture
def run(matrix_file: Path, index: LocalIndex) -> Run:
    index.torch("2.15.0", cuda="13.4")

    def invoke(*options: str) -> Result:
        return CliRunner().invoke(cli, ["releases", "--matrix", str(matrix_file), *options])

    return invoke


def error_of(result: Result) -> TotoCompatError:
    assert isinstance(result.exception, TotoCompatError), result.exception
    return result.exception


@pytest.mark.parametrize("version", ["2.16.0.post1", "1!2.16.0", "2.18"])
def test_a_number_that_no_matrix_can_hold_is_told(run: Run, index: LocalIndex, version: str) -> None:
    index.torch(version)
    error = error_of(run("--add", version))
    assert isinstance(error, EnvironmentBuildError)
    assert f"torch {version} cannot be an environment of matrix.yaml: torch: '{version}'" in error.message


def test_a_broken_wheel_hides_no_other_release_and_does_not_widen_the_table(run: Run, index: LocalIndex) -> None:
    index.torch("2.16.0")
    index.torch("2.17.0")
    file = "torch-2.17.0-cp311-cp311-manylinux_2_28_x86_64.whl"
    content = index.files["simple"][file].content
    # its entries in the listing at the end, each with a compression that nobody has
    index.publish(file, re.sub(rb"(PK\x01\x02.{6})..", b"\\1\x63\x00", content, flags=re.DOTALL))
    shown = run().stdout
    assert "cu134" in next(line for line in shown.splitlines() if line.startswith("2.16.0"))
    assert len(next(line for line in shown.splitlines() if line.startswith("2.17.0"))) < 100
    assert "? torch 2.17.0:" in shown


def test_core_metadata_of_something_else_is_not_believed(run: Run, index: LocalIndex) -> None:
    index.torch("2.16.0+cu134", metadata=True)
    index.metadata_text = b"<html>Sign in</html>"
    found = {one["torch"]: one for one in json.loads(run("--json").stdout)["releases"]}["2.16.0"]
    assert (found["build"], found["read_from"]) == ("cu134", "the wheel, by ranges")


def test_a_wheel_without_metadata_of_its_own_is_told(run: Run, index: LocalIndex) -> None:
    index.publish("torch-2.16.0-cp311-cp311-manylinux_2_28_x86_64.whl", wheel("numpy", "1.26.4"))
    assert "no metadata of its own" in error_of(run("--add", "2.16.0")).message


def test_of_a_release_withdrawn_in_part_what_is_left_is_taken(run: Run, index: LocalIndex, matrix_file: Path) -> None:
    index.torch("2.16.0", python="cp312", yanked="crashes")
    index.torch("2.16.0", python="cp311")
    found = {one["torch"]: one for one in json.loads(run("--json").stdout)["releases"]}["2.16.0"]
    assert (found["state"], found["pythons"]) == ("new", ["3.11"])
    assert run("--add", "2.16.0").exit_code == 0
    assert load_matrix(matrix_file).environments["torch-2.16.0-cu134"].python == "3.11"


@pytest.mark.parametrize("named", [("2.16.0+cu134",), ("2.16.0", "--build", "cu134")])
def test_a_build_that_is_the_default_wheels_own_is_that_wheel(
    run: Run, index: LocalIndex, named: tuple[str, ...]
) -> None:
    index.torch("2.16.0", cuda="13.4")
    assert "torch-2.16.0-cu134:" in run("--add", *named, "--dry-run").stdout


@pytest.mark.parametrize("named", [("2.16.0+cu128",), ("2.16.0", "--build", "cpu")])
def test_another_build_than_the_named_one_is_not_taken_for_it(
    run: Run, index: LocalIndex, named: tuple[str, ...]
) -> None:
    index.torch("2.16.0", cuda="13.4")
    error = error_of(run("--add", *named, "--dry-run"))
    assert isinstance(error, SelectionError)
    assert "is on your package index as cu134, not as" in error.message
    assert "PIP_EXTRA_INDEX_URL=https://" in error.hint


def test_two_builds_cannot_be_named_at_once(run: Run) -> None:
    assert run("--add", "2.16.0+cu128", "--build", "cpu").exit_code == ExitCode.USAGE


def test_one_build_is_listed_by_what_its_wheels_say(run: Run, index: LocalIndex) -> None:
    index.torch("2.16.0", cuda="12.8")
    index.torch("2.16.0+cu134", cuda="13.4")
    found = json.loads(run("--json", "--build", "cu134").stdout)["releases"]
    assert {one["torch"]: one["build"] for one in found} == {"2.16.0": "cu134", "2.15.0": "cu134"}
    assert json.loads(run("--json", "--build", "cu111").stdout)["releases"] == []


def test_two_that_add_at_once_lose_nothing(
    run: Run, index: LocalIndex, matrix_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.torch("2.16.0")
    monkeypatch.setattr(
        add_environment,
        "_checked",
        saved_beside(matrix_file, add_environment._checked),
    )
    error = error_of(run("--add", "2.16.0"))
    assert "changed by somebody else" in error.message
    assert matrix_file.read_text().endswith("# saved by somebody else\n")
    assert not lock_path("torch-2.16.0-cu134").exists()


def saved_beside(path: Path, check: Callable[..., object]) -> Callable[..., object]:
    """Somebody saves the file while the addition is prepared."""

    def checked(*given: object) -> object:
        answer = check(*given)
        path.write_text(f"{path.read_text()}# saved by somebody else\n")
        return answer

    return checked


def test_a_lock_that_was_there_is_there_again_when_the_matrix_cannot_be_written(
    run: Run, index: LocalIndex, matrix_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.torch("2.16.0")
    lock_path("torch-2.16.0-cu134").write_text("# of somebody else\n")
    monkeypatch.setattr(
        add_environment,
        "_checked",
        saved_beside(matrix_file, add_environment._checked),
    )
    error_of(run("--add", "2.16.0"))
    assert lock_path("torch-2.16.0-cu134").read_text() == "# of somebody else\n"
