"""What a production log shows of an incident: its events, and what they let one guess about where they came from."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from toto_compat.contract.events import Event, EventKind, Severity
from toto_compat.environments.torch_sources.log_lines import FILES
from toto_compat.errors import InputError
from toto_compat.logs.parse import Readable, parse_stream
from toto_compat.logs.release_hint import Candidate, release_candidates
from toto_compat.logs.source import STANDARD_INPUT, explained, opened_log
from toto_compat.production.torch_trace import is_trace_folder, trace_events
from toto_compat.repro.expected import limits_in

# What is said of the compiler's work, and not of how it was set up.
_SHOWN = frozenset(EventKind) - {EventKind.COMPILE_SETTING, EventKind.BUCKET_COMPILE, EventKind.BUCKET_DROP}
_RANK = {Severity.ERROR: 0, Severity.WARNING: 1, Severity.INFO: 2}
_MOST_KINDS = 2_000  # of events that are told apart; a log of any length stays within memory
_MOST_TOLD_APART = 64  # of limits, and of lines that say how the service compiles
_SETTING = re.compile(r"(?P<name>\w+)=(?P<value>[\w.-]+)")
_LIST_GUARD = re.compile(r"\._current_idx\[\d+\] [=!<>]=? \d+")
_SCALAR = "_local_scalar_dense"
_PYTHON = re.compile(rb"/python(3\.\d{1,2})/(?:site|dist)-packages/")


@dataclass(frozen=True)
class Guess:
    """Something that the log does not say outright: what it is taken for, and why."""

    value: str
    because: str
    sure: bool = False


@dataclass(frozen=True)
class SeenEvent:
    """One thing that the compiler did, how often it is in the log, and the event that says most about it."""

    example: Event
    times: int


@dataclass(frozen=True)
class Seen:
    """All that a log shows."""

    log: str
    events: tuple[SeenEvent, ...]  # worst first
    settings: tuple[tuple[str, str], ...]  # of the newest 'Using torch.compile for ...' line
    releases: tuple[Candidate, ...]
    python: str  # '3.13', from the paths in it; '' where none names it
    first_time: str
    buckets: bool  # lines of fixed_size's own
    limits: Mapping[str, tuple[int, ...]]  # that were hit, by the setting that each is
    unplaced: tuple[str, ...] = ()  # places in torch that no known release logs such a line from
    several: tuple[str, ...] = ()  # what speaks for more than one incident in it

    def setting(self, name: str) -> str:
        return dict(self.settings).get(name, "")


def read_log(path: str) -> Seen:
    """Read a log, packed or not, standard input or a folder of TORCH_TRACE; InputError where it shows no event."""
    name = STANDARD_INPUT if path == "-" else path
    pythons: Counter[str] = Counter()
    found = _Found()
    if is_trace_folder(path):
        found.add(trace_events(Path(path), name))
    else:
        with opened_log(path, name) as stream:
            watched = _Watched(stream, pythons)
            found.add(parse_stream(watched, name))
    if not found.kinds and not found.settings:
        raise InputError(
            f"{name}: no line of it is about the compiler: there is nothing to reproduce",
            hint='run the service with TORCH_LOGS="recompiles,graph_breaks,cudagraphs" and give its log; '
            "`toto-compat analyze --kinds` lists the lines that are known",
        )
    if not found.kinds:
        raise InputError(
            f"{name}: it says that torch.compile is used, and nothing that the compiler did",
            hint='run the service with TORCH_LOGS="recompiles,graph_breaks,cudagraphs" and give its log',
        )
    python = pythons.most_common(1)[0][0] if pythons else ""
    return found.seen(name, python)


class _Watched:
    """Passes a log on and looks for paths that name the interpreter."""

    def __init__(self, stream: Readable, pythons: Counter[str]) -> None:
        self._stream, self._pythons = stream, pythons

    def readinto(self, buffer: memoryview, /) -> int | None:
        got = self._stream.readinto(buffer)
        for found in _PYTHON.finditer(buffer[: got or 0]):
            self._pythons[found[1].decode()] += 1
        return got


class _Found:
    """Gathers events as they come: one example and a count for each that differs."""

    def __init__(self) -> None:
        self.kinds: dict[tuple[str, str, str], SeenEvent] = {}
        self.settings: tuple[tuple[str, str], ...] = ()
        self._places: dict[tuple[str, EventKind], Event] = {}
        self._times: list[str] = []
        self._days: set[str] = set()  # without their year, which not every line has
        # in the order of the log
        self._setups: dict[str, None] = {}
        self._limits: dict[tuple[str, int], None] = {}
        self._buckets = False

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            if event.time and (not self._times or self._times[0].startswith("--")):
                # one with a year says more than the first
                self._times[:] = [event.time] if not event.time.startswith("--") or not self._times else self._times
            if event.time:
                self._days.add(event.time.partition("T")[0][-5:])
            if event.kind is EventKind.COMPILE_SETTING:
                self.settings = tuple((one["name"], one["value"]) for one in _SETTING.finditer(event.reason))
                if len(self._setups) < _MOST_TOLD_APART:
                    self._setups[event.reason] = None
            hit = event.limit if event.kind is EventKind.RECOMPILE_LIMIT else None
            if hit is not None and len(self._limits) < _MOST_TOLD_APART:
                self._limits[event.limit_name, hit] = None
            self._buckets = self._buckets or event.kind in (EventKind.BUCKET_COMPILE, EventKind.BUCKET_DROP)
            if event.kind not in _SHOWN:
                continue
            if event.logged_from:
                self._places.setdefault((event.logged_from, event.kind), event)
            self._count(event)

    def _count(self, event: Event) -> None:
        key = (event.kind.value, event.function, event.normalised_reason)
        before = self.kinds.get(key)
        if before is None and len(self.kinds) >= _MOST_KINDS:
            return
        example = event if before is None or _says(event) > _says(before.example) else before.example
        self.kinds[key] = SeenEvent(example, (before.times if before else 0) + 1)

    def seen(self, log: str, python: str) -> Seen:
        told = list(_without_shortened(list(self.kinds.values())))
        ranked = sorted(told, key=lambda one: _RANK[one.example.severity])
        examples = [*self._places.values(), *(one.example for one in ranked)]
        releases = release_candidates(examples)
        several = [*self._several(ranked)]
        if releases and releases[0].contradicts:
            several.append(f"lines of another release than {releases[0].release}")
        return Seen(
            log=log,
            events=tuple(ranked),
            settings=self.settings,
            releases=tuple(releases),
            python=python,
            first_time=self._times[0] if self._times else "",
            buckets=self._buckets,
            limits=limits_in(self._limits),
            unplaced=tuple(self._unplaced()),
            several=tuple(several),
        )

    def _unplaced(self) -> Iterator[str]:
        for (place, _), event in self._places.items():
            if place.rpartition(":")[0] in FILES and not any(one.fits for one in release_candidates([event])):
                yield place

    def _several(self, events: Sequence[SeenEvent]) -> Iterator[str]:
        """Say what no one process shows, so that the log may be of more than one incident."""
        if len(self._days) > 1:
            yield f"events of {len(self._days)} days"
        if len(self._setups) > 1:
            yield f"{len(self._setups)} ways to compile: {'; '.join(self._setups)}"
        for setting, limits in limits_in(self._limits).items():
            if len(limits) > 1:
                yield f"{setting} at {' and at '.join(map(str, limits))}"
        reasons = [one.example.reason for one in events]
        if any(_LIST_GUARD.search(reason) for reason in reasons) and any(_SCALAR in reason for reason in reasons):
            yield "guards on a list of positions and positions that are tensors, which no one cache has"


def _says(event: Event) -> int:
    """Count what an event says; of two that are the same, the one that says more is kept."""
    return sum(bool(value) for value in (event.file, event.line, event.compile_id, event.reason, event.logged_from))


def _without_shortened(events: Sequence[SeenEvent]) -> Iterator[SeenEvent]:
    """Leave out what another event of the kind says with more: 'hit recompile_limit (8)' without function or reason."""
    for one in events:
        mine = one.example
        if (
            mine.function
            or mine.reason
            or not any(
                other is not one
                and other.example.kind is mine.kind
                and (other.example.function or other.example.reason)
                for other in events
            )
        ):
            yield one


def read_log_or_explain(path: str) -> Seen:
    """Read a log; whatever is wrong with the file itself is told as for `analyze`."""
    if not path:
        raise InputError("no log is named", hint="--from-log FILE, or - for standard input")
    if is_named_pipe(Path(path)):
        raise InputError(f"{path}: a pipe, which would be waited for", hint="give it as standard input: --from-log -")
    with explained(path):
        return read_log(path)


def is_named_pipe(path: Path) -> bool:
    """Tell of a pipe or socket that lies in a folder; what a shell writes as <(command) is read like a file."""
    shell = path.is_absolute() and path.parts[1] in ("dev", "proc")
    try:
        return path.exists() and not (shell or path.is_file() or path.is_dir())
    except OSError:  # whoever reads it says what is wrong with it
        return False


# --- what the events let one guess ------------------------------------------------------------------------------------


def guess_cache(seen: Seen) -> Guess:
    """Name the cache that shows such events, by the guards and operations that its code leads to."""
    reasons = [reason for one in seen.events for reason in (one.example.reason, *one.example.reasons)]
    stacks = " ".join(frame for one in seen.events for frame in one.example.stack)
    guard = next((one for one in reasons if _LIST_GUARD.search(one)), "")
    if guard:
        return Guess("list_index", f"`{guard}` is a guard on a Python list of positions, one per layer", sure=True)
    if seen.buckets:
        return Guess("fixed_size", "its own lines about shapes that it compiles are in the log", sure=True)
    if any(_SCALAR in one for one in reasons):
        return Guess("compile_friendly", "`aten._local_scalar_dense` in a graph is a tensor position that was captured")
    if any("graph_break()" in one for one in reasons) and ("append" in stacks or "item()" in " ".join(reasons)):
        return Guess("compile_friendly", "it breaks the graph on purpose where the position moves")
    if any("item()" in one for one in reasons):
        return Guess("upstream", "a graph break at Tensor.item() is how toto-ts reads its position")
    return Guess("upstream", "no line tells the cache: toto-ts's own is taken")


def guess_scalar_capture(seen: Seen) -> Guess | None:
    """Tell whether scalars were captured; None where no line speaks of it."""
    for one in seen.events:
        if _SCALAR in one.example.reason:
            return Guess("true", f"`{one.example.reason}`: without scalar capture the operation is not in a graph")
    return None


def how_sure(releases: Sequence[Candidate]) -> str:
    """Say in a few words how far the first candidate can be trusted."""
    if not releases:
        return "nothing in the log tells it"
    best = releases[0]
    alike = [one.release for one in releases if (one.fits, one.contradicts) == (best.fits, best.contradicts)]
    places = " and ".join(best.fits)
    if not best.fits:
        return f"only the wording tells: any of {alike[0]} to {alike[-1]}"
    if best.contradicts:
        return f"likely: {places} fit, {' and '.join(best.contradicts)} do not: two releases in one log?"
    if len(alike) == 1:
        return f"certain: no other known release logs from {places}"
    return f"one of {len(alike)}: {', '.join(alike)} all log from {places}"
