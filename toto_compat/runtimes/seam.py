"""What a runtime is: a place that can be prepared for an environment and can then run its cells."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from toto_compat.contract.request import CellRequest, Environment
from toto_compat.contract.result import CellResult
from toto_compat.environments.build_lock import OnLine
from toto_compat.evidence.references import KnownReferences
from toto_compat.runtimes.source import CellSource

__all__ = ["AttachedCommand", "BuildNeeds", "OnLine", "PreparedEnvironment", "Runtime"]


@dataclass(frozen=True)
class BuildNeeds:
    """Holds what building an environment takes, about."""

    download_bytes: int
    disk_bytes: int
    seconds: float


@dataclass(frozen=True)
class PreparedEnvironment:
    """An environment that can run cells now."""

    name: str
    environment: Environment
    runtime: str  # 'venv' or 'docker'
    python: str  # the interpreter as the cell sees it
    lock: str  # hash of the exact packages (venv) or the image digest (docker): part of a result's identity


@dataclass(frozen=True)
class AttachedCommand:
    """A command line that runs something in a prepared environment, attached to this process's terminal."""

    words: tuple[str, ...]
    variables: dict[str, str]  # the whole environment of that command
    folder: Path  # where it runs


class Runtime(Protocol):
    """Says where cells run. Implementations are safe to call from several threads.

    Opening one and asking it changes nothing on the machine; `tidy`, `build` and `prepare` are the first calls that do.
    """

    name: str
    elsewhere: bool  # its cells run on other machines, of which nothing is known here but what is asked of them
    source: CellSource  # what its cells will run of this package

    def lock_of(self, environment_name: str, environment: Environment) -> str | None:
        """Return the lock identity if the environment is there, else None: it must be built first. Cheap."""

    def obstacle(self, environment_name: str, environment: Environment) -> str:
        """Say why the environment cannot be built or run, as far as that shows without trying. Cheap, mostly empty."""

    def needs(self, environment_name: str, environment: Environment) -> BuildNeeds:
        """Return what building the environment takes. Cheap."""

    def tidy(self) -> None:
        """Remove what killed runs left outside of the cache folder, also where nothing is built or run any more."""

    def build_log(self, environment_name: str, environment: Environment) -> Path:
        """Name the file that building the environment is logged in."""

    def build(self, environment_name: str, environment: Environment, say: OnLine) -> PreparedEnvironment:
        """Build the environment or find it built, unchecked: for `attached`, where one sees what is wrong with it."""

    def prepare(self, environment_name: str, environment: Environment, say: OnLine) -> PreparedEnvironment:
        """Build the environment or find it built, and see that it works; EnvironmentBuildError, EngineError if not."""

    def run_cell(
        self,
        prepared: PreparedEnvironment,
        request: CellRequest,
        folder: Path,
        on_line: OnLine,
        *,
        gpu: str | None = None,
        references: KnownReferences | None = None,
    ) -> CellResult:
        """Run one cell in an empty scratch folder; whatever happens to the cell is in the result.

        Without `references` it computes its own."""

    def attached(
        self, prepared: PreparedEnvironment, words: tuple[str, ...], folder: Path, *, terminal: bool
    ) -> AttachedCommand:
        """Tell how to run `words` in the environment with a cell's variables and limits; `folder` is where it starts.

        `{python}` in the words is the environment's interpreter."""

    def stop(self) -> None:
        """End every cell that is running; their run_cell returns a result that says so."""
