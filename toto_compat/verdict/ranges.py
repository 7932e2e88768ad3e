"""What holds since when: verdicts along PyTorch releases, with the gaps named."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from packaging.version import Version

from toto_compat.verdict.gates import Status

# of several environments with one torch release the worst speaks for the release
_WORST_FIRST = (Status.FAIL, Status.INCONCLUSIVE, Status.PASS)


@dataclass(frozen=True)
class ReleaseRange:
    """A run of releases with one verdict; `first` and `last` may be the same release."""

    verdict: Status
    first: str
    last: str


@dataclass(frozen=True)
class ReleaseHistory:
    """How one cache, mode and settings fared over the releases that were tried."""

    ranges: tuple[ReleaseRange, ...]
    good_since: str | None  # first release of the PASS stretch that reaches the newest decided one
    regressed_in: tuple[str, ...]  # releases that failed right after one that passed
    undecided: tuple[str, ...]  # run, but INCONCLUSIVE
    untried: tuple[str, ...]  # releases between the oldest and the newest that have no row here

    @property
    def text(self) -> str:
        """'good since 2.9.0', 'good in 2.9.0 to 2.10.0, regressed in 2.11.0', with gaps in brackets.

        One release alone is 'good in' itself: "since" would speak of releases nobody tried.
        """
        gaps = []
        if self.undecided:
            gaps.append(f"not decided: {', '.join(self.undecided)}")
        if self.untried:
            gaps.append(f"not tried: {', '.join(self.untried)}")
        return self._verdicts + (f" ({'; '.join(gaps)})" if gaps else "")

    @property
    def _verdicts(self) -> str:
        parts: list[str] = []
        newest = len(self.ranges) - 1
        for position, stretch in enumerate(self.ranges):
            alone = stretch.first == stretch.last
            span = stretch.first if alone else f"{stretch.first} to {stretch.last}"
            if stretch.verdict is Status.PASS:
                since = position == newest and not (alone and position == 0)
                parts.append(f"good since {stretch.first}" if since else f"good in {span}")
            elif position > 0:
                parts.append(f"regressed in {stretch.first}")
            else:
                parts.append(f"fails in {span}")
        return ", ".join(parts) if parts else "no release decided"


def release_history(verdicts: Mapping[str, Iterable[Status]], *, all_releases: Iterable[str] = ()) -> ReleaseHistory:
    """Ranges over `verdicts` (release -> verdicts of its environments); `all_releases` were tried for something."""
    worst = {release: _worst(found) for release, found in verdicts.items()}
    ordered = sorted(worst, key=Version)
    decided = [release for release in ordered if worst[release] is not Status.INCONCLUSIVE]
    ranges: list[ReleaseRange] = []
    for release in decided:
        if ranges and ranges[-1].verdict is worst[release]:
            ranges[-1] = ReleaseRange(worst[release], ranges[-1].first, release)
        else:
            ranges.append(ReleaseRange(worst[release], release, release))
    return ReleaseHistory(
        ranges=tuple(ranges),
        good_since=ranges[-1].first if ranges and ranges[-1].verdict is Status.PASS else None,
        regressed_in=tuple(
            later.first
            for earlier, later in itertools.pairwise(ranges)
            if earlier.verdict is Status.PASS and later.verdict is Status.FAIL
        ),
        undecided=tuple(release for release in ordered if worst[release] is Status.INCONCLUSIVE),
        untried=tuple(_untried(ordered, all_releases)),
    )


def _worst(found: Iterable[Status]) -> Status:
    seen = set(found)
    return next(status for status in _WORST_FIRST if status in seen)


def _untried(ordered: Sequence[str], all_releases: Iterable[str]) -> list[str]:
    """Releases that others were tried on, and minor releases that nobody tried, inside the span of `ordered`."""
    if len(ordered) < 2:
        return []
    oldest, newest = Version(ordered[0]), Version(ordered[-1])
    known = {Version(release): release for release in all_releases if oldest < Version(release) < newest}
    gaps = {version: release for version, release in known.items() if release not in ordered}
    if oldest.major == newest.major:
        minors = {Version(release).minor for release in (*ordered, *known.values())}
        for minor in range(oldest.minor + 1, newest.minor):
            if minor not in minors:
                gaps[Version(f"{newest.major}.{minor}")] = f"{newest.major}.{minor}"
    return [gaps[version] for version in sorted(gaps)]
