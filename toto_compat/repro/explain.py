"""What ends an incident: one thing is changed at a time, and the smallest change without the symptom is named."""

import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tabulate import tabulate

from toto_compat.contract.request import CellRequest, CompileSettings
from toto_compat.contract.suites import Suite
from toto_compat.errors import SelectionError, TotoCompatError
from toto_compat.evidence.files import cache_folder
from toto_compat.evidence.store import CellStore
from toto_compat.matrix.document import nearest_name
from toto_compat.matrix.schema import Matrix
from toto_compat.repro.incident import Expectation, Incident, wanted
from toto_compat.repro.outcome import Reproduction, symptom_left
from toto_compat.repro.pins import is_pinned
from toto_compat.repro.reproduce import reproduce_in
from toto_compat.runtimes.open import RuntimeName, open_runtime
from toto_compat.runtimes.plan import estimate, key_of
from toto_compat.runtimes.progress import say
from toto_compat.runtimes.seam import BuildNeeds, Runtime
from toto_compat.verdict.judge import one_line

# From the smallest change of a running service to the largest.
AXES: Mapping[str, str] = {
    "settings": "what is set around torch.compile",
    "dynamic": "the time dimension marked dynamic",
    "mode": "the compile mode",
    "precision": "the precision of weights or autocast",
    "cache": "the KV cache",
    "release": "the torch release",
}
ALL_AXES = "all"
_PRECISIONS: tuple[dict[str, str | None], ...] = (
    {"dtype": "float32", "autocast": None},
    {"dtype": "bfloat16", "autocast": None},
    {"dtype": "float64", "autocast": None},
    {"dtype": "float32", "autocast": "bfloat16"},
    {"dtype": "float32", "autocast": "float16"},
)
_SETTINGS = ("capture_scalar_outputs", "recompile_limit", "accumulated_recompile_limit")

Ask = Callable[[Incident], CellRequest]


@dataclass(frozen=True)
class Variant:
    """The incident with one thing changed."""

    axis: str
    change: str
    incident: Incident


@dataclass(frozen=True)
class PlannedVariant:
    """A variant with what it takes: `cost` in seconds, 0 if its result is stored; `obstacle` says why it cannot run.

    `build` is what its environment takes where that is not there; others may have the same one.
    """

    variant: Variant
    request: CellRequest | None
    cost: float = 0.0
    stored: str = ""
    build: BuildNeeds | None = None
    obstacle: str = ""

    @property
    def seconds(self) -> float:
        return self.cost + (self.build.seconds if self.build else 0.0)

    @property
    def state(self) -> str:
        if self.obstacle:
            return self.obstacle
        if self.stored:
            return f"stored {self.stored}"
        build = "its environment is to be built, then " if self.build else ""
        return f"{build}to run, about {self.seconds:.0f} s"


@dataclass(frozen=True)
class Row:
    """One variant and what became of the symptom. `ends` None: that cannot be said."""

    variant: Variant
    ends: bool | None
    told: str
    reproduction: Reproduction | None = None


@dataclass(frozen=True)
class Explanation:
    """The incident as it is, and every change that was tried."""

    base: Reproduction
    rows: tuple[Row, ...]
    not_tried: tuple[PlannedVariant, ...] = ()

    @property
    def enders(self) -> tuple[Row, ...]:
        """List the changes that end it, the smallest first."""
        order = list(AXES)
        ending = [row for row in self.rows if row.ends]
        return tuple(sorted(ending, key=lambda row: (order.index(row.variant.axis), _recompiles(row) or 0)))


def axes_of(text: str) -> tuple[str, ...]:
    """Read the axes that --explain names; 'all' is every one of them, as far as nothing has to be built for it."""
    if text == ALL_AXES:
        return tuple(AXES)
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in AXES:
            near = nearest_name(name, AXES)
            hint = (
                f"did you mean {near}?" if near else f"there are {', '.join(AXES)}; the incident comes before --explain"
            )
            raise SelectionError(f"--explain: there is no axis {name!r}", hint=hint)
    if not names:
        raise SelectionError("--explain names no axis", hint=f"there are {', '.join(AXES)}; without a name all of them")
    return tuple(axis for axis in AXES if axis in names)


def explain(
    incident: Incident,
    ask: Ask,
    runtime_name: RuntimeName,
    matrix: Matrix,
    axes: Sequence[str],
    *,
    builds: bool = False,
    dry_run: bool = False,
) -> Explanation | None:
    """Run the incident and its variants, stored evidence first; the plan is printed before anything is run.

    Every cell is stored when it ends, so that a run that was broken off goes on where it was. With `builds` also in
    environments of other releases that are not there.
    """
    request = ask(incident)
    runtime = open_runtime(runtime_name, limits=matrix.limits, device=request.device, say=say)
    store = CellStore(cache_folder() / "evidence")
    base = plan_variant(Variant("", "the incident itself", incident), request, runtime, store)
    found = variants(incident, request, matrix, axes)
    planned = plan_variants(found, ask, runtime, store, builds=builds, built_before=request.cell.environment)
    planned = within_the_disk(base, planned, free_disk(runtime))
    say(plan_text(base, planned))
    if dry_run:
        return None
    as_it_is = reproduce_in(runtime, store, incident, request, matrix, stored_first=True)
    left_out = tuple(one for one in planned if one.request is None or one.obstacle)
    if not as_it_is.symptoms:
        return Explanation(as_it_is, (), left_out)
    rows = [try_variant(one, as_it_is, runtime, store, matrix) for one in planned if one.request and not one.obstacle]
    return Explanation(as_it_is, tuple(rows), left_out)


def variants(incident: Incident, request: CellRequest, matrix: Matrix, axes: Sequence[str]) -> Iterator[Variant]:
    """Yield every change of one thing that the matrix knows of, on the axes that are wanted."""
    makers: Mapping[str, Callable[[], Iterator[tuple[str, dict[str, Any]]]]] = {
        "settings": lambda: _other_settings(incident.settings, matrix),
        "dynamic": lambda: _other_dynamic(incident.settings),
        "mode": lambda: ((f"mode {mode}", {"mode": mode}) for mode in matrix.modes if mode != incident.mode),
        "precision": lambda: _other_precisions(incident),
        "cache": lambda: ((f"cache {name}", {"cache": name}) for name in matrix.caches if name != request.cell.cache),
        "release": lambda: _other_releases(request, matrix),
    }
    for axis in axes:
        for change, update in makers[axis]():
            yield Variant(axis, change, incident.model_copy(update=update))


def _other_settings(own: CompileSettings, matrix: Matrix) -> Iterator[tuple[str, dict[str, Any]]]:
    """Change one setting at a time, to what a set of the matrix has it at."""
    told = set()
    for settings in matrix.settings.values():
        for name in _SETTINGS:
            value = getattr(settings, name)
            if value == getattr(own, name) or (name, value) in told:
                continue
            if name == "accumulated_recompile_limit" and own.accumulated_recompile_limit is None:
                continue  # torch's own is as high already
            told.add((name, value))
            shown = "torch's own" if value is None else str(value).lower()
            yield f"{name} {shown}", {"settings": own.model_copy(update={name: value})}


def _other_dynamic(own: CompileSettings) -> Iterator[tuple[str, dict[str, Any]]]:
    change = "mark_dynamic off" if own.mark_dynamic else "mark_dynamic on"
    yield change, {"settings": own.model_copy(update={"mark_dynamic": not own.mark_dynamic})}


def _other_precisions(incident: Incident) -> Iterator[tuple[str, dict[str, Any]]]:
    for precision in _PRECISIONS:
        workload = incident.workload.model_copy(update=precision)
        if workload.precision != incident.workload.precision:
            yield workload.precision, {"workload": workload}


def _other_releases(request: CellRequest, matrix: Matrix) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every environment with another torch, one of each release: its CPU build, where there is one.

    What a CUDA build predicted is asked of CUDA builds.
    """
    own = request.environment.torch
    lowers = Suite.CUDA_LOWERING in request.profile.suites
    by_release: dict[str, str] = {}
    for name, environment in matrix.environments.items():
        is_preferred = (environment.build == "cpu") is not lowers
        if environment.torch != own and (environment.torch not in by_release or is_preferred):
            by_release[environment.torch] = name
    for name in by_release.values():
        yield f"environment {name}", {"environment": name, "pins": None}


def plan_variants(
    found: Iterator[Variant], ask: Ask, runtime: Runtime, store: CellStore, *, builds: bool, built_before: str = ""
) -> list[PlannedVariant]:
    """Say what each variant takes, the cheapest first: stored, quick, or with an environment to be built.

    The environment `built_before` is there by then, as the incident itself is run in it first.
    """
    planned = []
    for variant in found:
        try:
            request = ask(variant.incident)
            is_built = request.cell.environment == built_before
            one = plan_variant(variant, request, runtime, store, builds=builds or is_built)
            planned.append(replace(one, build=None) if is_built else one)
        except TotoCompatError as error:
            planned.append(PlannedVariant(variant, None, obstacle=one_line(error.message)))
    return sorted(planned, key=lambda one: (bool(one.obstacle), one.seconds))


def plan_variant(
    variant: Variant, request: CellRequest, runtime: Runtime, store: CellStore, *, builds: bool = True
) -> PlannedVariant:
    name, environment = request.cell.environment, request.environment
    lock = runtime.lock_of(name, environment)
    if lock is not None:
        stored = store.get(key_of(request, lock, runtime.source.hash))
        if stored is not None:
            return PlannedVariant(variant, request, stored=stored.stored)
    seconds, _ = estimate([request], store, jobs=1)
    if lock is not None:
        return PlannedVariant(variant, request, cost=seconds)
    build = runtime.needs(name, environment)
    # an incident's own stack is locked when it is built: that it has no lock yet stands in nobody's way
    obstacle = "" if is_pinned(name) else one_line(runtime.obstacle(name, environment))
    if not obstacle and not builds and not is_pinned(name):
        obstacle = f"its environment is not built: `--explain release` builds it, {_built_text([build])}"
    return PlannedVariant(variant, request, cost=seconds, build=build, obstacle=obstacle)


def free_disk(runtime: Runtime) -> int | None:
    """Return the free bytes where environments are built; None where an engine has a place of its own for them."""
    return None if runtime.name == "docker" else shutil.disk_usage(cache_folder()).free


def within_the_disk(base: PlannedVariant, planned: Sequence[PlannedVariant], free: int | None) -> list[PlannedVariant]:
    """Leave out variants whose environments do not fit on the disk beside those before them, which all stay there."""
    if free is None:
        return list(planned)
    taken = _to_build([base])
    kept = []
    for one in planned:
        with_it = taken | _to_build([one])
        if _disk(with_it.values()) > free and len(with_it) > len(taken):
            told = f"{free / 1e9:.0f} GB are free and {_disk(with_it.values()) / 1e9:.0f} would be taken"
            kept.append(replace(one, obstacle=f"no room for its environment: {told}; `toto-compat prune` makes some"))
        else:
            taken = with_it
            kept.append(one)
    return kept


def _to_build(planned: Iterable[PlannedVariant]) -> dict[str, BuildNeeds]:
    """Return what is to be built, each environment once."""
    can_run = [one for one in planned if not one.obstacle]
    return {one.request.cell.environment: one.build for one in can_run if one.request and one.build}


def _disk(builds: Iterable[BuildNeeds]) -> int:
    return sum(build.disk_bytes for build in builds)


def _built_text(builds: Collection[BuildNeeds]) -> str:
    minutes = max(1.0, sum(build.seconds for build in builds) / 60)
    downloads, disk = sum(build.download_bytes for build in builds) / 1e9, _disk(builds) / 1e9
    return f"about {minutes:.0f} min, {downloads:.1f} GB to download, {disk:.0f} GB of disk at most"


def plan_text(base: PlannedVariant, planned: Sequence[PlannedVariant]) -> str:
    """Write the plan as it is printed."""
    lines = [f"{base.variant.change}: {base.state}"]
    lines += [f"  {one.variant.change}: {one.state}" for one in planned]
    to_run = [base, *(one for one in planned if not one.obstacle)]
    builds = _to_build(to_run).values()
    if builds:
        lines.append(f"  {len(builds)} to build, {_built_text(builds)}; `toto-compat prune` removes them")
    if seconds := sum(one.cost for one in to_run) + sum(build.seconds for build in builds):
        lines.append(
            f"  estimated {seconds / 60:.0f} min; what is finished is stored, the same command goes on from there"
        )
    return "\n".join(lines)


def try_variant(planned: PlannedVariant, base: Reproduction, runtime: Runtime, store: CellStore, matrix: Matrix) -> Row:
    """Run one variant, or take it from the store, and say what became of what the incident showed."""
    assert planned.request is not None
    variant = planned.variant
    try:
        tried = reproduce_in(runtime, store, variant.incident, planned.request, matrix, stored_first=True)
    except TotoCompatError as error:
        return Row(variant, None, one_line(f"could not be run: {error.message}"))
    return judged_row(variant, base, tried)


def judged_row(variant: Variant, base: Reproduction, tried: Reproduction) -> Row:
    """Compare with the incident as it is: what held there must be looked for, judged and gone for it to be ended."""
    if tried.result.failure is not None:
        return Row(variant, None, one_line(f"could not be run: {tried.result.failure.message}"), tried)
    left = {expected: symptom_left(expected, tried) for expected in base.symptoms}
    there = [told for told in left.values() if told]
    if there:
        return Row(variant, False, "; ".join(there), tried)
    if unknown := _why_unknown(base, tried, [expected for expected, told in left.items() if told is None]):
        return Row(variant, None, unknown, tried)
    return Row(variant, True, "gone", tried)


def _why_unknown(base: Reproduction, tried: Reproduction, not_judged: Collection[Expectation]) -> str:
    """Say why nothing can be said, though nothing of the symptom is there; empty if it is gone."""
    if tried.raised:
        return f"raises: {tried.raised}"
    if not tried.compiled:
        return "compiles nothing: eager has no such symptom"
    if not_judged:
        why = [one.why for one in tried.unjudged if one.expected in not_judged]
        return one_line(f"not judged: {why[0]}") if why else "not judged"
    if elsewhere := [one for one in base.symptoms if base.place_of(one) != tried.place_of(one)]:
        return f"looked for in another way than in the incident: {wanted(elsewhere[0])}"
    skipped = [
        evidence.skipped
        for suite, evidence in tried.result.evidence.items()
        if evidence.skipped and not (suite in base.result.evidence and base.result.evidence[suite].skipped)
    ]
    return one_line(f"not looked at as the incident was: without {skipped[0]}") if skipped else ""


def explanation_as_text(explanation: Explanation) -> str:
    """Write the table and the sentence."""
    if not explanation.base.symptoms:
        return "Nothing of it shows here as it is, so nothing can be said to end it."
    rows = [
        [row.variant.change, {True: "ends it", False: "does not", None: "?"}[row.ends], *_counts(row), row.told]
        for row in explanation.rows
    ]
    table = tabulate(
        [["as it was", "-", *_counts_of(explanation.base), "; ".join(map(wanted, explanation.base.symptoms))], *rows],
        headers=["one change", "symptom", "recompiles", "limit hits", "breaks", "what is left"],
        maxcolwidths=[None, None, None, None, None, 60],
        disable_numparse=True,
    )
    not_tried = [f"not tried: {one.variant.change}: {one.obstacle}" for one in explanation.not_tried]
    return "\n".join([table, *not_tried, "", sentence(explanation)])


def sentence(explanation: Explanation) -> str:
    """Name the smallest change that ends it, and what it leaves."""
    enders = explanation.enders
    if not enders:
        tried = len(explanation.rows)
        return f"None of the {tried} changes that were tried ends it." if tried else "Nothing was tried."
    first, *others = enders
    text = f"The smallest change that ends it is {first.variant.change}{_leaves(first)}."
    if others:
        text += f" So do {', '.join(f'{row.variant.change}{_leaves(row)}' for row in others)}."
    return text


def _leaves(row: Row) -> str:
    """Say what is left: a symptom may be gone and its cause not, as when a higher limit is not hit."""
    recompiles = _recompiles(row)
    return "" if recompiles is None else f" ({recompiles:g} recompiles)"


def _recompiles(row: Row) -> float | None:
    return _figure(row.reproduction, "recompiles_total") if row.reproduction else None


def _counts(row: Row) -> list[str]:
    return _counts_of(row.reproduction)


def _counts_of(reproduction: Reproduction | None) -> list[str]:
    names = ("recompiles_total", "recompile_limit", "graph_breaks")
    values = [_figure(reproduction, name) if reproduction else None for name in names]
    return ["-" if value is None else f"{value:g}" for value in values]


def _figure(reproduction: Reproduction, name: str) -> float | None:
    evidence = reproduction.result.evidence.get(Suite.RECOMPILE)
    figure = evidence.figures.get(name) if evidence else None
    return figure.value if figure else None


def explanation_as_data(explanation: Explanation) -> dict[str, Any]:
    return {
        "changes": [
            {
                "axis": row.variant.axis,
                "change": row.variant.change,
                "ends": row.ends,
                "told": row.told,
                "cell": row.reproduction.result.cell if row.reproduction else None,
                "recompiles": _recompiles(row),
                "stored": row.reproduction.stored or None if row.reproduction else None,
            }
            for row in explanation.rows
        ],
        "not_tried": [{"change": one.variant.change, "why": one.obstacle} for one in explanation.not_tried],
        "smallest": explanation.enders[0].variant.change if explanation.enders else None,
        "sentence": sentence(explanation) if explanation.base.symptoms else None,
    }
