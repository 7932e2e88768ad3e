"""Finding the place where something changes along a row of releases, with few looks and some that fail.

The search sees states only: what makes two of them differ is the caller's. It keeps one invariant, two releases whose
states are known and differ, and halves what lies between them; so it ends at a real change whatever the rest is like.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise


class Unseen(Enum):
    """A place in the row without a state."""

    UNKNOWN = "unknown"  # nobody looked yet
    SKIPPED = "skipped"  # somebody looked and there was nothing to see: it does not install, or nothing was decided


State = Hashable | Unseen


@dataclass(frozen=True)
class Probe:
    """Look here next."""

    at: int


@dataclass(frozen=True)
class Found:
    """The state changes between `before` and `after`; what lies between them could not be looked at."""

    before: int
    after: int
    skipped: tuple[int, ...] = ()
    others: tuple[tuple[int, int], ...] = ()  # further changes that are known of: the row is not monotone


@dataclass(frozen=True)
class NoChange:
    """Both ends have one state. A change and its undoing between them would not have been seen."""

    first: int
    last: int
    unseen: tuple[int, ...] = ()


@dataclass(frozen=True)
class NothingToCompare:
    """Fewer than two places could be looked at."""

    skipped: tuple[int, ...] = field(default=())


Step = Probe | Found | NoChange | NothingToCompare


def next_step(states: Sequence[State]) -> Step:
    """Say where to look next, or what was found. What is known counts first: the ends are looked at only if nothing
    that is known differs. Of several changes the first is followed."""
    known = [place for place, state in enumerate(states) if not isinstance(state, Unseen)]
    changes = [pair for pair in pairwise(known) if states[pair[0]] != states[pair[1]]]
    if changes:
        before, after = changes[0]
        between = [place for place in range(before + 1, after) if states[place] is Unseen.UNKNOWN]
        if not between:
            return Found(before, after, tuple(range(before + 1, after)), tuple(changes[1:]))
        return Probe(nearest_to_the_middle(between, before, after))
    for end in (_first_seen(states), _last_seen(states)):
        if end is not None and states[end] is Unseen.UNKNOWN:
            return Probe(end)
    if len(known) < 2:
        return NothingToCompare(tuple(place for place, state in enumerate(states) if state is Unseen.SKIPPED))
    unseen = tuple(place for place in range(known[0], known[-1]) if isinstance(states[place], Unseen))
    return NoChange(known[0], known[-1], unseen)


def nearest_to_the_middle(places: Sequence[int], before: int, after: int) -> int:
    """The place that halves what is left; beside one that was skipped the next nearest."""
    return min(places, key=lambda place: (abs(2 * place - before - after), place))


def _first_seen(states: Sequence[State]) -> int | None:
    return next((place for place, state in enumerate(states) if state is not Unseen.SKIPPED), None)


def _last_seen(states: Sequence[State]) -> int | None:
    return next((place for place in reversed(range(len(states))) if states[place] is not Unseen.SKIPPED), None)
