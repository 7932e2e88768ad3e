"""The answer per device: enable, enable with these settings, keep off, or not enough evidence; and why."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from packaging.version import Version

from toto_compat.contract.request import Device
from toto_compat.contract.result import CellResult, Figure
from toto_compat.contract.suites import Suite
from toto_compat.matrix.gates import Gate
from toto_compat.verdict.gain import gain_text, weights_text
from toto_compat.verdict.judge import JudgedCell, Status, rerun_command
from toto_compat.verdict.ranges import ReleaseHistory, release_history
from toto_compat.verdict.without_gpu import best_known

# a cache that gains less than this by itself is not worth the change
_WORTH_TAKING = 1.1


class Answer(StrEnum):
    ENABLE = "enable"
    ENABLE_WITH_SETTINGS = "enable_with_settings"
    WORTH_A_PRODUCTION_CHECK = "worth_a_production_check"  # good, but not measured as production runs it
    KEEP_OFF = "keep_off"
    NOT_ENOUGH_EVIDENCE = "not_enough_evidence"


@dataclass(frozen=True)
class Contender:
    """One cache, mode and settings over all releases and workloads of one device."""

    cache: str
    mode: str
    settings: str
    cells: tuple[JudgedCell, ...]  # oldest release first
    history: ReleaseHistory

    @property
    def name(self) -> str:
        return f"{self.cache}/{self.mode}" + ("" if self.settings == "stock" else f"+{self.settings}")

    @property
    def passing(self) -> tuple[tuple[JudgedCell, ...], ...]:
        """Return the rows of environments in which every workload's row is PASS, oldest release first."""
        rows: dict[str, list[JudgedCell]] = {}
        for cell in self.cells:
            rows.setdefault(cell.result.cell.environment, []).append(cell)
        return tuple(tuple(own) for own in rows.values() if all(cell.verdict is Status.PASS for cell in own))

    @property
    def newest_pass(self) -> JudgedCell | None:
        """Return the row with the smallest gain in the newest environment that passes."""
        return min(self.passing[-1], key=_gain) if self.passing else None


@dataclass(frozen=True)
class DeviceDecision:
    """Holds what to do on one device, why, and what to run next where that is not known."""

    device: Device
    answer: Answer
    sentence: str
    contender: Contender | None  # the cache, mode and settings it speaks of
    environments: tuple[str, ...]  # where the answer was measured
    decided_by: Gate | None
    reason: str
    break_even_cold: Figure | None
    break_even_warm: Figure | None
    take_cache_only: bool  # the cache itself is the gain, compile adds nothing that can be told from noise
    next_commands: tuple[str, ...]
    contenders: tuple[Contender, ...]
    speaks_of: JudgedCell | None = None  # the row that it rests on, or that came closest
    allowed: tuple[JudgedCell, ...] = ()  # what a service may run, the preferred one first


@dataclass(frozen=True)
class UnfinishedCell:
    """A cell that was planned and has no result: the run was stopped before it."""

    cell: str
    device: Device
    profile: str
    lower_only: bool = False  # it was to be compiled for CUDA without a GPU, which turns no compile on

    @property
    def command(self) -> str:
        where = "--lower-only" if self.lower_only else f"--device {self.device.value}"
        return f"toto-compat matrix '{self.cell}' --profile {self.profile} {where}"


@dataclass(frozen=True)
class DecisionRules:
    """Says what a run's decision may claim."""

    production_profile: str = "production-check"
    production_workloads: tuple[str, ...] = ()  # none: the matrix names none, and nothing can be enabled
    releases: tuple[str, ...] = ()  # of the matrix, run or not
    review_by: str = ""  # YYYY-MM-DD; after that day the decision is stale
    today: str = ""

    @property
    def is_stale(self) -> bool:
        return bool(self.review_by) and self.today > self.review_by

    def may_enable(self, rows: Sequence[JudgedCell]) -> bool:
        """Tell whether rows of one environment are all that production runs; others are worth a check at best."""
        return bool(self.production_workloads) and self.passed_of_production(rows) == list(self.production_workloads)

    def passed_of_production(self, rows: Sequence[JudgedCell]) -> list[str]:
        """Return those of production's workloads that these rows have passed in the profile that decides."""
        requests = [row.result.request for row in rows]
        run = {request.workload_name for request in requests if request.profile_name == self.production_profile}
        return [workload for workload in self.production_workloads if workload in run]


@dataclass(frozen=True)
class Decision:
    sentence: str
    devices: Mapping[Device, DeviceDecision]
    review_by: str = ""
    stale: bool = False  # the day to look again has passed


def decide(cells: Sequence[JudgedCell], rules: DecisionRules, unfinished: Sequence[UnfinishedCell] = ()) -> Decision:
    """Answer for every device; CUDA is always answered, if only with what is missing."""
    asked = {cell.result.request.speaks_of for cell in cells} | {cell.device for cell in unfinished} | {Device.CUDA}
    devices = {
        device: _decide_device(device, cells, rules, [cell for cell in unfinished if cell.device is device])
        for device in (Device.CUDA, Device.CPU)
        if device in asked
    }
    sentence = " ".join(decision.sentence for decision in devices.values())
    if rules.is_stale:
        sentence = f"STALE, it was to be reviewed by {rules.review_by}; run it again. {sentence}"
    return Decision(sentence=sentence, devices=devices, review_by=rules.review_by, stale=rules.is_stale)


def contenders_of(
    device: Device, cells: Sequence[JudgedCell], known_releases: Sequence[str] = ()
) -> tuple[Contender, ...]:
    """Group cells by cache, mode and settings, each along the releases, in the order of first appearance."""
    here = [cell for cell in cells if cell.result.request.speaks_of is device]
    releases = {*known_releases, *(torch_release(cell) for cell in here)}
    groups: defaultdict[tuple[str, str, str], list[JudgedCell]] = defaultdict(list)
    for cell in here:
        request = cell.result.request
        groups[request.cell.cache, request.cell.mode, request.cell.settings].append(cell)
    contenders = []
    for (cache, mode, settings), group in groups.items():
        by_release: defaultdict[str, list[Status]] = defaultdict(list)
        for cell in group:
            by_release[torch_release(cell)].append(cell.verdict)
        ordered = tuple(sorted(group, key=lambda cell: Version(torch_release(cell))))
        contenders.append(Contender(cache, mode, settings, ordered, release_history(by_release, all_releases=releases)))
    return tuple(contenders)


def environments_of(cells: Sequence[JudgedCell]) -> tuple[str, ...]:
    """Name the environments of some rows, each once."""
    return tuple(dict.fromkeys(cell.result.cell.environment for cell in cells))


def torch_release(cell: JudgedCell) -> str:
    return cell.result.request.environment.torch


def compile_adds_nothing(cell: JudgedCell) -> bool:
    """Say whether same-cache eager over compiled reaches down to 1: compile itself then shows no gain."""
    same_cache = cell.figure(Suite.SPEED, "speedup_same_cache")
    return same_cache is not None and same_cache.low is not None and same_cache.low <= 1.0


def gain_of_cache_alone(cell: JudgedCell) -> float | None:
    """Return upstream eager over the same cache eager; None where that was not measured or is not right."""
    judged, timed = cell.gates.get(Gate.EQUIVALENCE), cell.gates.get(Gate.SPEEDUP)
    upstream = cell.figure(Suite.SPEED, "eager_p50_ms")
    alone = cell.figure(Suite.SPEED, "same_cache_eager_p50_ms")
    if not judged or judged.status is not Status.PASS or not upstream or not alone:
        return None
    if timed and timed.status is Status.INCONCLUSIVE:
        return None
    return upstream.value / alone.value if upstream.value and alone.value else None


def _decide_device(
    device: Device, cells: Sequence[JudgedCell], rules: DecisionRules, unfinished: Sequence[UnfinishedCell]
) -> DeviceDecision:
    contenders = contenders_of(device, cells, rules.releases)
    passing = [contender for contender in contenders if contender.newest_pass]
    gaining = [one for one in passing if not all(map(compile_adds_nothing, one.passing[-1]))]
    for_production = [one for one in gaining if rules.may_enable(one.passing[-1])]
    if for_production:
        enabled = _enable(device, max(for_production, key=_preference), contenders, rules)
        return replace(enabled, allowed=_allowed(for_production, rules, compiled=True))
    if gaining:
        return _worth_checking(device, max(gaining, key=_preference), contenders, rules)
    if waited_for := [cell for cell in unfinished if not cell.lower_only]:
        # any of them may be the row that compile can go back on with
        return _stopped_early(device, waited_for, contenders)
    if passing:
        alone = _cache_only(device, max(passing, key=_preference), contenders)
        return replace(alone, allowed=_allowed([max(passing, key=_preference)], rules, compiled=False))
    without = _without_pass(device, contenders, [cell.result for cell in cells] if device is Device.CUDA else [])
    return replace(without, next_commands=(*(cell.command for cell in unfinished), *without.next_commands))


def _allowed(contenders: Sequence[Contender], rules: DecisionRules, *, compiled: bool) -> tuple[JudgedCell, ...]:
    """List what passed as production runs it, of the preferred contender first, and of each the newest release.

    A stale decision allows nothing.
    """
    if rules.is_stale:
        return ()
    preferred = sorted(contenders, key=_preference, reverse=True)
    return tuple(
        min(rows, key=_gain)  # of an environment's workloads the row that gains least speaks for all
        for contender in preferred
        for rows in reversed(contender.passing)
        if rules.may_enable(rows) and not (compiled and all(map(compile_adds_nothing, rows)))
    )


def _preference(contender: Contender) -> tuple[Version, int, bool, float]:
    """Order by the newest release, the longest list of good releases, PyTorch's own settings, the larger gain."""
    best = contender.newest_pass
    assert best is not None
    return Version(torch_release(best)), len(contender.passing), contender.settings == "stock", _gain(best)


def _gain(cell: JudgedCell) -> float:
    speedup = cell.figure(Suite.SPEED, Gate.SPEEDUP.value)
    return speedup.value if speedup and speedup.value is not None else 0.0


def _enable(
    device: Device, contender: Contender, contenders: tuple[Contender, ...], rules: DecisionRules
) -> DeviceDecision:
    passed = [cell for rows in contender.passing if rules.may_enable(rows) for cell in rows]
    environments = environments_of(passed)
    with_settings = contender.settings != "stock"
    settings = f" and settings {contender.settings}" if with_settings else ""
    sentence = (
        f"On {_label(device)} compile can be re-enabled in {_listed(environments)} with cache {contender.cache}, "
        f"mode {contender.mode}{settings}: {_what_is_known(contender, passed)}.{_not_about_cuda(device)}"
    )
    return _with_contender(
        device,
        Answer.ENABLE_WITH_SETTINGS if with_settings else Answer.ENABLE,
        sentence,
        contender,
        contenders,
        passed=passed,
        reason="every demanded gate was measured and passed, as production runs it",
        next_commands=_commands_for_undecided(contender.cells),
    )


def _worth_checking(
    device: Device, contender: Contender, contenders: tuple[Contender, ...], rules: DecisionRules
) -> DeviceDecision:
    """Say what a run that is not production's may say: that production's is worth its hours."""
    passed = [cell for rows in contender.passing for cell in rows]
    newest = passed[-1].result
    profiles = _listed(tuple(dict.fromkeys(cell.result.request.profile_name for cell in passed)))
    command = (
        f"nox -s matrix -- '{newest.cell.for_all_workloads}' --profile {rules.production_profile} "
        f"--device {newest.request.speaks_of.value}"
    )
    reason = (
        f"every demanded gate passed, in profile {profiles}; only {rules.production_profile} on production's "
        f"workloads ({', '.join(rules.production_workloads) or 'matrix.yaml names none'}) can say more"
    )
    holds = rules.passed_of_production(contender.passing[-1])
    lacking = [workload for workload in rules.production_workloads if workload not in holds]
    what = (
        f"holds a part of {rules.production_profile}, {_listed(holds)}, and lacks {_listed(lacking)}"
        if holds
        else "is worth a production check"
    )
    sentence = (
        f"On {_label(device)} {contender.name} {what}: {_what_is_known(contender, passed)}, in "
        f"profile {profiles}; run {command}.{_not_about_cuda(device)}"
    )
    return _with_contender(
        device,
        Answer.WORTH_A_PRODUCTION_CHECK,
        sentence,
        contender,
        contenders,
        passed=passed,
        reason=reason,
        next_commands=(command, *_commands_for_undecided(contender.cells)),
    )


def _what_is_known(contender: Contender, passed: Sequence[JudgedCell]) -> str:
    gain = gain_text(passed)
    return ", ".join(part for part in (contender.history.text, gain, weights_text(passed)) if part)


def _not_about_cuda(device: Device) -> str:
    return " This says nothing about CUDA." if device is Device.CPU else ""


def _with_contender(
    device: Device,
    answer: Answer,
    sentence: str,
    contender: Contender,
    contenders: tuple[Contender, ...],
    *,
    passed: Sequence[JudgedCell],
    reason: str,
    next_commands: tuple[str, ...],
) -> DeviceDecision:
    newest = contender.newest_pass or passed[-1]
    return DeviceDecision(
        device=device,
        answer=answer,
        sentence=sentence,
        contender=contender,
        environments=environments_of(passed),
        decided_by=None,
        reason=reason,
        break_even_cold=newest.figure(Suite.SPEED, "break_even_cold"),
        break_even_warm=newest.figure(Suite.SPEED, "break_even_warm"),
        take_cache_only=False,
        next_commands=next_commands,
        contenders=contenders,
        speaks_of=newest,
    )


def _cache_only(device: Device, contender: Contender, contenders: tuple[Contender, ...]) -> DeviceDecision:
    best = contender.newest_pass
    assert best is not None
    same_cache = best.figure(Suite.SPEED, "speedup_same_cache")
    assert same_cache is not None
    slower = same_cache.high is not None and same_cache.high < 1.0
    reason = f"same cache, eager over compiled: {_interval(same_cache)} " + (
        "is below 1: compile makes it slower" if slower else "includes 1"
    )
    return DeviceDecision(
        device=device,
        answer=Answer.KEEP_OFF,
        sentence=f"On {_label(device)} take the cache {contender.cache}, leave compile off: {reason}.",
        contender=contender,
        environments=environments_of([cell for rows in contender.passing for cell in rows]),
        decided_by=Gate.SPEEDUP,
        reason=reason,
        break_even_cold=None,
        break_even_warm=None,
        take_cache_only=True,
        next_commands=(),
        contenders=contenders,
        speaks_of=best,
    )


def _stopped_early(
    device: Device, unfinished: Sequence[UnfinishedCell], contenders: tuple[Contender, ...]
) -> DeviceDecision:
    finished = [cell for contender in contenders for cell in contender.cells]
    first, *others = unfinished
    reason = f"{first.cell} was planned and has no result" + (f", nor have {len(others)} more" if others else "")
    return _no_contender(
        device,
        Answer.NOT_ENOUGH_EVIDENCE,
        f"On {_label(device)} there is not enough evidence to re-enable compile: {reason}; run {first.command}.",
        contenders,
        reason=reason,
        decided_by=None,
        next_commands=(*(cell.command for cell in unfinished), *_commands_for_undecided(finished)),
    )


def _without_pass(device: Device, contenders: tuple[Contender, ...], may_know: Sequence[CellResult]) -> DeviceDecision:
    """Answer where no row passes. `may_know`: cells of any device that may have been compiled for this one."""
    cells = [cell for contender in contenders for cell in contender.cells if not cell.result.request.lower_only]
    undecided = [cell for cell in cells if cell.verdict is Status.INCONCLUSIVE]
    if cells and not undecided:
        # one workload may PASS where another of the same cache does not: it is that one which keeps compile off
        failing = [cell for cell in cells if cell.verdict is Status.FAIL]
        closest = max(failing, key=_how_far)
        deciding = closest.deciding
        assert deciding is not None
        reason = f"closest is {closest.result.cell}, which fails {deciding.gate.value}: {deciding.reason}"
        gain = gain_of_cache_alone(closest)
        if gain and gain > _WORTH_TAKING and compile_adds_nothing(closest):
            reason += f"; take the cache {closest.result.cell.cache}, leave compile off ({gain:.2f}x by itself)"
        return _no_contender(
            device,
            Answer.KEEP_OFF,
            f"On {_label(device)} keep compile off: no row passes{_on_every(cells)}; {reason}.",
            contenders,
            reason=reason,
            decided_by=deciding.gate,
            speaks_of=closest,
        )
    if not cells:
        command = f"nox -s matrix -- --device {device.value}"
        where = " on a machine with an NVIDIA GPU" if device is Device.CUDA else ""
        reason = f"nothing was measured on {_label(device)}"
        if known := best_known(may_know):
            result, found = known
            reason += (
                f", but {result.cell.cache}/{result.cell.mode_and_settings} on torch "
                f"{result.request.environment.torch} was {found.text}; an hour on a GPU would add {found.not_measured}"
            )
        return _no_contender(
            device,
            Answer.NOT_ENOUGH_EVIDENCE,
            f"On {_label(device)} it is not known whether compile can go back on: {reason}; run {command}{where}.",
            contenders,
            reason=reason,
            decided_by=None,
            next_commands=(command,),
        )
    nearest = max(undecided, key=_how_far)
    deciding = nearest.deciding
    what = f"lacks {deciding.gate.value}: {deciding.reason}" if deciding else f"is undecided: {nearest.reason}"
    reason = f"{nearest.result.cell} {what}"
    commands = _commands_for_undecided(undecided)
    return _no_contender(
        device,
        Answer.NOT_ENOUGH_EVIDENCE,
        f"On {_label(device)} there is not enough evidence to re-enable compile: {reason}; run {commands[0]}.",
        contenders,
        reason=reason,
        decided_by=deciding.gate if deciding else None,
        next_commands=commands,
        speaks_of=nearest,
    )


def _on_every(cells: Sequence[JudgedCell]) -> str:
    return " on every workload" if any(cell.verdict is Status.PASS for cell in cells) else ""


def _no_contender(
    device: Device,
    answer: Answer,
    sentence: str,
    contenders: tuple[Contender, ...],
    *,
    reason: str,
    decided_by: Gate | None,
    next_commands: tuple[str, ...] = (),
    speaks_of: JudgedCell | None = None,
) -> DeviceDecision:
    return DeviceDecision(
        device=device,
        answer=answer,
        sentence=sentence,
        contender=None,
        environments=(),
        decided_by=decided_by,
        reason=reason,
        break_even_cold=None,
        break_even_warm=None,
        take_cache_only=False,
        next_commands=next_commands,
        contenders=contenders,
        speaks_of=speaks_of,
    )


def _how_far(cell: JudgedCell) -> tuple[int, int, int]:
    """Rank cells by how far they got: the fewest failures, the most passes, the latest gate to stop them."""
    statuses = [judged.status for judged in cell.gates.values()]
    stopped_at = list(Gate).index(cell.decided_by) if cell.decided_by else 0
    return -statuses.count(Status.FAIL), statuses.count(Status.PASS), stopped_at


def _commands_for_undecided(cells: Sequence[JudgedCell]) -> tuple[str, ...]:
    commands: dict[str, None] = {}
    for cell in cells:
        if cell.verdict is Status.INCONCLUSIVE:
            deciding = cell.deciding
            commands[(deciding.next_command if deciding else "") or rerun_command(cell.result)] = None
    return tuple(commands)


def _interval(figure: Figure) -> str:
    low = f"{figure.low:.2f}" if figure.low is not None else "?"
    high = f"{figure.high:.2f}" if figure.high is not None else "?"
    return f"{low} to {high}"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _label(device: Device) -> str:
    return "CUDA" if device is Device.CUDA else "the CPU"
