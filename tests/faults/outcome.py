"""What a campaign tells of each injected fault, and the places where it is injected."""

import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from tests.faults.trial import CACHES, MODES, Damage, Trial

NOTHING = Damage()


@dataclass(frozen=True)
class Outcome:
    """One injected fault: where it hit, what happened then, and what was lost by it."""

    moment: str
    happened: str
    damage: Damage = NOTHING
    not_run: str = ""  # why it was not injected at all; then the rest says nothing


@dataclass
class Campaign:
    """Where trials live, and how many moments each fault gets."""

    folder: Path
    shim: Path
    seed: int
    moments: int
    _made: int = 0
    _calls: dict[str, list[str]] = field(default_factory=dict)  # of a run in virtualenvs, and of one in containers

    def random(self, fault: str) -> random.Random:
        """The same moments for the same seed, whichever other faults are tried."""
        return random.Random(f"{self.seed} {fault}")  # noqa: S311 - a campaign is repeated by its seed

    @contextmanager
    def trial(self, **given: object) -> Iterator[Trial]:
        """Make a project that is gone afterwards."""
        self._made += 1
        trial = Trial(self.folder / f"t{self._made}", self.shim, **given)  # type: ignore[arg-type]
        try:
            yield trial
        finally:
            trial.remove()

    def calls(self, containers: dict[str, str] | None = None) -> Sequence[str]:
        """List the calls of an undisturbed run that change files of ours, in order."""
        runtime = "containers" if containers else "virtualenvs"
        if runtime not in self._calls:
            with self.trial(containers=containers or {}) as trial:
                ended = trial.start(fault={}).wait()
                assert ended.code == 0, ended.said
                calls = trial.calls.read_text(encoding="utf-8").splitlines()
                self._calls[runtime] = [call.replace(str(trial.folder), "") for call in calls]
        return self._calls[runtime]

    def moments_of(
        self,
        fault: str,
        wanted: Callable[[str], bool] = lambda _: True,
        containers: dict[str, str] | None = None,
    ) -> list[int]:
        """Draw numbers of calls, from 1, spread over the run: one from each of equal parts of those wanted.

        Of the hundreds that copy the source one of each kind counts: they would be half of all moments."""
        numbers, kinds = list[int](), set[str]()
        for number, call in enumerate(self.calls(containers), 1):
            kind = kind_of(call)
            if wanted(call) and not (kind in kinds and kind.endswith("/sources")):
                numbers.append(number)
            kinds.add(kind)
        draw = self.random(fault)
        count = min(self.moments, len(numbers))
        edges = [round(part * len(numbers) / count) for part in range(count + 1)]
        return [numbers[draw.randrange(low, high)] for low, high in pairwise(edges)]

    def one_of_each_kind(self, fault: str, wanted: Callable[[str], bool] = lambda _: True) -> list[int]:
        """Draw the number of one call of each kind: all that is done to every file; in a short campaign only some."""
        if self.moments == 1:
            return self.moments_of(fault, wanted)
        by_kind: defaultdict[str, list[int]] = defaultdict(list)
        for number, call in enumerate(self.calls(), 1):
            if wanted(call):
                by_kind[kind_of(call)].append(number)
        draw = self.random(fault)
        return sorted(draw.choice(numbers) for numbers in by_kind.values())


# What is of one run, one process or one cell in the name of a file
_OF_ONE = re.compile(r"-\d+\.\d+\.[0-9a-f]{8}-\w*|\d{4}-\d\d-\d\dT[\d-]+|\b[0-9a-f]{8,64}\b|(?<=/)[0-9a-f]{2}(?=/|$)")
_CACHE_OR_MODE = re.compile("|".join((*CACHES, *MODES)))


def kind_of(call: str) -> str:
    """Name what is done to which file of a run, whichever cell it is of; the copy of the source is one file."""
    what, _, path = call.partition(" ")
    before, copied, _ = path.partition("/sources/")
    return f"{what} {before}/sources" if copied else f"{what} {_CACHE_OR_MODE.sub('_', _OF_ONE.sub('', path))}"


ENDED_BEFORE = "the run had ended before that call"
Fault = Callable[[Campaign], Iterator[Outcome]]


def named(call: str) -> str:
    """Shorten a call for a table: what is done to which file."""
    what, _, path = call.partition(" ")
    return f"{what} {'/'.join(Path(path).parts[-2:])}"
