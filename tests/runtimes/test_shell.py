"""A shell in the container is hardened exactly like a cell."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest
from click.testing import CliRunner

from tests.runtimes.containers import REPOSITORY, SMALL, SMALL_ENVIRONMENT, job_of, make_small_project
from toto_compat.errors import EngineError, SelectionError
from toto_compat.runtimes.docker_image import ensure_image
from toto_compat.runtimes.docker_run import container_options, give_to, mounts_of
from toto_compat.runtimes.shell import check_engine_is_here, docker_command, shell_command


@pytest.fixture(scope="module")
def image(client: docker.DockerClient, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("shell")
    with pytest.MonkeyPatch.context() as patch:
        make_small_project(folder, patch, note=str(folder))
        _, built = ensure_image(client, SMALL, SMALL_ENVIRONMENT, lambda _: None)
    yield str(built.id)
    client.images.remove(str(built.id), force=True)


@pytest.mark.docker
def test_the_shells_container_is_configured_like_a_cells(
    client: docker.DockerClient, image: str, tmp_path: Path
) -> None:
    if shutil.which("docker") is None:
        pytest.skip("the docker command is not on PATH: `apt-get install docker.io`")
    (tmp_path / "cell").mkdir()
    job = job_of(image, tmp_path / "cell", "print('inside')", cpuset="0")
    give_to(job.folder, job.identity.uid, job.identity.gid)
    command = docker_command(job, terminal=False)
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
    done = subprocess.run(docker_command(job, terminal=False), capture_output=True, text=True, check=False)
    assert re.fullmatch(rf"uid {job.identity.uid}\n", done.stdout), done.stderr


def test_an_unknown_environment_is_refused_with_the_names_there_are() -> None:
    run = CliRunner().invoke(shell_command, ["torch-9-cpu", "--matrix", str(REPOSITORY / "matrix.yaml")])
    assert isinstance(run.exception, SelectionError)
    assert "torch-2.13.0-cpu" in run.exception.hint


@pytest.mark.parametrize(
    ("cdi", "words"),
    [(False, ["--gpus", "device=1"]), (True, ["--device", "nvidia.com/gpu=1"])],
    ids=["runtime", "CDI"],
)
def test_a_gpu_is_asked_for_as_the_engine_hands_it_out(tmp_path: Path, cdi: bool, words: list[str]) -> None:
    (tmp_path / "cell").mkdir()
    command = docker_command(job_of("image", tmp_path / "cell", "", gpu="1", cdi=cdi), terminal=False)
    assert command[command.index(words[0]) :][:2] == words
    assert ("--gpus" in command) is not cdi


def test_a_shell_on_an_engine_elsewhere_is_refused_with_the_next_step() -> None:
    elsewhere = docker.DockerClient(base_url="tcp://192.0.2.1:2376", version="1.41")  # asks nobody yet
    with pytest.raises(EngineError, match="needs an engine on this machine") as caught:
        check_engine_is_here(elsewhere)
    assert "unset DOCKER_HOST" in caught.value.hint
