"""The venv runtime with a stub in place of the cell: everything but pip and torch is real."""

import json
import sys
from pathlib import Path

from toto_compat import workflow
from toto_compat.contract.request import Device, Environment, Limits
from toto_compat.errors import EnvironmentBuildError
from toto_compat.runtimes.seam import OnLine, PreparedEnvironment
from toto_compat.runtimes.source import CellSource
from toto_compat.runtimes.venv import VenvRuntime

STUB_CELL = Path(__file__).with_name("stub_cell.py")
MATRIX_TEXT = """
schema: 1
environments:
  torch-2.13.0-cpu: {torch: "2.13.0", build: cpu}
  torch-2.12.0-cpu: {torch: "2.12.0", build: cpu}
  torch-2.9.0-cu128: {torch: "2.9.0", build: cu128}
caches:
  upstream: {source: builtin}
  fixed_size: {source: builtin}
settings: {stock: {}}
modes: [default]
profiles:
  quick: {iterations: 1, workloads: [quick], suites: [recompile, equivalence]}
workloads:
  quick: {}
"""


class StubRuntime(VenvRuntime):
    """Environments named in `broken` cannot be built; `behaviour` is one word for all cells or a word per cache."""

    def __init__(
        self,
        behaviour: str | dict[str, str] = "measure",
        broken: tuple[str, ...] = (),
        lock: str = "lock",
        source: CellSource | None = None,
    ) -> None:
        told = behaviour if isinstance(behaviour, str) else json.dumps(behaviour)
        super().__init__(source or CellSource(), limits=Limits(), device=Device.CPU, command=(str(STUB_CELL), told))
        self.broken = broken
        self.lock = lock

    def obstacle(self, environment_name: str, environment: Environment) -> str:  # noqa: ARG002
        return ""

    def lock_of(self, environment_name: str, environment: Environment) -> str | None:  # noqa: ARG002
        return None if environment_name in self.broken else self.lock

    def prepare(self, environment_name: str, environment: Environment, say: OnLine) -> PreparedEnvironment:  # noqa: ARG002
        if environment_name in self.broken:
            raise EnvironmentBuildError(f"{environment_name}: torch does not install", hint="see the log")
        return prepared(environment_name, environment, lock=self.lock)


def prepared(name: str, environment: Environment, lock: str = "lock") -> PreparedEnvironment:
    return PreparedEnvironment(name=name, environment=environment, runtime="venv", python=sys.executable, lock=lock)


if __name__ == "__main__":
    # a whole run in a process of its own, for the tests that interrupt or kill it
    runtime = StubRuntime(json.loads(sys.argv.pop(1)))
    setattr(workflow, "open_runtime", lambda *_, **__: runtime)  # noqa: B010 - not exported from there
    from toto_compat.cli import main

    main()
