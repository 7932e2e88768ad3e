"""Which PyTorch release a log is of, as far as its lines tell: by where in torch's sources they were logged from."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from packaging.version import Version

from toto_compat.contract.events import Event, EventKind
from toto_compat.environments.torch_sources.log_lines import FILES, load_log_lines

# What the statement says, or its source, that an event of a kind is logged by; of other kinds any statement will do.
_SAYS = {
    EventKind.RECOMPILE_LIMIT: "hit config",
    EventKind.RECOMPILE: "recompiles",
    EventKind.DYNAMIC_SHAPE: "_maybe_guard_rel",
}
_PLACE = re.compile(r"(?:^|/)(?P<file>[\w/.-]+\.py):(?P<line>\d{1,9})$")
_RENAMED = Version("2.7")  # cache_size_limit -> recompile_limit
# Patch releases often log from the same lines as the release they mend. Of those that do, the one that toto-ts was run
# on for this project comes first: the others are as likely by the log alone, and are named beside it.
_RUN_HERE = frozenset(
    {"2.3.1", "2.4.1", "2.5.1", "2.6.0", "2.7.0", "2.8.0", "2.9.0", "2.11.0", "2.13.0", "2.14.1", "2.15.0"}
)


@dataclass(frozen=True)
class ReleaseHint:
    """Says which release a logging prefix points at, and how firmly."""

    release: str  # '2.9.0' or '2.7 or later'
    because: str
    exact: bool = False


@dataclass(frozen=True)
class Candidate:
    """A release that a log may be of: the places of its prefixes that log statements stand at there, and the others."""

    release: str
    fits: tuple[str, ...]  # 'torch/_dynamo/convert_frame.py:1358'
    contradicts: tuple[str, ...]


def release_hint(logged_from: str, limit_name: str = "") -> ReleaseHint | None:
    """Name the release that a limit warning's own source line, or failing that its wording, points at."""
    releases = sorted(_releases_at(logged_from, EventKind.RECOMPILE_LIMIT), key=_likelier)
    if releases:
        place, others = logged_from.rpartition("/")[2], ", ".join(releases[1:])
        return ReleaseHint(
            releases[0],
            f"the limit warning stands at {place} in that release{f' and in {others}' if others else ''}",
            exact=len({Version(one).release[:2] for one in releases}) == 1,
        )
    if limit_name.endswith("cache_size_limit"):
        return ReleaseHint("2.6 or earlier", "the limit is called cache_size_limit up to 2.6")
    if limit_name.endswith("recompile_limit"):
        return ReleaseHint("2.7 or later", "the limit is called recompile_limit from 2.7 on")
    return None


def limit_warning_lines() -> dict[str, int]:
    """Return the line of `convert_frame.py` that the limit warning is logged from, by release, oldest first."""
    table = load_log_lines()
    found = {
        release: line
        for (file, line), statements in table.places.items()
        for statement in statements
        if file.endswith("/convert_frame.py") and _SAYS[EventKind.RECOMPILE_LIMIT] in statement.says
        for release in statement.releases
    }
    return {release: found[release] for release in table.releases if release in found}


def release_candidates(events: Iterable[Event]) -> list[Candidate]:
    """Rank the releases that these events may be of, best first; empty where no line says anything about it.

    A release counts for every place that is such a log statement in it and against every place that is none. Places in
    files that the table does not know say nothing, nor do those that no release has: torch may have been patched.
    """
    told: dict[tuple[str, EventKind], tuple[str, ...]] = {}
    wording: set[bool] = set()
    for event in events:
        if event.logged_from and (event.logged_from, event.kind) not in told:
            told[event.logged_from, event.kind] = _releases_at(event.logged_from, event.kind)
        if event.kind is EventKind.RECOMPILE_LIMIT and event.limit_name:
            wording.add(event.limit_name.endswith("recompile_limit"))
    places: dict[str, set[str]] = {}
    for (place, _), releases in told.items():
        if releases:
            places[place] = places.get(place, set(releases)) & set(releases)
    known = load_log_lines().releases
    candidates = [
        Candidate(
            release,
            tuple(place for place, releases in places.items() if release in releases),
            tuple(place for place, releases in places.items() if release not in releases),
        )
        for release in known
        if not wording or (Version(release) >= _RENAMED) in wording
    ]
    if not places:
        return candidates if wording else []
    fitting = [one for one in candidates if one.fits]
    return sorted(fitting, key=lambda one: (-len(one.fits), len(one.contradicts), *_likelier(one.release)))


def _likelier(release: str) -> tuple[bool, Version]:
    return release not in _RUN_HERE, Version(release)


def _releases_at(logged_from: str, kind: EventKind) -> tuple[str, ...]:
    """Name the releases that log such an event from this place; the file may lack the folders before it."""
    place = _PLACE.search(logged_from)
    if place is None:
        return ()
    table = load_log_lines()
    named = [file for file in FILES if file == place["file"] or file.endswith(f"/{place['file']}")]
    found = {
        release
        for file in named
        for statement in table.statements(file, int(place["line"]))
        if _SAYS.get(kind, "") in statement.says
        for release in statement.releases
    }
    return tuple(release for release in table.releases if release in found)
