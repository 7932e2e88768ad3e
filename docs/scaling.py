"""Write docs/scaling.md: what a large matrix takes on 1, 8 and 64 GPUs, simulated from stored cells.

    python docs/scaling.py results/reference/cpu [RUN...] > docs/scaling.md

The simulation hands out tasks as the Slurm executor submits them: the references of every release, then the cells of
one release after the other; a node builds an environment when its first job of that release comes, and the others there
wait for it.
"""

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tabulate import tabulate

from toto_compat.contract.cell_name import CellName
from toto_compat.contract.request import CellRequest, Device, Environment, Limits
from toto_compat.evidence.store import CellStore, StoredCell, load_run
from toto_compat.matrix.load import load_matrix
from toto_compat.matrix.request import matrix_request
from toto_compat.runtimes.plan import estimate
from toto_compat.runtimes.source import CellSource
from toto_compat.runtimes.venv import VenvRuntime

RELEASES, CACHES = 12, ("upstream", "list_index", "compile_friendly", "fixed_size")
GPUS, GPUS_OF_A_NODE = (1, 8, 64), 8
MODE_NAMES = ("default", "reduce-overhead", "max-autotune")
# From the start of a run whose environment was there to its first cell, on two cores, torch 2.13.0, November 2026. No
# stored run tells it: one that is kept was made in many parts
REFERENCES_SECONDS = 41.0
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Costs:
    """Seconds of everything that happens, on one kind of machine."""

    cells: dict[tuple[str, str], float]  # cache, mode
    references: float
    build: float


@dataclass(frozen=True)
class Task:
    """One job: the references of a release (no cell), or one of its cells."""

    release: int
    seconds: float
    cell: tuple[str, str] | None = None


@dataclass
class Outcome:
    """What a simulated run came to."""

    wall: float = 0.0
    busy: float = 0.0  # GPU seconds, waiting for a build included
    building: float = 0.0  # of those, building or waiting for it
    ends: dict[Task, float] = field(default_factory=dict)


def tasks_of(costs: Costs, releases: int, caches: tuple[str, ...] = CACHES) -> list[Task]:
    """List the jobs of a run in the order in which they are submitted."""
    rows = [(cache, mode) for cache in caches for mode in MODE_NAMES]
    references = [Task(release, costs.references) for release in range(releases)]
    return references + [Task(release, costs.cells[row], row) for release in range(releases) for row in rows]


def simulate(tasks: list[Task], gpus: int, build: float) -> Outcome:
    """Hand out tasks in their order to whatever GPU is free; a cell waits for the references of its release."""
    free = [0.0] * gpus
    built: dict[tuple[int, int], float] = {}  # node, release -> when its environment is there
    references: dict[int, float] = {}
    waiting, outcome = list(tasks), Outcome()
    while waiting:
        gpu = min(range(gpus), key=lambda one: free[one])
        now = free[gpu]
        ready = [task for task in waiting if task.cell is None or references.get(task.release, now + 1) <= now]
        if not ready:
            free[gpu] = min(end for end in references.values() if end > now)
            continue
        task = ready[0]
        waiting.remove(task)
        node = gpu // GPUS_OF_A_NODE
        there = built.setdefault((node, task.release), now + build)
        start = max(now, there)
        end = start + task.seconds
        free[gpu] = end
        if task.cell is None:
            references[task.release] = end
        outcome.busy += end - now
        outcome.building += start - now
        outcome.wall = max(outcome.wall, end)
        outcome.ends[task] = end
    return outcome


def timed_cells(folders: Sequence[Path]) -> list[StoredCell]:
    """Take the stored cells that tell how long one takes: with PyTorch's own settings, and run to their end."""
    cells = [cell for folder in folders for cell in load_run(folder).cells]
    return [cell for cell in cells if cell.cell.settings == "stock" and not cell.could_not_run]


def measured_times(cells: Sequence[StoredCell]) -> dict[tuple[str, str], float]:
    """Take the median by cache and mode."""
    times: dict[tuple[str, str], list[float]] = {}
    for cell in cells:
        times.setdefault((cell.cell.cache, cell.cell.mode), []).append(cell.seconds)
    return {row: statistics.median(seconds) for row, seconds in times.items()}


def with_modes_that_nobody_ran(known: dict[tuple[str, str], float]) -> dict[tuple[str, str], float]:
    """Let a mode that nobody ran take as long as `default`."""
    return {(cache, mode): known.get((cache, mode), known[cache, "default"]) for cache in CACHES for mode in MODE_NAMES}


def guessed_cells() -> dict[tuple[str, str], float]:
    """Take the plan's own rule of thumb for cells on a GPU."""
    matrix = load_matrix(ROOT / "matrix.yaml")
    name = next(name for name, one in matrix.environments.items() if one.device is Device.CUDA)

    def request(cache: str, mode: str) -> CellRequest:
        cell = CellName.of(name, cache, mode)
        return matrix_request(matrix, ROOT / "matrix.yaml", cell, "quick", Device.CUDA)

    nothing = CellStore(Path("/nonexistent"))
    return {(c, m): estimate([request(c, m)], nothing, jobs=1)[0] for c in CACHES for m in MODE_NAMES}


def build_seconds(build: str) -> float:
    runtime = VenvRuntime(CellSource(), limits=Limits(), device=Device.CPU)
    return runtime.needs("", Environment(torch="2.13.0", build=build)).seconds


# --- the page --------------------------------------------------------------------------------------------------------


def limit_of(costs: Costs, tasks: list[Task], gpus: int, outcome: Outcome) -> str:
    """Name the bound that a simulated run is at, or what keeps it away from both."""
    (cache, mode), longest = max(costs.cells.items(), key=lambda one: one[1])
    chain = costs.build + costs.references + longest
    work = sum(task.seconds for task in tasks) / gpus
    if max(chain, work) < 0.75 * outcome.wall:
        rounds = sum(task.cell is not None for task in tasks) / gpus
        return (
            f"{rounds:.1f} rounds of unlike cells: {1 - work / outcome.wall:.0%} of the time GPUs are idle or wait for "
            f"builds; one release's chain is {minutes(chain)}"
        )
    if chain > work:
        return f"one release's chain, {minutes(chain)}: build, references, its longest cell ({cache}/{mode})"
    return f"the work itself: {work / outcome.wall:.0%} of the time all GPUs are in cells"


def minutes(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 5400 else f"{seconds / 60:.0f} min"


def hours(seconds: float) -> str:
    return f"{seconds / 3600:.1f}"


def wall_table(costs: Costs) -> str:
    """Simulate a run of everything, environments built by the nodes and already there."""
    tasks = tasks_of(costs, RELEASES)
    rows = []
    for gpus in GPUS:
        cold, warm = simulate(tasks, gpus, costs.build), simulate(tasks, gpus, 0.0)
        speed = simulate(tasks, 1, costs.build).wall / cold.wall
        times = [minutes(cold.wall), f"{speed:.1f}x", hours(cold.busy), hours(cold.building), minutes(warm.wall)]
        rows.append([gpus, *times, limit_of(costs, tasks, gpus, cold)])
    heads = ["GPUs", "wall time", "over one GPU", "GPU hours", "of those waiting for builds", "environments there"]
    return table(rows, [*heads, "what limits it"])


def daily_table(costs: Costs) -> str:
    """Simulate what a daily run has to do again, by what has changed since yesterday."""
    everything = simulate(tasks_of(costs, RELEASES), 8, 0.0).busy
    changes = [
        ("nothing", [], 0.0),
        ("a gate's limit in matrix.yaml", [], 0.0),
        ("a new release", tasks_of(costs, 1), costs.build),
        # held to references that are stored
        ("a cache of your own", tasks_of(replace(costs, references=0.0), RELEASES, ("fixed_size",)), 0.0),
        ("the code that cells run", tasks_of(costs, RELEASES), 0.0),
    ]
    rows = []
    for what, tasks, build in changes:
        done = simulate(tasks, 8, build)
        cells = sum(task.cell is not None for task in tasks)
        saved = 1 - done.busy / everything
        rows.append([what, cells, minutes(done.wall) if tasks else "the plan alone", hours(done.busy), f"{saved:.0%}"])
    return table(rows, ["what changed", "cells run", "wall time on 8 GPUs", "GPU hours", "saved"])


def cells_table(known: dict[tuple[str, str], float], measured: Costs, guessed: Costs) -> str:
    rows = []
    for (cache, mode), seconds in measured.cells.items():
        assumed = "" if (cache, mode) in known else " (assumed)"
        rows.append([cache, mode, f"{seconds:.0f}{assumed}", f"{guessed.cells[cache, mode]:.0f}"])
    return table(rows, ["cache", "mode", "on a CPU, s", "on a GPU (assumed), s"])


def table(rows: Sequence[Sequence[object]], heads: list[str]) -> str:
    return tabulate(rows, heads, tablefmt="github", disable_numparse=True)


PAGE = """# Scaling

What {cells} cells take ({releases} releases x {caches} caches x {modes} modes, profile `quick`) on 1, 8 and 64 GPUs, in
a simulation of the order in which `--executor slurm` submits them. **No figure here was measured on a GPU.** Written by
`python docs/scaling.py {arguments} > docs/scaling.md`.

## What goes in

| input | value | where it comes from |
|---|---|---|
| cells on a CPU | table below | measured: medians of {stored} cells of {runs}, two at a time on two cores |
| cells on a CPU, a mode that no stored run has | as `default` | assumed |
| cells on a GPU | table below | assumed: the plan's own rule of thumb, nothing was timed on a GPU yet |
| references of a release | {references:.0f} s | measured once on a CPU, from the start of a run to its first cell; \
assumed for a GPU |
| an environment | {build_cpu:.0f} s (CPU), {build_gpu:.0f} s (CUDA) | the plan's figures for a virtualenv, \
two cores and a fast index |
| GPUs of a node | {per_node} | assumed; a node builds each environment once, all its jobs of that release wait for it |
| time in the queue | 0 | assumed: the GPUs are there and nobody else wants them |

{cell_times}

## If a cell takes as long as on a CPU

{wall_cpu}

## If a cell takes what the plan assumes for a GPU

{wall_gpu}

"Environments there" is the same run when every node has built them before, or they lie in a cache folder that the nodes
share.

## What the store saves on the daily run

A cell runs again only if something changed that could change its result. With the GPU's assumed times, and environments
and references as they were; "saved" is against running everything:

{daily}

## What follows

{conclusions}
"""


def conclusions(guessed: Costs) -> str:
    """Say what the tables show, in figures of theirs."""
    tasks = tasks_of(guessed, RELEASES)
    cold, warm = simulate(tasks, 64, guessed.build), simulate(tasks, 64, 0.0)
    longest = max(guessed.cells, key=lambda name: guessed.cells[name])
    tuned = sum(seconds for (_, mode), seconds in guessed.cells.items() if mode == "max-autotune")
    share = tuned / sum(guessed.cells.values())
    builds = f"{hours(cold.building)} of {hours(cold.busy)} GPU hours on 64 GPUs, and {minutes(cold.wall - warm.wall)}"
    by_all = hours(RELEASES * len(guessed.cells) * guessed.references)
    lines = [
        f"- No number of GPUs takes less than the longest cell: {'/'.join(longest)} alone is assumed to take",
        f"  {minutes(guessed.cells[longest])}. A run without that mode would be shorter: `max-autotune` is",
        f"  {share:.0%} of all assumed cell time.",
        f"- Environments that every node builds for itself cost {builds} of",
        "  wall time: there a shared cache folder, or a `node_cache` on disks that outlive the job, pays.",
        f"- References cost {RELEASES} x {guessed.references:.0f} s, once, in jobs of their own. If every cell",
        f"  computed its own it would be {by_all} GPU hours instead of {hours(RELEASES * guessed.references)}.",
    ]
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    timed = timed_cells([Path(name) for name in arguments])
    known = measured_times(timed)
    measured = Costs(with_modes_that_nobody_ran(known), REFERENCES_SECONDS, build_seconds("cpu"))
    guessed = Costs(guessed_cells(), REFERENCES_SECONDS, build_seconds("cu128"))
    page = PAGE.format(
        cells=RELEASES * len(CACHES) * len(MODE_NAMES),
        releases=RELEASES,
        caches=len(CACHES),
        modes=len(MODE_NAMES),
        arguments=" ".join(arguments),
        stored=len(timed),
        runs=", ".join(f"`{name}`" for name in arguments),
        references=REFERENCES_SECONDS,
        build_cpu=measured.build,
        build_gpu=guessed.build,
        per_node=GPUS_OF_A_NODE,
        cell_times=cells_table(known, measured, guessed),
        wall_cpu=wall_table(measured),
        wall_gpu=wall_table(guessed),
        daily=daily_table(guessed),
        conclusions=conclusions(guessed),
    )
    sys.stdout.write(page)


if __name__ == "__main__":
    main(sys.argv[1:] or ["results/reference/cpu"])
