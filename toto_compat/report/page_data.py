"""What the HTML page shows, as plain data: the grid, the details of each cell, trends and history."""

import json
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import Version

from toto_compat.contract.cell_name import CellName
from toto_compat.contract.events import Event, EventKind
from toto_compat.contract.result import CellResult, Figure, Kind, SuiteEvidence
from toto_compat.contract.suites import Suite
from toto_compat.errors import StorageError, TotoCompatError
from toto_compat.evidence.files import read_bytes, read_model
from toto_compat.evidence.store import RunInfo, StoredCell, list_runs, load_run
from toto_compat.matrix.gates import Gate
from toto_compat.report.compatibility import row as compatibility_row
from toto_compat.report.symbols import symbol_rows
from toto_compat.report.table import value_text
from toto_compat.verdict.decision import Contender, torch_release
from toto_compat.verdict.judge import JudgedCell, JudgedGate, Status, forecast_text, rerun_command
from toto_compat.verdict.judged_run import JudgedRun, judge_run
from toto_compat.verdict.without_gpu import known_without_gpu

# enough to tell a spike from noise; more digits only make the page larger
_SIGNIFICANT_DIGITS = 4
_LONGEST_DETAILS = 6000
_GATE_FIGURES = frozenset((gate.rule.suite, gate.figure) for gate in Gate)


@dataclass(frozen=True)
class Column:
    environment: str
    torch: str
    device: str


@dataclass(frozen=True)
class GridCell:
    number: int  # names the cell's details in the page
    cell: JudgedCell
    speedup: str
    predicted: str  # what is only predicted, or ''


@dataclass(frozen=True)
class GridRow:
    cache: str
    mode: str
    settings: str
    workload: str  # where a run has several
    cells: tuple[GridCell | None, ...]  # one per column


@dataclass(frozen=True)
class Grid:
    columns: tuple[Column, ...]
    rows: tuple[GridRow, ...]


@dataclass(frozen=True)
class PastRow:
    """One row of an earlier run, for the history."""

    run: str
    date: str
    verdict: str
    speedup: float | None
    recompiles_total: float | None


def grid_of(cells: Sequence[JudgedCell]) -> Grid:
    """Put releases across (new to old, CPU apart from CUDA), caches and modes down, in the order they come."""
    columns: dict[Column, None] = {}
    rows: dict[tuple[str, str, str, str], None] = {}
    placed: dict[tuple[Column, tuple[str, str, str, str]], GridCell] = {}
    for number, cell in enumerate(cells):
        name = cell.result.cell
        column = Column(name.environment, torch_release(cell), cell.result.request.speaks_of.value)
        key = (name.cache, name.mode, name.settings, name.workload)
        columns[column] = rows[key] = None
        placed[column, key] = GridCell(number, cell, _speedup(cell), _predicted(cell))
    newest_first = sorted(
        sorted(columns, key=lambda column: column.environment), key=lambda column: Version(column.torch), reverse=True
    )
    ordered = sorted(newest_first, key=lambda column: column.device)
    # all modes of a cache stand together, whatever order the environments brought them in
    cache_order = {cache: None for cache, *_ in rows}
    by_cache = [key for cache in cache_order for key in rows if key[0] == cache]
    return Grid(
        columns=tuple(ordered),
        rows=tuple(GridRow(*key, cells=tuple(placed.get((column, key)) for column in ordered)) for key in by_cache),
    )


def cell_details(
    cell: JudgedCell, history: Sequence[PastRow], provenance_number: int, run: Path | None = None
) -> dict[str, Any]:
    """Gather what opens with a cell. All text is raw: the page escapes it by writing it as text."""
    result = cell.result
    speed = result.evidence.get(Suite.SPEED)
    timings = speed.details.get("timings", {}) if speed else {}
    return {
        "name": result.cell,
        "device": result.request.speaks_of.value,
        "forecast": forecast_text(cell),
        "verdict": cell.verdict.value,
        "decidedBy": cell.decided_by.value if cell.decided_by else "",
        "reason": cell.reason,
        "gates": [_gate(judged) for judged in cell.gates.values()],
        "lowered": _lowered(result),
        "symbols": [list(one.texts) for one in symbol_rows(cell)],
        "timings": {name: [_short(ms) for ms in values] for name, values in timings.items()},
        "figures": [
            _figure_row(suite, name, figure)
            for suite, evidence in result.evidence.items()
            for name, figure in evidence.figures.items()
            if (suite, name) not in _GATE_FIGURES
        ],
        "events": grouped_events(event for evidence in result.evidence.values() for event in evidence.events),
        "eventsNotKept": sum(_events_not_kept(evidence) for evidence in result.evidence.values()),
        "suites": [_suite(evidence) for evidence in result.evidence.values()],
        "failure": _failure(result.failure.kind, result.failure.message, result.failure.last_lines)
        if result.failure
        else None,
        "provenance": provenance_number,
        "started": result.provenance.started,
        "rerun": rerun_command(result),
        "bundle": bundle_command(run, cell) if run else "",
        "bundleFile": bundle_name(result.cell) if run and (run / bundle_name(result.cell)).is_file() else "",
        "files": [f"cells/{result.cell}.json", f"logs/{result.cell}.log"],
        "reusedFrom": result.ran_in if isinstance(result, StoredCell) and result.reused else "",
        "history": [[past.run, past.date, past.verdict, past.speedup, past.recompiles_total] for past in history],
    }


def bundle_command(run: Path, cell: JudgedCell) -> str:
    """Tell how to make the bundle of a red cell: what happened to it, in one file; empty for a cell that is not red."""
    if cell.verdict is not Status.FAIL:
        return ""
    name = f"{run.parent.name}/{run.name}" if run.parent.name == "reference" else run.name
    beside_the_page = f"results/{name}/{bundle_name(cell.result.cell)}"
    return shlex.join(["toto-compat", "repro", name, str(cell.result.cell), "-o", beside_the_page])


def bundle_name(cell: CellName) -> str:
    """Name the file that a cell's bundle is."""
    return f"{cell.replace('/', '_').replace('@', '_')}.bundle.zip"


def _lowered(result: CellResult) -> dict[str, Any] | None:
    """Return what was compiled for described GPUs, one row each; None where nothing was."""
    known, evidence = known_without_gpu(result), result.evidence.get(Suite.CUDA_LOWERING)
    if known is None or evidence is None:
        return None
    rows = [
        [
            f"{row['architecture']} ({row['card']})",
            f"{row['lowered']} of {row['graphs']}",
            f"{row['captured_whole']} of {row['graphs']}",
            f"{row['captured_partitions']} of {row['partitions']}",
            row["kernels"],
            row["most_registers"],
            row["spilling_kernels"],
            ", ".join(f"{name} {count}" for name, count in row["library_calls"].items()),
            row["values_on_cpu"],
            row["seconds"],
            "; ".join(row["errors"]),
        ]
        for row in evidence.details.get("architectures", [])
    ]
    return {"told": known.text, "rows": rows}


def provenance_facts(cell: JudgedCell) -> dict[str, Any]:
    """List the provenance without the times, so that the cells of one environment share it."""
    held = cell.result.provenance.model_dump(exclude={"started", "finished"})
    facts = {name: value for name, value in held.items() if value not in (None, "", 0) and not isinstance(value, dict)}
    packages = {**cell.result.provenance.packages}
    system = {**cell.result.provenance.system_packages}
    return {"facts": facts, "packages": packages, "system": system}


def grouped_events(events: Iterable[Event]) -> list[dict[str, Any]]:
    """Group events of one kind, function, source line and normalised reason, with a count, largest first."""
    groups: defaultdict[tuple[str, str, str, str], list[Event]] = defaultdict(list)
    for event in events:
        where = f"{event.file}:{event.line}" if event.file and event.line is not None else event.file
        groups[event.kind.value, event.function, where, event.normalised_reason or event.reason].append(event)
    rows = [
        {
            "kind": kind,
            "function": function,
            "where": where,
            "reason": reason,
            "example": group[-1].reason if group[-1].reason != reason else "",
            "limit": group[-1].limit,
            # a skip's count is the number of mutated inputs it names; the others count themselves
            "count": len(group) if kind == EventKind.CUDAGRAPH_SKIP.value else sum(event.count for event in group),
            "stack": list(group[0].stack),
        }
        for (kind, function, where, reason), group in groups.items()
    ]
    return sorted(rows, key=lambda group: (list(EventKind).index(EventKind(group["kind"])), -group["count"]))


def history_of(
    results: Path, *, until: JudgedRun, note: Callable[[str], None] = lambda _: None
) -> dict[str, list[PastRow]]:
    """Find the rows of the earlier runs in the results folder by cell name, oldest first.

    A run that is damaged has no part in it, and `note` is told why: it must not spoil the page of another.
    """
    dated: list[tuple[str, str, list[tuple[str, PastRow]]]] = []
    for name in list_runs(results):
        folder = results / name
        if folder.resolve() == until.run.folder.resolve():
            continue
        try:
            info = read_model(folder / "run.json", RunInfo)
            if info.started <= until.run.info.started:
                dated.append((info.started, name, _past_rows(folder, name, info.started[:10])))
        except TotoCompatError as error:
            note(f"{name} is left out of the history: {error}")
    past: defaultdict[str, list[PastRow]] = defaultdict(list)
    for _, _, rows in sorted(dated, key=lambda entry: entry[:2]):
        for cell, row in rows:
            past[cell].append(row)
    return dict(past)


def cell_name(cell: JudgedCell) -> str:
    """Return what identifies a row across runs: the device too, since a CUDA build can run on the CPU."""
    return _row_name(cell.result.request.speaks_of.value, cell.result.cell)


def as_past_row(cell: JudgedCell, info: RunInfo) -> PastRow:
    """Turn the row of the run that is shown into the newest of its history."""
    speedup, total = cell.gates.get(Gate.SPEEDUP), cell.gates.get(Gate.RECOMPILES_TOTAL)
    return PastRow(
        info.name,
        info.started[:10],
        cell.verdict.value,
        speedup.value if speedup else None,
        total.value if total else None,
    )


def _row_name(*parts: str) -> str:
    return "/".join(parts)


def trend_points(contender: Contender, suite: Suite, name: str) -> list[tuple[str, Figure]]:
    """Follow a measured figure along the releases; the last environment of a release stands for it."""
    newest: dict[str, Figure] = {}
    for cell in contender.cells:
        figure = cell.figure(suite, name)
        if figure and figure.value is not None and figure.kind is Kind.MEASURED:
            newest[torch_release(cell)] = figure
    return list(newest.items())


def _past_rows(folder: Path, run: str, date: str) -> list[tuple[str, PastRow]]:
    table = folder / "compatibility.json"
    if not table.is_file():
        # an interrupted run has cells and no table yet
        return [_past_row(compatibility_row(cell), run, date) for cell in judge_run(load_run(folder)).cells]
    try:
        return [_past_row(row, run, date) for row in json.loads(read_bytes(table))["rows"]]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        command = shlex.join(["toto-compat", "report", str(folder), "--format", "json", "--output", str(table)])
        raise StorageError(
            f"{table}: not a table of this program: {error}", hint=f"write it anew: {command}"
        ) from error


def _past_row(row: Mapping[str, Any], run: str, date: str) -> tuple[str, PastRow]:
    gates: Mapping[str, Any] = row.get("gates", {})
    parts = [str(row.get(key)) for key in ("environment", "cache", "mode", "settings")]
    past = PastRow(
        run=run,
        date=date,
        verdict=str(row.get("verdict", "")),
        speedup=_number(gates.get("speedup")),
        recompiles_total=_number(gates.get("recompiles_total")),
    )
    return _row_name(str(row.get("device")), str(row.get("cell") or CellName.of(*parts))), past


def _number(gate: Any) -> float | None:
    value = gate.get("value") if isinstance(gate, dict) else None
    return float(value) if isinstance(value, int | float) else None


def _speedup(cell: JudgedCell) -> str:
    judged = cell.gates.get(Gate.SPEEDUP)
    return f"{judged.value:.2f}x" if judged and judged.value is not None else ""


def _predicted(cell: JudgedCell) -> str:
    judged = cell.gates.get(Gate.CUDAGRAPHS)
    if not judged or judged.value is None or judged.kind is Kind.MEASURED:
        return ""
    if judged.value == 0:
        return "no graph skips"
    return f"{judged.value:g} graph{'' if judged.value == 1 else 's'} skipped or split"


def _gate(judged: JudgedGate) -> dict[str, Any]:
    figure = judged.figure
    interval = ""
    if figure and figure.low is not None and figure.high is not None:
        interval = f"{figure.low:.3g} to {figure.high:.3g}"
    return {
        "gate": judged.gate.value,
        "status": judged.status.value,
        "value": value_text(judged, "{:.4g}"),
        "unit": figure.unit if figure else "",
        "interval": interval,
        "limit": judged.limit.text,
        "kind": judged.kind.value if judged.kind else "",
        "reason": judged.reason,
        "method": figure.method if figure else "",
        "next": judged.next_command,
    }


def _figure_row(suite: Suite, name: str, figure: Figure) -> list[str]:
    if figure.value is None:
        shown = figure.missing or "not measured"
    elif figure.unit == "bytes":
        shown = f"{figure.value / 2**20:,.0f} MiB"
    else:
        shown = f"{figure.value:.4g}{' ' + figure.unit if figure.unit else ''}"
    if figure.value is not None and figure.low is not None and figure.high is not None:
        shown += f" ({figure.low:.3g} to {figure.high:.3g})"
    return [suite.value, name, shown, figure.kind.value, figure.method]


def _suite(evidence: SuiteEvidence) -> dict[str, Any]:
    failure = evidence.failure
    return {
        "suite": evidence.suite.value,
        "outcome": evidence.outcome.value,
        "seconds": round(evidence.seconds, 1),
        "method": evidence.method,
        "details": _details_text(evidence),
        "failure": _failure(failure.kind, failure.message, failure.last_lines) if failure else None,
    }


def _events_not_kept(evidence: SuiteEvidence) -> int:
    """Say how many events a cell's file left out: its suite counts all, also of one that recompiles in every step."""
    seen = evidence.details.get("events_seen")
    return max(0, seen - len(evidence.events)) if isinstance(seen, int) else 0


def _details_text(evidence: SuiteEvidence) -> str:
    """Write a suite's own tables, one row a line, but those shown elsewhere; what is too long stays in the file."""
    held = {name: value for name, value in evidence.details.items() if name not in ("timings", "symbols")}
    lines = [f"skipped: {evidence.skipped}"] if evidence.skipped else []
    for name, value in held.items():
        rows = value if isinstance(value, list) else [value]
        lines += [f"{name}:", *(f"  {json.dumps(row, default=str)}" for row in rows)]
    text = "\n".join(lines)
    return text if len(text) <= _LONGEST_DETAILS else f"{text[:_LONGEST_DETAILS]}\n... the rest is in the cell's file"


def _failure(kind: str, message: str, last_lines: Sequence[str]) -> dict[str, Any]:
    return {"kind": kind, "message": message, "lastLines": list(last_lines)}


def _short(milliseconds: float) -> float:
    return float(f"{milliseconds:.{_SIGNIFICANT_DIGITS}g}")
