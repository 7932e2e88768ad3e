"""A red cell of a run as an incident: what it broke is what must be broken again."""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from toto_compat.contract.events import EventKind
from toto_compat.contract.request import Device
from toto_compat.contract.result import Outcome
from toto_compat.contract.suites import Suite
from toto_compat.errors import SelectionError
from toto_compat.evidence.store import Run, StoredCell, find_run, load_run
from toto_compat.matrix.document import nearest_name
from toto_compat.matrix.gates import Gate
from toto_compat.repro.expected import error_again, expected_event
from toto_compat.repro.incident import Expectation, ExpectedEvent, FailedGate, Incident, RaisedForecast
from toto_compat.repro.outcome import error_of
from toto_compat.verdict.judge import JudgedCell, Status, rerun_command
from toto_compat.verdict.judged_run import judge_run

_OF_EVENTS = frozenset({Gate.RECOMPILE_LIMIT})


def find_red_cell(run_name: str, cell_name: str, results: Path = Path("results")) -> tuple[Run, JudgedCell]:
    """Find a cell that failed; SelectionError says which cells the run has, or why this one has no bundle."""
    run = load_run(find_run(run_name, results))
    judged = judge_run(run)
    found = next((cell for cell in judged.cells if cell.result.cell == cell_name), None)
    if found is None:
        names = [str(cell.result.cell) for cell in judged.cells]
        red = [str(cell.result.cell) for cell in judged.cells if cell.verdict is Status.FAIL]
        near = nearest_name(cell_name, names)
        hint = f"did you mean {near}?" if near else f"its red cells: {', '.join(red[:8]) or 'none'}"
        raise SelectionError(f"{run_name} has no cell {cell_name!r}", hint=hint)
    if found.verdict is not Status.FAIL:
        raise SelectionError(
            f"{cell_name} is {found.verdict.value} in {run_name}: nothing in it is broken",
            hint=found.reason or "a bundle is of a cell that is FAIL",
        )
    return run, found


def incident_of(run: Run, cell: JudgedCell) -> Incident:
    """Write the cell down as an incident: its workload and settings, the limits it hit, the gates it broke."""
    result = cell.result
    request = result.request
    when = result.stored if isinstance(result, StoredCell) and result.stored else result.provenance.finished
    failed = [judged for judged in cell.gates.values() if judged.status is Status.FAIL]
    without_symbols = [judged for judged in failed if not judged.gate.rule.suite.rule.needs_symbols]
    # every gate of a forecast that raised is FAIL: the error is what must come again
    raised = _raised(cell, dict.fromkeys(judged.gate.rule.suite for judged in without_symbols))
    gates = tuple(
        FailedGate(gate=judged.gate, limit=judged.limit, needs=_needed_for(judged.gate, request.device))
        for judged in without_symbols
        if judged.gate not in _OF_EVENTS and judged.gate.rule.suite not in {one.suite for one in raised}
    )
    hit = _limits_hit(cell)
    if not gates and not hit and not raised:
        raise SelectionError(
            f"{result.cell} has no bundle, since a replay could look for nothing in it: {cell.reason}",
            hint="gates about series of your own need those series, which a bundle does not hold: an incident with "
            "workload.csv runs them again"
            if failed
            else "its log says what happened",
        )
    shown: Mapping[str, Sequence[Expectation]] = {"expect": hit, "gates": gates, "raised": raised}
    return Incident.model_validate(
        {
            "schema": 1,
            "title": f"{result.cell}: {cell.reason}"[:200],
            "date": (when or run.info.started)[:10],
            "source": f"run {run.info.name}",
            "environment": request.cell.environment,
            "cache": request.cache.name,
            "mode": request.cell.mode,
            "settings": request.settings.model_dump(mode="json", exclude_defaults=True),
            "workload": request.workload.model_dump(mode="json", exclude_defaults=True),
            **{
                key: [one.model_dump(mode="json", exclude_defaults=True) for one in parts]
                for key, parts in shown.items()
                if parts
            },
        }
    )


def command_of(run: Run, cell: JudgedCell) -> list[str]:
    """Return the command that ran a cell; of one that another run measured, what runs it again."""
    reused = isinstance(cell.result, StoredCell) and cell.result.reused
    if run.info.command and not reused and not run.info.merged:
        return list(run.info.command)
    return shlex.split(rerun_command(cell.result))


def _needed_for(gate: Gate, device: Device) -> Literal["cuda"] | None:
    """A time, a size or an error of a GPU is not seen again on a CPU; what dynamo does is the same on both."""
    return "cuda" if device is Device.CUDA and gate.rule.suite is not Suite.RECOMPILE else None


def _raised(cell: JudgedCell, suites: Iterable[Suite]) -> list[RaisedForecast]:
    """List what the forecast raised in these suites; on a GPU it may be an error of the GPU's."""
    failed = {suite: cell.result.evidence.get(suite) for suite in suites}
    return [
        RaisedForecast(
            suite=suite,
            error_like=error_again(error_of(evidence)),
            needs="cuda" if cell.result.request.device is Device.CUDA else None,
        )
        for suite, evidence in failed.items()
        if evidence is not None and evidence.outcome is Outcome.MODEL_FAILED
    ]


def _limits_hit(cell: JudgedCell) -> list[ExpectedEvent]:
    evidence = cell.result.evidence.get(Suite.RECOMPILE)
    events = [one for one in evidence.events if one.kind is EventKind.RECOMPILE_LIMIT] if evidence else []
    return [ExpectedEvent.model_validate(expected_event(event)) for event in events]
