"""The run as one HTML file: no network, works from disk, details made in the page when a cell is opened."""

import base64
import gzip
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import DictLoader, Environment, StrictUndefined
from packaging.version import Version

from toto_compat.contract.caches import CACHES
from toto_compat.contract.request import Device
from toto_compat.contract.result import Figure
from toto_compat.contract.suites import Suite
from toto_compat.evidence.files import write_atomically
from toto_compat.matrix.gates import Gate
from toto_compat.report.page_data import (
    PastRow,
    as_past_row,
    cell_details,
    cell_name,
    grid_of,
    history_of,
    provenance_facts,
    trend_points,
)
from toto_compat.report.plots import MOST_SERIES, Point, Series, distribution_frame, latency_frame, trend_plot
from toto_compat.report.record import ANSWERS, forecasts_text
from toto_compat.verdict.decision import Answer, Contender, DeviceDecision
from toto_compat.verdict.judge import JudgedCell, Status
from toto_compat.verdict.judged_run import JudgedRun
from toto_compat.verdict.verdict_rows import judged_rows, settings_to_copy

MARKS = {Status.PASS: "✔", Status.FAIL: "✘", Status.INCONCLUSIVE: "?"}
_ANSWER_MARKS = {
    Answer.ENABLE: "✔",
    Answer.ENABLE_WITH_SETTINGS: "✔",
    Answer.WORTH_A_PRODUCTION_CHECK: "▸",
    Answer.KEEP_OFF: "✘",
    Answer.NOT_ENOUGH_EVIDENCE: "?",
}


_TRENDS = (
    ("speedup", Suite.SPEED, Gate.SPEEDUP.value, "upstream eager / compiled (lower end)"),
    ("recompiles", Suite.RECOMPILE, Gate.RECOMPILES_TOTAL.value, "recompiles in total"),
    ("compile time", Suite.SPEED, "cold_compile_s", "cold compile, seconds"),
)

_MOST_ENVIRONMENTS = 4  # that a card names one by one
_MOST_RUNS = 12  # more do not fit beside each other

# The details of thousands of cells are megabytes that a browser would parse before it shows anything. Cells are much
# alike, so several in one pack compress well, and a pack of this many still unpacks in a few milliseconds.
_CELLS_PER_PACK = 50


def write_html(
    judged: JudgedRun, path: Path, *, results: Path | None = None, note: Callable[[str], None] = lambda _: None
) -> None:
    """Write the page. `results` is where other runs lie, for the history; None: no history."""
    history = history_of(results, until=judged, note=note) if results else {}
    write_atomically(path, render_page(judged, history))


def render_page(judged: JudgedRun, history: Mapping[str, Sequence[PastRow]]) -> str:
    page = {name: _asset(name) for name in ("page.html", "page.css", "page.js")}
    environment = Environment(loader=DictLoader(page), autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": True}
    provenances, numbers = _shared_provenances(judged.cells)
    info = judged.run.info

    def details(number: int) -> dict[str, Any]:
        cell = judged.cells[number]
        past = [*history.get(cell_name(cell), ()), as_past_row(cell, info)]
        return cell_details(cell, past, numbers[number], judged.run.folder)

    everything = range(len(judged.cells))
    packs = [everything[first : first + _CELLS_PER_PACK] for first in everything[::_CELLS_PER_PACK]]
    return environment.get_template("page.html").render(
        judged=judged,
        info=info,
        grid=grid_of(judged.cells),
        words=_words(judged.cells),
        decisions=[_decision_card(answer) for answer in judged.decision.devices.values()],
        counts={status: sum(cell.verdict is status for cell in judged.cells) for status in MARKS},
        marks=MARKS,
        cells_per_pack=_CELLS_PER_PACK,
        packs=[_packed([details(number) for number in pack]) for pack in packs],
        provenances=_packed(provenances),
        frames={"distribution": distribution_frame(), "latency": latency_frame()},
        trends=_trends(judged),
        run_history=_history_plot(judged, history),
        css=page["page.css"],
        script=page["page.js"],
        # scripts run by their hash alone: text that came out of a log could not run even if it were not escaped
        script_hash=_csp_hash(page["page.js"]),
    )


def _asset(name: str) -> str:
    return resources.files("toto_compat.report").joinpath("page", name).read_text(encoding="utf-8")


def _csp_hash(script: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _packed(document: Any) -> str:
    """Pack the document as the page unpacks it: JSON, compressed, in base64, which cannot end an element."""
    try:
        text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    except ValueError:  # NaN and infinities are rare: only then is the document walked through
        text = json.dumps(_plain(document), separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _plain(document: Any) -> Any:
    match document:
        case dict():
            return {str(key): _plain(value) for key, value in document.items()}
        case list() | tuple():
            return [_plain(value) for value in document]
        case float() if not math.isfinite(document):
            return str(document)
    return document


def _shared_provenances(cells: Sequence[JudgedCell]) -> tuple[list[dict[str, Any]], list[int]]:
    """List each distinct provenance once, and its number per cell: thousands of cells share a few."""
    known: dict[str, int] = {}
    held: list[dict[str, Any]] = []
    numbers = []
    for cell in cells:
        facts = provenance_facts(cell)
        key = json.dumps(facts, sort_keys=True)
        if key not in known:
            known[key] = len(held)
            held.append(facts)
        numbers.append(known[key])
    return held, numbers


def _decision_card(decided: DeviceDecision) -> dict[str, Any]:
    enabled = decided.answer in (Answer.ENABLE, Answer.ENABLE_WITH_SETTINGS)
    undecided = (Answer.NOT_ENOUGH_EVIDENCE, Answer.WORTH_A_PRODUCTION_CHECK)
    tone = "FAIL" if decided.answer is Answer.KEEP_OFF else "INCONCLUSIVE" if decided.answer in undecided else "PASS"
    return {
        "device": "CUDA" if decided.device is Device.CUDA else "CPU",
        "answer": ANSWERS[decided.answer],
        "mark": _ANSWER_MARKS[decided.answer],
        "tone": tone,
        "sentence": decided.sentence,
        "why": decided.reason,
        "decided_by": decided.decided_by.value if decided.decided_by else "",
        "name": decided.contender.name if decided.contender else "",
        "releases": decided.contender.history.text if decided.contender else "",
        "environments": _listed(decided.environments),
        "break_even": (
            f"{forecasts_text(decided.break_even_cold)} from a cold start, "
            f"{forecasts_text(decided.break_even_warm)} from a warm one"
        )
        if enabled
        else "",
        "settings": "\n".join(settings_to_copy(decided)),
        "effect": _effect(decided),
        "next": list(decided.next_commands[:8]),
        "more": max(0, len(decided.next_commands) - 8),
        "contenders": decided.contenders,
    }


def _listed(environments: Sequence[str]) -> str:
    """Name a few; of many, which the grid has in its columns, the first and the last."""
    if len(environments) <= _MOST_ENVIRONMENTS:
        return ", ".join(environments)
    return f"{len(environments)} environments, {environments[0]} to {environments[-1]}"


def _effect(decided: DeviceDecision) -> str:
    """Say in words what the lines to copy do."""
    rows = judged_rows(decided)
    if not rows:
        return "compile stays off"
    return "the cache alone, nothing compiled" if rows[0].mode is None else "compile on"


def _words(cells: Sequence[JudgedCell]) -> dict[str, dict[str, str]]:
    """Explain the words of this page: its verdicts, the built-in caches of its rows, the gates that judged them."""
    builtin = {cell.result.cell.cache for cell in cells if cell.result.request.cache.source == "builtin"}
    judged_by = {gate for cell in cells for gate in cell.gates}
    return {
        "Verdicts": {
            Status.PASS.value: "Every gate that applies was measured and held.",
            Status.FAIL.value: "A gate was measured and did not hold; the first such gate is named.",
            Status.INCONCLUSIVE.value: "Something was not measured, or too little of it to tell.",
        },
        "Caches": {name: cache.description for name, cache in CACHES.items() if name in builtin},
        "Gates, in the order in which they decide": {
            gate.value: gate.rule.meaning for gate in Gate if gate in judged_by
        },
    }


def _trends(judged: JudgedRun) -> list[dict[str, str]]:
    """Plot speedup, recompiles and compile time over the releases, per device, where there are at least two."""
    plots = []
    for device, answer in judged.decision.devices.items():
        releases = sorted(
            {cell.result.request.environment.torch for c in answer.contenders for cell in c.cells}, key=Version
        )
        if len(releases) < 2:
            continue
        for title, suite, name, y_label in _TRENDS:
            limit = judged.gates.get(Gate(name)) if name in set(Gate) else None
            series = _series(answer.contenders, suite, name)
            if series:
                bound = None if limit is None else limit.min if limit.min is not None else limit.max
                label = f"{title} over PyTorch releases on {device.value}"
                prefix = f"{device.value}-{name}"
                svg = trend_plot(series, order=releases, y_label=y_label, label=label, limit=bound, prefix=prefix)
                plots.append(
                    {"title": f"{device.value.upper()}: {title}", "svg": svg, "note": _left_out(answer, series)}
                )
    return plots


def _series(contenders: Sequence[Contender], suite: Suite, name: str) -> list[Series]:
    # with more contenders than colours, those that passed somewhere and were tried on most releases come first
    ordered = sorted(contenders, key=lambda contender: (contender.newest_pass is None, -len(contender.cells)))
    lines = [Series(contender.name, _points(trend_points(contender, suite, name))) for contender in ordered]
    return [line for line in lines if line.points][:MOST_SERIES]


def _points(figures: Sequence[tuple[str, Figure]]) -> tuple[Point, ...]:
    return tuple(
        Point(release, figure.value, figure.low, figure.high)
        for release, figure in figures
        if figure.value is not None and math.isfinite(figure.value)
    )


def _left_out(answer: DeviceDecision, series: Sequence[Series]) -> str:
    missing = len(answer.contenders) - len(series)
    return f"{missing} more without figures, or beyond the {MOST_SERIES} with the most releases." if missing else ""


def _history_plot(judged: JudgedRun, history: Mapping[str, Sequence[PastRow]]) -> str:
    """Plot the speedup of this run's cells over the runs that had them; cells that pass come first."""
    lines: list[tuple[str, list[PastRow]]] = []
    for cell in sorted(judged.cells, key=lambda cell: cell.verdict is not Status.PASS):
        past = [*history.get(cell_name(cell), ()), as_past_row(cell, judged.run.info)]
        timed = [row for row in past if row.speedup is not None and math.isfinite(row.speedup)]
        if len(timed) > 1:
            lines.append((cell.result.cell, timed))
    chosen = lines[:MOST_SERIES]
    runs = sorted({(row.date, row.run) for _, timed in chosen for row in timed})[-_MOST_RUNS:]
    if not runs:
        return ""
    labels = _run_labels(runs)
    series = [
        Series(name, tuple(Point(labels[row.run], row.speedup or 0.0) for row in timed if row.run in labels))
        for name, timed in chosen
    ]
    order = list(labels.values())
    return trend_plot(
        series, order=order, y_label="upstream eager / compiled", label="Speedup over runs", prefix="history"
    )


def _run_labels(runs: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Label runs by their date, numbered where a day had several."""
    labels: dict[str, str] = {}
    for date, run in runs:
        number = 1 + sum(label.partition(" ")[0] == date for label in labels.values())
        labels[run] = date if number == 1 else f"{date} #{number}"
    return labels
