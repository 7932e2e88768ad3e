"""`toto-compat false-alarms`: what is right, tried again and again under other seeds. No gate may fail it.

Upstream eager is put on trial against itself, as a user's file would be, and fixed_size compiled. A gate that fails one
of these is wrong itself; how near the others came says how much room there is. Each candidate is one run of the matrix
with a workload per seed: cells that ended are in the store, so that a campaign goes on where it was broken off, and one
with more seeds runs the new ones alone.
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

from toto_compat.contract.result import Provenance
from toto_compat.errors import ExitCode, SelectionError
from toto_compat.evidence.files import write_atomically
from toto_compat.evidence.store import load_run
from toto_compat.matrix.asked import Asked
from toto_compat.matrix.gates import Gate
from toto_compat.matrix.load import find_matrix_file, load_matrix, matrix_option
from toto_compat.report.table import plain_markdown
from toto_compat.runtimes.progress import as_text, say
from toto_compat.verdict.judge import JudgedCell, JudgedGate, Status, one_line
from toto_compat.verdict.judged_run import JudgedRun, judge_run
from toto_compat.workflow import run_matrix

PROFILE = "smoke"
FIRST_SEED = 1001
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
    """Counts what one gate said over all runs of one candidate."""

    runs: int = 0
    alarms: int = 0
    undecided: Counter[str] = field(default_factory=Counter)  # by reason
    worst: float | None = None  # figure over its limit; at a lower limit the other way round

    def add(self, judged: JudgedGate) -> None:
        self.runs += 1
        if judged.status is Status.FAIL:
            self.alarms += 1
        elif judged.status is Status.INCONCLUSIVE:
            self.undecided[judged.reason] += 1
        ratio = ratio_to_its_limit(judged)
        if ratio is not None:
            self.worst = ratio if self.worst is None else max(self.worst, ratio)


def ratio_to_its_limit(judged: JudgedGate) -> float | None:
    """Say how near to its limit a figure is: above 1 is past it. None where one of the two is 0 or missing."""
    value, limit = judged.value, judged.limit
    if value is None or not math.isfinite(value):
        return None
    if limit.max:
        return value / limit.max
    if limit.min and value:
        return limit.min / value
    return None


def seeds_of(runs: int) -> range:
    """Return the seeds of so many runs; those of fewer runs are among them."""
    return range(FIRST_SEED, FIRST_SEED + runs)


def seeded_workloads(document: Mapping[str, Any], seeds: Iterable[int]) -> dict[str, Any]:
    """Repeat the profile's workloads for every seed, which decides about series, weights and draws."""
    if PROFILE not in document["profiles"]:
        raise SelectionError(f"the matrix file has no profile {PROFILE!r}", hint="the campaign runs on it")
    own = document["profiles"][PROFILE]["workloads"]
    return {
        f"{f'{name}-' if len(own) > 1 else ''}seed-{seed}": {**document["workloads"][name], "seed": seed}
        for seed in seeds
        for name in own
    }


def matrix_of(document: Mapping[str, Any], candidate: str, seeded: Mapping[str, Any]) -> dict[str, Any]:
    """Make one candidate's matrix: eager as a cache, and a profile that takes the workload of every seed."""
    eager = {"source": "upstream_eager.py:UpstreamEager", "description": "upstream eager, not compiled"}
    gates = dict(document.get("gates", {}))
    if candidate == UPSTREAM_EAGER:
        gates |= {gate.value: limit for gate, limit in NOT_ASKED_OF_EAGER.items()}
    profile = document["profiles"][PROFILE]
    # The profile's own workload stays and is not selected: with one workload alone a cell does not have it in its name,
    # and the one seed of `--runs 1` would be another cell than the same seed of `--runs 20`.
    profile = {**profile, "workloads": [*profile["workloads"], *seeded]}
    return {
        **document,
        "caches": {**document["caches"], UPSTREAM_EAGER: eager},
        "gates": gates,
        "profiles": {**document["profiles"], PROFILE: profile},
        "workloads": {**document["workloads"], **seeded},
    }


def take_runs(
    document: Mapping[str, Any],
    environment: str,
    seeds: Sequence[int],
    folder: Path,
    run: Callable[[Asked], object],
) -> dict[str, JudgedRun]:
    """Run every candidate under all seeds. The matrix is asked each time: it runs what is not in the store."""
    write_atomically(folder / "upstream_eager.py", EAGER_FILE)
    workloads = seeded_workloads(document, seeds)
    runs: dict[str, JudgedRun] = {}
    for candidate in CANDIDATES:
        asked = asked_of(environment, candidate, workloads, folder)
        matrix = matrix_of(document, candidate, workloads)
        write_atomically(folder / f"{candidate}.yaml", yaml.safe_dump(matrix, sort_keys=False))
        say(f"false alarms: {candidate}, {len(seeds)} seeds")
        run(asked)
        judged = runs[candidate] = judge_run(load_run(folder / candidate))
        for line in findings(judged) or [f"false alarms: {candidate}: no alarm"]:
            say(line)
    return runs


def asked_of(environment: str, candidate: str, workloads: Iterable[str], folder: Path) -> Asked:
    return Asked(
        selectors=tuple(f"{environment}/{candidate}/default@{workload}" for workload in workloads),
        profile=PROFILE,
        runtime="venv",
        device="cpu",
        run=candidate,
        matrix_file=folder / f"{candidate}.yaml",
        results=folder,
    )


def findings(judged: JudgedRun) -> list[str]:
    """Write a line for every gate that failed, and for every cell that says nothing."""
    return alarms_of(judged) + [f"NOT RUN {cell}: {why}" for cell, why in not_run(judged).items()]


def alarms_of(judged: JudgedRun) -> list[str]:
    return [
        f"ALARM {cell.result.cell} {gate.value}: {found.reason}"
        for cell in judged.cells
        for gate, found in cell.gates.items()
        if found.status is Status.FAIL
    ]


def not_run(judged: JudgedRun) -> dict[str, str]:
    """Cells without a result, and why: that no gate failed in them says nothing. One that failed all the same is told
    as an alarm."""
    missing: dict[str, str] = dict.fromkeys(judged.run.unfinished, "it has no result")
    for cell in judged.cells:
        if cell.result.could_not_run and cell.verdict is not Status.FAIL:
            told = [f"{failure.kind}: {failure.message}" for _, failure in cell.result.failures]
            missing[cell.result.cell] = one_line("; ".join(told))
    return missing


def tallies(cells: Iterable[JudgedCell]) -> dict[tuple[str, Gate], Tally]:
    """Count what each gate that applies said of each candidate; those that eager is not asked are left out."""
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
            str(tally.runs),
            str(tally.alarms),
            f"{tally.worst:.2f}" if tally.worst is not None else "",
            "; ".join([f"{count}x {why}" for why, count in tally.undecided.most_common()]),
        ]
        for (candidate, gate), tally in told.items()
    ]
    return as_markdown(rows, ["candidate", "gate", "runs", "alarms", "worst / limit", "undecided"])


def verdict_table(runs: Mapping[str, JudgedRun]) -> str:
    """Show how the cells of each candidate ended, each counted once."""
    verdicts = (Status.PASS, Status.INCONCLUSIVE, Status.FAIL)
    rows = []
    for candidate, judged in runs.items():
        missing = not_run(judged)
        ended = Counter(cell.verdict for cell in judged.cells if cell.result.cell not in missing)
        counts = [len(judged.run.info.cells), *(ended[verdict] for verdict in verdicts), len(missing)]
        rows.append([candidate, *map(str, counts)])
    return as_markdown(rows, ["candidate", "cells", *(verdict.value for verdict in verdicts), "not run"])


def as_markdown(rows: Sequence[Sequence[str]], header: Sequence[str]) -> str:
    escaped = [[text.replace("|", "\\|") for text in row] for row in rows]
    return tabulate(escaped, header, tablefmt="github", disable_numparse=True)


def measured_on(runs: Mapping[str, JudgedRun]) -> str:
    """Say what the cells ran on and which code ran in them, by their own word: some may be of an earlier day."""
    origins = [cell.result.provenance for judged in runs.values() for cell in judged.cells]

    def all_of(read: Callable[[Provenance], object]) -> str:
        return ", ".join(dict.fromkeys(str(value) for origin in origins if (value := read(origin)))) or "unknown"

    return (
        f"Profile {PROFILE}; torch {all_of(lambda origin: origin.torch)}; CPUs: {all_of(lambda origin: origin.cores)}; "
        f"source hash: {all_of(lambda origin: origin.source_hash)}"
    )


def tables(runs: Mapping[str, JudgedRun]) -> str:
    """Write the closing tables, with what they were measured on."""
    told = tallies(cell for judged in runs.values() for cell in judged.cells)
    return "\n\n".join([measured_on(runs), verdict_table(runs), table(told)])


def publish(runs: Mapping[str, JudgedRun], folder: Path) -> None:
    """Keep the tables with every finding under them as table.md, to be committed, and print them."""
    shown = as_text(tables(runs))
    found = [as_text(line) for judged in runs.values() for line in findings(judged)] or ["No alarm."]
    kept = ["# False alarms", "", *shown.split("\n"), "", *(f"- {line}" for line in found)]
    write_atomically(folder / "table.md", "".join(f"{plain_markdown(line)}\n" for line in kept))
    click.echo("\n".join([shown, "", *found]))


def exit_code(runs: Mapping[str, JudgedRun]) -> ExitCode:
    """Let an alarm come first: it stays one, whatever a cell that could not be run would have said."""
    if any(alarms_of(judged) for judged in runs.values()):
        return ExitCode.FINDINGS
    return ExitCode.CELL_NOT_RUN if any(not_run(judged) for judged in runs.values()) else ExitCode.OK


@click.command("false-alarms")
@click.option("--runs", type=click.IntRange(min=1), default=20, show_default=True, help="Seeds to try, each a cell.")
@click.option(
    "--environment", metavar="NAME", default="torch-2.13.0-cpu", show_default=True, help="Environment to try it in."
)
@click.option(
    "--results",
    type=click.Path(path_type=Path),
    default=Path("results/false-alarms"),
    show_default=True,
    help="Folder of the campaign.",
)
@matrix_option
def false_alarms_command(runs: int, environment: str, results: Path, matrix_file: Path | None) -> None:
    """Try what is right under many seeds: upstream eager against itself, and fixed_size. Any FAIL is an alarm.

    A campaign that was broken off goes on where it was, and more runs add to those that are done; cells that could not
    be run are tried again. The closing tables are kept as table.md."""
    path = find_matrix_file(matrix_file)
    if environment not in load_matrix(path).environments:
        raise SelectionError(f"no environment {environment!r}", hint=f"see environments in {path}")
    results.mkdir(parents=True, exist_ok=True)
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    judged = take_runs(document, environment, seeds_of(runs), results, run_matrix)
    publish(judged, results)
    if code := exit_code(judged):
        sys.exit(code)
