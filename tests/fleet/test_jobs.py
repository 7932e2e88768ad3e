"""A plan becomes jobs: one per environment, and nothing in them that a shell or YAML would take for something else."""

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from toto_compat.cli import cli
from toto_compat.errors import InputError
from toto_compat.fleet.jobs import MOST_JOBS, gitlab_pipeline, jobs_of, new_releases

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
    assert {job["variables"]["SELECTORS"] for job in child.values()} == {f"{CELLS[0]} {CELLS[2]}", CELLS[1]}
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


def test_only_releases_newer_than_the_matrix_become_jobs(tmp_path: Path) -> None:
    told = [
        {"torch": "2.17.0", "newer_than_matrix": True, "stanza": ""},
        {"torch": "2.16.0", "newer_than_matrix": True, "stanza": ""},
        {"torch": "2.12.0", "newer_than_matrix": False, "stanza": ""},
    ]
    assert new_releases({"missing": told}) == ["2.16.0", "2.17.0"]
    (tmp_path / "releases.json").write_text(json.dumps({"missing": []}), encoding="utf-8")
    assert jobs(tmp_path / "releases.json", "--releases").stdout == '{"include":[]}\n'


def test_a_release_that_is_no_version_is_refused() -> None:
    with pytest.raises(InputError):
        new_releases({"missing": [{"torch": "2.16.0; id", "newer_than_matrix": True}]})
