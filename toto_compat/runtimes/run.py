"""Running what was prepared: each cell's file is written once, when the cell ends. The run's folder is what is left."""

import math
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from toto_compat.contract.files import utc_now
from toto_compat.contract.request import CellRequest, Device
from toto_compat.contract.result import CellResult, Failure, Provenance
from toto_compat.errors import TotoCompatError
from toto_compat.evidence.details import mistake_in_details
from toto_compat.evidence.files import cache_folder
from toto_compat.evidence.makers import remove_abandoned
from toto_compat.evidence.store import (
    CellStore,
    RunInfo,
    StoredCell,
    claimed_run,
    log_path,
    point_latest,
    set_damaged_aside,
    timing_name,
    write_cell,
    write_run_info,
)
from toto_compat.matrix.asked import Asked
from toto_compat.matrix.expand import gate_limits
from toto_compat.matrix.load import matrix_hash
from toto_compat.matrix.selection import Selection
from toto_compat.matrix.toto_source import is_release, without_password
from toto_compat.matrix.user_cache import BUILTIN, split_source
from toto_compat.runtimes.executors import executor
from toto_compat.runtimes.local import FinishedCell, ReadyCell
from toto_compat.runtimes.nvidia_smi import find_gpus
from toto_compat.runtimes.plan import Plan
from toto_compat.runtimes.prepare import PreparedRun
from toto_compat.runtimes.progress import Progress
from toto_compat.runtimes.references import shared_references
from toto_compat.runtimes.seam import Runtime


def run_prepared(
    prepared: PreparedRun,
    plan: Plan,
    selection: Selection,
    *,
    runtime: Runtime,
    store: CellStore,
    asked: Asked,
    progress: Progress,
) -> Path:
    """Run the cells that are ready and write all of them into a run's folder; Ctrl-C keeps those that finished."""
    for folder in (asked.results, cache_folder()):
        remove_abandoned(folder)
    runtime.tidy()
    with claimed_run(asked.results, asked.run, asked.profile) as run_folder:
        _run_into(run_folder, prepared, plan, selection, runtime=runtime, store=store, asked=asked, progress=progress)
    return run_folder


def _run_into(
    run_folder: Path,
    prepared: PreparedRun,
    plan: Plan,
    selection: Selection,
    *,
    runtime: Runtime,
    store: CellStore,
    asked: Asked,
    progress: Progress,
) -> None:
    info = describe_run(run_folder.name, selection, runtime, asked)
    for damage in set_damaged_aside(run_folder, info.cells):
        progress.note(damage)
    write_run_info(run_folder, info)
    for cell in prepared.stored:
        write_cell(run_folder, cell.model_copy(update={"reused": True}))
    for request, error in prepared.failed:
        write_cell(run_folder, environment_failure(request, error, runtime, info.name))
    kept = len(prepared.stored) + len(prepared.failed)

    def on_finished(cell: ReadyCell, done: FinishedCell) -> None:
        nonlocal kept
        keep_cell(done, cell.key, run_folder, store, progress.note)
        kept += 1

    try:
        executor(asked.executor)(
            longest_first(prepared.ready, store.known_seconds()) if _share_a_cpu(plan) else prepared.ready,
            runtime,
            jobs=plan.jobs,
            # a cluster hands out its own
            gpus=[gpu.uuid for gpu in find_gpus()] if plan.device is Device.CUDA and asked.executor != "slurm" else [],
            scratch=cache_folder() / "s",
            keep_log=lambda cell, log: keep_log(cell, log, run_folder, progress),
            progress=progress,
            on_finished=on_finished,
            references=shared_references(runtime.source, fresh=asked.fresh),
            run_folder=run_folder,
            detach=asked.detach,
        )
    except KeyboardInterrupt:
        progress.note(
            f"stopped: {kept} of {len(plan.cells)} cells are kept in {run_folder}; "
            "the same command again runs only the rest"
        )
        raise
    if not asked.detach:
        write_run_info(run_folder, info.model_copy(update={"finished": utc_now()}))
    point_latest(asked.results, info.name)


def _share_a_cpu(plan: Plan) -> bool:
    return plan.jobs > 1 and plan.device is Device.CPU  # on a GPU they come in the order of interest


def longest_first(cells: Sequence[ReadyCell], known: Mapping[str, float]) -> list[ReadyCell]:
    """Begin, in each environment, with what nobody has timed yet and then with what took longest: a long cell that
    comes last leaves the other cores idle."""
    environments = list(dict.fromkeys(cell.request.cell.environment for cell in cells))

    def rank(cell: ReadyCell) -> tuple[int, float]:
        return environments.index(cell.request.cell.environment), -known.get(timing_name(cell.request), math.inf)

    return sorted(cells, key=rank)


def keep_cell(done: FinishedCell, key: str, run_folder: Path, store: CellStore, note: Callable[[str], None]) -> None:
    """Write a cell that has ended into its run, and into the store if it can be reused."""
    result = done.result
    if mistake := mistake_in_details(result.evidence):
        failure = Failure(kind="crash", message=f"its result is not valid: {mistake}")
        result = result.model_copy(update={"evidence": {}, "failure": failure})
    stored = stored_cell(result, key=key, seconds=done.seconds, run=run_folder.name)
    # first: who is killed before the next line finds the cell there and not in the run
    refused = _why_not_stored(store, stored)
    write_cell(run_folder, stored)
    if refused and (refused := _why_not_stored(store, stored)):  # a disk that was full for a moment may have room again
        note(f"{done.result.cell}: not kept for later runs: {refused}")


def _why_not_stored(store: CellStore, cell: StoredCell) -> TotoCompatError | None:
    try:
        store.put(cell)
    except TotoCompatError as error:
        return error
    return None


def keep_log(cell: str, log: Path, run_folder: Path, progress: Progress) -> None:
    """Move a cell's log into its run."""
    try:
        target = log_path(run_folder, cell)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(log, target)
    except (OSError, TotoCompatError) as error:
        progress.note(f"{cell}: its log could not be kept: {error}")


def stored_cell(result: CellResult, *, key: str, seconds: float, run: str) -> StoredCell:
    fields = {name: getattr(result, name) for name in CellResult.model_fields}
    fields["request"] = without_places(result.request)
    return StoredCell(**fields, key=key, seconds=round(seconds, 3), stored=utc_now(), ran_in=run)


def without_places(request: CellRequest) -> CellRequest:
    """Take out the folders of this machine, which nobody finds again: results are read elsewhere."""
    changes: dict[str, Any] = {"work_folder": "", "quiet_lock": None}
    if request.cache.source != BUILTIN:
        file, class_name = split_source(request.cache.source)
        changes["cache"] = request.cache.model_copy(update={"source": f"{file.name}:{class_name}"})
    if request.csv is not None:
        changes["csv"] = request.csv.model_copy(update={"path": Path(request.csv.path).name})
    changes["symbols"] = tuple(
        symbol.model_copy(update={"series": symbol.series.model_copy(update={"path": Path(symbol.series.path).name})})
        for symbol in request.symbols
    )
    if request.checkpoint_folder is not None:
        changes["checkpoint_folder"] = Path(request.checkpoint_folder).name
    if (named := request.workload.checkpoint) is not None and Path(named).is_absolute():
        changes["workload"] = request.workload.model_copy(update={"checkpoint": Path(named).name})
    environment = request.environment
    if not is_release(toto := environment.toto_ts):
        named = without_password(toto) if toto.startswith("git+") else Path(toto).name
        environment = environment.model_copy(update={"toto_ts": named})
    if environment.index is not None:
        environment = environment.model_copy(update={"index": without_password(environment.index)})
    changes["environment"] = environment
    return request.model_copy(update=changes)


def environment_failure(request: CellRequest, error: TotoCompatError, runtime: Runtime, run: str) -> StoredCell:
    result = CellResult(
        cell=request.cell,
        request=request,
        provenance=Provenance(runtime=runtime.name, source_hash=runtime.source.hash, host=platform.node()),
        failure=Failure(kind="environment", message=str(error)),
    )
    return stored_cell(result, key="", seconds=0.0, run=run)


def describe_run(name: str, selection: Selection, runtime: Runtime, asked: Asked) -> RunInfo:
    revision, dirty = git_revision(selection.matrix_path.resolve().parent)
    return RunInfo(
        name=name,
        command=("toto-compat", *sys.argv[1:]),
        selectors=asked.selectors,
        profile=asked.profile,
        runtime=runtime.name,
        executor=asked.executor,
        device=selection.device.value,
        cells=selection.cells,
        gates={
            gate: limit
            for gate, limit in gate_limits(selection.matrix, asked.profile).items()
            if any(selection.symbols.values()) or not gate.rule.suite.rule.needs_symbols
        },
        releases=tuple(dict.fromkeys(environment.torch for environment in selection.matrix.environments.values())),
        production_profile=selection.matrix.production_profile,
        production_workloads=selection.matrix.production_workloads,
        matrix_file=str(selection.matrix_path),
        matrix_hash=matrix_hash(selection.matrix),
        source_hash=runtime.source.hash,
        git_revision=revision,
        git_dirty=dirty,
        host=platform.node(),
        started=utc_now(),
    )


def git_revision(folder: Path) -> tuple[str, bool]:
    """Return the folder's commit and whether tracked files differ from it; empty outside a repository."""

    def git(*arguments: str) -> str:
        try:
            command = ["git", "-C", str(folder), *arguments]
            done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    return git("rev-parse", "HEAD"), bool(git("status", "--porcelain", "--untracked-files=no"))
