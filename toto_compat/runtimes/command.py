"""`toto-compat matrix`: load, select, plan, prepare, run, judge, report; each step takes what the last one returned."""

import json
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import click

from toto_compat.errors import (
    EngineError,
    EnvironmentBuildError,
    ExitCode,
    InputError,
    SelectionError,
    TotoCompatError,
)
from toto_compat.evidence.schema import CellResult, Failure, Outcome, Provenance
from toto_compat.evidence.store import (
    CellStore,
    RunInfo,
    StoredCell,
    check_run_name,
    check_writable,
    log_path,
    new_run_name,
    point_latest,
    utc_now,
    write_cell,
    write_run_info,
)
from toto_compat.matrix.expand import Cell, cell_request, default_selection, expand, gate_limits, named_profile, select
from toto_compat.matrix.load import find_matrix_file, load_matrix, matrix_hash, matrix_option
from toto_compat.matrix.schema import Device, Matrix
from toto_compat.model.csv_file import read_csv
from toto_compat.runtimes.local import FinishedCell, ReadyCell, run_cells
from toto_compat.runtimes.machine import core_count, find_gpus
from toto_compat.runtimes.plan import Plan, PlannedCell, key_of, make_plan, plan_as_json, plan_cells, plan_text
from toto_compat.runtimes.progress import Progress, progress_for
from toto_compat.runtimes.seam import PreparedEnvironment, Runtime
from toto_compat.runtimes.source import cache_folder, stage_source
from toto_compat.runtimes.venv import VenvRuntime
from toto_compat.verdict.gates import JudgedCell, Status, judge


@dataclass(frozen=True)
class Asked:
    """The command line."""

    selectors: tuple[str, ...]
    profile: str
    runtime: str
    device: str
    jobs: int | None
    fresh: bool
    rebuild: bool
    run: str | None
    require: tuple[str, ...]
    dry_run: bool
    as_json: bool
    matrix_file: Path | None
    results: Path


@dataclass(frozen=True)
class Selected:
    """What of the matrix is to be run, where."""

    asked: Asked
    matrix: Matrix
    matrix_path: Path
    cells: tuple[Cell, ...]
    required: tuple[str, ...]
    device: Device


@dataclass(frozen=True)
class Planned:
    selected: Selected
    runtime: Runtime
    source_hash: str
    store: CellStore
    plan: Plan


@dataclass
class Prepared:
    planned: Planned
    environments: dict[str, PreparedEnvironment] = field(default_factory=dict)
    failed: dict[str, TotoCompatError] = field(default_factory=dict)


@dataclass(frozen=True)
class Ran:
    planned: Planned
    run_folder: Path
    info: RunInfo
    cells: tuple[StoredCell, ...]
    environment_failed: bool


@dataclass(frozen=True)
class Judged:
    ran: Ran
    cells: tuple[JudgedCell, ...]


@click.command("matrix")
@click.argument("selectors", nargs=-1, metavar="[SELECTOR]...")
@click.option("--profile", default="quick", show_default=True, help="How hard each cell is tried.")
@click.option("--runtime", type=click.Choice(["auto", "docker", "venv"]), default="auto", show_default=True)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--jobs", type=click.IntRange(min=1), help="Cells at a time.  [default: one per GPU, on a CPU up to 2]")
@click.option("--fresh", is_flag=True, help="Run every cell again, also those that did not change.")
@click.option("--rebuild", is_flag=True, help="Build container images anew, also those that are there.")
@click.option("--run", "run_name", metavar="NAME", help="Name of the run's folder in results/.")
@click.option("--require", multiple=True, metavar="SELECTOR", help="Fail (exit code 7) unless these rows are PASS.")
@click.option("--dry-run", is_flag=True, help="Print the plan and stop.")
@click.option("--json", "as_json", is_flag=True, help="Print compatibility.json (with --dry-run the plan) to stdout.")
@click.option("--results", type=click.Path(path_type=Path), default=Path("results"), show_default=True)
@matrix_option
def matrix_command(
    *,
    selectors: tuple[str, ...],
    profile: str,
    runtime: str,
    device: str,
    jobs: int | None,
    fresh: bool,
    rebuild: bool,
    run_name: str | None,
    require: tuple[str, ...],
    dry_run: bool,
    as_json: bool,
    matrix_file: Path | None,
    results: Path,
) -> None:
    """Run the cells of the matrix and say what can be compiled.

    SELECTORs are globs over <environment>/<cache>/<mode>[+<settings>]; '!glob' leaves cells out. Without one, what this
    machine can judge is run: the newest CPU environment, or with a GPU production's and the newest release."""
    asked = Asked(
        selectors=selectors,
        profile=profile,
        runtime=runtime,
        device=device,
        jobs=jobs,
        fresh=fresh,
        rebuild=rebuild,
        run=run_name,
        require=require,
        dry_run=dry_run,
        as_json=as_json,
        matrix_file=matrix_file,
        results=results,
    )
    code = run_matrix(asked)
    if code != ExitCode.OK:
        sys.exit(code)


def run_matrix(asked: Asked) -> ExitCode:
    """The whole flow; Ctrl-C and SIGTERM end it with the children stopped and the finished cells kept."""
    with sigterm_as_interrupt():
        selected = select_cells(asked)
        planned = plan_run(selected)
        say(plan_text(planned.plan))
        if asked.dry_run:
            if asked.as_json:
                click.echo(json.dumps(plan_as_json(planned.plan), indent=2))
            return ExitCode.OK
        check_writable(asked.results)
        with progress_for(len(planned.plan.to_run)) as progress:
            ran = run_prepared(prepare_environments(planned, progress), progress)
        return report(judge_cells(ran))


# --- load and select -------------------------------------------------------------------------------------------------


def select_cells(asked: Asked) -> Selected:
    if asked.run is not None:
        check_run_name(asked.run)
    matrix_path = find_matrix_file(asked.matrix_file)
    matrix = load_matrix(matrix_path)
    named_profile(matrix, asked.profile)
    device = choose_device(asked.device)
    cells = select(expand(matrix), asked.selectors) if asked.selectors else default_selection(matrix, device)
    required = select_required(cells, matrix, asked.require) if asked.require else []
    return Selected(
        asked=asked,
        matrix=matrix,
        matrix_path=matrix_path,
        cells=tuple(cells),
        required=tuple(cell.identifier for cell in required),
        device=device,
    )


def select_required(cells: Sequence[Cell], matrix: Matrix, selectors: Sequence[str]) -> Sequence[Cell]:
    """Of the cells that will run; one that the matrix has but nobody selected is told as that."""
    try:
        return select(cells, selectors)
    except SelectionError:
        in_matrix = select(expand(matrix), selectors)  # what matches nothing at all is told with the nearest names
        left_out = next(cell.identifier for cell in in_matrix if cell not in cells)
        raise SelectionError(
            f"--require: {left_out} is not among the {len(cells)} cells that are to run",
            hint=f"select it as well: `toto-compat matrix {left_out} ...`",
        ) from None


def choose_device(asked: str) -> Device:
    if asked == "auto":
        return Device.CUDA if find_gpus() else Device.CPU
    if asked == "cuda" and not find_gpus():
        raise EnvironmentBuildError(
            "--device cuda: no NVIDIA GPU answers here (`nvidia-smi` finds none)",
            hint="`toto-compat doctor` says what is missing; --device cpu runs a CUDA build on the CPU",
        )
    return Device(asked)


# --- plan ------------------------------------------------------------------------------------------------------------


def plan_run(selected: Selected) -> Planned:
    asked = selected.asked
    source, source_hash = stage_source()
    runtime = choose_runtime(selected, source, source_hash)
    store = CellStore(cache_folder() / "evidence")
    checkpoint = checkpoint_folder(selected)
    requests = [
        cell_request(
            selected.matrix,
            selected.matrix_path,
            cell,
            asked.profile,
            selected.device,
            work_folder="",  # every cell gets its own when it starts
            checkpoint_folder=checkpoint,
            quiet_lock=str(cache_folder() / "quiet.lock"),
        )
        for cell in selected.cells
    ]
    if requests[0].csv is not None:
        read_csv(requests[0].csv)  # its mistakes are told now, not by every cell
    jobs = asked.jobs or (len(find_gpus()) if selected.device is Device.CUDA else min(2, core_count()))
    cells = plan_cells(requests, runtime, store, source_hash, fresh=asked.fresh)
    return Planned(
        selected=selected,
        runtime=runtime,
        source_hash=source_hash,
        store=store,
        plan=make_plan(cells, runtime, store, jobs=jobs, device=selected.device),
    )


def choose_runtime(selected: Selected, source: Path, source_hash: str) -> Runtime:
    """docker where an engine answers, else venv."""
    asked = selected.asked
    if asked.runtime != "venv":
        from toto_compat.runtimes.docker import DockerRuntime

        try:
            return DockerRuntime(
                source, source_hash, limits=selected.matrix.limits, device=selected.device, rebuild=asked.rebuild
            )
        except EngineError:
            if asked.runtime == "docker":
                raise
    return VenvRuntime(source, source_hash)


def checkpoint_folder(selected: Selected) -> str | None:
    """Weights a user named are fetched here, before any cell runs: cells have no network."""
    profile = named_profile(selected.matrix, selected.asked.profile)
    checkpoint = selected.matrix.workloads[profile.workload].checkpoint
    if checkpoint is None:
        return None
    from toto_compat.model.checkpoint import resolve_checkpoint

    try:
        return str(resolve_checkpoint(checkpoint, relative_to=selected.matrix_path.resolve().parent).folder)
    except ModuleNotFoundError as error:
        raise InputError(
            f"checkpoint {checkpoint}: {error.name} is needed to download it and is not installed here",
            hint=f"`{sys.executable} -m pip install {error.name}`, or download it yourself and name the folder",
        ) from error


# --- prepare ---------------------------------------------------------------------------------------------------------


def prepare_environments(planned: Planned, progress: Progress) -> Prepared:
    """Build what is missing. One environment that cannot be built does not stop the others; none at all is an error."""
    prepared = Prepared(planned)
    for name, environment in {c.request.environment_name: c.request.environment for c in planned.plan.to_run}.items():
        try:
            prepared.environments[name] = planned.runtime.prepare(name, environment, progress.note)
        except EnvironmentBuildError as error:
            prepared.failed[name] = error
            progress.note(f"{name}: cannot be built, its cells are not run")
    if prepared.failed and not prepared.environments and not planned.plan.reused:
        first, *others = prepared.failed.values()
        for other in others:
            say(f"error: {other}")
        raise first
    return prepared


# --- run -------------------------------------------------------------------------------------------------------------


def run_prepared(prepared: Prepared, progress: Progress) -> Ran:
    planned = prepared.planned
    asked, plan = planned.selected.asked, planned.plan
    info = describe_run(planned)
    run_folder = asked.results / info.name
    write_run_info(run_folder, info)
    finished: dict[str, StoredCell] = {}

    def keep(cell: StoredCell) -> None:
        write_cell(run_folder, cell)
        finished[cell.cell] = cell

    ready: list[ReadyCell] = []
    for cell in plan.cells:
        name = cell.request.environment_name
        # a cell of an environment that was just built may be in the store: its lock is known only now
        found = cell.stored or stored_after_build(prepared, cell)
        if found:
            keep(found.model_copy(update={"reused": True, "verdict": "", "decided_by": "", "gates": {}}))
        elif name in prepared.failed:
            keep(environment_failure(planned, cell, prepared.failed[name], info.name))
        else:
            ready.append(ReadyCell(cell.request, prepared.environments[name]))

    def on_finished(cell: ReadyCell, done: FinishedCell) -> None:
        key = key_of(cell.request, cell.prepared.lock, planned.source_hash)
        stored = stored_cell(done.result, key=key, seconds=done.seconds, run=info.name)
        keep(stored)
        planned.store.put(stored)

    def keep_log(cell: str, log: Path) -> None:
        target = log_path(run_folder, cell)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(log, target)
        except OSError as error:
            progress.note(f"{cell}: its log could not be kept: {error.strerror}")

    try:
        run_cells(
            ready,
            planned.runtime,
            jobs=plan.jobs,
            gpus=[gpu.index for gpu in find_gpus()] if plan.device is Device.CUDA else [],
            scratch=cache_folder() / "s",
            keep_log=keep_log,
            progress=progress,
            on_finished=on_finished,
        )
    except KeyboardInterrupt:
        progress.note(
            f"stopped: {len(finished)} of {len(plan.cells)} cells are kept in {run_folder}; "
            "the same command again runs only the rest"
        )
        raise
    info = info.model_copy(update={"finished": utc_now()})
    write_run_info(run_folder, info)
    cells = tuple(finished[cell.request.cell] for cell in plan.cells)
    return Ran(planned, run_folder, info, cells, environment_failed=bool(prepared.failed))


def stored_after_build(prepared: Prepared, cell: PlannedCell) -> StoredCell | None:
    planned = prepared.planned
    environment = prepared.environments.get(cell.request.environment_name)
    if cell.key or environment is None or planned.selected.asked.fresh:
        return None
    return planned.store.get(key_of(cell.request, environment.lock, planned.source_hash))


def stored_cell(result: CellResult, *, key: str, seconds: float, run: str) -> StoredCell:
    fields = {name: getattr(result, name) for name in CellResult.model_fields}
    # folders of this machine that nobody finds again: results are read elsewhere
    fields["request"] = result.request.model_copy(update={"work_folder": "", "quiet_lock": None})
    return StoredCell(**fields, key=key, seconds=round(seconds, 3), stored=utc_now(), ran_in=run)


def environment_failure(planned: Planned, cell: PlannedCell, error: TotoCompatError, run: str) -> StoredCell:
    result = CellResult(
        cell=cell.request.cell,
        request=cell.request,
        provenance=Provenance(runtime=planned.runtime.name, source_hash=planned.source_hash, host=platform.node()),
        failure=Failure(kind="environment", message=str(error)),
    )
    return stored_cell(result, key="", seconds=0.0, run=run)


def describe_run(planned: Planned) -> RunInfo:
    selected, asked = planned.selected, planned.selected.asked
    revision, dirty = git_revision(selected.matrix_path.resolve().parent)
    return RunInfo(
        name=asked.run or new_run_name(asked.results, asked.profile),
        command=("toto-compat", *sys.argv[1:]),
        selectors=asked.selectors,
        profile=asked.profile,
        runtime=planned.runtime.name,
        executor="local",
        device=selected.device.value,
        cells=tuple(cell.identifier for cell in selected.cells),
        gates=gate_limits(selected.matrix, asked.profile),
        matrix_file=str(selected.matrix_path),
        matrix_hash=matrix_hash(selected.matrix),
        source_hash=planned.source_hash,
        git_revision=revision,
        git_dirty=dirty,
        host=platform.node(),
        started=utc_now(),
    )


def git_revision(folder: Path) -> tuple[str, bool]:
    """The commit of the folder and whether tracked files differ from it; empty outside a repository."""

    def git(*arguments: str) -> str:
        try:
            command = ["git", "-C", str(folder), *arguments]
            done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    return git("rev-parse", "HEAD"), bool(git("status", "--porcelain", "--untracked-files=no"))


# --- judge and report ------------------------------------------------------------------------------------------------


def judge_cells(ran: Ran) -> Judged:
    """Judge from what is stored, and write each verdict beside its evidence."""
    from toto_compat.report.compatibility import row

    judged = tuple(judge(cell, ran.info.gates) for cell in ran.cells)
    for stored, cell in zip(ran.cells, judged, strict=True):
        shown = row(cell)
        verdict = {"verdict": shown["verdict"], "decided_by": shown["decided_by"] or "", "gates": shown["gates"]}
        write_cell(ran.run_folder, stored.model_copy(update=verdict))
    return Judged(ran, judged)


def report(judged: Judged) -> ExitCode:
    """Write the table, print it and say how it ended."""
    from toto_compat.report.compatibility import as_json, compatibility, write_compatibility
    from toto_compat.report.table import terminal_table

    ran = judged.ran
    asked = ran.planned.selected.asked
    decision = write_compatibility(ran.run_folder, judged.cells)
    point_latest(asked.results, ran.info.name)
    if asked.as_json:
        click.echo(as_json(compatibility(judged.cells, decision)), nl=False)
    else:
        click.echo(terminal_table(judged.cells, decision, colour=sys.stdout.isatty()))
    for line in closing_lines(judged):
        say(line)
    return exit_code(judged)


def closing_lines(judged: Judged) -> Iterator[str]:
    ran = judged.ran
    for cell in ran.cells:
        log = log_path(ran.run_folder, cell.cell)
        for what, failure in failures_of(cell):
            yield f"could not be run: {what}: {failure.kind}: {failure.message}"
            yield from (f"    {line}" for line in failure.last_lines[-5:])
        if could_not_run(cell) and log.exists():
            yield f"    log: {log}"
    reused = sum(cell.reused for cell in ran.cells)
    if reused:
        yield f"{reused} of {len(ran.cells)} cells are unchanged and come from the store (--fresh runs them again)"
    missed = missed_requirements(judged)
    if missed:
        yield f"required to be PASS and are not: {', '.join(missed)}"
    if ran.planned.selected.device is Device.CPU and not ran.planned.selected.asked.selectors:
        yield gpu_runner_would_add(ran.planned.selected.matrix)
    yield f"run: {ran.run_folder}"


def gpu_runner_would_add(matrix: Matrix) -> str:
    """What is out of reach without a GPU, so that a CPU table is not taken for the whole answer."""
    try:
        cells = default_selection(matrix, Device.CUDA)
    except TotoCompatError:
        return "on a GPU runner: nothing more, matrix.yaml has no CUDA environment"
    names = ", ".join(dict.fromkeys(cell.environment_name for cell in cells))
    return (
        f"a GPU runner would add {len(cells)} cells on {names}: CUDA timings, and CUDA graphs measured instead of "
        "predicted. There: `nox -s matrix`"
    )


def missed_requirements(judged: Judged) -> list[str]:
    required = set(judged.ran.planned.selected.required)
    return [c.result.cell for c in judged.cells if c.result.cell in required and c.verdict is not Status.PASS]


def exit_code(judged: Judged) -> ExitCode:
    """A cell that could not be run comes before a requirement: without it the requirement was never tried."""
    if judged.ran.environment_failed:
        return ExitCode.ENVIRONMENT
    if any(could_not_run(cell) for cell in judged.ran.cells):
        return ExitCode.CELL_NOT_RUN
    return ExitCode.REQUIREMENT if missed_requirements(judged) else ExitCode.OK


def failures_of(cell: CellResult) -> Iterator[tuple[str, Failure]]:
    """What kept a cell or one of its suites from being run; a failure that several suites share is told once."""
    if cell.failure:
        yield cell.cell, cell.failure
    told: list[Failure] = []
    for suite, evidence in cell.evidence.items():
        failure = evidence.failure
        if evidence.outcome is Outcome.ERROR and failure and failure not in told and failure != cell.failure:
            told.append(failure)
            yield f"{cell.cell}, {suite.value}", failure


def could_not_run(cell: CellResult) -> bool:
    return cell.failure is not None or any(evidence.outcome is Outcome.ERROR for evidence in cell.evidence.values())


def say(text: str) -> None:
    """To stderr: stdout is for the table or the JSON alone."""
    click.echo(text, err=True)


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """A runner that is told to go (CI, nox) ends like one that gets Ctrl-C."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous: Callable[[int, FrameType | None], object] | int | None
    try:
        previous = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not in the main thread: whoever runs that owns the signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
