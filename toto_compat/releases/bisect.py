"""`toto-compat bisect`: the release at which a gate flips, crosses a limit, or its figure changes at all."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path

from packaging.version import Version

from toto_compat.contract.cell_name import CellName
from toto_compat.contract.request import CellRequest, Device
from toto_compat.errors import EnvironmentBuildError, SelectionError, TotoCompatError
from toto_compat.evidence.store import CellStore
from toto_compat.matrix.asked import Asked
from toto_compat.matrix.expand import expand, named_profile, select
from toto_compat.matrix.gates import Gate
from toto_compat.matrix.request import matrix_request
from toto_compat.matrix.schema import Matrix
from toto_compat.releases.observation import Criterion, Observation, observe
from toto_compat.releases.running import run_cells
from toto_compat.releases.search import Found, NoChange, NothingToCompare, Probe, State, Unseen, next_step
from toto_compat.runtimes.seam import Runtime

PROFILE = "bisect"  # a profile with the suites that the gate needs and no other; matrix.yaml may not have one so called

Look = Callable[[str], Observation]  # a release in, what was seen of it out


@dataclass(frozen=True)
class Question:
    """One cache, mode and settings along the releases of the matrix, through one gate."""

    matrix: Matrix  # with the profile PROFILE
    matrix_path: Path
    criterion: Criterion
    device: Device
    cells: Mapping[str, tuple[CellName, ...]]  # by release, oldest first; several environments may have one release
    good: str | None = None  # what the user takes the ends for
    bad: str | None = None
    whole_index: bool = False  # releases of the index that the matrix lacks are among them

    @property
    def releases(self) -> tuple[str, ...]:
        return tuple(self.cells)

    def request(self, cell: CellName) -> CellRequest:
        return matrix_request(self.matrix, self.matrix_path, cell, PROFILE, self.device)

    @property
    def requests(self) -> dict[CellName, CellRequest]:
        return {cell: self.request(cell) for cells in self.cells.values() for cell in cells}


@dataclass
class Search:
    """A search under way: what is known of each release, and in which order it was looked at."""

    releases: tuple[str, ...]
    seen: dict[str, Observation] = field(default_factory=dict)
    path: list[Observation] = field(default_factory=list)  # looks that were taken for this search

    @property
    def states(self) -> list[State]:
        return [_state(self.seen.get(release)) for release in self.releases]

    def note_stored(self, seen: Observation) -> None:
        """Keep what an earlier run left; the newest run of a release comes first and counts."""
        if seen.release in self.releases:
            self.seen.setdefault(seen.release, seen)

    def follow(self, look: Look) -> Found | NoChange | NothingToCompare:
        """Look where the search says until it has an answer."""
        while isinstance(step := next_step(self.states), Probe):
            release = self.releases[step.at]
            self.seen[release] = look(release)
            self.path.append(self.seen[release])
        return step


def _state(seen: Observation | None) -> State:
    if seen is None:
        return Unseen.UNKNOWN
    return Unseen.SKIPPED if seen.state is None else seen.state


# --- the question -----------------------------------------------------------------------------------------------------


def ask(
    matrix: Matrix,
    matrix_path: Path,
    selector: str,
    criterion: Criterion,
    *,
    profile: str,
    device: Device,
    good: str | None,
    bad: str | None,
) -> Question:
    """Make a question of the command line; what does not name one cell along several releases is told."""
    own = narrowed(matrix, profile, criterion.gate)
    cells = _selected(own, selector)
    kinds = {(cell.cache, cell.mode, cell.settings, cell.workload) for cell in cells}
    if len(kinds) > 1:
        told = ", ".join(sorted({cell.partition("/")[2] for cell in cells}))
        raise SelectionError(
            f"{selector!r} names several rows: {told}", hint="bisect follows one cache in one mode: upstream/default"
        )
    _check_that_it_decides(criterion.gate, cells[0], device)
    by_release: dict[str, list[CellName]] = {}
    for cell in cells:
        by_release.setdefault(matrix.environments[cell.environment].torch, []).append(cell)
    known = sorted(by_release, key=Version)
    good, bad = _as_named(good, known), _as_named(bad, known)
    releases = _between(known, good, bad)
    # a CPU build is a tenth of a CUDA build's size, and on a CPU it is the same code
    ordered = {
        release: tuple(
            sorted(
                by_release[release],
                key=lambda cell: (matrix.environments[cell.environment].device != device, len(cell)),
            )
        )
        for release in releases
    }
    return Question(own, matrix_path, criterion, device, ordered, good, bad)


def _check_that_it_decides(gate: Gate, cell: CellName, device: Device) -> None:
    """Refuse a gate that has nothing to say here before environments are built for it, release after release."""
    rule = gate.rule
    if rule.only_on not in (None, device):
        raise SelectionError(f"{gate.value} decides nothing on {device.value}: {rule.elsewhere}", hint=_OTHER_GATE)
    if cell.mode in rule.not_in_modes:
        raise SelectionError(f"{gate.value} decides nothing there: {rule.in_those_modes}", hint="name another mode")


_OTHER_GATE = "bisect a gate that does, or look on another device with --device"


def narrowed(matrix: Matrix, profile_name: str, gate: Gate) -> Matrix:
    """The matrix with a profile that runs the gate's suite on the first workload of another, and nothing else.

    No limit holds in it: a cell must not stop counting at one of matrix.yaml's, which may not be what is asked.
    """
    if gate.rule.suite.rule.needs_symbols:
        raise SelectionError(
            f"{gate.value} is about series of yours, which bisect has none of",
            hint="`toto-compat matrix --data` tries them on the releases that you name",
        )
    profile = named_profile(matrix, profile_name)
    own = profile.model_copy(
        update={
            "suites": (gate.rule.suite,),
            "workloads": profile.workloads[:1],
            "unannounced_shapes": False,
            "repeats": 1,
            "only_when_named": (),
            "gates": dict.fromkeys(Gate),
        }
    )
    return matrix.model_copy(update={"profiles": {**matrix.profiles, PROFILE: own}})


def _selected(matrix: Matrix, selector: str) -> list[CellName]:
    cells = expand(matrix, PROFILE)
    rows = [cell for cell in cells if fnmatchcase(cell.partition("/")[2], selector)]
    # `upstream/default` is the natural thing to say here, where the environment is what is searched
    return rows or select(cells, [selector])


def _as_named(end: str | None, releases: Sequence[str]) -> str | None:
    """Name an end as the matrix does, which has 2.9.0 where somebody says 2.9."""
    return next((one for one in releases if end and Version(one) == Version(end)), end)


def _between(releases: Sequence[str], good: str | None, bad: str | None) -> list[str]:
    ends = sorted((one for one in (good, bad) if one), key=Version)
    for end in ends:
        if end not in releases:
            raise SelectionError(
                f"the matrix has no environment with torch {end} among these cells",
                hint=f"it has {', '.join(releases)}; `toto-compat releases --add {end}` adds one",
            )
    if good and bad:
        low, high = ends[0], ends[-1]
    else:
        low, high = good or releases[0], bad or releases[-1]
    chosen = [one for one in releases if Version(low) <= Version(one) <= Version(high)]
    if len(chosen) < 2:
        raise SelectionError(
            f"only torch {', '.join(chosen)} is between the ends", hint="a change needs two releases at least"
        )
    return chosen


# --- looking ----------------------------------------------------------------------------------------------------------


def look_by_running(
    question: Question, release: str, *, runtime: Runtime, store: CellStore, results: Path
) -> Observation:
    """Build the environment of a release and run its cell. What cannot be built or run is skipped, with the reason."""
    cell = question.cells[release][0]
    environment = question.matrix.environments[cell.environment]

    def skipped(why: str) -> Observation:
        return Observation(environment.torch, cell.environment, "run now", None, f"skipped: {why}")

    asked = Asked((cell,), profile=PROFILE, jobs=1, run=cell.environment, results=results)
    try:
        [stored] = run_cells(
            question.matrix,
            question.matrix_path,
            [cell],
            asked,
            device=question.device,
            runtime=runtime,
            store=store,
        ).cells
    except EnvironmentBuildError as error:
        return skipped(f"it does not install: {_line(error)}")
    seen = observe(stored, question.criterion, "from the store" if stored.reused else "run now")
    return seen if seen.state is not None else replace(seen, why=f"skipped: {seen.why}")


def _line(error: TotoCompatError) -> str:
    lines = [line.strip() for line in error.message.splitlines() if line.strip()]
    return " ".join([lines[0], *lines[-1:]]) if len(lines) > 1 else lines[0]
