"""What one container compiled, a second one with a read-only copy of it takes, and it compiles nothing anew.

The real image of torch 2.13.0, the real compiler, a read-only root and no network, as a service may be run.
"""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import docker
import pytest

from tests.runtimes.containers import job_of, run
from toto_compat.contract.request import Device
from toto_compat.environments.image import ensure_image
from toto_compat.matrix.load import load_matrix
from toto_compat.matrix.request import cell_variables
from toto_compat.runtimes.container_options import CELL_FOLDER, INPUT_FOLDER
from toto_compat.runtimes.source import PACKAGE

pytestmark = [pytest.mark.docker, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
ENVIRONMENT = "torch-2.13.0-cpu"
WARM = """
from toto_compat.production.warming import WarmRequest, run

asked = WarmRequest(
    cache_dir={folder!r}, model="tiny", mode="default", max_context=64, max_horizon=64, batch_sizes=(4,), samples=4
)
print("COUNTED", run(asked).model_dump_json())
"""


@pytest.fixture(scope="module")
def torch_image(client: docker.DockerClient) -> str:
    environment = load_matrix(ROOT / "matrix.yaml").environments[ENVIRONMENT]
    _, built = ensure_image(client, ENVIRONMENT, environment, lambda _: None)
    return str(built.id)


def counted(client: docker.DockerClient, image: str, folder: Path, kept: str, **mounts: Any) -> dict[str, Any]:
    folder.mkdir()
    limits = load_matrix(ROOT / "matrix.yaml").limits
    job = job_of(image, folder, WARM.format(folder=kept), limits=limits, timeout=900.0)
    source = folder.parent / "whole"
    shutil.copytree(PACKAGE, source / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    job = dataclasses.replace(job, source=source, variables=cell_variables(limits, Device.CPU), **mounts)
    end, lines = run(client, job)
    assert end.process.code == 0, lines[-20:]
    (line,) = [line for line in lines if line.startswith("COUNTED ")]
    answer: dict[str, Any] = json.loads(line.removeprefix("COUNTED "))
    return answer


def test_a_container_that_can_write_nothing_starts_from_what_another_one_compiled(
    client: docker.DockerClient, torch_image: str, tmp_path: Path
) -> None:
    first = counted(client, torch_image, tmp_path / "first", f"{CELL_FOLDER}/kept")
    assert first["graphs_compiled"] >= 3  # a pass, draws and a decode step
    assert first["compiler_calls"] > first["graphs_compiled"]
    kept = tmp_path / "kept"
    shutil.copytree(tmp_path / "first" / "kept", kept)
    kept.chmod(0o755)  # the container's user is another one
    for file in kept.iterdir():
        file.chmod(0o644)
    second = counted(
        client, torch_image, tmp_path / "second", f"{INPUT_FOLDER}/kept", inputs={kept: f"{INPUT_FOLDER}/kept"}
    )
    assert (second["graphs_compiled"], second["compiler_calls"]) == (0, 0)
    assert second["graphs_found"] == first["graphs_compiled"]
    assert second["key"] == first["key"]
