"""Before an hour is lost: each reason why containers cannot run is told apart and names its fix."""

import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.reachable import let_everybody_in
from toto_compat.environments.engine import (
    EngineFacts,
    blame_connection,
    check_disk,
    check_hands_out_gpus,
    engine_endpoint,
    engine_facts,
    open_client,
)
from toto_compat.errors import EngineError, EnvironmentBuildError, ExitCode


def facts(**changes: object) -> EngineFacts:
    known: dict[str, object] = {
        "version": "28.0",
        "cpus": 8,
        "runtimes": ("runc", "nvidia"),
        "cdi_devices": (),
        "root_folder": "/var/lib/docker",
        "free_bytes": 10**12,
    }
    return EngineFacts(**{**known, **changes})  # type: ignore[arg-type]


def test_no_engine_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/docker.sock")
    with pytest.raises(EngineError, match="there is no container engine at") as caught:
        open_client()
    assert "docker/engine.sh start" in caught.value.hint
    assert caught.value.code is ExitCode.ENGINE


def test_a_socket_that_nobody_listens_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "docker.sock"
    with socket.socket(socket.AF_UNIX) as left_over:
        left_over.bind(str(path))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{path}")
    with pytest.raises(EngineError, match="is not running"):
        open_client()


@pytest.mark.skipif(os.geteuid() != 0, reason="taking a permission away from oneself needs root")
def test_no_permission_on_the_socket(tmp_path: Path) -> None:
    path = tmp_path / "docker.sock"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        path.chmod(0o600)
        let_everybody_in(tmp_path)
        with socket.socket(socket.AF_UNIX) as asking:
            os.seteuid(65534)
            try:
                with pytest.raises(PermissionError) as refused:
                    asking.connect(str(path))
            finally:
                os.seteuid(0)
    blamed = blame_connection(f"unix://{path}", RuntimeError("wrapped", refused.value))
    assert "no permission" in blamed.message
    assert "usermod -aG docker" in blamed.hint


def test_a_remote_engine_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    monkeypatch.setenv("DOCKER_HOST", f"tcp://127.0.0.1:{port}")
    with pytest.raises(EngineError, match=rf"tcp://127.0.0.1:{port}"):
        open_client()


def test_an_engine_with_tls_and_no_certificates_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:1")
    monkeypatch.setenv("DOCKER_TLS_VERIFY", "1")
    monkeypatch.setenv("DOCKER_CERT_PATH", str(tmp_path))
    with pytest.raises(EngineError, match=r"no cert\.pem, key\.pem and ca\.pem there") as caught:
        open_client()
    assert "DOCKER_CERT_PATH" in caught.value.hint


def test_the_current_context_names_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import hashlib
    import json

    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setenv("DOCKER_CONTEXT", "far")
    folder = tmp_path / "contexts" / "meta" / hashlib.sha256(b"far").hexdigest()
    folder.mkdir(parents=True)
    meta = {"Name": "far", "Metadata": {}, "Endpoints": {"docker": {"Host": "tcp://far:2375", "SkipTLSVerify": False}}}
    (folder / "meta.json").write_text(json.dumps(meta))
    (tmp_path / "config.json").write_text("{}")
    assert engine_endpoint()[0] == "tcp://far:2375"


def test_a_gpu_without_nvidia_runtime_is_blamed_on_the_engine() -> None:
    with pytest.raises(EnvironmentBuildError, match="no NVIDIA runtime") as caught:
        check_hands_out_gpus("torch-2.9.0-cu128", facts(runtimes=("runc",)))
    assert "nvidia-ctk" in caught.value.hint


def test_an_engine_with_cdi_devices_needs_no_nvidia_runtime() -> None:
    check_hands_out_gpus("e", facts(runtimes=("runc",), cdi_devices=("nvidia.com/gpu=0",)))


def test_an_engine_that_only_says_where_it_looks_for_cdi_devices_is_left_to_the_probe() -> None:
    info = {"Runtimes": {"runc": {}}, "CDISpecDirs": ["/etc/cdi", "/var/run/cdi"]}
    client: Any = SimpleNamespace(info=lambda: info, api=SimpleNamespace(base_url="https://elsewhere:2376"))
    said = engine_facts(client)
    assert said.uses_cdi
    check_hands_out_gpus("e", said)


@pytest.mark.parametrize("described", ["nvidia.com/gpu", "vendor.com/other"])
def test_on_this_machine_the_descriptions_tell_whether_cdi_has_gpus(tmp_path: Path, described: str) -> None:
    text = f"cdiVersion: 0.5.0\nkind: {described}\ndevices: [{{name: GPU-5c}}, {{name: all}}]\n"
    (tmp_path / "devices.yaml").write_text(text, encoding="utf-8")
    (tmp_path / "broken.yaml").write_text("{", encoding="utf-8")
    info = {"Runtimes": {"runc": {}}, "CDISpecDirs": [str(tmp_path), str(tmp_path / "missing")]}
    client: Any = SimpleNamespace(info=lambda: info, api=SimpleNamespace(base_url="http+docker://localhost"))
    assert engine_facts(client).uses_cdi == (described == "nvidia.com/gpu")


def test_a_gpu_has_its_uuid_as_cdi_name_unless_an_older_description_knows_only_its_index() -> None:
    by_uuid = facts(cdi_devices=("nvidia.com/gpu=0", "nvidia.com/gpu=GPU-5c", "nvidia.com/gpu=all"))
    assert by_uuid.cdi_name("GPU-5c", "0") == "nvidia.com/gpu=GPU-5c"
    by_index = facts(cdi_devices=("nvidia.com/gpu=0", "nvidia.com/gpu=all"))
    assert by_index.cdi_name("GPU-5c", "0") == "nvidia.com/gpu=0"
    assert facts(cdi_folders=("/etc/cdi",)).cdi_name("GPU-5c", "0") == "nvidia.com/gpu=GPU-5c"


def test_an_engine_that_may_have_found_nvidias_hook_is_left_to_the_probe() -> None:
    check_hands_out_gpus("e", facts(runtimes=("runc",), hook=True))
    check_hands_out_gpus("e", facts(runtimes=("runc",), local=False))


def test_where_there_is_an_nvidia_runtime_no_cdi_name_is_used() -> None:
    assert not facts(cdi_devices=("nvidia.com/gpu=0",), cdi_folders=("/etc/cdi",)).uses_cdi


def test_a_disk_too_small_says_how_much_is_needed() -> None:
    with pytest.raises(EnvironmentBuildError, match=r"needs about 20 GB, .* 3\.0 GB free"):
        check_disk("e", 20 * 10**9, facts(free_bytes=3 * 10**9))


def test_a_remote_engines_disk_is_not_guessed() -> None:
    check_disk("e", 20 * 10**9, facts(free_bytes=None))
