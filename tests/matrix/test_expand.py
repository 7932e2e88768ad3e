"""Cells, selectors and requests."""

from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toto_compat.errors import SelectionError
from toto_compat.matrix.expand import (
    Cell,
    cell_request,
    default_selection,
    expand,
    gate_limits,
    requested_environments,
    select,
)
from toto_compat.matrix.load import load_matrix
from toto_compat.matrix.schema import CacheSource, CsvSeries, Device, Environment, Gate, Matrix

MATRIX_PATH = Path(__file__).parents[2] / "matrix.yaml"
MATRIX = load_matrix(MATRIX_PATH)
CELLS = expand(MATRIX)
IDENTIFIERS = [cell.identifier for cell in CELLS]

unhurried = settings(deadline=None)  # a busy machine is no failure
cells_of_the_matrix = st.sampled_from(CELLS)


def names(cells: list[Cell]) -> list[str]:
    return [cell.identifier for cell in cells]


def with_environments(*named: str) -> Matrix:
    environments = {}
    for name in named:
        torch, build = name.split("-")[1:3]
        environments[name] = Environment(torch=torch, build=build)
    return MATRIX.model_copy(update={"environments": environments, "production": None})


def test_an_identifier_names_settings_only_when_they_are_not_stock() -> None:
    assert Cell("torch-2.13.0-cpu", "upstream", "default").identifier == "torch-2.13.0-cpu/upstream/default"
    identifier = Cell("torch-2.13.0-cpu", "compile_friendly", "default", "production").identifier
    assert identifier == "torch-2.13.0-cpu/compile_friendly/default+production"


def test_every_cell_of_the_matrix_has_an_identifier_of_its_own() -> None:
    tried = sum(len(cache.settings) for cache in MATRIX.caches.values())
    assert len(set(IDENTIFIERS)) == len(CELLS) == len(MATRIX.environments) * len(MATRIX.modes) * tried


def test_a_selector_without_a_slash_is_an_environment() -> None:
    assert requested_environments(select(CELLS, ["*-cu130"])) == ["torch-2.11.0-cu130", "torch-2.13.0-cu130"]
    assert len(select(CELLS, ["torch-2.13.0-cpu"])) == len(CELLS) // len(MATRIX.environments)


def test_environment_and_cache_take_all_modes_and_settings() -> None:
    chosen = select(CELLS, ["torch-2.13.0-cpu/compile_friendly"])
    assert {(cell.mode, cell.settings_name) for cell in chosen} == {
        (mode, settings) for mode in MATRIX.modes for settings in ("stock", "production")
    }


def test_a_whole_identifier_takes_one_cell_and_not_its_other_settings() -> None:
    identifier = "torch-2.13.0-cpu/compile_friendly/default"
    assert names(select(CELLS, [identifier])) == [identifier]
    assert names(select(CELLS, [identifier + "*"])) == [identifier, identifier + "+production"]


def test_a_star_is_everything_and_so_is_no_selector() -> None:
    assert select(CELLS, ["*"]) == select(CELLS, []) == CELLS


def test_selectors_are_case_sensitive() -> None:
    with pytest.raises(SelectionError):
        select(CELLS, ["Torch-2.13.0-cpu"])


def test_an_exclusion_alone_starts_from_everything() -> None:
    kept = select(CELLS, ["!*/list_index"])
    assert {cell.cache_name for cell in kept} == set(MATRIX.caches) - {"list_index"}


@pytest.mark.parametrize(
    ("selector", "suggestion"),
    [
        ("torch-2.13.0-cp", "torch-2.13.0-cpu"),
        ("torch-2.13.0-cpu/fixedsize/default", "torch-2.13.0-cpu/fixed_size/default"),
        ("torch-2.13.0-cpu/upstrea", "torch-2.13.0-cpu/upstream"),
        ("fixed_size", "'*/fixed_size'"),
        ("reduce-overhead", "'*/reduce-overhead'"),
        ("!torch-2.13.0-cp", "torch-2.13.0-cpu"),
        ("", "torch-2.15.0-cu132"),
        ("zzz", "torch-2.15.0-cu132"),
    ],
)
def test_a_selector_that_matches_nothing_is_an_error_with_the_nearest_names(selector: str, suggestion: str) -> None:
    with pytest.raises(SelectionError) as caught:
        select(CELLS, ["*", selector])
    assert suggestion in caught.value.hint


def test_the_suggestion_for_a_bare_cache_or_mode_name_is_a_selector_that_works() -> None:
    assert {cell.cache_name for cell in select(CELLS, ["*/fixed_size"])} == {"fixed_size"}
    assert {cell.mode for cell in select(CELLS, ["*/reduce-overhead"])} == {"reduce-overhead"}


def test_excluding_all_that_is_selected_is_an_error() -> None:
    with pytest.raises(SelectionError, match="nothing is left"):
        select(CELLS, ["torch-2.13.0-cpu", "!*"])


@unhurried
@given(cells_of_the_matrix)
def test_every_identifier_selects_exactly_its_own_cell(cell: Cell) -> None:
    assert select(CELLS, [cell.identifier]) == [cell]


@unhurried
@given(st.lists(cells_of_the_matrix, min_size=1, max_size=6))
def test_several_selectors_are_a_union_in_the_order_of_the_matrix(chosen: list[Cell]) -> None:
    assert select(CELLS, [cell.identifier for cell in chosen]) == [cell for cell in CELLS if cell in chosen]


@unhurried
@given(st.lists(cells_of_the_matrix, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_the_order_of_selectors_and_exclusions_changes_nothing(chosen: list[Cell], random: Random) -> None:
    selectors = [*(cell.identifier for cell in chosen), "torch-2.13.0-cpu", "!*/upstream"]
    shuffled = list(selectors)
    random.shuffle(shuffled)
    assert select(CELLS, shuffled) == select(CELLS, selectors)


@unhurried
@given(st.text(alphabet="torch-2.13/*?[]!cpu+_", max_size=12))
def test_any_text_as_a_selector_gives_cells_or_a_selection_error(text: str) -> None:
    try:
        chosen = select(CELLS, [text])
    except SelectionError:
        return
    assert chosen
    assert set(chosen) <= set(CELLS)


@unhurried
@given(st.sampled_from(["*", "*cpu", "*/fixed_size", "*/upstream/default", "torch-2.1?.0-*"]), cells_of_the_matrix)
def test_an_exclusion_removes_exactly_what_the_same_selector_takes(selector: str, cell: Cell) -> None:
    taken = select(CELLS, [selector])
    if len(taken) == len(CELLS):
        with pytest.raises(SelectionError):
            select(CELLS, [f"!{selector}"])
    else:
        assert (cell in select(CELLS, [f"!{selector}"])) is (cell not in taken)


def test_without_a_gpu_the_default_is_every_cache_once_on_the_newest_cpu_environment() -> None:
    chosen = default_selection(MATRIX, Device.CPU)
    assert requested_environments(chosen) == ["torch-2.13.0-cpu"]
    assert {cell.mode for cell in chosen} == {"default"}
    assert [(cell.cache_name, cell.settings_name) for cell in chosen] == [
        (name, cache.settings[0]) for name, cache in MATRIX.caches.items()
    ]


def test_with_a_gpu_the_default_is_production_and_the_newest_release_in_all_modes() -> None:
    chosen = default_selection(MATRIX, Device.CUDA)
    assert requested_environments(chosen) == ["torch-2.9.0-cu128", "torch-2.15.0-cu132"]
    assert {cell.mode for cell in chosen} == set(MATRIX.modes)


def test_the_newest_release_is_by_version_and_the_plain_environment_before_a_variant() -> None:
    matrix = with_environments("torch-2.10.0-cpu-numpy2", "torch-2.9.0-cpu", "torch-2.10.0-cpu", "torch-2.15.0-cu132")
    assert requested_environments(default_selection(matrix, Device.CPU)) == ["torch-2.10.0-cpu"]


def test_no_environment_for_the_device_is_a_selection_error() -> None:
    with pytest.raises(SelectionError, match="no cuda environment"):
        default_selection(with_environments("torch-2.10.0-cpu"), Device.CUDA)


def test_a_request_carries_the_profile_workload_settings_and_limits_of_the_matrix() -> None:
    [cell] = select(CELLS, ["torch-2.9.0-cu128/compile_friendly/default+production"])
    request = cell_request(MATRIX, MATRIX_PATH, cell, "full", Device.CUDA, work_folder="/cell/work", quiet_lock="/q")
    assert request.cell == cell.identifier
    assert request.settings.recompile_limit == 256
    assert (request.profile.iterations, request.workload) == (10, MATRIX.workloads["groups"])
    assert (request.device, request.cache.source) == (Device.CUDA, "builtin")
    assert type(request).model_validate_json(request.model_dump_json(by_alias=True)) == request


def test_a_cpu_wheel_is_asked_to_run_on_the_cpu_even_beside_a_gpu() -> None:
    [cell] = select(CELLS, ["torch-2.13.0-cpu/upstream/default"])
    assert cell_request(MATRIX, MATRIX_PATH, cell, "quick", Device.CUDA, work_folder="w").device is Device.CPU


def test_a_cuda_wheel_can_be_asked_to_run_on_the_cpu() -> None:
    [cell] = select(CELLS, ["torch-2.9.0-cu128/upstream/default"])
    assert cell_request(MATRIX, MATRIX_PATH, cell, "quick", Device.CPU, work_folder="w").device is Device.CPU


def test_files_of_the_user_are_named_as_the_cell_sees_them(tmp_path: Path) -> None:
    csv = CsvSeries(path="data/prices.csv", time_column="time", value_columns=("close",))
    workload = MATRIX.workloads["quick"].model_copy(update={"csv": csv})
    matrix = MATRIX.model_copy(
        update={
            "caches": {"mine": CacheSource(source="caches/mine.py:Mine")},
            "workloads": {**MATRIX.workloads, "quick": workload},
        }
    )
    [cell] = select(expand(matrix), ["torch-2.13.0-cpu/mine/default"])
    on_host = cell_request(matrix, tmp_path / "matrix.yaml", cell, "quick", Device.CPU, work_folder="w")
    assert on_host.cache.source == f"{tmp_path.resolve()}/caches/mine.py:Mine"
    assert on_host.csv is not None
    assert on_host.csv.path == f"{tmp_path.resolve()}/data/prices.csv"
    mounted = cell_request(
        matrix,
        tmp_path / "matrix.yaml",
        cell,
        "quick",
        Device.CPU,
        work_folder="w",
        path_in_cell=lambda path: f"/user/{path.name}",
    )
    assert mounted.cache.source == "/user/mine.py:Mine"
    assert mounted.csv is not None
    assert mounted.csv.path == "/user/prices.csv"


def test_an_unknown_profile_is_a_selection_error_with_the_nearest_name() -> None:
    with pytest.raises(SelectionError, match="did you mean quick"):
        cell_request(MATRIX, MATRIX_PATH, CELLS[0], "quik", Device.CPU, work_folder="w")


def test_a_profile_replaces_only_the_limits_it_names() -> None:
    general, strict = gate_limits(MATRIX, "quick"), gate_limits(MATRIX, "production-check")
    assert list(general) == list(strict) == list(Gate)
    assert general == {gate: MATRIX.gates[gate] for gate in Gate}
    assert (general[Gate.RECOMPILES_TOTAL].max, strict[Gate.RECOMPILES_TOTAL].max) == (9, 2)
    assert strict[Gate.MEMORY] == general[Gate.MEMORY]
