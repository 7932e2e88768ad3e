"""`toto-compat release-check`: a release added, locked, built, run and held against the newest reference."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from packaging.version import Version

from toto_compat.contract.cell_name import CellName
from toto_compat.contract.request import Device, Workload, suites_here
from toto_compat.contract.suites import Suite
from toto_compat.environments.package_index import index_settings
from toto_compat.errors import ExitCode, SelectionError, StorageError
from toto_compat.evidence.files import cache_folder, check_writable, write_atomically
from toto_compat.evidence.store import CellStore, Run, find_run, list_runs, load_run
from toto_compat.matrix.asked import Asked
from toto_compat.matrix.expand import expand, named_profile, select
from toto_compat.matrix.load import find_matrix_file, load_matrix, matrix_option
from toto_compat.matrix.schema import Matrix
from toto_compat.releases.adding import channels_of, find_release, prepare_addition, write_addition
from toto_compat.releases.command import ReleaseNumber, look
from toto_compat.releases.defaults import moved_between
from toto_compat.releases.listing import PYTORCH_INDEX, State
from toto_compat.releases.running import pruned_after, run_cells
from toto_compat.releases.upgrade import Upgrade, compare_release, upgrade_lines
from toto_compat.runtimes.device import choose_device
from toto_compat.runtimes.interrupt import sigterm_as_interrupt
from toto_compat.runtimes.open import open_runtime
from toto_compat.runtimes.progress import print_out, say
from toto_compat.verdict.judge import JudgedCell, Status
from toto_compat.verdict.judged_run import judge_run


@click.command("release-check")
@click.argument("version", type=ReleaseNumber(with_build=True), required=False)
@click.option("--rows", multiple=True, metavar="CACHE/MODE", help="Rows to run.  [default: every cache, mode default]")
@click.option("--profile", default="quick", show_default=True, help="The reference was run with quick.")
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="auto: cuda where a GPU answers.",
)
@click.option(
    "--reference", metavar="RUN", help="A run to compare with.  [default: the newest release of the references]"
)
@click.option(
    "--without-interpreter",
    is_flag=True,
    help="Do not execute the code for CUDA in Triton's interpreter: about 13 minutes for a row that does not fail.",
)
@click.option("--keep", is_flag=True, help="Keep the release in matrix.yaml, with its lock.")
@click.option("--keep-environment", is_flag=True, help="Do not remove the virtualenv that was built for the check.")
@click.option("--all-defaults", is_flag=True, help="Show every default of torch's that moved.")
@click.option("--pre", is_flag=True, help="Take release candidates too, from PyTorch's own test index.")
@click.option("--nightly", is_flag=True, help="Take nightly builds, from PyTorch's own index.")
@click.option(
    "--pytorch-index",
    default=PYTORCH_INDEX,
    show_default=True,
    metavar="URL",
    help="PyTorch's own index, for pre-releases and nightlies.",
)
@click.option(
    "--results", type=click.Path(path_type=Path), default=Path("results"), show_default=True, help="Folder of the runs."
)
@matrix_option
def release_check_command(version: Version | None, matrix_file: Path | None, **asked: Any) -> None:
    """Try torch VERSION, by default the newest that matrix.yaml lacks, and say whether to upgrade to it.

    It is added to a copy of the matrix, locked, built in a virtualenv, run, and held against the newest reference:
    verdicts, reasons of the compiler, torch's defaults, lowering for CUDA, compile time and speed."""
    path = find_matrix_file(matrix_file)
    if version is None:
        version = newest_new_release(path, asked)
        if version is None:
            print_out("your package index has no torch release newer than everything in the matrix")
            return
    check_writable(asked["results"])
    with sigterm_as_interrupt():
        upgrade = check_release(path, version, asked)
    print_out("\n".join(upgrade_lines(upgrade, all_defaults=asked["all_defaults"])))
    if upgrade.exit_code is not ExitCode.OK:
        sys.exit(upgrade.exit_code)


def newest_new_release(path: Path, asked: dict[str, Any]) -> Version | None:
    found, warnings = look(path, build="", everything=False, **asked)
    for warning in warnings:
        say(f"warning: {warning}")
    return next((one.version for one in found if one.state is State.NEW), None)


def check_release(path: Path, named: Version, asked: dict[str, Any]) -> Upgrade:
    """Run the release's rows and compare them; everything that is printed comes from what is stored afterwards."""
    version = Version(named.public)
    shipped = load_matrix(path)
    workloads = [shipped.workloads[name] for name in named_profile(shipped, asked["profile"]).workloads]
    device = choose_device(asked["device"])
    before = reference_cells(asked["results"], asked["reference"], version, device, workloads)
    matrix, name, notes = matrix_with(path, named, device, asked)
    cells = rows_to_run(matrix, name, asked["rows"], asked["profile"])
    runtime = open_runtime("venv", limits=matrix.limits, device=device)
    run_name = f"{datetime.now(UTC):%Y-%m-%dT%H-%M-%S}-release-check-{version}"
    own = Asked(tuple(cells), profile=asked["profile"], run=run_name, results=asked["results"])
    try:
        with pruned_after(matrix, name, runtime, keep=asked["keep_environment"]):
            store = CellStore(cache_folder() / "evidence")
            may_interpret = not asked["without_interpreter"] and suites_here(
                (Suite.CUDA_EQUIVALENCE,), matrix.environments[name], device
            )
            if may_interpret:
                say("then the code for CUDA of what does not fail is executed in Triton's interpreter, 13 min a row")
            run = run_cells(matrix, path, cells, own, device=device, runtime=runtime, store=store)
            after = judge_run(run).cells
            if may_interpret and (worth_it := rows_to_interpret(after)):
                executed = run_cells(
                    only_interpreting(matrix, own.profile),
                    path,
                    worth_it,
                    replace(own, run=f"{run_name}-interpreted"),
                    device=device,
                    runtime=runtime,
                    store=store,
                )
                after = with_evidence_of(after, executed)
    except KeyboardInterrupt:
        runtime.stop()
        raise
    older = {cell.result.request.environment.torch for cell in before}
    defaults = moved_between(older.pop(), str(version)) if len(older) == 1 else None
    upgrade = compare_release(str(version), after, before, defaults=defaults, notes=tuple(notes))
    write_atomically(run.folder / "upgrade.txt", "\n".join(upgrade_lines(upgrade, all_defaults=True)) + "\n")
    say(f"run: {run.folder}")
    return upgrade


def rows_to_interpret(cells: Sequence[JudgedCell]) -> list[CellName]:
    """The rows whose code for CUDA is worth minutes: those that do not fail."""
    return [
        cell.result.cell
        for cell in cells
        if cell.verdict is not Status.FAIL
        and not cell.result.could_not_run
        and Suite.CUDA_EQUIVALENCE not in cell.result.evidence
    ]


def only_interpreting(matrix: Matrix, profile: str) -> Matrix:
    """The matrix with a profile of the same name that executes code for CUDA and does nothing else."""
    own = matrix.profiles[profile].model_copy(update={"suites": (Suite.CUDA_EQUIVALENCE,)})
    return matrix.model_copy(update={"profiles": {**matrix.profiles, profile: own}})


def with_evidence_of(cells: Sequence[JudgedCell], run: Run) -> tuple[JudgedCell, ...]:
    """Add what a second run found out about the same rows; it decides no gate."""
    found = {cell.cell: cell.evidence for cell in run.cells}
    return tuple(
        replace(
            cell,
            result=cell.result.model_copy(
                update={"evidence": {**cell.result.evidence, **found.get(cell.result.cell, {})}}
            ),
        )
        for cell in cells
    )


def matrix_with(path: Path, named: Version, device: Device, asked: dict[str, Any]) -> tuple[Matrix, str, list[str]]:
    """The matrix with the release in it, the name of its environment, and what to say about that."""
    matrix, version, build = load_matrix(path), Version(named.public), named.local or ""
    known = [
        name
        for name, environment in matrix.environments.items()
        if Version(environment.torch) == version and build in ("", environment.build)
    ]
    if known:
        # a CPU build does for a CPU, and is a tenth of the size
        name = min(known, key=lambda one: (matrix.environments[one].device is not device, len(one)))
        return matrix, name, [f"{name} is in {path}"]
    settings = index_settings()
    channels = channels_of(version, pre=asked["pre"], nightly=asked["nightly"])
    place = asked["pytorch_index"]
    release = find_release(version, settings, channels, pytorch_index=place, build=build)
    addition = prepare_addition(path, release, settings, pytorch_index=place, build=build)
    if asked["keep"]:
        write_addition(addition)
        return addition.edited.matrix, addition.name, [f"{addition.name} was added to {path}"]
    hint = f"it is not in {path}: `toto-compat releases --add {version}` adds it"
    return addition.edited.matrix, addition.name, [f"{addition.name}: {hint}"]


def rows_to_run(matrix: Matrix, environment: str, rows: Sequence[str], profile: str) -> list[CellName]:
    """The cells of the environment: those that were named, or every cache as torch ships, in the plainest mode."""
    cells = [cell for cell in expand(matrix, profile) if cell.environment == environment]
    if rows:
        return select(cells, [f"{environment}/{row}" for row in rows])
    first = {name: cache.settings[0] for name, cache in matrix.caches.items()}
    spared = named_profile(matrix, profile).only_when_named
    mode = "default" if "default" in matrix.modes else matrix.modes[0]
    return [
        cell for cell in cells if cell.mode == mode and cell.settings == first[cell.cache] and cell.cache not in spared
    ]


def reference_cells(
    results: Path, named: str | None, version: Version, device: Device, workloads: Sequence[Workload] = ()
) -> list[JudgedCell]:
    """The judged cells to compare with: of a named run, or of the newest release that the references have.

    Runs of the reference have rows of one name and of different workloads: others than `workloads` count only where
    there are none of these.
    """
    if named is not None:
        return [cell for cell in judge_run(load_run(find_run(named, results))).cells if _is_for(cell, device)]
    cells = [
        cell
        for run in sorted(_references(results), key=lambda run: run.info.started)
        for cell in judge_run(run).cells
        if _is_for(cell, device) and Version(cell.result.request.environment.torch) != version
    ]
    cells = [cell for cell in cells if cell.result.request.workload in workloads] or cells
    releases = {Version(cell.result.request.environment.torch) for cell in cells}
    older = {one for one in releases if one < version}
    if not releases:
        raise SelectionError(
            f"{results / 'reference'} holds no run on {device.value} to compare with",
            hint="name a run with --reference RUN",
        )
    newest = max(older or releases)
    # of one release the newest run counts: it comes last, and takes the place of those before it
    own = [cell for cell in cells if Version(cell.result.request.environment.torch) == newest]
    return list({cell.result.cell.partition("/")[2]: cell for cell in own}.values())


def _references(results: Path) -> list[Run]:
    runs = []
    for name in list_runs(results):
        if name.startswith("reference/"):
            try:
                runs.append(load_run(results / name))
            except StorageError as error:
                say(f"warning: {error.message}")
    return runs


def _is_for(cell: JudgedCell, device: Device) -> bool:
    return cell.result.request.speaks_of is device and not cell.result.request.lower_only
