"""Environments x caches x modes x settings x workloads -> the names of cells, and the selectors that pick of them."""

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from packaging.version import Version

from toto_compat.contract.caches import CACHES
from toto_compat.contract.cell_name import CellName
from toto_compat.contract.gate_limit import GateLimit
from toto_compat.contract.request import Device
from toto_compat.errors import EnvironmentBuildError, SelectionError
from toto_compat.matrix.document import nearest_name
from toto_compat.matrix.gates import Gate
from toto_compat.matrix.schema import Matrix, Profile


def expand(matrix: Matrix, profile_name: str) -> list[CellName]:
    """List every cell of the matrix under a profile, in the order of the file, one for each of several workloads."""
    workloads = named_profile(matrix, profile_name).workloads
    return [
        CellName.of(environment_name, cache_name, mode, settings_name, workload if len(workloads) > 1 else "")
        for environment_name in matrix.environments
        for cache_name, cache in matrix.caches.items()
        for mode in matrix.modes
        for settings_name in cache.settings
        for workload in workloads
    ]


def select(
    cells: Sequence[CellName], selectors: Iterable[str], *, only_when_named: Iterable[str] = ()
) -> list[CellName]:
    """Keep the cells that any selector matches, minus those a `!selector` matches, in their own order.

    Without a positive selector everything is taken. A selector that matches nothing is a mistake, not an empty set.
    Cells of the caches in `only_when_named` are taken if a selector asks for that cache, not by one for all caches.
    """
    selectors = list(selectors)
    wanted = [selector for selector in selectors if not selector.startswith("!")]
    unwanted = [selector.removeprefix("!") for selector in selectors if selector.startswith("!")]
    for selector in (*wanted, *unwanted):
        if not any(_matches(selector, cell) for cell in cells):
            raise _no_match(selector, cells)
    matched = [cell for cell in cells if not wanted or any(_matches(selector, cell) for selector in wanted)]
    spared = tuple(only_when_named)
    taken = [cell for cell in matched if cell.cache not in spared or any(_names_its_cache(one, cell) for one in wanted)]
    if matched and not taken:
        caches = ", ".join(dict.fromkeys(cell.cache for cell in matched))
        raise SelectionError(
            f"nothing is left: under this profile {caches} run only when they are named",
            hint=f"name the cache: '{matched[0].environment}/{matched[0].cache}'",
        )
    kept = [cell for cell in taken if not any(_matches(selector, cell) for selector in unwanted)]
    if taken and not kept:
        raise SelectionError(
            f"nothing is left: {' '.join('!' + selector for selector in unwanted)} excludes every selected cell",
            hint="drop an exclusion, or select more",
        )
    return kept


def default_selection(
    matrix: Matrix, device: Device, profile_name: str, left_out: Mapping[str, str] | None = None
) -> list[CellName]:
    """Return what is run when nothing is asked for: with the first settings of each cache, less than an hour.

    On a CPU the newest CPU environment in one mode: the modes differ only in CUDA graphs and autotuning.
    With a GPU production's own environment and the newest release that the GPU can run, that is none of `left_out` (by
    name, with the reason). Caches with a step of their own are tried there in every mode that uses CUDA graphs; those
    in toto-ts's whole model, whose autotuning takes hours, in one mode and on production's environment alone.
    """
    first = {name: cache.settings[0] for name, cache in matrix.caches.items()}
    spared = named_profile(matrix, profile_name).only_when_named
    wanted = [cell for cell in expand(matrix, profile_name) if cell.cache not in spared]
    cells = [cell for cell in wanted if cell.settings == first[cell.cache]]
    newest = _newest_environment(matrix, device, left_out or {})
    if device is Device.CPU:
        mode = "default" if "default" in matrix.modes else matrix.modes[0]
        return [cell for cell in cells if cell.environment == newest and cell.mode == mode]
    production = matrix.production if matrix.production not in (None, *(left_out or ())) else newest
    graph_modes = [mode for mode in matrix.modes if mode != "default"] or matrix.modes
    quicker = "reduce-overhead" if "reduce-overhead" in matrix.modes else matrix.modes[0]

    def is_wanted(cell: CellName) -> bool:
        if is_whole_model(cell):
            return cell.environment == production and cell.mode == quicker
        modes = graph_modes if cell.cache in CACHES else [quicker]  # a user's own may be a whole model
        return cell.environment in (production, newest) and cell.mode in modes

    return in_order_of_interest(cell for cell in cells if is_wanted(cell))


def in_order_of_interest(cells: Iterable[CellName]) -> list[CellName]:
    """Put caches that may PASS first, and what autotunes a whole model last: an answer should not wait for those."""
    return sorted(cells, key=lambda cell: is_whole_model(cell) * (1 + (cell.mode == "max-autotune")))


def is_whole_model(cell: CellName) -> bool:
    """Tell if a cell compiles toto-ts's whole model, of a cache that comes with the package."""
    return cell.cache in CACHES and CACHES[cell.cache].kind == "whole_model"


def requested_environments(cells: Iterable[CellName]) -> list[str]:
    """Name the environments that the cells need, each once, in order."""
    return list(dict.fromkeys(cell.environment for cell in cells))


def named_profile(matrix: Matrix, profile_name: str) -> Profile:
    """Find the profile of that name; SelectionError names the nearest one."""
    if profile_name not in matrix.profiles:
        names = list(matrix.profiles)
        raise SelectionError(f"there is no profile {profile_name!r}", hint=_suggest(profile_name, names, "profiles"))
    return matrix.profiles[profile_name]


def gate_limits(matrix: Matrix, profile_name: str) -> dict[Gate, GateLimit]:
    """Return the limit of every gate that is on under a profile, in the order in which gates decide."""
    defaults = {gate: gate.rule.default for gate in Gate}
    limits = {**defaults, **matrix.gates, **named_profile(matrix, profile_name).gates}
    return {gate: limit for gate in Gate if (limit := limits[gate]) is not None}


def _matches(selector: str, cell: CellName) -> bool:
    """`*` crosses slashes, so one glob over the identifier is enough once the short forms are dealt with.

    A selector without `@` is about all workloads.
    """
    selector, at, workload = selector.partition("@")
    if at and not fnmatchcase(cell.workload, workload):
        return False
    if "/" not in selector:
        return fnmatchcase(cell.environment, selector)
    if selector.count("/") == 1 and fnmatchcase(f"{cell.environment}/{cell.cache}", selector):
        return True
    return fnmatchcase(cell.for_all_workloads, selector)


def _names_its_cache(selector: str, cell: CellName) -> bool:
    """Tell whether a selector asks for the cell's cache: it matches, and would not if the cache were another."""
    other = CellName.of(cell.environment, "-", cell.mode, cell.settings, cell.workload)
    return _matches(selector, cell) and not _matches(selector, other)


def _newest_environment(matrix: Matrix, device: Device, left_out: Mapping[str, str]) -> str:
    names = [name for name, environment in matrix.environments.items() if environment.device is device]
    if not names:
        raise SelectionError(
            f"the matrix has no {device} environment to take by default",
            hint=f"name what to run, or add one: {', '.join(matrix.environments)} are there",
        )
    if all(name in left_out for name in names):
        raise EnvironmentBuildError(
            f"no {device} environment of the matrix runs on this machine:\n    "
            + "\n    ".join(f"{name}: {left_out[name]}" for name in names),
            hint="update the driver, or add an environment for this GPU to matrix.yaml; or run with --device cpu",
        )
    runnable = [name for name in names if name not in left_out]
    # Of two environments with the same release the one with the shorter name is the plain one.
    return max(runnable, key=lambda name: (Version(matrix.environments[name].torch), -len(name)))


def _no_match(selector: str, cells: Sequence[CellName]) -> SelectionError:
    candidates = [
        *requested_environments(cells),
        *dict.fromkeys(f"{cell.environment}/{cell.cache}" for cell in cells),
        *cells,
    ]
    caches = list(dict.fromkeys(cell.cache for cell in cells))
    modes = list(dict.fromkeys(cell.mode_and_settings for cell in cells))
    message = f"the selector {selector!r} matches no cell"
    if "/" not in selector:  # a bare cache or mode name is the likeliest slip: names without a slash are environments
        for what, names in (("cache", caches), ("mode", modes)):
            if (near := nearest_name(selector, names)) is not None:
                hint = f"a name without '/' is an environment; for a {what} write '*/{near}'"
                return SelectionError(message, hint=hint)
    return SelectionError(
        message, hint=_suggest(selector, candidates, "environments", shown=requested_environments(cells))
    )


def _suggest(name: str, candidates: Sequence[str], what: str, *, shown: Sequence[str] = ()) -> str:
    near = get_close_matches(name, candidates, n=3, cutoff=0.5)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"there are these {what}: {', '.join(shown or candidates)}"
