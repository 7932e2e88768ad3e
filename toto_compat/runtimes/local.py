"""The local executor: spreads cells over this machine, some at a time."""

import fcntl
import os
import queue
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO

from toto_compat.contract.request import CellRequest
from toto_compat.contract.result import CellResult, Failure, Provenance
from toto_compat.errors import StorageError, TotoCompatError
from toto_compat.evidence.left_file import read_left_file
from toto_compat.evidence.makers import made_by_this_process, made_on_another_machine, made_on_this_machine, maker_lives
from toto_compat.evidence.references import KnownReferences
from toto_compat.runtimes.cell_process import LOG_FILE, work_folders
from toto_compat.runtimes.gpu_neighbours import neighbours_on, with_neighbours
from toto_compat.runtimes.orphans import end_processes_of
from toto_compat.runtimes.progress import Progress
from toto_compat.runtimes.references import SharedReferences, left_references
from toto_compat.runtimes.seam import PreparedEnvironment, Runtime

_HEARTBEAT_SECONDS = 30.0
IN_USE = "in-use.lock"
_LONGEST_GROUP_LOG = 5_000_000  # a compiler that logs every step must not fill results/


@dataclass(frozen=True)
class ReadyCell:
    """A cell that can be run now."""

    request: CellRequest
    prepared: PreparedEnvironment
    key: str = ""  # of its result in the store, from what it was given and not from what that became meanwhile


@dataclass(frozen=True)
class FinishedCell:
    result: CellResult
    seconds: float


OnFinished = Callable[[ReadyCell, FinishedCell], None]


def run_cells(
    cells: Sequence[ReadyCell],
    runtime: Runtime,
    *,
    jobs: int,
    gpus: Sequence[str],
    scratch: Path,
    keep_log: Callable[[str, Path], None],
    progress: Progress,
    on_finished: OnFinished,
    references: SharedReferences | None = None,
    run_folder: Path | None = None,  # noqa: ARG001 - for executors that leave this machine
    detach: bool = False,  # noqa: ARG001
) -> None:
    """Run all cells, `jobs` at a time; `on_finished` is called here, in the caller's thread, as each one ends.

    Ctrl-C stops the children; cells that had finished by then are still handed over. Without `references` every cell
    computes its own."""
    for leftover in abandoned_scratch(scratch):
        end_processes_of(leftover)  # of a runner and supervisors that were killed together
        shutil.rmtree(leftover, ignore_errors=True)
    free_gpus: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    for slot in range(jobs):
        free_gpus.put(gpus[slot % len(gpus)] if gpus else None)

    def run_one(cell: ReadyCell) -> FinishedCell:
        gpu = free_gpus.get()
        progress.started(cell.request.cell)
        try:
            known = None
            if references is not None:
                known = references_of(cell, references, runtime, scratch=scratch, progress=progress, gpu=gpu)
            started, neighbours = time.monotonic(), neighbours_on(gpu)
            result = _run_in_scratch(
                cell, runtime, scratch=scratch, keep_log=keep_log, progress=progress, gpu=gpu, references=known
            )
            result = with_neighbours(result, neighbours, neighbours_on(gpu))
        finally:
            free_gpus.put(gpu)
        return FinishedCell(result, time.monotonic() - started)

    pool = ThreadPoolExecutor(max_workers=jobs, thread_name_prefix="cell")
    # of many cells only the next few are in hand, and each tells when it ends: nobody looks through all of them
    waiting = iter(cells)
    pending: dict[Future[FinishedCell], ReadyCell] = {}
    ended: queue.SimpleQueue[Future[FinishedCell]] = queue.SimpleQueue()

    def submit(cell: ReadyCell) -> None:
        future = pool.submit(run_one, cell)
        pending[future] = cell
        future.add_done_callback(ended.put)

    def hand_over(done: Future[FinishedCell]) -> None:
        cell, finished = pending.pop(done), done.result()
        on_finished(cell, finished)  # first: what is only said must not cost a cell
        progress.finished(cell.request.cell, finished.result.failure, finished.seconds)

    try:
        for cell in islice(waiting, 2 * jobs):
            submit(cell)
        while pending:
            progress.heartbeat()
            try:
                done = ended.get(timeout=_HEARTBEAT_SECONDS)
            except queue.Empty:
                continue
            hand_over(done)
            for cell in islice(waiting, 1):
                submit(cell)
    except BaseException:
        for future in pending:
            future.cancel()
        runtime.stop()
        pool.shutdown(wait=True)
        for future in [one for one in pending if one.done() and not one.cancelled() and one.exception() is None]:
            if future.result().result.failure is None:
                hand_over(future)
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def references_of(
    cell: ReadyCell,
    references: SharedReferences,
    runtime: Runtime,
    *,
    scratch: Path,
    progress: Progress,
    gpu: str | None,
) -> KnownReferences | None:
    """Ask for what a cell is held to; where nobody has it yet it is computed here, before the cell starts."""
    name = cell.request.cell

    def compute(request: CellRequest) -> KnownReferences | None:
        progress.note(f"{name.environment}: upstream eager is asked once for all cells")
        try:
            with _scratch_folder(scratch, name) as folder:
                result = runtime.run_cell(cell.prepared, request, folder, lambda _: None, gpu=gpu)
                computed = left_references(folder, result)
        except (OSError, TotoCompatError) as error:
            progress.note(f"{name.environment}: each cell asks upstream eager itself: {error}")
            return None
        failed = next((failure for _, failure in result.failures), None)
        if computed is None and not (failed and failed.kind == "interrupted"):
            why = failed.message if failed else "it left no answers that can be used"
            progress.note(f"{name.environment}: each cell asks upstream eager itself: {why}")
        return computed

    return references.of(cell.request, cell.prepared.lock, compute, progress.note, gpu=gpu)


def _run_in_scratch(
    cell: ReadyCell,
    runtime: Runtime,
    *,
    scratch: Path,
    keep_log: Callable[[str, Path], None],
    progress: Progress,
    gpu: str | None,
    references: KnownReferences | None,
) -> CellResult:
    """Run the cell in an empty folder of its own that is gone afterwards; only the log is kept."""
    name = cell.request.cell
    with _scratch_folder(scratch, name) as folder:
        try:
            return runtime.run_cell(
                cell.prepared,
                cell.request,
                folder,
                lambda line: progress.line(name, line),
                gpu=gpu,
                references=references,
            )
        except (OSError, TotoCompatError) as error:
            # the harness's own trouble with this one cell: the others go on
            return CellResult(
                cell=name,
                request=cell.request,
                provenance=Provenance(runtime=runtime.name, lock=cell.prepared.lock),
                failure=Failure(kind="crash", message=f"the cell could not be started: {error}"),
            )
        finally:
            if (folder / LOG_FILE).exists():
                _append_group_logs(folder)
                keep_log(name, folder / LOG_FILE)


@contextmanager
def _scratch_folder(scratch: Path, name: str) -> Iterator[Path]:
    try:
        folder, in_use = _new_scratch_folder(scratch)
    except OSError as error:
        raise StorageError(
            f"{scratch}: no scratch folder for {name}: {error.strerror}",
            hint="free space there, or set TOTO_COMPAT_CACHE to another folder",
        ) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        in_use.close()


def _new_scratch_folder(scratch: Path) -> tuple[Path, IO[str]]:
    """Make an empty folder; return it and the open lock that says somebody is using it."""
    scratch.mkdir(parents=True, exist_ok=True)
    # under another name until it is locked: nobody may take it for an abandoned one
    making = Path(tempfile.mkdtemp(dir=scratch, prefix=f".new{made_by_this_process()}"))
    in_use = (making / IN_USE).open("w", encoding="utf-8")
    try:
        fcntl.flock(in_use, fcntl.LOCK_EX)
        in_use.write(made_on_this_machine())
        in_use.flush()
        # a short name: sockets below it have a limit on the length of their path
        return making.rename(scratch / secrets.token_hex(4)), in_use
    except BaseException:
        in_use.close()
        shutil.rmtree(making, ignore_errors=True)
        raise


def abandoned_scratch(scratch: Path) -> list[Path]:
    """Find the folders of cells whose runner was killed: the kernel has freed their locks."""
    if not scratch.is_dir():
        return []
    return [folder for folder in sorted(scratch.iterdir()) if folder.is_dir() and _is_abandoned(folder)]


def _is_abandoned(folder: Path) -> bool:
    if folder.name.startswith("."):
        return not maker_lives(folder.name)
    try:
        with (folder / IN_USE).open("r+", encoding="utf-8", errors="replace") as in_use:
            fcntl.flock(in_use, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return not made_on_another_machine(in_use.read())
    except FileNotFoundError:
        return True
    except OSError:
        return False  # it is locked, or nobody knows


def _append_group_logs(folder: Path) -> None:
    """Append what the processes inside the cell printed to the one log that is kept."""
    try:
        with (folder / LOG_FILE).open("ab") as kept:
            for work in work_folders(folder):
                for name, content in _group_logs(work):
                    kept.write(f"\n--- {name} ---\n".encode(errors="replace"))
                    kept.write(content)
    except OSError:
        # a full disk: the result says so already, and the log is as long as it could be
        return


def _group_logs(work: Path) -> Iterator[tuple[str, bytes]]:
    """Name and end of each log, the one last written to last. What is not a file in this very folder is passed over."""
    try:
        folder = os.open(work, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return  # no such folder, or the cell put a link in its place
    try:
        with os.scandir(folder) as entries:
            logs = [entry for entry in entries if entry.name.endswith(".log")]
            names = [entry.name for entry in sorted(logs, key=lambda one: one.stat(follow_symlinks=False).st_mtime)]
        for name in names:
            try:
                content = read_left_file(name, _LONGEST_GROUP_LOG, in_folder=folder, end_only=True)
            except OSError:
                continue
            yield name.removesuffix(".log"), content
    finally:
        os.close(folder)
