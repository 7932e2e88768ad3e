"""`toto-compat gpu-acceptance`: what to run once on a GPU runner, step by step, kept up to date in a state file."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
import yaml

from toto_compat.acceptance.bundle import BUNDLE, exit_of, make_bundle, publish_bundle
from toto_compat.acceptance.campaign import (
    REHEARSAL,
    About,
    Ended,
    StepName,
    StepRecord,
    begin_or_resume,
    recorded,
)
from toto_compat.acceptance.claims import as_a_step, claims_of, evidence_in, interpreted_cells
from toto_compat.acceptance.trials import (
    PRODUCTION_CHECK,
    Acceptance,
    Found,
    acceptance_matrix,
    check_production,
    chosen_architectures,
    expected_seconds,
    has_runs,
    lower,
    on_device,
    told_by_runs,
    try_sabotages,
    write_matrix,
)
from toto_compat.contract.files import utc_now
from toto_compat.contract.request import Device
from toto_compat.contract.source_hash import hash_contents, read_source
from toto_compat.errors import EnvironmentBuildError, ExitCode, SelectionError
from toto_compat.evidence.files import check_writable
from toto_compat.evidence.store import check_run_name
from toto_compat.matrix.asked import Asked
from toto_compat.matrix.expand import default_selection, requested_environments
from toto_compat.matrix.load import find_matrix_file, load_matrix, matrix_hash, matrix_option
from toto_compat.matrix.schema import Matrix
from toto_compat.runtimes.doctor import examine
from toto_compat.runtimes.gpu import check_gpus, gpu_notes, why_not_runnable
from toto_compat.runtimes.nvidia_smi import find_gpus, why_none
from toto_compat.runtimes.open import RuntimeName, open_runtime
from toto_compat.runtimes.progress import say
from toto_compat.runtimes.seam import Runtime
from toto_compat.workflow import run_matrix

NAME, REHEARSAL_NAME = "gpu-acceptance", "gpu-acceptance-rehearsal"
MatrixRun = Callable[[Asked], ExitCode]


@dataclass(frozen=True)
class Wanted:
    """Holds what was asked on the command line."""

    results: Path
    matrix_path: Path
    rehearse: bool = False
    runtime: RuntimeName = "auto"
    name: str | None = None

    @property
    def folder(self) -> Path:
        return self.results / (self.name or (REHEARSAL_NAME if self.rehearse else NAME))


def accept(wanted: Wanted, run: MatrixRun = run_matrix) -> Ended:
    """Take every step that has not ended yet, then make the bundle; Ctrl-C keeps what has."""
    matrix = load_matrix(wanted.matrix_path)
    document = yaml.safe_load(wanted.matrix_path.read_text(encoding="utf-8"))
    about, left_out = what_it_is_about(matrix, wanted)
    check_writable(wanted.results)
    campaign = begin_or_resume(wanted.folder, about, left_out)
    if wanted.rehearse:
        say(REHEARSAL)
    architectures = chosen_architectures(matrix, about.environments, about.architecture)
    write_matrix(wanted.folder, acceptance_matrix(document, wanted.matrix_path.resolve().parent, architectures))
    acceptance = Acceptance(wanted.folder, campaign, wanted.runtime, matrix.production_profile, matrix.modes, run)
    say(how_long(acceptance))
    for number, (step, take) in enumerate(steps_of(matrix).items(), start=1):
        acceptance = _taken(acceptance, step, take, f"step {number} of {len(StepName)}, {step.value}")
    return _closed(acceptance, wanted, matrix)


def steps_of(matrix: Matrix) -> Mapping[StepName, Callable[[Acceptance], Found]]:
    return {
        StepName.PROBE: lambda acceptance: probe(acceptance, matrix),
        StepName.LOWERING: lower,
        StepName.DEVICE: on_device,
        StepName.SABOTAGES: try_sabotages,
        StepName.PRODUCTION_CHECK: check_production,
    }


def how_long(acceptance: Acceptance) -> str:
    """Say before anything begins what all of it takes, by step: it may be more than what was booked."""
    seconds = {step: expected_seconds(acceptance, step) for step in StepName}
    parts = ", ".join(f"{step.value} {_minutes(one)}" for step, one in seconds.items() if one)
    if not parts:
        return "every run is finished: what is left takes seconds"
    return (
        f"estimated {_minutes(sum(seconds.values()))} and what environments take to be built: {parts}; broken off"
        " anywhere, the same command goes on"
    )


def _minutes(seconds: float) -> str:
    return f"{max(1, round(seconds / 60))} min"


def _taken(acceptance: Acceptance, step: StepName, take: Callable[[Acceptance], Found], title: str) -> Acceptance:
    """Take a step unless it has ended before; one that an error ended, or that showed nothing, is tried again.

    So is one whose runs are no longer there, and one that is there counts as its runs tell it: the state alone is no
    evidence. Finished runs are not made again: what is tried again is what could not be run, and what others on the
    machine left undecided.
    """
    before = acceptance.campaign.steps.get(step)
    if before is not None and has_runs(acceptance, step):
        before = _as_its_runs_tell_it(acceptance, step, before)
        if before.ended is not Ended.NOT_SHOWN:
            say(f"{title}: {before.ended.value}, from {before.finished}")
            return replace(acceptance, campaign=recorded(acceptance.folder, acceptance.campaign, step, before))
    say(f"{title}: begins")
    started = utc_now()
    ended, lines = take(acceptance)
    record = StepRecord(ended=ended, lines=tuple(lines), started=started, finished=utc_now())
    for line in lines:
        say(f"    {line}")
    say(f"{title}: {ended.value}")
    return replace(acceptance, campaign=recorded(acceptance.folder, acceptance.campaign, step, record))


def _as_its_runs_tell_it(acceptance: Acceptance, step: StepName, before: StepRecord) -> StepRecord:
    found = told_by_runs(step, acceptance.folder, rehearsal=acceptance.rehearsal, production=PRODUCTION_CHECK)
    return before if found is None else before.model_copy(update={"ended": found[0], "lines": tuple(found[1])})


def _closed(acceptance: Acceptance, wanted: Wanted, matrix: Matrix) -> Ended:
    """Hold every prediction to what was found, and make the bundle: again at every start, since it takes seconds."""
    found = evidence_in(acceptance.folder, acceptance.campaign, production=PRODUCTION_CHECK)
    claims = claims_of(replace(found, interpreted=interpreted_cells(wanted.results)))
    now = utc_now()
    record = StepRecord(**as_a_step(claims), started=now, finished=now)
    campaign = recorded(acceptance.folder, acceptance.campaign, StepName.CLAIMS, record)
    doctor = [asdict(finding) for finding in examine(matrix)]
    bundle = make_bundle(acceptance.folder, campaign, claims, doctor)
    for line in record.lines:
        click.echo(line)
    click.echo(f"bundle: {bundle}")
    if wanted.rehearse:
        click.echo(REHEARSAL)
    else:
        click.echo("to commit it: `toto-compat gpu-acceptance --publish`")
    return exit_of(claims, campaign)


def what_it_is_about(matrix: Matrix, wanted: Wanted) -> tuple[About, dict[str, str]]:
    """Look at the machine: its GPUs and what they run; or, for a rehearsal, the newest CPU environment."""
    identity: dict[str, Any] = {
        "source_hash": hash_contents(read_source()),
        "matrix_hash": matrix_hash(matrix),
    }
    if wanted.rehearse:
        newest = requested_environments(default_selection(matrix, Device.CPU, matrix.production_profile))
        return About(rehearsal=True, environments=tuple(newest), **identity), {}
    gpus = find_gpus()
    if not gpus:
        raise EnvironmentBuildError(
            f"no NVIDIA GPU answers here: {why_none()}",
            hint="this is for a machine with a GPU (`toto-compat doctor` says what is missing); "
            "`nox -s gpu_acceptance -- --rehearse` walks through it on a CPU",
        )
    cuda = {name: one for name, one in matrix.environments.items() if one.device is Device.CUDA}
    left_out = {name: why for name, one in cuda.items() if (why := why_not_runnable(name, one))}
    cells = default_selection(matrix, Device.CUDA, matrix.production_profile, left_out)
    names = requested_environments(cells)
    names.sort(key=lambda name: name != matrix.production)
    about = About(
        rehearsal=False,
        # each kind once: how many of it are free today changes nothing that was found
        gpus=tuple(dict.fromkeys(f"{gpu.name}, driver {gpu.driver}" for gpu in gpus)),
        architecture=gpus[0].architecture,
        environments=tuple(names),
        **identity,
    )
    return about, left_out


def probe(acceptance: Acceptance, matrix: Matrix) -> Found:
    """Say what this machine is and what it runs; a card that is full is an error before anything is built.

    Then every environment is built and has to use the GPU: what compiles without it, which is next, would take its time
    and say nothing of an engine that hands out no GPU.
    """
    if acceptance.rehearsal:
        return Ended.NOT_SHOWN, ["no GPU is asked for in a rehearsal"]
    gpus = find_gpus()
    for name in acceptance.environments:
        check_gpus(name, matrix.environments[name], Device.CUDA, gpus)
    runtime = open_runtime(acceptance.runtime, limits=matrix.limits, device=Device.CUDA)
    unusable = unusable_environments(acceptance.environments, matrix, runtime)
    lines = [f"{gpu.name} ({gpu.architecture}), driver {gpu.driver}, {gpu.memory_mb} MB" for gpu in gpus]
    lines += [f"{name}: left out: {why}" for name, why in acceptance.campaign.left_out.items()]
    lines += [f"{error.message}; {error.hint}" for error in unusable]
    told = f"environments, in {runtime.name}: {', '.join(acceptance.environments)}"
    return Ended.NOT_SHOWN if unusable else Ended.HELD, [*lines, *gpu_notes(), told]


def unusable_environments(names: Sequence[str], matrix: Matrix, runtime: Runtime) -> list[EnvironmentBuildError]:
    """Build each and have it use the GPU; the errors of those that cannot. If none can, the first is raised."""
    errors = []
    for name in names:
        environment = matrix.environments[name]
        try:
            if obstacle := runtime.obstacle(name, environment):
                message, _, hint = obstacle.partition("\n")
                raise EnvironmentBuildError(message, hint=hint.strip())
            runtime.prepare(name, environment, say)
        except EnvironmentBuildError as error:
            errors.append(error)
    if len(errors) == len(names):
        raise errors[0]
    return errors


@click.command("gpu-acceptance")
@click.option(
    "--rehearse", is_flag=True, help="Walk through all steps on a CPU, with short cells; shows nothing of a GPU."
)
@click.option(
    "--publish", is_flag=True, help="Copy a finished bundle to results/reference/cuda; a rehearsal is refused."
)
@click.option("--run", "name", metavar="NAME", help="Name of its folder in results/: the same name resumes.")
@click.option(
    "--runtime",
    type=click.Choice(["auto", "docker", "venv"]),
    default="auto",
    show_default=True,
    help="auto: docker where an engine answers.",
)
@click.option(
    "--results", type=click.Path(path_type=Path), default=Path("results"), show_default=True, help="Folder of the runs."
)
@matrix_option
def gpu_acceptance_command(
    *, rehearse: bool, publish: bool, name: str | None, runtime: RuntimeName, results: Path, matrix_file: Path | None
) -> None:
    """Try on this machine's GPU, once, what was only predicted without one, and bundle what came of it.

    Steps that have ended are not taken again: after Ctrl-C, or an error, the same command goes on."""
    if name is not None:
        check_run_name(name)
    wanted = Wanted(results, find_matrix_file(matrix_file), rehearse, runtime, name)
    if publish:
        bundle = wanted.folder / BUNDLE
        if not bundle.is_dir():
            raise SelectionError(f"{bundle}: no bundle there", hint="`toto-compat gpu-acceptance` makes it")
        click.echo(f"published: {publish_bundle(bundle, results)}")
        return
    ended = accept(wanted)
    # what a rehearsal cannot show is no finding, what it breaks is
    if ended is Ended.BROKEN or (ended is Ended.NOT_SHOWN and not rehearse):
        sys.exit(ExitCode.FINDINGS)
