"""`toto-compat release-check`: what it takes, and what it refuses before anything is built."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from packaging.version import Version

from tests.releases.local_index import LocalIndex
from tests.verdict.sample_cells import good_result, with_figures, with_suite
from tests.verdict.stored_runs import store_run
from toto_compat.cli import cli
from toto_compat.contract.cell_name import CellName
from toto_compat.contract.request import Device
from toto_compat.contract.result import CellResult, Figure, Kind, Outcome, SuiteEvidence
from toto_compat.contract.suites import Suite
from toto_compat.environments.locks import lock_path
from toto_compat.errors import ExitCode, SelectionError
from toto_compat.evidence.store import Run, load_run
from toto_compat.matrix.asked import Asked
from toto_compat.matrix.gates import Gate
from toto_compat.matrix.load import load_matrix
from toto_compat.matrix.schema import Matrix
from toto_compat.releases import upgrade_command
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


# --- the code for CUDA, executed without a GPU ------------------------------------------------------------------------


class Runs:
    """Stands where environments are built and cells run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[tuple[str, tuple[str, ...], tuple[Suite, ...]]] = []

    def run_cells(self, matrix: Matrix, _path: Path, cells: Sequence[CellName], asked: Asked, **_about: object) -> Run:
        suites = matrix.profiles[asked.profile].suites
        self.asked.append((asked.run or "", tuple(cells), suites))
        return load_run(store_run(self.folder, asked.run or "", [self.cell(cell, suites) for cell in cells]))

    def cell(self, name: CellName, suites: Sequence[Suite]) -> CellResult:
        result = good_result(torch="2.15.0", build="cu132", cache=name.cache, device=Device.CPU)
        if name.cache != "fixed_size":
            result = with_figures(result, {Gate.RECOMPILES: 4.0})
        if Suite.CUDA_EQUIVALENCE not in suites:
            lowered = SuiteEvidence(suite=Suite.CUDA_LOWERING, outcome=Outcome.MEASURED)
            return with_suite(result, Suite.CUDA_LOWERING, lowered)
        figures = {"cuda_equivalence": Figure(value=7.0, kind=Kind.INTERPRETED)}
        evidence = SuiteEvidence(suite=Suite.CUDA_EQUIVALENCE, outcome=Outcome.MEASURED, figures=figures)
        return result.model_copy(update={"evidence": {Suite.CUDA_EQUIVALENCE: evidence}})


@pytest.mark.parametrize("option", [(), ("--without-interpreter",)])
def test_the_code_for_cuda_of_rows_that_do_not_fail_is_executed_and_looked_at(
    matrix_file: Path, monkeypatch: pytest.MonkeyPatch, option: tuple[str, ...]
) -> None:
    runs = Runs(matrix_file.parent / "results")
    monkeypatch.setattr(upgrade_command, "run_cells", runs.run_cells)
    store_run(matrix_file.parent / "results", "reference/cpu", [good_result()])
    result = check(matrix_file, "2.15.0", *option)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    everything, *executed = runs.asked
    assert {cell.split("/")[1] for cell in everything[1]} == set(load_matrix(matrix_file).caches)
    if option:
        assert executed == [] and result.exit_code == ExitCode.OK
        return
    [(name, cells, suites)] = executed
    assert (cells, suites) == (("torch-2.15.0-cu132/fixed_size/default",), (Suite.CUDA_EQUIVALENCE,))
    assert name.endswith("-release-check-2.15.0-interpreted")
    assert "fixed_size/default: executed in Triton's interpreter and WRONG (7 of eager's own noise" in result.stdout
    assert "look at this first: fixed_size/default: its code for CUDA forecasts wrongly" in result.stdout
    assert result.exit_code == ExitCode.FINDINGS
