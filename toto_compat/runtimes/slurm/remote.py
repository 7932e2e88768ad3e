"""The runtime as the submitting machine sees it: it runs nothing, the nodes do."""

import hashlib
import json
from pathlib import Path
from typing import Literal, NoReturn

from toto_compat.contract.request import CellRequest, Device, Environment
from toto_compat.contract.result import CellResult
from toto_compat.environments.virtualenv import specification_hash
from toto_compat.errors import EnvironmentBuildError
from toto_compat.evidence.references import KnownReferences
from toto_compat.matrix.slurm import SlurmSettings
from toto_compat.runtimes.seam import AttachedCommand, BuildNeeds, OnLine, PreparedEnvironment
from toto_compat.runtimes.source import CellSource


class NodesRuntime:
    """Environments that nodes build for themselves, once each.

    What the nodes are is known by what is asked of the cluster: partition, GPUs and features stand in a cell's key in
    the place of this machine's own. What a node really was is in the provenance of each result.
    """

    elsewhere = True

    def __init__(self, name: Literal["venv", "docker"], settings: SlurmSettings, device: Device) -> None:
        self.name: str = name
        self.source = CellSource()
        self.settings = settings
        self._device = device

    def lock_of(self, environment_name: str, environment: Environment) -> str | None:
        demands = self.settings.demands_of(environment_name)
        nodes = [demands.partition, demands.gres, demands.constraint, self.settings.exclusive]
        facts = ["slurm", self.name, self._packages(environment_name, environment), nodes]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def _packages(self, environment_name: str, environment: Environment) -> str:
        if self.name == "venv":
            return specification_hash(environment)
        # here and not above: what reads locks of images imports the Docker SDK, which takes 0.3 s
        from toto_compat.environments.image import read_dockerfile
        from toto_compat.environments.locks import read_base_digests, read_lock

        parts = [read_lock(environment_name, environment).identity, environment.base_image]
        parts += [str(read_base_digests().get(environment.base_image)), hashlib.sha256(read_dockerfile()).hexdigest()]
        return " ".join(parts)

    def obstacle(self, environment_name: str, environment: Environment) -> str:
        on_gpu = environment.runs_on(self._device) is Device.CUDA
        if on_gpu and self.settings.demands_of(environment_name).gres is None:
            return (
                f"{environment_name}: its cells run on a GPU, and none is asked for\n"
                "set slurm.gres in matrix.yaml, such as gpu:1; or run with --device cpu"
            )
        return ""

    def needs(self, environment_name: str, environment: Environment) -> BuildNeeds:  # noqa: ARG002 - the protocol's
        return BuildNeeds(download_bytes=0, disk_bytes=0, seconds=0.0)

    def tidy(self) -> None:
        """Leave the nodes alone: their own runs tidy up."""

    def build_log(self, environment_name: str, environment: Environment) -> Path:  # noqa: ARG002 - nodes have them
        return Path("/nonexistent")

    def build(self, environment_name: str, environment: Environment, say: OnLine) -> PreparedEnvironment:
        return self.prepare(environment_name, environment, say)

    def prepare(self, environment_name: str, environment: Environment, say: OnLine) -> PreparedEnvironment:  # noqa: ARG002
        if obstacle := self.obstacle(environment_name, environment):
            message, _, hint = obstacle.partition("\n")
            raise EnvironmentBuildError(message, hint=hint)
        return PreparedEnvironment(
            name=environment_name,
            environment=environment,
            runtime=self.name,
            python="",
            lock=self.lock_of(environment_name, environment) or "",
        )

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
        self._only_on_nodes(prepared, request, folder, on_line, gpu, references)

    def attached(
        self, prepared: PreparedEnvironment, words: tuple[str, ...], folder: Path, *, terminal: bool
    ) -> AttachedCommand:
        self._only_on_nodes(prepared, words, folder, terminal)

    def _only_on_nodes(self, *_: object) -> NoReturn:
        raise AssertionError("cells of this runtime run on nodes: the executor submits them")

    def stop(self) -> None:
        """Do nothing here; the executor cancels its jobs."""
