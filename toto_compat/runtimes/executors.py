"""How cells are spread: one row per executor. A new one is a module with such a function and a row here."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from toto_compat.runtimes.local import OnFinished, ReadyCell
from toto_compat.runtimes.progress import Progress
from toto_compat.runtimes.references import SharedReferences
from toto_compat.runtimes.seam import Runtime

# name -> module:function, imported when it is used
EXECUTORS: Mapping[str, str] = {
    "local": "toto_compat.runtimes.local:run_cells",
    "slurm": "toto_compat.runtimes.slurm.executor:run_cells",
}


class Executor(Protocol):
    """Runs all cells; `on_finished` is called in the caller's thread as each one ends.

    `run_folder` is where the results of the run lie; with `detach` an executor that can do so leaves its cells running.
    """

    def __call__(
        self,
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
        run_folder: Path,
        detach: bool = False,
    ) -> None: ...


def executor(name: str) -> Executor:
    module, _, function = EXECUTORS[name].partition(":")
    run_cells: Executor = getattr(importlib.import_module(module), function)
    return run_cells
