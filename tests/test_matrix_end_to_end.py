"""`toto-compat matrix` from the command line to the table, with real Toto on real torch; only the lengths are short."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.run_all import MAKE_WAY
from toto_compat.contract.events import EventKind
from toto_compat.contract.result import Outcome
from toto_compat.contract.suites import Suite
from toto_compat.errors import ExitCode
from toto_compat.evidence.store import Run, StoredCell, load_run

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
ENVIRONMENT = "torch-2.13.0-cpu"

# What each cache must show differs, and so does what it costs: upstream compiles anew for nearly every shape, so the
# caches that compile anew get few shapes, and no code is generated: a cache goes wrong while it is traced. Real cells
# with generated code are what tests/runtimes/test_docker_cells.py runs.
PROFILES: dict[str, dict[str, Any]] = {
    "e2e-observe": {
        "caches": ["upstream", "list_index"],
        "suites": ["recompile"],
        "settings": "traced",
        "workload": {"context": [128, 160], "horizon": [64], "batches": [1]},
    },
    "e2e-equivalence": {
        "caches": ["compile_friendly"],
        "suites": ["equivalence"],
        "settings": "traced",
        "workload": {
            "context": [128, 160],
            "horizon": [64],
            "batches": [1],
            "sampling": ["32/16"],  # fewer would not tell a wrong distribution from a right one
        },
    },
    "e2e-forecast": {
        "caches": ["fixed_size"],
        "suites": ["recompile"],
        "settings": "stock",
        "workload": {"context": [128, 192, 384], "horizon": [288, 96], "batches": [1]},
    },
}
LANES = (("e2e-observe",), ("e2e-equivalence", "e2e-forecast"))  # side by side: nothing here is timed


def cell_name(profile: str, cache: str) -> str:
    settings = PROFILES[profile]["settings"]
    return f"{ENVIRONMENT}/{cache}/default" + ("" if settings == "stock" else f"+{settings}")


@dataclass(frozen=True)
class Finished:
    """One invocation of the command and what it left behind."""

    output: str
    exit_code: int
    run: Run
    compatibility: dict[str, Any]

    def cell(self, cache: str) -> StoredCell:
        return next(cell for cell in self.run.cells if cell.cell.startswith(f"{ENVIRONMENT}/{cache}/"))

    def gate(self, cache: str, gate: str) -> dict[str, Any]:
        found: dict[str, Any] = self.row(cache)["gates"][gate]
        return found

    def row(self, cache: str) -> dict[str, Any]:
        return next(row for row in self.compatibility["rows"] if row["cache"] == cache)


class Project:
    """A folder with a matrix file of its own: the shipped one plus small profiles and settings that only trace."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        matrix = yaml.safe_load((ROOT / "matrix.yaml").read_text(encoding="utf-8"))
        matrix["settings"]["traced"] = {"backend": "eager"}
        for name, profile in PROFILES.items():
            for cache in profile["caches"]:
                matrix["caches"][cache]["settings"] = [profile["settings"]]
            matrix["workloads"][name] = {"model": "tiny", "sampling": ["2/1"], **profile["workload"]}
            matrix["profiles"][name] = {"iterations": 1, "workloads": [name], "suites": profile["suites"]}
        (folder / "matrix.yaml").write_text(yaml.safe_dump(matrix, sort_keys=False), encoding="utf-8")

    def run(self, profile: str, run_name: str, *options: str) -> Finished:
        selectors = [cell_name(profile, cache) for cache in PROFILES[profile]["caches"]]
        cli = [sys.executable, "-m", "toto_compat.cli"]
        command = [*MAKE_WAY, *cli, "matrix", *selectors, "--profile", profile]
        settings = ["--runtime", "venv", "--device", "cpu", "--jobs", "1", "--run", run_name, *options]
        finished = subprocess.run(
            [*command, *settings],
            cwd=self.folder,
            env=os.environ | {"PYTHONPATH": str(ROOT), "NO_COLOR": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        folder = self.folder / "results" / run_name
        assert (folder / "compatibility.json").exists(), finished.stdout
        compatibility = json.loads((folder / "compatibility.json").read_text(encoding="utf-8"))
        return Finished(finished.stdout, finished.returncode, load_run(folder), compatibility)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project(tmp_path_factory.mktemp("matrix"))


@pytest.fixture(scope="module")
def finished(project: Project) -> dict[str, Finished]:
    """Every profile run once, by name."""

    def run_lane(lane: tuple[str, ...]) -> dict[str, Finished]:
        return {profile: project.run(profile, profile, "--fresh") for profile in lane}

    with ThreadPoolExecutor() as pool:
        return {profile: done for lane in pool.map(run_lane, LANES) for profile, done in lane.items()}


@pytest.fixture(scope="module")
def observed(finished: dict[str, Finished]) -> Finished:
    return finished["e2e-observe"]


@pytest.fixture(scope="module")
def fixed_size(finished: dict[str, Finished]) -> Finished:
    return finished["e2e-forecast"]


def test_every_cell_ran_and_was_measured(finished: dict[str, Finished]) -> None:
    assert {name: done.exit_code for name, done in finished.items()} == dict.fromkeys(PROFILES, ExitCode.OK)
    cells = [cell for done in finished.values() for cell in done.run.cells]
    outcomes = [evidence.outcome for cell in cells for evidence in cell.evidence.values()]
    assert len(cells) == 4
    assert outcomes == [Outcome.MEASURED] * 4
    assert not any(cell.reused for cell in cells)


def test_what_is_compared_is_held_to_answers_that_the_cell_was_given(finished: dict[str, Finished]) -> None:
    references = finished["e2e-equivalence"].cell("compile_friendly").provenance.references
    assert references is not None
    assert references.key
    assert references.made["scenarios"]


def test_list_index_fails_as_it_did_in_production(observed: Finished) -> None:
    assert observed.row("list_index")["verdict"] == "FAIL"
    assert observed.gate("list_index", "recompile_limit")["status"] == "FAIL"
    hits = [
        (event.function, event.limit, event.reason)
        for event in observed.cell("list_index").evidence[Suite.RECOMPILE].events
        if event.kind is EventKind.RECOMPILE_LIMIT
    ]
    assert ("positional_embedding", 8, "6/7: kv_cache._current_idx[7] == 0") in hits


def test_upstream_fails_on_recompiles_and_graph_breaks(observed: Finished) -> None:
    assert observed.row("upstream")["verdict"] == "FAIL"
    for gate in ("recompiles_total", "graph_breaks"):
        judged = observed.gate("upstream", gate)
        assert judged["status"] == "FAIL"
        assert judged["value"] > 10


def test_counted_recompiles_are_the_recorded_events(observed: Finished) -> None:
    for cache in ("upstream", "list_index"):
        evidence = observed.cell(cache).evidence[Suite.RECOMPILE]
        recompiles = sum(event.count for event in evidence.events if event.kind is EventKind.RECOMPILE)
        assert evidence.figures["recompiles_logged"].value == recompiles
        assert observed.gate(cache, "recompiles_total")["value"] <= recompiles


def test_a_candidate_cache_forecasts_what_eager_forecasts(finished: dict[str, Finished]) -> None:
    judged = finished["e2e-equivalence"].gate("compile_friendly", "equivalence")
    assert judged["status"] == "PASS", judged["reason"]
    assert judged["kind"] == "measured"


def test_fixed_size_neither_breaks_graphs_nor_recompiles_after_warm_up(fixed_size: Finished) -> None:
    for gate in ("graph_breaks", "recompiles"):
        judged = fixed_size.gate("fixed_size", gate)
        assert (judged["status"], judged["value"], judged["kind"]) == ("PASS", 0, "measured"), judged["reason"]
    assert fixed_size.gate("fixed_size", "compile_active")["status"] == "PASS"


def test_no_row_passes_on_suites_that_were_not_run(finished: dict[str, Finished]) -> None:
    rows = [row for done in finished.values() for row in done.compatibility["rows"]]
    assert {row["gates"]["speedup"]["status"] for row in rows} == {"INCONCLUSIVE"}
    assert "PASS" not in {row["verdict"] for row in rows}


def test_nothing_is_claimed_about_cuda(finished: dict[str, Finished]) -> None:
    for done in finished.values():
        rows = done.compatibility["rows"]
        assert {row["device"] for row in rows} == {"cpu"}
        assert {row["gates"]["cudagraphs"]["status"] for row in rows} <= {"NOT_APPLICABLE", "INCONCLUSIVE"}
        assert done.compatibility["decision"]["devices"]["cuda"]["answer"] == "not_enough_evidence"


def test_the_table_and_the_answer_are_printed(fixed_size: Finished) -> None:
    assert "fixed_size  default" in fixed_size.output
    assert fixed_size.compatibility["decision"]["sentence"] in fixed_size.output


def test_a_second_run_takes_every_cell_from_the_store(project: Project, observed: Finished) -> None:
    again = project.run("e2e-observe", "again")
    assert again.exit_code == ExitCode.OK, again.output
    assert all(cell.reused for cell in again.run.cells)
    assert {cell.ran_in for cell in again.run.cells} == {"e2e-observe"}
    assert again.compatibility == observed.compatibility


def test_a_row_that_is_required_to_pass_and_does_not_is_an_exit_code(project: Project, observed: Finished) -> None:
    required = project.run("e2e-observe", "required", "--require", cell_name("e2e-observe", "list_index"))
    assert required.exit_code == ExitCode.REQUIREMENT
    assert "list_index" in required.output
