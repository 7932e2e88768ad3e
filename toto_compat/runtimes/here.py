"""Runs cells with the interpreter that runs this: nothing is built, and its freeze is the lock."""

import os
import sys
from pathlib import Path

from toto_compat.contract.request import Environment
from toto_compat.environments.here import freeze_lock
from toto_compat.environments.pythons import find_compiler
from toto_compat.errors import EnvironmentBuildError
from toto_compat.runtimes.seam import BuildNeeds, OnLine, PreparedEnvironment
from toto_compat.runtimes.venv import VenvRuntime


class HereRuntime(VenvRuntime):
    """Cells as processes of the current interpreter, with a cell's variables and limits."""

    name = "here"

    def lock_of(self, environment_name: str, environment: Environment) -> str | None:  # noqa: ARG002 - the protocol's
        return freeze_lock()

    def obstacle(self, environment_name: str, environment: Environment) -> str:
        try:
            find_compiler()
            self._check_gpus(environment_name, environment)
        except EnvironmentBuildError as error:
            return str(error)
        return ""

    def needs(self, environment_name: str, environment: Environment) -> BuildNeeds:  # noqa: ARG002 - the protocol's
        return BuildNeeds(download_bytes=0, disk_bytes=0, seconds=0.0)

    def tidy(self) -> None:
        """Do nothing: cells are processes, and end with their runner."""

    def build_log(self, environment_name: str, environment: Environment) -> Path:  # noqa: ARG002 - nothing is built
        return Path(os.devnull)

    def build(self, environment_name: str, environment: Environment, say: OnLine) -> PreparedEnvironment:  # noqa: ARG002
        return PreparedEnvironment(
            name=environment_name,
            environment=environment,
            runtime=self.name,
            python=sys.executable,
            lock=freeze_lock(),
        )
