"""Runs on disk, and the store of finished cells that makes a rerun cheap and an interrupted run resumable.

    results/<run>/run.json                                         what was asked, host, git revision, matrix hash
    results/<run>/cells/<environment>/<cache>/<mode[+settings][@workload]>.json   one finished cell
    results/latest -> <run>

A finished cell is also kept in the user's cache folder under a key of everything that could change it. Every file
is written beside its place and renamed into it, so a reader never sees half of one.
"""

import errno
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from toto_compat.contract.cell_name import CellName
from toto_compat.contract.demands import broken_demand
from toto_compat.contract.gate_limit import GateLimit
from toto_compat.contract.log_line import printable
from toto_compat.contract.request import TORCH_RELEASE, CellRequest, Demand, Device
from toto_compat.contract.result import CellResult, Outcome
from toto_compat.contract.strict_model import StrictModel
from toto_compat.errors import SelectionError, StorageError
from toto_compat.evidence.details import mistake_in_details
from toto_compat.evidence.files import (
    append_line,
    checked,
    file_hash,
    make_folder,
    may_be_read_later,
    read_bytes,
    set_aside,
    storage_errors,
    sync_folder,
    write_atomically,
    write_model,
)
from toto_compat.evidence.layouts import refuse_later, upgraded
from toto_compat.evidence.makers import made_by_this_process
from toto_compat.matrix.gates import Gate
from toto_compat.matrix.user_cache import user_cache_identity

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
RESERVED_RUN_NAMES = frozenset({"latest", "reference"})
_LONGEST_CELL_SECONDS = 366 * 24 * 3600
_LONGEST_NAME = 200  # letters; file systems take 255 bytes, and a name gets an ending
# Names as in matrix.yaml: reports put them into commands and env files to copy, and a run may come from elsewhere
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]*")
_CELL = re.compile(r"[A-Za-z0-9_.:+@/-]+")


def _is_a_device(text: str) -> str:
    return Device(text).value


def _is_a_time(text: str) -> str:
    if datetime.fromisoformat(text).year > 9000:
        raise ValueError("a time that no review follows")
    return text


def _is_a_release(text: str) -> str:
    if len(text) > 40 or not re.fullmatch(TORCH_RELEASE, text, re.ASCII):
        raise ValueError(f"{text[:40]!r} is no torch release")
    return text


def _is_a_name(text: str) -> str:
    if len(text) > _LONGEST_NAME or not _NAME.fullmatch(text):
        raise ValueError(f"{text[:40]!r} is no name")
    return text


# A run.json may come from elsewhere: what is computed with is what it is taken for, what is shown a terminal shows.
_Text = Annotated[str, AfterValidator(printable)]
_Name = Annotated[str, AfterValidator(_is_a_name)]
_Device = Annotated[str, AfterValidator(_is_a_device)]
_Time = Annotated[str, AfterValidator(_is_a_time)]
_NoTimeYet = Annotated[str, AfterValidator(lambda text: text and _is_a_time(text))]
_Release = Annotated[str, AfterValidator(_is_a_release)]


class MergedRun(StrictModel):
    """One of the runs that a merged run was made of: where its cells come from."""

    name: _Text
    host: _Text = ""
    git_revision: _Text = ""
    source_hash: str = ""
    matrix_hash: str = ""
    started: _NoTimeYet = ""
    finished: _NoTimeYet = ""
    cells: tuple[CellName, ...] = ()  # those that were taken from it
    left_out: dict[CellName, str] = Field(default={})  # those that another run had too, and why that one was taken


class RunInfo(StrictModel):
    """run.json: what was asked, and on what."""

    schema_version: Annotated[Literal[1], Field(alias="schema")] = 1
    name: _Text
    command: tuple[str, ...] = ()
    selectors: tuple[str, ...] = ()
    profile: _Name
    runtime: _Text
    executor: _Text
    device: _Device
    cells: tuple[CellName, ...]  # everything planned, finished or not
    gates: dict[Gate, GateLimit] = Field(default={})  # the limits this run is judged by
    releases: tuple[_Release, ...] = ()  # torch releases of the matrix, run or not
    production_profile: _Name = "production-check"
    production_workloads: tuple[_Text, ...] = ()  # the matrix's; none: no cell of this run can say "enable"
    matrix_file: str = ""
    matrix_hash: str = ""
    source_hash: str = ""
    git_revision: _Text = ""
    git_dirty: bool = False
    host: _Text = ""
    started: _Time
    finished: _NoTimeYet = ""
    merged: tuple[MergedRun, ...] = ()  # the runs that `toto-compat merge` made this one of

    @model_validator(mode="before")
    @classmethod
    def _of_an_earlier_version(cls, data: Any) -> Any:
        """Read runs of version 0.2 and before, which named one workload of production's."""
        if isinstance(data, dict) and "production_workload" in data:
            data = dict(data)
            named = data.pop("production_workload")
            data.setdefault("production_workloads", [named] if named else [])
        return data


class StoredCell(CellResult):
    """A cell's result as it lies in a run: with its key, how long it took, and whether it was taken from the store."""

    key: str = ""
    seconds: float = 0.0
    stored: str = ""  # when the cell really ran, ISO 8601, UTC
    ran_in: str = ""  # name of the run that ran it
    reused: bool = False  # taken from the store: `stored` and `ran_in` are of the original

    @model_validator(mode="after")
    def _what_is_computed_with(self) -> Self:
        _is_a_release(self.request.environment.torch)
        _is_a_name(self.request.profile_name)
        _is_a_name(self.request.settings.backend)
        _is_a_name(self.request.cache.name)
        if mistake := mistake_in_details(self.evidence):
            raise ValueError(mistake)
        return self


@dataclass(frozen=True)
class Run:
    """A run as it lies on disk."""

    folder: Path
    info: RunInfo
    cells: tuple[StoredCell, ...]

    @property
    def unfinished(self) -> tuple[CellName, ...]:
        done = {cell.cell for cell in self.cells}
        return tuple(name for name in self.info.cells if name not in done)


# --- a run -----------------------------------------------------------------------------------------------------------


def new_run_name(results: Path, profile: str) -> str:
    """Make a name from the time in UTC and the profile, with a number where two runs start in one second."""
    base = f"{datetime.now(UTC):%Y-%m-%dT%H-%M-%S}-{profile}"
    name, number = base, 2
    while (results / name).exists():
        name, number = f"{base}-{number}", number + 1
    return name


@contextmanager
def claimed_run(results: Path, name: str | None, profile: str) -> Iterator[Path]:
    """Make a run's folder and hold it: two runners that start at once get two, and none writes into another's."""
    while True:
        folder = results / (name or new_run_name(results, profile))
        with storage_errors(folder, "made"):
            make_folder(results)
            try:
                folder.mkdir(exist_ok=name is not None)
                sync_folder(results)
            except FileExistsError:
                if name is not None:
                    raise
                continue  # somebody was quicker
        with _held(folder):
            yield folder
        return


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    with storage_errors(folder, "opened"):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # a file system without locks: as much as can be done there is the name
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise StorageError(
                    f"{folder}: another runner is writing this run now",
                    hint="wait for it, or choose another name with --run",
                ) from error
        yield
    finally:
        os.close(handle)


def check_run_name(name: str) -> None:
    if not RUN_NAME.fullmatch(name) or name in RESERVED_RUN_NAMES or len(name) > _LONGEST_NAME:
        raise SelectionError(
            f"--run {name!r}: not usable as the name of a run",
            hint=f"letters, digits and ._+- only, {_LONGEST_NAME} at most, and not "
            + " or ".join(sorted(RESERVED_RUN_NAMES)),
        )


def cell_path(run_folder: Path, cell: str) -> Path:
    """A cell's name is its path in the run; one out of a file from elsewhere must not lead out of it."""
    return _inside(run_folder, "cells", cell, ".json")


def log_path(run_folder: Path, cell: str) -> Path:
    """Return where a cell's log lies, with the same care as for its file."""
    return _inside(run_folder, "logs", cell, ".log")


def _inside(run_folder: Path, kind: str, cell: str, suffix: str) -> Path:
    parts = cell.split("/")
    if {"", ".", ".."} & set(parts) or not _CELL.fullmatch(cell) or max(map(len, parts)) > _LONGEST_NAME:
        raise StorageError(f"{run_folder}: {cell!r} is no name of a cell", hint="the run is damaged: run it again")
    return _without_links(run_folder, kind, *parts[:-1], f"{parts[-1]}{suffix}")


def _without_links(run_folder: Path, *parts: str) -> Path:
    path = run_folder
    for part in parts:
        path /= part
        if path.is_symlink():
            raise StorageError(f"{path}: a link, which no run has", hint="copy the run with the files themselves in it")
    return path


def write_run_info(run_folder: Path, info: RunInfo) -> None:
    write_model(run_folder / "run.json", info)


def write_cell(run_folder: Path, cell: StoredCell) -> None:
    """Write a cell that has ended, once: it holds evidence, and nothing is added to that later."""
    write_model(cell_path(run_folder, cell.cell), cell)


def read_cell(path: Path) -> StoredCell:
    """Read a cell file of this or an earlier layout."""
    return checked(path, StoredCell, upgraded(path, read_bytes(path)))


def point_latest(results: Path, run_name: str) -> None:
    """Make results/latest a link to the run, or a file with its name where links are not allowed."""
    latest = results / "latest"
    temporary = results / f".latest{made_by_this_process()}"
    with storage_errors(latest, "written"):
        try:
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(run_name, target_is_directory=True)
            temporary.replace(latest)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
                raise
            write_atomically(results / "latest.txt", run_name + "\n")
        else:
            (results / "latest.txt").unlink(missing_ok=True)
            sync_folder(results)


def load_run(folder: Path) -> Run:
    """Read a whole run; any damaged file is an error, not a missing row.

    What an earlier run of the same name left in the folder is none of it: only the cells that run.json names are.
    """
    info = _read_run_info(folder / "run.json")
    paths = {cell: path for cell in info.cells if (path := cell_path(folder, cell)).exists()}
    return Run(folder, info, tuple(_read_cell_of(cell, path) for cell, path in paths.items()))


def _read_run_info(path: Path) -> RunInfo:
    content = read_bytes(path)
    refuse_later(path, content, newest=1)
    return checked(path, RunInfo, content)


def set_damaged_aside(run_folder: Path, cells: Iterable[CellName]) -> Iterator[str]:
    """Move files of an earlier run of the same name that cannot be read out of the way; say which, and why."""
    for cell in (None, *cells):
        path = run_folder / "run.json" if cell is None else cell_path(run_folder, cell)
        if not path.exists():
            continue
        try:
            _read_run_info(path) if cell is None else _read_cell_of(cell, path)
        except StorageError as error:
            kept = _without_links(run_folder, "damaged", *path.relative_to(run_folder).parent.parts) / path.name
            set_aside(path, kept)
            yield f"{cell or 'the run'}: its file cannot be used; it lies in {kept} now: {error.message}"


def _read_cell_of(name: CellName, path: Path) -> StoredCell:
    cell = read_cell(path)
    if cell.cell != name:
        raise StorageError(f"{path}: holds a result of {cell.cell}", hint="the run is damaged: run it again")
    return cell


def list_runs(results: Path) -> list[str]:
    """Name the runs in a results folder, oldest first; those of results/reference as reference/<name>."""
    if not results.is_dir():
        return []
    folders = [path.parent for path in results.glob("*/run.json") if not path.parent.is_symlink()]
    folders += [path.parent for path in results.glob("reference/*/run.json")]
    return [path.relative_to(results).as_posix() for path in sorted(folders)]


def find_run(name: str = "latest", results: Path = Path("results")) -> Path:
    """Find the folder of a run, by name, by path, or the latest one."""
    if name == "latest" and not (results / "latest" / "run.json").exists():
        pointer = results / "latest.txt"
        if pointer.exists():
            name = read_bytes(pointer).decode(errors="replace").strip()
            if not RUN_NAME.fullmatch(name):
                raise StorageError(f"{pointer}: {name[:80]!r} is no name of a run", hint="delete it, or name the run")
    for candidate in (results / name, Path(name)):
        if _holds_a_run(candidate):
            return candidate.resolve()
    known = list_runs(results)
    if name == "latest":
        raise SelectionError(f"{results}: no run there yet", hint="`toto-compat matrix` makes one")
    raise SelectionError(
        f"{name}: no such run in {results}",
        hint=f"there are: {', '.join(known[-8:])}" if known else "there is none yet: `toto-compat matrix` makes one",
    )


def _holds_a_run(folder: Path) -> bool:
    try:
        return (folder / "run.json").exists()
    except OSError:  # a name that no file can have
        return False


# --- the store of finished cells -------------------------------------------------------------------------------------


# Of a request: where things lie on this machine, how long they may take, what is only told along, and who computed the
# references, which are the same whoever did. Limits of gates change nothing that is measured, only what is skipped:
# `can_be_reused` looks at that.
_NOT_IN_KEY = ("work_folder", "quiet_lock", "origin", "environment", "demands", "references")


def cell_key(request: CellRequest, *, lock: str, source_hash: str, machine: str) -> str:
    """Hash everything that could change a cell's result.

    Where files lie is not part of it, their content is. The environment is part of it as `lock`: what is installed,
    not how that was asked for.
    """
    canonical = request.model_dump(mode="json", by_alias=True)
    for field in _NOT_IN_KEY:
        canonical.pop(field)
    canonical["profile"].pop("timeout_minutes")
    canonical["cache"]["source"] = user_cache_identity(request.cache.source)
    if request.csv:
        canonical["csv"]["path"] = file_hash(Path(request.csv.path))
        canonical["workload"]["csv"] = None
    for symbol in canonical["symbols"]:  # by its content; what stands out in it follows from that
        symbol["series"].pop("path")
        symbol.pop("notes")
    if request.checkpoint_folder:
        canonical["checkpoint_folder"] = _folder_identity(Path(request.checkpoint_folder))
        canonical["workload"]["checkpoint"] = None
    parts = {"request": canonical, "lock": lock, "source": source_hash, "machine": machine}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def can_be_reused(result: CellResult, demands: Sequence[Demand]) -> bool:
    """Only a cell that was really measured: what could not be run is tried again, and what was skipped is measured once
    the limits that it could not keep are no longer demanded."""
    wanted = set(result.request.profile.suites)
    nothing_was_demanded = not demands and not result.request.demands  # then what was skipped is skipped again
    if result.skipped and not nothing_was_demanded and not broken_demand(demands, result.evidence):
        return False
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

    def get(self, key: str, demands: Sequence[Demand] = ()) -> StoredCell | None:
        """Return the finished cell with this key. A damaged file is no reason to stop: the cell is run again."""
        try:
            cell = read_cell(self.path(key))
        except StorageError:
            return None
        return cell if cell.key == key and can_be_reused(cell, demands) else None

    def set_aside(self, key: str) -> str:
        """Move a file that cannot be used out of the way, to be looked at; return what to say about it, mostly nothing.

        The cell is run again. What is whole stays, whether it can be reused or not."""
        path = self.path(key)
        if not key or not path.exists():
            return ""
        try:
            if read_cell(path).key == key:
                return ""
            why = "it holds another cell"
        except StorageError as error:
            why = error.message
            if may_be_read_later(error):
                return f"a stored cell cannot be read now and is run again: {why}"
        kept = self.folder / "damaged" / path.name
        set_aside(path, kept)
        return f"a stored cell cannot be used and is run again; it lies in {kept} now: {why}"

    def put(self, cell: StoredCell) -> None:
        """Keep a cell that can be reused; remember how long it took, for the next plan."""
        if not cell.key or not can_be_reused(cell, cell.request.demands):
            return
        write_model(self.path(cell.key), cell)
        if _is_possible(cell.seconds):
            append_line(self._timings, json.dumps({timing_name(cell.request): cell.seconds}))  # however many there are

    def known_seconds(self) -> dict[str, float]:
        """Tell how long cells took when they last ran on this machine, by timing_name."""
        known: dict[str, float] = {}
        for path in (self.folder / "timings.json", self._timings):  # the first is of version 0.1 and before
            try:
                content = read_bytes(path).decode(errors="replace")
            except StorageError:
                continue
            for line in [content] if path.suffix == ".json" else content.splitlines():
                try:
                    told = {str(name): float(seconds) for name, seconds in json.loads(line).items()}
                except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
                    continue  # half a line, of a runner that was killed
                known |= {name: seconds for name, seconds in told.items() if _is_possible(seconds)}
        return known

    @property
    def _timings(self) -> Path:
        return self.folder / "timings.jsonl"


def _is_possible(seconds: float) -> bool:
    return 0 <= seconds <= _LONGEST_CELL_SECONDS  # neither is what is not a number


def timing_name(request: CellRequest) -> str:
    """Name what cells share that take about equally long: cell, profile and device."""
    return f"{request.cell} {request.profile_name} {request.device.value}"


def _folder_identity(folder: Path) -> list[tuple[str, int, int]]:
    # names, sizes and times instead of content: checkpoints are gigabytes and this runs at every start
    with storage_errors(folder, "read"):
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        facts = [(path.relative_to(folder).as_posix(), path.stat()) for path in files]
    return [(name, status.st_size, status.st_mtime_ns) for name, status in facts]
