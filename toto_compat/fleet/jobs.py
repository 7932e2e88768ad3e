"""`toto-compat jobs`: a plan of the matrix, or releases that are new, as jobs of a CI system."""

import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import yaml
from packaging.version import InvalidVersion, Version

from toto_compat.contract.cell_name import CellName
from toto_compat.errors import InputError
from toto_compat.evidence.store import load_run

# What may stand in a job: these words go through YAML, variables and a shell's word splitting.
_SAFE_CELL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*/[A-Za-z0-9_]+/[a-z-]+(\+[A-Za-z0-9_-]+)?(@[A-Za-z0-9_-]+)?")
MOST_JOBS = 256  # GitHub refuses a larger matrix whole
CHILD_TEMPLATE = "docs/fleet/gitlab-cells.yml"


@dataclass(frozen=True)
class Job:
    """Cells that one runner takes: all of an environment, which it builds once, or a single one."""

    name: str
    environment: str
    selectors: str  # names of cells, apart by spaces
    artifact: str  # a name without a slash


def jobs_of(plan: Any, *, by: str) -> list[Job]:
    """The jobs of a plan as `toto-compat matrix --dry-run --json` prints it."""
    cells = [_cell(row) for row in _rows(plan, "cells", "`toto-compat matrix --dry-run --json`")]
    groups: dict[str, list[CellName]] = {}
    for cell in dict.fromkeys(cells):
        groups.setdefault(cell if by == "cell" else cell.environment, []).append(cell)
    jobs = [
        Job(name, own[0].environment, " ".join(own), re.sub(r"[/+@]", "--", f"cells-{name}"))
        for name, own in groups.items()
    ]
    if len(jobs) > MOST_JOBS:
        raise InputError(f"{len(jobs)} jobs, and GitHub takes {MOST_JOBS}", hint="use --by environment, or fewer cells")
    return jobs


def _cell(row: Any) -> CellName:
    name = row.get("cell") if isinstance(row, dict) else None
    if not isinstance(name, str) or not _SAFE_CELL.fullmatch(name):
        raise InputError(f"{name!r} is no name of a cell", hint="give the plan as `toto-compat matrix` printed it")
    return CellName(name)


def new_releases(document: Any) -> list[str]:
    """The releases of `toto-compat releases --json` that are newer than everything in matrix.yaml, oldest first."""
    found = set()
    for release in _rows(document, "new", "`toto-compat releases --json`"):
        try:
            found.add(Version(str(release)))
        except InvalidVersion as error:
            raise InputError(
                f"{release!r} is no release", hint="give what `toto-compat releases --json` printed"
            ) from error
    return [str(version) for version in sorted(found)]


def releases_in(run: Path) -> set[str]:
    """The releases that a run has results of; none where there is no such run yet. What could not be run is no result:
    it is tried again."""
    if not (run / "run.json").exists():
        return set()
    return {cell.request.environment.torch for cell in load_run(run).cells if not cell.could_not_run}


def _rows(document: Any, key: str, origin: str) -> Iterator[Any]:
    rows = document.get(key) if isinstance(document, dict) else None
    if not isinstance(rows, list):
        raise InputError(f"there is no list {key!r} in it", hint=f"give what {origin} printed")
    yield from rows


def github_matrix(rows: Sequence[dict[str, str]]) -> str:
    """One line for `strategy.matrix: ${{ fromJSON(...) }}`."""
    return json.dumps({"include": list(rows)}, separators=(",", ":"))


def gitlab_pipeline(jobs: Sequence[Job]) -> str:
    """A child pipeline: one job per environment, and what the template does with all of their artifacts."""
    document: dict[str, Any] = {"include": [{"local": CHILD_TEMPLATE}]}
    for job in jobs:
        document[job.name] = {"extends": ".cells", "variables": {"CELLS": job.selectors, "RUN": job.artifact}}
    document["pages"] = {"needs": [{"job": "lower"}, *({"job": job.name} for job in jobs)]}
    return yaml.safe_dump(document, sort_keys=False, width=1000)


@click.command("jobs")
@click.argument("file", type=click.Path(path_type=Path, allow_dash=True))
@click.option("--releases", is_flag=True, help="FILE is what `releases --json` printed: a job for every new release.")
@click.option(
    "--known", type=click.Path(path_type=Path), help="With --releases: leave out those that this run has rows of."
)
@click.option(
    "--by",
    type=click.Choice(["environment", "cell"]),
    default="environment",
    show_default=True,
    help="What a job runs: all cells of an environment, or one.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["github", "gitlab", "json"]),
    default="github",
    show_default=True,
    help="For which CI system.",
)
def jobs_command(file: Path, releases: bool, known: Path | None, by: str, form: str) -> None:
    """Turn a plan (FILE, or - for standard input) into the jobs of a CI system.

    `github` is a line for strategy.matrix, `gitlab` a child pipeline, `json` a list."""
    if releases and form == "gitlab":
        raise click.UsageError("--releases has no child pipeline: docs/fleet/gitlab-ci.yml takes --format json")
    if known is not None and not releases:
        raise click.UsageError("--known is for --releases")
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
        document = json.loads(text)
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file}: not JSON: {error}") from error
    try:
        jobs = [] if releases else jobs_of(document, by=by)
        new = new_releases(document) if releases else []
    except InputError as error:
        raise InputError(f"{file}: {error.message}", hint=error.hint) from error
    there = releases_in(known) if known else set()
    rows = [*(asdict(job) for job in jobs), *({"release": one} for one in new if one not in there)]
    if form == "gitlab":
        click.echo(gitlab_pipeline(jobs), nl=False)
    else:
        click.echo(github_matrix(rows) if form == "github" else json.dumps(rows, indent=2))
