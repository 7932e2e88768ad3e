"""Real cells in a real container: the same verdicts and counts as in a virtualenv, and production's incident again."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import docker
import pytest

from tests.test_matrix_end_to_end import ENVIRONMENT, ROOT, Project
from toto_compat.errors import ExitCode
from toto_compat.evidence.store import Run, StoredCell, load_run
from toto_compat.matrix.schema import Suite

pytestmark = [pytest.mark.docker, pytest.mark.slow]

# The small profiles of the end-to-end test: the compiler's behaviour of one cache, the forecast of the other.
CELLS = {"list_index": "e2e-observe", "fixed_size": "e2e-forecast"}
COUNTED = ("recompile_limit", "recompiles", "recompiles_total", "graph_breaks")
INCIDENT = ROOT / "incidents" / "2025-10-30-recompile-limit.yaml"


@pytest.fixture(scope="module")
def folder(client: docker.DockerClient, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with the small profiles; asking for the client skips where there is no engine."""
    return Project(tmp_path_factory.mktemp("containers")).folder


def command(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "toto_compat.cli", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def run_matrix(folder: Path, runtime: str, cache: str) -> tuple[Run, dict[str, Any]]:
    name = f"{runtime}-{cache}"
    cell = f"{ENVIRONMENT}/{cache}/default"
    options = ["--profile", CELLS[cache], "--runtime", runtime, "--device", "cpu", "--run", name]
    done = command("matrix", cell, *options, folder=folder)
    assert done.returncode == ExitCode.OK, done.stdout + done.stderr
    results = folder / "results" / name
    (row,) = json.loads((results / "compatibility.json").read_text())["rows"]
    return load_run(results), row


def only_cell(run: Run) -> StoredCell:
    (cell,) = run.cells
    return cell


@pytest.mark.parametrize("cache", CELLS)
def test_a_container_gives_the_verdict_and_the_counts_of_a_virtualenv(folder: Path, cache: str) -> None:
    in_container, container_row = run_matrix(folder, "docker", cache)
    in_venv, venv_row = run_matrix(folder, "venv", cache)
    assert container_row["verdict"] == venv_row["verdict"]
    counts = {name: container_row["gates"][name]["value"] for name in COUNTED}
    assert counts == {name: venv_row["gates"][name]["value"] for name in COUNTED}
    events = [only_cell(run).evidence[Suite.RECOMPILE].events for run in (in_container, in_venv)]
    assert [event.reason for event in events[0]] == [event.reason for event in events[1]]


def test_the_result_says_which_image_it_comes_from(folder: Path, client: docker.DockerClient) -> None:
    run, _ = run_matrix(folder, "docker", "list_index")
    provenance = only_cell(run).provenance
    image = client.images.get(provenance.image)
    assert provenance.runtime == "docker"
    assert provenance.lock == image.labels["toto-compat.identity"]
    assert provenance.torch == "2.13.0+cpu"
    assert "g++" in provenance.system_packages  # apt layers drift, so they are written down
    assert "pip" not in provenance.packages


def test_productions_incident_is_reproduced_in_its_container(folder: Path) -> None:
    done = command("repro", str(INCIDENT), "--environment", ENVIRONMENT, "--runtime", "docker", folder=folder)
    assert done.stdout.splitlines()[-1] == "REPRODUCED", done.stdout + done.stderr
    assert "6/7: kv_cache._current_idx[7] == 0" in done.stdout
    assert done.returncode == ExitCode.OK


def test_the_incident_is_gone_with_fixed_size(folder: Path) -> None:
    arguments = ("repro", str(INCIDENT), "--environment", ENVIRONMENT, "--runtime", "docker", "--cache", "fixed_size")
    done = command(*arguments, folder=folder)
    assert done.stdout.splitlines()[-1].startswith("GONE with fixed_size"), done.stdout + done.stderr
    assert done.returncode == ExitCode.NOT_REPRODUCED
