"""A whole run on Slurm whose cells are stubs: `python -m tests.runtimes.slurm.stub_node <behaviour> matrix ...`.

Everything is real but what is inside a cell: the command line, submitit, Slurm, the job on its node, the executor and
the cell's process. The behaviour is a word for all cells or a JSON object with one per cache, those of stub_cell.py and
`hang once`, `die` and `die once`: what a job does before it comes to its cell.
"""

import json
import os
import signal
import sys
from pathlib import Path

from tests.runtimes.stub_runtime import StubRuntime
from toto_compat.runtimes.seam import Runtime
from toto_compat.runtimes.slurm import executor
from toto_compat.runtimes.slurm.exchange import Task
from toto_compat.runtimes.slurm.node import run_task
from toto_compat.runtimes.source import CellSource

BEHAVIOUR = "TOTO_COMPAT_STUB_BEHAVIOUR"


def run_stub_task(path: str) -> None:
    run_task(path, open_with=open_stub)


def open_stub(task: Task) -> Runtime:
    told = json.loads(os.environ[BEHAVIOUR])
    behaviour = told if isinstance(told, str) else told.get(task.request.cell.cache, "measure")
    if behaviour.startswith("die"):
        if behaviour == "die" or first_time(task):
            print("about to die", flush=True)  # noqa: T201 - its job's output
            os.kill(os.getpid(), signal.SIGKILL)
        behaviour = "measure"
    if behaviour == "hang once":
        behaviour = "hang" if first_time(task) else "measure"
    return StubRuntime(behaviour, source=CellSource(Path(task.source)))


def first_time(task: Task) -> bool:
    """Tell if no job was here before, and leave a mark for the next."""
    mark = Path(task.shared_cache) / f"{task.request.cell.cache}.was-here"
    if mark.exists():
        return False
    mark.touch()
    return True


if __name__ == "__main__":
    os.environ[BEHAVIOUR] = sys.argv.pop(1)
    # by its importable name: this module is __main__ here, and nodes must find it
    from tests.runtimes.slurm import stub_node

    setattr(executor, "NODE_FUNCTION", stub_node.run_stub_task)  # noqa: B010 - a constant to everybody else
    from toto_compat.cli import main

    main()
