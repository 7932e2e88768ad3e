"""The plan of the reference: which rows of which releases, from results/reference/plan.yaml."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from toto_compat.contract.cell_name import CellName
from toto_compat.contract.request import DESCRIBED_ARCHITECTURES, TORCH_RELEASE, Device
from toto_compat.contract.strict_model import StrictModel
from toto_compat.errors import MatrixFileError, SelectionError
from toto_compat.matrix.document import Document, KeyPath, Mistake, describe_mistakes, read_document
from toto_compat.matrix.expand import expand
from toto_compat.matrix.load import schema_mistakes
from toto_compat.matrix.schema import Matrix

PLAN_FILE = Path("results/reference/plan.yaml")
Release = Annotated[str, Field(pattern=TORCH_RELEASE)]
Row = Annotated[str, Field(pattern=r"^[\w-]+/[\w-]+(\+[\w-]+)?$")]


class MoreRows(StrictModel):
    """Rows that only some releases have."""

    releases: tuple[Release, ...] = Field(min_length=1)
    rows: tuple[Row, ...] = Field(min_length=1)


class ReferenceRun(StrictModel):
    """One folder of results/reference: rows that are judged together, by one profile."""

    profile: str
    lower_only: bool = False  # compiled for CUDA and not run: of CUDA builds alone
    architectures: tuple[str, ...] = ()  # that CUDA builds compile for, in the place of the profile's
    rows: tuple[Row, ...] = ()  # of every release
    more: tuple[MoreRows, ...] = ()
    counted_by_torch_logs: tuple[Row, ...] = ()

    def rows_of(self, release: str) -> tuple[str, ...]:
        more = (row for one in self.more if release in one.releases for row in one.rows)
        return tuple(dict.fromkeys((*self.rows, *more)))


class ReferencePlan(StrictModel):
    """The whole file."""

    schema_version: Annotated[Literal[1], Field(alias="schema")]
    releases: tuple[Release, ...] = Field(min_length=1)
    most_disk_gb: float = Field(default=30, gt=0)
    runs: dict[Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]*$")], ReferenceRun] = Field(min_length=1)


@dataclass(frozen=True)
class PlannedRow:
    """One cell of the reference, of one workload, and the run of results/reference that it belongs to."""

    run: str
    release: str
    cell: CellName
    profile: str
    lower_only: bool
    counted_by_torch_logs: bool
    architectures: tuple[str, ...] = ()


def read_plan(path: Path) -> ReferencePlan:
    """Read and check the file; every mistake is told with its line and key."""
    document = read_document(path)
    mistakes = list(document.mistakes)
    plan: ReferencePlan | None = None
    try:
        plan = ReferencePlan.model_validate(document.data)
    except ValidationError as error:
        mistakes += schema_mistakes(document, ReferencePlan, error)
    if plan is not None:
        mistakes += _contradictions(document, plan)
    if mistakes or plan is None:
        raise MatrixFileError(describe_mistakes(path, mistakes), hint="the committed plan.yaml shows how it is written")
    return plan


def _contradictions(document: Document, plan: ReferencePlan) -> Iterator[Mistake]:
    """What every key allows and the file as a whole does not."""
    yield from _repeated(document, ("releases",), plan.releases)
    for name, run in plan.runs.items():
        own = ("runs", name)
        yield from _repeated(document, (*own, "rows"), run.rows)
        for place, more in enumerate(run.more):
            yield from _repeated(document, (*own, "more", place, "rows"), more.rows)
            for number, release in enumerate(more.releases):
                if release not in plan.releases:
                    key = (*own, "more", place, "releases", number)
                    yield document.mistake(key, f"{release}, which is not among `releases`", "one of those")
        for number, one in enumerate(run.architectures):
            if one not in DESCRIBED_ARCHITECTURES:
                compiled = (*own, "architectures", number)
                told = f"{one}, which no GPU is described of"
                yield document.mistake(compiled, told, ", ".join(DESCRIBED_ARCHITECTURES))
        for number, row in enumerate(run.counted_by_torch_logs):
            if row not in run.rows:
                counted = (*own, "counted_by_torch_logs", number)
                yield document.mistake(counted, f"{row}, which is no row of every release", "one of `rows`")


def _repeated(document: Document, key: KeyPath, values: Sequence[str]) -> Iterator[Mistake]:
    for place, value in enumerate(values):
        if value in values[:place]:
            yield document.mistake((*key, place), f"{value} a second time", "every one once")


def chosen_releases(plan: ReferencePlan, only: Sequence[str]) -> tuple[str, ...]:
    """The releases of `--only`, in the plan's order; all without one."""
    unknown = [release for release in only if release not in plan.releases]
    if unknown:
        raise SelectionError(f"--only {unknown[0]}: not in the plan", hint=f"it has {', '.join(plan.releases)}")
    return tuple(release for release in plan.releases if release in only or not only)


def chosen_runs(plan: ReferencePlan, only: Sequence[str]) -> tuple[str, ...]:
    """The runs of `--run`, in the plan's order; all without one."""
    unknown = [run for run in only if run not in plan.runs]
    if unknown:
        raise SelectionError(f"--run {unknown[0]}: not in the plan", hint=f"it has {', '.join(plan.runs)}")
    return tuple(run for run in plan.runs if run in only or not only)


def environment_of(matrix: Matrix, release: str, *, for_cuda: bool) -> str | None:
    """The environment that a release is measured in: its CPU build where there is one, unless CUDA code is wanted."""
    names = [name for name, one in matrix.environments.items() if one.torch == release]
    if for_cuda:
        names = [name for name in names if matrix.environments[name].device is Device.CUDA]
    names.sort(key=lambda name: (matrix.environments[name].device is not Device.CPU, len(name), name))
    return names[0] if names else None


def planned_rows(plan: ReferencePlan, matrix: Matrix, release: str) -> Iterator[PlannedRow]:
    """The rows of a release; none where matrix.yaml lacks its environment."""
    for name, run in plan.runs.items():
        rows = run.rows_of(release)
        environment = environment_of(matrix, release, for_cuda=run.lower_only)
        if not rows or environment is None:
            continue
        if run.profile not in matrix.profiles:
            raise SelectionError(f"runs.{name}: matrix.yaml has no profile {run.profile!r}")
        known = expand(matrix, run.profile)
        for row in rows:
            cells = [cell for cell in known if cell.for_all_workloads == f"{environment}/{row}"]
            if not cells:
                raise SelectionError(
                    f"runs.{name}: matrix.yaml has no cell {environment}/{row}", hint="check caches, modes, settings"
                )
            counted = row in run.counted_by_torch_logs
            for cell in cells:
                yield PlannedRow(name, release, cell, run.profile, run.lower_only, counted, run.architectures)


def lacking_environment(plan: ReferencePlan, matrix: Matrix, release: str) -> str:
    """Say what to do about a release that matrix.yaml has no environment of; empty where it has one."""
    for run in plan.runs.values():
        if run.rows_of(release) and environment_of(matrix, release, for_cuda=run.lower_only) is None:
            what = "CUDA build" if run.lower_only else "environment"
            return f"matrix.yaml has no {what} of torch {release}: toto-compat releases --add {release}"
    return ""
