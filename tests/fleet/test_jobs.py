"""A plan becomes jobs: one per environment, and nothing in them that a shell or YAML would take for something else."""

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result
from packaging.version import Version

from tests.verdict.sample_cells import good_result
from tests.verdict.stored_runs import store_run
from toto_compat.cli import cli
from toto_compat.contract.result import Failure
from toto_compat.environments.package_index import WheelFile
from toto_compat.errors import ExitCode, InputError
from toto_compat.fleet.jobs import MOST_JOBS, gitlab_pipeline, jobs_of, new_releases
from toto_compat.releases.command import as_data
from toto_compat.releases.listing import State, TorchRelease

CELLS = [
    "torch-2.9.0-cu128/fixed_size/reduce-overhead",
    "torch-2.15.0-cu132/fixed_size/max-autotune",
    "torch-2.9.0-cu128/compile_friendly/default+production",
]


def plan_of(*cells: str) -> dict[str, object]:
    return {"cells": [{"cell": cell, "reused": False, "key": ""} for cell in cells]}


def jobs(file: Path, *options: str) -> Result:
    return CliRunner().invoke(cli, ["jobs", str(file), *options])


def test_every_environment_is_one_job_with_its_own_cells() -> None:
    found = {job.environment: job.selectors for job in jobs_of(plan_of(*CELLS), by="environment")}
    assert found == {"torch-2.9.0-cu128": f"{CELLS[0]} {CELLS[2]}", "torch-2.15.0-cu132": CELLS[1]}


def test_names_of_artifacts_have_no_character_that_artifacts_refuse() -> None:
    names = [job.artifact for job in jobs_of(plan_of(*CELLS), by="cell")]
    assert len(set(names)) == 3
    assert not any(set(name) & set('/\\:*?"<>|+@') for name in names)


def test_the_plan_of_the_real_matrix_becomes_a_github_matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOTO_COMPAT_CACHE", str(tmp_path / "cache"))
    asked = ["matrix", "torch-2.*/fixed_size/default", "--device", "cpu", "--runtime", "venv", "--dry-run", "--json"]
    plan = CliRunner().invoke(cli, asked)
    assert plan.exit_code == 0, plan.output
    (tmp_path / "plan.json").write_text(plan.stdout, encoding="utf-8")
    line = jobs(tmp_path / "plan.json").stdout
    assert line.count("\n") == 1  # $GITHUB_OUTPUT takes a line
    rows = json.loads(line)["include"]
    assert {"torch-2.13.0-cpu", "torch-2.9.0-cu128"} <= {row["environment"] for row in rows}
    assert all(row["selectors"] for row in rows)


def test_a_gitlab_child_pipeline_has_a_job_for_every_environment() -> None:
    child = yaml.safe_load(gitlab_pipeline(jobs_of(plan_of(*CELLS), by="environment")))
    assert child.pop("include") == [{"local": "docs/fleet/gitlab-cells.yml"}]
    needed = child.pop("pages")["needs"]
    assert [one["job"] for one in needed] == ["lower", "torch-2.9.0-cu128", "torch-2.15.0-cu132"]
    assert {job["variables"]["CELLS"] for job in child.values()} == {f"{CELLS[0]} {CELLS[2]}", CELLS[1]}
    assert Path("docs/fleet/gitlab-cells.yml").exists()


@pytest.mark.parametrize(
    "name", ["a/b/c; rm -rf /", "torch-2.9.0-cu128/fixed_size/$(id)", "torch/x/*", "a/b", "", "x/y/default\nz", None, 3]
)
def test_a_name_that_is_no_cell_is_refused(name: object) -> None:
    with pytest.raises(InputError):
        jobs_of({"cells": [{"cell": name}]}, by="cell")


def test_more_jobs_than_github_takes_are_an_error_that_says_what_to_do() -> None:
    many = [f"torch-2.{number}.0-cu128/fixed_size/default" for number in range(MOST_JOBS + 1)]
    with pytest.raises(InputError, match="257 jobs"):
        jobs_of(plan_of(*many), by="environment")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"cells": 3}', '{"cells": [3]}', "[" * 100_000])
def test_a_file_that_is_no_plan_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "plan.json").write_text(content, encoding="utf-8")
    result = jobs(tmp_path / "plan.json")
    assert isinstance(result.exception, InputError), result.output
    assert "plan.json" in str(result.exception)


def released(version: str, state: State) -> TorchRelease:
    file = f"torch-{version}-cp312-cp312-manylinux_2_28_x86_64.whl"
    return TorchRelease(Version(version), (WheelFile(file, file, Version(version)),), state=state)


def test_what_releases_prints_becomes_a_job_for_every_new_release(tmp_path: Path) -> None:
    states = {"2.17.0": State.NEW, "2.16.0": State.NEW, "2.15.0": State.KNOWN, "2.12.0": State.BETWEEN}
    told = as_data(Path("matrix.yaml"), [released(*one) for one in states.items()])
    (tmp_path / "releases.json").write_text(json.dumps(told), encoding="utf-8")
    found = jobs(tmp_path / "releases.json", "--releases").stdout
    assert json.loads(found) == {"include": [{"release": "2.16.0"}, {"release": "2.17.0"}]}
    none = as_data(Path("matrix.yaml"), [released("2.15.0", State.KNOWN)])
    (tmp_path / "releases.json").write_text(json.dumps(none), encoding="utf-8")
    assert jobs(tmp_path / "releases.json", "--releases").stdout == '{"include":[]}\n'


@pytest.mark.parametrize("told", [{"new": ["2.16.0; id"]}, {"new": [None]}, {"new": "2.16.0"}, {}, []])
def test_what_names_no_releases_is_refused(told: object) -> None:
    with pytest.raises(InputError):
        new_releases(told)


def test_a_release_that_could_not_be_compiled_is_tried_again(tmp_path: Path) -> None:
    (tmp_path / "releases.json").write_text('{"new": ["2.16.0", "2.17.0"]}', encoding="utf-8")
    failed = good_result(torch="2.17.0", build="cu132").model_copy(
        update={"failure": Failure(kind="environment", message="no such wheel")}
    )
    known = store_run(tmp_path, "run", [good_result(torch="2.16.0", build="cu132"), failed])
    found = jobs(tmp_path / "releases.json", "--releases", "--known", str(known), "--format", "json").stdout
    assert json.loads(found) == [{"release": "2.17.0"}]


@pytest.mark.parametrize("options", [("--releases", "--format", "gitlab"), ("--known", "run")])
def test_options_that_would_be_ignored_are_refused(tmp_path: Path, options: tuple[str, ...]) -> None:
    (tmp_path / "given.json").write_text('{"new": ["2.16.0"], "cells": []}', encoding="utf-8")
    assert jobs(tmp_path / "given.json", *options).exit_code == ExitCode.USAGE
