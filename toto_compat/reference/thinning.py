"""A cell's file made small enough to be committed: evidence, gates and origin stay, what repeats itself is thinned."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from toto_compat.contract.events import Event, EventKind
from toto_compat.contract.gate_limit import GateLimit
from toto_compat.contract.log_line import shorten_path
from toto_compat.contract.result import SuiteEvidence
from toto_compat.errors import StorageError
from toto_compat.evidence.store import StoredCell
from toto_compat.matrix.gates import Gate
from toto_compat.verdict.judge import JudgedCell, judge

_TIMINGS_KEPT = 15
_ROWS_KEPT = 6
_FRAMES_KEPT = 2
_LINES_KEPT = 12  # of a failure's traceback
_PATH = re.compile(r"(?<![\w./:])/[^\s:,;()'\"\\]+/[^\s:,;()'\"\\]+")  # what is committed names no folder of a machine


def thinned(cell: StoredCell) -> StoredCell:
    """The same cell with its tables, events and timings thinned; each suite says in `details.thinned` what it had."""
    evidence = {suite: _thinned_suite(one) for suite, one in cell.evidence.items()}
    return cell.model_copy(update={"evidence": evidence})


def as_text(cell: StoredCell) -> str:
    """A thinned cell's file. Of evidence and origin, what is empty is left out; of the request nothing is, since its
    defaults may be others some day."""
    document = cell.model_dump(mode="json", by_alias=True)
    document |= cell.model_dump(
        mode="json", by_alias=True, exclude_defaults=True, include={"evidence": True, "provenance": True}
    )
    return json.dumps(document, separators=(",", ":")) + "\n"


def check_same_verdict(whole: StoredCell, thin: StoredCell, gates: Mapping[Gate, GateLimit]) -> None:
    """Thinning must not touch what decides: every gate has to say of the thin cell what it says of the whole one."""
    before, after = judge(whole, gates), judge(thin, gates)
    if _said(before) != _said(after):
        raise StorageError(
            f"{whole.cell}: its verdict changed when its evidence was thinned", hint="this is a mistake in thinning.py"
        )


def _said(cell: JudgedCell) -> Sequence[object]:
    gates = ((gate, one.status, one.value, _without_folders(one.reason)) for gate, one in cell.gates.items())
    return [cell.verdict, _without_folders(cell.reason), *gates]


def _without_folders(text: str) -> str:
    return _PATH.sub(lambda path: shorten_path(path[0]), text)


def _thinned_suite(evidence: SuiteEvidence) -> SuiteEvidence:
    told = dict(evidence.details.get("thinned", {}))
    details: dict[str, Any] = {}
    for name, value in evidence.details.items():
        if name != "thinned":
            details[name] = _thinned_detail(name, value, told)
    events = _folded(evidence.events)
    # a release is compared with the next by all its reasons: they are in the events, unless the suite kept only some
    if evidence.details.get("events_seen", -1) == evidence.details.get("events_kept") and "reasons" in details:
        del details["reasons"]
        told["reasons"] = "counted by the events"
    if len(events) < len(evidence.events):
        told["events"] = (
            f"{len(events)} of {len(evidence.events)}, one of each kind, place and reason, with count and the first "
            "of its reasons; where torch logs a kind stands once"
        )
        details.pop("events_seen", None)
        details.pop("events_kept", None)
    if told:
        details["thinned"] = told
    failure = evidence.failure
    if failure is not None:
        kept = [_without_folders(line) for line in failure.last_lines[-_LINES_KEPT:]]
        failure = failure.model_copy(update={"last_lines": tuple(kept)})
    return evidence.model_copy(update={"details": details, "events": events, "failure": failure})


def _thinned_detail(name: str, value: Any, told: dict[str, str]) -> Any:
    if isinstance(value, dict) and name in ("timings", "shapes"):
        return {key: _thinned_detail(name, one, told) for key, one in value.items()}
    # a gate reads the machine's counters to the last digit, and two releases are compared by all their reasons
    if not isinstance(value, list) or name in ("conditions", "reasons"):
        return value
    if name in ("timings", "shapes"):
        if len(value) > _TIMINGS_KEPT:
            told[name] = f"{_TIMINGS_KEPT} of {len(value)} timings, evenly taken"
            value = [value[place * len(value) // _TIMINGS_KEPT] for place in range(_TIMINGS_KEPT)]
        return [_rounded(one) for one in value]
    if name == "phases":  # one row for every forecast, nearly all of them 0
        return [_rounded(_without_zeros(row) if isinstance(row, dict) else row) for row in value]
    if len(value) <= _ROWS_KEPT:
        return [_rounded(one) for one in value]
    told[name] = f"{_ROWS_KEPT} of {len(value)}"
    if all(isinstance(row, dict) and "ratio" in row for row in value):
        told[name] += ", those nearest to their limit"
        value = sorted(value, key=_nearest_first)
    return [_rounded(one) for one in value[:_ROWS_KEPT]]


def _rounded(value: Any) -> Any:
    """Floats of tables with six digits: figures, which decide, are no part of tables."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list) else value


def _nearest_first(row: Mapping[str, Any]) -> float:
    """Order by the share of the limit; what no number tells, an answer that is missing or not finite, comes first."""
    ratio = row["ratio"]
    return -ratio if isinstance(ratio, int | float) and not math.isnan(ratio) else -math.inf


def _without_zeros(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if value}


def _folded(events: Sequence[Event]) -> tuple[Event, ...]:
    """One event for all that say the same, with their number; a skip's count is that of its inputs and stays."""
    folded: dict[tuple[object, ...], Event] = {}
    places: set[tuple[EventKind, str]] = set()
    for event in events:
        own = event.count if event.kind is EventKind.CUDAGRAPH_SKIP else None
        key = (event.kind, event.function, event.file, event.line, event.normalised_reason or event.reason, own)
        first = folded.get(key)
        if first is None:
            folded[key] = event.model_copy(
                update={
                    "stack": event.stack[-_FRAMES_KEPT:],
                    "reason": _without_folders(event.reason),  # 2.5 and 2.6 name the file of what they do not trace
                    "reasons": (),  # the first is `reason`, the others are failed guards of older graphs
                    "normalised_reason": "" if event.normalised_reason == event.reason else event.normalised_reason,
                    "logged_from": "" if (event.kind, event.logged_from) in places else event.logged_from,
                }
            )
            places.add((event.kind, event.logged_from))
        elif own is None:
            folded[key] = first.model_copy(update={"count": first.count + event.count})
    return tuple(folded.values())
