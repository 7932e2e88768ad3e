"""`--explain` changes one thing at a time, takes what is stored, and names the smallest change that ends it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.repro.production_events import LIMIT_HIT
from toto_compat.contract.events import Event
from toto_compat.contract.request import CellRequest, CompileSettings
from toto_compat.contract.result import CellResult, Failure, Figure, Outcome, Provenance, SuiteEvidence
from toto_compat.contract.suites import Suite
from toto_compat.errors import ExitCode, SelectionError
from toto_compat.evidence.store import CellStore
from toto_compat.matrix.load import load_matrix
from toto_compat.repro.command import repro_command
from toto_compat.repro.explain import (
    AXES,
    Explanation,
    PlannedVariant,
    Row,
    Variant,
    axes_of,
    explanation_as_data,
    explanation_as_text,
    judged_row,
    plan_text,
    plan_variant,
    plan_variants,
    sentence,
    variants,
    within_the_disk,
)
from toto_compat.repro.incident import Incident, RaisedForecast, load_incident
from toto_compat.repro.outcome import Reproduction, look_at
from toto_compat.repro.reproduce import incident_request, limits_of
from toto_compat.runtimes.machine import machine_identity
from toto_compat.runtimes.open import open_runtime
from toto_compat.runtimes.plan import key_of
from toto_compat.runtimes.run import stored_cell
from toto_compat.runtimes.seam import BuildNeeds

ROOT = Path(__file__).parents[2]
MATRIX = load_matrix(ROOT / "matrix.yaml")
SHIPPED = load_incident(ROOT / "incidents" / "2025-10-30-recompile-limit.yaml")
NEEDS = BuildNeeds(download_bytes=4 * 10**9, disk_bytes=8 * 10**9, seconds=600)
HERE = SHIPPED.model_copy(update={"environment": "torch-2.13.0-cpu"})


def ask(incident: Incident) -> CellRequest:
    return incident_request(incident, ROOT, MATRIX, ROOT / "matrix.yaml")


def measured(*events: Event, recompiles: float = 0, compilations: float = 9) -> SuiteEvidence:
    figures = {"recompiles_total": Figure(value=recompiles), "compilations": Figure(value=compilations)}
    return SuiteEvidence(suite=Suite.RECOMPILE, outcome=Outcome.MEASURED, events=events, figures=figures)


def ran(incident: Incident, evidence: SuiteEvidence, failure: Failure | None = None) -> Reproduction:
    request = ask(incident)
    provenance = Provenance(torch="2.13.0+cpu", runtime="venv")
    result = CellResult(
        cell=request.cell,
        request=request,
        provenance=provenance,
        evidence={Suite.RECOMPILE: evidence},
        failure=failure,
    )
    return look_at(incident, result, limits_of(MATRIX))


BASE = ran(HERE, measured(LIMIT_HIT, recompiles=43))


def row(axis: str, change: str, evidence: SuiteEvidence, failure: Failure | None = None) -> Row:
    return judged_row(Variant(axis, change, HERE), BASE, ran(HERE, evidence, failure))


def test_every_variant_differs_from_the_incident_in_one_thing() -> None:
    found = list(variants(HERE, ask(HERE), MATRIX, tuple(AXES)))
    own = HERE.model_dump()
    for variant in found:
        other = variant.incident.model_dump()
        assert sum(own[key] != other[key] for key in own) == 1, variant.change
    assert {variant.axis for variant in found} == set(AXES)
    changes = [variant.change for variant in found]
    assert {"cache fixed_size", "mode default", "recompile_limit 256", "mark_dynamic on"} <= set(changes)
    assert len(changes) == len(set(changes))
    assert "environment torch-2.9.0-cu128" in changes and "environment torch-2.13.0-cu130" not in changes


def test_settings_of_production_are_taken_back_one_by_one() -> None:
    production = MATRIX.settings["production"]
    incident = HERE.model_copy(update={"settings": production})
    changed = [variant.incident.settings for variant in variants(incident, ask(incident), MATRIX, ("settings",))]
    assert production.model_copy(update={"recompile_limit": None}) in changed
    assert CompileSettings() not in changed


@pytest.mark.parametrize(
    ("evidence", "ends", "told"),
    [
        (measured(recompiles=0), True, "gone"),
        (measured(LIMIT_HIT), False, "the same"),
        (measured(LIMIT_HIT.model_copy(update={"function": "forward"})), False, "another recompile_limit in forward"),
        (measured(compilations=0), None, "compiles nothing"),
        (
            SuiteEvidence(
                suite=Suite.RECOMPILE,
                outcome=Outcome.MODEL_FAILED,
                failure=Failure(kind="exception", message="IndexError: 3"),
            ),
            None,
            "raises: IndexError: 3",
        ),
        (SuiteEvidence(suite=Suite.RECOMPILE, outcome=Outcome.ERROR), None, "not judged"),
    ],
)
def test_only_a_compiled_forecast_without_any_such_event_ends_it(
    evidence: SuiteEvidence, ends: bool | None, told: str
) -> None:
    judged = row("cache", "cache x", evidence)
    assert judged.ends is ends
    assert judged.told.startswith(told)


def test_an_error_is_ended_by_what_runs_and_not_by_what_raises_another() -> None:
    raising = HERE.model_copy(update={"expect": (), "raised": (RaisedForecast(error_like="IndexError: *"),)})

    def raises(message: str) -> SuiteEvidence:
        failure = Failure(kind="exception", message=message)
        return SuiteEvidence(suite=Suite.RECOMPILE, outcome=Outcome.MODEL_FAILED, failure=failure)

    base = ran(raising, raises("IndexError: 3"))
    for evidence, ends, told in (
        (measured(), True, "gone"),
        (raises("IndexError: 4"), False, "the same"),
        (raises("TypeError: x"), False, "raised TypeError: x"),
    ):
        judged = judged_row(Variant("cache", "cache x", raising), base, ran(raising, evidence))
        assert (judged.ends, judged.told) == (ends, told)


def test_a_cell_that_crashed_ends_nothing() -> None:
    assert row("mode", "mode x", measured(), Failure(kind="crash", message="died")).ends is None


def test_the_smallest_change_is_named_with_the_recompiles_that_it_leaves() -> None:
    rows = (
        row("release", "environment torch-2.15.0-cu132", measured(recompiles=3)),
        row("cache", "cache fixed_size", measured(recompiles=0)),
        row("settings", "recompile_limit 256", measured(recompiles=63)),
        row("mode", "mode default", measured(LIMIT_HIT, recompiles=43)),
    )
    explanation = Explanation(BASE, rows)
    assert sentence(explanation) == (
        "The smallest change that ends it is recompile_limit 256 (63 recompiles). "
        "So do cache fixed_size (0 recompiles), environment torch-2.15.0-cu132 (3 recompiles)."
    )
    table = explanation_as_text(explanation)
    assert "mode default" in table and "does not" in table
    assert explanation_as_data(explanation)["smallest"] == "recompile_limit 256"


def test_without_a_change_that_ends_it_that_is_said() -> None:
    explanation = Explanation(BASE, (row("mode", "mode default", measured(LIMIT_HIT)),))
    assert sentence(explanation) == "None of the 1 changes that were tried ends it."
    assert explanation_as_data(explanation)["smallest"] is None


def test_an_incident_that_does_not_show_here_cannot_be_explained() -> None:
    absent = Explanation(ran(HERE, measured()), ())
    assert explanation_as_text(absent).startswith("Nothing of it shows here as it is")


def test_what_is_stored_is_not_run_again_and_comes_first_in_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toto_compat.runtimes.venv.VenvRuntime.lock_of", lambda *_: "lock")
    runtime = open_runtime("venv", limits=MATRIX.limits, device=ask(HERE).device)
    store = CellStore(tmp_path)
    stored = HERE.model_copy(update={"cache": "fixed_size"})
    key = key_of(ask(stored), "lock", runtime.source.hash, machine_identity(ask(stored).device))
    store.put(stored_cell(ran(stored, measured()).result, key=key, seconds=70.0, run="repro"))
    planned = plan_variants(variants(HERE, ask(HERE), MATRIX, ("mode", "cache")), ask, runtime, store, builds=False)
    assert planned[0].variant.change == "cache fixed_size" and planned[0].stored
    assert all(not one.stored and one.cost > 0 for one in planned[1:])
    text = plan_text(plan_variant(Variant("", "the incident itself", HERE), ask(HERE), runtime, store), planned)
    assert "cache fixed_size: stored " in text and "the same command goes on from there" in text


def test_an_environment_that_is_not_built_is_tried_only_when_releases_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toto_compat.runtimes.venv.VenvRuntime.lock_of", lambda *_: None)
    monkeypatch.setattr("toto_compat.runtimes.venv.VenvRuntime.obstacle", lambda *_: "")
    runtime = open_runtime("venv", limits=MATRIX.limits, device=ask(HERE).device)
    found = list(variants(HERE, ask(HERE), MATRIX, ("release",)))
    variant = next(one for one in found if one.change == "environment torch-2.7.0-cu126")
    spared = plan_variant(variant, ask(variant.incident), runtime, CellStore(tmp_path), builds=False)
    asked = plan_variant(variant, ask(variant.incident), runtime, CellStore(tmp_path), builds=True)
    assert "its environment is not built: `--explain release` builds it, about 4 min, 4.0 GB" in spared.obstacle
    assert asked.build and not asked.obstacle


def test_what_the_incident_itself_will_build_is_there_for_its_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toto_compat.runtimes.venv.VenvRuntime.lock_of", lambda *_: None)
    monkeypatch.setattr("toto_compat.runtimes.venv.VenvRuntime.obstacle", lambda *_: "")
    runtime = open_runtime("venv", limits=MATRIX.limits, device=ask(HERE).device)
    found = variants(HERE, ask(HERE), MATRIX, ("cache", "release"))
    planned = plan_variants(found, ask, runtime, CellStore(tmp_path), builds=False, built_before="torch-2.13.0-cpu")
    by_axis = {axis: [one for one in planned if one.variant.axis == axis] for axis in ("cache", "release")}
    assert all(not one.obstacle and one.build is None and one.cost > 0 for one in by_axis["cache"])
    assert all("its environment is not built" in one.obstacle for one in by_axis["release"])


def test_what_a_cuda_build_predicted_is_asked_of_cuda_builds() -> None:
    predicted = load_incident(ROOT / "incidents" / "2025-11-01-cuda-graphs-skipped.yaml")
    for incident, build in ((predicted, "cu130"), (SHIPPED, "cpu")):
        request = ask(incident)
        names = [one.incident.environment for one in variants(incident, request, MATRIX, ("release",))]
        assert [name for name in names if name and "2.13.0" in name] == [f"torch-2.13.0-{build}"]


def test_axes_are_picked_by_name_and_a_wrong_one_is_told() -> None:
    assert axes_of("all") == tuple(AXES)
    assert axes_of("cache, mode") == ("mode", "cache")
    for nothing in ("", " , "):
        with pytest.raises(SelectionError, match="names no axis"):
            axes_of(nothing)
    with pytest.raises(SelectionError, match="no axis 'cahce'") as caught:
        axes_of("cahce")
    assert "did you mean cache?" in caught.value.hint


def test_dry_run_prints_the_plan_and_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toto_compat.repro.explain.reproduce_in", lambda *_, **__: pytest.fail("it was run"))
    path = str(ROOT / "incidents" / "2025-10-30-recompile-limit.yaml")
    options = ["--runtime", "venv", "--device", "cpu", "--environment", "torch-2.13.0-cpu"]
    run = CliRunner().invoke(
        repro_command, [path, "--explain", "cache", "--dry-run", *options, "--matrix", str(ROOT / "matrix.yaml")]
    )
    assert run.exit_code == ExitCode.OK, run.output
    assert "cache fixed_size: " in run.output and "mode default" not in run.output


def test_the_plan_counts_the_build_of_an_environment_once() -> None:
    one = PlannedVariant(Variant("", "the incident itself", HERE), ask(HERE), cost=60, build=NEEDS)
    text = plan_text(one, [replace(one, variant=Variant("mode", f"mode {name}", HERE)) for name in "ab"])
    assert "mode a: its environment is to be built, then to run, about 660 s" in text
    assert "1 to build, about 10 min, 4.0 GB to download, 8 GB of disk at most" in text
    assert "estimated 13 min" in text


def test_environments_that_do_not_fit_on_the_disk_together_are_left_out() -> None:
    def planned(name: str, build: BuildNeeds | None = NEEDS) -> PlannedVariant:
        incident = HERE.model_copy(update={"environment": name})
        return PlannedVariant(Variant("release", name, incident), ask(incident), cost=60, build=build)

    base = planned("torch-2.9.0-cu128")
    others = [
        planned("torch-2.9.0-cu128"),
        planned("torch-2.8.0-cu128"),
        planned("torch-2.7.0-cu126"),
        planned("torch-2.13.0-cpu", None),
    ]
    kept = within_the_disk(base, others, 20 * 10**9)
    assert [bool(one.obstacle) for one in kept] == [False, False, True, False]
    assert kept[2].obstacle.startswith("no room for its environment: 20 GB are free and 24 would be taken")
    assert "2 to build" in plan_text(base, kept)
    assert not any(one.obstacle for one in within_the_disk(base, others, None))


@pytest.mark.parametrize(
    ("axes", "tried"), [(("--explain",), False), (("--explain", "all"), False), (("--explain", "release"), True)]
)
def test_other_releases_are_built_only_where_releases_are_named(
    axes: tuple[str, ...], tried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = {"torch-2.13.0-cpu", "torch-2.8.0-cu128"}
    monkeypatch.setattr(
        "toto_compat.runtimes.venv.VenvRuntime.lock_of", lambda _self, name, _env: "lock" if name in there else None
    )
    monkeypatch.setattr("toto_compat.runtimes.venv.VenvRuntime.obstacle", lambda *_: "")
    monkeypatch.setattr("toto_compat.repro.explain.free_disk", lambda _: 10**12)
    path = str(ROOT / "incidents" / "2025-10-30-recompile-limit.yaml")
    where = ["--runtime", "venv", "--device", "cpu", "--environment", "torch-2.13.0-cpu", "--dry-run"]
    run = CliRunner().invoke(repro_command, [path, *where, "--matrix", str(ROOT / "matrix.yaml"), *axes])
    assert run.exit_code == ExitCode.OK, run.output
    (other,) = (line for line in run.output.splitlines() if "environment torch-2.7.0-cu126" in line)
    assert ("to be built" in other) is tried and ("is not built" in other) is not tried
    (built,) = (line for line in run.output.splitlines() if "environment torch-2.8.0-cu128" in line)
    assert ": to run, about" in built


def test_productions_own_precision_is_among_those_that_are_tried() -> None:
    tried = [one.change for one in variants(HERE, ask(HERE), MATRIX, ("precision",))]
    assert tried == ["bfloat16", "float64", "bfloat16 autocast", "float16 autocast"]


def test_the_explanation_is_data_as_well() -> None:
    explanation = Explanation(BASE, (row("cache", "cache fixed_size", measured()),))
    assert json.loads(json.dumps(explanation_as_data(explanation)))["changes"][0]["ends"] is True
