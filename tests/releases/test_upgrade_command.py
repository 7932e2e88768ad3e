"""`toto-compat release-check`: what it takes, and what it refuses before anything is built."""

from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from packaging.version import Version

from tests.releases.local_index import LocalIndex
from tests.verdict.sample_cells import good_result
from tests.verdict.stored_runs import store_run
from toto_compat.cli import cli
from toto_compat.contract.request import Device
from toto_compat.environments.locks import lock_path
from toto_compat.errors import ExitCode, SelectionError
from toto_compat.matrix.load import load_matrix
from toto_compat.releases.listing import PYTORCH_INDEX
from toto_compat.releases.upgrade_command import matrix_with, rows_to_run

OPTIONS = {"pre": False, "nightly": False, "pytorch_index": PYTORCH_INDEX, "keep": False}


def check(matrix_file: Path, *words: str) -> Result:
    options = ["--matrix", str(matrix_file), "--results", str(matrix_file.parent / "results"), "--device", "cpu"]
    return CliRunner().invoke(cli, ["release-check", *words, *options])


def test_nothing_new_is_no_reason_to_run_anything(index: LocalIndex, matrix_file: Path) -> None:
    index.torch("2.15.0", cuda="13.2")
    result = check(matrix_file)
    assert (result.exit_code, "no torch release newer" in result.output) == (ExitCode.OK, True)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("2.99.0",), "there is no torch 2.99.0"),
        (("2.13.0", "--profile", "quik"), "quick"),
        (("2.13.0", "--reference", "nothing"), "no such run"),
        (("2.15.0", "--rows", "fixed_sise/default"), "fixed_size"),
    ],
)
def test_a_mistake_is_told_before_anything_is_built(
    index: LocalIndex, matrix_file: Path, words: tuple[str, ...], told: str
) -> None:
    index.torch("2.15.0", cuda="13.2")
    store_run(matrix_file.parent / "results", "reference/cpu", [good_result(torch="2.9.0")])
    before = matrix_file.read_bytes()
    error = check(matrix_file, *words).exception
    assert isinstance(error, SelectionError)
    assert told in str(error)
    assert matrix_file.read_bytes() == before


def test_a_release_is_tried_in_a_copy_of_the_matrix_unless_it_is_to_be_kept(
    index: LocalIndex, matrix_file: Path
) -> None:
    index.torch("2.16.0")
    before = matrix_file.read_bytes()
    matrix, name, notes = matrix_with(matrix_file, Version("2.16.0"), Device.CPU, OPTIONS)
    assert name == "torch-2.16.0-cu134" and name in matrix.environments
    assert matrix_file.read_bytes() == before and not lock_path(name).exists()
    assert "releases --add 2.16.0" in notes[0]
    matrix_with(matrix_file, Version("2.16.0"), Device.CPU, {**OPTIONS, "keep": True})
    assert name in load_matrix(matrix_file).environments and lock_path(name).exists()


def test_a_release_that_the_matrix_has_is_taken_as_it_is_and_the_small_build_on_a_cpu(matrix_file: Path) -> None:
    assert matrix_with(matrix_file, Version("2.13.0"), Device.CPU, OPTIONS)[1] == "torch-2.13.0-cpu"
    assert matrix_with(matrix_file, Version("2.13.0"), Device.CUDA, OPTIONS)[1] == "torch-2.13.0-cu130"


def test_every_cache_is_run_as_torch_ships_in_the_plainest_mode(matrix_file: Path) -> None:
    matrix = load_matrix(matrix_file)
    rows = rows_to_run(matrix, "torch-2.13.0-cpu", (), "quick")
    assert rows == [f"torch-2.13.0-cpu/{cache}/default" for cache in matrix.caches]
    [one] = rows_to_run(matrix, "torch-2.13.0-cpu", ("fixed_size/max-autotune",), "quick")
    assert one == "torch-2.13.0-cpu/fixed_size/max-autotune"
