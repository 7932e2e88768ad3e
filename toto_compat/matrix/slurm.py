"""The section `slurm` of matrix.yaml: what is asked of a cluster for every cell.

All of it ends up in a batch script. Each value is held to the characters that such a value has, so that none of them
can be anything else there: what needs more than that belongs into a script on the cluster, which `setup` sources.
"""

from typing import Annotated, Literal

from pydantic import Field

from toto_compat.contract.strict_model import StrictModel

_NAMES = r"^[A-Za-z0-9][A-Za-z0-9_.,-]*$"  # one name, or several with commas
_FEATURES = r"^[A-Za-z0-9][A-Za-z0-9_.&|-]*$"
_GRES = r"^[a-z]+(:[A-Za-z0-9_.-]+)?:[1-9][0-9]*$"
_PATH = r"^(/\.?[A-Za-z0-9_+@=-][A-Za-z0-9_.+@=-]*)+/?$"  # no part of it is `..`
SETUP_LINE = r"^[A-Za-z0-9_.,/:=@%+ -]+$"  # words and assignments: no quotes, no expansion, no second command

_LONGEST_NAME, _LONGEST_PATH, _LONGEST_LINE = 200, 1000, 1000  # characters
_LONGEST_MINUTES = 60 * 24 * 366
_LONGEST_PAUSE = 3600.0  # seconds
_MOST_RETRIES = 100

_SETUP_ACCEPTED = (
    "words of letters, digits and _.,/:=@%+- only, such as: module load gcc/12. For anything else write a script on "
    "the cluster and source that: source /shared/setup.sh"
)


class JobDemands(StrictModel):
    """What a job asks for; of an environment only what differs from the rest."""

    partition: str | None = Field(
        default=None, pattern=_NAMES, max_length=_LONGEST_NAME, description="name of a partition, or several: a,b"
    )
    gres: str | None = Field(
        default=None,
        pattern=_GRES,
        max_length=_LONGEST_NAME,
        description="GPUs of a cell, such as gpu:1 or gpu:a100:1",
    )
    constraint: str | None = Field(
        default=None,
        pattern=_FEATURES,
        max_length=_LONGEST_NAME,
        description="features of nodes, such as a100&nvme",
    )
    minutes: int | None = Field(
        default=None,
        ge=1,
        le=_LONGEST_MINUTES,
        description="time limit of a job; null: the profile's timeout_minutes and 60 to prepare",
    )


class SlurmSettings(JobDemands):
    """Says how cells become jobs."""

    account: str | None = Field(
        default=None, pattern=_NAMES, max_length=_LONGEST_NAME, description="account that is charged"
    )
    qos: str | None = Field(default=None, pattern=_NAMES, max_length=_LONGEST_NAME, description="quality of service")
    exclusive: bool = Field(default=False, description="a whole node for every cell: timings without neighbours")
    runtime: Literal["venv", "docker"] = Field(default="venv", description="how a node runs cells: venv or docker")
    setup: tuple[
        Annotated[str, Field(pattern=SETUP_LINE, max_length=_LONGEST_LINE, description=_SETUP_ACCEPTED)], ...
    ] = Field(
        default=(),
        description="commands that a job runs first on its node: words and assignments; source a script for more",
    )
    node_cache: str | None = Field(
        default=None,
        pattern=_PATH,
        max_length=_LONGEST_PATH,
        description="absolute path of a folder on each node's own disk for environments; null: the shared cache folder",
    )
    retries: int = Field(
        default=2, ge=0, le=_MOST_RETRIES, description="times that a job is submitted again if it left no result"
    )
    poll_seconds: float = Field(
        default=5.0, gt=0, le=_LONGEST_PAUSE, allow_inf_nan=False, description="time between two questions to squeue"
    )
    result_grace_seconds: float = Field(
        default=90.0,  # NFS tells of a new file up to a minute late
        ge=0,
        le=_LONGEST_PAUSE,
        allow_inf_nan=False,
        description="how much later than the end of its job a result may show on the shared folder",
    )
    environments: dict[str, JobDemands] = Field(
        default={}, description="what differs for an environment, by its name: {gres: gpu:h100:1}"
    )

    def demands_of(self, environment: str) -> JobDemands:
        """Give what a job of this environment asks for: its own demands before the general ones."""
        own = self.environments.get(environment, JobDemands())
        fields = JobDemands.model_fields
        return JobDemands(**{name: getattr(own, name) or getattr(self, name) for name in fields})
