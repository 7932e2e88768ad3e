"""What holds in which release: verdicts along PyTorch releases. Nothing is said of a release that was not run."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from packaging.version import Version

from toto_compat.verdict.judge import Status

# of several environments with one torch release the worst speaks for the release
_WORST_FIRST = (Status.FAIL, Status.INCONCLUSIVE, Status.PASS)
_MOST_LISTED = 4
_MOST_MINORS = 1000  # between two releases; a number beyond is a mistake, and would be counted up to


@dataclass(frozen=True)
class ReleaseRange:
    """Releases that were run one after the other, nothing decided between them, with one verdict."""

    verdict: Status
    releases: tuple[str, ...]

    @property
    def first(self) -> str:
        return self.releases[0]

    @property
    def last(self) -> str:
        return self.releases[-1]

    @property
    def text(self) -> str:
        """'2.13.0', '2.9.0 and 2.13.0', or '2.9.0 to 2.15.0 (7 releases)' where they are many."""
        if len(self.releases) > _MOST_LISTED:
            return f"{self.first} to {self.last} ({len(self.releases)} releases)"
        return _listed(self.releases)


@dataclass(frozen=True)
class ReleaseHistory:
    """Says how one cache, mode and settings fared over the releases that were tried."""

    ranges: tuple[ReleaseRange, ...]
    good_since: str | None  # first of the releases that passed one after the other up to the newest decided one
    regressed_in: tuple[str, ...]  # releases that failed right after one that passed
    undecided: tuple[str, ...]  # run, but INCONCLUSIVE
    untried: tuple[str, ...]  # no row here: releases of the matrix, those of other rows, minor releases in between

    @property
    def text(self) -> str:
        """'good in 2.9.0 and 2.10.0, regressed in 2.11.0 (not tried: 2.8.0 before, 2.13.0 after)'."""
        gaps = []
        if self.undecided:
            gaps.append(f"not decided: {', '.join(self.undecided)}")
        if self.untried:
            gaps.append(f"not tried: {self._untried_text}")
        if not gaps:
            return self._verdicts
        before, counted, after = self._verdicts.rpartition(" releases)")  # no brackets beside brackets
        head = f"{before} releases; " if counted and not after else f"{self._verdicts} ("
        return f"{head}{'; '.join(gaps)})"

    @property
    def _verdicts(self) -> str:
        parts: list[str] = []
        for position, stretch in enumerate(self.ranges):
            if stretch.verdict is Status.PASS:
                parts.append(f"good in {stretch.text}" if position == 0 else f"good again in {stretch.text}")
            elif position > 0:
                parts.append(f"regressed in {stretch.text}")
            else:
                parts.append(f"fails in {stretch.text}")
        # after a release that failed the first good ones are not 'again'
        if self.ranges and self.ranges[0].verdict is Status.FAIL and len(parts) > 1:
            parts[1] = parts[1].replace("good again", "good", 1)
        return ", ".join(parts) if parts else "no release decided"

    @property
    def _untried_text(self) -> str:
        tried = [Version(release) for stretch in self.ranges for release in stretch.releases]
        tried += [Version(release) for release in self.undecided]
        places: dict[str, list[str]] = {"before": [], "in between": [], "after": []}
        for release in self.untried:
            version = Version(release)
            place = "before" if version < min(tried) else "after" if version > max(tried) else "in between"
            places[place].append(release)
        return ", ".join(f"{', '.join(names)} {place}" for place, names in places.items() if names)


def release_history(verdicts: Mapping[str, Iterable[Status]], *, all_releases: Iterable[str] = ()) -> ReleaseHistory:
    """Put `verdicts` (release -> those of its environments) in order; `all_releases` could have been tried as well."""
    worst = {release: _worst(statuses) for release, statuses in verdicts.items()}
    ordered = sorted(worst, key=Version)
    decided = [release for release in ordered if worst[release] is not Status.INCONCLUSIVE]
    ranges = tuple(
        ReleaseRange(verdict, tuple(stretch)) for verdict, stretch in itertools.groupby(decided, key=worst.__getitem__)
    )
    return ReleaseHistory(
        ranges=ranges,
        good_since=ranges[-1].first if ranges and ranges[-1].verdict is Status.PASS else None,
        regressed_in=tuple(
            later.first
            for earlier, later in itertools.pairwise(ranges)
            if earlier.verdict is Status.PASS and later.verdict is Status.FAIL
        ),
        undecided=tuple(release for release in ordered if worst[release] is Status.INCONCLUSIVE),
        untried=tuple(_untried(ordered, all_releases)),
    )


def _worst(statuses: Iterable[Status]) -> Status:
    seen = set(statuses)
    return next(status for status in _WORST_FIRST if status in seen)


def _untried(ordered: Sequence[str], all_releases: Iterable[str]) -> list[str]:
    """Name releases that are known and have no row, and minor releases between the tried ones that nobody knows of."""
    if not ordered:
        return []
    known = {Version(release): release for release in all_releases}
    gaps = {version: release for version, release in known.items() if release not in ordered}
    oldest, newest = Version(ordered[0]), Version(ordered[-1])
    if oldest.major == newest.major and newest.minor - oldest.minor < _MOST_MINORS:
        minors = {Version(release).minor for release in (*ordered, *known.values())}
        for minor in range(oldest.minor + 1, newest.minor):
            if minor not in minors:
                gaps[Version(f"{newest.major}.{minor}")] = f"{newest.major}.{minor}"
    return [gaps[version] for version in sorted(gaps)]


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
