"""Runs on disk, and the store of finished cells that makes a rerun cheap and an interrupted run resumable.

    results/<run>/run.json                                         what was asked, host, git revision, matrix hash
    results/<run>/cells/<environment>/<cache>/<mode[+settings]>.json   one finished cell
    results/latest -> <run>

A finished cell is also kept in the user's cache folder under a key of everything that could change it. Every file
is written beside its place and renamed into it, so a reader never sees half of one.
"""

import errno
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError

from toto_compat.errors import SelectionError, StorageError
from toto_compat.evidence.schema import CellRequest, CellResult, Outcome
from toto_compat.matrix.schema import Gate, GateLimit
from toto_compat.strict_model import StrictModel

RUN_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._+-]*$")
RESERVED_RUN_NAMES = frozenset({"latest", "reference"})

_Model = TypeVar("_Model", bound=BaseModel)


class RunInfo(StrictModel):
    """run.json: what was asked, and on what."""

    schema_version: Annotated[Literal[1], Field(alias="schema")] = 1
    name: str
    command: tuple[str, ...] = ()
    selectors: tuple[str, ...] = ()
    profile: str
    runtime: str
    executor: str
    device: str
    cells: tuple[str, ...]  # everything planned, finished or not
    gates: dict[Gate, GateLimit] = Field(default={})  # the limits this run is judged by
    matrix_file: str = ""
    matrix_hash: str = ""
    source_hash: str = ""
    git_revision: str = ""
    git_dirty: bool = False
    host: str = ""
    started: str
    finished: str = ""


class StoredCell(CellResult):
    """A cell's result as it lies in a run: with its key, how long it took, and whether it was taken from the store."""

    key: str = ""
    seconds: float = 0.0
    stored: str = ""  # when the cell really ran, ISO 8601, UTC
    ran_in: str = ""  # name of the run that ran it
    reused: bool = False  # taken from the store: `stored` and `ran_in` are of the original
    verdict: str = ""
    decided_by: str = ""
    gates: dict[str, dict[str, Any]] = Field(default={})


@dataclass(frozen=True)
class Run:
    """A run as it lies on disk."""

    folder: Path
    info: RunInfo
    cells: tuple[StoredCell, ...]

    @property
    def unfinished(self) -> tuple[str, ...]:
        done = {cell.cell for cell in self.cells}
        return tuple(name for name in self.info.cells if name not in done)


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


# --- files -----------------------------------------------------------------------------------------------------------


@contextmanager
def _storage_errors(path: Path, verb: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            hint = f"free space on the disk of {path.parent}, then run the same command again: finished cells are kept"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            hint = "make it writable, or choose another folder with --results"
        else:
            hint = "check the folder, or choose another one with --results"
        raise StorageError(f"{path}: cannot be {verb}: {error.strerror or error}", hint=hint) from error


def write_atomically(path: Path, text: str) -> None:
    """Write beside and rename: the file is whole or not there, also when the disk is full."""
    with _storage_errors(path, "written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name[:80]}-", suffix=".tmp", dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).chmod(0o644)
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


def write_model(path: Path, model: BaseModel) -> None:
    write_atomically(path, model.model_dump_json(by_alias=True, indent=1) + "\n")


def read_model(path: Path, model: type[_Model]) -> _Model:
    """Read and check a file of ours; a corrupt one is an error that names the file."""
    with _storage_errors(path, "read"):
        content = path.read_bytes()
    try:
        return model.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise StorageError(
            f"{path}: not a valid {model.__name__} file: {where + ': ' if where else ''}{first['msg']}",
            hint="the file is damaged or from another version: restore it, or delete it and run the matrix again",
        ) from error


def check_writable(folder: Path) -> None:
    """Find out before an hour of work whether results can be written at all."""
    probe = folder / f".writable-{os.getpid()}"
    write_atomically(probe, "")
    probe.unlink(missing_ok=True)


# --- a run -----------------------------------------------------------------------------------------------------------


def new_run_name(results: Path, profile: str) -> str:
    """The time in UTC and the profile; a number where two runs start in one second."""
    base = f"{datetime.now(UTC):%Y-%m-%dT%H-%M-%S}-{profile}"
    name, number = base, 2
    while (results / name).exists():
        name, number = f"{base}-{number}", number + 1
    return name


def check_run_name(name: str) -> None:
    if not RUN_NAME.match(name) or name in RESERVED_RUN_NAMES:
        raise SelectionError(
            f"--run {name!r}: not usable as the name of a run",
            hint=f"letters, digits and ._+- only, and not {' or '.join(sorted(RESERVED_RUN_NAMES))}",
        )


def cell_path(run_folder: Path, cell: str) -> Path:
    """A cell's name is its path in the run."""
    return run_folder / "cells" / f"{cell}.json"


def log_path(run_folder: Path, cell: str) -> Path:
    return run_folder / "logs" / f"{cell}.log"


def write_run_info(run_folder: Path, info: RunInfo) -> None:
    write_model(run_folder / "run.json", info)


def write_cell(run_folder: Path, cell: StoredCell) -> None:
    write_model(cell_path(run_folder, cell.cell), cell)


def point_latest(results: Path, run_name: str) -> None:
    """results/latest -> run; a file with the name in it where links are not allowed."""
    latest = results / "latest"
    temporary = results / f".latest-{os.getpid()}"
    with _storage_errors(latest, "written"):
        try:
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(run_name, target_is_directory=True)
            temporary.replace(latest)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
                raise
            write_atomically(results / "latest.txt", run_name + "\n")
        else:
            (results / "latest.txt").unlink(missing_ok=True)


def load_run(folder: Path) -> Run:
    """Read a whole run; any damaged file is an error, not a missing row.

    What an earlier run of the same name left in the folder is none of it: only the cells that run.json names are.
    """
    info = read_model(folder / "run.json", RunInfo)
    expected = {cell_path(folder, cell) for cell in info.cells}
    paths = [path for path in sorted((folder / "cells").rglob("*.json")) if path in expected]
    return Run(folder, info, tuple(read_model(path, StoredCell) for path in paths))


def list_runs(results: Path) -> list[str]:
    """Names of the runs in a results folder, oldest first; those of results/reference as reference/<name>."""
    if not results.is_dir():
        return []
    found = [path.parent for path in results.glob("*/run.json") if not path.parent.is_symlink()]
    found += [path.parent for path in results.glob("reference/*/run.json")]
    return [path.relative_to(results).as_posix() for path in sorted(found)]


def find_run(name: str = "latest", results: Path = Path("results")) -> Path:
    """The folder of a run, by name, by path, or the latest one."""
    if name == "latest" and not (results / "latest" / "run.json").exists():
        pointer = results / "latest.txt"
        if pointer.exists():
            with _storage_errors(pointer, "read"):
                name = pointer.read_text(encoding="utf-8").strip()
    for candidate in (results / name, Path(name)):
        if (candidate / "run.json").exists():
            return candidate.resolve()
    known = list_runs(results)
    if name == "latest":
        raise SelectionError(f"{results}: no run there yet", hint="`toto-compat matrix` makes one")
    raise SelectionError(
        f"{name}: no such run in {results}",
        hint=f"there are: {', '.join(known[-8:])}" if known else "there is none yet: `toto-compat matrix` makes one",
    )


# --- the store of finished cells -------------------------------------------------------------------------------------


def cell_key(request: CellRequest, *, lock: str, source_hash: str, machine: str) -> str:
    """A hash of everything that could change a cell's result; where files lie is not part of it, their content is."""
    canonical = request.model_dump(mode="json", by_alias=True)
    for path_field in ("work_folder", "quiet_lock"):
        canonical.pop(path_field)
    canonical["cache"]["source"] = _cache_identity(request.cache.source)
    if request.csv:
        canonical["csv"]["path"] = _file_hash(Path(request.csv.path))
        canonical["workload"]["csv"] = None
    if request.checkpoint_folder:
        canonical["checkpoint_folder"] = _folder_identity(Path(request.checkpoint_folder))
    # the limits of gates judge evidence, they do not change it; neither does the time a cell is given
    canonical["profile"].pop("gates")
    canonical["profile"].pop("timeout_minutes")
    parts = {"request": canonical, "lock": lock, "source": source_hash, "machine": machine}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def can_be_reused(result: CellResult) -> bool:
    """Only a cell that was really measured: what could not be run is tried again."""
    wanted = set(result.request.profile.suites)
    return (
        result.failure is None
        and wanted <= set(result.evidence)
        and all(evidence.outcome is not Outcome.ERROR for evidence in result.evidence.values())
    )


@dataclass(frozen=True)
class CellStore:
    """Finished cells by key, in the user's cache folder."""

    folder: Path

    def path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.json"

    def get(self, key: str) -> StoredCell | None:
        """The finished cell with this key. A damaged file is no reason to stop: the cell is run again."""
        try:
            cell = read_model(self.path(key), StoredCell)
        except StorageError:
            return None
        return cell if cell.key == key and can_be_reused(cell) else None

    def put(self, cell: StoredCell) -> None:
        """Keep a cell that can be reused; remember how long it took, for the next plan."""
        if not cell.key or not can_be_reused(cell):
            return
        write_model(self.path(cell.key), cell)
        seconds = self.known_seconds() | {timing_name(cell.request): cell.seconds}
        write_atomically(self._timings, json.dumps(seconds, indent=1, sort_keys=True) + "\n")

    def known_seconds(self) -> dict[str, float]:
        """How long cells took when they last ran on this machine, by timing_name."""
        try:
            found = json.loads(self._timings.read_bytes())
            return {str(name): float(seconds) for name, seconds in found.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}

    @property
    def _timings(self) -> Path:
        return self.folder / "timings.json"


def timing_name(request: CellRequest) -> str:
    """Cells that take about as long as each other: same cell, profile and device."""
    return f"{request.cell} {request.profile_name} {request.device.value}"


def _cache_identity(source: str) -> str:
    path, separator, class_name = source.rpartition(":")
    return f"{_file_hash(Path(path))}:{class_name}" if separator and source != "builtin" else source


def _file_hash(path: Path) -> str:
    with _storage_errors(path, "read"):
        return hashlib.sha256(path.read_bytes()).hexdigest()


def _folder_identity(folder: Path) -> list[tuple[str, int, int]]:
    # names, sizes and times instead of content: checkpoints are gigabytes and this runs at every start
    with _storage_errors(folder, "read"):
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        facts = [(path.relative_to(folder).as_posix(), path.stat()) for path in files]
    return [(name, found.st_size, found.st_mtime_ns) for name, found in facts]
