"""A stored run judged again, by its own limits or by those of another file; nothing is rerun."""

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

from packaging.version import Version
from pydantic import TypeAdapter, ValidationError

from toto_compat.contract.gate_limit import GateLimit
from toto_compat.contract.request import Device
from toto_compat.errors import MatrixFileError, SelectionError
from toto_compat.evidence.store import Run, RunInfo
from toto_compat.matrix.document import matrix_file_error, read_document
from toto_compat.matrix.gates import Gate
from toto_compat.verdict.decision import Decision, DecisionRules, UnfinishedCell, decide, torch_release
from toto_compat.verdict.judge import JudgedCell, judge

# Releases, drivers and pins move on: after so long a verdict is shown as stale. This project's choice.
REVIEW_AFTER = timedelta(days=90)
_CPU_BUILD = re.compile(r"torch-[^-/]+-cpu[-/]")


@dataclass(frozen=True)
class JudgedRun:
    """A run with a verdict per cell, rows in table order, and the answer they give together."""

    run: Run
    gates: Mapping[Gate, GateLimit]
    cells: tuple[JudgedCell, ...]
    decision: Decision


def judge_run(run: Run, gates: Mapping[Gate, GateLimit] | None = None, *, today: date | None = None) -> JudgedRun:
    """Judge every stored cell by `gates`, or by the limits the run itself recorded; `today` shows what is stale."""
    limits = gates or run.info.gates
    if not limits:
        raise SelectionError(
            f"{run.folder}: the run holds no gate limits to judge by", hint="name them: --gates matrix.yaml"
        )
    planned = {name: position for position, name in enumerate(run.info.cells)}
    as_planned = sorted(run.cells, key=lambda cell: planned.get(cell.cell, len(planned)))
    cells = in_table_order(judge(cell, limits) for cell in as_planned)
    rules = rules_of(run.info, today or datetime.now(UTC).date())
    return JudgedRun(run=run, gates=limits, cells=cells, decision=decide(cells, rules, unfinished_of(run)))


def rules_of(info: RunInfo, today: date) -> DecisionRules:
    """Read from a run what its decision may say."""
    day = datetime.fromisoformat((info.finished or info.started).replace("Z", "+00:00")).date()
    return DecisionRules(
        production_profile=info.production_profile,
        production_workloads=info.production_workloads,
        releases=info.releases,
        review_by=(day + REVIEW_AFTER).isoformat(),
        today=today.isoformat(),
    )


def unfinished_of(run: Run) -> tuple[UnfinishedCell, ...]:
    """List what was planned and has no result. A CPU build, by its environment's name, ran on the CPU anyway.

    Where only some of the cells were compiled without a GPU, as in merged runs, the rest may have been meant to run.
    """
    device = Device(run.info.device)
    all_lowered = bool(run.cells) and all(cell.request.lower_only for cell in run.cells)
    if all_lowered or "--lower-only" in run.info.command:
        return tuple(UnfinishedCell(name, Device.CUDA, run.info.profile, lower_only=True) for name in run.unfinished)
    return tuple(
        UnfinishedCell(name, Device.CPU if _CPU_BUILD.match(name) else device, run.info.profile)
        for name in run.unfinished
    )


def in_table_order(cells: Iterable[JudgedCell]) -> tuple[JudgedCell, ...]:
    """Sort CPU before CUDA, old releases first; within an environment the order stays."""
    return tuple(
        sorted(
            cells,
            key=lambda cell: (
                cell.result.request.speaks_of.value,
                Version(torch_release(cell)),
                cell.result.cell.environment,
            ),
        )
    )


def read_gates(path: Path, info: RunInfo) -> dict[Gate, GateLimit]:
    """Read the run's limits with those of a file on top: a matrix file, or one with nothing but gates.

    Of a matrix file the limits of the run's profile come last. A gate that the file does not name stays as it was.
    """
    read = read_document(path)
    if read.mistakes:
        raise matrix_file_error(path, read.mistakes)
    document = read.data
    if not isinstance(document, dict):
        raise MatrixFileError(f"{path}: found {type(document).__name__}, accepted a mapping of gate names to limits")
    general = _checked(path, "gates", document.get("gates", document))
    profiles = document.get("profiles")
    profile = profiles.get(info.profile, {}) if isinstance(profiles, dict) else {}
    profile_gates = profile.get("gates") if isinstance(profile, dict) else None
    of_profile = _checked(path, f"profiles.{info.profile}.gates", profile_gates or {})
    return {**info.gates, **general, **of_profile}


def _checked(path: Path, where: str, limits: Any) -> dict[Gate, GateLimit]:
    names = [gate.value for gate in Gate]
    if isinstance(limits, dict):
        for key in limits:
            if key not in names:
                close = difflib.get_close_matches(str(key), names, n=1)
                hint = f"did you mean {close[0]}?" if close else f"gates are: {', '.join(names)}"
                raise MatrixFileError(f"{path}: {where}: {key!r} is not a gate", hint=hint)
    try:
        return TypeAdapter(dict[Gate, GateLimit]).validate_python(limits)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in (where, *first["loc"]))
        raise MatrixFileError(f"{path}: {key}: {first['msg']}", hint="a limit is {min: N}, {max: N} or both") from error
