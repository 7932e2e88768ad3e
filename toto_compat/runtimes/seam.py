"""What a runtime is: a place that can be prepared for an environment and can then run its cells."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from toto_compat.evidence.schema import CellRequest, CellResult
from toto_compat.matrix.schema import Environment

OnLine = Callable[[str], None]


@dataclass(frozen=True)
class PreparedEnvironment:
    """An environment that can run cells now."""

    name: str
    environment: Environment
    runtime: str  # 'venv' or 'docker'
    python: str  # the interpreter as the cell sees it
    lock: str  # hash of the exact packages (venv) or the image digest (docker): part of a result's identity
    folder: Path | None = None  # of the virtualenv


class Runtime(Protocol):
    """Where cells run. Implementations are safe to call from several threads."""

    name: str

    def lock_of(self, environment_name: str, environment: Environment) -> str | None:
        """The lock identity if the environment is there already; None if it must be built first. Cheap."""

    def obstacle(self, environment_name: str, environment: Environment) -> str:
        """Why the environment cannot be built, as far as that can be told without trying; mostly empty. Cheap."""

    def prepare(self, environment_name: str, environment: Environment, say: OnLine) -> PreparedEnvironment:
        """Build the environment or find it built. Raises EnvironmentBuildError or EngineError."""

    def run_cell(
        self,
        prepared: PreparedEnvironment,
        request: CellRequest,
        folder: Path,
        on_line: OnLine,
        *,
        gpu: str | None = None,
    ) -> CellResult:
        """Run one cell in an empty scratch folder; whatever happens to the cell is in the result."""

    def stop(self) -> None:
        """End every cell that is running; their run_cell returns a result that says so."""
