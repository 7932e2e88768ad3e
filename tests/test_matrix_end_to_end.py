"""`toto-compat matrix` from the command line to the table, with real Toto on real torch; only the lengths are short."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from toto_compat.errors import ExitCode
from toto_compat.evidence.schema import Outcome
from toto_compat.evidence.store import Run, StoredCell, load_run
from toto_compat.matrix.schema import Suite
from toto_compat.observe.events import EventKind

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
ENVIRONMENT = "torch-2.13.0-cpu"

# Two profiles, since what each cache must show differs: the compiler's behaviour alone, or the forecast as well.
# Nine patches of horizon are eight decode steps. Upstream compiles anew for nearly every shape, so it gets few shapes.
PROFILES: dict[str, dict[str, Any]] = {
    "e2e-observe": {
        "caches": ["upstream", "list_index"],
        "suites": ["recompile"],
        "workload": {"context_patches": [4, 8], "horizon_patches": [3, 2], "batches": [1]},
    },
    "e2e-forecast": {
        "caches": ["compile_friendly", "fixed_size"],
        "suites": ["equivalence", "recompile"],
        "workload": {"context_patches": [4, 6, 12], "horizon_patches": [9, 3], "batches": [1]},
    },
}


@dataclass(frozen=True)
class Finished:
    """One invocation of the command and what it left behind."""

    output: str
    exit_code: int
    run: Run
    compatibility: dict[str, Any]

    def cell(self, cache: str) -> StoredCell:
        return next(cell for cell in self.run.cells if cell.cell == f"{ENVIRONMENT}/{cache}/default")

    def gate(self, cache: str, gate: str) -> dict[str, Any]:
        found: dict[str, Any] = self.row(cache)["gates"][gate]
        return found

    def row(self, cache: str) -> dict[str, Any]:
        return next(row for row in self.compatibility["rows"] if row["cache"] == cache and row["settings"] == "stock")


class Project:
    """A folder with a matrix file of its own: the shipped one plus two small profiles."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        matrix = yaml.safe_load((ROOT / "matrix.yaml").read_text(encoding="utf-8"))
        for name, profile in PROFILES.items():
            matrix["workloads"][name] = {"model": "tiny", "samples": 8, "samples_per_batch": 4, **profile["workload"]}
            matrix["profiles"][name] = {"iterations": 1, "workload": name, "suites": profile["suites"]}
        (folder / "matrix.yaml").write_text(yaml.safe_dump(matrix, sort_keys=False), encoding="utf-8")

    def run(self, profile: str, run_name: str, *options: str) -> Finished:
        selectors = [f"{ENVIRONMENT}/{cache}/default" for cache in PROFILES[profile]["caches"]]
        command = [sys.executable, "-m", "toto_compat.cli", "matrix", *selectors, "--profile", profile]
        settings = ["--runtime", "venv", "--device", "cpu", "--jobs", "2", "--run", run_name, *options]
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
def observed(project: Project) -> Finished:
    return project.run("e2e-observe", "observed", "--fresh")


@pytest.fixture(scope="module")
def forecast(project: Project) -> Finished:
    return project.run("e2e-forecast", "forecast", "--fresh")


def test_every_cell_ran_and_was_measured(observed: Finished, forecast: Finished) -> None:
    assert observed.exit_code == ExitCode.OK, observed.output
    assert forecast.exit_code == ExitCode.OK, forecast.output
    outcomes = {
        (cell.cell, suite): evidence.outcome
        for cell in (*observed.run.cells, *forecast.run.cells)
        for suite, evidence in cell.evidence.items()
    }
    assert len(outcomes) == 6
    assert set(outcomes.values()) == {Outcome.MEASURED}
    assert not any(cell.reused for cell in (*observed.run.cells, *forecast.run.cells))


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
        events = observed.cell(cache).evidence[Suite.RECOMPILE].events
        recompiles = sum(event.count for event in events if event.kind is EventKind.RECOMPILE)
        assert observed.gate(cache, "recompiles_total")["value"] == recompiles


@pytest.mark.parametrize("cache", ["compile_friendly", "fixed_size"])
def test_the_candidate_caches_forecast_what_eager_forecasts(forecast: Finished, cache: str) -> None:
    judged = forecast.gate(cache, "equivalence")
    assert judged["status"] == "PASS", judged["reason"]
    assert judged["kind"] == "measured"


def test_fixed_size_neither_breaks_graphs_nor_recompiles_after_warm_up(forecast: Finished) -> None:
    for gate in ("graph_breaks", "recompiles"):
        judged = forecast.gate("fixed_size", gate)
        assert (judged["status"], judged["value"], judged["kind"]) == ("PASS", 0, "measured")
    assert forecast.gate("fixed_size", "compile_active")["status"] == "PASS"


def test_no_row_passes_on_suites_that_were_not_run(observed: Finished, forecast: Finished) -> None:
    rows = [*observed.compatibility["rows"], *forecast.compatibility["rows"]]
    assert {row["gates"]["speedup"]["status"] for row in rows} == {"INCONCLUSIVE"}
    assert "PASS" not in {row["verdict"] for row in rows}


def test_nothing_is_claimed_about_cuda(observed: Finished, forecast: Finished) -> None:
    for finished in (observed, forecast):
        assert {row["device"] for row in finished.compatibility["rows"]} == {"cpu"}
        assert {row["gates"]["cudagraphs"]["status"] for row in finished.compatibility["rows"]} <= {
            "NOT_APPLICABLE",
            "INCONCLUSIVE",
        }
        assert finished.compatibility["decision"]["devices"]["cuda"]["answer"] == "not_enough_evidence"


def test_the_table_and_the_answer_are_printed(forecast: Finished) -> None:
    for cache in ("compile_friendly", "fixed_size"):
        assert cache in forecast.output
    assert forecast.compatibility["decision"]["sentence"].split()[0] in forecast.output


def test_a_second_run_takes_every_cell_from_the_store(project: Project, observed: Finished) -> None:
    again = project.run("e2e-observe", "again")
    assert again.exit_code == ExitCode.OK, again.output
    assert all(cell.reused for cell in again.run.cells)
    assert {cell.ran_in for cell in again.run.cells} == {"observed"}
    assert again.compatibility == observed.compatibility


def test_a_row_that_is_required_to_pass_and_does_not_is_an_exit_code(project: Project, observed: Finished) -> None:
    required = project.run("e2e-observe", "required", "--require", f"{ENVIRONMENT}/list_index/default")
    assert required.exit_code == ExitCode.REQUIREMENT
    assert "list_index" in required.output
