"""`toto-compat bench`: the contests, a table of each, and the figures the project claims with their goals."""

import json
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import click
from tabulate import tabulate

from toto_compat.bench import contest as contest_module
from toto_compat.bench import guard_cost
from toto_compat.bench import shapes as shapes_module
from toto_compat.bench.contest import Contest, ContestResult
from toto_compat.bench.figures import BenchFigure, compared, compared_with_few, one_run
from toto_compat.bench.harness import harness_share, second_job
from toto_compat.bench.host_figures import host_figures
from toto_compat.bench.shape_record import write_record
from toto_compat.bench.shapes import Asked, Found
from toto_compat.contract.request import Device
from toto_compat.contract.source_hash import PACKAGE
from toto_compat.contract.strict_model import StrictModel
from toto_compat.errors import EnvironmentBuildError, SelectionError
from toto_compat.evidence.files import write_atomically
from toto_compat.matrix.load import find_matrix_file, load_matrix
from toto_compat.runtimes.open import open_runtime

ALL_FIVE = (
    "upstream eager",
    "upstream compiled",
    "compile_friendly compiled",
    "fixed_size eager",
    "fixed_size compiled",
)
COLD_STARTS = 3

CONTESTS: Mapping[str, Contest] = {
    "tiny.mean": Contest(model="tiny", contestants=ALL_FIVE, context_steps=512, horizon_steps=320, rounds=40),
    "tiny.samples": Contest(
        model="tiny", contestants=ALL_FIVE, context_steps=512, horizon_steps=320, samplings=((128, 16),), rounds=8
    ),
    "base.mean": Contest(model="base", contestants=ALL_FIVE, context_steps=512, horizon_steps=320, rounds=12),
    "base.samples": Contest(
        model="base", contestants=ALL_FIVE, context_steps=512, horizon_steps=320, samplings=((32, 16),), rounds=3
    ),
    # What production asks for: one patch, thousands of samples, through forecast(), on two threads.
    "production.samples256": Contest(
        model="base",
        contestants=("upstream eager", "fixed_size eager", "fixed_size compiled", "fixed_size stream"),
        context_steps=512,
        horizon_steps=8,
        samplings=((256, 128),),
        rounds=30,
        rounds_of={"upstream eager": 5},
        threads=2,
        as_a_service=True,
    ),
    "production.samples3072": Contest(
        model="base",
        contestants=("upstream eager", "fixed_size eager", "fixed_size compiled"),
        context_steps=512,
        horizon_steps=8,
        samplings=((3072, 384),),
        rounds=30,
        rounds_of={"upstream eager": 2},
        threads=2,
        as_a_service=True,
    ),
}
# Both batches of production, as few samples as meet them: what is compiled for them is what a cold start waits for.
PRODUCTION_BUCKETS = CONTESTS["production.samples256"].model_copy(
    update={"samplings": ((128, 128), (384, 384)), "rounds": 1, "rounds_of": {}, "one_off_first": False}
)


class Bench:
    """Runs contests in the pinned environment, each process with inductor caches of its own unless told otherwise."""

    def __init__(self, environment_name: str, folder: Path) -> None:
        matrix = load_matrix(find_matrix_file(None))
        if environment_name not in matrix.environments:
            raise SelectionError(
                f"no environment {environment_name!r}", hint=f"known: {', '.join(matrix.environments)}"
            )
        # in a virtualenv, whatever engine there is: a contest is about the model, not about where it runs
        self._runtime = open_runtime("venv", limits=matrix.limits, device=Device.CPU)
        self._prepared = self._runtime.prepare(environment_name, matrix.environments[environment_name], click.echo)
        self._folder = folder

    def run(self, contest: Contest, label: str, *, caches: str | None = None) -> ContestResult:
        return ContestResult.model_validate_json(self._asked(contest_module, contest, label, caches=caches))

    def shapes(self, asked: Asked, label: str) -> Found:
        return Found.model_validate_json(self._asked(shapes_module, asked, label))

    def _asked(self, module: ModuleType, asked: StrictModel, label: str, *, caches: str | None = None) -> str:
        """Run a file of this package in the environment, with what is asked as its one input; gives what it wrote."""
        click.echo(f"{time.strftime('%H:%M:%S')} {label} ...")
        cache = self._folder / f"inductor-{caches or label}"
        cache.mkdir(exist_ok=True)
        specification, output = self._folder / f"{label}.json", self._folder / f"{label}.out.json"
        specification.write_text(asked.model_dump_json(), encoding="utf-8")
        # the file itself, with -P: the staged source holds only what cells run
        words = ("{python}", "-P", str(module.__file__), str(specification), str(output))
        command = self._runtime.attached(self._prepared, words, self._folder, terminal=False)
        variables = {**command.variables, "TMPDIR": str(cache), "TORCHINDUCTOR_CACHE_DIR": str(cache / "kernels")}
        done = subprocess.run(
            command.words, env=variables, cwd=command.folder, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise EnvironmentBuildError(f"{label} failed:\n{done.stderr[-3000:]}")
        return output.read_text(encoding="utf-8")

    def guard_cost(self) -> dict[str, list[float]]:
        """Time the guard; it is no part of the cells' source, so the whole package is copied for it."""
        click.echo(f"{time.strftime('%H:%M:%S')} guard ...")
        whole, output = self._folder / "whole", self._folder / "guard.json"
        shutil.copytree(PACKAGE, whole / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
        words = ("{python}", "-P", guard_cost.__file__, str(output))
        command = self._runtime.attached(self._prepared, words, self._folder, terminal=False)
        variables = {**command.variables, "PYTHONPATH": str(whole)}
        done = subprocess.run(
            command.words, env=variables, cwd=command.folder, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise EnvironmentBuildError(f"timing the guard failed:\n{done.stderr[-3000:]}")
        times: dict[str, list[float]] = json.loads(output.read_text(encoding="utf-8"))
        return times


def contest_table(name: str, result: ContestResult) -> str:
    rows = []
    baseline = statistics.median(result.timings["upstream eager"])
    for contestant, times in result.timings.items():
        median = statistics.median(times)
        low, high = min(times), max(times)
        kernels = statistics.median(result.kernels_ms[contestant])
        rows.append(
            [
                contestant,
                f"{median:.1f}",
                f"{low:.1f}-{high:.1f}",
                f"{baseline / median:.2f}x",
                f"{kernels:.1f}" if kernels else "",
                f"{result.first_forecast_s[contestant]:.1f}" if "compiled" in contestant else "",
            ]
        )
    header = [name, "median ms", "range", "over eager", "in graphs ms", "first forecast s"]
    return tabulate(rows, header, tablefmt="github", disable_numparse=True)


def figure_table(figures: Sequence[BenchFigure]) -> str:
    rows = [[figure.name, figure.value, figure.unit, figure.spread_text, figure.goal] for figure in figures]
    return tabulate(rows, ["figure", "value", "unit", "spread", "goal"], tablefmt="github")


def tiny_figures(bench: Bench, result: ContestResult) -> list[BenchFigure]:
    """Measure ratios of the small model, and in processes of their own cold and warm starts and memory."""
    fixed = result.timings["fixed_size compiled"]
    kernels = result.kernels_ms["fixed_size compiled"]

    def alone(contestant: str, label: str, caches: str | None = None, *, one_off_first: bool = False) -> ContestResult:
        changes = {"contestants": (contestant,), "rounds": 5, "one_off_first": one_off_first}
        contest = CONTESTS["tiny.mean"].model_copy(update=changes)
        return bench.run(contest, label, caches=caches)

    def start_seconds(run: ContestResult) -> float:
        (name,) = run.timings
        return run.first_forecast_s[name] - statistics.median(run.timings[name]) / 1e3

    seconds: dict[str, list[float]] = defaultdict(list)
    for number in range(1, COLD_STARTS + 1):
        caches = f"tiny.start-{number}"
        upstream = alone("upstream compiled", f"tiny.cold-compile-upstream-{number}", one_off_first=True)
        fixed_size = alone("fixed_size compiled", f"tiny.cold-compile-{number}", one_off_first=True)
        upstream_cold = alone("upstream compiled", f"tiny.cold-start-upstream-{number}")
        cold = alone("fixed_size compiled", f"tiny.cold-start-{number}", caches)
        warm = alone("fixed_size compiled", f"tiny.warm-start-{number}", caches)
        seconds["upstream's cold compile"].append(start_seconds(upstream))
        seconds["cold compile"].append(start_seconds(fixed_size))
        seconds["upstream's cold start"].append(start_seconds(upstream_cold))
        seconds["cold start"].append(start_seconds(cold))
        seconds["warm start"].append(start_seconds(warm))
    eager = alone("upstream eager", "tiny.memory-reference")
    listed = ", ".join(f"{name} {' '.join(f'{value:.1f}' for value in taken)} s" for name, taken in seconds.items())
    click.echo(f"each in a process of its own: {listed}\n")
    how = f"binding and first forecast minus a warm one, {COLD_STARTS} processes each in turn: ratio of medians; "
    return [
        compared("tiny.mean.fixed_size_over_upstream_eager", result.timings["upstream eager"], fixed, ">= 5.5"),
        compared("tiny.mean.fixed_size_over_upstream_compiled", result.timings["upstream compiled"], fixed, ">= 2"),
        compared("tiny.mean.forecast_over_kernels_alone", fixed, kernels, "<= 2"),
        compared(
            "tiny.cold_compile_over_upstream",
            seconds["cold compile"],
            seconds["upstream's cold compile"],
            "<= 0.25",
            method=how + "empty inductor caches, the compiler's probe and precompiled header paid for by the process's "
            "first compilation, of something small",
        ),
        compared(
            "tiny.cold_start_over_upstream",
            seconds["cold start"],
            seconds["upstream's cold start"],
            "",
            method=how + "empty inductor caches, the compiler's probe and precompiled header included",
        ),
        compared(
            "tiny.warm_over_cold",
            seconds["warm start"],
            seconds["cold start"],
            "<= 0.2",
            method=how + "with filled inductor caches over with empty ones",
        ),
        one_run(
            "tiny.memory_over_eager",
            warm.peak_rss_bytes / eager.peak_rss_bytes,
            "x",
            "<= 1.5",
            "peak resident memory of a process that only forecasts fixed_size compiled from filled caches, over one "
            "that only forecasts upstream eager",
        ),
    ]


def guard_figure(bench: Bench) -> BenchFigure:
    """Compare what the guard adds to a forecast with the forecast, by processor time."""
    times = bench.guard_cost()
    guard, forecast = statistics.median(times["guard"]), statistics.median(times["compiled"])
    method = (
        f"median processor time of switch and guard around an empty forecast, {guard:.1f} us, over that of a "
        f"tiny forecast compiled, context 512, horizon 320, {forecast:.0f} us"
    )
    return one_run("tiny.guard_share_of_forecast", guard / forecast, "", "<= 0.01", method)


def production_figures(bench: Bench, name: str, result: ContestResult) -> list[BenchFigure]:
    """Measure production's forecast: by the cache alone, with compile, with toto-ts's own random stream."""
    upstream, fixed = result.timings["upstream eager"], result.timings["fixed_size compiled"]
    what = "horizon 8 behind 512 points of `base`, through forecast(), two threads"
    goal = {"production.samples256": ">= 80", "production.samples3072": ">= 800"}[name]
    figures = [
        compared_with_few(f"{name}.fixed_size_over_upstream_eager", upstream, fixed, goal, what=what),
        compared_with_few(
            f"{name}.fixed_size_eager_over_upstream_eager", upstream, result.timings["fixed_size eager"], "", what=what
        ),
        compared(
            f"{name}.forecast_over_kernels_alone",
            fixed,
            result.kernels_ms["fixed_size compiled"],
            "<= 1.5",
            method=f"{what}: a forecast over the time in its compiled graphs",
        ),
    ]
    if name == "production.samples256":
        stream = result.timings["fixed_size stream"]
        figures.append(
            compared_with_few(
                f"{name}.stream_over_upstream_eager", upstream, stream, ">= 18", what=f"{what}, toto-ts's"
            )
        )
        figures.append(production_cold_start(bench))
    return figures


def production_cold_start(bench: Bench) -> BenchFigure:
    """Time the first forecasts of both of production's batches, in own processes, from empty caches."""
    seconds: dict[str, float] = {}
    for contestant in ("upstream compiled", "fixed_size compiled"):
        alone = PRODUCTION_BUCKETS.model_copy(update={"contestants": (contestant,)})
        result = bench.run(alone, f"production.cold-start-{contestant.split()[0]}")
        warm = statistics.median(result.timings[contestant]) / 1e3
        seconds[contestant] = result.first_forecast_s[contestant] - warm
    told = ", ".join(f"{name} {taken:.1f} s" for name, taken in seconds.items())
    return one_run(
        "production.cold_start_over_upstream",
        seconds["fixed_size compiled"] / seconds["upstream compiled"],
        "x",
        "<= 0.333",
        "binding and first forecasts of 128 samples in one batch and 384 in one, horizon 8, minus warm ones, empty "
        f"inductor caches, two threads: {told}",
    )


# What production may ask for: any shape within the announced maxima on `tiny`, production's own on `base`, and those
# under autocast as a CPU has it.
_PRODUCTION = {
    "model": "base",
    "context": (256, 512),
    "horizon": (1, 336),
    "batch": (1, 128),
    "batch_sizes": (1, 128),
    "drawn": 0,
    "also": tuple((context, horizon, 1) for context in (256, 512) for horizon in (1, 8, 64, 128, 336)),
}
SHAPES: Mapping[str, Asked] = {
    "shapes.tiny": Asked(),
    "shapes.production": Asked.model_validate(_PRODUCTION),
    "shapes.production.bfloat16": Asked.model_validate({**_PRODUCTION, "autocast": "bfloat16"}),
}


def shape_figures(name: str, found: Found) -> list[BenchFigure]:
    """Say what was compiled after the warm-up, and how far forecasts are from eager's by equivalence's rule."""
    what = (
        f"{found.shapes} shapes on torch {found.torch}, {found.compilations_in_warm_up} compilations in the warm-up, "
        f"announced batches {', '.join(map(str, found.announced))}"
    )
    errors = f"error {found.error:.1e}, upstream eager's {found.eager_error:.1e}, moved by one ulp {found.nudged:.1e}"
    return [
        one_run(f"{name}.compilations_after_warm_up", found.compilations, "", "<= 0", what),
        one_run(f"{name}.graph_breaks", found.graph_breaks, "", "<= 0", what),
        one_run(f"{name}.error_over_allowed", found.error_over_allowed, "", "<= 1", f"{what}: {errors}"),
    ]


def shapes_in(bench: Bench, environment: str, chosen: Sequence[str], record: Path | None) -> list[BenchFigure]:
    """Try all shapes of those contests that are chosen, and write each down as soon as it has ended."""
    figures = []
    for name, asked in SHAPES.items():
        if name in chosen:
            found = bench.shapes(asked, name)
            figures += shape_figures(name, found)
            if record is not None:
                click.echo(f"wrote {write_record(record, name, environment, asked, found)}")
    return figures


def all_shapes(environment: str, chosen: Sequence[str], record: Path | None) -> list[BenchFigure]:
    with tempfile.TemporaryDirectory(prefix="toto-bench-") as folder:
        return shapes_in(Bench(environment, Path(folder)), environment, chosen, record)


@click.command("bench")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures to this file.")
@click.option(
    "--environment",
    "environments",
    multiple=True,
    default=("torch-2.13.0-cpu",),
    show_default=True,
    help="Where to measure; several are taken with --only shapes... alone.",
)
@click.option(
    "--only",
    multiple=True,
    type=click.Choice([*CONTESTS, *SHAPES, "guard", "host", "matrix"]),
    help="Some contests instead of all.",
)
@click.option(
    "--record",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write the counts over shapes into this folder.",
)
@click.option("--profile", default="quick", show_default=True, help="Profile of the run that --only matrix times.")
def bench_command(
    json_file: Path | None, environments: tuple[str, ...], only: tuple[str, ...], record: Path | None, profile: str
) -> None:
    """Measure fixed_size against the other caches."""
    # else a contest would go on alone, and disturb whatever is measured next
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    chosen = only or (*CONTESTS, *SHAPES, "guard", "host", "matrix")
    figures: list[BenchFigure] = []
    if not set(chosen) <= set(SHAPES) and len(environments) > 1:
        raise SelectionError(
            "times of several environments are no figures of one run", hint=f"--only {' --only '.join(SHAPES)}"
        )
    *others, environment = environments
    for other in others:
        figures += all_shapes(other, chosen, record)
    with tempfile.TemporaryDirectory(prefix="toto-bench-") as folder:
        bench = Bench(environment, Path(folder))
        for name, contest in CONTESTS.items():
            if name not in chosen:
                continue
            result = bench.run(contest, name)
            click.echo("\n" + contest_table(name, result) + "\n")
            if name == "tiny.mean":
                figures += tiny_figures(bench, result)
            elif name.startswith("production."):
                figures += production_figures(bench, name, result)
            else:
                goal = {"base.mean": ">= 1.9", "tiny.samples": ">= 6"}.get(name, "")
                slow, fast = result.timings["upstream eager"], result.timings["fixed_size compiled"]
                figures.append(compared(f"{name}.fixed_size_over_upstream_eager", slow, fast, goal))
        figures += shapes_in(bench, environment, chosen, record)
        if "guard" in chosen:
            figures.append(guard_figure(bench))
        if "host" in chosen:
            figures += host_figures(Path(folder))
        if "matrix" in chosen:
            figures += [harness_share(environment, profile), second_job(environment, profile)]
    click.echo(figure_table(figures))
    if json_file is not None:
        write_atomically(json_file, json.dumps({"figures": [asdict(figure) for figure in figures]}, indent=2) + "\n")
