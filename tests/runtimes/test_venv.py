"""The virtualenv runtime checks what it will run on, and hands a cell no more than its request."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runtimes.nvidia import smi
from tests.runtimes.stub_runtime import STUB_CELL
from tests.verdict.sample_cells import cell_request
from toto_compat.contract.request import CacheRequest, CellProfile, Device, Environment, Limits, Origin
from toto_compat.contract.result import CellResult
from toto_compat.contract.suites import Suite
from toto_compat.environments.virtualenv import Virtualenv
from toto_compat.errors import EnvironmentBuildError
from toto_compat.matrix.request import cell_variables
from toto_compat.runtimes import venv
from toto_compat.runtimes.nvidia_smi import Gpu
from toto_compat.runtimes.seam import PreparedEnvironment
from toto_compat.runtimes.source import CellSource
from toto_compat.runtimes.venv import VenvRuntime

NAME = "torch-2.13.0-cu130"
CUDA = Environment(torch="2.13.0", build="cu130", gpu_architectures=("sm_75", "sm_120"))
CPU = Environment(torch="2.13.0", build="cpu")
V100 = Gpu("0", "Tesla V100", "581.10", "sm_70", "GPU-0")
OLD_DRIVER = Gpu("0", "NVIDIA GeForce RTX 5090", "570.86.16", "sm_120", "GPU-0")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "cache"
    monkeypatch.setenv("TOTO_COMPAT_CACHE", str(folder))
    yield folder
    smi.forget()


def runtime_of(device: Device = Device.CPU, behaviour: str = "measure") -> VenvRuntime:
    return VenvRuntime(CellSource(), limits=Limits(), device=device, command=(str(STUB_CELL), behaviour))


def built_with(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A virtualenv that is there already, with a shell script for an interpreter."""
    python = folder / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr(venv, "build_venv", lambda *_: Virtualenv(folder, "lock"))


# --- checks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "says"),
    [
        ((V100,), r"the wheel has no kernels for Tesla V100 \(sm_70\)"),
        ((OLD_DRIVER,), r"driver 570\.86\.16 is too old for cu130: CUDA 13 needs 580"),
        ((), "no NVIDIA GPU answers"),
    ],
    ids=["no kernels", "old driver", "no GPU"],
)
def test_a_gpu_that_cannot_work_is_an_error_of_the_environment_before_anything_is_built(
    gpus: tuple[Gpu, ...], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(venv, "find_gpus", lambda: gpus)
    monkeypatch.setattr(venv, "build_venv", lambda *_: pytest.fail("nothing may be built"))
    monkeypatch.setattr(venv, "find_python", lambda _: None)  # of a machine that has it
    runtime = runtime_of(Device.CUDA)
    with pytest.raises(EnvironmentBuildError, match=says) as caught:
        runtime.prepare(NAME, CUDA, lambda _: None)
    assert caught.value.hint
    assert caught.value.message in runtime.obstacle(NAME, CUDA)  # and the plan shows it


def test_a_cuda_build_on_the_cpu_needs_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(venv, "find_gpus", lambda: (V100,))
    monkeypatch.setattr(venv, "find_python", lambda _: None)
    assert runtime_of(Device.CPU).obstacle(NAME, CUDA) == ""


def test_an_nvidia_smi_that_fails_keeps_nobody_from_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither from compiling for CUDA there, which is for machines whose GPU is broken or away."""
    smi.install(tmp_path, monkeypatch, says="Failed to initialize NVML: Driver/library version mismatch\n", code=18)
    monkeypatch.setattr(venv, "find_python", lambda _: None)
    assert runtime_of(Device.CPU).obstacle(NAME, CUDA) == ""
    assert "exit code 18" in runtime_of(Device.CUDA).obstacle(NAME, CUDA)


def test_an_interpreter_that_is_missing_is_an_obstacle() -> None:
    environment = CPU.model_copy(update={"python": "3.99"})
    assert "Python 3.99 is not on this machine" in runtime_of().obstacle("torch-2.13.0-cpu", environment)


def test_a_probe_that_fails_names_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    built_with(f'exec {sys.executable} "$@"', tmp_path, monkeypatch)  # an interpreter without torch
    with pytest.raises(EnvironmentBuildError, match="the check 'torch' fails: ModuleNotFoundError"):
        runtime_of().prepare("torch-2.13.0-cpu", CPU, lambda _: None)
    assert not (cache / "probes").exists()
    assert not list(cache.glob("probe-*"))


def test_a_probe_that_crashes_is_an_error_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built_with("echo 'Illegal instruction' >&2; exit 132", tmp_path, monkeypatch)
    with pytest.raises(EnvironmentBuildError, match="exit code 132 and no answer:\n    Illegal instruction"):
        runtime_of().prepare("torch-2.13.0-cpu", CPU, lambda _: None)


def test_an_environment_is_probed_once_as_a_cell_would_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter answers for torch and writes down what it was given."""
    build: dict[str, object] = {"version": "2.13.0+cpu", "cuda": None, "architectures": [], "cuda_available": False}
    answer = json.dumps({"ok": {"torch": build}})
    script = f'echo \'{answer}\' >"$3"; env >>{tmp_path}/env; echo "$@" >>{tmp_path}/asked'
    built_with(script, tmp_path, monkeypatch)
    prepared = [runtime_of().prepare("torch-2.13.0-cpu", CPU, lambda _: None) for _ in range(2)]
    assert prepared[0] == prepared[1]
    (asked,) = (tmp_path / "asked").read_text().splitlines()
    # what only a container is asked, to write below /opt for one, has no place on this machine
    assert asked.split()[2:] == ["probe.json", "torch", "compiled_kernel", "captured_graph"]
    variables = dict(line.split("=", 1) for line in (tmp_path / "env").read_text().splitlines() if "=" in line)
    assert cell_variables(Limits(), Device.CPU).items() <= variables.items()
    assert variables["TORCHINDUCTOR_CACHE_DIR"].startswith(variables["HOME"].removesuffix("home"))


# --- a build ----------------------------------------------------------------------------------------------------------


def test_a_cuda_build_takes_more_than_one_for_the_cpu() -> None:
    small, large = (runtime_of().needs(NAME, environment) for environment in (CPU, CUDA))
    assert small.download_bytes < large.download_bytes
    assert small.disk_bytes < large.disk_bytes
    assert small.seconds < large.seconds


def test_the_log_of_a_build_lies_beside_the_virtualenv(cache: Path) -> None:
    log = runtime_of().build_log(NAME, CUDA)
    assert log.parent == cache / "venvs"
    assert log.name.startswith(NAME)


# --- a cell -----------------------------------------------------------------------------------------------------------


def run(folder: Path, behaviour: str, **changes: object) -> CellResult:
    request = cell_request().model_copy(
        update={
            "profile": CellProfile(iterations=1, suites=(Suite.RECOMPILE,)),
            "variables": cell_variables(Limits(), Device.CPU),
            **changes,
        }
    )
    prepared = PreparedEnvironment("torch-2.13.0-cpu", CPU, "venv", sys.executable, "lock")
    folder.mkdir()
    result = runtime_of(behaviour=behaviour).run_cell(prepared, request, folder, lambda _: None)
    assert result.request == request  # as asked, not with the places of this run
    return result


def test_a_cell_gets_what_the_runtime_knows_in_its_request_and_not_in_variables(tmp_path: Path) -> None:
    result = run(tmp_path / "cell", "environment")
    variables = result.evidence[Suite.RECOMPILE].details["environment"]
    assert cell_variables(Limits(), Device.CPU).items() <= variables.items()
    assert not any(name.startswith("TOTO_COMPAT") for name in variables)
    handed_over = json.loads((tmp_path / "cell" / "request.json").read_text())
    origin = Origin(runtime="venv", lock="lock", source_hash=CellSource().hash).model_dump()
    assert handed_over["origin"] == origin
    assert result.provenance.model_dump(include=set(origin)) == origin


def test_a_cell_that_leaves_nothing_still_has_its_origin(tmp_path: Path) -> None:
    known = run(tmp_path / "cell", "exit").provenance
    assert (known.runtime, known.lock, known.source_hash) == ("venv", "lock", CellSource().hash)
    assert known.started.endswith("Z")


def test_a_users_cache_is_run_from_a_copy_with_what_it_imports(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "mine.py").write_text("import tricks\n")
    (tmp_path / "tricks.py").write_text("")
    run(tmp_path / "cell", "measure", cache=CacheRequest(name="mine", source=f"{tmp_path}/mine.py:Cache"))
    source = json.loads((tmp_path / "cell" / "request.json").read_text())["cache"]["source"]
    file = Path(source.removesuffix(":Cache"))
    assert file.is_relative_to(cache)
    assert {path.name for path in file.parent.iterdir()} == {"mine.py", "tricks.py"}


@pytest.mark.parametrize(("gpu", "seen"), [("GPU-1", "GPU-1"), (None, "GPU-2")])
def test_on_a_gpu_what_finds_cuda_is_passed_on_and_one_gpu_is_seen_by_its_uuid(
    gpu: str | None, seen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(venv, "first_gpu", lambda: "GPU-2")
    for name, value in {"CUDA_VISIBLE_DEVICES": "0,2", "CUDA_HOME": "/usr/local/cuda", "LD_PRELOAD_X": "x"}.items():
        monkeypatch.setenv(name, value)
    prepared = PreparedEnvironment(NAME, CUDA, "venv", "/venv/bin/python", "lock")
    variables = runtime_of()._variables(prepared, {}, tmp_path, Device.CUDA, gpu)
    assert (variables["CUDA_VISIBLE_DEVICES"], variables["CUDA_HOME"]) == (seen, "/usr/local/cuda")
    assert "LD_PRELOAD_X" not in variables


def test_an_attached_command_is_run_with_the_environments_python(tmp_path: Path) -> None:
    prepared = PreparedEnvironment("torch-2.13.0-cpu", CPU, "venv", "/venv/bin/python", "lock")
    runtime = runtime_of()
    command = runtime.attached(prepared, ("{python}", "-c", "pass"), tmp_path, terminal=False)
    assert command.words == ("/venv/bin/python", "-c", "pass")
    assert command.folder == tmp_path
    assert command.variables["PATH"].startswith("/venv/bin:")
    assert command.variables["PYTHONPATH"] == str(runtime.source.folder)
