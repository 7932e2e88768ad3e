"""Cells and selectors."""

from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toto_compat.contract.cell_name import CellName
from toto_compat.contract.request import Device, Environment
from toto_compat.errors import EnvironmentBuildError, SelectionError
from toto_compat.matrix.expand import (
    default_selection,
    expand,
    gate_limits,
    in_order_of_interest,
    requested_environments,
    select,
)
from toto_compat.matrix.gates import Gate
from toto_compat.matrix.load import load_matrix
from toto_compat.matrix.schema import CacheSource, Matrix

MATRIX_PATH = Path(__file__).parents[2] / "matrix.yaml"
MATRIX = load_matrix(MATRIX_PATH)
CELLS = expand(MATRIX, "quick")
IDENTIFIERS = [str(cell) for cell in CELLS]

unhurried = settings(deadline=None)  # a busy machine is no failure
cells_of_the_matrix = st.sampled_from(CELLS)


def names(cells: list[CellName]) -> list[str]:
    return [str(cell) for cell in cells]


def with_environments(*named: str) -> Matrix:
    environments = {}
    for name in named:
        torch, build = name.split("-")[1:3]
        environments[name] = Environment(torch=torch, build=build)
    return MATRIX.model_copy(update={"environments": environments, "production": None})


def test_every_cell_of_the_matrix_has_an_identifier_of_its_own() -> None:
    tried = sum(len(cache.settings) for cache in MATRIX.caches.values())
    assert len(set(IDENTIFIERS)) == len(CELLS) == len(MATRIX.environments) * len(MATRIX.modes) * tried


def test_a_selector_without_a_slash_is_an_environment() -> None:
    of_one_build = [f"torch-{release}-cu130" for release in ("2.11.0", "2.13.0", "2.14.1")]
    assert requested_environments(select(CELLS, ["*-cu130"])) == of_one_build
    assert len(select(CELLS, ["torch-2.13.0-cpu"])) == len(CELLS) // len(MATRIX.environments)


def test_environment_and_cache_take_all_modes_and_settings() -> None:
    chosen = select(CELLS, ["torch-2.13.0-cpu/compile_friendly"])
    assert {(cell.mode, cell.settings) for cell in chosen} == {
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
    assert {cell.cache for cell in kept} == set(MATRIX.caches) - {"list_index"}


@pytest.mark.parametrize(
    ("selector", "suggestion"),
    [
        ("torch-2.13.0-cp", "torch-2.13.0-cpu"),
        ("torch-2.13.0-cpu/fixedsize/default", "torch-2.13.0-cpu/fixed_size/default"),
        ("torch-2.13.0-cpu/upstrea", "torch-2.13.0-cpu/upstream"),
        ("upstraem/default", "/upstream/default"),
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
    assert {cell.cache for cell in select(CELLS, ["*/fixed_size"])} == {"fixed_size"}
    assert {cell.mode for cell in select(CELLS, ["*/reduce-overhead"])} == {"reduce-overhead"}


def test_excluding_all_that_is_selected_is_an_error() -> None:
    with pytest.raises(SelectionError, match="nothing is left"):
        select(CELLS, ["torch-2.13.0-cpu", "!*"])


@unhurried
@given(cells_of_the_matrix)
def test_every_identifier_selects_exactly_its_own_cell(cell: CellName) -> None:
    assert select(CELLS, [str(cell)]) == [cell]


@unhurried
@given(st.lists(cells_of_the_matrix, min_size=1, max_size=6))
def test_several_selectors_are_a_union_in_the_order_of_the_matrix(chosen: list[CellName]) -> None:
    assert select(CELLS, [str(cell) for cell in chosen]) == [cell for cell in CELLS if cell in chosen]


@unhurried
@given(st.lists(cells_of_the_matrix, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_the_order_of_selectors_and_exclusions_changes_nothing(chosen: list[CellName], random: Random) -> None:
    selectors = [*(str(cell) for cell in chosen), "torch-2.13.0-cpu", "!*/upstream"]
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
def test_an_exclusion_removes_exactly_what_the_same_selector_takes(selector: str, cell: CellName) -> None:
    taken = select(CELLS, [selector])
    if len(taken) == len(CELLS):
        with pytest.raises(SelectionError):
            select(CELLS, [f"!{selector}"])
    else:
        assert (cell in select(CELLS, [f"!{selector}"])) is (cell not in taken)


def test_without_a_gpu_the_default_is_every_cache_once_on_the_newest_cpu_environment() -> None:
    chosen = default_selection(MATRIX, Device.CPU, "quick")
    assert requested_environments(chosen) == ["torch-2.13.0-cpu"]
    assert {cell.mode for cell in chosen} == {"default"}
    assert [(cell.cache, cell.settings) for cell in chosen] == [
        (name, cache.settings[0]) for name, cache in MATRIX.caches.items()
    ]


def test_with_a_gpu_the_default_is_production_and_the_newest_release_with_cuda_graphs() -> None:
    chosen = default_selection(MATRIX, Device.CUDA, "quick")
    assert requested_environments(chosen) == ["torch-2.9.0-cu128", "torch-2.15.0-cu132"]
    assert "default" not in {cell.mode for cell in chosen}
    tried = [cell for cell in chosen if cell.cache == "fixed_size"]
    assert tried == chosen[:4], "what may PASS is asked first"
    assert {cell.mode for cell in tried} == {"reduce-overhead", "max-autotune"}


def test_with_a_gpu_no_whole_model_is_autotuned_unless_it_is_named() -> None:
    whole = [cell for cell in default_selection(MATRIX, Device.CUDA, "quick") if cell.cache != "fixed_size"]
    assert {cell.cache for cell in whole} == {"upstream", "list_index", "compile_friendly"}
    assert {(cell.environment, cell.mode) for cell in whole} == {("torch-2.9.0-cu128", "reduce-overhead")}
    named = in_order_of_interest(select(CELLS, ["torch-2.9.0-cu128"]))
    assert [cell.mode for cell in named[-4:]] == ["max-autotune"] * 4
    assert sorted(named) == sorted(select(CELLS, ["torch-2.9.0-cu128"]))


def test_a_cache_of_the_users_own_is_asked_first_and_once_per_environment() -> None:
    caches = {**MATRIX.caches, "mine": CacheSource(source="mine.py:Cache", settings=("stock", "dynamic"))}
    chosen = default_selection(MATRIX.model_copy(update={"caches": caches}), Device.CUDA, "quick")
    mine = [cell for cell in chosen if cell.cache == "mine"]
    assert [(cell.mode, cell.settings) for cell in mine] == [("reduce-overhead", "stock")] * 2
    assert set(mine) < set(chosen[:6])


def test_the_newest_release_that_the_gpu_can_run_is_taken() -> None:
    too_new = ("torch-2.15.0-cu132", "torch-2.14.1-cu130", "torch-2.13.0-cu130")
    left_out = dict.fromkeys(too_new, "driver 570 is too old")
    chosen = default_selection(MATRIX, Device.CUDA, "quick", left_out)
    assert requested_environments(chosen) == ["torch-2.9.0-cu128", "torch-2.11.0-cu130"]
    alone = default_selection(MATRIX, Device.CUDA, "quick", {"torch-2.9.0-cu128": "no kernels"})
    assert requested_environments(alone) == ["torch-2.15.0-cu132"]
    assert {cell.cache for cell in alone} == set(MATRIX.caches)


def test_where_the_gpu_can_run_no_environment_every_reason_is_told() -> None:
    cuda = [name for name, one in MATRIX.environments.items() if one.device is Device.CUDA]
    with pytest.raises(EnvironmentBuildError, match="no cuda environment of the matrix runs on this machine") as caught:
        default_selection(MATRIX, Device.CUDA, "quick", {name: f"reason {name}" for name in cuda})
    assert all(f"{name}: reason {name}" in caught.value.message for name in cuda)


def test_the_newest_release_is_by_version_and_the_plain_environment_before_a_variant() -> None:
    matrix = with_environments("torch-2.10.0-cpu-numpy2", "torch-2.9.0-cpu", "torch-2.10.0-cpu", "torch-2.15.0-cu132")
    assert requested_environments(default_selection(matrix, Device.CPU, "quick")) == ["torch-2.10.0-cpu"]


def test_no_environment_for_the_device_is_a_selection_error() -> None:
    with pytest.raises(SelectionError, match="no cuda environment"):
        default_selection(with_environments("torch-2.10.0-cpu"), Device.CUDA, "quick")


def test_a_profile_replaces_only_the_limits_it_names() -> None:
    general, strict = gate_limits(MATRIX, "quick"), gate_limits(MATRIX, "production-check")
    assert list(general) == list(strict)
    assert general == {gate: MATRIX.gates[gate] for gate in general}
    assert (general[Gate.RECOMPILES_TOTAL].max, strict[Gate.RECOMPILES_TOTAL].max) == (9, 2)
    assert strict[Gate.MEMORY] == general[Gate.MEMORY]


def test_a_gate_without_a_limit_in_the_file_has_its_default() -> None:
    limits = gate_limits(MATRIX.model_copy(update={"gates": {}}), "quick")
    assert limits == {gate: gate.rule.default for gate in Gate if gate.rule.default}


def test_of_several_workloads_every_cell_is_run_once_for_each() -> None:
    workloads = MATRIX.profiles["production-check"].workloads
    cells = select(expand(MATRIX, "production-check"), ["torch-2.13.0-cpu/fixed_size/default"])
    assert names(cells) == [f"torch-2.13.0-cpu/fixed_size/default@{workload}" for workload in workloads]
    [one] = select(cells, ["*/fixed_size@*bfloat16"])
    assert one.workload == "production-bfloat16"


def test_a_profile_with_one_workload_leaves_it_out_of_the_name() -> None:
    assert not any(cell.workload for cell in CELLS)


def test_whole_model_caches_run_in_a_production_check_only_when_they_are_named() -> None:
    cells = expand(MATRIX, "production-check")
    spared = MATRIX.profiles["production-check"].only_when_named
    for selector in ("torch-2.13.0-cpu", "*", "*/*/default"):
        assert {cell.cache for cell in select(cells, [selector], only_when_named=spared)} == {"fixed_size"}
    for selector in ("*/upstream", "torch-2.13.0-cpu/up*", "*/upstream/default@production"):
        assert {cell.cache for cell in select(cells, [selector], only_when_named=spared)} == {"upstream"}
    assert {cell.cache for cell in default_selection(MATRIX, Device.CPU, "production-check")} == {"fixed_size"}
