"""A verdict speaks for what it was judged on, until its review date, and for nothing else."""

import json
import os
import shutil
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.production.judged_files import TODAY, row, verdict, write_verdict
from tests.verdict.sample_cells import good_result, provenance
from tests.verdict.stored_runs import judged_run
from toto_compat.contract.request import Device
from toto_compat.contract.source_hash import PACKAGE, hash_contents, read_source
from toto_compat.errors import InputError
from toto_compat.verdict.verdict_file import Installed, Verdict, permission, read_verdict
from toto_compat.verdict.verdict_rows import verdict_of

GPU = Installed(
    device=Device.CUDA,
    torch="2.9.0+cu128",
    toto_ts="0.2.0",
    xformers=None,
    gpu="NVIDIA GeForce RTX 5090",
    source_hash="0a1b2c3d",
)
DAY = date(2026, 11, 17)


def of_gpu(*modes: str) -> Verdict:
    cells = [good_result(torch="2.9.0", build="cu128", mode=mode) for mode in modes or ("reduce-overhead",)]
    return Verdict.model_validate_json(verdict_of(judged_run(*cells)).model_dump_json(by_alias=True))


def test_a_row_is_allowed_on_what_it_was_judged_on() -> None:
    found = permission(of_gpu(), GPU, today=DAY)
    assert found.row is not None
    assert (found.row.cache, found.row.mode) == ("fixed_size", "reduce-overhead")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"torch": "2.9.1+cu128"}, "torch here is 2.9.1+cu128, judged was 2.9.0+cu128"),
        ({"torch": "2.9.0+cu126"}, "torch here is"),
        ({"torch": "2.9.0"}, "torch here is"),
        ({"gpu": "NVIDIA GeForce RTX 3090 Ti"}, "GPU here is NVIDIA GeForce RTX 3090 Ti"),
        ({"gpu": None}, "GPU here is none"),
        ({"toto_ts": "0.1.4"}, "toto-ts here is 0.1.4"),
        ({"xformers": "0.0.33"}, "xformers here is 0.0.33, judged was none"),
        ({"source_hash": "f" * 64}, "the code of the cache and its model differs"),
        ({"source_hash": ""}, "the code of the cache"),
        ({"torch": ""}, "torch is not installed here"),
        ({"device": Device.CPU, "gpu": None}, "allows nothing on cpu"),
    ],
    ids=str,
)
def test_anything_else_is_refused_and_named(change: dict[str, Any], said: str) -> None:
    found = permission(of_gpu(), replace(GPU, **change), today=DAY)
    assert found.row is None
    assert said in found.why


def test_the_review_date_is_the_last_day() -> None:
    judged = of_gpu()
    last = date.fromisoformat(judged.review_by)
    assert permission(judged, GPU, today=last).row is not None
    found = permission(judged, GPU, today=last + timedelta(days=1))
    assert found.row is None and "was to be reviewed by" in found.why


def test_a_verdict_from_the_future_is_refused() -> None:
    assert "in the future" in permission(of_gpu(), GPU, today=date(2026, 1, 1)).why


def test_a_mode_must_have_been_judged() -> None:
    judged = of_gpu("default", "reduce-overhead")
    chosen = permission(judged, GPU, today=DAY, mode="default").row
    assert chosen is not None and chosen.mode == "default"
    assert "mode max-autotune was not judged PASS here" in permission(judged, GPU, today=DAY, mode="max-autotune").why
    assert "backend eager was not judged" in permission(judged, GPU, today=DAY, backend="eager").why


def test_a_row_without_a_source_hash_speaks_for_no_code() -> None:
    result = good_result(torch="2.9.0", build="cu128")
    nameless = result.model_copy(update={"provenance": provenance(result.request, source_hash="")})
    assert permission(verdict_of(judged_run(nameless)), GPU, today=DAY).row is None


def test_a_run_that_enables_nothing_allows_nothing() -> None:
    judged = verdict_of(judged_run(good_result()))
    assert judged.devices[Device.CUDA].rows == ()
    assert "not_enough_evidence" in permission(judged, GPU, today=DAY).why


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not JSON"),
        (b"\x00\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "no verdict"),
        (b"null", "no verdict"),
        (b'{"schema": 2}', "of schema 2"),
        (b'{"schema": "1"}', "of schema '1'"),
        (b'{"schema": 1}', "Field required"),
        (b" " * 1_000_001, "larger than any verdict"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_what_is_no_verdict_is_named_and_not_believed(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "verdict.json"
    path.write_bytes(content)
    with pytest.raises(InputError) as raised:
        read_verdict(path)
    assert said in raised.value.message and str(path) in raised.value.message


@pytest.mark.parametrize(
    "changes",
    [
        {"review_by": "9999-12-31"},
        {"review_by": "2026-13-01"},
        {"review_by": "2020-01-01"},
        {"judged": "yesterday"},
        {"more": 1},
        {"devices": {"tpu": {}}},
    ],
    ids=str,
)
def test_a_verdict_that_was_tampered_with_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        read_verdict(write_verdict(tmp_path, row(), **changes))


@pytest.mark.parametrize("name", ["", "x\nexport LD_PRELOAD=y", "$(x)", "a b", "../x"], ids=repr)
def test_a_cache_that_is_no_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="cache"):
        read_verdict(write_verdict(tmp_path, row(cache=name)))


@pytest.mark.parametrize("kind", ["missing", "folder", "fifo"])
def test_what_cannot_be_read_is_an_error_and_no_hang(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "verdict.json"
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    with pytest.raises(InputError):
        read_verdict(path)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(
                st.sampled_from(["schema", "run", "judged", "devices", "cpu", "rows", "review_by"]), inner
            )
        ),
    )
)
def test_no_document_crashes_the_reader(tmp_path_factory: pytest.TempPathFactory, document: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(InputError):
        read_verdict(path)


def test_the_honest_twin_is_read(tmp_path: Path) -> None:
    read = read_verdict(write_verdict(tmp_path, row()))
    assert read.run == "nightly"
    assert "90 days left" in read.age_text(TODAY)
    assert "past its review date since 1 days" in read.age_text(TODAY + timedelta(days=91))
    assert verdict(row())["devices"]["cpu"]["rows"][0]["cell"] == read.devices[Device.CPU].rows[0].cell


def test_an_edited_model_is_other_code(tmp_path: Path) -> None:
    copied = tmp_path / PACKAGE.name
    shutil.copytree(PACKAGE, copied)
    assert hash_contents(read_source(copied)) == hash_contents(read_source())
    with (copied / "caches" / "fixed_size.py").open("a", encoding="utf-8") as file:
        file.write("\n")
    assert hash_contents(read_source(copied)) != hash_contents(read_source())
