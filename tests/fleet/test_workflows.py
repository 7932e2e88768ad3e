"""The workflows of docs/fleet.md: valid by their schemas, pinned, and their shell does what it says, here."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.releases.local_index import LocalIndex, served
from tests.verdict.sample_cells import good_result, with_figures
from tests.verdict.stored_runs import store_run
from toto_compat.evidence.store import load_run, write_run_info
from toto_compat.fleet.jobs import gitlab_pipeline, jobs_of
from toto_compat.matrix.gates import Gate

ROOT = Path(__file__).parent.parent.parent
GITHUB = ROOT / ".github" / "workflows" / "toto-compat.yml"
GITLAB = [ROOT / "docs" / "fleet" / "gitlab-ci.yml", ROOT / "docs" / "fleet" / "gitlab-cells.yml"]
WORKFLOW: dict[str, Any] = yaml.safe_load(GITHUB.read_text(encoding="utf-8"))


def steps() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, job in WORKFLOW["jobs"].items():
        for step in job["steps"]:
            yield name, step


def scripts() -> dict[str, str]:
    """Every piece of shell, by where it stands."""
    found = {f"{job}: {step['name']}": step["run"] for job, step in steps() if "run" in step}
    for file in GITLAB:
        for name, job in yaml.safe_load(file.read_text(encoding="utf-8")).items():
            if isinstance(job, dict) and "script" in job:
                found |= {f"{file.name}, {name}: {number}": line for number, line in enumerate(job["script"])}
    return found


def step_named(job: str, name: str) -> str:
    return next(str(step["run"]) for of, step in steps() if of == job and step.get("name") == name)


@pytest.mark.parametrize(
    ("schema", "files"),
    [("vendor.github-workflows", [GITHUB]), ("vendor.gitlab-ci", GITLAB)],
    ids=["github", "gitlab"],
)
def test_a_workflow_fits_the_schema_of_its_system(schema: str, files: list[Path]) -> None:
    pytest.importorskip("check_jsonschema", reason="not installed here: `nox -s tests` brings it")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *map(str, files)]
    if schema == "vendor.gitlab-ci":
        command += ["--data-transform", "gitlab-ci"]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


def test_every_action_is_pinned_by_a_commit() -> None:
    used = [step["uses"] for _, step in steps() if "uses" in step]
    assert used
    assert [one for one in used if not re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40}", one)] == []


def test_no_expression_is_pasted_into_a_shell() -> None:
    assert [name for name, script in scripts().items() if "${{" in script] == []


def gitlabs_own_variables() -> list[dict[str, str]]:
    """What each file and each job of it sets."""
    files = [yaml.safe_load(file.read_text(encoding="utf-8")) for file in GITLAB]
    return [part.get("variables", {}) for file in files for part in (file, *file.values()) if isinstance(part, dict)]


def child_pipeline() -> dict[str, Any]:
    cells = [{"cell": "torch-2.15.0-cu132/fixed_size/default"}]
    made: dict[str, Any] = yaml.safe_load(gitlab_pipeline(jobs_of({"cells": cells}, by="environment")))
    return made


def test_no_variable_of_gitlabs_stands_for_itself() -> None:
    """GitLab leaves `PROFILE: $PROFILE` of a job as it is: the word "$PROFILE" reaches the pipeline that it starts."""
    for variables in gitlabs_own_variables():
        assert [name for name, value in variables.items() if re.search(rf"\$\{{?{name}\b", str(value))] == []


def test_what_a_gitlab_job_is_to_run_is_not_what_the_pipeline_before_it_was_asked_for() -> None:
    """Variables that come from the pipeline before win over a job's own: SELECTORS would be all that it ran."""
    child = child_pipeline()["torch-2.15.0-cu132"]["variables"]
    handed_on = {name for variables in gitlabs_own_variables() for name in variables}
    assert not handed_on & set(child)
    template = GITLAB[1].read_text(encoding="utf-8")
    assert all(f"${name}" in template for name in child), "and the template reads what the job sets"


def test_a_gitlab_job_of_another_pipeline_that_is_needed_may_not_fail() -> None:
    """GitLab starts no job whose need in another pipeline failed, allowed to or not."""
    first, second = (yaml.safe_load(file.read_text(encoding="utf-8")) for file in GITLAB)
    jobs = [job for part in (second, child_pipeline()) for job in part.values() if isinstance(job, dict)]
    needed = {one["job"] for job in jobs for one in job.get("needs", ()) if "pipeline" in one}
    assert needed == {"watch"}
    assert "allow_failure" not in first["watch"]


def test_a_token_may_write_only_where_results_are_published() -> None:
    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert [name for name, job in WORKFLOW["jobs"].items() if "permissions" in job] == ["publish"]


@pytest.mark.parametrize("name", list(scripts()))
def test_the_shell_is_valid(name: str) -> None:
    checked = subprocess.run(["bash", "-n"], input=scripts()[name], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")


# --- the steps that need no network and no GPU, really run ------------------------------------------------------------

STAND_IN = """#!/bin/sh
case "$1 $2" in
"issue list") cat "$ISSUES" 2>/dev/null || echo "[]" ;;
"issue create") echo created >> "$ISSUES.created"; echo "https://tracker.example/issues/1" ;;
esac
"""


class Runner:
    """A folder as a runner has it: the project's own command, a stand-in for `gh`, a bare repository to push to."""

    def __init__(self, folder: Path) -> None:
        self.folder, tools = folder, folder / "tools"
        tools.mkdir()
        for name, text in (
            ("toto-compat", f'#!/bin/sh\nexec {sys.executable} -m toto_compat.cli "$@"\n'),
            ("gh", STAND_IN),
        ):
            (tools / name).write_text(text, encoding="utf-8")
            (tools / name).chmod(0o755)
        subprocess.run(["git", "init", "--quiet", "--bare", str(folder / "remote.git")], check=True)
        self.work = folder / "work"
        self.work.mkdir()
        shutil.copy(ROOT / "matrix.yaml", self.work)
        self.variables = {
            "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(folder),
            "PYTHONPATH": str(ROOT),
            "TOTO_COMPAT_CACHE": str(folder / "cache"),
            "GITHUB_OUTPUT": str(folder / "output"),
            "GITHUB_STEP_SUMMARY": str(folder / "summary"),
            "ISSUES": str(folder / "issues.json"),
            "BRANCH": "toto-compat-results",
            "REPOSITORY": str(folder / "remote.git"),
            "PROFILE": "quick",
            "SELECTORS": "torch-2.1*/fixed_size/default",
        }

    def run(self, job: str, name: str) -> str:
        # as GitHub runs a step: bash, and out at the first failure
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step_named(job, name)]
        done = subprocess.run(command, cwd=self.work, env=self.variables, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{job}: {name}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def outputs(self) -> dict[str, str]:
        lines = (self.folder / "output").read_text(encoding="utf-8").splitlines()
        return dict(line.split("=", 1) for line in lines)

    @property
    def opened(self) -> int:
        made = self.folder / "issues.json.created"
        return len(made.read_text(encoding="utf-8").splitlines()) if made.exists() else 0


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    return Runner(tmp_path)


def test_a_plan_becomes_the_jobs_of_the_next_stage(runner: Runner) -> None:
    asked = ["matrix", runner.variables["SELECTORS"], "--device", "cpu", "--runtime", "venv", "--dry-run", "--json"]
    plan = subprocess.run(
        [sys.executable, "-m", "toto_compat.cli", *asked],
        cwd=runner.work,
        env=runner.variables,
        capture_output=True,
        text=True,
        check=True,
    )
    (runner.work / "plan.json").write_text(plan.stdout, encoding="utf-8")
    runner.run("plan", "Make a job for each environment")
    rows = json.loads(runner.outputs()["jobs"])["include"]
    assert "torch-2.13.0-cpu/fixed_size/default" in [row["selectors"] for row in rows]


@pytest.mark.parametrize(("newest", "found"), [("2.99.0", "yes"), ("2.15.0", "no")])
def test_a_new_release_becomes_a_job_and_a_known_one_does_not(runner: Runner, newest: str, found: str) -> None:
    index = LocalIndex()
    index.torch("2.15.0")
    index.torch(newest)
    with served(index):
        runner.variables |= {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": index.simple}
        runner.run("watch", "Ask the package index")
    runner.run("watch", "Get the last results")
    runner.run("watch", "Make a job for each")
    assert runner.outputs()["found"] == found
    assert (newest in runner.outputs()["releases"]) == (found == "yes")


def test_a_release_that_was_compiled_before_is_not_compiled_every_day(runner: Runner) -> None:
    store_run(runner.work / "published", "quick", [good_result(torch="2.16.0", build="cu132")])
    (runner.work / "releases.json").write_text(json.dumps({"new": ["2.16.0"]}), encoding="utf-8")
    runner.run("watch", "Make a job for each")
    assert runner.outputs()["found"] == "no"


def publish(runner: Runner) -> None:
    shutil.rmtree(runner.work / "published", ignore_errors=True)
    for step in ("Get the last results", "Merge", "Tell what changed", "Write the page", "Keep the results"):
        runner.run("publish", step)


def test_results_are_merged_published_and_told_once(runner: Runner) -> None:
    good, other = good_result(), good_result(torch="2.15.0")
    bad = with_figures(other, {Gate.RECOMPILES: 3.0})
    artifacts = runner.work / "artifacts"
    store_run(artifacts / "cells-a", "a", [good])
    store_run(artifacts / "cells-b", "b", [other])
    publish(runner)
    assert (runner.opened, len(load_run(runner.work / "results" / "merged").cells)) == (0, 2)
    assert (runner.work / "site" / "index.html").stat().st_size > 10_000
    assert "torch.compile for Toto" in (runner.folder / "summary").read_text(encoding="utf-8")

    # the next day one runner is away and the other finds a release broken: its verdict is told, the lost row stays
    shutil.rmtree(artifacts)
    store_run(artifacts / "cells-b", "b", [bad], started="2026-11-17T10:00:00Z")
    publish(runner)
    assert (runner.opened, len(load_run(runner.work / "results" / "merged").cells)) == (1, 2)

    # and the day after it is still broken: nobody is told again
    shutil.rmtree(artifacts)
    store_run(artifacts / "cells-b", "b", [bad], started="2026-11-18T10:00:00Z")
    publish(runner)
    assert runner.opened == 1


def test_a_run_by_hand_with_another_profile_leaves_the_daily_results_and_opens_nothing(runner: Runner) -> None:
    artifacts = runner.work / "artifacts"
    store_run(artifacts / "cells-a", "a", [good_result(), good_result(torch="2.15.0")])
    publish(runner)
    bad = with_figures(good_result(), {Gate.RECOMPILES: 3.0})
    smoke = bad.model_copy(update={"request": bad.request.model_copy(update={"profile_name": "smoke"})})
    shutil.rmtree(artifacts)
    folder = store_run(artifacts / "cells-a", "a", [smoke], started="2026-11-17T10:00:00Z")
    write_run_info(folder, load_run(folder).info.model_copy(update={"profile": "smoke"}))
    runner.variables["PROFILE"] = "smoke"
    publish(runner)
    assert runner.opened == 0
    runner.variables["PROFILE"] = "quick"
    shutil.rmtree(runner.work / "published")
    runner.run("publish", "Get the last results")
    there = {one: len(load_run(runner.work / "published" / one).cells) for one in ("quick", "smoke")}
    assert there == {"quick": 2, "smoke": 1}


def test_last_results_that_cannot_be_merged_end_the_job_and_stay(runner: Runner) -> None:
    artifacts = runner.work / "artifacts"
    store_run(artifacts / "cells-a", "a", [good_result(), good_result(torch="2.15.0")])
    publish(runner)
    # the same moment, another result: somebody changed a file
    shutil.rmtree(artifacts)
    store_run(artifacts / "cells-a", "a", [with_figures(good_result(), {Gate.RECOMPILES: 3.0})])
    with pytest.raises(AssertionError, match="one of the files was changed"):
        publish(runner)


def test_results_that_cannot_be_read_today_are_not_written_over(runner: Runner) -> None:
    shutil.rmtree(runner.folder / "remote.git")
    for job in ("watch", "publish"):
        with pytest.raises(AssertionError, match="does not appear to be a git repository"):
            runner.run(job, "Get the last results")
    assert not (runner.work / "published").exists()


@pytest.mark.parametrize(("answered", "ends", "kept"), [("200", 0, True), ("404", 0, False), ("503", 1, True)])
def test_on_gitlab_only_results_that_were_never_there_are_done_without(
    runner: Runner, answered: str, ends: int, kept: bool
) -> None:
    script = next(one for name, one in scripts().items() if "gitlab-cells.yml, pages" in name and "http_code" in one)
    curl = runner.folder / "tools" / "curl"
    curl.write_text(f"#!/bin/sh\necho content > published/run.zip\nprintf {answered}\n", encoding="utf-8")
    curl.chmod(0o755)
    (runner.work / "published").mkdir()
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script]
    variables = runner.variables | {"CI_JOB_TOKEN": "x", "PACKAGE": "https://gitlab.example/run.zip"}
    done = subprocess.run(command, cwd=runner.work, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == ends, done.stderr
    assert (runner.work / "published" / "run.zip").exists() is kept


def test_on_gitlab_one_release_that_fails_keeps_no_other_away(runner: Runner) -> None:
    """The shell of `lower`, with commands that read all of their input as pip and nox may."""
    script = next(
        one for name, one in scripts().items() if name.startswith("gitlab-cells.yml, lower") and "while" in one
    )
    for name in ("toto-compat", "nox"):
        text = f'#!/bin/sh\ncat > /dev/null\necho "{name} $*" >> "$ISSUES"\ncase "$*" in *2.16.0*) exit 5;; esac\n'
        (runner.folder / "tools" / name).write_text(text, encoding="utf-8")
        (runner.folder / "tools" / name).chmod(0o755)
    told = [{"release": one} for one in ("2.16.0", "2.17.0", "2.18.0")]
    (runner.work / "new-releases.json").write_text(json.dumps(told), encoding="utf-8")
    (runner.folder / "tools" / "python").symlink_to(sys.executable)
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script]
    done = subprocess.run(command, cwd=runner.work, env=runner.variables, capture_output=True, text=True, check=False)
    assert done.returncode != 0, "what failed is told at the end"
    lowered = [line for line in Path(runner.variables["ISSUES"]).read_text().splitlines() if line.startswith("nox")]
    assert [line.rpartition("lowered-")[2] for line in lowered] == ["2.17.0", "2.18.0"]
