"""The bundle: complete, readable by the project's own commands, escaped, and published only if a GPU made it."""

import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.gpu_cells import MatrixOfThisMachine, checked, sabotaged
from tests.runtimes.nvidia import smi
from tests.runtimes.stub_runtime import StubRuntime
from tests.verdict.stored_runs import stored
from toto_compat.acceptance import command, sabotages
from toto_compat.acceptance.bundle import (
    AcceptanceReport,
    as_markdown,
    as_page,
    publish_bundle,
    why_not_publishable,
    without_places,
)
from toto_compat.acceptance.campaign import About, Campaign, Ended, StepName, StepRecord
from toto_compat.acceptance.claims import Claim
from toto_compat.acceptance.command import Wanted, accept
from toto_compat.errors import RefusedError, StorageError
from toto_compat.evidence.store import find_run, load_run, write_cell
from toto_compat.runtimes.doctor import Finding, State

MATRIX = Path(__file__).parents[2] / "matrix.yaml"


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TOTO_COMPAT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(command, "examine", lambda _matrix: iter(()))
    monkeypatch.setattr(command, "open_runtime", lambda *_, **__: StubRuntime())
    smi.install(tmp_path, monkeypatch, smi.ONE)
    yield
    smi.forget()


def bundle_of(results: Path, *, rehearse: bool = False) -> Path:
    wanted = Wanted(results, MATRIX, rehearse=rehearse)
    accept(wanted, MatrixOfThisMachine())
    return wanted.folder / "bundle"


def test_it_holds_evidence_environments_logs_pages_and_every_run(tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path / "results")
    there = {path.name for path in bundle.iterdir()}
    assert {"run.json", "cells", "acceptance.json", "acceptance.md", "acceptance.html", "logs"} <= there
    assert {"lowering", "device", "sabotaged_leaking_mask", "environments.json", "doctor.json"} <= there
    environments = json.loads((bundle / "environments.json").read_bytes())
    assert set(environments) == {"torch-2.9.0-cu128", "torch-2.15.0-cu132"}
    assert {"torch", "packages", "base_digest", "driver"} <= set(environments["torch-2.9.0-cu128"])
    [log] = (bundle / "logs" / "device").rglob("*.log")
    assert "cache in ~/.cache" in log.read_text(encoding="utf-8")
    assert "latest" not in there
    assert not (bundle / "logs" / "latest").exists()


def test_a_gpus_bundle_is_published_and_is_a_run_that_the_reports_read(tmp_path: Path) -> None:
    results = tmp_path / "results"
    bundle = bundle_of(results)
    assert list(why_not_publishable(bundle)) == []
    published = publish_bundle(bundle, results)
    assert find_run("reference/cuda", results) == published.resolve()
    assert load_run(published).info.name == "cuda"
    assert publish_bundle(bundle, results) == published  # again, over the old one


def test_a_rehearsal_whose_label_was_taken_off_is_still_refused(tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path / "results", rehearse=True)
    file = bundle / "acceptance.json"
    document = json.loads(file.read_bytes())
    document["rehearsal"] = document["campaign"]["about"]["rehearsal"] = False
    document["warning"] = ""
    file.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(RefusedError, match="it was not asked to run on a GPU"):
        publish_bundle(bundle, tmp_path / "results")


def test_a_cell_that_asked_for_cuda_and_saw_no_gpu_is_refused(tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path / "results")
    run = load_run(bundle)
    cell = checked(str(run.cells[0].cell))
    blind = cell.model_copy(update={"provenance": cell.provenance.model_copy(update={"gpu": None})})
    write_cell(bundle, stored(blind, "2026-11-17T12:00:00Z"))
    assert any("it saw no GPU" in why for why in why_not_publishable(bundle))


def test_a_bundle_with_a_step_or_a_cell_missing_is_refused(tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path / "results")
    next((bundle / "device" / "cells").rglob("*.json")).unlink()
    document = json.loads((bundle / "acceptance.json").read_bytes())
    del document["campaign"]["steps"]["sabotages"]
    (bundle / "acceptance.json").write_text(json.dumps(document), encoding="utf-8")
    reasons = list(why_not_publishable(bundle))
    assert any("not every step" in why for why in reasons)
    assert any("cells without a result" in why for why in reasons)


def test_one_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path / "results")
    shutil.rmtree(bundle / "sabotaged_slow")
    assert list(why_not_publishable(bundle)) == ["the run sabotaged_slow is missing"]
    (bundle / "acceptance.json").unlink()
    with pytest.raises(RefusedError, match=r"acceptance\.json is missing"):
        publish_bundle(bundle, tmp_path / "results")


def test_a_sabotage_that_no_gpu_ran_is_refused(tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path / "results")
    name = f"torch-2.9.0-cu128/{sabotages.ALL[0].cache}/reduce-overhead"
    cell = sabotaged(name)
    blind = cell.model_copy(update={"provenance": cell.provenance.model_copy(update={"gpu": None})})
    write_cell(bundle / sabotages.ALL[0].cache, stored(blind, "2026-11-17T12:00:00Z"))
    reasons = list(why_not_publishable(bundle))
    assert f"{name}: it saw no GPU" in reasons
    assert any("is told as held, by its runs it is not shown" in why for why in reasons)


@pytest.mark.parametrize("change", ["ended", "removed", "invented"])
def test_claims_that_its_own_runs_do_not_bear_out_are_refused(change: str, tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path / "results")
    document = json.loads((bundle / "acceptance.json").read_bytes())
    first, *others = document["claims"]
    claims = {
        "ended": [{**first, "ended": "broken"}, *others],
        "removed": others,
        "invented": [*document["claims"], {**first, "claim": "it is ten times as fast"}],
    }
    document["claims"] = claims[change]
    (bundle / "acceptance.json").write_text(json.dumps(document), encoding="utf-8")
    [why] = why_not_publishable(bundle)
    told = {"ended": "is told as broken, by its runs it is held", "removed": "is told as not there"}
    assert told.get(change, "by its runs it is not there") in why


def test_a_limit_that_was_taken_out_of_a_bundle_is_noticed(tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path / "results")
    run = json.loads((bundle / "run.json").read_bytes())
    del run["gates"]["equivalence"]
    (bundle / "run.json").write_text(json.dumps(run), encoding="utf-8")
    assert any("forecasts as eager" in why for why in why_not_publishable(bundle))


def test_a_step_that_its_own_runs_do_not_bear_out_is_refused(tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path / "results")
    document = json.loads((bundle / "acceptance.json").read_bytes())
    document["campaign"]["steps"]["production-check"]["ended"] = "broken"
    (bundle / "acceptance.json").write_text(json.dumps(document), encoding="utf-8")
    assert list(why_not_publishable(bundle)) == [
        "the step 'production-check' is told as broken, by its runs it is held"
    ]


def test_what_is_published_tells_what_its_runs_say_whatever_the_bundles_texts_do(tmp_path: Path) -> None:
    results = tmp_path / "results"
    bundle = bundle_of(results)
    document = json.loads((bundle / "acceptance.json").read_bytes())
    document["campaign"]["steps"]["production-check"]["lines"] = ["ten times as fast"]
    document["claims"][0]["found"] = "ten times as fast"
    (bundle / "acceptance.json").write_text(json.dumps(document), encoding="utf-8")
    for page in ("acceptance.md", "acceptance.html"):
        (bundle / page).write_text("ten times as fast", encoding="utf-8")
    published = publish_bundle(bundle, results)
    for page in ("acceptance.json", "acceptance.md", "acceptance.html"):
        text = (published / page).read_text(encoding="utf-8")
        assert "ten times as fast" not in text
        assert "torch-2.9.0-cu128/fixed_size/reduce-overhead: PASS" in text


@pytest.mark.parametrize("what", ["a link to a file", "a link to a folder", "a pipe", "a program"])
def test_a_bundle_that_holds_something_else_is_refused_and_nothing_of_it_is_copied(what: str, tmp_path: Path) -> None:
    results = tmp_path / "results"
    bundle = bundle_of(results)
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "key.log").write_text("secret", encoding="utf-8")
    there = bundle / "logs" / ("x.so" if what == "a program" else "x.log")
    match what:
        case "a link to a file":
            there.symlink_to(tmp_path / "private" / "key.log")
        case "a link to a folder":
            there.symlink_to(tmp_path / "private")
        case "a pipe":
            os.mkfifo(there)
        case _:
            there.write_bytes(b"ELF")
    with pytest.raises(RefusedError, match=rf"it holds what no bundle does: logs/{there.name}"):
        publish_bundle(bundle, results)
    assert not (results / "reference").exists()


@pytest.mark.parametrize("there", ["a file", "a link", "half of one"])
def test_a_bundle_takes_the_place_of_whatever_is_there(there: str, tmp_path: Path) -> None:
    results = tmp_path / "results"
    bundle = bundle_of(results)
    shutil.rmtree(bundle)
    if there == "a file":
        bundle.write_text("x", encoding="utf-8")
    elif there == "a link":
        (tmp_path / "elsewhere").mkdir()
        bundle.symlink_to(tmp_path / "elsewhere")
    else:
        (bundle.parent / ".bundle" / "device").mkdir(parents=True)
        (bundle.parent / ".bundle" / "device" / "run.json").write_text("{", encoding="utf-8")
    assert list(why_not_publishable(bundle_of(results))) == []
    assert not (bundle.parent / ".bundle").exists()
    assert not list(tmp_path.glob("elsewhere/*"))


def test_what_is_published_is_there_whole_or_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = tmp_path / "results"
    bundle = bundle_of(results)
    published = publish_bundle(bundle, results)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copytree", full)
    with pytest.raises(StorageError, match="No space left"):
        publish_bundle(bundle, results)
    assert list(why_not_publishable(published)) == []


@pytest.mark.parametrize("home", ["/", "/home/somebody", "/root"])
def test_no_folder_of_the_machine_is_in_what_is_committed(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", home)
    monkeypatch.setenv("TOTO_COMPAT_CACHE", "/srv/cache-of-somebody")
    text = f"a/b {home}/x /srv/cache-of-somebody/venvs '/srv/results/gpu-acceptance/device' /rootfs"
    told = without_places(text, Path("/srv/results/gpu-acceptance"))
    assert told == f"a/b {'//x' if home == '/' else '~/x'} cache/venvs 'acceptance/device' /rootfs"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (r'{"message": "it failed:\n/home/somebody/x\t/home/somebody"}', r'{"message": "it failed:\n~/x\t~"}'),
        ("no room in /home/somebody. Nor in /home/somebody.", "no room in ~. Nor in ~."),
        ("/home/somebody.old /home/somebody-else /mnt/home/somebody", None),
    ],
)
def test_a_folder_is_told_from_what_stands_around_it(
    text: str, told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert without_places(text, Path("/srv/results/gpu-acceptance")) == (text if told is None else told)


def test_the_users_folder_is_in_no_file_of_a_bundle_also_where_something_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/josé")
    found = Finding("wheels", State.MISSING, "no room in /home/josé/.cache")
    monkeypatch.setattr(command, "examine", lambda _matrix: iter((found,)))
    wanted = Wanted(tmp_path / "results", MATRIX)
    accept(wanted, MatrixOfThisMachine(cannot_run="production-check"))
    files = [path for path in (wanted.folder / "bundle").rglob("*") if path.is_file()]
    telling = {path.name: text for path in files if "~/" in (text := path.read_text(encoding="utf-8"))}
    assert {"acceptance.json", "acceptance.md", "acceptance.html", "doctor.json"} <= set(telling)
    assert not [path for path in files if "/home/jos" in path.read_text(encoding="utf-8")]


def test_what_a_log_or_torch_said_is_escaped_in_both_pages() -> None:
    hostile = "<script>alert(1)</script> | `x`\nsecond line"
    claim = Claim(claim=hostile, predicted=hostile, by="b", found=hostile, ended=Ended.BROKEN)
    about = About(rehearsal=False, environments=("torch-2.9.0-cu128",), source_hash="a", matrix_hash="b")
    steps = {StepName.PROBE: StepRecord(ended=Ended.HELD, lines=(hostile,))}
    campaign = Campaign(about=about, started="2026-11-17T12:00:00Z", steps=steps, left_out={"e": hostile})
    report = AcceptanceReport(rehearsal=False, campaign=campaign, claims=(claim,))
    for text in (as_markdown(report), as_page(report)):
        assert "<script>" not in text
        assert "&lt;script&gt;" in text
    row = next(line for line in as_markdown(report).splitlines() if line.startswith("| broken"))
    assert "second line" in row
