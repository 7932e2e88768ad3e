"""The page as a file: self-contained, everything from logs escaped, the same bytes for the same evidence."""

import base64
import gzip
import json
import re
import shlex
import subprocess
import sys
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from tests.report.hostile import HOSTILE, hostile_cell
from tests.verdict.sample_cells import good_result, production_incident, with_figures, with_suite
from tests.verdict.stored_runs import store_run
from toto_compat.contract.caches import CACHES
from toto_compat.contract.events import Event, EventKind, Severity
from toto_compat.contract.request import Device
from toto_compat.contract.result import CellResult
from toto_compat.contract.suites import Suite
from toto_compat.evidence.store import load_run
from toto_compat.matrix.gates import Gate
from toto_compat.report.command import report_command
from toto_compat.report.html import render_page
from toto_compat.report.page_data import grid_of, grouped_events, history_of, trend_points
from toto_compat.verdict.decision import contenders_of
from toto_compat.verdict.judged_run import judge_run

ROOT = Path(__file__).parents[2]


class Elements(HTMLParser):
    """Start tags with their attributes, as a browser would see them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def page_of(folder: Path, *results: CellResult) -> str:
    judged = judge_run(load_run(store_run(folder, "run", results)))
    return render_page(judged, {})


def test_nothing_is_loaded_from_elsewhere(tmp_path: Path) -> None:
    elements = Elements(page_of(tmp_path, good_result(), good_result(torch="2.9.0")))
    for tag, attributes in elements.found:
        for name in ("src", "href", "xlink:href", "action", "data"):
            value = attributes.get(name)
            assert value is None or value.startswith("#"), (tag, name, value)
    assert not [tag for tag, _ in elements.found if tag in ("link", "iframe", "object", "embed")]


def test_hostile_text_makes_no_elements(tmp_path: Path) -> None:
    clean = Elements(page_of(tmp_path / "clean", production_incident()))
    dirty = Elements(page_of(tmp_path / "dirty", hostile_cell()))
    assert "alert" in HOSTILE
    assert [tag for tag, _ in dirty.found].count("script") == [tag for tag, _ in clean.found].count("script")
    assert not [tag for tag, attributes in dirty.found if any(name.startswith("on") for name in attributes)]


def details_of(page: str) -> dict[str, Any]:
    """The data of the first cell, read as strictly as a browser reads it."""
    found = re.search(r'<script type="application/octet-stream" id="pack-0">(.*?)</script>', page, re.DOTALL)
    assert found
    text = gzip.decompress(base64.b64decode(found.group(1)))

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    details: dict[str, Any] = json.loads(text, parse_constant=refuse)[0]
    return details


def test_embedded_data_reads_back_as_it_was(tmp_path: Path) -> None:
    assert any(event["reason"] == HOSTILE for event in details_of(page_of(tmp_path, hostile_cell()))["events"])


def test_the_page_explains_its_verdicts_caches_and_gates(tmp_path: Path) -> None:
    page = page_of(tmp_path, production_incident(), good_result())
    words = unescape(page[page.index('id="words"') :].partition("</details>")[0])
    assert CACHES["list_index"].description in words
    assert CACHES["fixed_size"].description in words
    assert CACHES["upstream"].description not in words  # no row of it is shown
    assert Gate.RECOMPILE_LIMIT.rule.meaning in words
    assert "INCONCLUSIVE" in words


def test_a_cache_of_the_users_own_is_not_explained_as_a_built_in_one(tmp_path: Path) -> None:
    result = good_result()
    cache = result.request.cache.model_copy(update={"source": "mine.py:Mine"})
    own = result.model_copy(update={"request": result.request.model_copy(update={"cache": cache})})
    assert CACHES["fixed_size"].description not in page_of(tmp_path, own)


def test_the_lines_to_copy_say_what_they_do(tmp_path: Path) -> None:
    assert "Set in production: compile stays off" in page_of(tmp_path, production_incident())


def test_the_same_evidence_gives_the_same_page(tmp_path: Path) -> None:
    results = [good_result(torch="2.9.0"), good_result(torch="2.10.0"), production_incident()]
    assert page_of(tmp_path / "a", *results) == page_of(tmp_path / "b", *results)


def test_figures_that_are_not_numbers_do_not_break_the_page(tmp_path: Path) -> None:
    broken = with_figures(good_result(), {Gate.EQUIVALENCE: float("nan"), Gate.SPEEDUP: float("inf")})
    details = details_of(page_of(tmp_path, broken))
    shown = {gate["gate"]: gate["value"] for gate in details["gates"]}
    assert (shown["equivalence"], shown["speedup"]) == ("nan", "inf")
    assert details["history"][0][3] == "inf"


def test_a_speedup_that_is_not_finite_is_left_out_of_the_history(tmp_path: Path) -> None:
    for day in (1, 2):
        store_run(tmp_path, f"earlier-{day}", [good_result()], started=f"2026-01-0{day}T00:00:00Z")
    endless = with_figures(good_result(), {Gate.SPEEDUP: float("inf")})
    store_run(tmp_path, "endless", [endless], started="2026-01-03T00:00:00Z")
    current = judge_run(load_run(store_run(tmp_path, "now", [endless], started="2026-02-01T00:00:00Z")))
    page = render_page(current, history_of(tmp_path, until=current))
    history = page[page.index("History: speedup over runs") :]
    assert "2026-01-01" in history and "2026-01-02" in history
    assert "2026-01-03" not in history and "2026-02-01" not in history


def test_a_history_of_one_finite_speedup_is_no_history(tmp_path: Path) -> None:
    store_run(tmp_path, "earlier", [good_result()], started="2026-01-01T00:00:00Z")
    endless = with_figures(good_result(), {Gate.SPEEDUP: float("inf")})
    current = judge_run(load_run(store_run(tmp_path, "now", [endless], started="2026-02-01T00:00:00Z")))
    assert "History: speedup over runs" not in render_page(current, history_of(tmp_path, until=current))


def test_a_damaged_table_is_left_out_and_written_anew_by_the_command_that_is_named(tmp_path: Path) -> None:
    damaged = store_run(tmp_path / "results", "damaged run", [good_result()])
    (damaged / "compatibility.json").write_text("{", encoding="utf-8")
    current = judge_run(load_run(store_run(tmp_path / "results", "now", [good_result()])))
    told: list[str] = []
    assert not history_of(tmp_path / "results", until=current, note=told.append)
    (note,) = told
    program, subcommand, *arguments = shlex.split(note.partition("write it anew: ")[2])
    assert (program, subcommand) == ("toto-compat", "report")
    CliRunner().invoke(report_command, arguments, catch_exceptions=False)
    assert history_of(tmp_path / "results", until=current)


def test_the_grid_has_releases_across_and_caches_with_modes_down(tmp_path: Path) -> None:
    results = [
        good_result(torch="2.10.0", build="cu128"),
        good_result(torch="2.9.0", build="cu128"),
        good_result(torch="2.9.0", build="cu128", mode="max-autotune"),
        good_result(),
    ]
    grid = grid_of(judge_run(load_run(store_run(tmp_path, "run", results))).cells)
    assert [(column.torch, column.device) for column in grid.columns] == [
        ("2.13.0", "cpu"),
        ("2.10.0", "cuda"),
        ("2.9.0", "cuda"),
    ]
    assert [row.mode for row in grid.rows] == ["default", "max-autotune"]
    assert [found is not None for found in grid.rows[1].cells] == [False, False, True]


def test_recompile_reasons_are_grouped_and_counted_with_their_source_line() -> None:
    groups = grouped_events(production_incident().evidence[Suite.RECOMPILE].events)
    first = groups[0]
    assert (first["kind"], first["count"], first["where"]) == ("recompile", 8, "toto/model/attention.py:105")
    assert first["reason"] == "kv_cache._current_idx[N] == N"


def test_a_skip_that_names_its_mutated_inputs_counts_once() -> None:
    skip = Event(kind=EventKind.CUDAGRAPH_SKIP, severity=Severity.WARNING, reason="mutated inputs", count=8)
    assert grouped_events([skip, skip])[0]["count"] == 2


def test_events_beyond_the_kept_ones_are_told(tmp_path: Path) -> None:
    result = production_incident()
    recompile = result.evidence[Suite.RECOMPILE].model_copy(update={"details": {"events_seen": 500}})
    details = details_of(page_of(tmp_path, with_suite(result, Suite.RECOMPILE, recompile)))
    assert details["eventsNotKept"] == 500 - len(recompile.events)


def test_history_comes_from_the_other_runs_oldest_first(tmp_path: Path) -> None:
    store_run(tmp_path, "b-old", [good_result()], started="2026-01-01T00:00:00Z")
    store_run(tmp_path, "a-newer", [good_result()], started="2026-02-01T00:00:00Z")
    current = judge_run(load_run(store_run(tmp_path, "now", [good_result()], started="2026-03-01T00:00:00Z")))
    past = history_of(tmp_path, until=current)
    assert [row.run for row in past["cpu/torch-2.13.0-cpu/fixed_size/default"]] == ["b-old", "a-newer"]
    assert "History: speedup over runs" in render_page(current, past)


def test_trends_hold_measured_figures_along_the_releases(tmp_path: Path) -> None:
    results = [good_result(torch=torch) for torch in ("2.11.0", "2.9.0")]
    cells = judge_run(load_run(store_run(tmp_path, "run", results))).cells
    contender = contenders_of(Device.CPU, cells)[0]
    assert [release for release, _ in trend_points(contender, Suite.SPEED, "speedup")] == ["2.9.0", "2.11.0"]
    # break-even is computed, not measured: it is no trend
    assert trend_points(contender, Suite.SPEED, "break_even_cold") == []


def test_two_thousand_cells_render_within_half_a_gigabyte(tmp_path: Path) -> None:
    results = [
        (production_incident if number % 2 else good_result)(
            torch=f"2.{number // 40}.0",
            mode=("default", "reduce-overhead")[number // 2 % 2],
            settings_name=f"s{number % 40}",
        )
        for number in range(2000)
    ]
    store_run(tmp_path, "years", results)
    # asked of the process itself: what its parent counts of it begins with the parent's own size
    peak = "print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1], file=sys.stderr)"
    program = f"import atexit, re, sys; atexit.register(lambda: {peak}); from toto_compat.cli import main; main()"
    command = [sys.executable, "-c", program, "report", "years", "--results", str(tmp_path), "--format", "html"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=True)
    assert int(done.stderr.splitlines()[-1]) < 500 * 1024
    assert (tmp_path / "years" / "compatibility.html").stat().st_size < 30_000_000
