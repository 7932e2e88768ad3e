"""The plan of a run: what is taken from the store, what must be built, how long it takes, and how that is told."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.runtimes.stub_runtime import MATRIX_TEXT, StubRuntime
from tests.verdict.sample_cells import cell_request, good_evidence, provenance
from toto_compat.contract.cell_name import CellName
from toto_compat.contract.request import CellRequest, Device, Environment, Limits
from toto_compat.errors import EnvironmentBuildError
from toto_compat.evidence.store import CellStore, StoredCell
from toto_compat.matrix.asked import Asked
from toto_compat.matrix.load import load_matrix
from toto_compat.matrix.request import matrix_request
from toto_compat.matrix.selection import Selection, select_cells
from toto_compat.runtimes import plan as module
from toto_compat.runtimes.gpu import check_can_run
from toto_compat.runtimes.nvidia_smi import Gpu
from toto_compat.runtimes.plan import (
    Plan,
    PlannedCell,
    estimate,
    key_of,
    make_plan,
    plan_as_json,
    plan_cells,
    plan_run,
    plan_text,
)
from toto_compat.runtimes.source import CellSource
from toto_compat.runtimes.venv import VenvRuntime

ROOT = Path(__file__).parents[2]
CPU, OLDER, CUDA = "torch-2.13.0-cpu", "torch-2.12.0-cpu", "torch-2.9.0-cu128"


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of eight cores without a GPU, whatever this one is."""
    monkeypatch.setenv("TOTO_COMPAT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "machine_identity", lambda device: f"this machine, {device}")
    monkeypatch.setattr(module, "find_gpus", tuple)
    monkeypatch.setattr(module, "gpu_notes", lambda: iter(()))
    monkeypatch.setattr(module, "core_count", lambda: 8)


@pytest.fixture
def store(tmp_path: Path) -> CellStore:
    return CellStore(tmp_path / "store")


class ObstructedRuntime(StubRuntime):
    """Every environment is held up for two reasons."""

    def obstacle(self, environment_name: str, environment: Environment) -> str:  # noqa: ARG002
        return f"{environment_name}: no compiler\n      hint: install one"


def finished(request: CellRequest, *, seconds: float = 12.0, key: str = "key", **changes: Any) -> StoredCell:
    return StoredCell(
        cell=request.cell,
        request=request,
        provenance=provenance(request),
        evidence=good_evidence(request),
        key=key,
        seconds=seconds,
        stored="2026-11-16T10:00:00Z",
        **changes,
    )


def selection_of(folder: Path, *selectors: str, device: Device = Device.CPU, matrix: str = MATRIX_TEXT) -> Selection:
    path = folder / "matrix.yaml"
    path.write_text(matrix, encoding="utf-8")
    return select_cells(Asked(selectors=selectors, matrix_file=path), lambda: device)


def plan_of(
    requests: Sequence[CellRequest],
    store: CellStore,
    runtime: StubRuntime | None = None,
    *,
    reused: Sequence[CellRequest] = (),
    jobs: int = 1,
) -> Plan:
    cells = [PlannedCell(request, "", None) for request in requests]
    cells += [PlannedCell(request, "key", finished(request)) for request in reused]
    return make_plan(cells, runtime or StubRuntime(), store, jobs=jobs, device=Device.CPU)


# --- what the store has -----------------------------------------------------------------------------------------------


def test_a_cell_whose_environment_is_not_built_has_no_key_yet(store: CellStore) -> None:
    built, unbuilt = cell_request(), cell_request(torch="2.12.0")
    planned = plan_cells([built, unbuilt], StubRuntime(broken=(OLDER,)), store, fresh=False)
    assert planned[0].key != ""
    assert planned[1] == PlannedCell(unbuilt, "", None)


def test_a_cell_in_the_store_is_found_under_the_key_that_the_plan_gives_it(store: CellStore) -> None:
    request, runtime = cell_request(), StubRuntime()
    key = key_of(request, runtime.lock, runtime.source.hash)
    store.put(finished(request, key=key))
    [planned] = plan_cells([request], runtime, store, fresh=False)
    assert planned == PlannedCell(request, key, finished(request, key=key))


def test_a_cell_that_another_machine_measured_is_run_here(store: CellStore, monkeypatch: pytest.MonkeyPatch) -> None:
    request, runtime = cell_request(), StubRuntime()
    store.put(finished(request, key=key_of(request, runtime.lock, runtime.source.hash)))
    monkeypatch.setattr(module, "machine_identity", lambda device: f"another machine, {device}")
    [planned] = plan_cells([request], runtime, store, fresh=False)
    assert planned.stored is None


def test_each_cell_is_looked_up_for_its_own_device(store: CellStore) -> None:
    requests = [cell_request(build="cu128", device=device) for device in Device]
    keys = [
        key_of(request, "lock", StubRuntime().source.hash, f"this machine, {request.device}") for request in requests
    ]
    assert [cell.key for cell in plan_cells(requests, StubRuntime(), store, fresh=False)] == keys


def test_a_fresh_run_leaves_the_store_aside_and_still_knows_the_keys(store: CellStore) -> None:
    request, runtime = cell_request(), StubRuntime()
    key = key_of(request, runtime.lock, runtime.source.hash)
    store.put(finished(request, key=key))
    assert plan_cells([request], runtime, store, fresh=True) == [PlannedCell(request, key, None)]


# --- what is asked for ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "cores", "gpus", "asked", "jobs"),
    [
        (Device.CPU, 8, 0, None, 2),
        (Device.CPU, 1, 0, None, 1),
        (Device.CPU, 8, 0, 5, 5),
        (Device.CPU, 8, 3, None, 2),
        (Device.CUDA, 1, 3, None, 3),
        (Device.CUDA, 8, 3, 1, 1),
        (Device.CUDA, 8, 1, 4, 1),
    ],
)
def test_cells_share_the_machine_two_at_a_time_or_one_per_gpu_unless_told(
    *,
    device: Device,
    cores: int,
    gpus: int,
    asked: int | None,
    jobs: int,
    tmp_path: Path,
    store: CellStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "core_count", lambda: cores)
    monkeypatch.setattr(module, "find_gpus", lambda: (Gpu("0", "RTX 5090", "580.65", "sm_120", "GPU-0"),) * gpus)
    selection = selection_of(tmp_path, CUDA, device=device)
    assert plan_run(selection, StubRuntime(), store, Asked(jobs=asked)).jobs == jobs


def test_two_cells_never_share_a_gpu_and_the_plan_says_so(
    tmp_path: Path, store: CellStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "find_gpus", lambda: (Gpu("0", "RTX 5090", "580.65", "sm_120", "GPU-0"),))
    monkeypatch.setattr(module, "gpu_notes", lambda: iter(["GPU 1 is left out"]))
    plan = plan_run(selection_of(tmp_path, CUDA, device=Device.CUDA), StubRuntime(), store, Asked(jobs=3))
    assert "  GPU 1 is left out\n  --jobs 3: one cell at a time on each of 1" in plan_text(plan)
    assert plan_as_json(plan)["notes"] == plan.notes


def test_the_default_plan_leaves_out_what_the_driver_cannot_run_and_says_why(store: CellStore) -> None:
    asked = Asked(matrix_file=ROOT / "matrix.yaml")
    card = Gpu("0", "RTX 5090", "570.86.16", "sm_120", "GPU-0")

    def why_not(name: str, environment: Environment) -> str:
        try:
            check_can_run(name, environment, [card])
        except EnvironmentBuildError as error:
            return error.message
        return ""

    selection = select_cells(asked, lambda: Device.CUDA, why_not)
    assert {cell.environment for cell in selection.cells} == {CUDA, "torch-2.10.0-cu128"}
    text = plan_text(plan_run(selection, StubRuntime(), store, asked))
    assert "torch-2.15.0-cu132 is not in the default plan" in text
    assert "driver 570.86.16 is too old for cu132: CUDA 13 needs 580" in text


def test_the_default_plan_answers_within_45_minutes_on_one_gpu_environments_built(
    store: CellStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "find_gpus", lambda: (Gpu("0", "H100", "580.95", "sm_90", "GPU-0"),))
    asked = Asked(matrix_file=ROOT / "matrix.yaml")
    selection = select_cells(asked, lambda: Device.CUDA)
    plan = plan_run(selection, VenvRuntime(CellSource(), limits=Limits(), device=Device.CUDA), store, asked)
    assert {cell.request.cell.cache for cell in plan.cells} == set(selection.matrix.caches)
    assert plan.seconds <= 45 * 60


def test_autotuning_on_a_gpu_gets_the_time_it_takes(tmp_path: Path) -> None:
    matrix = load_matrix(ROOT / "matrix.yaml")

    def minutes(cache: str, mode: str, device: Device) -> float:
        cell = CellName.of(CUDA, cache, mode, "stock")
        return matrix_request(matrix, tmp_path / "matrix.yaml", cell, "quick", device).profile.timeout_minutes

    assert minutes("fixed_size", "max-autotune", Device.CPU) == 30
    assert minutes("fixed_size", "reduce-overhead", Device.CUDA) == 30
    assert minutes("fixed_size", "max-autotune", Device.CUDA) == 60
    assert minutes("upstream", "max-autotune", Device.CUDA) == 120


def test_the_cells_of_a_selection_are_planned_in_its_order_under_the_profile_asked_for(
    tmp_path: Path, store: CellStore
) -> None:
    text = MATRIX_TEXT.replace("workloads:\n", "  long: {iterations: 20, workloads: [quick]}\nworkloads:\n")
    selection = selection_of(tmp_path, "*/upstream", matrix=text)
    plan = plan_run(selection, StubRuntime(), store, Asked(profile="long"))
    assert [cell.request.cell for cell in plan.cells] == list(selection.cells)
    assert {(cell.request.profile_name, cell.request.profile.iterations) for cell in plan.cells} == {("long", 20)}


def test_timing_loops_of_all_cells_wait_for_each_other_at_one_file(tmp_path: Path, store: CellStore) -> None:
    plan = plan_run(selection_of(tmp_path, "*"), StubRuntime(), store, Asked())
    assert {cell.request.quiet_lock for cell in plan.cells} == {str(tmp_path / "cache" / "quiet.lock")}


def with_checkpoint(name: str) -> str:
    return MATRIX_TEXT.replace("  quick: {}", f"  quick: {{checkpoint: {name}}}")


def test_a_checkpoint_beside_the_matrix_file_is_part_of_every_request(tmp_path: Path, store: CellStore) -> None:
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "config.json").touch()
    (weights / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    plan = plan_run(selection_of(tmp_path, matrix=with_checkpoint("weights")), StubRuntime(), store, Asked())
    assert plan.to_download is None
    assert {cell.request.checkpoint_folder for cell in plan.cells} == {str(weights.resolve())}


def test_nothing_is_taken_from_the_store_while_the_checkpoint_is_not_here(
    tmp_path: Path, store: CellStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "find_checkpoint", lambda *_, **__: None)
    monkeypatch.setattr(CellStore, "get", lambda _, key, _demands: finished(cell_request(), key=key))
    selection = selection_of(tmp_path, matrix=with_checkpoint("org/name@main"))
    plan = plan_run(selection, StubRuntime(), store, Asked())
    assert plan.to_download == "org/name@main"
    assert plan.to_run == plan.cells != ()


# --- what that takes --------------------------------------------------------------------------------------------------


def test_cells_are_either_run_or_reused(store: CellStore) -> None:
    new, old = cell_request(mode="max-autotune"), cell_request()
    plan = plan_of([new], store, reused=[old])
    assert [cell.request for cell in plan.to_run] == [new]
    assert [cell.request for cell in plan.reused] == [old]


def test_only_what_is_missing_and_has_cells_to_run_is_built(store: CellStore) -> None:
    ready, missing, unneeded = cell_request(), cell_request(torch="2.12.0"), cell_request(torch="2.9.0", build="cu128")
    plan = plan_of([ready, missing], store, StubRuntime(broken=(OLDER, CUDA)), reused=[unneeded])
    assert plan.to_build == {OLDER: missing.environment}


def test_what_the_builds_need_is_added_up_and_their_time_comes_on_top_of_the_cells(store: CellStore) -> None:
    requests = [cell_request(torch="2.12.0"), cell_request(torch="2.9.0", build="cu128"), cell_request()]
    runtime = StubRuntime(broken=(OLDER, CUDA))
    small, large = (runtime.needs(request.cell.environment, request.environment) for request in requests[:2])
    plan = plan_of(requests, store, runtime)
    assert plan.needs.download_bytes == small.download_bytes + large.download_bytes
    assert plan.needs.disk_bytes == small.disk_bytes + large.disk_bytes
    assert plan.needs.seconds == small.seconds + large.seconds > 0
    assert plan.seconds == estimate(requests, store, jobs=1)[0] + plan.needs.seconds


def test_what_holds_up_an_environment_without_cells_to_run_is_of_no_interest(store: CellStore) -> None:
    plan = plan_of([cell_request()], store, ObstructedRuntime(), reused=[cell_request(torch="2.12.0")])
    assert list(plan.obstacles) == [CPU]


def test_nothing_holds_up_what_has_no_obstacle(store: CellStore) -> None:
    assert plan_of([cell_request()], store).obstacles == {}


# --- how long ---------------------------------------------------------------------------------------------------------


def remember(store: CellStore, *timed: tuple[CellRequest, float]) -> None:
    for number, (request, seconds) in enumerate(timed):
        store.put(finished(request, seconds=seconds, key=f"{number:02}"))


def test_nothing_to_run_takes_no_time(store: CellStore) -> None:
    assert estimate([], store, jobs=1) == (0.0, "nothing to run")


def test_cells_that_ran_before_take_as_long_as_last_time(store: CellStore) -> None:
    first, second = cell_request(), cell_request(cache="upstream")
    remember(store, (first, 30.0), (second, 12.0), (cell_request(torch="2.12.0"), 1000.0))
    assert estimate([first, second], store, jobs=1) == (42.0, "what these cells took last time")


def test_a_cell_that_never_ran_takes_the_median_of_those_of_its_profile(store: CellStore) -> None:
    known = cell_request()
    others = [cell_request(cache=name) for name in ("upstream", "list_index")]
    remember(store, (known, 90.0), (others[0], 10.0), (others[1], 20.0))
    seconds, based_on = estimate([known, cell_request(torch="2.12.0")], store, jobs=1)
    assert seconds == 90.0 + 20.0
    assert based_on == "what 3 cells of this profile took here"


@pytest.mark.parametrize("other", ["profile", "device"])
def test_times_of_another_profile_or_device_say_nothing(other: str, store: CellStore) -> None:
    request = cell_request(build="cu128", device=Device.CPU)
    changes: dict[str, dict[str, Any]] = {"profile": {"profile_name": "full"}, "device": {"device": Device.CUDA}}
    untimed = estimate([request], store, jobs=1)
    remember(store, (request.model_copy(update=changes[other]), 1.0))
    assert estimate([request], store, jobs=1) == untimed
    assert untimed[1] == "a rule of thumb, nothing was timed here yet"


@pytest.mark.parametrize(("jobs", "seconds"), [(1, 30.0), (2, 15.0), (3, 10.0), (8, 10.0)])
def test_cells_side_by_side_share_the_time_but_no_cell_is_split(jobs: int, seconds: float, store: CellStore) -> None:
    requests = [cell_request(cache=name) for name in ("upstream", "list_index", "fixed_size")]
    remember(store, *((request, 10.0) for request in requests))
    assert estimate(requests, store, jobs=jobs)[0] == seconds


@pytest.mark.parametrize("more", ["iterations", "repeats", "model"])
def test_the_rule_of_thumb_grows_with_what_is_measured(more: str, store: CellStore) -> None:
    request = cell_request()
    changes: dict[str, dict[str, Any]] = {
        "iterations": {"profile": request.profile.model_copy(update={"iterations": 4})},
        "repeats": {"profile": request.profile.model_copy(update={"repeats": 2})},
        "model": {"workload": request.workload.model_copy(update={"model": "base"})},
    }
    usual, longer = (estimate([one], store, jobs=1)[0] for one in (request, request.model_copy(update=changes[more])))
    assert 0 < usual < longer


def test_what_only_compiles_for_cuda_is_estimated_by_its_cards_and_not_as_a_whole_cell(store: CellStore) -> None:
    whole = cell_request(build="cu128", device=Device.CPU)
    lowered = whole.model_copy(update={"lower_only": True})
    one_card, three = (
        lowered.model_copy(update={"profile": whole.profile.model_copy(update={"architectures": cards})})
        for cards in (("sm_90",), ("sm_80", "sm_90", "sm_120"))
    )
    first, second, usual = (estimate([one], store, jobs=1)[0] for one in (one_card, three, whole))
    assert 0 < first < second < usual


# --- how it is told ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "words"), [(1, "1 cell, "), (2, "2 cells, ")])
def test_the_first_line_says_how_much_where_and_how_many_at_a_time(count: int, words: str, store: CellStore) -> None:
    requests = [cell_request(), cell_request(cache="upstream")][:count]
    first = plan_text(plan_of(requests, store, jobs=3)).splitlines()[0]
    assert first == f"{words}runtime venv, device cpu, 3 at a time"


@pytest.mark.parametrize(
    ("runtime", "broken", "state"),
    [
        (StubRuntime, (), "ready"),
        (StubRuntime, (CPU,), "to be built"),
        (ObstructedRuntime, (), "cannot run"),
        (ObstructedRuntime, (CPU,), "cannot be built"),
    ],
)
def test_the_state_of_an_environment_is_told(
    runtime: type[StubRuntime], broken: tuple[str, ...], state: str, store: CellStore
) -> None:
    text = plan_text(plan_of([cell_request()], store, runtime(broken=broken)))
    assert f"\n  {CPU} ({state}): 1 to run, 0 from the store\n" in text


def test_an_obstacle_stands_below_its_environment_line_by_line(store: CellStore) -> None:
    lines = plan_text(plan_of([cell_request()], store, ObstructedRuntime())).splitlines()
    assert lines[2:4] == [f"    {CPU}: no compiler", "    hint: install one"]


def test_cells_stand_below_their_environment_with_the_day_of_what_is_reused(store: CellStore) -> None:
    new, old, other = cell_request(), cell_request(cache="upstream"), cell_request(torch="2.12.0")
    lines = plan_text(plan_of([new, other], store, reused=[old])).splitlines()
    assert lines[1:6] == [
        f"  {CPU} (ready): 1 to run, 1 from the store",
        f"    {new.cell}",
        f"    {old.cell}  unchanged since 2026-11-16T10:00:00Z",
        f"  {OLDER} (ready): 1 to run, 0 from the store",
        f"    {other.cell}",
    ]


def test_downloads_and_disk_are_told_only_where_something_is_built(store: CellStore) -> None:
    assert "downloads" not in plan_text(plan_of([cell_request()], store))
    built = plan_text(plan_of([cell_request()], store, StubRuntime(broken=(CPU,))))
    assert "\n  downloads about 0.4 GB, disk about 2.0 GB at most\n" in built


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.4, "0 s"), (89.4, "89 s"), (90.0, "2 min"), (600.0, "10 min"), (7200.0, "120 min")]
)
def test_the_estimate_is_told_in_seconds_and_from_a_minute_and_a_half_in_minutes(
    seconds: float, words: str, store: CellStore
) -> None:
    plan = replace(plan_of([cell_request()], store), seconds=seconds, based_on="experience")
    assert plan_text(plan).splitlines()[-1] == f"  estimated {words}, from experience"


def test_no_time_is_estimated_where_nothing_runs(store: CellStore) -> None:
    assert "estimated" not in plan_text(plan_of([], store, reused=[cell_request()]))


def test_as_json_each_cell_has_its_key_and_says_if_it_is_reused(store: CellStore) -> None:
    new, old = cell_request(), cell_request(cache="upstream")
    shown = json.loads(json.dumps(plan_as_json(plan_of([new], store, reused=[old]))))
    assert shown["cells"] == [
        {"cell": f"{CPU}/fixed_size/default", "reused": False, "key": ""},
        {"cell": f"{CPU}/upstream/default", "reused": True, "key": "key"},
    ]


def test_as_json_the_plan_says_what_the_text_says(store: CellStore) -> None:
    plan = plan_of([cell_request()], store, ObstructedRuntime(broken=(CPU,)), jobs=3)
    shown = plan_as_json(replace(plan, seconds=89.6))
    assert (shown["runtime"], shown["device"], shown["jobs"]) == ("venv", "cpu", 3)
    assert shown["obstacles"] == {CPU: f"{CPU}: no compiler\n      hint: install one"}
    assert (shown["download_bytes"], shown["disk_bytes"]) == (plan.needs.download_bytes, plan.needs.disk_bytes)
    assert (shown["estimated_seconds"], shown["estimate_based_on"]) == (90, plan.based_on)
