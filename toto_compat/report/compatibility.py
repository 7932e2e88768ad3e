"""compatibility.json, .md and .html of a run: judged cells in, files out, each replaced in one step."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toto_compat.errors import StorageError
from toto_compat.evidence.schema import Figure
from toto_compat.evidence.store import Run, RunInfo, StoredCell, read_model, write_atomically
from toto_compat.report.table import markdown_table
from toto_compat.verdict.decision import Decision, DeviceDecision, decide, settings_to_copy
from toto_compat.verdict.gates import JudgedCell
from toto_compat.verdict.judged_run import JudgedRun, in_table_order

SCHEMA_VERSION = 1


def compatibility(cells: Sequence[JudgedCell], decision: Decision | None = None) -> dict[str, Any]:
    """The machine-readable table: {"schema", "rows", "decision"}."""
    decision = decision or decide(cells)
    return {
        "schema": SCHEMA_VERSION,
        "rows": [row(cell) for cell in in_table_order(cells)],
        "decision": decision_as_json(decision),
    }


def row(cell: JudgedCell) -> dict[str, Any]:
    request = cell.result.request
    return {
        "environment": request.environment_name,
        "torch": request.environment.torch,
        "device": request.device.value,
        "cache": request.cache.name,
        "mode": request.mode,
        "settings": request.settings_name,
        "verdict": cell.verdict.value,
        "decided_by": cell.decided_by.value if cell.decided_by else None,
        "gates": {
            gate.value: {
                "status": judged.status.value,
                "value": judged.value,
                "limit": judged.limit.model_dump(exclude_none=True),
                "kind": judged.kind.value if judged.kind else None,
                "reason": judged.reason,
            }
            for gate, judged in cell.gates.items()
        },
    }


def decision_as_json(decision: Decision) -> dict[str, Any]:
    return {
        "sentence": decision.sentence,
        "devices": {device.value: _device_as_json(found) for device, found in decision.devices.items()},
    }


def _device_as_json(found: DeviceDecision) -> dict[str, Any]:
    contender = found.contender
    return {
        "answer": found.answer.value,
        "sentence": found.sentence,
        "environments": list(found.environments),
        "cache": contender.cache if contender else None,
        "mode": contender.mode if contender else None,
        "settings": contender.settings if contender else None,
        "releases": contender.history.text if contender else None,
        "decided_by": found.decided_by.value if found.decided_by else None,
        "reason": found.reason,
        "take_cache_only": found.take_cache_only,
        "break_even_forecasts": {"cold": _value(found.break_even_cold), "warm": _value(found.break_even_warm)},
        "set": list(settings_to_copy(found)),
        "next": list(found.next_commands),
        "ranges": [
            {
                "cache": other.cache,
                "mode": other.mode,
                "settings": other.settings,
                "text": other.history.text,
                "good_since": other.history.good_since,
                "regressed_in": list(other.history.regressed_in),
                "undecided": list(other.history.undecided),
                "untried": list(other.history.untried),
            }
            for other in found.contenders
        ],
    }


def write_compatibility(run_folder: Path, cells: Sequence[JudgedCell]) -> Decision:
    """Write compatibility.json, .md and, for a stored run, .html into its folder; return the decision they carry."""
    ordered = in_table_order(cells)
    decision = decide(ordered)
    write_atomically(run_folder / "compatibility.json", as_json(compatibility(ordered, decision)))
    write_atomically(run_folder / "compatibility.md", markdown_table(ordered, decision))
    if (run_folder / "run.json").is_file():
        _write_page(run_folder, ordered, decision)
    return decision


def _write_page(run_folder: Path, cells: tuple[JudgedCell, ...], decision: Decision) -> None:
    # here and not above: matplotlib and jinja2 take longer to import than the rest of this takes to run
    from toto_compat.report.html import render_page
    from toto_compat.report.page_data import history_of

    info = read_model(run_folder / "run.json", RunInfo)
    gates = {gate: judged.limit for cell in cells for gate, judged in cell.gates.items()}
    stored = tuple(cell.result for cell in cells if isinstance(cell.result, StoredCell))
    judged = JudgedRun(run=Run(run_folder, info, stored), gates=gates, cells=cells, decision=decision)
    try:
        history = history_of(run_folder.parent, until=judged)
    except StorageError:
        history = {}  # damage in another run must not spoil this one; `toto-compat report` names the file
    write_atomically(run_folder / "compatibility.html", render_page(judged, history))


def as_json(document: Any) -> str:
    """Strict JSON: NaN and infinities become strings, since no other reader takes Python's bare words."""
    return json.dumps(_finite(document), indent=2, allow_nan=False) + "\n"


def _finite(document: Any) -> Any:
    match document:
        case dict():
            return {key: _finite(value) for key, value in document.items()}
        case list() | tuple():
            return [_finite(value) for value in document]
        case float() if math.isnan(document):
            return "NaN"
        case float() if math.isinf(document):
            return "Infinity" if document > 0 else "-Infinity"
        case _:
            return document


def _value(figure: Figure | None) -> float | None:
    return figure.value if figure else None
