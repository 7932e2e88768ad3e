"""`toto-compat issues BEFORE AFTER`: one issue for every verdict that changed, however often it is run."""

import hashlib
import json
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from toto_compat.evidence.store import RunInfo, find_run, load_run
from toto_compat.fleet.trackers import TRACKERS, KnownIssue, Tracker
from toto_compat.verdict.comparison import RowChange, compare
from toto_compat.verdict.judge import JudgedCell, rerun_command
from toto_compat.verdict.judged_run import judge_run

LABEL = "toto-compat"
_KEY = re.compile(r"<!-- toto-compat: ([0-9a-f]{16}) -->")
_LONGEST_TEXT = 4000


@dataclass(frozen=True)
class Issue:
    """What is told about one row. The key is of the row and its new verdict: the same news has the same key."""

    key: str
    title: str
    body: str


def issues_of(before: RunInfo, after: RunInfo, rows: Sequence[RowChange], cells: Sequence[JudgedCell]) -> list[Issue]:
    """An issue for every row whose verdict is another now. Rows that are new or gone have no verdict that changed."""
    by_name = {str(cell.result.cell): cell for cell in cells}
    return [
        _issue(before, after, row, by_name.get(row.cell.partition(" on ")[0]))
        for row in rows
        if row.before is not None and row.after is not None and row.before is not row.after
    ]


def asked_the_same(before: Sequence[JudgedCell], after: Sequence[JudgedCell]) -> tuple[list[JudgedCell], int]:
    """Leave out rows that were run with another profile, workload or settings: another answer is no news then."""
    asked = {cell.result.cell: _question(cell) for cell in after}
    same = [cell for cell in before if asked.get(cell.result.cell, _question(cell)) == _question(cell)]
    return same, len(before) - len(same)


def _question(cell: JudgedCell) -> tuple[object, ...]:
    request = cell.result.request
    return request.profile_name, request.workload, request.settings


def key_of(row: RowChange) -> str:
    return hashlib.sha256(f"{row.cell}\n{row.after}".encode()).hexdigest()[:16]


def _issue(before: RunInfo, after: RunInfo, row: RowChange, cell: JudgedCell | None) -> Issue:
    assert row.before is not None and row.after is not None
    lines = [
        f"`{row.cell}` was **{row.before.value}** in the run `{before.name}` and is **{row.after.value}** in "
        f"`{after.name}`.",
        "",
        *_fenced(row.text or (cell.reason if cell else "") or "no gate's figure moved beyond noise"),
    ]
    if cell is not None:
        where = cell.result.provenance
        lines += ["", f"torch {where.torch}, {where.gpu or where.cpu}, runtime {where.runtime}. To get it again:", ""]
        lines += _fenced(rerun_command(cell.result))
    lines += ["", f"<!-- toto-compat: {key_of(row)} -->"]
    return Issue(key_of(row), f"torch.compile: {row.cell} is now {row.after.value}", "\n".join(lines) + "\n")


def _fenced(text: str) -> list[str]:
    """Text from logs as it is: in a fence that it cannot end, where nothing in it is a mention, a link or markup."""
    text = text[:_LONGEST_TEXT].replace("\0", "")
    longest = max((len(ticks) for ticks in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}text", text, fence]


def to_open(issues: Sequence[Issue], known: Sequence[KnownIssue], since: str) -> list[Issue]:
    """Those that nobody was told yet.

    An open issue with the same key has told it. So has a closed one that is younger than the run before: somebody
    closed it, and the run before is only still the same because nothing was published since.
    """
    # the last one is the issue's own: what stands before it may be quoted from a log
    told = {
        key for one in known for key in _KEY.findall(one.body)[-1:] if one.is_open or (since and one.created >= since)
    }
    return [issue for issue in {issue.key: issue for issue in issues}.values() if issue.key not in told]


def open_all(issues: Sequence[Issue], tracker: Tracker) -> list[str]:
    """Open them; the addresses that the tracker answers."""
    opened = []
    with tempfile.TemporaryDirectory(prefix="toto-compat-issues-") as folder:
        for number, issue in enumerate(issues):
            body = Path(folder) / f"{number}.md"
            body.write_text(issue.body, encoding="utf-8")
            opened.append(tracker.open(issue.title, body, LABEL))
    return opened


@click.command("issues")
@click.argument("before")
@click.argument("after", default="latest")
@click.option(
    "--tracker", type=click.Choice(list(TRACKERS)), help="Where to open them, with its own command line tool."
)
@click.option(
    "--dry-run", is_flag=True, help="Ask the tracker what it knows, print what would be opened, open nothing."
)
@click.option(
    "--results", type=click.Path(path_type=Path), default=Path("results"), show_default=True, help="Folder of the runs."
)
def issues_command(before: str, after: str, tracker: str | None, dry_run: bool, results: Path) -> None:
    """Open one issue for every row whose verdict changed from run BEFORE to run AFTER (default: latest).

    What was told before is not told again: an issue is found by its row and new verdict. Without --tracker the issues
    are printed as JSON and nobody is asked."""
    old, new = load_run(find_run(before, results)), load_run(find_run(after, results))
    # both by the same limits: a limit that moved is not a change of the model
    judged = judge_run(new)
    before_cells, otherwise = asked_the_same(judge_run(old, new.info.gates).cells, judged.cells)
    if otherwise:
        click.echo(f"{otherwise} rows were asked something else before: no verdict of theirs changed", err=True)
    rows = compare(before_cells, judged.cells)
    issues = issues_of(old.info, new.info, rows, judged.cells)
    if tracker is not None:
        place = TRACKERS[tracker]
        issues = to_open(issues, place.known(LABEL), old.info.finished or old.info.started) if issues else []
        if not dry_run:
            for address in open_all(issues, place):
                click.echo(address)
            click.echo(f"{len(issues)} issues were opened", err=True)
            return
    click.echo(
        json.dumps([{"key": one.key, "title": one.title, "label": LABEL, "body": one.body} for one in issues], indent=2)
    )
