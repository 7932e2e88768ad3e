"""`toto-compat merge RUN...`: runs of several machines as one run, judged as a whole."""

import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click

from toto_compat.errors import SelectionError, StorageError, TotoCompatError
from toto_compat.evidence.files import storage_errors
from toto_compat.evidence.merging import RULE, Merged, OtherMatrixError, merge_runs
from toto_compat.evidence.store import (
    check_run_name,
    load_run,
    log_path,
    new_run_name,
    point_latest,
    write_cell,
    write_run_info,
)
from toto_compat.fleet.run_sources import log_of, runs_of
from toto_compat.report.publish import publish
from toto_compat.runtimes.progress import say
from toto_compat.verdict.judged_run import JudgedRun, judge_run


def merge_into(
    results: Path, name: str, sources: Sequence[str], *, conflicts: str, history: str | None = None
) -> tuple[JudgedRun, Merged]:
    """Merge and judge, then let the new run appear in one step: it is there whole or not at all.

    Rows that the sources do not have come from `history`, unless it was made with another matrix file.
    """
    target = results / name
    if target.exists():
        raise SelectionError(f"--run {name}: {target} is there already", hint="choose another name, or delete it")
    with storage_errors(results, "written"):
        results.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=".merging-", dir=results))
    try:
        (building / "unpacked").mkdir()
        runs = [run for source in sources for run in runs_of(source, results, building / "unpacked")]
        runs = list({run.folder: run for run in runs}.values())
        before = runs_of(history, results, building / "unpacked") if history else []
        command = ("toto-compat", *sys.argv[1:])
        try:
            merged = merge_runs([*runs, *before], name, command=command, conflicts=conflicts)
        except OtherMatrixError as error:
            if not before:
                raise
            merged = merge_runs(runs, name, command=command, conflicts=conflicts)
            why = _as_named(error.message, building)
            merged = replace(merged, notes=(*merged.notes, f"the rows of {history} are left behind: {why}"))
        _write(building / name, merged)
        judge_run(load_run(building / name))
        with storage_errors(target, "written"):
            (building / name).rename(target)
    except TotoCompatError as error:
        error.message = _as_named(error.message, building)
        raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return judge_run(load_run(target)), merged


def _as_named(message: str, building: Path) -> str:
    """Name an artifact in the place of the folder that it was unpacked to, which is gone when somebody reads this."""
    return re.sub(rf"{re.escape(str((building / 'unpacked').resolve()))}/\d+-", "", message)


def _write(folder: Path, merged: Merged) -> None:
    write_run_info(folder, merged.info)
    for cell in merged.cells:
        write_cell(folder, cell)
        log = log_of(merged.taken_from[cell.cell], cell.cell)
        if log is not None:
            copy = log_path(folder, cell.cell)
            with storage_errors(copy, "written"):
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(log, copy)


@click.command(
    "merge",
    help=f"""Merge runs of several machines into one and judge it as a whole.

    A RUN is a name under results/, a folder, a folder that holds several runs, or a zipped artifact. All must be made
    with the same matrix file; where they are not, what differs is told. Of two results of one cell this one is taken:
    {RULE}.""",
)
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option("--run", "name", metavar="NAME", help="Name of the new run's folder.  [default: the time, -merged]")
@click.option(
    "--history",
    metavar="RUN",
    help="The last results: rows that no RUN has stay as they are there. Passed over where there are none yet, or where"
    " matrix.yaml is another since.",
)
@click.option(
    "--conflicts",
    type=click.Choice(["newest", "error"]),
    default="newest",
    show_default=True,
    help="What to do about two different results of one cell.",
)
@click.option("--json", "as_json", is_flag=True, help="Print compatibility.json instead of the table.")
@click.option(
    "--results", type=click.Path(path_type=Path), default=Path("results"), show_default=True, help="Folder of the runs."
)
def merge_command(
    runs: tuple[str, ...], *, name: str | None, history: str | None, conflicts: str, as_json: bool, results: Path
) -> None:
    if name is not None:
        check_run_name(name)
    if history is not None and not Path(history).exists():
        say(f"{history}: no results yet")
        history = None
    name = name or new_run_name(results, "merged")
    try:
        judged, merged = merge_into(results, name, runs, conflicts=conflicts, history=history)
    except RecursionError as error:  # JSON nested deeper than any run's
        raise StorageError("a file of these runs is nested too deeply to be one of ours") from error
    publish(judged, to_json=as_json)
    for note in merged.notes:
        say(note)
    for one in merged.info.merged:
        say(f"{len(one.cells)} cells from {one.name}{f' on {one.host}' if one.host else ''}")
    if judged.run.unfinished:
        say(f"{len(judged.run.unfinished)} planned cells have no result in any of them")
    point_latest(results, judged.run.info.name)
    say(f"run: {judged.run.folder}")
