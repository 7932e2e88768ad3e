"""Makes the reference: a release's environments are built, its rows run, counted and kept; then the next one's."""

import hashlib
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from toto_compat.contract.request import Device
from toto_compat.errors import ExitCode, TotoCompatError
from toto_compat.evidence.files import cache_folder
from toto_compat.evidence.store import CellStore, StoredCell, cell_path, read_cell
from toto_compat.matrix.asked import Asked
from toto_compat.matrix.schema import Matrix
from toto_compat.matrix.selection import select_cells
from toto_compat.reference.disk import BuiltHere
from toto_compat.reference.kept import (
    KeptRow,
    State,
    check_made_here,
    check_size,
    is_undecided,
    keep,
    kept_row,
    stale_because,
)
from toto_compat.reference.plan import PlannedRow, ReferencePlan, lacking_environment, planned_rows
from toto_compat.reference.torch_logs import LogCount, add_count, can_be_counted, count_by_log, is_counted
from toto_compat.runtimes.interrupt import sigterm_as_interrupt
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
    retry: bool = False  # also rows that could not be run
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


def to_run(making: Making, rows: Sequence[KeptRow]) -> list[KeptRow]:
    wanted = {State.MISSING, State.STALE} | ({State.COULD_NOT_RUN} if making.retry else set())
    return [row for row in rows if row.state in wanted]


def make(making: Making, releases: Sequence[str]) -> Made:
    """Go through the releases. What is there and not stale is left alone: the same command goes on after a stop."""
    made, built = Made(), BuiltHere()
    check_made_here(making.folder, making.runs or list(making.plan.runs))
    check_size(making.folder, sum(len(to_run(making, rows_of(making, release))) for release in releases))
    # a wheel of CUDA has gigabytes, and pip would keep one for every release
    os.environ["PIP_NO_CACHE_DIR"] = "1"
    with sigterm_as_interrupt(), nullcontext() if making.keep_environments else built.alone():
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
    for batch in _batches(making, to_run(making, rows_of(making, release)), whole=True):
        _keep_finished(making, batch, made)  # what a session that was cut off had finished
    rows = rows_of(making, release)
    for batch in _batches(making, to_run(making, rows)):
        if making.used_up:
            made.left += [row.row.cell for row in batch]
            continue
        with _told(release, made):
            _announce(making, batch[0].row.cell.environment, built)
            _run_batch(making, batch, made)
    for row in rows:
        if row.row.counted_by_torch_logs and not making.used_up:
            with _told(release, made):
                _count(making, row.row, built, made)


@contextmanager
def _told(release: str, made: Made) -> Iterator[None]:
    """Tell an error of one batch or count, which is no reason to leave out the others."""
    try:
        yield
    except TotoCompatError as error:
        made.failed.append(f"{release}: {error}")
        say(f"error: {error}")


def _announce(making: Making, environment: str, built: BuiltHere) -> None:
    """Note an environment for its removal, unless it is to be kept."""
    if not making.keep_environments:
        built.announce(environment, making.matrix.environments[environment], making.plan.most_disk_gb * 10**9)


def _batches(making: Making, rows: Sequence[KeptRow], *, whole: bool = False) -> Iterator[list[KeptRow]]:
    """Rows that one run of the matrix takes; as many as run at a time where a budget may end between two of them."""
    in_portions = making.budget_seconds is not None and not whole
    size = (making.jobs or min(2, core_count())) if in_portions else len(rows)
    for kind in dict.fromkeys((row.row.run, row.row.profile, row.row.lower_only) for row in rows):
        own = [row for row in rows if (row.row.run, row.row.profile, row.row.lower_only) == kind]
        for start in range(0, len(own), size):
            yield own[start : start + size]


def _run_name(row: PlannedRow) -> str:
    return f"{row.run}-{row.release}"


def asked_of(making: Making, batch: Sequence[KeptRow], results: Path) -> Asked:
    first = batch[0].row
    return Asked(
        selectors=tuple(row.row.cell for row in batch),
        profile=first.profile,
        runtime="venv",
        device=Device.CPU.value,
        jobs=making.jobs,
        # what a reference has is stale by the suites; a finished cell of the same sources is not run twice
        run=_run_name(first),
        lower_only=first.lower_only,
        architectures=first.architectures,
        matrix_file=making.matrix_file,
        results=results,
    )


def _results_of(making: Making) -> Path:
    """Where the cells of this reference are run: there may be others on this machine."""
    return cache_folder() / "reference" / hashlib.sha256(str(making.folder.resolve()).encode()).hexdigest()[:16]


def _run_batch(making: Making, batch: Sequence[KeptRow], made: Made) -> None:
    """Run the rows; those that could not be run once more, while their environment is there."""
    undone = _run_once(making, batch, made)
    if undone and not making.used_up:
        _run_once(making, undone, made, again=True)


def _run_once(making: Making, batch: Sequence[KeptRow], made: Made, *, again: bool = False) -> list[KeptRow]:
    first = batch[0].row
    cells = ", ".join(row.row.cell for row in batch)
    say(f"reference: torch {first.release}, {first.run}: {cells}{', once more' if again else ''}")
    try:
        code = run_matrix(asked_of(making, batch, _results_of(making)))
    finally:  # Ctrl-C loses no finished cell
        undone = _keep_finished(making, batch, made, again=again)
    if code is ExitCode.ENVIRONMENT:
        made.failed.append(f"{first.release}: an environment could not be built")
    return undone


def _keep_finished(making: Making, batch: Sequence[KeptRow], made: Made, *, again: bool = False) -> list[KeptRow]:
    """Keep what the run of these rows has finished, and forget it there. Return the rows that could not be run: they
    are kept as that the second time."""
    first, undone = batch[0].row, []
    revision, _ = git_revision(making.matrix_file.resolve().parent)
    for row in batch:
        finished = cell_path(_results_of(making) / _run_name(first), row.row.cell)
        if not finished.exists():
            continue
        with _told(first.release, made):
            cell = read_cell(finished)
            if stale_because(cell, row.row, making.matrix) or _says_nothing(cell):
                continue
            undecided = is_undecided(cell, row.row, making.matrix)
            if undecided and not again:
                undone.append(row)
                finished.unlink()  # a second try that is cut off must not find the first one's
                continue
            keep(making.folder, first.run, making.matrix, profile=first.profile, cells=[cell], revision=revision)
            made.kept.append(cell.cell)
            finished.unlink()
            if undecided:
                made.failed.append(f"{cell.cell}: could not be run, twice")
    return undone


def _says_nothing(cell: StoredCell) -> bool:
    return cell.failure is not None and cell.failure.kind in ("environment", "interrupted")


def _count(making: Making, row: PlannedRow, built: BuiltHere, made: Made) -> None:
    path = cell_path(making.folder / row.run, row.cell)
    if not path.exists():
        return
    cell = read_cell(path)
    if not can_be_counted(cell) or is_counted(making.folder / row.run, cell):
        return
    say(f"reference: {row.cell} once more, counted by TORCH_LOGS")
    _announce(making, row.cell.environment, built)
    count = count_by_log(cell)
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
    wanted = to_run(making, rows)
    plans = [_plan_of(making, batch) for batch in _batches(making, wanted)]
    counted = sum(row.row.counted_by_torch_logs for row in wanted)
    # of one release and kind all rows are of one environment, which is built once for all of them
    needs = {name: plan.needs for plan in plans for name in plan.to_build}
    return Forecast(
        release=release,
        to_run=len(wanted),
        why=", ".join(f"{count} {state.value}" for state, count in Counter(row.state for row in wanted).items()),
        there=len(rows) - len(wanted),
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
