"""What an acceptance asks of the matrix, step by step, and what each step found."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from toto_compat.acceptance import sabotages
from toto_compat.acceptance.campaign import Campaign, Ended, StepName
from toto_compat.acceptance.sabotages import Sabotage, caught
from toto_compat.contract.request import Device, Environment
from toto_compat.contract.result import CellResult, Figure, Outcome
from toto_compat.contract.suites import Suite
from toto_compat.errors import ExitCode, SelectionError
from toto_compat.evidence.files import cache_folder, write_atomically
from toto_compat.evidence.store import CellStore, load_run
from toto_compat.matrix.asked import Asked
from toto_compat.matrix.expand import expand, select
from toto_compat.matrix.load import load_matrix
from toto_compat.matrix.request import matrix_request
from toto_compat.matrix.schema import Matrix
from toto_compat.runtimes.gpu import wheel_runs_on
from toto_compat.runtimes.nvidia_smi import capability
from toto_compat.runtimes.plan import estimate, jobs_of
from toto_compat.runtimes.progress import say
from toto_compat.verdict.judge import JudgedCell, Status, disturbed, unseen_steps
from toto_compat.verdict.judged_run import JudgedRun, judge_run

MATRIX_FILE = "matrix.yaml"
WORKLOAD = PRACTICE_PROFILE = "smoke"
LONG_WORKLOAD = "quick"  # whose buffers are large enough for a hoard of them to show beside what the compiler keeps
LOWERING, DEVICE, PRODUCTION_CHECK = "lowering", "device", "production-check"  # runs in the acceptance's folder
# What CUDA graphs are asked about: the cache that they were predicted to take, and production's two that they were not.
FIXED_SIZE = "fixed_size/reduce-overhead"
WHOLE_MODELS = ("list_index/reduce-overhead+production", "compile_friendly/reduce-overhead+production")

Found = tuple[Ended, list[str]]


@dataclass(frozen=True)
class StepRun:
    """One run of the matrix in a step: its name in the acceptance's folder, and what it is asked for."""

    name: str
    profile: str
    selectors: tuple[str, ...]
    lower_only: bool = False


@dataclass(frozen=True)
class Acceptance:
    """One acceptance on this machine: its folder, its campaign, and how a run of the matrix is made."""

    folder: Path
    campaign: Campaign
    runtime: Literal["auto", "docker", "venv", "here"]
    production_profile: str
    modes: tuple[str, ...]  # of the matrix
    run: Callable[[Asked], ExitCode]

    @property
    def environments(self) -> tuple[str, ...]:
        return self.campaign.about.environments

    @property
    def rehearsal(self) -> bool:
        return self.campaign.about.rehearsal

    def take(self, run: StepRun) -> JudgedRun:
        """Run cells of the acceptance's own matrix, or take up the run that is there; finished cells are kept.

        Not those of a run that others on the machine left undecided: the store has them too, so all are run afresh.
        """
        folder = self.folder / run.name
        finished = is_finished(folder)
        again = finished and not self.rehearsal and was_disturbed(judge_run(load_run(folder)))
        if again:
            say(f"{run.name}: others used the machine while it was measured: it is run again")
        if again or not finished:
            self.run(self.asked(run, fresh=again))
        return judge_run(load_run(folder))

    def asked(self, run: StepRun, *, fresh: bool = False) -> Asked:
        """Say what the matrix is asked for; the answer of all steps but the last one is the acceptance's to tell."""
        return Asked(
            selectors=run.selectors,
            profile=run.profile,
            runtime=self.runtime,
            device=Device.CPU.value if self.rehearsal else Device.CUDA.value,
            run=run.name,
            lower_only=run.lower_only,
            fresh=fresh,
            as_part=run.name != PRODUCTION_CHECK,
            matrix_file=self.folder / MATRIX_FILE,
            results=self.folder,
        )


def is_finished(folder: Path) -> bool:
    """Tell whether a run has a result of every cell and none that could not be run: else it is run again."""
    if not (folder / "run.json").exists():
        return False
    run = load_run(folder)
    return not run.unfinished and not any(cell.could_not_run for cell in run.cells)


def was_disturbed(judged: JudgedRun) -> bool:
    """Tell whether others on the machine kept a gate of a run from deciding."""
    return any(
        one.status is Status.INCONCLUSIVE and disturbed(gate, cell.result.evidence.get(gate.rule.suite))
        for cell in judged.cells
        for gate, one in cell.gates.items()
    )


def runs_of(acceptance: Acceptance, step: StepName) -> list[StepRun]:
    """List the runs of a step; a rehearsal has short ones of the CPU."""
    names, rehearsal = acceptance.environments, acceptance.rehearsal
    of_graphs = tuple(f"{name}/{cell}" for name in names for cell in (FIXED_SIZE, *WHOLE_MODELS))
    if rehearsal:
        of_graphs = of_graphs[:1]
    match step:
        case StepName.LOWERING:
            profile = DEVICE if rehearsal else LOWERING
            return [StepRun(LOWERING, profile, of_graphs, lower_only=not rehearsal)]
        case StepName.DEVICE:
            return [StepRun(DEVICE, DEVICE, of_graphs)]
        case StepName.SABOTAGES:
            return [
                StepRun(one.cache, _profile_of(one), (f"{names[0]}/{one.cache}/reduce-overhead",))
                for one in tried(acceptance)
            ]
        case StepName.PRODUCTION_CHECK:
            graph_modes = [mode for mode in acceptance.modes if mode != "default"] or list(acceptance.modes)
            modes = acceptance.modes[:1] if rehearsal else graph_modes
            profile = PRACTICE_PROFILE if rehearsal else acceptance.production_profile
            return [
                StepRun(
                    PRODUCTION_CHECK, profile, tuple(f"{name}/fixed_size/{mode}" for name in names for mode in modes)
                )
            ]
        case _:
            return []


def has_runs(acceptance: Acceptance, step: StepName) -> bool:
    """Tell whether the runs behind a step are there, with a result of every cell."""
    folders = [acceptance.folder / run.name for run in runs_of(acceptance, step)]
    return all((folder / "run.json").exists() and not load_run(folder).unfinished for folder in folders)


def expected_seconds(acceptance: Acceptance, step: StepName) -> float:
    """Estimate what is left of a step, without the building of environments: what is finished takes nothing."""
    path = acceptance.folder / MATRIX_FILE
    matrix, store = load_matrix(path), CellStore(cache_folder() / "evidence")
    seconds = 0.0
    for run in runs_of(acceptance, step):
        if is_finished(acceptance.folder / run.name):
            continue
        asked = acceptance.asked(run)
        device = Device.CPU if run.lower_only else Device(asked.device)
        requests = [
            matrix_request(matrix, path, cell, run.profile, device, lower_only=run.lower_only)
            for cell in select(expand(matrix, run.profile), run.selectors)
        ]
        jobs, _ = jobs_of(asked, device, len(requests))
        seconds += estimate(requests, store, jobs=jobs)[0]
    return seconds


def acceptance_matrix(document: Mapping[str, Any], matrix_folder: Path, architectures: Sequence[str]) -> dict[str, Any]:
    """Make the matrix that an acceptance runs: the user's environments, the package's caches, and the sabotages."""
    if not {WORKLOAD, LONG_WORKLOAD} <= set(document["workloads"]) or PRACTICE_PROFILE not in document["profiles"]:
        raise SelectionError(
            f"the matrix file needs the workloads {WORKLOAD!r} and {LONG_WORKLOAD!r} and the profile {WORKLOAD!r}",
            hint="an acceptance takes its short cells",
        )
    known = {name: one for name, one in document["caches"].items() if one.get("source") == "builtin"}
    missing = [name for name in ("fixed_size", "list_index", "compile_friendly") if name not in known]
    if missing or "production" not in document["settings"]:
        raise SelectionError(
            f"the matrix file lacks {', '.join(missing) or 'the settings called production'}",
            hint="an acceptance tries what production ran beside fixed_size",
        )
    for name in ("list_index", "compile_friendly"):
        known[name] = {**known[name], "settings": ["stock", "production"]}
    broken = {one.cache: {"source": one.source, "description": one.description} for one in sabotages.ALL}
    profiles = {
        LOWERING: _profile([Suite.CUDA_LOWERING], architectures),
        DEVICE: _profile([Suite.CUDAGRAPH], architectures),
        **{_profile_of(one): _profile(_suites_of(one), architectures, _workload_of(one)) for one in sabotages.ALL},
    }
    if patience := document["profiles"][PRACTICE_PROFILE].get("timeout_minutes"):  # of a slow machine
        profiles = {name: {**one, "timeout_minutes": patience} for name, one in profiles.items()}
    environments = {
        name: _with_absolute_fork(environment, matrix_folder) for name, environment in document["environments"].items()
    }
    workloads = {name: _with_absolute_series(one, matrix_folder) for name, one in document["workloads"].items()}
    return {
        **document,
        "workloads": workloads,
        "environments": environments,
        "caches": {**known, **broken},
        "profiles": {**document["profiles"], **profiles},
    }


def _profile(suites: Sequence[Suite], architectures: Sequence[str], workload: str = WORKLOAD) -> dict[str, Any]:
    return {
        "iterations": 3,
        "forecasts_per_iteration": 10,
        "suites": [suite.value for suite in suites],
        "workloads": [workload],
        "unannounced_shapes": False,
        **({"architectures": list(architectures)} if architectures else {}),
    }


def _profile_of(sabotage: Sabotage) -> str:
    return f"sabotage-{sabotage.gate.value}"


def _workload_of(sabotage: Sabotage) -> str:
    return LONG_WORKLOAD if sabotage.gate.rule.suite is Suite.MEMORY else WORKLOAD


def _suites_of(sabotage: Sabotage) -> list[Suite]:
    """The suite of its gate alone; a speedup also wants the cold compile that the recompile suite sees."""
    suite = sabotage.gate.rule.suite
    return [Suite.RECOMPILE, suite] if suite is Suite.SPEED else [suite]


def _with_absolute_fork(environment: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Name a fork of toto-ts that lies beside the user's matrix by its whole path: this matrix lies elsewhere."""
    fork = folder / str(environment.get("toto_ts", ""))
    return {**environment, "toto_ts": str(fork.resolve())} if fork != folder and fork.exists() else dict(environment)


def _with_absolute_series(workload: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    csv = workload.get("csv")
    return {**workload, "csv": {**csv, "path": str((folder / csv["path"]).resolve())}} if csv else dict(workload)


def lowered_for(gpu: str, environment: Environment) -> str:
    """The architecture of the wheel that a GPU takes: its own, or the next lower one of its generation; '' if none."""
    wheel = environment.gpu_architectures if capability(gpu) else ()
    fitting = [one for one in wheel if wheel_runs_on(gpu, [one])]
    return max(fitting, key=lambda one: capability(one) or (0, 0), default="")


def write_matrix(folder: Path, document: Mapping[str, Any]) -> None:
    write_atomically(folder / sabotages.FILE, sabotages.sabotaged_caches())
    write_atomically(folder / MATRIX_FILE, yaml.safe_dump(dict(document), sort_keys=False))


def chosen_architectures(matrix: Matrix, environments: Iterable[str], gpu: str) -> tuple[str, ...]:
    found = (lowered_for(gpu, matrix.environments[name]) for name in environments)
    return tuple(dict.fromkeys(one for one in found if one))


# The steps that run cells


def lower(acceptance: Acceptance) -> Found:
    """Compile for this card without it: what the device is then held to. A rehearsal has Inductor's checks alone."""
    [run] = runs_of(acceptance, StepName.LOWERING)
    return told_by_lowering(acceptance.take(run))


def told_by_lowering(judged: JudgedRun) -> Found:
    """Say of each cell what CUDA graphs would take of it."""
    lines, ended = [], Ended.HELD
    for cell in judged.cells:
        figure = predicted_figure(cell.result)
        if figure is None or figure.value is None:
            ended = Ended.NOT_SHOWN
            told = f"nothing predicted: {figure.missing if figure else cell.reason}"
        elif not figure.value:
            told = "CUDA graphs would take every graph whole"
        else:
            told = f"CUDA graphs would not take {figure.value:g} graphs whole"
        lines.append(f"{cell.result.cell}: {told}")
    return ended, lines


def on_device(acceptance: Acceptance) -> Found:
    """Run the same cells on the device: skips, parts kept out, and steps that replayed a graph by two witnesses."""
    [run] = runs_of(acceptance, StepName.DEVICE)
    return told_by_device(acceptance.take(run))


def told_by_device(judged: JudgedRun) -> Found:
    """Say of each cell of fixed_size if its steps replayed a graph."""
    ended, lines = Ended.HELD, []
    for cell in judged.cells:
        if cell.result.request.cache.name != "fixed_size":
            continue
        how, told = replay_of(cell.result)
        lines.append(f"{cell.result.cell}: {told}")
        ended = worse(ended, how)
    return ended, lines


def replay_of(result: CellResult) -> tuple[Ended, str]:
    """Tell whether every step of warm forecasts replayed a CUDA graph that had been captured before."""
    evidence = result.evidence.get(Suite.CUDAGRAPH)
    figure = evidence.figures.get("steps_without_replay") if evidence else None
    is_measured = evidence is not None and evidence.outcome is Outcome.MEASURED and result.provenance.gpu
    if evidence is None or not is_measured or figure is None or figure.value is None:
        failure = result.failure or (evidence.failure if evidence else None)
        missing = figure.missing if figure else ""
        why = failure.message if failure else missing or "no replay was looked for: no GPU was used"
        how = Ended.BROKEN if evidence and evidence.outcome is Outcome.MODEL_FAILED else Ended.NOT_SHOWN
        return how, why
    if figure.value:
        return Ended.BROKEN, f"{figure.value:g} steps replayed no graph ({figure.method})"
    if unseen := unseen_steps(result):
        return Ended.NOT_SHOWN, unseen
    steps = [*evidence.details.get("steps", []), *evidence.details.get("sampled_steps", [])]
    return Ended.HELD, f"captured and replayed, by both witnesses ({len(steps)} steps seen; {figure.method})"


def try_sabotages(acceptance: Acceptance) -> Found:
    """Run every sabotage in production's environment: a gate that stays green on one of them proves nothing."""
    runs, judged = runs_of(acceptance, StepName.SABOTAGES), {}
    for number, (sabotage, run) in enumerate(zip(tried(acceptance), runs, strict=True), start=1):
        say(f"sabotage {number} of {len(runs)}: {sabotage.name}, must turn {sabotage.gate.value} red")
        judged[sabotage] = acceptance.take(run)
    return told_by_sabotages(judged)


def told_by_sabotages(judged: Mapping[Sabotage, JudgedRun]) -> Found:
    """Say of each sabotage if its gate failed it."""
    ended, lines = Ended.HELD, []
    for sabotage, run in judged.items():
        for one in run.cells:
            how, told = caught(sabotage, one)
            lines.append(told)
            ended = worse(ended, how)
    return ended, lines


def tried(acceptance: Acceptance) -> list[Sabotage]:
    return sabotages.tried(rehearsal=acceptance.rehearsal)


def check_production(acceptance: Acceptance) -> Found:
    """Run the production check of fixed_size in every environment; a rehearsal runs short cells in its place."""
    [run] = runs_of(acceptance, StepName.PRODUCTION_CHECK)
    return told_by_check(acceptance.take(run))


def told_by_check(judged: JudgedRun) -> Found:
    """Say the verdict of every row."""
    lines = [f"{cell.result.cell}: {cell.verdict.value}{_why(cell)}" for cell in judged.cells]
    lines += [f"{name}: no result" for name in judged.run.unfinished]
    failed = any(cell.verdict is Status.FAIL for cell in judged.cells)
    undecided = judged.run.unfinished or any(cell.verdict is not Status.PASS for cell in judged.cells)
    return (Ended.BROKEN if failed else Ended.NOT_SHOWN if undecided else Ended.HELD), lines


def told_by_runs(step: StepName, folder: Path, *, rehearsal: bool, production: str) -> Found | None:
    """Say of a step again what its runs in a folder say of it; None where it is none that has runs."""

    def judged(name: str) -> JudgedRun:
        return judge_run(load_run(folder / name))

    match step:
        case StepName.LOWERING:
            return told_by_lowering(judged(LOWERING))
        case StepName.DEVICE:
            return told_by_device(judged(DEVICE))
        case StepName.SABOTAGES:
            return told_by_sabotages({one: judged(one.cache) for one in sabotages.tried(rehearsal=rehearsal)})
        case StepName.PRODUCTION_CHECK:
            return told_by_check(judged(production))
        case _:
            return None


def _why(cell: JudgedCell) -> str:
    return f" ({cell.decided_by.value}: {cell.reason})" if cell.decided_by else ""


def predicted_figure(result: CellResult) -> Figure | None:
    """The prediction for CUDA graphs that a cell made, compiled for a described GPU or by Inductor's checks."""
    for suite in (Suite.CUDA_LOWERING, Suite.CUDAGRAPH):
        evidence = result.evidence.get(suite)
        if evidence is not None and "cudagraphs" in evidence.figures:
            return evidence.figures["cudagraphs"]
    return None


def worse(one: Ended, other: Ended) -> Ended:
    order = (Ended.HELD, Ended.NOT_SHOWN, Ended.BROKEN)
    return max(one, other, key=order.index)
