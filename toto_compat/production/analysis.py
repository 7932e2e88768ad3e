"""Events of logs grouped by kind, function and normalised reason. Memory grows with the groups, not with the events."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from toto_compat.contract.events import Event, EventKind, Severity
from toto_compat.logs.release_hint import ReleaseHint, release_hint
from toto_compat.logs.times import in_seconds, seconds_of, years_between

RANK = {Severity.ERROR: 0, Severity.WARNING: 1, Severity.INFO: 2}
_MOST_GROUPS = 2_000
_MOST_COMPILE_IDS = 8
_OTHER = "(more kinds of reasons than are kept apart)"


@dataclass
class Timeline:
    """Counts events over time in few intervals of one width, which doubles as the log goes on."""

    width: float = 2.0**-6  # seconds
    counts: Counter[int] = field(default_factory=Counter)  # by interval since 1970
    first: float = math.inf
    last: float = -math.inf
    most: int = 256

    def add(self, seconds: float) -> None:
        self.first, self.last = min(self.first, seconds), max(self.last, seconds)
        while self.last // self.width - self.first // self.width >= self.most:
            self.width *= 2
            halved: Counter[int] = Counter()
            for interval, count in self.counts.items():
                halved[interval // 2] += count
            self.counts = halved
        self.counts[int(seconds // self.width)] += 1

    def shift(self, seconds: float) -> None:
        """Move all of it, when it turns out which year it is of."""
        self.first, self.last = self.first + seconds, self.last + seconds
        moved: Counter[int] = Counter()
        for interval, count in self.counts.items():
            moved[int(((interval + 0.5) * self.width + seconds) // self.width)] += count
        self.counts = moved

    def between(self, begin: float, end: float, intervals: int) -> list[int]:
        """Count the events in equal parts of a span of time, for a small plot."""
        parts = [0] * intervals
        for interval, count in self.counts.items():
            middle = min(max((interval + 0.5) * self.width, self.first), self.last)
            share = (middle - begin) / (end - begin) if end > begin else 0.0
            parts[min(intervals - 1, max(0, int(share * intervals)))] += count
        return parts


@dataclass
class Group:
    """Events of one kind with one function and one normalised reason."""

    kind: EventKind
    severity: Severity
    function: str
    normalised_reason: str
    example: Event
    first: tuple[int, int]  # file index, line
    last: tuple[int, int]
    events: int = 0
    instances: int = 0  # summed counts: 'mutated inputs (8 instances)' is one event with eight
    compile_ids: list[str] = field(default_factory=list)
    limits: set[int] = field(default_factory=set)
    first_time: str = ""  # the earliest, as the log has it
    last_time: str = ""
    timeline: Timeline = field(default_factory=Timeline)

    def add(self, event: Event, position: tuple[int, int], seconds: float | None) -> None:
        self.events += 1
        self.instances += event.count
        self.first, self.last = min(self.first, position), max(self.last, position)
        if event.compile_id and len(self.compile_ids) < _MOST_COMPILE_IDS and event.compile_id not in self.compile_ids:
            self.compile_ids.append(event.compile_id)
        # A place, or the whole of a wrapped reason, may be known from only some of the events of a group.
        if event.file and not self.example.file:
            self.example = event
        if event.limit is not None:
            self.limits.add(event.limit)
        if seconds is not None:
            self.first_time = event.time if seconds < self.timeline.first else self.first_time
            self.last_time = event.time if seconds >= self.timeline.last else self.last_time
            self.timeline.add(seconds)


@dataclass
class Analysis:
    """Holds what was found in some logs."""

    files: list[str]
    groups: list[Group]  # worst first, then most frequent
    releases: list[tuple[ReleaseHint, int]]  # how many limit warnings point at each, most first

    @property
    def events(self) -> int:
        return sum(group.events for group in self.groups)

    @property
    def release(self) -> str:
        """Name the release that the logs are of, '' if they do not tell, or tell of several."""
        exact = {hint.release for hint, _ in self.releases if hint.exact}
        return exact.pop() if len(exact) == 1 else ""

    @property
    def span(self) -> tuple[float, float] | None:
        """Return the first and the last moment of all events, in seconds; None if no line has a time."""
        lines = [group.timeline for group in self.groups if group.timeline.counts]
        if not lines:
            return None
        return min(line.first for line in lines), max(line.last for line in lines)

    def at_least(self, severity: Severity) -> int:
        """Tell how many events are at least this severe."""
        return sum(group.events for group in self.groups if RANK[group.severity] <= RANK[severity])

    def position(self, where: tuple[int, int]) -> str:
        """Write a position for people and editors: '<file>:<line>'."""
        return f"{self.files[where[0]]}:{where[1]}"


class Grouping:
    """Takes events as they come, and tells at any moment what they amount to."""

    def __init__(self, files: Sequence[str]) -> None:
        self._files = list(files)
        self._groups: dict[tuple[str, str, str], Group] = {}
        self._hints: Counter[ReleaseHint] = Counter()
        self._now: float | None = None  # the time of the last event that had one
        self._year_known = False

    def add(self, file_index: int, event: Event) -> None:
        reason = event.normalised_reason
        key = (event.kind.value, event.function, reason)
        if key not in self._groups and len(self._groups) >= _MOST_GROUPS:
            reason, key = _OTHER, (event.kind.value, "", _OTHER)
        position = (file_index, int(event.source.rpartition(":")[2]))
        group = self._groups.get(key)
        if group is None:
            group = Group(event.kind, event.severity, key[1], reason, example=event, first=position, last=position)
            self._groups[key] = group
        group.add(event, position, self._seconds(event.time) if event.time else None)
        if event.kind is EventKind.RECOMPILE_LIMIT and (hint := release_hint(event.logged_from, event.limit_name)):
            self._hints[hint] += 1

    def _seconds(self, time: str) -> float | None:
        seconds = seconds_of(time, self._now)
        if seconds is None:
            return None
        if not self._year_known and not time.startswith("--"):
            self._year_known = True
            if self._now is not None:  # what came before was of no year: it is of this one, or one beside it
                moves = (years_between(self._now, seconds) + years for years in (-1, 0, 1))
                now = self._now
                move = min((in_seconds(now, years) for years in moves), key=lambda by: abs(now + by - seconds))
                for group in self._groups.values():
                    if group.timeline.counts:
                        group.timeline.shift(move)
        self._now = seconds
        return seconds

    def result(self) -> Analysis:
        ranked = sorted(self._groups.values(), key=lambda group: (RANK[group.severity], -group.events, group.first))
        # What the wording allows is worth saying only where no line number says it exactly.
        exact = [(hint, count) for hint, count in self._hints.most_common() if hint.exact]
        return Analysis(self._files, ranked, exact or self._hints.most_common())


def analyze_events(files: Sequence[str], events: Iterable[tuple[int, Event]]) -> Analysis:
    """Group events; each comes with the index of its file."""
    grouping = Grouping(files)
    for file_index, event in events:
        grouping.add(file_index, event)
    return grouping.result()
