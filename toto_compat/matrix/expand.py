"""Environments x caches x modes x settings -> cells, and the selectors that pick among them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path

from packaging.version import Version

from toto_compat.errors import SelectionError
from toto_compat.evidence.schema import CacheRequest, CellRequest
from toto_compat.matrix.document import nearest_name
from toto_compat.matrix.schema import Device, Gate, GateLimit, Matrix, Profile

STOCK_SETTINGS = "stock"


@dataclass(frozen=True)
class Cell:
    """One row of the table: a cache compiled in one mode with one set of settings on one environment."""

    environment_name: str
    cache_name: str
    mode: str
    settings_name: str = STOCK_SETTINGS

    @property
    def identifier(self) -> str:
        suffix = "" if self.settings_name == STOCK_SETTINGS else f"+{self.settings_name}"
        return f"{self.environment_name}/{self.cache_name}/{self.mode}{suffix}"


def expand(matrix: Matrix) -> list[Cell]:
    """Every cell of the matrix, in the order of the file."""
    return [
        Cell(environment_name, cache_name, mode, settings_name)
        for environment_name in matrix.environments
        for cache_name, cache in matrix.caches.items()
        for mode in matrix.modes
        for settings_name in cache.settings
    ]


def select(cells: Sequence[Cell], selectors: Iterable[str]) -> list[Cell]:
    """The cells any selector matches, minus those a `!selector` matches, in their own order.

    Without a positive selector everything is taken. A selector that matches nothing is a mistake, not an empty set.
    """
    selectors = list(selectors)
    wanted = [selector for selector in selectors if not selector.startswith("!")]
    unwanted = [selector.removeprefix("!") for selector in selectors if selector.startswith("!")]
    for selector in (*wanted, *unwanted):
        if not any(_matches(selector, cell) for cell in cells):
            raise _no_match(selector, cells)
    taken = [cell for cell in cells if not wanted or any(_matches(selector, cell) for selector in wanted)]
    kept = [cell for cell in taken if not any(_matches(selector, cell) for selector in unwanted)]
    if taken and not kept:
        raise SelectionError(
            f"nothing is left: {' '.join('!' + selector for selector in unwanted)} excludes every selected cell",
            hint="drop an exclusion, or select more",
        )
    return kept


def default_selection(matrix: Matrix, device: Device) -> list[Cell]:
    """What is run when nothing is asked for.

    On a CPU the newest CPU environment in one mode, the modes differ only in CUDA graphs and autotuning, and with the
    first settings of each cache: a coffee break, not an afternoon.
    With a GPU production's own environment and the newest CUDA release, in all modes.
    """
    newest = _newest_environment(matrix, device)
    if device is Device.CPU:
        mode = "default" if "default" in matrix.modes else matrix.modes[0]
        first = {name: cache.settings[0] for name, cache in matrix.caches.items()}
        on_newest = [cell for cell in expand(matrix) if cell.environment_name == newest and cell.mode == mode]
        return [cell for cell in on_newest if cell.settings_name == first[cell.cache_name]]
    return [cell for cell in expand(matrix) if cell.environment_name in (newest, matrix.production)]


def requested_environments(cells: Iterable[Cell]) -> list[str]:
    """The environments the cells need, each once, in order."""
    return list(dict.fromkeys(cell.environment_name for cell in cells))


def named_profile(matrix: Matrix, profile_name: str) -> Profile:
    """The profile of that name; SelectionError names the nearest one."""
    if profile_name not in matrix.profiles:
        names = list(matrix.profiles)
        raise SelectionError(f"there is no profile {profile_name!r}", hint=_suggest(profile_name, names, "profiles"))
    return matrix.profiles[profile_name]


def gate_limits(matrix: Matrix, profile_name: str) -> dict[Gate, GateLimit]:
    """The limit of every gate under a profile, in the order in which gates decide."""
    limits = {**matrix.gates, **named_profile(matrix, profile_name).gates}
    return {gate: limits[gate] for gate in Gate}


def cell_request(
    matrix: Matrix,
    matrix_path: Path,
    cell: Cell,
    profile_name: str,
    device: Device,
    *,
    work_folder: str,
    checkpoint_folder: str | None = None,
    quiet_lock: str | None = None,
    path_in_cell: Callable[[Path], str] = str,
) -> CellRequest:
    """The request file of a cell.

    `work_folder`, `checkpoint_folder` and `quiet_lock` are as the cell sees them; `path_in_cell` turns the absolute
    host path of a user's cache or CSV file into that. A CPU wheel runs on the CPU whatever `device` says.
    """
    environment = matrix.environments[cell.environment_name]
    profile = named_profile(matrix, profile_name)
    workload = matrix.workloads[profile.workload]
    folder = matrix_path.resolve().parent
    source = matrix.caches[cell.cache_name].source
    if source != "builtin":
        file, _, class_name = source.rpartition(":")
        source = f"{path_in_cell((folder / file).resolve())}:{class_name}"
    csv = workload.csv
    if csv is not None:
        csv = csv.model_copy(update={"path": path_in_cell((folder / csv.path).resolve())})
    return CellRequest(
        cell=cell.identifier,
        environment_name=cell.environment_name,
        environment=environment,
        cache=CacheRequest(name=cell.cache_name, source=source),
        mode=cell.mode,
        settings_name=cell.settings_name,
        settings=matrix.settings[cell.settings_name],
        device=Device.CPU if environment.device is Device.CPU else device,
        profile_name=profile_name,
        profile=profile,
        workload=workload,
        limits=matrix.limits,
        work_folder=work_folder,
        checkpoint_folder=checkpoint_folder,
        csv=csv,
        quiet_lock=quiet_lock,
    )


def _matches(selector: str, cell: Cell) -> bool:
    """`*` crosses slashes, so one glob over the identifier is enough once the short forms are dealt with."""
    if "/" not in selector:
        return fnmatchcase(cell.environment_name, selector)
    if selector.count("/") == 1 and fnmatchcase(f"{cell.environment_name}/{cell.cache_name}", selector):
        return True
    return fnmatchcase(cell.identifier, selector)


def _newest_environment(matrix: Matrix, device: Device) -> str:
    names = [name for name, environment in matrix.environments.items() if environment.device is device]
    if not names:
        raise SelectionError(
            f"the matrix has no {device} environment to take by default",
            hint=f"name what to run, or add one: {', '.join(matrix.environments)} are there",
        )
    # Of two environments with the same release the one with the shorter name is the plain one.
    return max(names, key=lambda name: (Version(matrix.environments[name].torch), -len(name)))


def _no_match(selector: str, cells: Sequence[Cell]) -> SelectionError:
    candidates = [
        *requested_environments(cells),
        *dict.fromkeys(f"{cell.environment_name}/{cell.cache_name}" for cell in cells),
        *(cell.identifier for cell in cells),
    ]
    caches = list(dict.fromkeys(cell.cache_name for cell in cells))
    modes = list(dict.fromkeys(cell.identifier.rpartition("/")[2] for cell in cells))
    message = f"the selector {selector!r} matches no cell"
    # A bare cache or mode name is the likeliest slip: names without a slash are environments.
    if (cache := nearest_name(selector, caches)) is not None:
        return SelectionError(message, hint=f"a name without '/' is an environment; for a cache write '*/{cache}'")
    if (mode := nearest_name(selector, modes)) is not None:
        return SelectionError(message, hint=f"a name without '/' is an environment; for a mode write '*/{mode}'")
    return SelectionError(
        message, hint=_suggest(selector, candidates, "environments", shown=requested_environments(cells))
    )


def _suggest(name: str, candidates: Sequence[str], what: str, *, shown: Sequence[str] = ()) -> str:
    near = get_close_matches(name, candidates, n=3, cutoff=0.5)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"there are these {what}: {', '.join(shown or candidates)}"
