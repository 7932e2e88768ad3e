"""doctor says what is here and gives the command for what is not, whatever the state of the machine."""

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import pytest
from click.testing import CliRunner

from tests.runtimes.nvidia import smi
from tests.runtimes.stub_runtime import MATRIX_TEXT
from toto_compat.cli import cli
from toto_compat.matrix.load import load_matrix
from toto_compat.runtimes.doctor import (
    Finding,
    State,
    examine_container_gpus,
    examine_docker,
    examine_environments,
    examine_gpu,
    what_it_can_run,
)


@pytest.fixture(autouse=True)
def ask_anew() -> Iterator[None]:
    smi.forget()
    yield
    smi.forget()


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "matrix.yaml").write_text(MATRIX_TEXT, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOTO_COMPAT_CACHE", str(tmp_path / "cache"))
    return tmp_path


def findings() -> dict[str, dict[str, str]]:
    result = CliRunner().invoke(cli, ["doctor", "--json"], catch_exceptions=False)
    return {finding["part"]: finding for finding in json.loads(result.stdout)["findings"]}


def test_every_part_is_looked_at() -> None:
    expected = {"C++ compiler", "torch-2.13.0-cpu", "torch-2.9.0-cu128", "disk", "Docker engine", "Slurm", "Chromium"}
    assert expected <= set(findings())


def test_what_is_optional_names_what_needs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing-here"))
    assert "--executor slurm" in findings()["Slurm"]["fix"]
    assert "nox -s reference" in findings()["Chromium"]["fix"]


def test_a_bare_machine_gets_a_command_for_each_missing_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    smi.without_devices(tmp_path, monkeypatch)
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    monkeypatch.delenv("CXX", raising=False)
    found = findings()
    missing = {part for part, finding in found.items() if finding["state"] != "ok"}
    assert {"C++ compiler", "Docker engine", "Slurm", "Chromium"} <= missing
    assert all(found[part]["fix"] for part in missing)
    assert found["C++ compiler"]["state"] == "missing"


@pytest.mark.parametrize("host", ["garbage", "tcp://127.0.0.1:abc", "tcp://[::1", "tcp://127.0.0.1:9"])
def test_an_address_where_no_engine_is_gets_a_fix_and_no_ok(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", host)
    engine = examine_docker()
    assert engine.state is State.OPTIONAL
    assert host in engine.found
    assert "DOCKER_HOST" in engine.fix


@pytest.mark.docker
def test_an_engine_that_answers_is_ok_with_its_version(client: docker.DockerClient) -> None:
    engine = examine_docker()
    assert engine.state is State.OK
    assert engine.found.startswith(f"version {client.version()['Version']} at ")


def test_a_python_that_is_missing_matters_only_where_there_are_no_containers(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = MATRIX_TEXT.replace('torch: "2.12.0", build: cpu', 'torch: "2.12.0", build: cpu, python: "3.99"')
    (project / "matrix.yaml").write_text(text, encoding="utf-8")
    matrix = load_matrix(project / "matrix.yaml")

    def state(*, in_containers: bool) -> State:
        found = examine_environments(matrix, in_containers=in_containers)
        return next(finding.state for finding in found if finding.part == "torch-2.12.0-cpu")

    assert state(in_containers=False) is State.MISSING
    assert state(in_containers=True) is State.OPTIONAL


def test_without_a_compiler_the_summary_says_that_nothing_runs() -> None:
    compiler = Finding("C++ compiler", State.MISSING, "none", "install one")
    assert what_it_can_run([compiler]).startswith("no cell can be run")
    assert "in virtualenvs, on cpu" in what_it_can_run([Finding("C++ compiler", State.OK, "g++")])


# --- GPUs -------------------------------------------------------------------------------------------------------------


def of_gpus(project: Path) -> list[Finding]:
    return list(examine_gpu(load_matrix(project / "matrix.yaml")))


@pytest.fixture
def no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")


@pytest.mark.usefixtures("no_engine")
def test_a_gpu_that_can_run_an_environment_is_ok_by_its_uuid(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi.install(project / "bin", monkeypatch, smi.ONE)
    found = of_gpus(project)
    assert found[0].found == f"NVIDIA H100 80GB HBM3 (sm_90), driver 580.95.05, {smi.ONE[0]['uuid']}"
    assert Finding("torch-2.9.0-cu128 on the GPU", State.OK, "driver and card can run it") in found
    assert "can run here in virtualenvs, on cuda" in what_it_can_run(found)


@pytest.mark.usefixtures("no_engine")
def test_an_old_driver_is_not_ok_and_leaves_the_cpu(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = smi.gpu(driver_version="470.256.02")
    smi.install(project / "bin", monkeypatch, [old], unknown_fields=["compute_cap"])
    found = of_gpus(project)
    (of_environment,) = [one for one in found if one.part == "torch-2.9.0-cu128 on the GPU"]
    assert of_environment.state is State.OPTIONAL
    assert "driver 470.256.02 is too old for cu128: CUDA 12 needs 525" in of_environment.found
    assert "update the NVIDIA driver" in of_environment.fix
    assert "no CUDA environment runs on this GPU" in what_it_can_run(found)


@pytest.mark.usefixtures("no_engine")
def test_a_busy_and_a_full_gpu_are_told(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = {**smi.gpu(), "memory.used": "80000"}
    smi.install(project / "bin", monkeypatch, [full], processes=[smi.process(full, pid=7, name="train", memory=79000)])
    found = of_gpus(project)
    assert any("is busy: train (pid 7, 79000 MB)" in one.found and "end it first" in one.fix for one in found)
    assert any(one.part == "GPU memory" and one.state is State.MISSING for one in found)
    assert "needs the GPU put right first" in what_it_can_run(found)


def test_an_nvidia_smi_that_fails_is_missing_and_not_a_machine_without_gpu(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi.install(
        project / "bin", monkeypatch, says="Failed to initialize NVML: Driver/library version mismatch", code=18
    )
    (found,) = of_gpus(project)
    assert (found.part, found.state) == ("GPU", State.MISSING)
    assert "restart the machine" in found.fix
    assert "--device cpu" in what_it_can_run([found])


@pytest.mark.usefixtures("no_engine")
def test_gpus_that_are_hidden_are_told_with_what_hides_them(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi.install(project / "bin", monkeypatch, smi.ONE)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (found,) = of_gpus(project)
    assert "hides every GPU" in found.found
    assert "unset CUDA_VISIBLE_DEVICES" in found.fix


@pytest.mark.usefixtures("no_engine")
def test_a_gpu_that_is_split_into_nothing_is_told_with_what_makes_a_slice(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi.install(project / "bin", monkeypatch, [{**smi.SPLIT[0], "slices": []}])
    (found,) = of_gpus(project)
    assert "is split by MIG and has no slice" in found.found
    assert found.fix.startswith("`nvidia-smi mig -i 0 -cgi 0 -C` makes one")


@pytest.mark.usefixtures("no_engine")
def test_memory_that_nobody_knows_of_is_told_so(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that shares the machine's memory, and a slice."""
    shared = {**smi.gpu(0, "NVIDIA GB10", "12.1"), "memory.total": "[N/A]", "memory.used": "700"}
    smi.install(project / "bin", monkeypatch, [shared])
    assert Finding("GPU memory", State.OK, "nvidia-smi does not say how much is free") in of_gpus(project)


def test_an_engine_that_answers_half_is_no_traceback(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It tells its version and fails at everything else."""

    class Handler(http.server.BaseHTTPRequestHandler):
        asked = 0

        def do_GET(self) -> None:
            Handler.asked += 1
            known = self.path.endswith("/version") and Handler.asked == 1
            self.send_response(200 if known else 500)
            self.end_headers()
            self.wfile.write(b'{"ApiVersion": "1.41", "Version": "20.10"}' if known else b'{"message": "overloaded"}')

        def log_message(self, *_: Any) -> None: ...

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("DOCKER_HOST", f"tcp://127.0.0.1:{server.server_port}")
        states = []
        for examine in (examine_docker, examine_container_gpus):
            Handler.asked = 0
            states.append(examine().state)
        server.shutdown()
    assert states == [State.OPTIONAL, State.OPTIONAL]


def test_a_machine_without_a_gpu_says_what_one_needs(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(project))
    smi.without_devices(project, monkeypatch)
    (found,) = of_gpus(project)
    assert found.state is State.OPTIONAL
    assert "no nvidia-smi" in found.found
    assert "nvidia-driver" in found.fix


def test_where_containers_get_no_gpu_virtualenvs_are_named() -> None:
    ok = [Finding("Docker engine", State.OK, "version"), Finding("torch-2.9.0-cu128 on the GPU", State.OK, "can run")]
    refused = Finding("GPU in containers", State.OPTIONAL, "no NVIDIA runtime", "install it")
    assert "--runtime venv" in what_it_can_run([*ok, refused])
    assert what_it_can_run([*ok, Finding("GPU in containers", State.OK, "by CDI")]).endswith("in containers, on cuda")
