"""The shape of matrix.yaml. Names are keys in the file and fields here; nothing is filled in from elsewhere."""

from enum import StrEnum
from typing import Literal

from pydantic import Field, model_validator

from toto_compat.strict_model import StrictModel

TORCH_RELEASE = r"^\d+\.\d+\.\d+([a-z]+\d+)?$"
_AMOUNT = r"^\d+[mg]$"


class Device(StrEnum):
    CPU = "cpu"
    CUDA = "cuda"


class Suite(StrEnum):
    EQUIVALENCE = "equivalence"
    DETERMINISM = "determinism"
    RECOMPILE = "recompile"
    CUDAGRAPH = "cudagraph"
    SPEED = "speed"
    MEMORY = "memory"


class Gate(StrEnum):
    """In the order in which they decide: the first FAIL (else the first INCONCLUSIVE) names the verdict."""

    EQUIVALENCE = "equivalence"
    DETERMINISM = "determinism"
    MAE_SIGMA = "mae_sigma"
    COMPILE_ACTIVE = "compile_active"
    RECOMPILE_LIMIT = "recompile_limit"
    RECOMPILES = "recompiles"
    RECOMPILES_TOTAL = "recompiles_total"
    GRAPH_BREAKS = "graph_breaks"
    CUDAGRAPHS = "cudagraphs"
    SPEEDUP = "speedup"
    LATENCY_STABILITY = "latency_stability"
    MEMORY = "memory"


class Environment(StrictModel):
    """One pinned software stack. Its name is its identity: torch-<release>-<build>[-<what differs>]."""

    torch: str = Field(description="one exact PyTorch release, such as 2.13.0", pattern=TORCH_RELEASE)
    build: str = Field(description="cpu, or the CUDA tag of the wheel, such as cu128", pattern=r"^(cpu|cu\d{3})$")
    python: str = Field(default="3.11", description="Python minor version, such as 3.11", pattern=r"^3\.\d+$")
    toto_ts: str = Field(default="0.2.0", description="toto-ts release on the package index")
    xformers: str | None = Field(
        default=None, description="xformers release, or null: it swaps attention, norm, SwiGLU"
    )
    pins: dict[str, str] = Field(default={}, description="other packages and their exact versions")
    gpu_architectures: tuple[str, ...] = Field(
        default=(), description="sm_* the wheel carries; a GPU outside is an error"
    )
    base_image: str = Field(default="python:3.11-slim", description="container base image")
    index: str | None = Field(default=None, description="pip index of the torch wheel; null: the user's own")

    @property
    def device(self) -> Device:
        return Device.CPU if self.build == "cpu" else Device.CUDA


class CacheSource(StrictModel):
    """Where a KV cache comes from, and the settings it is tried with."""

    source: str = Field(
        description="builtin, or path/to/file.py:Class (relative to the matrix file, mounted read-only)"
    )
    settings: tuple[str, ...] = Field(default=("stock",), description="names of settings sets to try it with")
    description: str = ""


class CompileSettings(StrictModel):
    """What is set around torch.compile; every field at its default is PyTorch's own default."""

    capture_scalar_outputs: bool = False
    recompile_limit: int | None = Field(default=None, ge=1, description="cache_size_limit before torch 2.7")
    accumulated_recompile_limit: int | None = Field(default=None, ge=1)
    mark_dynamic: bool = Field(default=False, description="mark the time dimension of the inputs dynamic")
    backend: str = "inductor"


class CsvSeries(StrictModel):
    path: str = Field(description="relative to the matrix file")
    time_column: str = Field(description="name of the column that holds the time")
    value_columns: tuple[str, ...] = Field(min_length=1, description="names of the columns to forecast")


class Workload(StrictModel):
    """What is forecast. Lengths are in patches, so that they mean the same for every model size."""

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


class GateLimit(StrictModel):
    """A figure passes when min <= figure <= max."""

    min: float | None = Field(default=None, allow_inf_nan=False)
    max: float | None = Field(default=None, allow_inf_nan=False)

    @model_validator(mode="after")
    def _has_a_limit(self) -> "GateLimit":
        if self.min is None and self.max is None:
            raise ValueError("a gate needs min or max")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError("min must not be above max: nothing could pass")
        return self


class Profile(StrictModel):
    """How hard a cell is tried."""

    iterations: int = Field(ge=1, description="a whole number of rounds of timed forecasts")
    forecasts_per_iteration: int = Field(default=12, ge=1, description="timed forecasts per iteration and contestant")
    repeats: int = Field(default=1, ge=1, description="fresh processes the speed suite is repeated in")
    workload: str = Field(description="a name under workloads")
    suites: tuple[Suite, ...] = tuple(Suite)
    gates: dict[Gate, GateLimit] = Field(default={}, description="limits that replace the general ones")
    timeout_minutes: float = Field(default=30, gt=0, description="per cell")


class Limits(StrictModel):
    """What one cell may use, in a container or not."""

    cpus: int = Field(default=2, ge=1)
    memory: str = Field(default="8g", pattern=_AMOUNT, description="an amount such as 8g or 512m")
    shm: str = Field(default="1g", pattern=_AMOUNT, description="size of /dev/shm, such as 1g or 512m")
    tmp: str = Field(default="2g", pattern=_AMOUNT, description="size of /tmp, such as 2g or 512m")
    pids: int = Field(default=512, ge=16)
    threads: int = Field(
        default=1, ge=1, description="torch intra-op threads: one, so that cells do not disturb each other"
    )


class Matrix(StrictModel):
    """The whole file."""

    schema_version: Literal[1] = Field(alias="schema", description="version of this file's format: 1")
    production: str | None = Field(
        default=None, description="the environment production runs; part of the default on a GPU"
    )
    environments: dict[str, Environment] = Field(
        min_length=1, description="software stacks by name, torch-<release>-<build>: {torch, build, ...}"
    )
    caches: dict[str, CacheSource] = Field(min_length=1, description="KV caches by name: {source: builtin}")
    settings: dict[str, CompileSettings] = Field(
        min_length=1, description="sets of compile settings by name, such as stock: {}, PyTorch's own"
    )
    modes: tuple[Literal["default", "reduce-overhead", "max-autotune"], ...] = Field(
        min_length=1, description="a list out of default, reduce-overhead, max-autotune"
    )
    profiles: dict[str, Profile] = Field(
        min_length=1, description="ways to try a cell by name: {iterations, workload, ...}"
    )
    workloads: dict[str, Workload] = Field(
        min_length=1, description="kinds of series to forecast by name: {model: tiny, ...}"
    )
    gates: dict[Gate, GateLimit] = Field(description="a limit for every gate: {max: 0} or {min: 1}")
    limits: Limits = Limits()
