"""The spine of `toto-compat matrix`: select, plan, prepare, run, judge, report, each from what the last returned."""

import json
import sys
from pathlib import Path
from typing import Any

import click

from toto_compat.contract.request import Device
from toto_compat.environments.here import here_environment
from toto_compat.errors import ExitCode, TotoCompatError
from toto_compat.evidence.files import cache_folder, check_writable
from toto_compat.evidence.store import CellStore, check_run_name, load_run
from toto_compat.matrix.asked import Asked
from toto_compat.matrix.expand import default_selection
from toto_compat.matrix.given_path import GivenPath
from toto_compat.matrix.load import matrix_option
from toto_compat.matrix.schema import Matrix
from toto_compat.matrix.selection import Selection, select_cells
from toto_compat.report.publish import closing_lines, exit_code, publish, write_compatibility
from toto_compat.runtimes.device import choose_device
from toto_compat.runtimes.executors import EXECUTORS
from toto_compat.runtimes.gpu import why_not_runnable
from toto_compat.runtimes.interrupt import sigterm_as_interrupt
from toto_compat.runtimes.open import open_runtime
from toto_compat.runtimes.plan import plan_as_json, plan_run, plan_text
from toto_compat.runtimes.prepare import prepare_run
from toto_compat.runtimes.progress import progress_for, say
from toto_compat.runtimes.run import run_prepared
from toto_compat.runtimes.seam import Runtime
from toto_compat.runtimes.slurm.remote import NodesRuntime
from toto_compat.verdict.judged_run import judge_run


def run_matrix(asked: Asked) -> ExitCode:
    """Run the whole flow; Ctrl-C and SIGTERM end it with the children stopped and the finished cells kept."""
    if asked.run is not None:
        check_run_name(asked.run)
    with sigterm_as_interrupt():
        # what is only compiled for CUDA is compiled on the CPU
        choose = (lambda: Device.CPU) if asked.lower_only else (lambda: device_of(asked))
        here = dict([here_environment()]) if asked.runtime == "here" else None
        # what a cluster's GPUs can run is not to be seen from here
        selection = select_cells(
            asked, choose, (lambda *_: "") if asked.executor == "slurm" else why_not_runnable, here
        )
        device = selection.device
        runtime = runtime_of(asked, selection)
        store = CellStore(cache_folder() / "evidence")
        plan = plan_run(selection, runtime, store, asked)
        say(plan_text(plan))
        if asked.dry_run:
            if asked.as_json:
                click.echo(json.dumps(plan_as_json(plan), indent=2))
            return ExitCode.OK
        check_writable(asked.results)
        with progress_for(len(plan.to_run)) as progress:
            prepared = prepare_run(plan, selection, runtime=runtime, store=store, asked=asked, progress=progress)
            folder = run_prepared(
                prepared, plan, selection, runtime=runtime, store=store, asked=asked, progress=progress
            )
        if asked.detach:
            say(f"left to Slurm: `toto-compat status {folder.name}` says how far it is, --wait waits for the end")
            return ExitCode.OK
        judged = judge_run(load_run(folder))
        if asked.as_part:
            write_compatibility(judged)
        else:
            publish(judged, to_json=asked.as_json)
        for line in closing_lines(judged, selection.required):
            say(line)
        if device is Device.CPU and not asked.selectors and not asked.lower_only:
            say(gpu_runner_would_add(selection.matrix, asked.profile))
        say(f"run: {folder}")
        return exit_code(judged, selection.required, environment_failed=bool(prepared.failed))


def device_of(asked: Asked) -> Device:
    """Find the device here, or take it that the nodes of a cluster have GPUs."""
    if asked.executor == "slurm":
        return Device.CPU if asked.device == "cpu" else Device.CUDA
    return choose_device(asked.device)


def runtime_of(asked: Asked, selection: Selection) -> Runtime:
    """Open what runs the cells: on this machine, or on the nodes of a cluster."""
    limits, device = selection.matrix.limits, selection.device
    if asked.executor != "slurm":
        return open_runtime(asked.runtime, limits=limits, device=device, rebuild=asked.rebuild)
    settings = selection.matrix.slurm
    match asked.runtime:
        case "docker" | "venv" as name:
            return NodesRuntime(name, settings, device)
        case _:
            return NodesRuntime(settings.runtime, settings, device)


def gpu_runner_would_add(matrix: Matrix, profile: str) -> str:
    """Return what is out of reach without a GPU, so that a CPU table is not taken for the whole answer."""
    try:
        cells = default_selection(matrix, Device.CUDA, profile)
    except TotoCompatError:
        return "on a GPU runner: nothing more, matrix.yaml has no CUDA environment"
    names = ", ".join(dict.fromkeys(cell.environment for cell in cells))
    return (
        f"a GPU runner would add {len(cells)} cells on {names}: CUDA timings, and CUDA graphs measured instead of "
        "predicted. There: `nox -s matrix`"
    )


@click.command("matrix")
@click.argument("selectors", nargs=-1, metavar="[SELECTOR]...")
@click.option(
    "--profile",
    metavar="NAME",
    default="quick",
    show_default=True,
    help="How hard each cell is tried: a profile of matrix.yaml, such as smoke, full or production-check.",
)
@click.option(
    "--runtime",
    type=click.Choice(["auto", "docker", "venv", "here"]),
    default="auto",
    show_default=True,
    help="What cells run in: containers, virtualenvs, or what is installed here; auto: docker if an engine answers.",
)
@click.option(
    "--executor",
    type=click.Choice(list(EXECUTORS)),
    default="local",
    show_default=True,
    help="Who runs them: this machine, or a cluster.",
)
@click.option("--detach", is_flag=True, help="Leave the cells to Slurm and return; see `toto-compat status`.")
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="What they run on; auto: a GPU if one answers, else the CPU.",
)
@click.option("--jobs", type=click.IntRange(min=1), help="Cells at a time.  [default: one per GPU, on a CPU up to 2]")
@click.option("--fresh", is_flag=True, help="Run every cell again, also those that did not change.")
@click.option("--rebuild", is_flag=True, help="Build container images anew, also those that are there.")
@click.option("--data", type=GivenPath(), help="Your own series: a CSV, or a folder with one per symbol.")
@click.option("--column", metavar="NAME", help="The column of your series to forecast.  [default: close]")
@click.option("--symbols", multiple=True, metavar="A,B", help="Which of your series.  [default: all]")
@click.option(
    "--checkpoint", metavar="WEIGHTS", help="A folder, or organisation/name@revision, for the workload's own."
)
@click.option("--run", metavar="NAME", help="Name of the run's folder in results/.")
@click.option("--require", multiple=True, metavar="SELECTOR", help="Fail (exit code 7) unless these rows are PASS.")
@click.option(
    "--lower-only",
    is_flag=True,
    help="Compile CUDA builds for described GPUs, on any machine; no GPU is needed or used.",
)
@click.option(
    "--architecture",
    "architectures",
    multiple=True,
    metavar="SM",
    help="Compile CUDA builds for these described GPUs only, such as sm_90.  [default: the profile's]",
)
@click.option("--dry-run", is_flag=True, help="Print the plan and stop: nothing is fetched, built, removed or run.")
@click.option("--json", "as_json", is_flag=True, help="Print compatibility.json (with --dry-run the plan) to stdout.")
@click.option(
    "--results", type=click.Path(path_type=Path), default=Path("results"), show_default=True, help="Folder of the runs."
)
@matrix_option
def matrix_command(**asked: Any) -> None:
    """Run the cells of the matrix and say what can be compiled.

    SELECTORs are globs over <environment>/<cache>/<mode>[+<settings>]; '!glob' leaves cells out. Without one, what this
    machine can judge is run: the newest CPU environment, or with a GPU production's and the newest release."""
    if asked["data"] is None and (asked["column"] or asked["symbols"]):
        raise click.UsageError("--column and --symbols say which of your series: name these with --data")
    if asked["executor"] != "slurm" and asked["detach"]:
        raise click.UsageError("--detach: cells can be left to Slurm alone: --executor slurm")
    if asked["executor"] == "slurm" and asked["runtime"] == "here":
        raise click.UsageError("--runtime here: nodes run cells with docker or venv")
    code = run_matrix(Asked(**asked))
    if code != ExitCode.OK:
        sys.exit(code)
