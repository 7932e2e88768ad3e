"""Real cells in a real container: the verdicts and counts of a virtualenv, and production's incident again.

What a virtualenv gave is the reference run in results/reference/cpu. It is of `quick`: so are the counts of the cache
that recompiles. The one that does not goes through every suite on the short series of `smoke`.
"""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import docker
import pytest
import yaml

from toto_compat.contract.result import Outcome
from toto_compat.contract.suites import BY_DEFAULT, WITHOUT_GPU, Suite
from toto_compat.errors import ExitCode
from toto_compat.evidence.store import Run, StoredCell, load_run
from toto_compat.reference.thinning import thinned

pytestmark = [pytest.mark.docker, pytest.mark.slow]

ROOT = Path(__file__).parent.parent.parent
ENVIRONMENT = "torch-2.13.0-cpu"
COUNTED_PROFILE = "counted"  # quick, of its suites the one that counts
RUNS = {"fixed_size": "smoke", "list_index": COUNTED_PROFILE}  # a cache, and its profile and run
COUNTED = ("recompile_limit", "recompiles", "recompiles_total", "graph_breaks")
TIMED = ("speedup", "latency_stability")  # what else runs on the machine may decide these
INCIDENT = ROOT / "incidents" / "2025-10-30-recompile-limit.yaml"
REFERENCE = ROOT / "results" / "reference" / "cpu"


def command(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "toto_compat.cli", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def folder(client: docker.DockerClient, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of its own with the shipped matrix; asking for the client skips where there is no engine."""
    made = tmp_path_factory.mktemp("containers")
    matrix = yaml.safe_load((ROOT / "matrix.yaml").read_text(encoding="utf-8"))
    matrix["profiles"][COUNTED_PROFILE] = {**matrix["profiles"]["quick"], "suites": [Suite.RECOMPILE.value]}
    (made / "matrix.yaml").write_text(yaml.safe_dump(matrix, sort_keys=False), encoding="utf-8")
    return made


@pytest.fixture(scope="module")
def finished(folder: Path) -> dict[str, subprocess.CompletedProcess[str]]:
    """The image, then the cells and the incident beside each other: nobody looks at the clock here."""
    built = command("images", "build", ENVIRONMENT, folder=folder)
    assert built.returncode == ExitCode.OK, built.stdout + built.stderr
    in_docker = ("--runtime", "docker")
    commands: dict[str, tuple[str, ...]] = {
        profile: ("matrix", f"{ENVIRONMENT}/{cache}/default", "--profile", profile, "--device", "cpu", "--run", profile)
        for cache, profile in RUNS.items()
    }
    commands["repro"] = ("repro", str(INCIDENT), "--environment", ENVIRONMENT)
    with ThreadPoolExecutor() as pool:
        asked = {name: pool.submit(command, *words, *in_docker, folder=folder) for name, words in commands.items()}
        return {name: one.result() for name, one in asked.items()}


@pytest.fixture(scope="module")
def in_container(folder: Path, finished: dict[str, subprocess.CompletedProcess[str]]) -> dict[str, Run]:
    """The run of each cache."""
    for profile in RUNS.values():
        done = finished[profile]
        assert done.returncode == ExitCode.OK, done.stdout + done.stderr
    return {cache: load_run(folder / "results" / profile) for cache, profile in RUNS.items()}


def cell_of(run: Run, cache: str) -> StoredCell:
    return next(cell for cell in run.cells if cell.cell == f"{ENVIRONMENT}/{cache}/default")


def row_of(run_folder: Path, cache: str) -> dict[str, Any]:
    rows = json.loads((run_folder / "compatibility.json").read_text(encoding="utf-8"))["rows"]
    wanted = {"environment": ENVIRONMENT, "cache": cache, "mode": "default", "settings": "stock"}
    found: dict[str, Any] = next(row for row in rows if wanted.items() <= row.items())
    return found


def counts_of(row: dict[str, Any]) -> dict[str, float]:
    return {name: row["gates"][name]["value"] for name in COUNTED}


def test_a_container_gives_the_counts_and_reasons_of_a_virtualenv(in_container: dict[str, Run], folder: Path) -> None:
    cache = "list_index"
    container_row, venv_row = row_of(folder / "results" / RUNS[cache], cache), row_of(REFERENCE, cache)
    assert counts_of(container_row) == counts_of(venv_row)
    assert container_row["verdict"] == venv_row["verdict"] == "FAIL"
    # what is committed is thinned: one event of each kind, place and reason, with how often it came
    cells = [thinned(cell_of(run, cache)) for run in (in_container[cache], load_run(REFERENCE))]
    events = [[(event.reason, event.count) for event in cell.evidence[Suite.RECOMPILE].events] for cell in cells]
    assert events[0] == events[1]


@pytest.mark.usefixtures("in_container")
def test_a_container_gives_the_verdict_of_a_virtualenv(folder: Path) -> None:
    cache = "fixed_size"
    container_row, venv_row = row_of(folder / "results" / RUNS[cache], cache), row_of(REFERENCE, cache)
    statuses = [
        {name: gate["status"] for name, gate in row["gates"].items() if name not in TIMED}
        for row in (container_row, venv_row)
    ]
    assert statuses[0] == statuses[1]
    assert counts_of(container_row) == counts_of(venv_row)
    if container_row["decided_by"] not in TIMED:
        assert container_row["verdict"] == venv_row["verdict"]


def test_every_suite_was_run_in_the_container(in_container: dict[str, Run]) -> None:
    evidence = cell_of(in_container["fixed_size"], "fixed_size").evidence
    expected = {suite: Outcome.MEASURED for suite in BY_DEFAULT if suite not in WITHOUT_GPU}
    assert {suite: one.outcome for suite, one in evidence.items()} == expected


def test_the_result_says_which_image_it_comes_from(in_container: dict[str, Run], client: docker.DockerClient) -> None:
    provenance = cell_of(in_container["fixed_size"], "fixed_size").provenance
    image = client.images.get(provenance.image)
    assert provenance.runtime == "docker"
    assert provenance.lock == image.labels["toto-compat.identity"]
    assert provenance.torch == "2.13.0+cpu"
    assert "g++" in provenance.system_packages  # apt layers drift, so they are written down


def test_productions_incident_is_reproduced_in_its_container(
    finished: dict[str, subprocess.CompletedProcess[str]],
) -> None:
    done = finished["repro"]
    assert done.stdout.splitlines()[-1] == "REPRODUCED", done.stdout + done.stderr
    limit = next(line for line in done.stdout.splitlines() if "recompile_limit" in line)
    assert limit.strip().startswith("as in production")
    for part in ("'positional_embedding'", "'6/8'", "'6/7: kv_cache._current_idx[7] == 0'"):
        assert part in limit
    assert done.returncode == ExitCode.OK
