"""The shape of matrix.yaml. Names are keys in the file and fields here; nothing is filled in from elsewhere.

What also crosses into a cell is defined in `contract/request.py`.
"""

from typing import Literal

from pydantic import Field

from toto_compat.contract.gate_limit import GateLimit
from toto_compat.contract.request import CellProfile, CompileSettings, Environment, Limits, Workload
from toto_compat.contract.strict_model import StrictModel
from toto_compat.matrix.gates import Gate
from toto_compat.matrix.slurm import SlurmSettings


class CacheSource(StrictModel):
    """Says where a KV cache comes from, and the settings it is tried with."""

    source: str = Field(
        description="builtin, or path/to/file.py:Class (relative to the matrix file, mounted read-only)"
    )
    settings: tuple[str, ...] = Field(default=("stock",), description="names of settings sets to try it with")
    description: str = ""


class Profile(CellProfile):
    """Says how hard a cell is tried, on what, and the limits that hold then."""

    workloads: tuple[str, ...] = Field(
        min_length=1, description="a list of names under workloads; of several, every cell is run once for each"
    )
    only_when_named: tuple[str, ...] = Field(
        default=(), description="caches that run under this profile only if a selector names them"
    )
    gates: dict[Gate, GateLimit] = Field(default={}, description="limits that replace the general ones")

    @property
    def of_cell(self) -> CellProfile:
        """Return the part that a cell is told as its profile."""
        return CellProfile(**{name: getattr(self, name) for name in CellProfile.model_fields})


class Matrix(StrictModel):
    """The whole file."""

    schema_version: Literal[1] = Field(alias="schema", description="version of this file's format: 1")
    production: str | None = Field(
        default=None, description="the environment production runs; part of the default on a GPU"
    )
    production_profile: str = Field(
        default="production-check", description="the profile that alone can say: enable compile"
    )
    production_workloads: tuple[str, ...] = Field(
        default=(), description="the workloads that production runs; without one no run can say: enable compile"
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
        min_length=1, description="ways to try a cell by name: {iterations, workloads, ...}"
    )
    workloads: dict[str, Workload] = Field(
        min_length=1, description="kinds of series to forecast by name: {model: tiny, ...}"
    )
    gates: dict[Gate, GateLimit] = Field(
        default={}, description="limits by gate: {max: 0} or {min: 1}; a gate without one has its default"
    )
    limits: Limits = Limits()
    slurm: SlurmSettings = Field(
        default=SlurmSettings(), description="what `--executor slurm` asks of a cluster: {partition, gres, ...}"
    )
