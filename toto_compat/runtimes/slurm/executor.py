"""The Slurm executor: submits cells as job arrays, then waits for their results and not for Slurm's word."""

import secrets
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from toto_compat.contract.cell_name import CellName
from toto_compat.errors import SelectionError, StorageError, TotoCompatError
from toto_compat.evidence.files import cache_folder, file_hash, write_model
from toto_compat.evidence.references import needs_references, references_key
from toto_compat.evidence.store import cell_path
from toto_compat.runtimes.local import FinishedCell, OnFinished, ReadyCell
from toto_compat.runtimes.progress import Progress
from toto_compat.runtimes.references import SharedReferences
from toto_compat.runtimes.seam import Runtime
from toto_compat.runtimes.slurm.cluster import queue
from toto_compat.runtimes.slurm.exchange import Exchange, Submission, Submitted, Task, exchange_of
from toto_compat.runtimes.slurm.remote import NodesRuntime
from toto_compat.runtimes.slurm.seal import sealed
from toto_compat.runtimes.slurm.watch import Watch


def run_cells(
    cells: Sequence[ReadyCell],
    runtime: Runtime,
    *,
    jobs: int,
    gpus: Sequence[str],  # noqa: ARG001 - the nodes have them, and Slurm hands them out
    scratch: Path,  # noqa: ARG001 - on the nodes
    keep_log: Callable[[str, Path], None],
    progress: Progress,
    on_finished: OnFinished,
    references: SharedReferences | None = None,
    run_folder: Path,
    detach: bool = False,
) -> None:
    """Submit all cells, `jobs` at a time, and hand over each as its result arrives; with `detach` only submit.

    Ctrl-C cancels the jobs; what had arrived by then is still handed over. A folder that stays away cancels nothing:
    jobs go on, and the run can be taken up."""
    assert isinstance(runtime, NodesRuntime)
    if not cells:
        return
    exchange = exchange_of(run_folder)
    forget_earlier(exchange, [cell.request.cell for cell in cells])
    submitted = write_tasks(exchange, cells, runtime, jobs=jobs, references=references)
    by_number = {task.number: cell for task, cell in zip(submitted.cells, cells, strict=True)}

    def hand_over(task: Submission, done: FinishedCell) -> None:
        on_finished(by_number[task.number], done)

    watch = Watch(exchange, submitted, progress=progress, keep_log=keep_log, hand_over=hand_over)
    try:
        watch.submit_rest()
        if not detach:
            watch.to_the_end()
    except BaseException as error:
        if isinstance(error, StorageError) and watch.all_submitted:
            progress.note(f"jobs go on: `toto-compat status {exchange.run} --wait` takes the run up")
        else:
            watch.cancel()
        raise


def forget_earlier(exchange: Exchange, cells: Sequence[CellName]) -> None:
    """Remove what an earlier run of the same name left, so that nothing of it is taken for this one's.

    One whose jobs are still coming is not touched: they would write into the new one."""
    run_folder = exchange.folder.parent
    if exchange.has_submitted:
        jobs, earlier, name = queue(), exchange.read_submitted(), run_folder.name
        last = {task.jobs[-1] for task in earlier.tasks if task.jobs}
        unanswered = earlier.unanswered.name if earlier.unanswered is not None else None
        if jobs is None or any(
            (queued.is_coming or queued.held) and (job in last or queued.name == unanswered)
            for job, queued in jobs.items()
        ):
            raise SelectionError(
                f"--run {name}: an earlier run of this name may still have jobs on Slurm",
                hint=f"see `toto-compat status {name}`, end it with `toto-compat cancel {name}`, or take another name",
            )
    exchange.remove()
    for cell in cells:
        cell_path(run_folder, cell).unlink(missing_ok=True)


def write_tasks(
    exchange: Exchange,
    cells: Sequence[ReadyCell],
    runtime: NodesRuntime,
    *,
    jobs: int,
    references: SharedReferences | None,
) -> Submitted:
    """Write every task and the list of them, before anything is submitted.

    Where several cells are held to the same references, a task of its own computes these and the cells come after it:
    nobody holds a GPU to wait for them.
    """
    exchange.make_folders()
    tasks: list[Submission] = []
    nonce = secrets.token_hex(16)

    def add(cell: ReadyCell, kind: str, after: int | None = None) -> int:
        number = len(tasks)
        written = Task.model_validate(
            {
                "kind": kind,
                "request": cell.request,
                "runtime": runtime.name,
                "shared_cache": str(cache_folder()),
                "node_cache": runtime.settings.node_cache,
                "source": str(runtime.source.folder / "toto_compat"),
                "fresh": references is not None and references.fresh,
                "nonce": nonce,
            }
        )
        path = exchange.task(number)
        write_model(path, written)
        told = {"number": number, "kind": kind, "cell": cell.request.cell, "key": cell.key, "after": after}
        tasks.append(Submission.model_validate({**told, "content": file_hash(path)}))
        return number

    sharing: defaultdict[str, list[ReadyCell]] = defaultdict(list)
    if references is not None:
        for cell in cells:
            sharing[_references_of(cell, runtime)].append(cell)
    first = {key: add(own[0], "references") for key, own in sharing.items() if key and len(own) > 1}
    for cell in cells:
        add(cell, "cell", first.get(_references_of(cell, runtime)) if first else None)
    submitted = sealed(Submitted(nonce=nonce, settings=runtime.settings, at_a_time=jobs, tasks=tuple(tasks)))
    exchange.write_submitted(submitted)
    return submitted


def _references_of(cell: ReadyCell, runtime: NodesRuntime) -> str:
    if not needs_references(cell.request):
        return ""
    try:
        return references_key(cell.request, lock=cell.prepared.lock, source_hash=runtime.source.hash, machine="")
    except TotoCompatError:
        return ""  # a file of the workload is gone: the cell will say so
