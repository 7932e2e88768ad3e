"""Real cells in a real container: the verdicts and counts of a virtualenv, and production's incident again.

The cache that recompiles is counted on two short series, in a container and in a virtualenv beside it, and only traced:
generating code for it takes minutes. The one that does not recompile goes through every suite on the series of `smoke`,
with generated code, as the incident does; what a virtualenv gave is the reference run in results/reference/cpu.
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
from toto_compat.evidence.store import Run, load_run
from toto_compat.reference.thinning import thinned

pytestmark = [pytest.mark.docker, pytest.mark.slow]

ROOT = Path(__file__).parent.parent.parent
ENVIRONMENT = "torch-2.13.0-cpu"
SHORT = {"model": "tiny", "context": [128, 160], "horizon": [64], "batches": [1], "sampling": ["2/1"]}
# a run, and what is run in it
RUNS = {
    "smoke": (f"{ENVIRONMENT}/fixed_size/default", "--profile", "smoke", "--runtime", "docker"),
    "counted": (f"{ENVIRONMENT}/list_index/default+traced", "--profile", "counted", "--runtime", "docker"),
    "beside": (f"{ENVIRONMENT}/list_index/default+traced", "--profile", "counted", "--runtime", "venv"),
}
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
    matrix["settings"]["traced"] = {"backend": "eager"}
    matrix["caches"]["list_index"]["settings"] = ["stock", "traced"]
    matrix["workloads"]["short"] = SHORT
    matrix["profiles"]["counted"] = {"iterations": 1, "workloads": ["short"], "suites": [Suite.RECOMPILE.value]}
    (made / "matrix.yaml").write_text(yaml.safe_dump(matrix, sort_keys=False), encoding="utf-8")
    return made


@pytest.fixture(scope="module")
def finished(folder: Path) -> dict[str, subprocess.CompletedProcess[str]]:
    """The image, then the cells and the incident beside each other: nobody looks at the clock here."""
    built = command("images", "build", ENVIRONMENT, folder=folder)
    assert built.returncode == ExitCode.OK, built.stdout + built.stderr
    commands: dict[str, tuple[str, ...]] = {
        run: ("matrix", *words, "--device", "cpu", "--run", run) for run, words in RUNS.items()
    }
    commands["repro"] = ("repro", str(INCIDENT), "--environment", ENVIRONMENT, "--runtime", "docker")
    with ThreadPoolExecutor() as pool:
        asked = {name: pool.submit(command, *words, folder=folder) for name, words in commands.items()}
        return {name: one.result() for name, one in asked.items()}


@pytest.fixture(scope="module")
def runs(folder: Path, finished: dict[str, subprocess.CompletedProcess[str]]) -> dict[str, Run]:
    for run in RUNS:
        assert finished[run].returncode == ExitCode.OK, finished[run].stdout + finished[run].stderr
    return {run: load_run(folder / "results" / run) for run in RUNS}


def row_of(run_folder: Path, cache: str, settings: str = "stock") -> dict[str, Any]:
    rows = json.loads((run_folder / "compatibility.json").read_text(encoding="utf-8"))["rows"]
    wanted = {"environment": ENVIRONMENT, "cache": cache, "mode": "default", "settings": settings}
    found: dict[str, Any] = next(row for row in rows if wanted.items() <= row.items())
    return found


def counts_of(row: dict[str, Any]) -> dict[str, float]:
    return {name: row["gates"][name]["value"] for name in COUNTED}


def test_a_container_gives_the_counts_and_reasons_of_a_virtualenv(runs: dict[str, Run]) -> None:
    pair = [runs["counted"], runs["beside"]]
    rows = [row_of(run.folder, "list_index", "traced") for run in pair]
    assert counts_of(rows[0]) == counts_of(rows[1])
    assert [row["verdict"] for row in rows] == ["FAIL", "FAIL"]
    cells = [run.cells[0] for run in pair]
    assert [cell.provenance.runtime for cell in cells] == ["docker", "venv"]
    # one event of each kind, place and reason, with how often it came
    events = [
        [(event.reason, event.count) for event in thinned(cell).evidence[Suite.RECOMPILE].events] for cell in cells
    ]
    assert events[0] == events[1]
    assert "6/7: kv_cache._current_idx[7] == 0" in {reason for reason, _ in events[0]}


def test_a_container_gives_the_verdict_of_a_virtualenv(runs: dict[str, Run]) -> None:
    cache = "fixed_size"
    container_row, venv_row = row_of(runs["smoke"].folder, cache), row_of(REFERENCE, cache)
    statuses = [
        {name: gate["status"] for name, gate in row["gates"].items() if name not in TIMED}
        for row in (container_row, venv_row)
    ]
    assert statuses[0] == statuses[1]
    assert counts_of(container_row) == counts_of(venv_row)
    if container_row["decided_by"] not in TIMED:
        assert container_row["verdict"] == venv_row["verdict"]


def test_every_suite_was_run_in_the_container(runs: dict[str, Run]) -> None:
    [cell] = runs["smoke"].cells
    expected = {suite: Outcome.MEASURED for suite in BY_DEFAULT if suite not in WITHOUT_GPU}
    assert {suite: one.outcome for suite, one in cell.evidence.items()} == expected


def test_the_result_says_which_image_it_comes_from(runs: dict[str, Run], client: docker.DockerClient) -> None:
    provenance = runs["smoke"].cells[0].provenance
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
