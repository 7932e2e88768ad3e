"""compatibility.json of a judged run: the machine-readable table and decision."""

import json
import math
from dataclasses import asdict
from typing import Any

from toto_compat.contract.result import Figure
from toto_compat.report.symbols import symbol_rows
from toto_compat.verdict.decision import Decision, DeviceDecision
from toto_compat.verdict.judge import JudgedCell, draws_of
from toto_compat.verdict.judged_run import JudgedRun
from toto_compat.verdict.verdict_rows import settings_to_copy

SCHEMA_VERSION = 1


def compatibility(judged: JudgedRun) -> dict[str, Any]:
    """Make the machine-readable table: {"schema", "rows", "decision"}."""
    return {
        "schema": SCHEMA_VERSION,
        "rows": [row(cell) for cell in judged.cells],
        "decision": decision_as_json(judged.decision),
    }


def row(cell: JudgedCell) -> dict[str, Any]:
    name, request = cell.result.cell, cell.result.request
    return {
        "environment": name.environment,
        "torch": request.environment.torch,
        "device": request.speaks_of.value,
        "cache": name.cache,
        "mode": name.mode,
        "settings": name.settings,
        "cell": str(name),
        "workload": request.workload_name,
        "precision": request.workload.precision,
        "draws": draws_of(cell),
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
        "skipped": cell.result.skipped,
        "symbols": [asdict(one) for one in symbol_rows(cell)],
    }


def decision_as_json(decision: Decision) -> dict[str, Any]:
    return {
        "sentence": decision.sentence,
        "review_by": decision.review_by,
        "stale": decision.stale,
        "devices": {device.value: _device_as_json(answer) for device, answer in decision.devices.items()},
    }


def _device_as_json(decided: DeviceDecision) -> dict[str, Any]:
    contender = decided.contender
    return {
        "answer": decided.answer.value,
        "sentence": decided.sentence,
        "environments": list(decided.environments),
        "cache": contender.cache if contender else None,
        "mode": contender.mode if contender else None,
        "settings": contender.settings if contender else None,
        "releases": contender.history.text if contender else None,
        "decided_by": decided.decided_by.value if decided.decided_by else None,
        "reason": decided.reason,
        "take_cache_only": decided.take_cache_only,
        "break_even_forecasts": {"cold": _value(decided.break_even_cold), "warm": _value(decided.break_even_warm)},
        "set": list(settings_to_copy(decided)),
        "next": list(decided.next_commands),
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
            for other in decided.contenders
        ],
    }


def as_json(document: Any) -> str:
    """Write strict JSON: NaN and infinities become strings, since no other reader takes Python's bare words."""
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
