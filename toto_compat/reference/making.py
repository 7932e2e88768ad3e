"""Makes the reference: a release's environments are built, its rows run, counted and kept; then the next one's."""

import hashlib
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from toto_compat.contract.request import Device
from toto_compat.contract.result import CellResult
from toto_compat.errors import EnvironmentBuildError, ExitCode
from toto_compat.evidence.files import cache_folder
from toto_compat.evidence.store import CellStore, StoredCell, cell_path, load_run, read_cell
from toto_compat.matrix.asked import Asked
from toto_compat.matrix.schema import Matrix
from toto_compat.matrix.selection import select_cells
from toto_compat.reference.disk import BuiltHere
from toto_compat.reference.kept import KeptRow, State, keep, kept_row
from toto_compat.reference.plan import PlannedRow, ReferencePlan, lacking_environment, planned_rows
from toto_compat.reference.torch_logs import LogCount, add_count, can_be_counted, count_by_log, is_counted
from toto_compat.runtimes.machine import core_count
from toto_compat.runtimes.open import open_runtime
from toto_compat.runtimes.plan import Plan, plan_run
from toto_compat.runtimes.progress import say
from toto_compat.runtimes.run import git_revision
from toto_compat.workflow import run_matrix

_LOG_COUNT_SECONDS = 150.0  # upstream compiled anew: 115 s were measured on two cores with torch 2.13.0


@dataclass(frozen=True)
class Making:
    """What is made, from what, and how long."""

    plan: ReferencePlan
    matrix: Matrix
    matrix_file: Path
    folder: Path  # results/reference
    runs: tuple[str, ...] = ()  # of the plan; all where none is named
    jobs: int | None = None
    budget_seconds: float | None = None
    keep_environments: bool = False
    began: float = field(default_factory=time.monotonic)

    @property
    def used_up(self) -> bool:
        return self.budget_seconds is not None and time.monotonic() - self.began >= self.budget_seconds


@dataclass
class Made:
    """What a reference run did."""

    kept: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)  # with the reason
    left: list[str] = field(default_factory=list)  # rows that the budget did not reach
    lacking: list[str] = field(default_factory=list)
    counts: list[LogCount] = field(default_factory=list)


def rows_of(making: Making, release: str) -> list[KeptRow]:
    rows = planned_rows(making.plan, making.matrix, release)
    return [kept_row(making.folder, row, making.matrix) for row in rows if not making.runs or row.run in making.runs]


def make(making: Making, releases: Sequence[str]) -> Made:
    """Go through the releases. What is there and not stale is left alone: the same command goes on after a stop."""
    made, built = Made(), BuiltHere()
    # a wheel of CUDA has gigabytes, and pip would keep one for every release
    os.environ["PIP_NO_CACHE_DIR"] = "1"
    with nullcontext() if making.keep_environments else built.alone():
        for release in releases:
            if lacking := lacking_environment(making.plan, making.matrix, release):
                made.lacking.append(lacking)
                say(lacking)
            try:
                _make_release(making, release, built, made)
            finally:
                if not making.keep_environments:
                    for name, size in built.remove_all():
                        say(f"reference: removed {name}, {size / 10**9:.1f} GB")
    return made


def _make_release(making: Making, release: str, built: BuiltHere, made: Made) -> None:
    rows = rows_of(making, release)
    for batch in _batches(making, [row for row in rows if row.state is not State.THERE]):
        if making.used_up:
            made.left += [row.row.cell for row in batch]
            continue
        try:
            _announce(making, batch[0].row.cell.environment, built)
            _run_batch(making, batch, made)
        except EnvironmentBuildError as error:
            made.failed.append(f"{release}: {error}")
            say(f"error: {error}")
    for row in rows:
        if row.row.counted_by_torch_logs and not making.used_up:
            _count(making, row.row, built, made)


def _announce(making: Making, environment: str, built: BuiltHere) -> None:
    """Note an environment for its removal, unless it is to be kept."""
    if not making.keep_environments:
        built.announce(environment, making.matrix.environments[environment], making.plan.most_disk_gb * 10**9)


def _batches(making: Making, rows: Sequence[KeptRow]) -> Iterator[list[KeptRow]]:
    """Rows that one run of the matrix takes; as many as run at a time where a budget may end between two of them."""
    size = (making.jobs or min(2, core_count())) if making.budget_seconds is not None else len(rows)
    for kind in dict.fromkeys((row.row.run, row.row.profile, row.row.lower_only) for row in rows):
        own = [row for row in rows if (row.row.run, row.row.profile, row.row.lower_only) == kind]
        for start in range(0, len(own), size):
            yield own[start : start + size]


def asked_of(making: Making, batch: Sequence[KeptRow], results: Path) -> Asked:
    first = batch[0].row
    return Asked(
        selectors=tuple(row.row.cell for row in batch),
        profile=first.profile,
        runtime="venv",
        device=Device.CPU.value,
        jobs=making.jobs,
        # what a reference has is stale by the suites; a finished cell of the same sources is not run twice
        run=f"{first.run}-{first.release}",
        lower_only=first.lower_only,
        matrix_file=making.matrix_file,
        results=results,
    )


def _run_batch(making: Making, batch: Sequence[KeptRow], made: Made) -> None:
    first = batch[0].row
    say(f"reference: torch {first.release}, {first.run}: {', '.join(row.row.cell for row in batch)}")
    # of this reference alone: there may be others on this machine
    results = cache_folder() / "reference" / hashlib.sha256(str(making.folder.resolve()).encode()).hexdigest()[:16]
    asked = asked_of(making, batch, results)
    code = run_matrix(asked)
    if code is ExitCode.ENVIRONMENT:
        made.failed.append(f"{first.release}: an environment could not be built")
        return
    assert asked.run is not None
    cells = [cell for cell in load_run(results / asked.run).cells if worth_keeping(cell, making.folder / first.run)]
    revision, _ = git_revision(making.matrix_file.resolve().parent)
    keep(making.folder, first.run, making.matrix, profile=first.profile, cells=cells, revision=revision)
    made.kept += [cell.cell for cell in cells]
    made.failed += [f"{cell.cell}: could not be run" for cell in cells if cell.could_not_run]


def worth_keeping(cell: StoredCell, run_folder: Path) -> bool:
    """A cell that could not be run is kept as what it is, unless there is one that could."""
    if (
        isinstance(cell, CellResult)
        and cell.failure is not None
        and cell.failure.kind in ("environment", "interrupted")
    ):
        return False
    path = cell_path(run_folder, cell.cell)
    return not cell.could_not_run or not path.exists() or read_cell(path).could_not_run


def _count(making: Making, row: PlannedRow, built: BuiltHere, made: Made) -> None:
    path = cell_path(making.folder / row.run, row.cell)
    if not path.exists():
        return
    cell = read_cell(path)
    if not can_be_counted(cell) or is_counted(making.folder / row.run, cell):
        return
    say(f"reference: {row.cell} once more, counted by TORCH_LOGS")
    _announce(making, row.cell.environment, built)
    try:
        count = count_by_log(cell)
    except EnvironmentBuildError as error:
        made.failed.append(str(error))
        say(f"error: {error}")
        return
    add_count(making.folder / row.run, count)
    made.counts.append(count)


@dataclass(frozen=True)
class Forecast:
    """What a release would take."""

    release: str
    to_run: int
    why: str  # 3 missing, 1 stale
    there: int
    seconds: float
    download_bytes: int
    disk_bytes: int
    based_on: str
    lacking: str


def forecast(making: Making, release: str) -> Forecast:
    """Estimate time and disk of a release from what cells took here before; nothing is changed."""
    rows = rows_of(making, release)
    to_run = [row for row in rows if row.state is not State.THERE]
    plans = [_plan_of(making, batch) for batch in _batches(making, to_run)]
    counted = sum(row.row.counted_by_torch_logs for row in to_run)
    # of one release and kind all rows are of one environment, which is built once for all of them
    needs = {name: plan.needs for plan in plans for name in plan.to_build}
    return Forecast(
        release=release,
        to_run=len(to_run),
        why=", ".join(f"{count} {state.value}" for state, count in Counter(row.state for row in to_run).items()),
        there=len(rows) - len(to_run),
        seconds=sum(plan.seconds - plan.needs.seconds for plan in plans)
        + sum(one.seconds for one in needs.values())
        + counted * _LOG_COUNT_SECONDS,
        download_bytes=sum(one.download_bytes for one in needs.values()),
        disk_bytes=sum(one.disk_bytes for one in needs.values()),
        based_on="; ".join(dict.fromkeys(plan.based_on for plan in plans)),
        lacking=lacking_environment(making.plan, making.matrix, release),
    )


def _plan_of(making: Making, batch: Sequence[KeptRow]) -> Plan:
    asked = asked_of(making, batch, making.folder)
    selection = select_cells(asked, lambda: Device.CPU)
    runtime = open_runtime("venv", limits=selection.matrix.limits, device=Device.CPU)
    return plan_run(selection, runtime, CellStore(cache_folder() / "evidence"), asked)
