"""What a cell's container may do, asked from inside a real one."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import docker
import pytest

from tests.runtimes.containers import SMALL_LIMITS, job_of, run
from toto_compat.contract.request import Device
from toto_compat.matrix.request import cell_variables
from toto_compat.runtimes.container_files import give_to, mounts_of
from toto_compat.runtimes.container_options import (
    CELL_FOLDER,
    FIXED_UID,
    SOURCE_FOLDER,
    container_options,
    container_variables,
    docker_command,
    gpu_request,
)

ASK = """
import json, os, pathlib, socket
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status") if ":\\t" in line)
def attempt(action):
    try:
        action()
    except OSError as error:
        return type(error).__name__ + " " + str(error.errno)
    return "worked"
def read(*paths):  # as control groups version 2 names it, then version 1
    there = [p for p in (pathlib.Path("/sys/fs/cgroup", path) for path in paths) if p.exists()]
    return there[0].read_text().strip() if there else None
def connect():
    with socket.socket() as s:
        s.settimeout(2); s.connect(("192.0.2.1", 80))
def run_from(folder):
    program = pathlib.Path(folder, "program"); program.write_text("#!/bin/sh\\nexit 0\\n"); program.chmod(0o755)
    import subprocess; subprocess.run([str(program)], check=True)
print("ANSWER", json.dumps({
    "uid": os.getuid(), "gid": os.getgid(), "groups": os.getgroups(),
    "capabilities": [status[name].strip() for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")],
    "no_new_privileges": status["NoNewPrivs"].strip(),
    "interfaces": [line.split(":")[0].strip() for line in open("/proc/net/dev").readlines()[2:]],
    "connect": attempt(connect),
    "write_root": attempt(lambda: pathlib.Path("/opt/x").write_text("x")),
    "write_etc": attempt(lambda: pathlib.Path("/etc/passwd").open("a")),
    "write_source": attempt(lambda: pathlib.Path("SOURCE/x").write_text("x")),
    "write_cell": attempt(lambda: pathlib.Path("CELL/x").write_text("x")),
    "run_from_tmp": attempt(lambda: run_from("/tmp")),
    "run_from_cell": attempt(lambda: run_from("CELL")),
    "memory": read("memory.max", "memory/memory.limit_in_bytes"),
    "swap": read("memory.swap.max"), "memory_and_swap": read("memory/memory.memsw.limit_in_bytes"),
    "pids": read("pids.max", "pids/pids.max"), "cpu": read("cpu.max", "cpu/cpu.cfs_quota_us"),
    "cpus": sorted(os.sched_getaffinity(0)),
    "shm": os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize,
    "tmp": os.statvfs("/tmp").f_blocks * os.statvfs("/tmp").f_frsize,
    "home": attempt(lambda: pathlib.Path.home().joinpath("x").write_text("x")),
    "environment": dict(os.environ),
}))
""".replace("SOURCE", SOURCE_FOLDER).replace("CELL", CELL_FOLDER)


@pytest.fixture(scope="module")
def inside(client: docker.DockerClient, image: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """What a process in a cell's container finds."""
    folder = tmp_path_factory.mktemp("asked") / "cell"
    folder.mkdir()
    end, lines = run(client, job_of(image, folder, ASK, cpuset="0"))
    assert end.process.code == 0, lines
    answer = next(line for line in lines if line.startswith("ANSWER"))
    found: dict[str, object] = json.loads(answer.removeprefix("ANSWER "))
    return found


@pytest.mark.docker
def test_there_is_no_way_out(inside: dict[str, object]) -> None:
    assert inside["interfaces"] == ["lo"]
    assert inside["connect"] == "OSError 101"  # network is unreachable


@pytest.mark.docker
def test_no_root_and_no_capabilities(inside: dict[str, object]) -> None:
    assert inside["uid"] == (FIXED_UID if os.geteuid() == 0 else os.geteuid())
    assert set(inside["capabilities"]) == {"0" * 16}  # type: ignore[call-overload]
    assert inside["no_new_privileges"] == "1"


@pytest.mark.docker
def test_only_the_cells_own_folder_and_tmp_are_writable(inside: dict[str, object]) -> None:
    assert str(inside["write_root"]).startswith("OSError 30")  # read-only file system
    assert inside["write_etc"] != "worked"
    assert str(inside["write_source"]).startswith("OSError 30")
    assert inside["write_cell"] == "worked"
    assert inside["home"] == "worked"


@pytest.mark.docker
def test_what_inductor_compiles_can_be_run(inside: dict[str, object]) -> None:
    assert inside["run_from_tmp"] == "worked"
    assert inside["run_from_cell"] == "worked"


@pytest.mark.docker
def test_the_limits_of_the_matrix_are_in_force(inside: dict[str, object]) -> None:
    assert inside["memory"] == str(192 * 2**20)
    # a kernel that does not account for swap says neither
    assert inside["swap"] in ("0", None)
    assert inside["memory_and_swap"] in (inside["memory"], None)
    assert inside["pids"] == "32"
    assert str(inside["cpu"]).split()[0] == "100000"  # microseconds of every 100,000
    assert inside["cpus"] == [0]
    assert inside["shm"] == 32 * 2**20
    assert inside["tmp"] == 64 * 2**20


@pytest.mark.docker
def test_a_cells_variables_are_set_and_no_gpu_is_seen(inside: dict[str, object]) -> None:
    environment = inside["environment"]
    assert isinstance(environment, dict)
    assert cell_variables(SMALL_LIMITS, Device.CPU).items() <= environment.items()
    assert environment["OMP_NUM_THREADS"] == str(SMALL_LIMITS.threads)
    assert environment["TORCHINDUCTOR_COMPILE_THREADS"] == str(SMALL_LIMITS.cpus)
    assert environment["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert not {name for name in environment if "PROXY" in name.upper() or name.startswith("PIP_")}


def test_one_gpu_is_asked_for_by_its_id() -> None:
    (request,) = gpu_request("GPU-1", "") or []
    assert request["DeviceIDs"] == ["GPU-1"]
    assert request["Capabilities"] == [["gpu"]]
    (by_name,) = gpu_request("GPU-1", "nvidia.com/gpu=1") or []
    assert (by_name["Driver"], by_name["DeviceIDs"]) == ("cdi", ["nvidia.com/gpu=1"])


def test_a_cuda_cell_keeps_the_gpu_the_engine_gives_it(cell: Path) -> None:
    environment = container_variables(job_of("image", cell, "", gpu="GPU-0"))
    assert "NVIDIA_VISIBLE_DEVICES" not in environment
    assert "CUDA_VISIBLE_DEVICES" not in environment


def test_what_a_base_image_asks_of_the_driver_is_not_inherited(cell: Path) -> None:
    environment = container_variables(job_of("image", cell, "", gpu="GPU-0"))
    assert (environment["NVIDIA_DISABLE_REQUIRE"], environment["NVIDIA_REQUIRE_CUDA"]) == ("true", "")


# --- the same for the docker command ----------------------------------------------------------------------------------


@pytest.mark.docker
def test_the_shells_container_is_configured_like_a_cells(
    client: docker.DockerClient, image: str, tmp_path: Path
) -> None:
    if shutil.which("docker") is None:
        pytest.skip("the docker command is not on PATH: `apt-get install docker.io`")
    (tmp_path / "cell").mkdir()
    job = job_of(image, tmp_path / "cell", "print('inside')", cpuset="0")
    give_to(job.folder, job.identity.uid, job.identity.gid)
    command = docker_command(job, mounts_of(job), terminal=False)
    name = command[command.index("--name") + 1]
    created = subprocess.run(
        [command[0], "create", *[word for word in command[2:] if word != "--rm"]],
        capture_output=True,
        text=True,
        check=False,
    )
    assert created.returncode == 0, created.stderr
    try:
        by_command = client.containers.get(name).attrs
    finally:
        client.containers.get(name).remove(force=True)
    options = container_options(job, mounts_of(job))
    host = by_command["HostConfig"]
    assert host["NetworkMode"] == options["network_mode"] == "none"
    assert host["ReadonlyRootfs"] is options["read_only"] is True
    assert host["CapDrop"] == options["cap_drop"]
    assert host["SecurityOpt"] == options["security_opt"]
    assert (host["Memory"], host["MemorySwap"]) == (options["mem_limit"], options["memswap_limit"])
    assert (host["NanoCpus"], host["CpusetCpus"]) == (options["nano_cpus"], options["cpuset_cpus"])
    assert (host["PidsLimit"], host["ShmSize"]) == (options["pids_limit"], options["shm_size"])
    assert host["Tmpfs"] == options["tmpfs"]
    assert by_command["Config"]["User"] == options["user"]
    writable = [mount["Destination"] for mount in by_command["Mounts"] if mount["RW"]]
    assert writable == ["/toto-compat/cell"]
    assert by_command["Config"]["Labels"]["toto-compat.runner"] == options["labels"]["toto-compat.runner"]


@pytest.mark.docker
def test_the_shells_command_runs_inside(image: str, tmp_path: Path) -> None:
    if shutil.which("docker") is None:
        pytest.skip("the docker command is not on PATH: `apt-get install docker.io`")
    (tmp_path / "cell").mkdir()
    job = job_of(image, tmp_path / "cell", "import os; print('uid', os.getuid())")
    give_to(job.folder, job.identity.uid, job.identity.gid)
    done = subprocess.run(
        docker_command(job, mounts_of(job), terminal=False), capture_output=True, text=True, check=False
    )
    assert re.fullmatch(rf"uid {job.identity.uid}\n", done.stdout), done.stderr


@pytest.mark.parametrize(
    ("cdi", "words"),
    [("", ["--gpus", "device=GPU-1"]), ("nvidia.com/gpu=1", ["--device", "nvidia.com/gpu=1"])],
    ids=["runtime", "CDI"],
)
def test_a_gpu_is_asked_for_as_the_engine_hands_it_out(tmp_path: Path, cdi: str, words: list[str]) -> None:
    (tmp_path / "cell").mkdir()
    command = docker_command(job_of("image", tmp_path / "cell", "", gpu="GPU-1", cdi=cdi), [], terminal=False)
    assert command[command.index(words[0]) :][:2] == words
    assert ("--gpus" in command) is not bool(cdi)
