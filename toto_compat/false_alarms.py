"""`toto-compat false-alarms`: what is right, tried again and again under other seeds. No gate may fail it.

Upstream eager is put on trial against itself, as a user's file would be, and fixed_size compiled. A gate that fails one
of these is wrong itself; how near the others came says how much room there is. Each run is a run of the matrix with its
folder, so that a campaign that was broken off goes on where it was.
"""

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import yaml
from tabulate import tabulate

from toto_compat.errors import ExitCode, SelectionError
from toto_compat.evidence.files import write_atomically
from toto_compat.evidence.store import load_run
from toto_compat.matrix.asked import Asked
from toto_compat.matrix.gates import Gate
from toto_compat.matrix.load import find_matrix_file, load_matrix
from toto_compat.runtimes.progress import say
from toto_compat.verdict.judge import JudgedCell, JudgedGate, Status
from toto_compat.verdict.judged_run import judge_run
from toto_compat.workflow import run_matrix

PROFILE = "smoke"
UPSTREAM_EAGER = "upstream_eager"
CANDIDATES = (UPSTREAM_EAGER, "fixed_size")
# Through the front door: eager is no cache of the matrix, and a user's file is what a candidate usually is.
EAGER_FILE = '''"""Upstream eager as a candidate: right by definition, and not compiled."""

from toto.model.util import KVCache

from toto_compat.model.bound import WholeModel


class UpstreamEager(WholeModel):
    @classmethod
    def bind(cls, backbone, *, compile_spec, max_patches, batch_sizes):
        return cls(backbone, KVCache, None)
'''
# What eager cannot keep, since nothing of it is compiled; switched off, so that its other suites run to their end.
NOT_ASKED_OF_EAGER: Mapping[Gate, dict[str, float]] = {Gate.COMPILE_ACTIVE: {"min": 0.0}, Gate.SPEEDUP: {"min": 0.0}}


@dataclass
class Tally:
    """What one gate said over all runs of one candidate."""

    runs: int = 0
    alarms: list[str] = field(default_factory=list)  # why, one each
    undecided: Counter[str] = field(default_factory=Counter)  # by reason
    worst: float | None = None  # figure over its limit; at a lower limit the other way round

    def add(self, judged: JudgedGate) -> None:
        self.runs += 1
        if judged.status is Status.FAIL:
            self.alarms.append(judged.reason)
        elif judged.status is Status.INCONCLUSIVE:
            self.undecided[judged.reason] += 1
        ratio = ratio_to_its_limit(judged)
        if ratio is not None:
            self.worst = ratio if self.worst is None else max(self.worst, ratio)


def ratio_to_its_limit(judged: JudgedGate) -> float | None:
    """How near to its limit a figure is: above 1 is past it. None where one of the two is 0 or missing."""
    value, limit = judged.value, judged.limit
    if value is None or not math.isfinite(value):
        return None
    if limit.max:
        return value / limit.max
    if limit.min and value:
        return limit.min / value
    return None


def matrix_of(document: Mapping[str, Any], candidate: str, seed: int) -> dict[str, Any]:
    """The matrix of one run: eager as a cache, and workloads whose series, weights and draws are of another seed."""
    if PROFILE not in document["profiles"]:
        raise SelectionError(f"the matrix file has no profile {PROFILE!r}", hint="the campaign runs on it")
    eager = {"source": "upstream_eager.py:UpstreamEager", "description": "upstream eager, not compiled"}
    gates = dict(document.get("gates", {}))
    if candidate == UPSTREAM_EAGER:
        gates |= {gate.value: limit for gate, limit in NOT_ASKED_OF_EAGER.items()}
    workloads = {name: {**workload, "seed": seed} for name, workload in document["workloads"].items()}
    return {**document, "caches": {**document["caches"], UPSTREAM_EAGER: eager}, "gates": gates, "workloads": workloads}


def take_runs(
    document: Mapping[str, Any],
    environment: str,
    numbers: Iterable[int],
    folder: Path,
    run: Callable[[Asked], object] = run_matrix,
) -> list[JudgedCell]:
    """Run every candidate under every seed, those that have a result already left out."""
    write_atomically(folder / "upstream_eager.py", EAGER_FILE)
    cells: list[JudgedCell] = []
    for number in numbers:
        for candidate in CANDIDATES:
            name = f"{candidate}-{number}"
            file = folder / f"{name}.yaml"
            write_atomically(file, yaml.safe_dump(matrix_of(document, candidate, seed=1000 + number), sort_keys=False))
            if not is_finished(folder / name):
                say(f"false alarms: {candidate}, run {number}")
                run(
                    Asked(
                        selectors=(f"{environment}/{candidate}/default",),
                        profile=PROFILE,
                        runtime="venv",
                        device="cpu",
                        jobs=1,
                        run=name,
                        matrix_file=file,
                        results=folder,
                    )
                )
            found = judge_run(load_run(folder / name)).cells
            cells += found
            say(f"false alarms: {candidate}, run {number}: {in_a_line(found)}")
    return cells


def is_finished(folder: Path) -> bool:
    """Tell whether a run has a result of every cell: else it is run again, finished suites from the store."""
    return (folder / "run.json").exists() and not load_run(folder).unfinished


def in_a_line(cells: Sequence[JudgedCell]) -> str:
    if not cells:
        return "no result"
    failed = [gate.value for cell in cells for gate, judged in cell.gates.items() if judged.status is Status.FAIL]
    return f"ALARM: {', '.join(failed)}" if failed else f"no alarm ({cells[0].verdict.value})"


def tallies(cells: Iterable[JudgedCell]) -> dict[tuple[str, Gate], Tally]:
    """What each gate that applies said of each candidate; those that eager is not asked are left out."""
    told: dict[tuple[str, Gate], Tally] = {}
    for cell in cells:
        candidate = cell.result.request.cache.name
        for gate, judged in cell.gates.items():
            asked = candidate != UPSTREAM_EAGER or gate not in NOT_ASKED_OF_EAGER
            if asked and judged.status is not Status.NOT_APPLICABLE:
                told.setdefault((candidate, gate), Tally()).add(judged)
    return told


def table(told: Mapping[tuple[str, Gate], Tally]) -> str:
    rows = [
        [
            candidate,
            gate.value,
            tally.runs,
            len(tally.alarms),
            f"{tally.worst:.2f}" if tally.worst is not None else "",
            "; ".join([f"{count}x {why}" for why, count in tally.undecided.most_common()]),
        ]
        for (candidate, gate), tally in told.items()
    ]
    header = ["candidate", "gate", "runs", "alarms", "worst / limit", "undecided"]
    return tabulate(rows, header, tablefmt="github", disable_numparse=True)


@click.command("false-alarms")
@click.option("--runs", type=click.IntRange(min=1), default=20, show_default=True, help="Seeds to try, each a run.")
@click.option("--environment", default="torch-2.13.0-cpu", show_default=True)
@click.option("--results", type=click.Path(path_type=Path), default=Path("results/false-alarms"), show_default=True)
@click.option("--matrix", "matrix_file", type=click.Path(path_type=Path), help="Matrix file to use.")
def false_alarms_command(runs: int, environment: str, results: Path, matrix_file: Path | None) -> None:
    """Try what is right under many seeds: upstream eager against itself, and fixed_size. Any FAIL is an alarm.

    A campaign that was broken off goes on where it was; delete the results folder to begin anew."""
    path = find_matrix_file(matrix_file)
    if environment not in load_matrix(path).environments:
        raise SelectionError(f"no environment {environment!r}", hint=f"see environments in {path}")
    results.mkdir(parents=True, exist_ok=True)
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    told = tallies(take_runs(document, environment, range(1, runs + 1), results))
    click.echo(table(told))
    alarms = [(candidate, gate, why) for (candidate, gate), tally in told.items() for why in tally.alarms]
    for candidate, gate, why in alarms:
        click.echo(f"ALARM {candidate} {gate.value}: {why}")
    if alarms:
        sys.exit(ExitCode.FINDINGS)
