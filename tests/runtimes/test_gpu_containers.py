"""GPUs asked of the real engine: what it is asked, how cells spread over them, and what its refusals say.

NVIDIA's hook is a stand-in that the engine must find on its PATH when it starts (CI's part 30 sees to that); it hands
out no device, and accepts or refuses in the real one's words.
"""

import json
import shutil
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import docker
import docker.errors
import pytest
from docker.types import DeviceRequest

from tests.environments.small_project import SMALL, SMALL_ENVIRONMENT
from tests.runtimes import stub_cell
from tests.runtimes.containers import SMALL_LIMITS, job_of, own_containers, run
from tests.runtimes.nvidia import smi
from toto_compat.contract.cell_name import CellName
from toto_compat.contract.request import CacheRequest, CellProfile, CellRequest, Device, Workload
from toto_compat.contract.result import CellResult
from toto_compat.contract.suites import Suite
from toto_compat.environments.base_image import BaseImage
from toto_compat.errors import EnvironmentBuildError
from toto_compat.runtimes.container_options import PYTHON
from toto_compat.runtimes.docker import DockerRuntime
from toto_compat.runtimes.doctor import State, examine_container_gpus
from toto_compat.runtimes.local import ReadyCell, run_cells
from toto_compat.runtimes.nvidia_smi import find_gpus
from toto_compat.runtimes.probing import Answer, Probed
from toto_compat.runtimes.progress import progress_for
from toto_compat.runtimes.seam import PreparedEnvironment
from toto_compat.runtimes.source import CellSource

pytestmark = pytest.mark.docker

STAND_IN = Path("/var/tmp/toto-compat-nvidia-stand-in")  # noqa: S108 - the hook's own, see there
RESTART = (
    "the engine was started without the stand-in for NVIDIA's hook: `docker/engine.sh stop`, then `docker/engine.sh "
    "start` with TOTO_COMPAT_ENGINE_PATH=$PWD/tests/runtimes/nvidia/bin"
)
MakeGpu = Callable[..., str]


@pytest.fixture(scope="module")
def hook(client: docker.DockerClient, image: str) -> None:
    """Skip where the engine knows no hook, or a real one."""
    STAND_IN.mkdir(exist_ok=True)
    request = [DeviceRequest(device_ids=["GPU-none"], capabilities=[["gpu"]])]
    container = client.containers.create(image, [PYTHON, "-c", ""], device_requests=request)
    try:
        container.start()
    except docker.errors.APIError as error:
        if "GPU-none: unknown device" not in str(error):
            pytest.skip(RESTART)
    finally:
        container.remove(force=True)


@pytest.fixture
def make_gpu(hook: None) -> Iterator[MakeGpu]:
    """Put a GPU into the stand-in's machine; returns its UUID, which no other test has."""
    made: list[str] = []

    def make(*, cuda: str = "13.0", error: str = "") -> str:
        made.append(f"GPU-{uuid.uuid4()}")
        (STAND_IN / f"{made[-1]}.json").write_text(json.dumps({"cuda": cuda, "error": error}))
        return made[-1]

    yield make
    for name in made:
        for suffix in ("json", "log"):
            (STAND_IN / f"{name}.{suffix}").unlink(missing_ok=True)


def handed_out(gpu: str) -> list[dict[str, Any]]:
    """What the hook wrote down of the containers that got this GPU."""
    log = STAND_IN / f"{gpu}.log"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def test_a_container_gets_the_gpu_it_asks_for_by_uuid_and_no_other(
    client: docker.DockerClient, image: str, cell: Path, make_gpu: MakeGpu
) -> None:
    wanted, other = make_gpu(), make_gpu()
    end, _ = run(client, job_of(image, cell, "", gpu=wanted))
    assert end.process.code == 0
    (got,) = handed_out(wanted)
    assert got["variables"]["NVIDIA_VISIBLE_DEVICES"] == wanted
    assert handed_out(other) == []


def test_a_container_without_a_gpu_asks_for_none(
    client: docker.DockerClient, image: str, cell: Path, make_gpu: MakeGpu
) -> None:
    gpu = make_gpu()
    end, lines = run(client, job_of(image, cell, "import os; print(os.environ['NVIDIA_VISIBLE_DEVICES'])"))
    assert (end.process.code, lines) == (0, ["void"])
    assert handed_out(gpu) == []


def test_what_a_base_image_asks_of_the_driver_keeps_nobody_out(
    client: docker.DockerClient, image: str, cell: Path, make_gpu: MakeGpu
) -> None:
    """An image of NVIDIA's on a driver of CUDA 13.0, which is enough for the wheel: docker alone is refused."""
    gpu = make_gpu(cuda="13.0")
    made = client.containers.create(image)
    demanding = made.commit(changes='ENV NVIDIA_REQUIRE_CUDA="cuda>=13.2"')
    made.remove()
    try:
        plain = client.containers.create(
            str(demanding.id),
            [PYTHON, "-c", ""],
            device_requests=[DeviceRequest(device_ids=[gpu], capabilities=[["gpu"]])],
        )
        with pytest.raises(docker.errors.APIError, match=r"unsatisfied condition: cuda>=13\.2"):
            plain.start()
        plain.remove()
        end, _ = run(client, job_of(str(demanding.id), cell, "", gpu=gpu))
        assert end.process.code == 0
    finally:
        client.images.remove(str(demanding.id), force=True)


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (None, "`nvidia-smi -L` lists them"),
        ("initialization error: nvml error: driver not loaded", "is not loaded"),
        ("initialization error: nvml error: driver/library version mismatch", "restart the machine"),
        (
            "initialization error: load library failed: libnvidia-ml.so.1: cannot open shared object file",
            "has no NVIDIA driver",
        ),
        ("requirement error: unsatisfied condition: cuda>=14.0, please update your driver", "`base_image`"),
    ],
    ids=["unknown device", "not loaded", "mismatch", "no driver", "requirement"],
)
def test_a_refusal_says_what_is_wrong_and_what_to_do_and_leaves_nothing(
    *, error: str | None, advice: str, client: docker.DockerClient, image: str, cell: Path, make_gpu: MakeGpu
) -> None:
    gpu = make_gpu(error=error) if error else "GPU-of-another-machine"
    with pytest.raises(EnvironmentBuildError, match="the engine refuses a container") as caught:
        run(client, job_of(image, cell, "", gpu=gpu))
    assert (error or "unknown device")[:60] in caught.value.message
    assert advice in caught.value.hint
    assert "--runtime venv" in caught.value.hint
    assert own_containers(client) == []


@pytest.mark.usefixtures("hook")
def test_an_engine_without_cdi_is_told_from_one_without_gpus(
    client: docker.DockerClient, image: str, cell: Path
) -> None:
    if "CDISpecDirs" in client.info():
        pytest.skip("this engine has CDI")
    with pytest.raises(EnvironmentBuildError) as caught:
        run(client, job_of(image, cell, "", gpu="GPU-1", cdi="nvidia.com/gpu=GPU-1"))
    assert 'could not select device driver "cdi"' in caught.value.message
    assert "nvidia-ctk runtime configure" in caught.value.hint


def test_cells_spread_over_the_gpus_one_container_each(
    client: docker.DockerClient, image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_gpu: MakeGpu
) -> None:
    """The whole way from nvidia-smi over the scheduler to the engine; the cell itself is a stub."""
    del client
    gpus = [{**smi.gpu(index), "uuid": make_gpu()} for index in range(2)]
    smi.install(tmp_path / "bin", monkeypatch, gpus)
    source = CellSource()
    source._folder, source.hash = tmp_path / "source", "hash"
    (tmp_path / "source").mkdir()
    shutil.copyfile(stub_cell.__file__, tmp_path / "source" / "stub_cell.py")
    runtime = DockerRuntime(source, limits=SMALL_LIMITS, device=Device.CUDA, command=("-m", "stub_cell", "environment"))
    runtime._images["lock"], runtime._probed["lock"] = image, Probed(answer=Answer())
    runtime._bases["lock"] = BaseImage("python:3.12-slim", "toto-compat-base:bookworm", "sha256:b", complete=True)
    prepared = PreparedEnvironment(SMALL, SMALL_ENVIRONMENT, "docker", PYTHON, "lock")
    finished: list[CellResult] = []
    with progress_for(3) as progress:
        run_cells(
            [ReadyCell(stub_request(cache), prepared) for cache in ("upstream", "list_index", "fixed_size")],
            runtime,
            jobs=2,
            gpus=[gpu.uuid for gpu in find_gpus()],
            scratch=tmp_path / "scratch",
            keep_log=lambda *_: None,
            progress=progress,
            on_finished=lambda _, done: finished.append(done.result),
        )
    smi.forget()
    assert [one.failure for one in finished] == [None] * 3
    seen = [one.evidence[Suite.RECOMPILE].details["environment"]["NVIDIA_VISIBLE_DEVICES"] for one in finished]
    assert {uuid: len(handed_out(uuid)) for uuid in set(seen)} == dict(Counter(seen))
    assert set(seen) == {gpu["uuid"] for gpu in gpus}, "both were used, each container saw one"
    assert all(one.provenance.base_is_stand_in for one in finished)


def stub_request(cache: str) -> CellRequest:
    return CellRequest(
        cell=CellName.of(SMALL, cache, "default"),
        environment=SMALL_ENVIRONMENT,
        cache=CacheRequest(name=cache, source="builtin"),
        device=Device.CUDA,
        profile_name="quick",
        profile=CellProfile(iterations=1, suites=(Suite.RECOMPILE,), timeout_minutes=5),
        workload=Workload(),
        limits=SMALL_LIMITS,
    )


def test_doctor_asks_the_engine_and_the_machine(
    client: docker.DockerClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del client  # an engine must answer
    monkeypatch.setenv("PATH", str(tmp_path))
    without = examine_container_gpus()
    if without.state is State.OK:
        pytest.skip("this engine has NVIDIA's runtime")
    assert "containers get no GPU" in without.found
    assert "nvidia-container-toolkit" in without.fix
    monkeypatch.setenv("PATH", f"{Path(smi.__file__).with_name('bin')}:/usr/bin:/bin")
    with_hook = examine_container_gpus()
    assert (with_hook.state, with_hook.found) == (State.OK, "the engine hands them out by NVIDIA's hook")
