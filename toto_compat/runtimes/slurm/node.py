"""A job on its node: its environment prepared once, its cell run as the local executor would, its result left."""

import os
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from toto_compat.contract.request import CellRequest, Device
from toto_compat.contract.result import CellResult, Failure, Provenance
from toto_compat.environments.build_lock import build_lock
from toto_compat.errors import EngineError, EnvironmentBuildError, StorageError, TotoCompatError
from toto_compat.evidence.files import read_model, storage_errors, write_model
from toto_compat.evidence.references import ReferenceStore
from toto_compat.runtimes.local import FinishedCell, ReadyCell, references_of, run_cells
from toto_compat.runtimes.nvidia_smi import find_gpus
from toto_compat.runtimes.open import open_runtime
from toto_compat.runtimes.references import SharedReferences
from toto_compat.runtimes.run import without_places
from toto_compat.runtimes.seam import Runtime
from toto_compat.runtimes.slurm.exchange import AWAY_SECONDS, Exchange, NodeResult, Task
from toto_compat.runtimes.source import CellSource

OpenRuntime = Callable[[Task], Runtime]

_PAUSE_SECONDS = 15.0  # between two attempts to write where nothing can be written now


class OutOfTimeError(Exception):
    """Slurm has said that the job's time is nearly over."""


def open_for_task(task: Task) -> Runtime:
    """Open what the task runs in, with the source that was there when it was submitted."""
    request = task.request
    source = CellSource(Path(task.source))
    if source.name != Path(task.source).parent.name:
        raise EnvironmentBuildError(f"{task.source}: not what was submitted any more", hint="run the matrix again")
    return open_runtime(task.runtime, limits=request.limits, device=request.device, source=source)


def run_task(path: str, open_with: OpenRuntime = open_for_task) -> None:
    """Do the task at `path` and leave what came of it beside it; a job that is told to go leaves nothing.

    One that was put back after it had left its result has nothing to do."""
    file = Path(path)
    number, exchange = int(file.stem), Exchange(file.parent.parent)
    task = read_model(file, Task)
    if _is_done(exchange.result(number), task):
        return
    os.environ["TOTO_COMPAT_CACHE"] = task.node_cache or task.shared_cache
    began = time.monotonic()
    with _told_by_slurm(), NodeProgress(exchange.progress(number)) as progress:
        try:
            done = _run(task, open_with(task), number, exchange, progress)
        except OutOfTimeError:
            message = "the job's time ran out before the cell had ended: raise slurm.minutes in matrix.yaml"
            done = _failed(task, Failure(kind="timeout", message=message), began)
        except (EnvironmentBuildError, EngineError) as error:
            done = _failed(task, Failure(kind="environment", message=f"{_node()}: {error}"), began)
        except TotoCompatError as error:
            done = _failed(task, Failure(kind="crash", message=f"{_node()}: {error}"), began)
        _leave_result(exchange.result(number), done)


def _is_done(result: Path, task: Task) -> bool:
    try:
        done = read_model(result, NodeResult)
    except StorageError:
        return False
    return done.nonce == task.nonce and done.result.cell == task.request.cell


def _leave_result(path: Path, done: NodeResult) -> None:
    """Write the result. A shared folder that is away or full for a while does not cost a cell that has ended.

    Its folder is there since the run was submitted: where it is not, nothing is mounted."""
    began = time.monotonic()
    while True:
        try:
            with storage_errors(path, "written"):
                path.parent.stat()
            write_model(path, done)
        except StorageError:
            if time.monotonic() - began >= AWAY_SECONDS:
                raise
            time.sleep(_PAUSE_SECONDS)
        else:
            return


def _run(task: Task, runtime: Runtime, number: int, exchange: Exchange, progress: "NodeProgress") -> NodeResult:
    name, environment = task.request.cell.environment, task.request.environment
    with build_lock(node_lock(name), name, progress.note):
        prepared = runtime.prepare(name, environment, progress.note)
    # timings make way for each other on one node, not on the whole cluster
    request = task.request.model_copy(update={"quiet_lock": str(_on_this_node("quiet.lock"))})
    cell = ReadyCell(request, prepared)
    store = ReferenceStore(Path(task.shared_cache) / "references" / runtime.source.name)
    references = SharedReferences(store, runtime.source.hash, fresh=task.fresh and task.kind == "references")
    gpus = [gpu.uuid for gpu in find_gpus()][:1] if request.device is Device.CUDA else []
    scratch = _scratch(task)
    if task.kind == "references":
        gpu = gpus[0] if gpus else None
        references_of(cell, references, runtime, scratch=scratch, progress=progress, gpu=gpu)
        return _node_result(task, _nothing(request, runtime), 0.0)
    finished: list[FinishedCell] = []
    run_cells(
        [cell],
        runtime,
        jobs=1,
        gpus=gpus,
        scratch=scratch,
        keep_log=lambda _, log: _leave_log(log, exchange.log(number)),
        progress=progress,
        on_finished=lambda _, done: finished.append(done),
        references=references,
    )
    return _node_result(task, finished[0].result, finished[0].seconds)


def _leave_log(log: Path, where: Path) -> None:
    try:
        shutil.copyfile(log, where)
    except OSError:
        return  # a full shared folder: the result will not get there either, and says so


def node_lock(environment_name: str) -> Path:
    """Name the lock that the jobs of one node share: the first prepares the environment, the others find it ready."""
    return _on_this_node(f"{environment_name}.lock")


def _scratch(task: Task) -> Path:
    """Give a place for cells on this node's own disk.

    On some shared file systems a lock holds on one node alone, and a cell of another would look abandoned."""
    if task.node_cache is not None:
        return Path(task.node_cache) / "s"
    of_the_job = Path(os.environ.get("SLURM_TMPDIR", ""))
    return of_the_job / "s" if of_the_job.is_absolute() and of_the_job.is_dir() else _on_this_node("s")


def _on_this_node(name: str) -> Path:
    """Give a place in a folder of this user's alone: everybody of a node can write beside it.

    It is not in the cache folder, which nodes may share."""
    folder = Path(tempfile.gettempdir()) / f"toto-compat-node-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o077:
        raise EnvironmentBuildError(
            f"{folder}: not a folder of this user's alone, so no locks are put there",
            hint="remove it, or name another folder with `export TMPDIR=...` in slurm.setup",
        )
    return folder / name


def _node() -> str:
    return os.environ.get("SLURMD_NODENAME", "") or os.uname().nodename


def _job() -> str:
    array, index = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{index}" if array else os.environ.get("SLURM_JOB_ID", "")


def _node_result(task: Task, result: CellResult, seconds: float) -> NodeResult:
    # without the password of an index: it stays in the task, which is removed
    result = result.model_copy(update={"request": without_places(result.request)})
    return NodeResult(result=result, seconds=round(seconds, 3), node=_node(), job=_job(), nonce=task.nonce)


def _nothing(request: CellRequest, runtime: Runtime) -> CellResult:
    return CellResult(cell=request.cell, request=request, provenance=Provenance(runtime=runtime.name))


def _failed(task: Task, failure: Failure, began: float) -> NodeResult:
    provenance = Provenance(runtime=task.runtime, host=os.uname().nodename)
    result = CellResult(cell=task.request.cell, request=task.request, provenance=provenance, failure=failure)
    return _node_result(task, result, time.monotonic() - began)


@contextmanager
def _told_by_slurm() -> Iterator[None]:
    """SIGUSR2 is Slurm's warning that the time is nearly over, SIGTERM its order to go: for scancel or preemption.

    Both end the cell, since what runs it ends its children whatever it is left by. They replace submitit's handlers,
    which would put the job back by themselves.
    """

    def out_of_time(_number: int, _frame: FrameType | None) -> None:
        raise OutOfTimeError

    def told_to_go(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    earlier = {
        signal.SIGUSR2: signal.signal(signal.SIGUSR2, out_of_time),
        signal.SIGTERM: signal.signal(signal.SIGTERM, told_to_go),
    }
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


class NodeProgress:
    """Writes what happens into a file that the submitting side reads on; what cannot be written is not missed."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> Self:
        self._write("job", f"{_job()} {_node()}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return None

    def note(self, text: str) -> None:
        self._write("note", text)

    def started(self, cell: str) -> None:
        self._write("started", cell)

    def line(self, cell: str, line: str) -> None:  # noqa: ARG002 - there is one cell
        if line.startswith("::"):
            self._write("line", line)

    def finished(self, cell: str, failure: Failure | None, seconds: float) -> None:  # noqa: ARG002
        return None

    def heartbeat(self) -> None:
        return None

    def _write(self, what: str, text: str) -> None:
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{what} {' '.join(text.splitlines())}\n")
        except OSError:
            return
