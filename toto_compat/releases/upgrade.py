"""What a maintainer wants to know before an upgrade: a release's cells against those of a reference, and what to do."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from toto_compat.contract.result import CellResult, Figure, Outcome
from toto_compat.contract.suites import Suite
from toto_compat.errors import ExitCode
from toto_compat.releases.difference import ReasonChange, new_reasons, reason_lines
from toto_compat.verdict.comparison import Change, RowChange, compare_row
from toto_compat.verdict.judge import JudgedCell, Status
from toto_compat.verdict.without_gpu import known_without_gpu

_LOWERED = ("graphs", "captured_whole", "partitions", "captured_partitions", "kernels", "spilling_kernels")


class Advice(StrEnum):
    UPGRADE = "nothing that was measured speaks against it"
    LOOK = "look at these first"
    STAY = "do not upgrade"
    UNKNOWN = "not known"


@dataclass(frozen=True)
class UpgradeRow:
    """One cache in one mode, before and after."""

    name: str  # fixed_size/default
    change: RowChange
    before: JudgedCell | None
    after: JudgedCell
    not_compared: str = ""  # why `before` is None

    @property
    def new_reasons(self) -> list[ReasonChange]:
        return new_reasons(self.before.result, self.after.result) if self.before else []

    @property
    def is_lost(self) -> bool:
        return self.change.before is Status.PASS and self.change.after is Status.FAIL

    @property
    def got_worse(self) -> bool:
        """Tell if a row that can be used has a figure that is worse beyond noise; what fails anyway does not count."""
        return self.change.after is Status.PASS and self.change.change is Change.REGRESSED

    @property
    def is_wrong_on_cuda(self) -> bool:
        """Tell if its code for CUDA, executed without a GPU, forecast something else than eager: no gate knows that."""
        known = known_without_gpu(self.after.result)
        return self.change.after is Status.PASS and known is not None and known.right is False

    @property
    def look_at(self) -> str:
        """Say what to look at first of a row that passes; empty where nothing is worse."""
        told = [self.change.text] if self.got_worse else []
        return "; ".join(
            [*told, "its code for CUDA forecasts wrongly (interpreted)"] if self.is_wrong_on_cuda else told
        )

    @property
    def is_unknown(self) -> bool:
        return self.change.after is Status.INCONCLUSIVE


@dataclass(frozen=True)
class MovedDefault:
    """A setting of torch's whose name or default is another in the new release."""

    name: str
    before: str  # empty: it was not there
    after: str  # empty: it is gone
    older: str = ""  # what it was called before, a name that still works

    @property
    def text(self) -> str:
        if self.older:
            value = self.after if self.before == self.after else f"{self.before} -> {self.after}"
            return f"{self.name} is the new name of {self.older}, which still works: {value}"
        if not self.before:
            return f"{self.name} is new: {self.after}"
        return (
            f"{self.name} is gone, it was {self.before}"
            if not self.after
            else f"{self.name}: {self.before} -> {self.after}"
        )


# What the caches here depend on, or what changed their counts before: told first.
WATCHED = (
    "dynamo.recompile_limit",
    "dynamo.cache_size_limit",
    "dynamo.accumulated_recompile_limit",
    "dynamo.accumulated_cache_size_limit",
    "dynamo.fail_on_recompile_limit_hit",
    "dynamo.mark_static_address(guard)",
    "dynamo.inline_inbuilt_nn_modules",
    "dynamo.specialize_float",
    "dynamo.specialize_int",
    "dynamo.capture_scalar_outputs",
    "dynamo.automatic_dynamic_shapes",
    "inductor.graph_partition",
    "inductor.fx_graph_cache",
    "inductor.triton.cudagraphs",
    "inductor.triton.cudagraph_support_input_mutation",
    "functorch.enable_autograd_cache",
)


@dataclass(frozen=True)
class Upgrade:
    """A release held against a reference."""

    release: str
    reference: str
    rows: tuple[UpgradeRow, ...]
    defaults: tuple[MovedDefault, ...] | None = None  # None: not known for one of the two
    notes: tuple[str, ...] = field(default=())

    @property
    def advice(self) -> Advice:
        if any(row.is_lost for row in self.rows):
            return Advice.STAY
        lost_sight = any(row.is_unknown and row.change.before is Status.PASS for row in self.rows)
        if lost_sight or not self.rows or all(row.is_unknown for row in self.rows):
            return Advice.UNKNOWN
        if all(row.before is None for row in self.rows):
            return Advice.UNKNOWN
        return Advice.LOOK if any(row.look_at for row in self.rows) else Advice.UPGRADE

    @property
    def exit_code(self) -> ExitCode:
        match self.advice:
            case Advice.UPGRADE:
                return ExitCode.OK
            case Advice.UNKNOWN:
                return ExitCode.CELL_NOT_RUN
            case Advice.STAY | Advice.LOOK:
                return ExitCode.FINDINGS


def compare_release(release: str, after: Iterable[JudgedCell], before: Iterable[JudgedCell], **known: Any) -> Upgrade:
    """Put each cell of a release beside the same row of the reference, if that was asked the same."""
    then = {row_name(cell): cell for cell in before}
    rows = [_row(cell, then.get(row_name(cell))) for cell in after]
    releases = sorted({cell.result.request.environment.torch for cell in then.values()})
    return Upgrade(release, ", ".join(releases) or "nothing", tuple(rows), **known)


def row_name(cell: JudgedCell) -> str:
    return cell.result.cell.partition("/")[2]


def _row(after: JudgedCell, before: JudgedCell | None) -> UpgradeRow:
    name = row_name(after)
    why = "the reference has no such row" if before is None else why_not_comparable(before.result, after.result)
    compared = None if why else before
    return UpgradeRow(name, compare_row(name, compared, after), compared, after, why)


def why_not_comparable(before: CellResult, after: CellResult) -> str:
    """Say why two cells do not answer one question; empty where they do."""
    old, new = before.request, after.request
    if old.speaks_of is not new.speaks_of:
        return f"the reference is of {old.speaks_of.value}"
    if old.workload != new.workload:
        return f"the reference forecast {old.workload_name or 'another workload'}, this run {new.workload_name}"
    return "" if old.settings == new.settings else "the reference ran with other settings"


def moved_defaults(
    before: Mapping[str, Any], after: Mapping[str, Any], older: Mapping[str, str] | None = None
) -> tuple[MovedDefault, ...]:
    """Every default that differs, those that the caches depend on first. `older` says what a setting was called."""
    renamed = {name: old for name, old in (older or {}).items() if name not in before and old in before}
    moved = [MovedDefault(name, _shown(before, old), _shown(after, name), older=old) for name, old in renamed.items()]
    moved += [
        MovedDefault(name, _shown(before, name), _shown(after, name))
        for name in {*before, *after} - set(renamed)
        if _shown(before, name) != _shown(after, name)
    ]
    return tuple(sorted(moved, key=lambda one: (one.name not in WATCHED, one.name)))


def _shown(defaults: Mapping[str, Any], name: str) -> str:
    if name not in defaults:
        return ""
    return str(getattr(defaults[name], "source", None) or repr(defaults[name]))


# --- figures side by side ---------------------------------------------------------------------------------------------


def lowering_lines(row: UpgradeRow) -> Iterator[str]:
    """Graphs, partitions and spills of the code for CUDA, per architecture; predicted, no GPU was used."""
    old = _architectures(row.before.result) if row.before else {}
    new = _architectures(row.after.result)
    for name, found in new.items():
        then = old.get(name)
        figures = ", ".join(
            _beside(key.replace("_", " "), then.get(key) if then else None, found.get(key)) for key in _LOWERED
        )
        yield f"{row.name} for {name}: {figures}"
        for error, count in dict(found.get("errors") or {}).items():
            yield f"{row.name} for {name}: {count} graphs cannot be compiled: {error}"
    known = known_without_gpu(row.after.result)
    if known is not None and known.executed:
        yield f"{row.name}: {known.executed}"


def _architectures(cell: CellResult) -> dict[str, Mapping[str, Any]]:
    evidence = cell.evidence.get(Suite.CUDA_LOWERING)
    rows = evidence.details.get("architectures", []) if evidence and evidence.outcome is Outcome.MEASURED else []
    return {str(row["architecture"]): row for row in rows}


def time_lines(row: UpgradeRow) -> Iterator[str]:
    """Compile times and latencies, before and after; the gate's interval is the gate's business. Seconds of two days
    or machines say little, so eager's own stand beside them."""
    named = [
        (Suite.RECOMPILE, "cold_compile_s"),
        *((Suite.SPEED, name) for name in ("warm_start_s", "p50_ms", "eager_p50_ms", "speedup")),
    ]
    for suite, name in named:
        now = row.after.figure(suite, name)
        then = row.before.figure(suite, name) if row.before else None
        if now is None or now.value is None:
            continue
        yield f"{row.name}: {_beside(_TITLES[name], _of(then), _of(now))}"


_TITLES = {
    "cold_compile_s": "cold compile, s",
    "warm_start_s": "warm start, s",
    "p50_ms": "median forecast, ms",
    "eager_p50_ms": "the same by upstream eager, ms",
    "speedup": "speedup over upstream eager (lower end), x",
}


def _of(figure: Figure | None) -> float | None:
    return figure.value if figure else None


def _beside(title: str, before: Any, after: Any) -> str:
    if before is None or before == after:
        return f"{title} {_number(after)}"
    return f"{title} {_number(before)} -> {_number(after)}"


def _number(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) and value < 1000 else str(value)


# --- the whole report -------------------------------------------------------------------------------------------------


def upgrade_lines(upgrade: Upgrade, *, all_defaults: bool = False) -> list[str]:
    """The report as it is printed."""
    lines = [f"torch {upgrade.release} against {upgrade.reference} (reference)", ""]
    lines += _section("verdicts", [_verdict_line(row) for row in upgrade.rows])
    reasons = [f"{row.name}: {line}" for row in upgrade.rows for line in reason_lines(row.new_reasons)]
    lines += _section("new reasons of the compiler", reasons or ["none"])
    lines += _section("torch's own defaults that moved", _default_lines(upgrade.defaults, all_defaults))
    lowered = [line for row in upgrade.rows for line in lowering_lines(row)]
    lines += _section("compiled for CUDA without a GPU (predicted, interpreted)", lowered or _why_not_lowered(upgrade))
    times = [line for row in upgrade.rows for line in time_lines(row)]
    lines += _section("compile time and speed", times or ["not measured"])
    lines += [*upgrade.notes, f"recommendation: {_recommendation(upgrade)}"]
    return lines


def _why_not_lowered(upgrade: Upgrade) -> list[str]:
    evidence = [row.after.result.evidence.get(Suite.CUDA_LOWERING) for row in upgrade.rows]
    told = dict.fromkeys(one.failure.message for one in evidence if one is not None and one.failure is not None)
    return [f"not tried: {one}" for one in told] or ["not tried: no CUDA build ran here"]


def _section(title: str, lines: Sequence[str]) -> list[str]:
    return [f"{title}:", *(f"  {line}" for line in lines), ""]


def _verdict_line(row: UpgradeRow) -> str:
    change = row.change
    after = change.after.value if change.after else "none"
    verdict = f"{change.before.value} -> {after}" if change.before and change.before is not change.after else after
    why = row.not_compared or _what_flipped(row) or change.text or row.after.reason
    return f"{row.name}: {verdict}" + (f" ({why})" if why else "")


def _what_flipped(row: UpgradeRow) -> str:
    """Tell the gates that say something else now before those whose figures moved; empty where none does."""
    if row.before is None or row.change.before is row.change.after:
        return ""
    then, now = row.before.gates, row.after.gates
    decided = {Status.PASS, Status.FAIL}
    flipped = {gate for gate in now if gate in then and {now[gate].status, then[gate].status} == decided}
    told = [
        f"{one.text}, limit {now[one.gate].limit.text}" for one in row.change.gates if one.gate in flipped and one.text
    ]
    return "; ".join(told)


def _default_lines(moved: tuple[MovedDefault, ...] | None, everything: bool) -> list[str]:
    if moved is None:
        return ["not known for one of the two releases"]
    watched = [one for one in moved if everything or one.name in WATCHED]
    rest = len(moved) - len(watched)
    lines = [one.text for one in watched] or ["none of those that the caches depend on"]
    return lines + ([f"and {rest} others (--all-defaults)"] if rest else [])


def _recommendation(upgrade: Upgrade) -> str:
    match upgrade.advice:
        case Advice.STAY:
            lost = ", ".join(row.name for row in upgrade.rows if row.is_lost)
            return f"do not upgrade to torch {upgrade.release}: {lost} passed before and fails now"
        case Advice.UNKNOWN:
            unknown = [row for row in upgrade.rows if row.is_unknown or row.before is None]
            told = (
                "; ".join(f"{row.name}: {row.not_compared or row.after.reason}" for row in unknown) or "nothing was run"
            )
            return f"it is not known whether torch {upgrade.release} can be taken: {told}"
        case Advice.LOOK:
            worse = "; ".join(f"{row.name}: {row.look_at}" for row in upgrade.rows if row.look_at)
            return f"torch {upgrade.release} still passes what passed before, but look at this first: {worse}"
        case Advice.UPGRADE:
            passing = [row.name for row in upgrade.rows if row.change.after is Status.PASS]
            told = (
                f"{', '.join(passing)} {'passes' if len(passing) == 1 else 'pass'}"
                if passing
                else "no row passes, before or now: compile stays off"
            )
            device = upgrade.rows[0].after.result.request.speaks_of.value
            return f"nothing that was measured on {device} speaks against torch {upgrade.release}: {told}"
