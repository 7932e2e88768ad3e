"""Several runs as one: which of two results of a cell is taken, what has to be the same, and where each came from."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pydantic import BaseModel

from toto_compat.contract.cell_name import CellName
from toto_compat.contract.files import utc_now
from toto_compat.errors import InputError
from toto_compat.evidence.store import MergedRun, Run, RunInfo, StoredCell

RULE = (
    "one that ran before one that could not be run, one that was measured before one that was only compiled for CUDA, "
    "then the one that ran last"
)


class OtherMatrixError(InputError):
    """Two runs were made by different matrix files, and have no verdict in common."""


# Limits of gates and what counts as production: two runs that differ in these have no verdict in common.
_JUDGED_BY = ("profile", "gates", "production_profile", "production_workloads")
# Parts of matrix.yaml that travel in a cell's request, with what they are called there.
_PARTS_OF_A_REQUEST: Mapping[str, Callable[[StoredCell], str]] = {
    "environment": lambda cell: cell.cell.environment,
    "workload": lambda cell: cell.request.workload_name or "the workload",
    "profile": lambda cell: cell.request.profile_name,
    "settings": lambda cell: cell.cell.settings,
    "limits": lambda _: "of a cell",
}


@dataclass(frozen=True)
class Merged:
    """A run that holds the cells of several, and what there is to say about them."""

    info: RunInfo
    cells: tuple[StoredCell, ...]
    taken_from: dict[CellName, Run]
    notes: tuple[str, ...]


def merge_runs(runs: Sequence[Run], name: str, *, command: Sequence[str] = (), conflicts: str = "newest") -> Merged:
    """Take every cell once. InputError where runs were made by other rules, or no rule decides between two results."""
    notes = [*_check_matrices(runs), *_suite_versions(runs)]
    chosen: dict[CellName, tuple[Run, StoredCell]] = {}
    left_out: dict[int, dict[CellName, str]] = {id(run): {} for run in runs}
    for run in runs:
        for cell in run.cells:
            if cell.cell not in chosen:
                chosen[cell.cell] = (run, cell)
                continue
            there, other = chosen[cell.cell]
            if _without_origin(cell) == _without_origin(other):
                left_out[id(run)][cell.cell] = f"{there.info.name} has the same result"
                continue
            keep_new, why = _preferred(there, other, run, cell, conflicts)
            if keep_new:
                chosen[cell.cell] = (run, cell)
                left_out[id(there)][cell.cell] = why
            else:
                left_out[id(run)][cell.cell] = why
            notes.append(f"{cell.cell}: {why}")
    info = _merged_info(runs, name, command, chosen, left_out)
    cells = tuple(
        cell if cell.ran_in else cell.model_copy(update={"ran_in": run.info.name}) for run, cell in chosen.values()
    )
    return Merged(info, cells, {cell: run for cell, (run, _) in chosen.items()}, tuple(notes))


def _preferred(there: Run, other: StoredCell, run: Run, cell: StoredCell, conflicts: str) -> tuple[bool, str]:
    """Decide between two results of one cell; True for the second. Says which is taken and why."""
    names = f"{there.folder} and {run.folder}"
    if other.request.speaks_of is not cell.request.speaks_of:
        raise InputError(
            f"{cell.cell}: of {other.request.speaks_of.value} in {there.folder}, of {cell.request.speaks_of.value} in "
            f"{run.folder}: two rows cannot have one name in a run",
            hint="merge the runs of one device at a time",
        )
    if conflicts == "error":
        raise InputError(
            f"{cell.cell}: {names} have different results of it", hint="--conflicts newest takes the one that ran last"
        )
    if other.could_not_run is not cell.could_not_run:
        taken = run if other.could_not_run else there
        left = there if other.could_not_run else run
        return other.could_not_run, f"taken from {taken.info.name}: it could not be run in {left.info.name}"
    if other.request.lower_only is not cell.request.lower_only:
        taken = run if other.request.lower_only else there
        left = there if other.request.lower_only else run
        return (
            other.request.lower_only,
            f"taken from {taken.info.name}: it was only compiled for CUDA in {left.info.name}",
        )
    if other.stored == cell.stored:
        raise InputError(
            f"{cell.cell}: {names} have different results of it, both stored at {cell.stored or 'no known time'}",
            hint="one of the files was changed: leave one of the runs out",
        )
    newer = cell.stored > other.stored
    taken, when, before = (run, cell.stored, other.stored) if newer else (there, other.stored, cell.stored)
    return newer, f"taken from {taken.info.name}: it ran last ({when}, the other at {before or 'no known time'})"


def _without_origin(cell: StoredCell) -> StoredCell:
    """Leave out how a result got into its run: taken from a store, a cell is the same one."""
    return cell.model_copy(update={"reused": False, "ran_in": ""})


# --- what must be the same ------------------------------------------------------------------------------------------


def _check_matrices(runs: Sequence[Run]) -> list[str]:
    """Say how matrix files differ. What changes a verdict or a row is an error, other differences are notes."""
    first, notes = runs[0], []
    for place, run in enumerate(runs):
        # with every one before it: the first need not have the environment that two others ask for differently
        for other in runs[:place]:
            # a run that was merged of several matrix files has no hash of its own
            if not run.info.matrix_hash or run.info.matrix_hash != other.info.matrix_hash:
                _check_matrix(run, other)
        if run.info.matrix_hash == first.info.matrix_hash:
            continue
        releases = set(first.info.releases) ^ set(run.info.releases)
        what = f"releases {', '.join(sorted(releases))}" if releases else "nothing that a cell or a gate of either uses"
        notes.append(f"{run.info.name}: its matrix file differs from that of {first.info.name} in {what}")
    return notes


def _check_matrix(run: Run, other: Run) -> None:
    differing = [*_judged_otherwise(other.info, run.info), *_asked_otherwise(other, run)]
    if differing:
        told = "".join(f"\n    {line}" for line in differing)
        raise OtherMatrixError(
            f"{run.folder} was made with another matrix file than {other.folder}:{told}",
            hint="run one of them again with the other's matrix file, or merge runs of one matrix only",
        )


def _judged_otherwise(first: RunInfo, other: RunInfo) -> Iterator[str]:
    for name in _JUDGED_BY:
        mine, its = getattr(first, name), getattr(other, name)
        if mine == its:
            continue
        if name != "gates":
            yield f"{name}: {_both(mine, its)}"
            continue
        for gate in dict.fromkeys([*mine, *its]):
            if mine.get(gate) != its.get(gate):
                yield f"gates.{gate.value}: {_shown(mine.get(gate))} and {_shown(its.get(gate))}"


def _asked_otherwise(first: Run, other: Run) -> Iterator[str]:
    """Name parts of the matrix that cells of both runs were asked by, with one name and different content."""
    known = {(part, name): asked for cell in first.cells for part, name, asked in _parts(cell)}
    told: set[str] = set()
    for cell in other.cells:
        for part, name, asked in _parts(cell):
            before = known.get((part, name), asked)
            for field in type(asked).model_fields:
                mine, its = getattr(before, field), getattr(asked, field)
                line = f"{part} {name}: {field}: {_both(mine, its)}"
                if mine != its and line not in told:
                    told.add(line)
                    yield line


def _parts(cell: StoredCell) -> Iterator[tuple[str, str, BaseModel]]:
    for part, named in _PARTS_OF_A_REQUEST.items():
        yield part, named(cell), getattr(cell.request, part)


def _both(mine: object, its: object) -> str:
    """Show two values; of two lists only what the other one lacks."""
    if isinstance(mine, tuple) and isinstance(its, tuple):
        ours, theirs = (tuple(one for one in these if one not in those) for these, those in ((mine, its), (its, mine)))
        if ours or theirs:  # else they differ in their order
            return f"{_shown(ours)} in one and {_shown(theirs)} in the other"
    return f"{_shown(mine)} and {_shown(its)}"


def _shown(value: object) -> str:
    if value is None or value == ():
        return "none"
    if isinstance(value, BaseModel):
        value = {name: one for name, one in value.model_dump(mode="json").items() if one is not None}
    text = ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _suite_versions(runs: Sequence[Run]) -> Iterator[str]:
    """Warn of figures from two versions of a suite: each is judged for itself, but they cannot be compared."""
    versions: dict[str, set[int]] = {}
    for cell in (cell for run in runs for cell in run.cells):
        for suite, evidence in cell.evidence.items():
            if evidence.figures:
                versions.setdefault(suite.value, set()).add(evidence.version)
    for name, found in versions.items():
        if len(found) > 1:
            told = " and ".join(map(str, sorted(found)))
            yield f"the suite {name} measured in versions {told}: rows differ by that, too"


# --- run.json --------------------------------------------------------------------------------------------------------


def _merged_info(
    runs: Sequence[Run],
    name: str,
    command: Sequence[str],
    chosen: dict[CellName, tuple[Run, StoredCell]],
    left_out: dict[int, dict[CellName, str]],
) -> RunInfo:
    infos = [run.info for run in runs]
    devices = _each(info.device for info in infos)
    return infos[0].model_copy(
        update={
            "name": name,
            "command": tuple(command),
            "selectors": tuple(dict.fromkeys(one for info in infos for one in info.selectors)),
            "runtime": ", ".join(_each(info.runtime for info in infos)),
            "executor": ", ".join(_each(info.executor for info in infos)),
            "device": devices[0] if len(devices) == 1 else "cuda",
            "cells": tuple(dict.fromkeys(cell for info in infos for cell in info.cells)),
            "releases": tuple(dict.fromkeys(one for info in infos for one in info.releases)),
            "matrix_hash": _common(info.matrix_hash for info in infos),
            "source_hash": _common(info.source_hash for info in infos),
            "git_revision": _common(info.git_revision for info in infos),
            "git_dirty": any(info.git_dirty for info in infos),
            "host": ", ".join(_each(info.host for info in infos)),
            "started": min(info.started for info in infos),
            "finished": max((info.finished for info in infos), default="") or utc_now(),
            "merged": tuple(
                MergedRun(
                    name=run.info.name,
                    host=run.info.host,
                    git_revision=run.info.git_revision,
                    source_hash=run.info.source_hash,
                    matrix_hash=run.info.matrix_hash,
                    started=run.info.started,
                    finished=run.info.finished,
                    cells=tuple(cell for cell, (owner, _) in chosen.items() if owner is run),
                    left_out=left_out[id(run)],
                )
                for run in runs
            ),
        }
    )


def _each(values: Iterator[str]) -> list[str]:
    return list(dict.fromkeys(value for value in values if value))


def _common(values: Iterator[str]) -> str:
    """Return the value that all share; empty where they differ, and then each merged run has its own."""
    found = set(values)
    return found.pop() if len(found) == 1 else ""
