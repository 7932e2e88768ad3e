"""What a cell is asked: the request file, and the parts of matrix.yaml that it is made of."""

import re
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, model_validator

from toto_compat.contract.cell_name import CellName
from toto_compat.contract.gate_limit import GateLimit
from toto_compat.contract.references import References
from toto_compat.contract.strict_model import StrictModel
from toto_compat.contract.suites import BY_DEFAULT, WITHOUT_GPU, Suite

# 2.13.0, 2.16.0rc1, 2.16.0.dev20261116: what an index lists, without the local part of a build
TORCH_RELEASE = r"^\d+\.\d+\.\d+((a|b|rc)\d+)?(\.dev\d+)?$"
_ARCHITECTURE = r"^sm_\d{2,3}[a-z]?$"
# Those of which cell/lowering/described_gpu.py has a card to compile for where there is none.
DESCRIBED_ARCHITECTURES = ("sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120")
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
    toto_ts: str = Field(
        default="0.2.0",
        description="toto-ts release on the package index; or a fork: the path of a checkout or wheel, relative to the "
        "matrix file, or git+https://host/fork@<commit>",
    )
    xformers: str | None = Field(
        default=None, description="xformers release, or null: it swaps attention, norm, SwiGLU"
    )
    pins: dict[str, str] = Field(default={}, description="other packages and their exact versions")
    gpu_architectures: tuple[Annotated[str, Field(pattern=_ARCHITECTURE)], ...] = Field(
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
_SAMPLING = r"^[1-9]\d*/[1-9]\d*$"


class TimedShape(StrictModel):
    """Holds one forecast that is timed. What is left out is the workload's first."""

    horizon: int | None = Field(default=None, ge=1, description="in points; left out: the workload's first")
    context: int | None = Field(default=None, ge=1, description="in points; left out: the workload's first")
    batch: int | None = Field(default=None, ge=1, description="series at once; left out: the workload's")
    samples: str | None = Field(
        default=None, pattern=_SAMPLING, description="samples/batch size, such as 256/128; left out: the mean forecast"
    )

    @property
    def name(self) -> str:
        what = f"{self.samples} samples" if self.samples else "mean"
        batch = f", batch {self.batch}" if (self.batch or 1) > 1 else ""
        return f"{what}, horizon {self.horizon}, context {self.context}{batch}"


class SymbolSeries(StrictModel):
    """One of the user's own series, named on the command line and forecast beside the workload."""

    name: str  # of its file, as it is shown
    series: CsvSeries
    content: str = ""  # SHA-256 of its file
    notes: tuple[str, ...] = ()  # what stands out in it


class Workload(StrictModel):
    """Holds what is forecast. Lengths are in points, as a caller of toto-ts gives them."""

    model: Literal["tiny", "base"] = "tiny"
    checkpoint: str | None = Field(default=None, description="local folder, or hub id with revision: org/name@revision")
    batch: int = Field(default=1, ge=1)
    variates: int = Field(default=1, ge=1)
    groups: int = Field(default=1, ge=1, description="id groups the variates are split into")
    missing: float = Field(default=0.05, ge=0.0, lt=1.0, description="share of values masked out")
    context: tuple[int, ...] = Field(
        default=(512, 1024, 1536, 2048),
        min_length=2,
        description="points before the forecast, ascending, whole patches (tiny: 32 points, base: 64)",
    )
    horizon: tuple[int, ...] = Field(
        default=(320, 160, 384), min_length=1, description="points that are forecast; any number, the first counts most"
    )
    batches: tuple[int, ...] = Field(default=(1, 2), min_length=1, description="batch sizes of the measured phase")
    sampling: tuple[str, ...] = Field(
        default=("32/16",), min_length=1, description="samples/batch size, such as 256/128; the first counts most"
    )
    timed: tuple[TimedShape, ...] = Field(
        default=(),
        description="forecasts that are timed, each a contest of its own; none: every batch and the first samples",
    )
    autocast: Literal["float16", "bfloat16"] | None = Field(
        default=None, description="torch.autocast around every forecast of every contestant, eager's too"
    )
    draws: Literal["direct", "toto-ts"] | None = Field(
        default=None, description="the random stream of a cache that knows several; null: its own default"
    )
    threads: int | None = Field(
        default=None, ge=1, description="torch intra-op threads of its cells; null: limits.threads"
    )
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    seed: int = 20251030
    csv: CsvSeries | None = None

    @model_validator(mode="after")
    def _lengths_make_sense(self) -> "Workload":
        if list(self.context) != sorted(set(self.context)) or self.context[0] < 1:
            raise ValueError("context must be positive and strictly ascending")
        for points in (*self.context, *(shape.context for shape in self.timed if shape.context)):
            if points % self.patch_size:
                nearest = max(1, round(points / self.patch_size)) * self.patch_size
                raise ValueError(
                    f"context must be whole patches, and {points} is none of the model {self.model}, "
                    f"whose patch has {self.patch_size} points; the nearest is {nearest}"
                )
        if min(self.horizon) < 1 or min(self.batches) < 1:
            raise ValueError("horizon and batches must be positive")
        for sampling in (*self.sampling, *(shape.samples for shape in self.timed if shape.samples)):
            if not re.match(_SAMPLING, sampling):
                raise ValueError(f"sampling is a list of samples/batch size, such as 256/128, and {sampling!r} is none")
            samples, per_batch = sampling_of(sampling)
            if samples % per_batch:
                raise ValueError(
                    f"samples must be a multiple of their batch size (toto-ts demands it), and {sampling} is none"
                )
        for shape in self.timed:
            if (shape.context or 0) > self.context[-1] or (shape.horizon or 0) > max(self.horizon):
                raise ValueError("timed forecasts must lie within the longest context and horizon")
        if self.groups > self.variates:
            raise ValueError("groups must not exceed variates")
        return self

    @property
    def patch_size(self) -> int:
        return PATCH_SIZES[self.model]

    @property
    def timed_shapes(self) -> tuple[TimedShape, ...]:
        """Every forecast that is timed, its lengths filled in; of none that is named, every batch and the samples."""
        named = self.timed or (
            *(TimedShape(batch=batch) for batch in self.batches),
            *(TimedShape(batch=self.batches[0], samples=one) for one in self.sampling[:1]),
        )
        return tuple(
            shape.model_copy(
                update={
                    "context": shape.context or self.context[0],
                    "horizon": shape.horizon or self.horizon[0],
                    "batch": shape.batch or self.batch,
                }
            )
            for shape in named
        )

    @property
    def context_patches(self) -> tuple[int, ...]:
        return tuple(points // self.patch_size for points in self.context)

    @property
    def horizon_patches(self) -> tuple[int, ...]:
        """The patches of every horizon: the last one may be asked for in part."""
        return tuple(patches(points, self.patch_size) for points in self.horizon)

    @property
    def sampled(self) -> tuple[tuple[int, int], ...]:
        """Every sampling as samples and their batch size."""
        return tuple(sampling_of(one) for one in self.sampling)

    @property
    def samples(self) -> int:
        return self.sampled[0][0] if self.sampling else 0

    @property
    def samples_per_batch(self) -> int:
        return self.sampled[0][1] if self.sampling else 0

    @property
    def without_samples(self) -> "Workload":
        """The same where nobody can draw: means of what would have been sampled."""
        timed = tuple(shape for shape in self.timed if shape.samples is None)
        asked = timed or tuple(shape.model_copy(update={"samples": None}) for shape in self.timed)
        return self.model_copy(update={"sampling": (), "timed": asked})

    @property
    def has_one_patch_forecasts(self) -> bool:
        """Say whether a forecast of this workload has no decode step: the pass over the context is all of it."""
        return min(self.horizon_patches) == 1

    @property
    def in_half_precision(self) -> bool:
        """Say whether matrix products have less than single precision, in the weights or by autocast."""
        return self.autocast is not None or self.dtype == "bfloat16"

    @property
    def precision(self) -> str:
        return f"{self.autocast} autocast" if self.autocast else self.dtype


def sampling_of(text: str) -> tuple[int, int]:
    """Samples and their batch size from '256/128'."""
    samples, _, per_batch = text.partition("/")
    return int(samples), int(per_batch)


def patches(points: int, patch_size: int) -> int:
    return -(-points // patch_size)


class CellProfile(StrictModel):
    """Says how hard a cell is tried."""

    iterations: int = Field(ge=1, description="a whole number of rounds of timed forecasts")
    forecasts_per_iteration: int = Field(default=12, ge=1, description="timed forecasts per iteration and contestant")
    repeats: int = Field(default=1, ge=1, description="fresh processes the speed suite is repeated in")
    seconds_a_contestant: float = Field(
        default=20.0,
        gt=0,
        description="eager contestants of a timed forecast that would take longer get fewer rounds: ten, or three if "
        "one of their forecasts takes more than 5 s",
    )
    suites: tuple[Suite, ...] = BY_DEFAULT
    architectures: tuple[Annotated[str, Field(pattern=_ARCHITECTURE)], ...] = Field(
        default=("sm_80", "sm_90", "sm_120"),
        min_length=1,
        description="GPUs that a CUDA build compiles for where there is none; those that its wheel lacks are left out",
    )
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

    @property
    def memory_bytes(self) -> int:
        return int(self.memory[:-1]) * (2**30 if self.memory.endswith("g") else 2**20)


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
    base_image: str = ""  # what that was built on, as matrix.yaml names it
    base_used: str = ""  # and as the engine found it
    base_digest: str = ""  # of a registry, or the image's id where no registry knows it
    base_is_stand_in: bool = False  # made of Debian packages, for want of a registry: not the image that was asked for
    source_hash: str = ""  # of the part of this package that the cell runs
    toto_fork: str = ""  # what is in a toto-ts that is no release of the index
    checkpoint: str = ""  # whose weights were loaded; empty: they were drawn from the workload's seed


class CellRequest(StrictModel):
    """Everything a cell needs to know. Paths are as the cell sees them; what they name is read-only."""

    schema_version: Annotated[Literal[3], Field(alias="schema")] = 3
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
    lower_only: bool = False  # compile for CUDA, and execute that, without a GPU: it runs on the CPU and speaks of CUDA

    @property
    def speaks_of(self) -> Device:
        """The device that its evidence is about."""
        return Device.CUDA if self.lower_only else self.device


def suites_here(suites: tuple[Suite, ...], environment: Environment, device: Device) -> tuple[Suite, ...]:
    """Leave out what works on CUDA code without a GPU, unless a CUDA build runs on the CPU."""
    may_lower = environment.device is Device.CUDA and device is Device.CPU
    return suites if may_lower else tuple(suite for suite in suites if suite not in WITHOUT_GPU)
