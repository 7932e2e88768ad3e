"""`toto-compat` whose cells are stand-ins: everything but pip and torch is the real thing.

`python stand_in_runner.py <orders.json> matrix ...`, a process of its own that a campaign can halt and kill.
"""

import json
import sys
from pathlib import Path

from toto_compat import workflow
from toto_compat.cli import main
from toto_compat.contract.request import Device, Environment, Limits
from toto_compat.runtimes.cell_process import CELL_COMMAND
from toto_compat.runtimes.seam import OnLine, PreparedEnvironment, Runtime
from toto_compat.runtimes.source import CellSource
from toto_compat.runtimes.venv import VenvRuntime

STAND_IN = Path(__file__).with_name("stand_in_cell.py")


class StandInRuntime(VenvRuntime):
    """The runtime of virtualenvs with this interpreter in the place of one, and nothing to build."""

    def __init__(self, orders_path: str) -> None:
        orders = json.loads(Path(orders_path).read_text(encoding="utf-8"))
        self.python, self.asks = orders["python"] or sys.executable, orders["probe"]
        command = CELL_COMMAND if orders["python"] else ("-I", "-S", str(STAND_IN), orders_path)
        super().__init__(CellSource(), limits=Limits(), device=Device.CPU, command=command)

    def obstacle(self, environment_name: str, environment: Environment) -> str:  # noqa: ARG002
        return ""

    def lock_of(self, environment_name: str, environment: Environment) -> str | None:  # noqa: ARG002
        return "stand-in"

    def build(self, environment_name: str, environment: Environment, say: OnLine) -> PreparedEnvironment:  # noqa: ARG002
        return PreparedEnvironment(
            name=environment_name, environment=environment, runtime=self.name, python=self.python, lock="stand-in"
        )

    def prepare(self, environment_name: str, environment: Environment, say: OnLine) -> PreparedEnvironment:
        prepare = super().prepare if self.asks else self.build
        return prepare(environment_name, environment, say)


def in_containers(orders_path: str) -> Runtime:
    """The container runtime with the small image of the tests in the place of one with torch."""
    # here and not above: the Docker SDK takes 0.3 s of every other runner
    from tests.runtimes.test_docker import BASE
    from toto_compat.runtimes.docker import DockerRuntime
    from toto_compat.runtimes.probing import Answer, Probed

    orders = json.loads(Path(orders_path).read_text(encoding="utf-8"))
    source = CellSource()
    source._folder = Path(orders["source"])

    class StandInContainers(DockerRuntime):
        def obstacle(self, environment_name: str, environment: Environment) -> str:  # noqa: ARG002
            return ""

        def lock_of(self, environment_name: str, environment: Environment) -> str | None:  # noqa: ARG002
            return "stand-in"

        def prepare(self, environment_name: str, environment: Environment, say: OnLine) -> PreparedEnvironment:  # noqa: ARG002
            self.tidy()
            self._images["stand-in"], self._bases["stand-in"] = orders["image"], BASE
            self._probed["stand-in"] = Probed(answer=Answer())
            return PreparedEnvironment(
                name=environment_name,
                environment=environment,
                runtime=self.name,
                python="/opt/venv/bin/python",
                lock="stand-in",
            )

    return StandInContainers(
        source, limits=Limits(), device=Device.CPU, command=("-m", "stub_cell", orders["behaviour"])
    )


if __name__ == "__main__":
    asked = sys.argv.pop(1)
    runtime = in_containers(asked) if "source" in Path(asked).read_text(encoding="utf-8") else StandInRuntime(asked)
    setattr(workflow, "open_runtime", lambda *_, **__: runtime)  # noqa: B010 - not exported from there
    main()
