"""What crosses between the machine that submits and the nodes: files in `results/<run>/slurm`, which both see.

    submitted.json       what was asked and every job of it, written by the submitting side alone
    tasks/<number>.json  one task: a cell, or the references that several cells share; removed at the end
    results/<number>.json, logs/<number>.log, progress/<number>.txt    what a node leaves
    jobs/                submitit's own: pickles, batch scripts, output of the jobs

A result in there is the truth about its cell, whatever Slurm says about the job. The folder is for its user alone: a
task may have the password of an index.
"""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from toto_compat.contract.cell_name import CellName
from toto_compat.contract.request import CellRequest
from toto_compat.contract.result import CellResult
from toto_compat.contract.strict_model import StrictModel
from toto_compat.errors import SelectionError, StorageError
from toto_compat.evidence.files import checked, make_folder, read_bytes, storage_errors, sync_folder, write_model
from toto_compat.evidence.layouts import refuse_later
from toto_compat.matrix.slurm import SlurmSettings

AWAY_SECONDS = 3600.0  # that the shared folder may be away, or full, before whoever needs it gives up

LAYOUT: Literal[2] = 2  # of submitted.json and of results; 1 had no nonce, no seal and nothing unanswered

# These are handed to Slurm's commands and lead to files: in ASCII, and nothing but what such a thing is
_Job = Annotated[str, Field(pattern=r"^[0-9]{1,18}(_[0-9]{1,9})?$")]
_Hash = Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")]
_Nonce = Annotated[str, Field(pattern=r"^([0-9a-f]{32})?$")]
_Number = Annotated[int, Field(ge=0, le=999_999_999)]
_RESULT_NAME = re.compile(r"([0-9]{1,9})\.json", re.ASCII)


class Task(StrictModel):
    """Holds what one job does, as the node is told it."""

    kind: Literal["cell", "references"] = "cell"
    request: CellRequest
    runtime: Literal["venv", "docker"]
    shared_cache: str  # the submitting side's cache folder: staged inputs and references lie in it
    node_cache: str | None = None  # where the node builds environments; None: in the shared one
    source: str  # the staged package whose cell side is run
    fresh: bool = False  # compute references also if they are stored
    nonce: _Nonce = ""  # of the run: its results say it again


class NodeResult(StrictModel):
    """Holds what a node says about a cell that ended there."""

    schema_version: Annotated[Literal[1, 2], Field(alias="schema")] = LAYOUT
    result: CellResult
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    node: str = ""
    job: str = ""
    nonce: _Nonce = ""  # of the run that asked: what an earlier one of the same name left has another


class Submission(StrictModel):
    """Tells of one task which jobs were submitted for it, the newest last."""

    number: _Number
    kind: Literal["cell", "references"] = "cell"
    cell: CellName
    key: _Hash = ""
    content: _Hash = ""  # hash of its file in tasks/
    after: _Number | None = None  # the number of the task that has to end first
    jobs: tuple[_Job, ...] = ()
    refused: _Number = 0  # times that Slurm did not take a further job for it

    @property
    def tries(self) -> int:
        return len(self.jobs) + self.refused


class Unanswered(StrictModel):
    """An array that Slurm is asked for: until the answer is on disk nobody knows if it has taken it."""

    name: Annotated[str, Field(pattern=r"^toto-compat-[A-Za-z0-9._+-]{1,300}$")]  # of no other array
    tasks: tuple[_Number, ...]


class Submitted(StrictModel):
    """submitted.json: what came of a run so far, enough to go on with it from another process."""

    schema_version: Annotated[Literal[1, 2], Field(alias="schema")] = LAYOUT
    nonce: _Nonce = ""
    settings: SlurmSettings
    at_a_time: Annotated[int, Field(ge=1)]
    tasks: tuple[Submission, ...]
    cancelled: bool = False
    unanswered: Unanswered | None = None
    seal: _Hash = ""  # see seal.py

    @model_validator(mode="after")
    def _numbers_are_of_one_task_each(self) -> Self:
        if len({task.number for task in self.tasks}) < len(self.tasks):
            raise ValueError("two tasks have the same number")
        return self

    @property
    def cells(self) -> tuple[Submission, ...]:
        return tuple(task for task in self.tasks if task.kind == "cell")

    def with_jobs(self, jobs: dict[int, str]) -> "Submitted":
        """Add a job to each task that got one: what Slurm was asked for is answered."""
        return self._changed(
            {task.number: {"jobs": (*task.jobs, jobs[task.number])} for task in self.tasks if task.number in jobs}
        ).model_copy(update={"unanswered": None})

    def with_refused(self, numbers: set[int]) -> "Submitted":
        """Count a try for each task that Slurm did not take."""
        return self._changed(
            {task.number: {"refused": task.refused + 1} for task in self.tasks if task.number in numbers}
        )

    def _changed(self, changes: dict[int, dict[str, Any]]) -> "Submitted":
        tasks = tuple(
            task.model_copy(update=changes[task.number]) if task.number in changes else task for task in self.tasks
        )
        return self.model_copy(update={"tasks": tasks})


@dataclass(frozen=True)
class Exchange:
    """The folder, and where things lie in it."""

    folder: Path

    @property
    def run(self) -> str:
        return self.folder.parent.name

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
        with storage_errors(self.folder, "made"):
            make_folder(self.folder.parent)
            self.folder.mkdir(mode=0o700, exist_ok=True)
            for name in ("tasks", "results", "logs", "progress", "jobs"):
                make_folder(self.folder / name)
            sync_folder(self.folder.parent)

    def remove(self) -> None:
        """Remove all of it; what cannot be removed would be taken for a new run's, so that is an error."""
        if self.folder.is_symlink():
            raise StorageError(f"{self.folder}: a link, which is not followed", hint="remove it, or use another --run")
        with storage_errors(self.folder, "removed"):
            if self.folder.exists():
                shutil.rmtree(self.folder)

    def remove_tasks(self) -> None:
        """Remove what nodes are told, once nothing is asked of them any more; what stays is not missed."""
        shutil.rmtree(self.folder / "tasks", ignore_errors=True)

    def write_submitted(self, submitted: Submitted) -> None:
        write_model(self.folder / "submitted.json", submitted)

    @property
    def has_submitted(self) -> bool:
        return (self.folder / "submitted.json").exists()

    def read_submitted(self) -> Submitted:
        path = self.folder / "submitted.json"
        if not self.has_submitted:
            raise SelectionError(f"{self.run}: not a run on Slurm", hint="status and cancel are for --executor slurm")
        content = read_bytes(path)
        refuse_later(path, content, newest=LAYOUT)
        return checked(path, Submitted, content)

    def arrived(self) -> set[int]:
        """Number the results that are there: one listing, however many tasks there are.

        A folder that cannot be listed is an error: nobody knows what is in it."""
        folder = self.folder / "results"
        with storage_errors(folder, "listed"):
            names = [path.name for path in folder.iterdir()]
        return {int(found[1]) for name in names if (found := _RESULT_NAME.fullmatch(name))}


def exchange_of(run_folder: Path) -> Exchange:
    return Exchange(run_folder.resolve() / "slurm")
