"""Requests: what a cell is asked, and what it must keep to PASS."""

import re
from pathlib import Path

import pytest

from toto_compat.contract.request import DESCRIBED_ARCHITECTURES, CsvSeries, Device, Limits
from toto_compat.contract.suites import WITHOUT_GPU, Suite
from toto_compat.errors import SelectionError
from toto_compat.matrix.asked import Asked
from toto_compat.matrix.expand import expand, select
from toto_compat.matrix.load import load_matrix
from toto_compat.matrix.request import cell_variables, matrix_request
from toto_compat.matrix.schema import CacheSource
from toto_compat.matrix.selection import select_cells

MATRIX_PATH = Path(__file__).parents[2] / "matrix.yaml"
MATRIX = load_matrix(MATRIX_PATH)
CELLS = expand(MATRIX, "quick")


def test_a_request_carries_the_profile_workload_settings_and_limits_of_the_matrix() -> None:
    [cell] = select(CELLS, ["torch-2.9.0-cu128/compile_friendly/default+production"])
    request = matrix_request(MATRIX, MATRIX_PATH, cell, "full", Device.CUDA, quiet_lock="/q")
    assert request.cell == cell
    assert request.settings.recompile_limit == 256
    assert (request.profile.iterations, request.workload) == (10, MATRIX.workloads["groups"])
    assert (request.device, request.cache.source) == (Device.CUDA, "builtin")
    assert type(request).model_validate_json(request.model_dump_json(by_alias=True)) == request


def test_a_cpu_wheel_is_asked_to_run_on_the_cpu_even_beside_a_gpu() -> None:
    [cell] = select(CELLS, ["torch-2.13.0-cpu/upstream/default"])
    assert matrix_request(MATRIX, MATRIX_PATH, cell, "quick", Device.CUDA).device is Device.CPU


def test_a_cuda_wheel_can_be_asked_to_run_on_the_cpu() -> None:
    [cell] = select(CELLS, ["torch-2.9.0-cu128/upstream/default"])
    assert matrix_request(MATRIX, MATRIX_PATH, cell, "quick", Device.CPU).device is Device.CPU


def test_files_of_the_user_are_named_as_the_cell_sees_them(tmp_path: Path) -> None:
    csv = CsvSeries(path="data/prices.csv", time_column="time", value_columns=("close",))
    workload = MATRIX.workloads["quick"].model_copy(update={"csv": csv})
    matrix = MATRIX.model_copy(
        update={
            "caches": {"mine": CacheSource(source="caches/mine.py:Mine")},
            "workloads": {**MATRIX.workloads, "quick": workload},
        }
    )
    [cell] = select(expand(matrix, "quick"), ["torch-2.13.0-cpu/mine/default"])
    on_host = matrix_request(matrix, tmp_path / "matrix.yaml", cell, "quick", Device.CPU)
    assert on_host.cache.source == f"{tmp_path.resolve()}/caches/mine.py:Mine"
    assert on_host.csv is not None
    assert on_host.csv.path == f"{tmp_path.resolve()}/data/prices.csv"


def test_an_unknown_profile_is_a_selection_error_with_the_nearest_name() -> None:
    with pytest.raises(SelectionError, match="did you mean quick"):
        matrix_request(MATRIX, MATRIX_PATH, CELLS[0], "quik", Device.CPU)


def test_a_cell_is_told_the_limits_of_its_profile_that_it_cannot_break_and_pass() -> None:
    told = {}
    for profile in ("quick", "production-check"):
        request = matrix_request(MATRIX, MATRIX_PATH, CELLS[0], profile, Device.CPU)
        told[profile] = {demand.gate: demand.limit for demand in request.demands}
    assert (told["quick"]["recompiles_total"].max, told["production-check"]["recompiles_total"].max) == (9, 2)
    assert {"equivalence", "compile_active", "recompile_limit", "graph_breaks"} <= set(told["quick"])
    # a noisy machine, upstream eager or the device may have the last word on these
    assert not {"speedup", "latency_stability", "memory_growth", "cudagraphs"} & set(told["quick"])


@pytest.mark.parametrize(("mode", "demanded"), [("default", False), ("reduce-overhead", True)])
def test_cuda_graphs_are_demanded_where_they_are_used(mode: str, demanded: bool) -> None:
    [cell] = select(CELLS, [f"torch-2.9.0-cu128/upstream/{mode}"])
    for device in Device:
        request = matrix_request(MATRIX, MATRIX_PATH, cell, "quick", device)
        gates = {demand.gate for demand in request.demands}
        assert ("cudagraphs" in gates) is (demanded and device is Device.CUDA)


def test_the_variables_of_a_cell_name_its_threads_and_hide_the_gpu_from_the_cpu() -> None:
    limits = Limits(threads=3, cpus=5)
    on_cpu, on_cuda = (cell_variables(limits, device) for device in (Device.CPU, Device.CUDA))
    assert {on_cpu[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")} == {"3"}
    assert on_cpu["TORCHINDUCTOR_COMPILE_THREADS"] == "5"
    assert on_cpu["CUDA_VISIBLE_DEVICES"] == ""
    assert "CUDA_VISIBLE_DEVICES" not in on_cuda


def test_cuda_code_is_looked_at_where_a_cuda_build_runs_on_the_cpu_and_nowhere_else() -> None:
    [cuda] = select(CELLS, ["torch-2.15.0-cu132/fixed_size/default"])
    [cpu] = select(CELLS, ["torch-2.13.0-cpu/fixed_size/default"])
    without_gpu = set(WITHOUT_GPU)
    assert without_gpu <= set(matrix_request(MATRIX, MATRIX_PATH, cuda, "full", Device.CPU).profile.suites)
    assert Suite.CUDA_EQUIVALENCE not in matrix_request(MATRIX, MATRIX_PATH, cuda, "quick", Device.CPU).profile.suites
    assert not without_gpu & set(matrix_request(MATRIX, MATRIX_PATH, cuda, "full", Device.CUDA).profile.suites)
    assert not without_gpu & set(matrix_request(MATRIX, MATRIX_PATH, cpu, "full", Device.CPU).profile.suites)


def test_a_cell_that_is_only_lowered_runs_on_the_cpu_and_speaks_of_cuda() -> None:
    [cell] = select(CELLS, ["torch-2.7.0-cu126/fixed_size/reduce-overhead"])
    request = matrix_request(MATRIX, MATRIX_PATH, cell, "full", Device.CPU, lower_only=True)
    assert (request.device, request.speaks_of) == (Device.CPU, Device.CUDA)
    assert request.profile.suites == WITHOUT_GPU
    assert request.profile.architectures == ("sm_80", "sm_90")  # its wheel has no kernels for sm_120
    assert request.demands == ()


def test_other_gpus_than_the_profiles_are_asked_of_cells_that_compile_for_gpus_without_one() -> None:
    [cuda] = select(CELLS, ["torch-2.15.0-cu132/fixed_size/default"])
    [cpu] = select(CELLS, ["torch-2.13.0-cpu/fixed_size/default"])
    asked = {
        (cell.environment, device): matrix_request(
            MATRIX, MATRIX_PATH, cell, "quick", device, architectures=("sm_90",)
        ).profile.architectures
        for cell, device in ((cuda, Device.CPU), (cuda, Device.CUDA), (cpu, Device.CPU))
    }
    of_the_profile = ("sm_80", "sm_90", "sm_120")
    # what is not compiled for a described GPU is the same cell as before, for the store too
    assert list(asked.values()) == [("sm_90",), of_the_profile, of_the_profile]


def test_the_gpus_that_can_be_named_are_those_that_are_described() -> None:
    source = (MATRIX_PATH.parent / "toto_compat/cell/lowering/described_gpu.py").read_text(encoding="utf-8")
    assert tuple(re.findall(r'DescribedGpu\("(sm_\d+)"', source)) == DESCRIBED_ARCHITECTURES


@pytest.mark.parametrize(
    ("selector", "architecture", "told"),
    [
        ("torch-2.15.0-cu132/fixed_size/default", "sm_91", "there are sm_60, sm_70"),
        ("torch-2.7.0-cu126/fixed_size/default", "sm_120", "they have sm_60, sm_70, sm_75, sm_80, sm_86, sm_90$"),
    ],
)
def test_a_gpu_that_nobody_described_or_no_wheel_has_kernels_for_is_refused(
    selector: str, architecture: str, told: str
) -> None:
    asked = Asked(selectors=(selector,), matrix_file=MATRIX_PATH, architectures=("sm_90", architecture))
    with pytest.raises(SelectionError, match=f"--architecture {architecture}") as error:
        select_cells(asked, lambda: Device.CPU)
    assert re.search(told, error.value.hint)
