"""The container runtime: what a cell's request looks like inside, and what its end means."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import docker
import pytest

from tests.runtimes import stub_cell
from tests.runtimes.containers import SMALL, SMALL_ENVIRONMENT, SMALL_LIMITS, make_small_project
from tests.verdict.sample_cells import GATES
from toto_compat.errors import EnvironmentBuildError
from toto_compat.evidence.schema import (
    CacheRequest,
    CellRequest,
    CellResult,
    Failure,
    Outcome,
    Provenance,
    SuiteEvidence,
)
from toto_compat.matrix.schema import CsvSeries, Device, Environment, Limits, Profile, Suite, Workload
from toto_compat.runtimes.cell_process import INSIDE, LOG_FILE, RESULT_FILE, ProcessEnd
from toto_compat.runtimes.docker import (
    CpuShares,
    DockerRuntime,
    Probed,
    as_seen_inside,
    blame_probe,
    check_answer,
    judge_end,
)
from toto_compat.runtimes.docker_image import ensure_image
from toto_compat.runtimes.docker_run import CELL_FOLDER, ContainerEnd, ContainerJob, mounts_of
from toto_compat.runtimes.engine import EngineFacts
from toto_compat.runtimes.seam import PreparedEnvironment
from toto_compat.verdict.gates import Status, judge

CPU = Environment(torch="2.13.0", build="cpu")
CUDA = Environment(torch="2.13.0", build="cu130")
PROFILE = Profile(iterations=1, workload="tiny", suites=(Suite.RECOMPILE,), timeout_minutes=2)


def request_of(**changes: Any) -> CellRequest:
    fields: dict[str, Any] = {
        "cell": f"{SMALL}/upstream/default",
        "environment_name": SMALL,
        "environment": SMALL_ENVIRONMENT,
        "cache": CacheRequest(name="upstream", source="builtin"),
        "mode": "default",
        "device": Device.CPU,
        "profile_name": "quick",
        "profile": PROFILE,
        "workload": Workload(),
        "limits": SMALL_LIMITS,
        "work_folder": "",
    }
    return CellRequest(**{**fields, **changes})


def result_of(request: CellRequest, failure: Failure | None = None) -> CellResult:
    return CellResult(cell=request.cell, request=request, provenance=Provenance(), failure=failure)


# --- paths ------------------------------------------------------------------------------------------------------------


def test_a_users_files_are_seen_under_paths_of_the_container(tmp_path: Path) -> None:
    request = request_of(
        cache=CacheRequest(name="mine", source=f"{tmp_path}/mine.py:Cache"),
        csv=CsvSeries(path=f"{tmp_path}/prices.csv", time_column="t", value_columns=("v",)),
        checkpoint_folder=f"{tmp_path}/weights",
    )
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").write_text("{}")
    inside, inputs = as_seen_inside(request, copy=False)
    assert inside.work_folder == f"{CELL_FOLDER}/work"
    assert inside.cache.source == f"{inputs[tmp_path / 'mine.py']}:Cache"
    assert inside.csv is not None
    assert inside.csv.path == inputs[tmp_path / "prices.csv"]
    assert inputs[tmp_path / "weights" / "config.json"] == f"{inside.checkpoint_folder}/config.json"
    assert str(tmp_path) not in inside.model_dump_json()


def test_a_hubs_checkpoint_of_links_is_mounted_as_the_files_they_stand_for(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0123abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for blob, name in (("aa11", "config.json"), ("bb22", "model.safetensors")):
        (blobs / blob).write_text(name)
        (snapshot / name).symlink_to(f"../../blobs/{blob}")
    (snapshot / "gone.json").symlink_to("../../blobs/gone")
    inside, inputs = as_seen_inside(request_of(checkpoint_folder=str(snapshot)), copy=False)
    job = ContainerJob("image", ("true",), tmp_path, tmp_path, inputs=inputs)
    mounted = {mount["Target"]: mount["Source"] for mount in mounts_of(job)}
    assert mounted[f"{inside.checkpoint_folder}/config.json"] == str(blobs / "aa11")
    assert mounted[f"{inside.checkpoint_folder}/model.safetensors"] == str(blobs / "bb22")
    assert f"{inside.checkpoint_folder}/gone.json" not in mounted


def test_cells_in_containers_share_the_quiet_lock(tmp_path: Path) -> None:
    inside, inputs = as_seen_inside(request_of(quiet_lock=f"{tmp_path}/quiet.lock"), copy=False)
    assert inside.quiet_lock == inputs[tmp_path / "quiet.lock"]
    assert inputs[tmp_path / "quiet.lock.turnstile"] == f"{inside.quiet_lock}.turnstile"
    assert (tmp_path / "quiet.lock.turnstile").exists()  # a file that is not there cannot be mounted


def test_a_copied_lock_would_be_none_so_there_is_none(tmp_path: Path) -> None:
    inside, inputs = as_seen_inside(request_of(quiet_lock=f"{tmp_path}/quiet.lock"), copy=True)
    assert inside.quiet_lock is None
    assert inputs == {}


# --- ends -------------------------------------------------------------------------------------------------------------


def test_a_child_killed_for_memory_spoils_a_cell_that_went_on() -> None:
    request = request_of()
    judged = judge_end(result_of(request), ContainerEnd(ProcessEnd(code=0), out_of_memory=True), request)
    assert judged.failure is not None
    assert judged.failure.kind == "out_of_memory"
    assert "limits.memory" in judged.failure.message


def test_a_hang_after_a_child_was_killed_for_memory_is_told_as_out_of_memory() -> None:
    request = request_of()
    hang = result_of(request, Failure(kind="timeout", message="no end after 30 minutes"))
    judged = judge_end(hang, ContainerEnd(ProcessEnd(code=137, timed_out=True), out_of_memory=True), request)
    assert judged.failure is not None
    assert judged.failure.kind == "out_of_memory"
    assert "no end after 30 minutes" in judged.failure.message


@pytest.mark.parametrize("kind", ["out_of_memory", "interrupted"])
def test_what_is_already_known_about_the_end_is_kept(kind: Literal["out_of_memory", "interrupted"]) -> None:
    request = request_of()
    own = Failure(kind=kind, message="as the cell said")
    judged = judge_end(result_of(request, own), ContainerEnd(ProcessEnd(code=137), out_of_memory=True), request)
    assert judged.failure == own


def test_a_forecast_that_raised_after_a_child_was_killed_for_memory_decides_nothing() -> None:
    request = request_of()
    raised = SuiteEvidence(
        suite=Suite.RECOMPILE,
        outcome=Outcome.MODEL_FAILED,
        failure=Failure(kind="exception", message="A compilation subprocess exited unexpectedly"),
    )
    result = result_of(request).model_copy(update={"evidence": {Suite.RECOMPILE: raised}})
    assert judge(result, GATES).verdict is Status.FAIL
    judged = judge_end(result, ContainerEnd(ProcessEnd(code=0), out_of_memory=True), request)
    found = judged.evidence[Suite.RECOMPILE]
    assert found.outcome is Outcome.ERROR
    assert found.failure is not None
    assert found.failure.kind == "out_of_memory"
    assert "exited unexpectedly" in found.failure.message
    assert judge(judged, GATES).verdict is Status.INCONCLUSIVE
    assert judge_end(result, ContainerEnd(ProcessEnd(code=0)), request) == result


def test_a_lost_engine_is_an_error_of_the_environment() -> None:
    request = request_of()
    judged = judge_end(result_of(request), ContainerEnd(ProcessEnd(code=-1), lost="the engine went away"), request)
    assert judged.failure is not None
    assert judged.failure.kind == "environment"


# --- the probe's answer -----------------------------------------------------------------------------------------------


def answer_of(failed: dict[str, str] | None = None, **torch: Any) -> dict[str, Any]:
    found = {"version": "2.13.0+cpu", "cuda": None, "architectures": [], "cuda_available": False, **torch}
    return {"ok": {"torch": found}, "failed": failed or {}}


def test_a_probe_that_worked_says_nothing() -> None:
    check_answer("e", CPU, Device.CPU, answer_of())


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        ("ImportError: failed to map segment from shared object", "not executable"),
        ("OSError: [Errno 28] No space left on device", "limits.tmp"),
        ("RuntimeError: can't start new thread", "limits.pids"),
        ("RuntimeError: unable to open shared memory object", "limits.shm"),
        ("ValueError: something new", "toto-compat shell e"),
    ],
)
def test_a_failed_check_names_the_option_to_relax(error: str, advice: str) -> None:
    with pytest.raises(EnvironmentBuildError, match="'compiled kernel' fails") as caught:
        check_answer("e", CPU, Device.CPU, answer_of({"compiled_kernel": error}))
    assert advice in caught.value.hint


def test_another_torch_than_the_locked_one_is_noticed() -> None:
    with pytest.raises(EnvironmentBuildError, match=r"its image has torch 2\.12\.0"):
        check_answer("e", CPU, Device.CPU, answer_of(version="2.12.0"))


def test_a_gpu_handed_out_but_not_seen_is_no_fault_of_a_cache() -> None:
    with pytest.raises(EnvironmentBuildError, match="sees no GPU"):
        check_answer("e", CUDA, Device.CUDA, answer_of(version="2.13.0", cuda="13.0"))


def test_a_gpu_without_kernels_in_the_wheel_is_no_fault_of_a_cache() -> None:
    seen: dict[str, Any] = {
        "cuda_available": True,
        "architectures": ["sm_90"],
        "architecture": "sm_120",
        "gpu": "RTX 5090",
    }
    with pytest.raises(EnvironmentBuildError, match="no kernels for RTX 5090"):
        check_answer("e", CUDA, Device.CUDA, answer_of(version="2.13.0", **seen))


def test_a_probe_without_an_answer_is_blamed_on_what_ended_it() -> None:
    assert (
        "ran out of memory at 8g"
        in blame_probe("e", ContainerEnd(ProcessEnd(137), out_of_memory=True), Limits()).message
    )
    assert "did not finish" in blame_probe("e", ContainerEnd(ProcessEnd(137, timed_out=True)), Limits()).message
    crash = blame_probe("e", ContainerEnd(ProcessEnd(127, last_lines=("no such file",))), Limits())
    assert "no such file" in crash.message


# --- processors -------------------------------------------------------------------------------------------------------


def test_cells_at_the_same_time_get_different_processors() -> None:
    facts = EngineFacts("1", 4, 0, (), (), "", None)
    shares = CpuShares(facts, local=False)
    with shares.taken(2) as first, shares.taken(2) as second:
        assert (first, second) == ("0,1", "2,3")
    with shares.taken(3) as again:
        assert again == "0,1,2"


def test_a_machine_with_fewer_processors_gives_what_it_has() -> None:
    with CpuShares(EngineFacts("1", 1, 0, (), (), "", None), local=False).taken(8) as cpuset:
        assert cpuset == "0"


# --- a cell that does not measure, in a real container ----------------------------------------------------------------


@pytest.fixture(scope="module")
def stub(client: docker.DockerClient, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """The small image, and a source folder whose `toto_compat.cell` behaves as told."""
    folder = tmp_path_factory.mktemp("stub")
    with pytest.MonkeyPatch.context() as patch:
        make_small_project(folder, patch, note=str(folder))
        _, built = ensure_image(client, SMALL, SMALL_ENVIRONMENT, lambda _: None)
    source = folder / "source"
    source.mkdir()
    shutil.copyfile(stub_cell.__file__, source / "stub_cell.py")
    yield source, str(built.id)
    client.images.remove(str(built.id), force=True)


def run_stub(stub: tuple[Path, str], folder: Path, behaviour: str, *, copy: bool = False) -> CellResult:
    # a stub that lost its child to the memory limit waits for the timeout; the others end by themselves
    profile = PROFILE.model_copy(update={"timeout_minutes": 0.4}) if behaviour == "memory" else PROFILE
    source, image = stub
    runtime = DockerRuntime(source, "hash", ("-m", "stub_cell", behaviour), limits=SMALL_LIMITS)
    # the small image has no torch to probe: what the probe would find is put in its place
    runtime._images["lock"], runtime._probed["lock"] = image, Probed(copy, {})
    prepared = PreparedEnvironment(SMALL, SMALL_ENVIRONMENT, "docker", "/opt/venv/bin/python", "lock")
    cell = folder / "cell"
    cell.mkdir()
    return runtime.run_cell(prepared, request_of(profile=profile), cell, lambda _: None)


@pytest.mark.docker
@pytest.mark.parametrize("copy", [False, True], ids=["bind", "copy"])
def test_a_cells_result_comes_out_of_the_container(stub: tuple[Path, str], tmp_path: Path, copy: bool) -> None:
    result = run_stub(stub, tmp_path, "measure", copy=copy)
    assert result.failure is None
    assert set(result.evidence) == {Suite.RECOMPILE}
    assert (result.provenance.runtime, result.provenance.lock) == ("docker", "lock")
    assert result.request == request_of()  # as asked, not with the container's paths


@pytest.mark.docker
@pytest.mark.parametrize(
    ("behaviour", "kind", "message"),
    [
        ("garbage", "crash", "result file is not valid"),
        ("exit", "crash", "exit code 3"),
        ("segfault", "crash", "SIGSEGV"),
        ("memory", "out_of_memory", "192m"),
    ],
)
def test_however_a_cell_ends_there_is_a_result(
    stub: tuple[Path, str], tmp_path: Path, behaviour: str, kind: str, message: str
) -> None:
    result = run_stub(stub, tmp_path, behaviour)
    assert result.failure is not None
    assert result.failure.kind == kind
    assert message in result.failure.message
    assert json.loads(result.model_dump_json())["failure"]["kind"] == kind


@pytest.mark.docker
@pytest.mark.parametrize(("copy", "message"), [(False, "it is a link"), (True, "left no result file")])
def test_a_link_in_the_place_of_a_result_is_not_followed(
    stub: tuple[Path, str], tmp_path: Path, copy: bool, message: str
) -> None:
    result = run_stub(stub, tmp_path, "link", copy=copy)
    assert result.failure is not None
    assert message in result.failure.message


@pytest.mark.docker
def test_a_cell_reaches_neither_its_log_nor_its_lock(stub: tuple[Path, str], tmp_path: Path) -> None:
    run_stub(stub, tmp_path, "measure")
    assert (tmp_path / "cell" / LOG_FILE).exists()
    assert {path.name for path in (tmp_path / "cell" / INSIDE).iterdir()} == {"request.json", RESULT_FILE, "work"}


@pytest.mark.docker
def test_a_container_that_the_engine_refuses_is_a_result_of_that_cell(stub: tuple[Path, str], tmp_path: Path) -> None:
    source, _ = stub
    result = run_stub((source, "toto-compat/nobody-has-this:1"), tmp_path, "measure")
    assert result.failure is not None
    assert result.failure.kind == "environment"
    assert "No such image" in result.failure.message


@pytest.mark.docker
def test_a_probe_that_the_engine_refuses_is_an_error_of_its_environment_alone(
    stub: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOTO_COMPAT_CACHE", str(tmp_path))
    source, _ = stub
    runtime = DockerRuntime(source, "hash", limits=SMALL_LIMITS)
    with pytest.raises(EnvironmentBuildError, match=f"{SMALL}: the engine refuses a container"):
        runtime.probe(SMALL, SMALL_ENVIRONMENT, "toto-compat/nobody-has-this:1", Device.CPU, lambda _: None)


@pytest.mark.docker
def test_an_environment_without_a_lock_is_told_before_anything_is_built(
    client: docker.DockerClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_small_project(tmp_path / "docker", monkeypatch)
    runtime = DockerRuntime(tmp_path, "hash", limits=SMALL_LIMITS)
    assert runtime.obstacle(SMALL, SMALL_ENVIRONMENT) == ""
    assert "torch-9.9.8-cpu has no lock" in runtime.obstacle("torch-9.9.8-cpu", SMALL_ENVIRONMENT)
