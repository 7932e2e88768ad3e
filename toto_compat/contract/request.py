"""What a cell is asked: the request file, and the parts of matrix.yaml that it is made of."""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, model_validator

from toto_compat.contract.cell_name import CellName
from toto_compat.contract.gate_limit import GateLimit
from toto_compat.contract.references import References
from toto_compat.contract.strict_model import StrictModel
from toto_compat.contract.suites import Suite

# 2.13.0, 2.16.0rc1, 2.16.0.dev20261116: what an index lists, without the local part of a build
TORCH_RELEASE = r"^\d+\.\d+\.\d+((a|b|rc)\d+)?(\.dev\d+)?$"
_AMOUNT = r"^\d+[mg]$"


class Device(StrEnum):
    CPU = "cpu"
    CUDA = "cuda"


class Environment(StrictModel):
    """One pinned software stack. Its name is its identity: torch-<release>-<build>[-<what differs>]."""

    torch: str = Field(
        description="one exact PyTorch release, such as 2.13.0, 2.16.0rc1 or 2.16.0.dev20261116", pattern=TORCH_RELEASE
    )
    build: str = Field(description="cpu, or the CUDA tag of the wheel, such as cu128", pattern=r"^(cpu|cu\d{3})$")
    python: str = Field(default="3.11", description="Python minor version, such as 3.11", pattern=r"^3\.\d+$")
    toto_ts: str = Field(default="0.2.0", description="toto-ts release on the package index")
    xformers: str | None = Field(
        default=None, description="xformers release, or null: it swaps attention, norm, SwiGLU"
    )
    pins: dict[str, str] = Field(default={}, description="other packages and their exact versions")
    gpu_architectures: tuple[Annotated[str, Field(pattern=r"^sm_\d{2,3}[a-z]?$")], ...] = Field(
        default=(), description="sm_* the wheel carries, such as sm_90; a GPU outside is an error"
    )
    base_image: str = Field(default="python:3.11-slim", description="container base image")
    index: str | None = Field(default=None, description="pip index of the torch wheel; null: the user's own")

    @property
    def device(self) -> Device:
        return Device.CPU if self.build == "cpu" else Device.CUDA

    def runs_on(self, wanted: Device) -> Device:
        """Say where its cells run: a CPU wheel on the CPU, whatever is wanted."""
        return Device.CPU if self.device is Device.CPU else wanted


class CompileSettings(StrictModel):
    """Holds what is set around torch.compile; every field at its default is PyTorch's own default."""

    capture_scalar_outputs: bool = False
    recompile_limit: int | None = Field(default=None, ge=1, description="cache_size_limit before torch 2.7")
    accumulated_recompile_limit: int | None = Field(default=None, ge=1)
    mark_dynamic: bool = Field(default=False, description="mark the time dimension of the inputs dynamic")
    backend: str = "inductor"


class CsvSeries(StrictModel):
    path: str = Field(description="relative to the matrix file")
    time_column: str = Field(description="name of the column that holds the time")
    value_columns: tuple[str, ...] = Field(min_length=1, description="names of the columns to forecast")


# Points in a patch of the models that can be forecast with: a checkpoint has to fit the one that its workload names.
PATCH_SIZES = {"tiny": 32, "base": 64}


class SymbolSeries(StrictModel):
    """One of the user's own series, named on the command line and forecast beside the workload."""

    name: str  # of its file, as it is shown
    series: CsvSeries
    content: str = ""  # SHA-256 of its file
    notes: tuple[str, ...] = ()  # what stands out in it


class Workload(StrictModel):
    """Holds what is forecast. Lengths are in patches, so that they mean the same for every model size."""

    model: Literal["tiny", "base"] = "tiny"
    checkpoint: str | None = Field(default=None, description="local folder, or hub id with revision: org/name@revision")
    batch: int = Field(default=1, ge=1)
    variates: int = Field(default=1, ge=1)
    groups: int = Field(default=1, ge=1, description="id groups the variates are split into")
    missing: float = Field(default=0.05, ge=0.0, lt=1.0, description="share of values masked out")
    context_patches: tuple[int, ...] = Field(default=(16, 32, 48, 64), min_length=2, description="ascending")
    horizon_patches: tuple[int, ...] = Field(
        default=(10, 5, 12), min_length=1, description="the first is the timed one"
    )
    batches: tuple[int, ...] = Field(default=(1, 2), min_length=1, description="batch sizes of the measured phase")
    samples: int = Field(default=32, ge=2)
    samples_per_batch: int = Field(default=16, ge=1)
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    seed: int = 20251030
    csv: CsvSeries | None = None

    @model_validator(mode="after")
    def _lengths_make_sense(self) -> "Workload":
        if list(self.context_patches) != sorted(set(self.context_patches)) or self.context_patches[0] < 1:
            raise ValueError("context_patches must be positive and strictly ascending")
        if min(self.horizon_patches) < 1 or min(self.batches) < 1:
            raise ValueError("horizon_patches and batches must be positive")
        if self.samples % self.samples_per_batch:
            raise ValueError("samples must be a multiple of samples_per_batch (toto-ts demands it)")
        if self.groups > self.variates:
            raise ValueError("groups must not exceed variates")
        return self

    @property
    def patch_size(self) -> int:
        return PATCH_SIZES[self.model]


class CellProfile(StrictModel):
    """Says how hard a cell is tried."""

    iterations: int = Field(ge=1, description="a whole number of rounds of timed forecasts")
    forecasts_per_iteration: int = Field(default=12, ge=1, description="timed forecasts per iteration and contestant")
    repeats: int = Field(default=1, ge=1, description="fresh processes the speed suite is repeated in")
    suites: tuple[Suite, ...] = tuple(suite for suite in Suite if not suite.rule.needs_symbols)
    unannounced_shapes: bool = Field(default=True, description="also look what shapes cost that nobody announced")
    timeout_minutes: float = Field(default=30, gt=0, description="per cell")


class Limits(StrictModel):
    """Holds what one cell may use, in a container or not."""

    cpus: int = Field(default=2, ge=1)
    memory: str = Field(default="8g", pattern=_AMOUNT, description="an amount such as 8g or 512m")
    shm: str = Field(default="1g", pattern=_AMOUNT, description="size of /dev/shm, such as 1g or 512m")
    tmp: str = Field(default="2g", pattern=_AMOUNT, description="size of /tmp, such as 2g or 512m")
    pids: int = Field(default=512, ge=16)
    threads: int = Field(
        default=1, ge=1, description="torch intra-op threads: one, so that cells do not disturb each other"
    )


class Demand(StrictModel):
    """A limit that a figure must keep for the cell to PASS."""

    gate: str  # its name, to say which was broken
    suite: Suite
    figure: str
    limit: GateLimit


class CacheRequest(StrictModel):
    name: str
    source: str  # 'builtin' or '<absolute path>.py:Class'


class Origin(StrictModel):
    """Holds what the runtime alone knows. It goes into the provenance and changes nothing that is measured."""

    runtime: str = ""  # docker or venv
    lock: str = ""  # identity of the environment: its exact packages, or what its image was made of
    image: str = ""  # image digest, in a container
    source_hash: str = ""  # of the part of this package that the cell runs


class CellRequest(StrictModel):
    """Everything a cell needs to know. Paths are as the cell sees them; what they name is read-only."""

    schema_version: Annotated[Literal[2], Field(alias="schema")] = 2
    cell: CellName
    environment: Environment
    cache: CacheRequest
    settings: CompileSettings = CompileSettings()
    device: Device
    profile_name: str
    profile: CellProfile
    workload_name: str = ""  # as matrix.yaml calls it
    workload: Workload
    limits: Limits = Limits()
    variables: dict[str, str] = Field(default={})  # environment variables that the cell's processes run with
    work_folder: str = ""  # inductor cache, logs and group results; empty at the start of the cell but for references
    checkpoint_folder: str | None = None
    csv: CsvSeries | None = None
    symbols: tuple[SymbolSeries, ...] = ()  # the user's own series; their files lie in one folder
    quiet_lock: str | None = None  # a file; timing loops hold it exclusively, everything else shares it
    origin: Origin = Origin()
    demands: tuple[Demand, ...] = ()  # once one is broken, checks that could not save the cell are skipped
    references: References | None = None  # given in the work folder; without them the cell computes its own
    only_references: bool = False  # compute them for other cells and do nothing else: no candidate is imported
