"""What crosses between the machine that submits and the nodes: files in `results/<run>/slurm`, which both see.

    submitted.json       what was asked and every job of it, written by the submitting side alone
    tasks/<number>.json  one task: a cell, or the references that several cells share
    results/<number>.json, logs/<number>.log, progress/<number>.txt    what a node leaves
    jobs/                submitit's own: pickles, batch scripts, output of the jobs

A result in there is the truth about its cell, whatever Slurm says about the job.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from toto_compat.contract.cell_name import CellName
from toto_compat.contract.request import CellRequest
from toto_compat.contract.result import CellResult
from toto_compat.contract.strict_model import StrictModel
from toto_compat.errors import SelectionError, StorageError
from toto_compat.evidence.files import read_model, write_model
from toto_compat.matrix.slurm import SlurmSettings


class Task(StrictModel):
    """Holds what one job does, as the node is told it."""

    kind: Literal["cell", "references"] = "cell"
    request: CellRequest
    runtime: Literal["venv", "docker"]
    shared_cache: str  # the submitting side's cache folder: staged inputs and references lie in it
    node_cache: str | None = None  # where the node builds environments; None: in the shared one
    source: str  # the staged package whose cell side is run
    fresh: bool = False  # compute references also if they are stored


class NodeResult(StrictModel):
    """Holds what a node says about a cell that ended there."""

    schema_version: Annotated[Literal[1], Field(alias="schema")] = 1
    result: CellResult
    seconds: float
    node: str = ""
    job: str = ""


class Submission(StrictModel):
    """Tells of one task which jobs were submitted for it, the newest last."""

    number: int
    kind: Literal["cell", "references"] = "cell"
    cell: CellName
    key: str = ""
    after: int | None = None  # the number of the task that has to end first
    jobs: tuple[str, ...] = ()


class Submitted(StrictModel):
    """submitted.json: what came of a run so far, enough to go on with it from another process."""

    schema_version: Annotated[Literal[1], Field(alias="schema")] = 1
    settings: SlurmSettings
    at_a_time: int
    tasks: tuple[Submission, ...]
    cancelled: bool = False

    @property
    def cells(self) -> tuple[Submission, ...]:
        return tuple(task for task in self.tasks if task.kind == "cell")

    def with_jobs(self, jobs: dict[int, str]) -> "Submitted":
        """Add a job to each task that got one."""
        tasks = tuple(
            task.model_copy(update={"jobs": (*task.jobs, jobs[task.number])}) if task.number in jobs else task
            for task in self.tasks
        )
        return self.model_copy(update={"tasks": tasks})


@dataclass(frozen=True)
class Exchange:
    """The folder, and where things lie in it."""

    folder: Path

    def task(self, number: int) -> Path:
        return self.folder / "tasks" / f"{number}.json"

    def result(self, number: int) -> Path:
        return self.folder / "results" / f"{number}.json"

    def log(self, number: int) -> Path:
        return self.folder / "logs" / f"{number}.log"

    def progress(self, number: int) -> Path:
        return self.folder / "progress" / f"{number}.txt"

    @property
    def jobs(self) -> Path:
        return self.folder / "jobs"

    def make_folders(self) -> None:
        for name in ("tasks", "results", "logs", "progress", "jobs"):
            try:
                (self.folder / name).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise StorageError(f"{self.folder / name}: cannot be made: {error.strerror}") from error

    def write_submitted(self, submitted: Submitted) -> None:
        write_model(self.folder / "submitted.json", submitted)

    @property
    def has_submitted(self) -> bool:
        return (self.folder / "submitted.json").exists()

    def read_submitted(self) -> Submitted:
        path = self.folder / "submitted.json"
        if not self.has_submitted:
            raise SelectionError(
                f"{self.folder.parent.name}: not a run on Slurm", hint="status and cancel are for --executor slurm"
            )
        return read_model(path, Submitted)

    def arrived(self) -> set[int]:
        """Number the results that are there: one listing, however many tasks there are."""
        try:
            paths = list((self.folder / "results").iterdir())
        except OSError:
            return set()
        return {int(path.stem) for path in paths if path.suffix == ".json" and path.stem.isdigit()}


def exchange_of(run_folder: Path) -> Exchange:
    return Exchange(run_folder.resolve() / "slurm")
