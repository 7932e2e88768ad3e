"""`toto-compat repro INCIDENT.yaml`: production's environment, cache and settings again. Are the events the same?"""

import json
import math
import shutil
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from toto_compat.contract.cell_name import CellName
from toto_compat.contract.events import Event, EventKind
from toto_compat.contract.request import CellProfile, CellRequest, Device
from toto_compat.contract.result import CellResult, Outcome
from toto_compat.contract.suites import Suite
from toto_compat.errors import ExitCode, SelectionError
from toto_compat.evidence.files import cache_folder
from toto_compat.matrix.checkpoint import resolve_checkpoint
from toto_compat.matrix.document import nearest_name
from toto_compat.matrix.load import find_matrix_file, load_matrix, matrix_option
from toto_compat.matrix.request import cell_request
from toto_compat.matrix.schema import Matrix
from toto_compat.matrix.selection import check_series
from toto_compat.repro.incident import (
    ExpectedEvent,
    Incident,
    Match,
    describe_left_out,
    describe_match,
    load_incident,
    match_incident,
)
from toto_compat.runtimes.device import choose_device
from toto_compat.runtimes.local import ReadyCell, run_cells
from toto_compat.runtimes.nvidia_smi import find_gpus
from toto_compat.runtimes.open import RuntimeName, open_runtime
from toto_compat.runtimes.progress import progress_for, say

PROFILE_NAME = "repro"


class Minutes(click.FloatRange):
    """A time to wait: above zero and finite. The range alone would let nan and inf through."""

    name = "minutes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        minutes = float(super().convert(value, param, ctx))
        if not math.isfinite(minutes):
            self.fail(f"{value} is not a finite number of minutes.", param, ctx)
        return minutes


@dataclass(frozen=True)
class Reproduction:
    """Holds what came of running an incident again."""

    incident: Incident
    result: CellResult
    events: tuple[Event, ...]
    matches: tuple[Match, ...]

    @property
    def reproduced(self) -> bool:
        return bool(self.matches) and all(match.holds for match in self.matches)

    @property
    def left_out(self) -> tuple[ExpectedEvent, ...]:
        """Expected events that do not apply to the release that ran."""
        looked_for = [match.expected for match in self.matches]
        return tuple(expected for expected in self.incident.expect if expected not in looked_for)


@click.command("repro")
@click.argument("incident_file", type=click.Path(path_type=Path))
@click.option("--cache", help="Another cache than the incident's: is it gone with fixed_size?")
@click.option("--environment", metavar="NAME", help="Another environment than production's.")
@click.option("--runtime", type=click.Choice(["auto", "docker", "venv"]), default="auto", show_default=True)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option(
    "--timeout",
    type=Minutes(min=0, min_open=True),
    default=45.0,
    show_default=True,
    help="Minutes until it is given up.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as JSON.")
@matrix_option
def repro_command(
    *,
    incident_file: Path,
    cache: str | None,
    environment: str | None,
    runtime: RuntimeName,
    device: str,
    timeout: float,
    as_json: bool,
    matrix_file: Path | None,
) -> None:
    """Run a production incident again in its pinned environment.

    Exit code 0: REPRODUCED, every expected event occurred. 11: it did not, and what differed is printed; with --cache
    that is the good news. 6: it could not be run."""
    incident = load_incident(incident_file)
    matrix_path = find_matrix_file(matrix_file)
    matrix = load_matrix(matrix_path)
    request = incident_request(
        incident,
        incident_file.resolve().parent,
        matrix,
        matrix_path,
        cache=cache,
        environment=environment,
        device=choose_device(device),
        timeout_minutes=timeout,
    )
    reproduction = reproduce(incident, request, runtime, matrix)
    click.echo(json.dumps(as_data(reproduction), indent=2) if as_json else as_text(reproduction))
    code = exit_code(reproduction)
    if code is not ExitCode.OK:
        sys.exit(code)


def incident_request(
    incident: Incident,
    incident_folder: Path,
    matrix: Matrix,
    matrix_path: Path,
    *,
    cache: str | None = None,
    environment: str | None = None,
    device: Device = Device.CPU,
    timeout_minutes: float = 45.0,
) -> CellRequest:
    """The one cell that shows the incident: only what the compiler does is watched, nothing is timed.

    Its checkpoint and series are relative to the incident's own file.
    """
    environment_name = known_name(environment or incident.environment, matrix.environments, "environment")
    cache_name = known_name(cache or incident.cache, matrix.caches, "cache")
    workload = incident.workload
    check_series(workload, incident_folder)
    checkpoint = workload.checkpoint
    return cell_request(
        matrix,
        matrix_path,
        CellName.of(environment_name, cache_name, incident.mode, "incident"),
        settings=incident.settings,
        profile_name=PROFILE_NAME,
        profile=CellProfile(iterations=1, suites=(Suite.RECOMPILE,), timeout_minutes=timeout_minutes),
        workload_name=PROFILE_NAME,
        workload=workload,
        workload_folder=incident_folder,
        device=device,
        checkpoint_folder=str(resolve_checkpoint(checkpoint, relative_to=incident_folder)) if checkpoint else None,
    )


def known_name(name: str, names: Any, what: str) -> str:
    if name not in names:
        near = nearest_name(name, names)
        hint = f"did you mean {near}?" if near else f"there are {', '.join(names)}"
        raise SelectionError(f"matrix.yaml has no {what} {name!r}", hint=hint)
    return name


def reproduce(incident: Incident, request: CellRequest, runtime_name: RuntimeName, matrix: Matrix) -> Reproduction:
    """Build the environment, run the cell, match its events."""
    runtime = open_runtime(runtime_name, limits=matrix.limits, device=request.device, say=say)
    prepared = runtime.prepare(request.cell.environment, request.environment, say)
    say(f"running {request.cell} in {runtime.name}; torch logs every recompile, this takes a few minutes")
    results: list[CellResult] = []
    logs = cache_folder() / "repro"

    def keep_log(_: str, log: Path) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        shutil.move(log, logs / "last.log")

    with progress_for(1) as progress:
        run_cells(
            [ReadyCell(request, prepared)],
            runtime,
            jobs=1,
            gpus=[gpu.uuid for gpu in find_gpus()] if request.device is Device.CUDA else [],
            scratch=cache_folder() / "s",
            keep_log=keep_log,
            progress=progress,
            on_finished=lambda _, done: results.append(done.result),
        )
    (result,) = results
    if why_not_run(result):
        say(f"its log is {logs / 'last.log'}")
    evidence = result.evidence.get(Suite.RECOMPILE)
    events = evidence.events if evidence else ()
    torch = result.provenance.torch or request.environment.torch
    return Reproduction(incident, result, events, tuple(match_incident(incident, events, torch)))


def why_not_run(result: CellResult) -> str:
    """Say why there is no evidence; empty where there is. A forecast that raises is evidence too."""
    if result.failure is not None:
        return f"{result.failure.kind}: {result.failure.message}"
    evidence = result.evidence.get(Suite.RECOMPILE)
    if evidence is None:
        return "the cell left no evidence of the compiler"
    if evidence.outcome in (Outcome.ERROR, Outcome.NOT_RUN):
        return evidence.failure.message if evidence.failure else evidence.outcome.value
    return ""


def exit_code(reproduction: Reproduction) -> ExitCode:
    if why_not_run(reproduction.result):
        return ExitCode.CELL_NOT_RUN
    return ExitCode.OK if reproduction.reproduced else ExitCode.NOT_REPRODUCED


def as_text(reproduction: Reproduction) -> str:
    incident, result = reproduction.incident, reproduction.result
    where = result.provenance
    cache = result.cell.cache
    lines = [
        f"{incident.title} ({incident.date})",
        f"  ran  {cache}, mode {incident.mode}, torch {where.torch} in {where.runtime}"
        f"{f' {where.image[:19]}' if where.image else ''}, lock {where.lock[:12]}",
    ]
    problem = why_not_run(result)
    if problem:
        last = result.failure.last_lines[-5:] if result.failure else ()
        return "\n".join([*lines, f"NOT RUN: {problem}", *(f"    {line}" for line in last)])
    for match in reproduction.matches:
        lines += [f"  {line}" for line in describe_match(match)]
    lines += [f"  {describe_left_out(expected)}" for expected in reproduction.left_out]
    counts = Counter(event.kind for event in reproduction.events)
    limits = counts[EventKind.RECOMPILE_LIMIT]
    lines.append(
        f"  in all {counts[EventKind.RECOMPILE]} recompiles, {limits} limit hit{'' if limits == 1 else 's'},"
        f" {counts[EventKind.GRAPH_BREAK]} graph breaks"
    )
    if reproduction.reproduced:
        lines.append("REPRODUCED")
    elif not reproduction.matches:
        lines.append(f"NOT REPRODUCED: none of the expected events applies to torch {where.torch}")
    elif cache != incident.cache and not any(match.events for match in reproduction.matches):
        lines.append(f"GONE with {cache}: not one of the incident's events occurred")
    else:
        lines.append("NOT REPRODUCED")
    return "\n".join(lines)


def as_data(reproduction: Reproduction) -> dict[str, Any]:
    result = reproduction.result
    return {
        "incident": reproduction.incident.title,
        "cell": result.cell,
        "reproduced": reproduction.reproduced and not why_not_run(result),
        "could_not_run": why_not_run(result) or None,
        "matches": [
            {
                "expected": match.expected.model_dump(mode="json", exclude_none=True),
                "holds": match.holds,
                "found": len(match.events),
                "nearest": match.nearest.model_dump(mode="json", exclude_defaults=True) if match.nearest else None,
            }
            for match in reproduction.matches
        ],
        "left_out": [expected.model_dump(mode="json", exclude_none=True) for expected in reproduction.left_out],
        "events": dict(Counter(event.kind.value for event in reproduction.events)),
        "provenance": result.provenance.model_dump(mode="json"),
    }
