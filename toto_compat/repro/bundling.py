"""Bundles on the command line: made of an incident that was run again or of a red cell, and unpacked for a replay."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from toto_compat.contract.cell_name import CellName
from toto_compat.contract.request import CellRequest
from toto_compat.contract.result import CellResult
from toto_compat.environments.locks import Lock, lock_on_the_spot, read_lock
from toto_compat.environments.wheelhouse import fetch_wheels, verify_wheels, wheel_path
from toto_compat.errors import EnvironmentBuildError, InputError
from toto_compat.evidence.store import log_path
from toto_compat.matrix.load import find_matrix_file, load_matrix
from toto_compat.matrix.schema import Matrix
from toto_compat.matrix.toto_source import toto_source
from toto_compat.report.page_data import bundle_name
from toto_compat.repro.archive import is_bundle, write_bundle
from toto_compat.repro.contents import about, add_run, add_script, failing_frames, gather
from toto_compat.repro.drafted import as_yaml, write_incident
from toto_compat.repro.from_log import draft_incident
from toto_compat.repro.incident import Incident
from toto_compat.repro.outcome import Reproduction
from toto_compat.repro.pins import is_pinned
from toto_compat.repro.production_freeze import read_freeze
from toto_compat.repro.red_cell import command_of, find_red_cell, incident_of
from toto_compat.repro.redaction.text import redact
from toto_compat.repro.replay import ToRun, replayed
from toto_compat.repro.seen import is_named_pipe, read_log_or_explain
from toto_compat.repro.trace import TracedRun, run_cell, run_minimal
from toto_compat.runtimes.open import RuntimeName, open_runtime
from toto_compat.runtimes.progress import print_out, say

_TRACED_MINUTES = 20.0


@dataclass(frozen=True)
class Bundling:
    """Holds what the command line says about logs and bundles."""

    from_log: str | None
    torch: str | None
    freeze: Path | None
    env_file: Path | None
    output: Path | None
    bundle: bool
    with_wheels: bool
    no_trace: bool


def bundling_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of this module to the command."""
    options = [
        click.option("--from-log", metavar="LOG", help="Write an incident file from a production log (- is stdin)."),
        click.option("--torch", metavar="RELEASE", help="With --from-log, the release that production ran."),
        click.option("--freeze", type=click.Path(path_type=Path), help="With --from-log, its pip freeze."),
        click.option("--env", "env_file", type=click.Path(path_type=Path), help="With --from-log, its env file."),
        click.option("-o", "--output", type=click.Path(path_type=Path), help="The file to write; it must not exist."),
        click.option("--bundle", is_flag=True, help="Put what was run into one file, for an issue or another machine."),
        click.option("--with-wheels", is_flag=True, help="With the wheels of its lock, for a replay without network."),
        click.option("--no-trace", is_flag=True, help="Run nothing for TORCH_TRACE."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def refuse_unused(words: tuple[str, ...], options: Bundling, running: Mapping[str, object]) -> None:
    """Refuse an option that would be passed over in silence; `running` are those of running an incident, by name."""
    of_a_log = {"--torch": options.torch, "--freeze": options.freeze, "--env": options.env_file}
    of_a_bundle = {"--with-wheels": options.with_wheels, "--no-trace": options.no_trace}
    unused, why = _given(of_a_log), "it is for an incident from a log: name --from-log LOG too"
    if options.from_log is not None:
        unused = _given({"--bundle": options.bundle, **of_a_bundle, **running})
        why = "--from-log writes an incident file and runs nothing"
    elif not unused and len(words) == 2:
        unused, why = _given(running), "a red cell is put into a bundle and not run again"
    elif not unused and not options.bundle:
        unused, why = _given({**of_a_bundle, "-o": options.output}), "it is for a bundle: name --bundle too"
    if unused:
        raise click.UsageError(f"{unused[0]}: {why}")


def _given(values: Mapping[str, object]) -> list[str]:
    return [name for name, value in values.items() if value is not None and value is not False]


@contextmanager
def what_to_run(
    words: tuple[str, ...], options: Bundling, matrix_file: Path | None, runtime: RuntimeName
) -> Iterator[ToRun | None]:
    """Do what is asked unless it is to run an incident; then give that, for as long as its files are there."""
    if options.from_log is not None:
        if words:
            raise click.UsageError("--from-log writes an incident; run that afterwards")
        from_log(options, matrix_file)
        yield None
    elif len(words) == 2:
        bundle_red_cell(words[0], words[1], options, matrix_file, runtime)
        yield None
    elif len(words) != 1:
        raise click.UsageError("name an INCIDENT.yaml, a BUNDLE, or a RUN and one of its red CELLs")
    elif is_named_pipe(Path(words[0])):
        raise InputError(f"{words[0]}: a pipe, which would be waited for", hint="name a file")
    elif is_bundle(Path(words[0])):
        with replayed(Path(words[0])) as to_run:
            yield to_run
    else:
        yield ToRun(Path(words[0]), matrix_file)


# --- an incident from a log -------------------------------------------------------------------------------------------


def from_log(options: Bundling, matrix_file: Path | None) -> None:
    """Write an incident file and say what is certain in it and what is not."""
    assert options.from_log is not None
    seen = read_log_or_explain(options.from_log)
    matrix = load_matrix(find_matrix_file(matrix_file))
    freeze = read_freeze(options.freeze) if options.freeze else None
    beside = options.output.parent if options.output else Path()
    draft = draft_incident(seen, matrix, torch=options.torch, freeze=freeze, env=options.env_file, beside=beside)
    target = options.output or Path(f"incident-{draft.keys['date']}.yaml")
    write_incident(as_yaml(draft, seen), target)
    print_out(f"{target}: {draft.keys['title']} ({draft.keys['date']})")
    for line in draft.told:
        print_out(f"  {redact(line)}")
    for gap in draft.unknown:
        print_out(f"  unknown: {redact(gap)}")
    print_out(f"Read it, then run it: toto-compat repro {target}")


# --- making -----------------------------------------------------------------------------------------------------------


def bundle_reproduction(
    reproduction: Reproduction, incident_folder: Path, matrix: Matrix, options: Bundling, runtime: RuntimeName
) -> Path:
    """Put an incident that was just run into a bundle."""
    log = Path(reproduction.log) if reproduction.log else None
    result = reproduction.result
    # as it ran: with another cache or environment if the command line said so, and the pins as an environment
    ran = {"cache": result.cell.cache, "environment": result.cell.environment, "pins": None}
    return make_bundle(
        reproduction.incident.model_copy(update=ran),
        incident_folder,
        result,
        matrix,
        log=log,
        command=["toto-compat", *sys.argv[1:]],
        shows=reproduction.verdict.value,
        options=options,
        runtime_name=runtime,
    )


def bundle_red_cell(
    run_name: str, cell_name: str, options: Bundling, matrix_file: Path | None, runtime: RuntimeName
) -> None:
    """Put a red cell of a run into a bundle; nothing of it is measured again."""
    run, cell = find_red_cell(run_name, cell_name)
    matrix_path = find_matrix_file(matrix_file)
    make_bundle(
        incident_of(run, cell),
        matrix_path.resolve().parent,
        cell.result,
        load_matrix(matrix_path),
        log=log_path(run.folder, cell.result.cell),
        command=command_of(run, cell),
        shows=f"FAIL by {cell.decided_by.value if cell.decided_by else 'failure'}",
        options=options,
        runtime_name=runtime,
    )


def bundle_target(options: Bundling, cell: CellName) -> Path:
    """Name the file that a cell's bundle becomes; InputError where it cannot, for which nobody waits for a run."""
    target = options.output or Path(bundle_name(cell))
    try:
        if target.exists():
            raise InputError(f"{target} exists and is not overwritten", hint=_ANOTHER)
        if not target.parent.is_dir():
            raise InputError(f"{target}: there is no folder {target.parent}", hint=_ANOTHER)
    except OSError as error:
        raise InputError(f"{target}: cannot be written: {error.strerror}", hint=_ANOTHER) from error
    return target


_ANOTHER = "name another file with -o"


def make_bundle(
    incident: Incident,
    incident_folder: Path,
    result: CellResult,
    matrix: Matrix,
    *,
    log: Path | None,
    command: list[str],
    shows: str,
    options: Bundling,
    runtime_name: RuntimeName,
) -> Path:
    """Gather, run the minimal script or the cell where the environment is built here, and write the file."""
    target = bundle_target(options, result.cell)
    try:
        toto_source(result.request.environment.toto_ts)
    except ValueError as error:
        told = f"{result.cell} ran with a toto-ts of its own that is not here: {error}"
        raise InputError(
            told, hint="lay it there again, or run the cell again with one that others can fetch"
        ) from error
    # first, since it may be refused: what is run for a trace takes minutes
    wheels = locked_wheels(result.request) if options.with_wheels else {}
    contents = gather(incident, incident_folder, result, matrix, log=log, command=command, shows=shows)
    script = add_script(contents, incident, result)
    if options.no_trace:
        contents.notes.append("nothing was run for a trace: --no-trace was given")
    else:
        add_run(contents, _traced_run(script, result, runtime_name, matrix))
    head = about(result, contents, command=command, shows=shows)
    manifest = write_bundle(target, head, contents.files, wheels)
    size = target.stat().st_size
    print_out(f"{target}: {len(manifest.files)} files, {size / 1e6:.1f} MB, {shows}")
    for note in manifest.notes:
        print_out(f"  {note}")
    print_out(f"Replay it anywhere: toto-compat repro {target.name}")
    return target


def _traced_run(script: str, result: CellResult, runtime_name: RuntimeName, matrix: Matrix) -> TracedRun:
    """Run the script, or the cell where there is none, in its environment if that is there: a bundle builds none."""
    request = result.request
    name = request.cell.environment
    try:
        runtime = open_runtime(runtime_name, limits=matrix.limits, device=request.device)
        if runtime.lock_of(name, request.environment) is None:
            return TracedRun(notes=(f"nothing was run for a trace: {name} is not built in {runtime.name} here",))
        prepared = runtime.build(name, request.environment, say)
    except EnvironmentBuildError as error:
        return TracedRun(notes=(f"nothing was run for a trace: {error.message}",))
    say(f"running {'the minimal script' if script else 'the cell'} in {name} for its trace; this takes minutes")
    given: dict[str, Any] = {"minutes": _TRACED_MINUTES, "frames": failing_frames(result)}
    if script:
        return run_minimal(runtime, prepared, script, **given)
    return run_cell(runtime, prepared, request, **given)


def locked_wheels(request: CellRequest) -> dict[str, Path]:
    """Fetch and check the wheels of the environment's lock."""
    name = request.cell.environment
    lock = _lock_of(request)
    fetch_wheels(lock, request.environment, say)
    verify_wheels(lock.packages)
    say(f"{name}: {len(lock.packages)} wheels go into the bundle")
    return {package.file: wheel_path(package) for package in lock.packages}


def _lock_of(request: CellRequest) -> Lock:
    name = request.cell.environment
    if is_pinned(name):
        lock_on_the_spot(name, request.environment, say)
    return read_lock(name, request.environment)
