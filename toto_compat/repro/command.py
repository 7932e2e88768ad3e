"""`toto-compat repro INCIDENT.yaml`: production's environment, cache and settings again. Is it the same again?"""

import json
import math
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from toto_compat.contract.events import EventKind
from toto_compat.contract.log_line import printable
from toto_compat.contract.request import CellRequest
from toto_compat.contract.result import Outcome
from toto_compat.contract.suites import Suite
from toto_compat.errors import ExitCode
from toto_compat.matrix.document import is_file
from toto_compat.matrix.load import find_matrix_file, load_matrix, matrix_option
from toto_compat.matrix.schema import Matrix
from toto_compat.repro.bundling import (
    Bundling,
    bundle_reproduction,
    bundle_target,
    bundling_options,
    refuse_unused,
    what_to_run,
)
from toto_compat.repro.explain import (
    ALL_AXES,
    AXES,
    Explanation,
    axes_of,
    explain,
    explanation_as_data,
    explanation_as_text,
)
from toto_compat.repro.incident import Incident, check_names, load_incident, wanted
from toto_compat.repro.outcome import Reproduction, Verdict, describe_parts
from toto_compat.repro.pins import is_pinned
from toto_compat.repro.pins_index import check_pins_exist
from toto_compat.repro.replay import ToRun, compared_with_bundle
from toto_compat.repro.reproduce import PROFILE_NAME, incident_request, reproduce
from toto_compat.runtimes.device import choose_device
from toto_compat.runtimes.interrupt import sigterm_as_interrupt
from toto_compat.runtimes.open import RuntimeName, open_runtime
from toto_compat.runtimes.progress import print_out, say
from toto_compat.verdict.judge import one_line

__all__ = [
    "PROFILE_NAME",
    "Minutes",
    "Reproduction",
    "as_data",
    "as_text",
    "exit_code",
    "incident_request",
    "repro_command",
    "reproduce",
]


class Minutes(click.FloatRange):
    """A time to wait: above zero and finite. The range alone would let nan and inf through."""

    name = "minutes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        minutes = float(super().convert(value, param, ctx))
        if not math.isfinite(minutes):
            self.fail(f"{value} is not a finite number of minutes.", param, ctx)
        return minutes


@click.command("repro")
@click.argument("words", nargs=-1, metavar="[INCIDENT.yaml | BUNDLE | RUN CELL]")
@bundling_options
@click.option("--cache", help="Another cache than the incident's: is it gone with fixed_size?")
@click.option("--environment", metavar="NAME", help="Another environment than production's.")
@click.option(
    "--explain",
    "axes",
    is_flag=False,
    flag_value=ALL_AXES,
    metavar="[AXES]",
    help=f"Then change one thing at a time and say what ends it. Which: {','.join(AXES)}; `release` builds environments"
    " that are not there, all of them do not.  [default: all]",
)
@click.option("--dry-run", is_flag=True, help="With --explain, print the plan and stop.")
@click.option("--stored", is_flag=True, help="Take a result that is stored, if there is one, instead of running it.")
@click.option(
    "--runtime",
    type=click.Choice(["auto", "docker", "venv"]),
    default="auto",
    show_default=True,
    help="What it runs in; auto: docker if an engine answers.",
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="What it runs on; auto: a GPU if one answers, else the CPU.",
)
@click.option(
    "--timeout",
    type=Minutes(min=0, min_open=True),
    default=45.0,
    show_default=True,
    help="Minutes until a cell is given up.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as JSON.")
@matrix_option
def repro_command(
    *,
    words: tuple[str, ...],
    cache: str | None,
    environment: str | None,
    axes: str | None,
    dry_run: bool,
    stored: bool,
    runtime: RuntimeName,
    device: str,
    timeout: float,
    as_json: bool,
    matrix_file: Path | None,
    **bundling: Any,
) -> None:
    """Run a production incident again in its pinned environment, from its file or from a bundle.

    RUN CELL puts a red cell of a run into a bundle; --from-log writes an incident file from a production log.

    Exit code 0: REPRODUCED, all that can be seen here is as in production. 11: PARTLY or NOT REPRODUCED, and what
    differed is printed; with --cache that is the good news. 6: it could not be run or judged."""
    if dry_run and axes is None:
        raise click.UsageError("--dry-run shows the plan of --explain: name both")
    options = Bundling(**bundling)
    running = {"--cache": cache, "--environment": environment, "--explain": axes, "--stored": stored, "--json": as_json}
    refuse_unused(words, options, running)
    if not words and axes not in (None, ALL_AXES):
        raise click.UsageError(f"--explain {axes}: the incident comes before --explain")
    if options.bundle and axes is not None:
        raise click.UsageError("--bundle holds one run and --explain makes many: name one of them")
    with sigterm_as_interrupt(), what_to_run(words, options, matrix_file, runtime) as to_run:
        if to_run is not None:
            run_incident(
                to_run,
                options,
                cache=cache,
                environment=environment,
                axes=axes,
                dry_run=dry_run,
                stored=stored,
                runtime=runtime,
                device=device,
                timeout=timeout,
                as_json=as_json,
            )


def run_incident(
    to_run: ToRun,
    options: Bundling,
    *,
    cache: str | None,
    environment: str | None,
    axes: str | None,
    dry_run: bool,
    stored: bool,
    runtime: RuntimeName,
    device: str,
    timeout: float,
    as_json: bool,
) -> None:
    """Run an incident and say what came of it, explained or put into a bundle if that is asked."""
    wanted_axes = axes_of(axes) if axes is not None else ()
    incident_file = to_run.incident_file
    incident = load_incident(incident_file)
    matrix_path = find_matrix_file(to_run.matrix_file)
    matrix = load_matrix(matrix_path)
    check_names(incident_file, matrix)
    where: dict[str, Any] = {"device": choose_device(device), "timeout_minutes": timeout}
    folder = incident_file.resolve().parent
    if incident.log and not is_file(folder / incident.log):
        say(f"{incident_file}: its log {one_line(incident.log)} is not there; it runs without")
    request = incident_request(incident, folder, matrix, matrix_path, cache=cache, environment=environment, **where)
    if options.bundle:
        bundle_target(options, request.cell)
    check_own_pins(incident_file, incident, request, runtime, matrix)
    if axes is None:
        reproduction = reproduce(incident, request, runtime, matrix, stored_first=stored)
        for line in compared_with_bundle(to_run, reproduction.result):
            say(line)
        print_out(json.dumps(as_data(reproduction), indent=2) if as_json else as_text(reproduction))
        if options.bundle:
            bundle_reproduction(reproduction, folder, matrix, options, runtime)
        finish(exit_code(reproduction))
        return

    as_run = effective(incident, cache=cache, environment=environment)

    def ask(variant: Incident) -> CellRequest:
        return incident_request(variant, folder, matrix, matrix_path, **where)

    builds = axes != ALL_AXES and "release" in wanted_axes
    explanation = explain(as_run, ask, runtime, matrix, wanted_axes, builds=builds, dry_run=dry_run)
    if explanation is not None:
        show_explanation(explanation, as_json=as_json)


def effective(incident: Incident, *, cache: str | None, environment: str | None) -> Incident:
    """Put the command line's cache and environment into the place of the incident's."""
    update: dict[str, Any] = {"cache": cache} if cache else {}
    if environment:
        update |= {"environment": environment, "pins": None}
    return incident.model_copy(update=update)


def show_explanation(explanation: Explanation, *, as_json: bool) -> None:
    base = explanation.base
    if as_json:
        print_out(json.dumps({**as_data(base), "explanation": explanation_as_data(explanation)}, indent=2))
    else:
        print_out(f"{as_text(base)}\n\n{explanation_as_text(explanation)}")
    finish(exit_code(base))


def finish(code: ExitCode) -> None:
    if code is not ExitCode.OK:
        sys.exit(code)


def check_own_pins(
    incident_file: Path, incident: Incident, request: CellRequest, runtime_name: RuntimeName, matrix: Matrix
) -> None:
    """Ask the package index for an incident's own pins, unless its environment is built already."""
    name = request.cell.environment
    if incident.pins is None or not is_pinned(name):
        return
    runtime = open_runtime(runtime_name, limits=matrix.limits, device=request.device)
    if runtime.lock_of(name, request.environment) is None:
        say(f"{name}: asking the package index whether its pins exist")
        check_pins_exist(incident_file, incident.pins, request.environment)


def could_not_run(reproduction: Reproduction) -> str:
    """Say why nothing of the incident could be judged; empty where something could."""
    if reproduction.verdict is not Verdict.NOT_JUDGED or reproduction.matches:
        return ""
    result = reproduction.result
    if result.failure is not None:
        return f"{result.failure.kind}: {result.failure.message}"
    if reproduction.gates or any(one.outcome in _RAN for one in result.evidence.values()):
        return ""
    return next((one.why for one in reproduction.unjudged), "")


_RAN = (Outcome.MEASURED, Outcome.MODEL_FAILED)


def exit_code(reproduction: Reproduction) -> ExitCode:
    if reproduction.verdict is Verdict.NOT_JUDGED:
        return ExitCode.CELL_NOT_RUN
    return ExitCode.OK if reproduction.reproduced else ExitCode.NOT_REPRODUCED


def as_text(reproduction: Reproduction) -> str:
    incident, result = reproduction.incident, reproduction.result
    where = result.provenance
    when = f", stored {reproduction.stored}" if reproduction.stored else ""
    lines = [
        one_line(f"{incident.title} ({incident.date})"),
        f"  ran  {result.cell.cache}, mode {result.cell.mode}, torch {where.torch} on the "
        f"{result.request.device.value} in {where.runtime}"
        f"{f' {where.image[:19]}' if where.image else ''}, lock {where.lock[:12]}{when}",
    ]
    if problem := could_not_run(reproduction):
        last = result.failure.last_lines[-5:] if result.failure else ()
        log = [f"  its log is {reproduction.log}"] if reproduction.log else []
        return "\n".join([*lines, one_line(f"NOT RUN: {problem}"), *(f"    {printable(line)}" for line in last), *log])
    lines += [f"  {line}" for line in describe_parts(reproduction)]
    if reproduction.raised:
        lines.append(f"  the compiled forecast raised: {reproduction.raised}")
    if Suite.RECOMPILE in result.evidence:
        counts = Counter(event.kind for event in reproduction.events)
        limits = counts[EventKind.RECOMPILE_LIMIT]
        lines.append(
            f"  in all {counts[EventKind.RECOMPILE]} recompiles, {limits} limit hit{'' if limits == 1 else 's'},"
            f" {counts[EventKind.GRAPH_BREAK]} graph breaks"
        )
    lines += [one_line(line) for line in verdict_lines(reproduction)]
    return "\n".join(lines)


def verdict_lines(reproduction: Reproduction) -> Iterator[str]:
    """Say the verdict in a line, with what of the incident it is about."""
    verdict, result = reproduction.verdict, reproduction.result
    told = [f"{reproduction.predictions} of {len(reproduction.held)} predicted"] if reproduction.predictions else []
    told += [f"as far as it shows here: {len(reproduction.unseen)} more need a GPU"] if reproduction.unseen else []
    rest = f" ({'; '.join(told)})" if told else ""
    if verdict is Verdict.REPRODUCED:
        yield f"REPRODUCED{rest}"
    elif verdict is Verdict.PARTLY:
        missing = (*reproduction.not_held, *reproduction.not_judged)
        yield f"PARTLY: {'; '.join(map(wanted, reproduction.held))}; but not: {'; '.join(map(wanted, missing))}{rest}"
    elif verdict is Verdict.NOT_JUDGED:
        yield f"NOT JUDGED: {'; '.join(map(wanted, reproduction.not_judged))}"
    elif not reproduction.looked:
        here = "needs a GPU" if reproduction.unseen else f"applies to torch {result.provenance.torch}"
        what = "all of it" if reproduction.unseen else "nothing that is expected"
        yield f"NOT REPRODUCED: nothing was looked for, {what} {here}"
    elif reproduction.ended and result.cell.cache != reproduction.incident.cache:
        yield f"NOT REPRODUCED: gone with {result.cell.cache}, nothing of the incident occurred{rest}"
    else:
        skipped = [evidence.skipped for evidence in result.evidence.values() if evidence.skipped]
        yield f"NOT REPRODUCED{rest}" + (f"; left out: {skipped[0]}" if skipped and reproduction.looked else "")


def as_data(reproduction: Reproduction) -> dict[str, Any]:
    result = reproduction.result
    return {
        "incident": reproduction.incident.title,
        "cell": result.cell,
        "verdict": reproduction.verdict.value,
        "reproduced": reproduction.reproduced,
        "could_not_run": could_not_run(reproduction) or None,
        "matches": [
            {
                "expected": match.expected.model_dump(mode="json", exclude_none=True),
                "holds": match.holds,
                "found": len(match.events),
                "predicted": match.expected in reproduction.predicted,
                "nearest": match.nearest.model_dump(mode="json", exclude_defaults=True) if match.nearest else None,
            }
            for match in reproduction.matches
        ],
        "gates": [
            {
                "expected": gate.expected.model_dump(mode="json", exclude_none=True),
                "holds": gate.holds,
                "found": gate.told,
                "predicted": gate.predicted,
            }
            for gate in reproduction.gates
        ],
        "not_judged": [{"expected": wanted(one.expected), "why": one.why} for one in reproduction.unjudged],
        "not_looked_for": [{"expected": wanted(one.expected), "why": one.why} for one in reproduction.unseen],
        "left_out": [expected.model_dump(mode="json", exclude_none=True) for expected in reproduction.left_out],
        "raised": reproduction.raised or None,
        "events": dict(Counter(event.kind.value for event in reproduction.events)),
        "stored": reproduction.stored or None,
        "provenance": result.provenance.model_dump(mode="json"),
    }
