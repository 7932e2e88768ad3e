"""The two files that cross a cell's boundary - request in, result out - and the evidence inside the result."""

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field

from toto_compat.matrix.schema import CompileSettings, CsvSeries, Device, Environment, Limits, Profile, Suite, Workload
from toto_compat.observe.events import Event
from toto_compat.strict_model import StrictModel

SCHEMA_VERSION = 1


class Kind(StrEnum):
    """How a figure came about. Only a measured one can decide a gate."""

    MEASURED = "measured"
    PREDICTED = "predicted"
    REPORTED = "reported"


class Figure(StrictModel):
    """One number with its origin. `value` None: it was not obtained, and `missing` says why and what would give it."""

    value: float | None
    unit: str = ""
    kind: Kind = Kind.MEASURED
    method: str = ""
    missing: str = ""
    low: float | None = None  # ends of a 95 % interval, where there is one
    high: float | None = None


class Outcome(StrEnum):
    MEASURED = "measured"  # the suite ran; its figures stand
    MODEL_FAILED = "model_failed"  # the compiled forecast itself raised: evidence against the cell
    ERROR = "error"  # crash, hang, out of memory or a fault of the harness: evidence of nothing
    NOT_RUN = "not_run"  # not asked for, or not possible on this device


class Failure(StrictModel):
    """What went wrong, short enough for a table and long enough to act on."""

    kind: Literal["exception", "crash", "timeout", "out_of_memory", "environment", "interrupted"]
    message: str
    last_lines: tuple[str, ...] = ()


class SuiteEvidence(StrictModel):
    """What one suite found. `figures` that gates judge are keyed by the gate's name, the rest by any name."""

    suite: Suite
    outcome: Outcome
    method: str = ""
    figures: dict[str, Figure] = Field(default={})
    events: tuple[Event, ...] = ()
    details: dict[str, Any] = Field(default={})  # suite-specific tables: comparisons, timings, partitions
    failure: Failure | None = None
    seconds: float = 0.0


class CacheRequest(StrictModel):
    name: str
    source: str  # 'builtin' or '<absolute path>.py:Class'


class CellRequest(StrictModel):
    """Everything a cell needs to know. Paths are as the cell sees them."""

    schema_version: Annotated[Literal[1], Field(alias="schema")] = 1
    cell: str  # '<environment>/<cache>/<mode>[+<settings>]'
    environment_name: str
    environment: Environment
    cache: CacheRequest
    mode: str
    settings_name: str = "stock"
    settings: CompileSettings = CompileSettings()
    device: Device
    profile_name: str
    profile: Profile
    workload: Workload
    limits: Limits = Limits()
    work_folder: str  # inductor cache, logs and group results; empty at the start of the cell
    checkpoint_folder: str | None = None
    csv: CsvSeries | None = None  # path as the cell sees it
    quiet_lock: str | None = None  # a file; timing loops hold it exclusively, everything else shares it


class Provenance(StrictModel):
    """Where evidence comes from, in enough detail to get it again."""

    torch: str = ""
    torch_git: str = ""
    cuda: str | None = None
    gpu: str | None = None
    gpu_architecture: str | None = None
    driver: str | None = None
    python: str = ""
    toto_ts: str = ""
    xformers: str | None = None
    packages: dict[str, str] = Field(default={})
    system_packages: dict[str, str] = Field(default={})
    compiler: str = ""
    lock: str = ""  # hash of the environment's lock
    image: str = ""  # image digest, in a container
    runtime: str = ""  # docker or venv
    source_hash: str = ""  # of the toto_compat package that ran
    cache_class: str = ""  # module:qualname of the class that was bound
    cpu: str = ""
    cores: int = 0
    memory_bytes: int = 0
    os: str = ""
    host: str = ""
    started: str = ""  # ISO 8601, UTC
    finished: str = ""


class CellResult(StrictModel):
    """What a cell leaves behind, whatever happened to it."""

    schema_version: Annotated[Literal[1], Field(alias="schema")] = 1
    cell: str
    request: CellRequest
    provenance: Provenance
    evidence: dict[Suite, SuiteEvidence] = Field(default={})
    failure: Failure | None = None  # the cell as a whole could not be run
