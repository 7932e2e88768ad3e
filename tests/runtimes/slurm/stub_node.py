"""A whole run on Slurm whose cells are stubs: `python -m tests.runtimes.slurm.stub_node <behaviour> matrix ...`.

Everything is real but what is inside a cell: the command line, submitit, Slurm, the job on its node, the executor and
the cell's process. The behaviour is JSON, a word for all cells or an object with one per cache: those of stub_cell.py,
and of what a job does before it comes to its cell `die`, `die once`, `hang once` and `wait`.
"""

import fcntl
import json
import os
import signal
import sys
import time
from pathlib import Path

from tests.runtimes.stub_runtime import StubRuntime
from toto_compat.contract.request import Environment
from toto_compat.runtimes.seam import OnLine, PreparedEnvironment, Runtime
from toto_compat.runtimes.slurm import submission
from toto_compat.runtimes.slurm.exchange import Task
from toto_compat.runtimes.slurm.node import run_task
from toto_compat.runtimes.source import CellSource

BEHAVIOUR = "TOTO_COMPAT_STUB_BEHAVIOUR"
CONTAINERS = "TOTO_COMPAT_STUB_CONTAINERS"  # a file of orders: then cells run in containers
# in the shared cache folder
BUILT, BUILDS, GATE, GPUS, VARIABLES = "built", "builds.txt", "gate", "gpus.txt", "variables.txt"


class NodeStub(StubRuntime):
    """Takes a moment to build its environment, and writes down that it did."""

    def __init__(self, behaviour: str, task: Task) -> None:
        super().__init__(behaviour, source=CellSource(Path(task.source)))
        self._shared = Path(task.shared_cache)

    def prepare(self, environment_name: str, environment: Environment, say: OnLine) -> PreparedEnvironment:
        if not (self._shared / BUILT).exists():
            write_line(self._shared / BUILDS, environment_name)
            time.sleep(0.5)  # a build takes its time: another job is in the middle of it if nothing keeps it out
            (self._shared / BUILT).touch()
        return super().prepare(environment_name, environment, say)


def run_stub_task(path: str) -> None:
    run_task(path, open_with=open_stub)


def open_stub(task: Task) -> Runtime:
    if orders := os.environ.get(CONTAINERS):
        # here and not above: the Docker SDK is for the one test that uses it
        from tests.faults.stand_in_runner import in_containers

        return in_containers(orders)
    shared = Path(task.shared_cache)
    told = json.loads(os.environ[BEHAVIOUR])
    behaviour = told if isinstance(told, str) else told.get(task.request.cell.cache, "measure")
    if task.kind == "references":
        behaviour = "measure"
    write_line(shared / GPUS, f"{task.request.cell.cache} {os.environ.get('CUDA_VISIBLE_DEVICES', 'none')}")
    for name in os.environ:
        write_line(shared / VARIABLES, name)
    match behaviour:
        case "die" | "die once":
            if behaviour == "die" or first_time(task):
                print("about to die", flush=True)  # noqa: T201 - its job's output
                os.kill(os.getpid(), signal.SIGKILL)
            behaviour = "measure"
        case "hang once":
            behaviour = "hang" if first_time(task) else "measure"
        case "wait":
            (shared / GATE).read_text()  # a pipe: until somebody opens it to write
            behaviour = "measure"
    return NodeStub(behaviour, task)


def first_time(task: Task) -> bool:
    """Tell if no job was here before, and leave a mark for the next."""
    mark = Path(task.shared_cache) / f"{task.request.cell.cache}.was-here"
    if mark.exists():
        return False
    mark.touch()
    return True


def write_line(path: Path, line: str) -> None:
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(f"{line}\n")


if __name__ == "__main__":
    os.environ[BEHAVIOUR] = sys.argv.pop(1)
    # by its importable name: this module is __main__ here, and nodes must find it
    from tests.runtimes.slurm import stub_node

    setattr(submission, "NODE_FUNCTION", stub_node.run_stub_task)  # noqa: B010 - a constant to everybody else
    from toto_compat.cli import main

    main()
