"""The plan of the reference: what it covers, where each release is measured, and mistakes in it."""

from pathlib import Path

import pytest
import yaml

from toto_compat.errors import MatrixFileError, SelectionError
from toto_compat.matrix.load import load_matrix
from toto_compat.reference.plan import (
    chosen_releases,
    chosen_runs,
    environment_of,
    lacking_environment,
    planned_rows,
    read_plan,
)

ROOT = Path(__file__).parent.parent.parent
PLAN_FILE = ROOT / "results" / "reference" / "plan.yaml"
PLAN = read_plan(PLAN_FILE)
MATRIX = load_matrix(ROOT / "matrix.yaml")


def written(folder: Path, **changes: object) -> Path:
    document = yaml.safe_load(PLAN_FILE.read_text(encoding="utf-8")) | changes
    (folder / "plan.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
    return folder / "plan.yaml"


def test_the_plan_has_all_four_caches_on_at_least_ten_releases() -> None:
    assert len(PLAN.releases) >= 10
    assert {row.partition("/")[0] for row in PLAN.runs["cpu"].rows} == {
        "upstream",
        *("list_index", "compile_friendly", "fixed_size"),
    }


def test_three_releases_have_every_mode_of_the_cache_that_may_pass_and_the_forecast_of_production() -> None:
    for release in ("2.9.0", "2.13.0", "2.15.0"):
        rows = PLAN.runs["cpu"].rows_of(release)
        assert {"fixed_size/reduce-overhead", "fixed_size/max-autotune", "compile_friendly/default+production"} <= set(
            rows
        )
        assert PLAN.runs["production"].rows_of(release) == ("fixed_size/default", "upstream/default")
    assert PLAN.runs["production"].rows_of("2.4.1") == ()


def test_a_release_is_measured_in_its_cpu_build_and_compiled_for_cuda_in_the_other() -> None:
    assert environment_of(MATRIX, "2.13.0", for_cuda=False) == "torch-2.13.0-cpu"
    assert environment_of(MATRIX, "2.13.0", for_cuda=True) == "torch-2.13.0-cu130"
    assert environment_of(MATRIX, "2.9.0", for_cuda=False) == "torch-2.9.0-cu128"


def test_a_release_that_the_matrix_lacks_is_named_with_the_command_that_adds_it() -> None:
    without = {name: one for name, one in MATRIX.environments.items() if one.torch != "2.15.0"}
    matrix = MATRIX.model_copy(update={"environments": without})
    assert lacking_environment(PLAN, matrix, "2.15.0").endswith("toto-compat releases --add 2.15.0")
    assert list(planned_rows(PLAN, matrix, "2.15.0")) == []
    assert lacking_environment(PLAN, MATRIX, "2.15.0") == ""


def test_a_profile_of_several_workloads_has_a_row_for_each() -> None:
    rows = [row for row in planned_rows(PLAN, MATRIX, "2.13.0") if row.run == "production-check"]
    assert [row.cell.workload for row in rows] == ["production", "production-float16", "production-bfloat16"]


def test_every_planned_row_is_a_cell_of_the_matrix() -> None:
    rows = [row for release in PLAN.releases for row in planned_rows(PLAN, MATRIX, release)]
    assert len({(row.run, row.cell) for row in rows}) == len(rows)
    assert {row.cell.environment for row in rows} <= set(MATRIX.environments)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"releases": []}, "releases"),
        ({"releases": ["2.13"]}, "releases[0]"),
        ({"runs": {"cpu": {"profile": "quick", "rows": ["upstream"]}}}, "runs.cpu.rows[0]"),
        ({"runs": {"../x": {"profile": "quick"}}}, "runs"),
        (
            {"runs": {"cpu": {"profile": "quick", "more": [{"releases": ["2.1.0"], "rows": ["a/b"]}]}}},
            "runs.cpu.more[0].releases[0]: found 2.1.0, which is not among `releases`",
        ),
        ({"runs": {"cpu": {"profile": "quick", "counted_by_torch_logs": ["a/b"]}}}, "counted_by_torch_logs"),
        (
            {"runs": {"cpu": {"profile": "quick", "architectures": ["sm_90", "sm_91"]}}},
            "runs.cpu.architectures[1]: found sm_91, which no GPU is described of",
        ),
        ({"surplus": 1}, "surplus"),
        ({"releases": ["2.13.0", "2.9.0", "2.13.0"]}, "releases[2]: found 2.13.0 a second time"),
        ({"runs": {"cpu": {"profile": "quick", "rows": ["a/b", "a/b"]}}}, "runs.cpu.rows[1]: found a/b a second time"),
    ],
)
def test_a_mistake_in_the_plan_is_told_with_its_key(tmp_path: Path, changes: dict[str, object], told: str) -> None:
    with pytest.raises(MatrixFileError, match=r"plan\.yaml:\d+: ") as error:
        read_plan(written(tmp_path, **changes))
    assert told in str(error.value)


@pytest.mark.parametrize("content", [b"\xff", b"a: [", b"", b"3"])
def test_a_file_that_is_no_plan_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "plan.yaml").write_bytes(content)
    with pytest.raises(MatrixFileError, match=r"plan\.yaml"):
        read_plan(tmp_path / "plan.yaml")


def test_a_row_or_profile_that_the_matrix_lacks_is_named(tmp_path: Path) -> None:
    unknown = read_plan(written(tmp_path, runs={"cpu": {"profile": "quick", "rows": ["fixed/default"]}}))
    with pytest.raises(SelectionError, match=r"torch-2\.13\.0-cpu/fixed/default"):
        list(planned_rows(unknown, MATRIX, "2.13.0"))
    unknown = read_plan(written(tmp_path, runs={"cpu": {"profile": "quickly", "rows": ["fixed_size/default"]}}))
    with pytest.raises(SelectionError, match="quickly"):
        list(planned_rows(unknown, MATRIX, "2.13.0"))


def test_only_takes_releases_of_the_plan() -> None:
    assert chosen_releases(PLAN, ("2.15.0", "2.9.0")) == ("2.9.0", "2.15.0")
    with pytest.raises(SelectionError, match=r"it has 2\.3\.1"):
        chosen_releases(PLAN, ("2.12.0",))


def test_run_takes_runs_of_the_plan_and_names_those_it_has() -> None:
    assert chosen_runs(PLAN, ("production", "cpu")) == ("cpu", "production")
    assert chosen_runs(PLAN, ()) == tuple(PLAN.runs)
    with pytest.raises(SelectionError, match=r"--run gpu: not in the plan"):
        chosen_runs(PLAN, ("gpu",))


def test_a_key_that_stands_there_twice_is_told_with_its_line(tmp_path: Path) -> None:
    text = "schema: 1\nreleases: [2.13.0]\nruns: {cpu: {profile: quick}}\nruns: {cpu: {profile: full}}\n"
    (tmp_path / "plan.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(MatrixFileError, match=r"plan\.yaml:4: runs"):
        read_plan(tmp_path / "plan.yaml")
