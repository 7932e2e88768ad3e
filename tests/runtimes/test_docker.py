"""The container runtime: what a request looks like inside, what a build takes, and that every end is a result."""

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import pytest

from tests.environments.small_project import REPOSITORY, SMALL, SMALL_ENVIRONMENT, make_small_project
from tests.runtimes import stub_cell
from tests.runtimes.containers import SMALL_LIMITS, small_image
from toto_compat.contract.cell_name import CellName
from toto_compat.contract.references import references_of
from toto_compat.contract.request import (
    CacheRequest,
    CellProfile,
    CellRequest,
    CsvSeries,
    Device,
    Environment,
    SymbolSeries,
    Workload,
)
from toto_compat.contract.result import CellResult
from toto_compat.contract.suites import Suite
from toto_compat.environments.base_image import BaseImage
from toto_compat.environments.engine import EngineFacts
from toto_compat.environments.leftovers import RUNNER_LABEL, runner_label
from toto_compat.environments.locks import read_lock
from toto_compat.errors import EnvironmentBuildError, InputError
from toto_compat.evidence.references import KnownReferences
from toto_compat.evidence.store import CellStore
from toto_compat.matrix.load import load_matrix
from toto_compat.matrix.request import cell_variables
from toto_compat.runtimes import docker as docker_module
from toto_compat.runtimes.cell_process import INSIDE, LOG_FILE, RESULT_FILE, ProcessEnd
from toto_compat.runtimes.container_end import ContainerEnd
from toto_compat.runtimes.container_files import mounts_of
from toto_compat.runtimes.container_options import CELL_FOLDER, ContainerJob
from toto_compat.runtimes.docker import DockerRuntime, as_seen_inside
from toto_compat.runtimes.nvidia_smi import Gpu
from toto_compat.runtimes.plan import PlannedCell, make_plan, plan_text
from toto_compat.runtimes.probing import Answer, Probed
from toto_compat.runtimes.references import left_references
from toto_compat.runtimes.seam import PreparedEnvironment
from toto_compat.runtimes.source import CellSource

BASE = BaseImage("python:3.11-slim", "toto-compat-base:bookworm", "sha256:" + "b" * 64, complete=True)
PROFILE = CellProfile(iterations=1, suites=(Suite.RECOMPILE,), timeout_minutes=2)


def request_of(**changes: Any) -> CellRequest:
    fields: dict[str, Any] = {
        "cell": CellName.of(SMALL, "upstream", "default"),
        "environment": SMALL_ENVIRONMENT,
        "cache": CacheRequest(name="upstream", source="builtin"),
        "device": Device.CPU,
        "profile_name": "quick",
        "profile": PROFILE,
        "workload": Workload(),
        "limits": SMALL_LIMITS,
        "variables": cell_variables(SMALL_LIMITS, Device.CPU),
    }
    return CellRequest(**{**fields, **changes})


# --- paths ------------------------------------------------------------------------------------------------------------


def test_a_users_files_are_seen_under_paths_of_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOTO_COMPAT_CACHE", str(tmp_path / "staged"))
    request = request_of(
        cache=CacheRequest(name="mine", source=f"{tmp_path}/mine.py:Cache"),
        csv=CsvSeries(path=f"{tmp_path}/prices.csv", time_column="t", value_columns=("v",)),
        checkpoint_folder=f"{tmp_path}/weights",
    )
    (tmp_path / "mine.py").write_text("import tricks\n")
    (tmp_path / "tricks.py").write_text("")
    (tmp_path / "secret.py").write_text("")
    (tmp_path / "prices.csv").write_text("t,v\n")
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").write_text("{}")
    inside, inputs = as_seen_inside(request, copy=False)
    assert inside.work_folder == f"{CELL_FOLDER}/work"
    file, _, class_name = inside.cache.source.rpartition(":")
    assert class_name == "Cache"
    mounted = {there: here for here, there in inputs.items()}
    assert mounted[file].read_text() == "import tricks\n"
    assert str(Path(file).with_name("tricks.py")) in mounted  # what it imports comes along, and nothing else
    assert not any("secret" in there for there in mounted)
    assert inside.csv is not None
    assert mounted[inside.csv.path].read_text() == "t,v\n"
    assert inputs[tmp_path / "weights" / "config.json"] == f"{inside.checkpoint_folder}/config.json"
    assert str(tmp_path) not in inside.model_dump_json()


def test_a_users_series_are_seen_by_number_whatever_they_are_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOTO_COMPAT_CACHE", str(tmp_path / "staged"))
    symbols = []
    for name in ("A,B:ro", "../x y"):
        path = tmp_path / f"{name.replace('/', '_')}.csv"
        path.write_text(f"time,close\n1,{len(name)}\n")
        series = CsvSeries(path=str(path), time_column="time", value_columns=("close",))
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        symbols.append(SymbolSeries(name=name, series=series, content=content))
    inside, inputs = as_seen_inside(request_of(symbols=tuple(symbols)), copy=False)
    mounted = {there: here for here, there in inputs.items()}
    assert [Path(one.series.path).name for one in inside.symbols] == ["0.csv", "1.csv"]
    for one in inside.symbols:
        assert mounted[one.series.path].read_text() == f"time,close\n1,{len(one.name)}\n"
    assert str(tmp_path) not in inside.model_dump_json()
    Path(symbols[0].series.path).write_text("time,close\n1,3\n")
    with pytest.raises(InputError, match="was changed while it was read"):
        as_seen_inside(request_of(symbols=tuple(symbols)), copy=False)


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


class NoContainers:
    """Stands in for the engine: remembers the job and which files lay in its folder."""

    def __init__(self, _client: object) -> None:
        self.job: ContainerJob | None = None
        self.writable: dict[str, bytes] = {}

    def run(self, job: ContainerJob, _on_line: object) -> ContainerEnd:
        self.job = job
        files = (path for path in job.folder.rglob("*") if path.is_file())
        self.writable = {path.relative_to(job.folder).as_posix(): path.read_bytes() for path in files}
        return ContainerEnd(ProcessEnd(code=0))


def test_references_are_given_as_files_to_remove_and_not_as_a_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = EngineFacts("28", 2, (), (), "/", None)
    for name, value in {
        "open_client": lambda: None,
        "engine_facts": lambda _: facts,
        "is_local": lambda _: True,
    }.items():
        monkeypatch.setattr(docker_module, name, value)
    monkeypatch.setattr(docker_module, "Containers", NoContainers)
    runtime = runtime_of(tmp_path)
    runtime._images["lock"], runtime._probed["lock"] = "image", Probed(answer=Answer(), copied=False)
    runtime._bases["lock"] = BASE
    contents = {"references.safetensors": b"answers", "truths.safetensors": b"truths"}
    known = KnownReferences(references_of(contents, {}, key="key"), contents)
    prepared = PreparedEnvironment(SMALL, SMALL_ENVIRONMENT, "docker", "/opt/venv/bin/python", "lock")
    runtime.run_cell(prepared, request_of(), tmp_path, lambda _: None, references=known)
    started = runtime._containers
    assert isinstance(started, NoContainers)
    told = CellRequest.model_validate_json(started.writable.pop("request.json"))
    assert told.references == known.told
    origin = told.origin
    assert (origin.base_image, origin.base_used) == ("python:3.11-slim", "toto-compat-base:bookworm")
    assert (origin.base_digest, origin.base_is_stand_in) == (BASE.identity, True)
    assert started.writable == {f"work/references/{name}": content for name, content in contents.items()}
    assert started.job is not None
    assert started.job.inputs == {}


# --- a cell that does not measure, in a real container ----------------------------------------------------------------


@pytest.fixture(scope="module")
def stub(client: docker.DockerClient, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """The small image, and a source folder with a cell that behaves as told."""
    folder = tmp_path_factory.mktemp("stub")
    source = folder / "source"
    source.mkdir()
    shutil.copyfile(stub_cell.__file__, source / "stub_cell.py")
    with small_image(client, folder) as image:
        yield source, image


def source_of(folder: Path) -> CellSource:
    source = CellSource()
    source._folder, source.hash = folder, "hash"
    return source


def runtime_of(folder: Path, **options: Any) -> DockerRuntime:
    return DockerRuntime(source_of(folder), **{"limits": SMALL_LIMITS, "device": Device.CPU, **options})


def run_stub(stub: tuple[Path, str], folder: Path, behaviour: str, *, copy: bool = False, **asked: Any) -> CellResult:
    # a stub that lost its child to the memory limit waits for the timeout; the others end by themselves
    profile = PROFILE.model_copy(update={"timeout_minutes": 0.4}) if behaviour == "memory" else PROFILE
    references = asked.pop("references", None)
    source, image = stub
    runtime = runtime_of(source, command=("-m", "stub_cell", behaviour))
    # the small image has no torch to probe: what the probe would find is put in its place
    runtime._images["lock"], runtime._probed["lock"] = image, Probed(answer=Answer(), copied=copy)
    runtime._bases["lock"] = BASE
    prepared = PreparedEnvironment(SMALL, SMALL_ENVIRONMENT, "docker", "/opt/venv/bin/python", "lock")
    cell = folder / "cell"
    cell.mkdir()
    request = request_of(profile=profile, **asked)
    return runtime.run_cell(prepared, request, cell, lambda _: None, references=references)


@pytest.mark.docker
@pytest.mark.parametrize("copy", [False, True], ids=["bind", "copy"])
def test_a_cells_result_comes_out_of_the_container(stub: tuple[Path, str], tmp_path: Path, copy: bool) -> None:
    result = run_stub(stub, tmp_path, "measure", copy=copy)
    assert result.failure is None
    assert set(result.evidence) == {Suite.RECOMPILE}
    known = result.provenance
    assert (known.runtime, known.lock, known.image, known.source_hash) == ("docker", "lock", stub[1], "hash")
    assert result.request == request_of()  # as asked, not with the container's paths


@pytest.mark.docker
@pytest.mark.parametrize("copy", [False, True], ids=["bind", "copy"])
def test_references_come_out_of_one_container_and_into_the_next_as_files_that_it_can_remove(
    stub: tuple[Path, str], tmp_path: Path, copy: bool
) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    computed = run_stub(stub, tmp_path / "first", "measure", copy=copy, only_references=True)
    references = left_references(tmp_path / "first" / "cell", computed)
    assert references is not None
    result = run_stub(stub, tmp_path / "second", "references", copy=copy, references=references)
    assert result.failure is None
    details = result.evidence[Suite.RECOMPILE].details
    assert details["found"] == {"references.safetensors": "answers", "truths.safetensors": "truths"}
    assert details["told"] == references.told.model_dump()
    assert result.request.references is None


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
    with pytest.raises(EnvironmentBuildError, match=f"{SMALL}: the engine refuses a container"):
        runtime_of(source).probe(SMALL, SMALL_ENVIRONMENT, "toto-compat/nobody-has-this:1", Device.CPU, lambda _: None)


@pytest.mark.docker
def test_an_environment_without_a_lock_is_told_before_anything_is_built(
    client: docker.DockerClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_small_project(tmp_path / "docker", monkeypatch)
    runtime = runtime_of(tmp_path)
    assert runtime.obstacle(SMALL, SMALL_ENVIRONMENT) == ""
    assert "torch-9.9.8-cpu has no lock" in runtime.obstacle("torch-9.9.8-cpu", SMALL_ENVIRONMENT)


@pytest.mark.docker
def test_a_cell_gets_what_the_runtime_knows_in_its_request_and_not_in_variables(
    stub: tuple[Path, str], tmp_path: Path
) -> None:
    result = run_stub(stub, tmp_path, "environment")
    variables = result.evidence[Suite.RECOMPILE].details["environment"]
    assert cell_variables(SMALL_LIMITS, Device.CPU).items() <= variables.items()
    assert not any(name.startswith("TOTO_COMPAT") for name in variables)
    handed_over = json.loads((tmp_path / "cell" / INSIDE / "request.json").read_text())
    assert handed_over["origin"] == {
        "runtime": "docker",
        "lock": "lock",
        "image": stub[1],
        "source_hash": "hash",
        "base_image": BASE.asked,
        "base_used": BASE.reference,
        "base_digest": BASE.identity,
        "base_is_stand_in": True,
        "checkpoint": "",
        "toto_fork": "",
    }


@pytest.mark.docker
def test_an_environment_whose_probe_fails_names_the_check(
    client: docker.DockerClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The small image's torch is an empty package."""
    with small_image(client, tmp_path):
        make_small_project(tmp_path, monkeypatch, note=str(tmp_path))
        with pytest.raises(EnvironmentBuildError, match=f"{SMALL}: the check 'torch' fails"):
            runtime_of(tmp_path).prepare(SMALL, SMALL_ENVIRONMENT, lambda _: None)


# --- opening and asking change nothing --------------------------------------------------------------------------------


@pytest.mark.docker
def test_leftovers_are_removed_when_something_is_built_and_not_before(
    client: docker.DockerClient, stub: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, pid, _, namespace = runner_label().split(":", 3)
    make_small_project(tmp_path, monkeypatch, note=str(stub[0].parent))
    left = client.containers.create(stub[1], ["true"], labels={RUNNER_LABEL: f"{host}:{pid}:1:{namespace}"})

    def is_left() -> bool:
        return any(one.id == left.id for one in client.containers.list(all=True, ignore_removed=True))

    runtime = runtime_of(tmp_path)
    runtime.lock_of(SMALL, SMALL_ENVIRONMENT)
    runtime.obstacle(SMALL, SMALL_ENVIRONMENT)
    runtime.needs(SMALL, SMALL_ENVIRONMENT)
    assert is_left()
    runtime.build(SMALL, SMALL_ENVIRONMENT, lambda _: None)
    assert not is_left()


@pytest.mark.docker
def test_the_plan_shows_what_the_lock_takes_and_not_what_a_virtualenv_would(
    client: docker.DockerClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOTO_COMPAT_CACHE", str(tmp_path))  # no wheel is here
    name = "torch-2.9.0-cu128"
    environment = load_matrix(REPOSITORY / "matrix.yaml").environments[name]
    lock = read_lock(name, environment)
    runtime = runtime_of(tmp_path)
    needs = runtime.needs(name, environment)
    assert needs.download_bytes == lock.download_bytes
    assert needs.disk_bytes == 2 * 10**9 + 6 * lock.download_bytes
    monkeypatch.setattr(DockerRuntime, "lock_of", lambda *_: None)  # whatever was built on this machine
    request = request_of(cell=CellName.of(name, "upstream", "default"), environment=environment)
    plan = make_plan([PlannedCell(request, "", None)], runtime, CellStore(tmp_path), jobs=1, device=Device.CPU)
    assert f"downloads about {lock.download_bytes / 1e9:.1f} GB" in plan_text(plan)


@pytest.mark.docker
def test_wheels_that_are_here_need_no_download_and_a_missing_lock_gives_a_rough_figure(
    client: docker.DockerClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_small_project(tmp_path, monkeypatch)
    runtime = runtime_of(tmp_path)
    assert runtime.needs(SMALL, SMALL_ENVIRONMENT).download_bytes == 0
    assert runtime.needs("torch-9.9.8-cpu", SMALL_ENVIRONMENT).download_bytes > 10**8
    assert runtime.build_log(SMALL, SMALL_ENVIRONMENT).name == f"{SMALL}.log"


@pytest.mark.docker
def test_a_gpu_that_cannot_work_is_an_obstacle_and_stops_before_a_build(
    client: docker.DockerClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = Environment(torch="2.9.0", build="cu128", gpu_architectures=("sm_90",))
    runtime = runtime_of(tmp_path, device=Device.CUDA)
    monkeypatch.setattr(docker_module, "read_lock", lambda *_: None)
    monkeypatch.setattr(docker_module, "check_hands_out_gpus", lambda *_: None)
    monkeypatch.setattr(docker_module, "find_gpus", lambda: (Gpu("0", "Tesla V100", "581.10", "sm_70", "GPU-0"),))
    assert "no kernels for Tesla V100" in runtime.obstacle("torch-2.9.0-cu128", cuda)
    with pytest.raises(EnvironmentBuildError, match="no kernels for Tesla V100"):
        runtime.prepare("torch-2.9.0-cu128", cuda, lambda _: None)
