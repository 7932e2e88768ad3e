"""A job whose node runs the cell in a container: Slurm, the engine and the hardening are real, the cell is a stub."""

import json
import shutil
from pathlib import Path

import docker
import pytest
import yaml

from tests.environments.engine_client import client
from tests.runtimes import stub_cell
from tests.runtimes.slurm.emulated import ROOT, Emulated, Project
from tests.runtimes.slurm.stub_node import CONTAINERS
from toto_compat.environments.leftovers import RUNNER_LABEL, runner_lives
from toto_compat.errors import ExitCode

__all__ = ["client"]

pytestmark = [pytest.mark.slurm, pytest.mark.docker, pytest.mark.slow]

CELL = "torch-2.13.0-cpu/upstream/default"


@pytest.fixture
def project(tmp_path: Path, cluster: Emulated) -> Project:
    """The project's own matrix: its lock is what a plan of containers on nodes looks at."""
    project = Project(tmp_path, cluster)
    matrix = yaml.safe_load((ROOT / "matrix.yaml").read_text(encoding="utf-8"))
    matrix["profiles"]["small"] = {"iterations": 1, "workloads": ["quick"], "suites": ["recompile"]}
    matrix["slurm"] |= {"partition": "steady", "gres": "gpu:a100:1", "poll_seconds": 0.3, "runtime": "docker"}
    (tmp_path / "matrix.yaml").write_text(yaml.safe_dump(matrix, sort_keys=False), encoding="utf-8")
    return project


def orders(folder: Path, image: str, behaviour: str) -> dict[str, str]:
    """What a node is to run in the place of a cell: the stub, in the small image."""
    source = folder / "source"
    source.mkdir(mode=0o755)
    shutil.copyfile(stub_cell.__file__, source / "stub_cell.py")
    path = folder / "containers.json"
    path.write_text(json.dumps({"image": image, "source": str(source), "behaviour": behaviour}), encoding="utf-8")
    return {CONTAINERS: str(path)}


@pytest.mark.parametrize("behaviour", ["measure", "exit"])
def test_a_cell_runs_in_a_container_of_its_node_and_none_is_left(
    project: Project, tmp_path: Path, client: docker.DockerClient, image: str, behaviour: str
) -> None:
    kind = None if behaviour == "measure" else "crash"
    variables = orders(tmp_path, image, behaviour)
    started = project.matrix("measure", CELL, "--profile", "small", variables=variables)
    code = started.end()
    cell = project.cells()["upstream"]
    assert (cell.failure.kind if cell.failure else None) == kind, started.printed
    assert code == (ExitCode.CELL_NOT_RUN if kind else ExitCode.OK)
    assert (cell.provenance.runtime, cell.provenance.image) == ("docker", image)
    listed = client.containers.list(all=True, filters={"label": RUNNER_LABEL}, ignore_removed=True)
    assert [one.name for one in listed if not runner_lives(one.labels[RUNNER_LABEL])] == []
