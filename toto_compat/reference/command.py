"""`toto-compat reference`: makes results/reference and what is shown of it, or says what of it is stale."""

import sys
from collections.abc import Sequence
from pathlib import Path

import click
from tabulate import tabulate

from toto_compat.errors import ExitCode
from toto_compat.matrix.load import find_matrix_file, load_matrix, matrix_option
from toto_compat.reference.kept import MOST_BYTES, State, check_size, has_other_limits, keep
from toto_compat.reference.making import Forecast, Made, Making, forecast, make, rows_of
from toto_compat.reference.plan import PLAN_FILE, chosen_releases, chosen_runs, lacking_environment, read_plan
from toto_compat.reference.showing import SHOWN, show, stale_showing
from toto_compat.reference.torch_logs import LogCount, counts_table, read_counts, why_not_counted
from toto_compat.runtimes.progress import say


@click.command("reference")
@click.option("--only", multiple=True, metavar="RELEASE", help="Only this torch release; may be given again.")
@click.option(
    "--run", "only_runs", multiple=True, metavar="NAME", help="Only this run of the plan; may be given again."
)
@click.option("--dry-run", is_flag=True, help="Print what would run, with estimated time and disk, and stop.")
@click.option(
    "--check", is_flag=True, help=f"Exit with {int(ExitCode.FINDINGS)} if evidence, table or picture is stale."
)
@click.option("--show-only", is_flag=True, help="Run nothing; make the table, the pages and the picture anew.")
@click.option("--budget-minutes", type=click.FloatRange(min=0), help="Start no further cell after so many minutes.")
@click.option("--jobs", type=click.IntRange(min=1), help="Cells at a time.  [default: up to 2]")
@click.option("--retry", is_flag=True, help="Run again also what could not be run twice.")
@click.option("--keep-environments", is_flag=True, help="Do not remove the environments that were built for this.")
@click.option(
    "--plan", "plan_file", type=click.Path(path_type=Path), default=PLAN_FILE, show_default=True, help="Made beside it."
)
@matrix_option
def reference_command(
    *,
    only: tuple[str, ...],
    only_runs: tuple[str, ...],
    dry_run: bool,
    check: bool,
    show_only: bool,
    budget_minutes: float | None,
    jobs: int | None,
    retry: bool,
    keep_environments: bool,
    plan_file: Path,
    matrix_file: Path | None,
) -> None:
    """Make the reference release by release: install, run, thin, remove; then README's table, the page, its picture.

    What is there and not stale is left alone: the same command goes on where it was stopped. It commits nothing."""
    matrix_path = find_matrix_file(matrix_file)
    plan = read_plan(plan_file)
    making = Making(
        plan=plan,
        matrix=load_matrix(matrix_path),
        matrix_file=matrix_path,
        folder=plan_file.parent,
        runs=chosen_runs(plan, only_runs),
        jobs=jobs,
        budget_seconds=budget_minutes * 60 if budget_minutes is not None else None,
        keep_environments=keep_environments,
        retry=retry,
    )
    releases = chosen_releases(making.plan, only)
    if check:
        sys.exit(_check(making, releases))
    if dry_run:
        click.echo(forecast_text([forecast(making, release) for release in releases], making))
        return
    try:
        made = Made() if show_only else make(making, releases)
    except KeyboardInterrupt:
        say("reference: what was finished is kept; `--show-only` shows it, the same command again goes on")
        raise
    project = matrix_path.resolve().parent if plan_file == PLAN_FILE else plan_file.parent
    for name, run in making.plan.runs.items():
        if has_other_limits(making.folder, name, making.matrix, run.profile):
            keep(making.folder, name, making.matrix, profile=run.profile, cells=[], revision="")
    told = show(making.folder, project, list(making.plan.runs))
    counts = [one for name in making.plan.runs for one in read_counts(making.folder / name).counts]
    _tell(made, told, counts, check_size(making.folder))
    if made.failed or told:
        sys.exit(ExitCode.CELL_NOT_RUN)
    if not all(one.agree for one in counts):
        sys.exit(ExitCode.FINDINGS)


def _check(making: Making, releases: Sequence[str]) -> ExitCode:
    """List what is stale, and what is missing beside it: that is no mistake while the reference is being made."""
    stale = []
    for release in releases:
        if lacking := lacking_environment(making.plan, making.matrix, release):
            click.echo(f"missing: {lacking}")
        for row in rows_of(making, release):
            if row.state is State.STALE:
                stale.append(f"{row.row.run}/{row.row.cell}: {row.why}")
            elif row.state is not State.THERE:
                click.echo(f"{row.state.value}: {row.row.run}/{row.row.cell}")
            elif row.row.counted_by_torch_logs and (told := why_not_counted(making.folder / row.row.run, row.row.cell)):
                stale.append(f"{row.row.run}/{row.row.cell}: {told}")
    for name, run in making.plan.runs.items():
        if has_other_limits(making.folder, name, making.matrix, run.profile):
            stale.append(f"{name}: matrix.yaml has other limits now, and --show-only judges by them")
    if (making.folder / SHOWN / "run.json").exists():
        stale += stale_showing(making.folder, making.matrix_file.resolve().parent)
    for one in stale:
        click.echo(f"stale: {one}")
    return ExitCode.FINDINGS if stale else ExitCode.OK


def forecast_text(forecasts: Sequence[Forecast], making: Making) -> str:
    """The plan as `--dry-run` prints it."""
    rows = [
        [
            one.release,
            one.to_run,
            one.why,
            one.there,
            f"{one.seconds / 60:.0f} min" if one.to_run else "",
            f"{one.download_bytes / 10**9:.1f} GB" if one.download_bytes else "",
            f"{one.disk_bytes / 10**9:.1f} GB" if one.disk_bytes else "",
        ]
        for one in forecasts
    ]
    table = tabulate(rows, ["torch", "to run", "because", "there", "time", "download", "disk"], disable_numparse=True)
    minutes, disk = sum(one.seconds for one in forecasts) / 60, max((one.disk_bytes for one in forecasts), default=0)
    lines = [
        table,
        "",
        f"together about {minutes:.0f} min, at most {disk / 10**9:.0f} GB of disk at a time "
        f"({making.plan.most_disk_gb:g} GB are allowed)",
    ]
    based = "; ".join(dict.fromkeys(one.based_on for one in forecasts if one.to_run))
    lines += [f"times from {based}"] if based else []
    lines += [one.lacking for one in forecasts if one.lacking]
    if any("stale" in one.why for one in forecasts):
        lines.append("`--check` says of each row why it is stale")
    if making.budget_seconds is not None:
        lines.append(f"no cell would be started after {making.budget_seconds / 60:g} min")
    return "\n".join(lines)


def _tell(made: Made, told: Sequence[str], counts: Sequence[LogCount], size: int) -> None:
    if counts:
        click.echo("\nthe same, counted by TORCH_LOGS alone:\n" + counts_table(counts) + "\n")
    click.echo(
        f"reference: {len(made.kept)} cells are new; {size / 10**6:.2f} of {MOST_BYTES / 10**6:.0f} MB", err=True
    )
    for what, names in (
        ("not run", made.failed),
        ("left for the next time", made.left),
        ("lacking", made.lacking),
        ("not made", told),
    ):
        for name in names:
            click.echo(f"{what}: {name}", err=True)
    disagreeing = [one.cell for one in counts if not one.agree]
    if disagreeing:
        click.echo(f"the two counts differ: {', '.join(disagreeing)}", err=True)
