"""The command line of `toto-compat bisect`: the path taken, what was seen on both sides, and what changed."""

import json
import sys
from dataclasses import replace
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from typing import Any

import click

from toto_compat.contract.gate_limit import GateLimit
from toto_compat.environments.package_index import index_settings
from toto_compat.errors import EnvironmentBuildError, ExitCode, SelectionError
from toto_compat.evidence.files import cache_folder, check_writable, write_atomically
from toto_compat.evidence.store import CellStore
from toto_compat.matrix.document import nearest_name
from toto_compat.matrix.expand import gate_limits
from toto_compat.matrix.gates import Comparison, Gate
from toto_compat.matrix.load import find_matrix_file, load_matrix, matrix_option
from toto_compat.matrix.schema import Matrix
from toto_compat.releases.adding import tried_environment
from toto_compat.releases.bisect import Question, Search, ask, look_by_running
from toto_compat.releases.command import ReleaseNumber
from toto_compat.releases.defaults import moved_between
from toto_compat.releases.difference import count_changes, reason_changes, reason_lines
from toto_compat.releases.listing import Channel, State, against, listed, with_facts
from toto_compat.releases.observation import Criterion, Observation, stored_observations
from toto_compat.releases.running import pruned_after
from toto_compat.releases.search import Found, NoChange, NothingToCompare
from toto_compat.releases.upgrade import WATCHED
from toto_compat.runtimes.device import choose_device
from toto_compat.runtimes.interrupt import sigterm_as_interrupt
from toto_compat.runtimes.open import open_runtime
from toto_compat.runtimes.progress import print_out, say
from toto_compat.verdict.judge import Status, one_line

FOLDER = "bisects"
NOT_RUN = "not run"


@click.command("bisect")
@click.argument("gate")
@click.argument("selector")
@click.option("--good", type=ReleaseNumber(), metavar="VERSION", help="One end.  [default: the oldest of the matrix]")
@click.option("--bad", type=ReleaseNumber(), metavar="VERSION", help="The other end.  [default: the newest]")
@click.option("--limit", type=float, metavar="N", help="Another limit than matrix.yaml's: when does it cross this one?")
@click.option(
    "--any-change", is_flag=True, help="When does the figure change at all? Also where the gate always fails."
)
@click.option("--all-releases", is_flag=True, help="Also releases of your package index that matrix.yaml lacks.")
@click.option("--profile", default="quick", show_default=True, help="Whose workload is run; of its suites the gate's.")
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="auto: cuda where a GPU answers.",
)
@click.option(
    "--stored-only", is_flag=True, help="Build and run nothing: answer from stored evidence as far as it goes."
)
@click.option("--fresh", is_flag=True, help="Leave stored evidence aside: every look is a run.")
@click.option("--keep-environments", is_flag=True, help="Do not remove the virtualenvs that were built for the search.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--results", type=click.Path(path_type=Path), default=Path("results"), show_default=True, help="Folder of the runs."
)
@matrix_option
def bisect_command(gate: str, selector: str, **asked: Any) -> None:
    """Find the release at which GATE flips for the cache and mode that SELECTOR names (upstream/default).

    Stored evidence is taken first; what is missing is run, one environment at a time, each removed after its look. A
    release that does not install is skipped. Every look is a virtualenv on this machine."""
    if asked["limit"] is not None and asked["any_change"]:
        raise click.UsageError("--limit and --any-change are two questions: ask one of them")
    path = find_matrix_file(asked["matrix_file"])
    matrix = load_matrix(path)
    if asked["all_releases"]:
        matrix = with_releases_of_the_index(matrix)
    criterion = criterion_of(matrix, gate, asked["profile"], asked["limit"], any_change=asked["any_change"])
    good, bad = (str(one) if one is not None else None for one in (asked["good"], asked["bad"]))
    device = choose_device(asked["device"])
    question = ask(matrix, path, selector, criterion, profile=asked["profile"], device=device, good=good, bad=bad)
    question = replace(question, whole_index=asked["all_releases"])
    with sigterm_as_interrupt():
        search, answer = run_search(question, asked)
    told = as_data(question, search, answer)
    print_out(json.dumps(told, indent=2) if asked["as_json"] else "\n".join(answer_lines(question, search, answer)))
    if not isinstance(answer, Found):
        sys.exit(ExitCode.NOT_REPRODUCED)


def criterion_of(matrix: Matrix, name: str, profile: str, limit: float | None, *, any_change: bool) -> Criterion:
    """The gate by its name, with the limit that holds under the profile or the one that was given."""
    if name not in list(Gate):
        nearest = nearest_name(name, [gate.value for gate in Gate])
        told = f"did you mean {nearest}?" if nearest else f"there are {', '.join(Gate)}"
        raise SelectionError(f"there is no gate {name!r}", hint=told)
    gate = Gate(name)
    if any_change and gate.rule.comparison is not Comparison.COUNT:
        counts = ", ".join(one.value for one in Gate if one.rule.comparison is Comparison.COUNT)
        raise SelectionError(
            f"{name} differs a little between any two runs, so that --any-change would name any release",
            hint=f"--limit N asks when it crosses N; what is counted repeats exactly: {counts}",
        )
    if limit is not None and not isfinite(limit):
        raise click.UsageError(f"--limit {limit}: not a number that a figure could cross")
    if limit is not None:
        return Criterion(gate, GateLimit(min=limit) if gate.rule.larger_is_better else GateLimit(max=limit))
    known = gate_limits(matrix, profile).get(gate)
    if known is None and not any_change:
        raise SelectionError(f"{name} has no limit under profile {profile}", hint="give one with --limit N")
    return Criterion(gate, known or GateLimit(max=0), any_change)


def with_releases_of_the_index(matrix: Matrix) -> Matrix:
    """The matrix with every release of the index between its own; its file stays as it is."""
    settings = index_settings()
    found, warnings = listed(settings, Channel.RELEASE)
    for warning in warnings:
        say(f"warning: {warning}")
    lacking = [one for one in against(matrix, found) if one.state is State.BETWEEN and not one.version.is_prerelease]
    more = {}
    for one in with_facts(lacking, settings):
        try:
            if one.facts is None:
                raise EnvironmentBuildError(one.unreadable)
            name, environment = tried_environment(one, matrix)
            more[name] = environment
        except EnvironmentBuildError as error:
            say(f"warning: torch {one.version} is left out: {one_line(error.message)}")
    return matrix.model_copy(update={"environments": {**matrix.environments, **more}})


def run_search(question: Question, asked: dict[str, Any]) -> tuple[Search, Found | NoChange | NothingToCompare]:
    """Take what is stored, then look at releases until the answer is known."""
    search = Search(question.releases)
    store = CellStore(cache_folder() / "evidence")
    if not asked["fresh"]:
        found = stored_observations(question.requests, question.criterion, results=asked["results"], store=store.folder)
        for seen in sorted(found, key=lambda one: one.cell.stored if one.cell else "", reverse=True):
            search.note_stored(seen)
    say(
        f"looking for the release at which {question.criterion.text}, {len(question.releases)} releases from "
        f"{question.releases[0]} to {question.releases[-1]}, {len(search.seen)} of them known from stored evidence"
    )
    for seen in search.seen.values():
        say(f"  stored: {seen.text}")
    if asked["stored_only"]:

        def look(release: str) -> Observation:
            return Observation(release, "", NOT_RUN, None, "no stored evidence")

        return search, search.follow(look)
    folder = asked["results"] / FOLDER / f"{datetime.now(UTC):%Y-%m-%dT%H-%M-%S}-{question.criterion.gate.value}"
    check_writable(folder)
    runtime = open_runtime("venv", limits=question.matrix.limits, device=question.device)

    def run(release: str) -> Observation:
        say(f"  looking at torch {release}")
        environment = question.cells[release][0].environment
        with pruned_after(question.matrix, environment, runtime, keep=asked["keep_environments"]):
            seen = look_by_running(question, release, runtime=runtime, store=store, results=folder)
        say(f"  {seen.text}")
        return seen

    try:
        answer = search.follow(run)
    except KeyboardInterrupt:
        runtime.stop()
        raise
    write_atomically(folder / "bisect.json", json.dumps(as_data(question, search, answer), indent=1) + "\n")
    say(f"{'the runs behind this' if search.path else 'this answer as data'}: {folder}")
    return search, answer


# --- the answer -------------------------------------------------------------------------------------------------------


def answer_lines(question: Question, search: Search, answer: Found | NoChange | NothingToCompare) -> list[str]:
    """Say what was found, how, and what is different on the two sides."""
    row = next(iter(question.cells.values()))[0].partition("/")[2]
    lines = [f"{row}, {question.criterion.gate.value}: {_headline(search, answer)}", *_contradictions(question, search)]
    if isinstance(answer, Found):
        if not question.whole_index:
            lines.append("  releases that matrix.yaml lacks were not asked about: --all-releases takes them too")
        before, after = (search.seen[search.releases[place]] for place in (answer.before, answer.after))
        lines += ["", f"  before  {before.text}", f"  after   {after.text}"]
        if before.cell is not None and after.cell is not None:
            changes = [*count_changes(before.cell, after.cell), *reason_lines(reason_changes(before.cell, after.cell))]
            lines += ["", "what changed:", *(f"  {line}" for line in changes or ["nothing else that was recorded"])]
        moved = [one.text for one in moved_between(before.release, after.release) or () if one.name in WATCHED]
        if moved:
            lines += ["", "torch's own defaults that moved with it:", *(f"  {line}" for line in moved)]
    run = [seen for seen in search.path if seen.source != NOT_RUN]
    lines += ["", f"path: {len(run)} of {len(search.releases)} releases were run"]
    lines += [f"  {number}. {seen.text}" for number, seen in enumerate(run, 1)]
    taken = [search.seen[one] for one in search.releases if one in search.seen and search.seen[one] not in search.path]
    if taken:
        lines += ["stored evidence:", *(f"  {seen.text}" for seen in taken)]
    missing = [one for one in search.releases if one in search.seen and search.seen[one].source == NOT_RUN]
    if missing:
        lines += [f"no stored evidence: {', '.join(missing)}; without --stored-only what is needed of them is run"]
    return lines


def _contradictions(question: Question, search: Search) -> list[str]:
    """Say where an end is not what the user took it for: the change that is found may then be another than meant."""
    told = []
    for release, word, expected in ((question.good, "good", Status.PASS), (question.bad, "bad", Status.FAIL)):
        seen = search.seen.get(release) if release else None
        if seen is not None and seen.judged is not None and seen.judged.status not in (expected, *_UNDECIDED):
            told.append(f"  torch {release} was called {word} and is {seen.judged.status.value} here")
    return told if not question.criterion.any_change else []


_UNDECIDED = (Status.INCONCLUSIVE, Status.NOT_APPLICABLE)


def _headline(search: Search, answer: Found | NoChange | NothingToCompare) -> str:
    names = search.releases
    if isinstance(answer, NothingToCompare):
        return "fewer than two releases could be looked at: nothing can be said"
    if isinstance(answer, NoChange):
        unseen = [names[place] for place in answer.unseen]
        hidden = (
            f"; not looked at: {', '.join(unseen)}, a change that was undone again would not show" if unseen else ""
        )
        return f"no change between torch {names[answer.first]} and {names[answer.last]}{hidden}"
    before, after = names[answer.before], names[answer.after]
    text = f"changed with torch {after} {_change(search, before, after)}, {before} is the one before it"
    if answer.skipped:
        skipped = ", ".join(names[place] for place in answer.skipped)
        text = (
            f"changed between torch {before} and {after} {_change(search, before, after)}; {skipped} could not be "
            "looked at and may be the one"
        )
    if answer.others:
        pairs = [(names[first], names[second]) for first, second in answer.others]
        more = ", ".join(f"between {first} and {second} {_change(search, first, second)}" for first, second in pairs)
        text += f". It is not the only change: also {more}"
    return text


def _change(search: Search, before: str, after: str) -> str:
    return f"from {_state(search.seen[before].state)} to {_state(search.seen[after].state)}"


def _state(state: object) -> str:
    return f"{state:g}" if isinstance(state, float) else str(state)


def as_data(question: Question, search: Search, answer: Found | NoChange | NothingToCompare) -> dict[str, Any]:
    found: dict[str, Any] = {"kind": type(answer).__name__}
    if isinstance(answer, Found):
        found |= {
            "before": search.releases[answer.before],
            "after": search.releases[answer.after],
            "skipped": [search.releases[place] for place in answer.skipped],
            "other_changes": [[search.releases[one] for one in pair] for pair in answer.others],
        }
    return {
        "schema": 1,
        "gate": question.criterion.gate.value,
        "question": question.criterion.text,
        "device": question.device.value,
        "releases": list(search.releases),
        "answer": found,
        "path": [_observed(seen) for seen in search.path],
        "stored": [_observed(seen) for seen in search.seen.values() if seen not in search.path],
    }


def _observed(seen: Observation) -> dict[str, Any]:
    return {
        "torch": seen.release,
        "environment": seen.environment,
        "source": seen.source,
        "seen": seen.why,
        "value": seen.judged.value if seen.judged else None,
        "skipped": seen.state is None,
        "installed_torch": seen.cell.provenance.torch if seen.cell else None,
        "stored": seen.cell.stored if seen.cell else None,
    }
