"""`toto-compat repro --from-log LOG`: an incident file from a production log, a freeze and an env file.

It fills in what they show and says what they cannot: every guess has its reason beside it, every gap is named.
"""

import os
import re
from calendar import isleap
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from packaging.version import Version

from toto_compat.contract.events import EventKind
from toto_compat.contract.request import TORCH_RELEASE, Device
from toto_compat.errors import InputError
from toto_compat.matrix.schema import Matrix
from toto_compat.repro.drafted import Draft
from toto_compat.repro.expected import OF_CUDA, expected_event, is_installed, setting_of, torchs_own
from toto_compat.repro.pins import is_version
from toto_compat.repro.production_env import ProductionEnv, read_env
from toto_compat.repro.production_freeze import Freeze
from toto_compat.repro.redaction.parts import REDACTED
from toto_compat.repro.redaction.text import redact, redact_variables
from toto_compat.repro.seen import (
    Guess,
    Seen,
    SeenEvent,
    guess_cache,
    guess_scalar_capture,
    how_sure,
)
from toto_compat.repro.variables import why_refused
from toto_compat.verdict.judge import one_line

_MODE = "TOTO_COMPILE_MODE"
MODES = ("default", "reduce-overhead", "max-autotune")
_MOST_EXPECTED = 12
_MOST_LINES = 8  # of an env file that are named
_ON = frozenset({"1", "true", "yes", "on"})
_OF_THE_COMPILER = re.compile(r"(TORCH|TOTO|PYTORCH|CUDA|TRITON|INDUCTOR)")
# Packages that are made for one release of torch, and pinned by it or pin it.
_OF_ONE_TORCH = re.compile(r"torch|(nvidia|cuda)-.+|(pytorch-)?triton(-.+)?|torchvision|torchaudio|xformers")
# Twelve layers are what production's guards need, and the small model has them.
_WORKLOAD = {"model": "tiny", "context": [128, 256], "horizon": [96, 64], "batches": [1]}


def draft_incident(
    seen: Seen,
    matrix: Matrix,
    *,
    torch: str | None = None,
    freeze: Freeze | None = None,
    env: Path | None = None,
    beside: Path = Path(),
) -> Draft:
    """Fill in an incident from what is there; every string of the log has passed the redaction.

    `beside` is the folder that the incident's file goes into.
    """
    draft = Draft()
    first = seen.events[0].example
    where = f" in {first.function}" if first.function else ""
    draft.put("schema", 1)
    draft.put("title", redact(f"{first.kind.value.replace('_', ' ')}{where}"))
    _put_date(draft, seen)
    draft.put("source", one_line(f"log {Path(seen.log).name}"))
    if seen.several:
        draft.unknown.append(f"which incident is meant, if these are several: {'; '.join(seen.several)}; cut the log")
    _put_log(draft, seen, beside)
    release = _put_stack(draft, seen, matrix, torch, freeze)
    cache = guess_cache(seen)
    draft.put("cache", cache.value, f"{'shown' if cache.sure else 'guessed'}: {redact(cache.because)}")
    if not cache.sure:
        draft.unknown.append(f"the KV cache: {cache.value} is a guess")
    draft.told.append(f"cache    {cache.value}: {cache.because}")
    given = read_env(env)
    _put_mode(draft, seen, given)
    _put_settings(draft, seen, given.values, cache, release)
    if env is not None:
        _put_variables(draft, given, env)
    draft.put(
        "workload",
        _WORKLOAD,
        "unknown: a log shows no series, lengths, checkpoint or precision; this is a small forecast with twelve",
        "layers. Put production's own here if it does not reproduce.",
    )
    draft.unknown.append("the workload: series, context, horizon, samples, checkpoint, precision")
    _put_events(draft, seen)
    return draft


def _put_date(draft: Draft, seen: Seen) -> None:
    time = seen.first_time
    if time and not time.startswith("--"):
        draft.put("date", time[:10])
        return
    log = Path(seen.log)
    changed = datetime.fromtimestamp(log.stat().st_mtime, UTC) if log.exists() else datetime.now(UTC)
    if time:
        # a line of December in a log that January changed is of the year before; a day more, for clocks ahead of UTC
        latest = changed + timedelta(days=1)
        year = latest.year - (time[2:7] > f"{latest:%m-%d}")
        while time[2:7] == "02-29" and not isleap(year):
            year -= 1
        draft.put("date", f"{year}-{time[2:7]}", "unknown: the year; the last one before the log's end is taken")
        draft.unknown.append("the year: torch's prefix has none")
    else:
        draft.put(
            "date", f"{changed:%Y-%m-%d}", "unknown: no line has a time; the day of the log's last change is taken"
        )
        draft.unknown.append("the day")


def _put_log(draft: Draft, seen: Seen, beside: Path) -> None:
    """Name the log as the incident's file will find it, where it is a file with a name that can be told."""
    place = os.path.relpath(seen.log, beside)
    if Path(seen.log).is_file() and place.isprintable() and redact(place) == place:
        draft.put("log", place)


def _put_stack(draft: Draft, seen: Seen, matrix: Matrix, torch: str | None, freeze: Freeze | None) -> str:
    """Name the environment of matrix.yaml that has the release, or pins of the incident's own; return the release."""
    release, because = _release(seen, torch, freeze)
    shown = ", ".join(one.release for one in seen.releases[:8])
    told = [f"torch {release}: {because}"]
    if seen.releases and seen.releases[0].fits:
        told.append(f"candidates by the source lines in the log, best first: {shown}")
        first = seen.releases[0].release
        if first != release:
            told.append(f"the log itself speaks of {first}, {how_sure(seen.releases)}")
    if seen.unplaced:
        told.append(f"no known release logs from {', '.join(seen.unplaced[:4])}: it is newer, a nightly or patched")
    draft.told += [f"torch    {told[0].removeprefix('torch ')}", *(f"         {one}" for one in told[1:])]
    if not torch and not (freeze and freeze.torch) and not how_sure(seen.releases).startswith("certain"):
        draft.unknown.append(f"the torch release: {release} is a guess")
    on_cuda = any(one.example.kind in OF_CUDA for one in seen.events)
    build = freeze.build if freeze else ""
    name = _environment_of(matrix, release, build, on_cuda=on_cuda)
    if freeze is None and name:
        draft.put("environment", name, *told)
        if matrix.environments[name].python != seen.python:
            found = f"the log's paths say {seen.python}" if seen.python else "the log does not name it"
            draft.unknown.append(f"python: {found}, the environment has {matrix.environments[name].python}")
        draft.unknown.append("toto-ts, its version, and every other package: give --freeze")
        return release
    python = seen.python or "3.11"
    if freeze is None:
        pins: dict[str, Any] = {"torch": release, "cuda": _likely_build(matrix, release), "python": python}
        told.append(
            f"matrix.yaml has no environment with torch {release}; the build is that of the release nearest to it"
        )
        draft.unknown.append("toto-ts, its version, and every other package: give --freeze")
    else:
        pins = _pins_of(freeze, release, python, _likely_build(matrix, release), told)
        if freeze.other_build:
            draft.unknown.append(f"how it is with torch's build for {freeze.other_build}")
        if freeze.includes:
            files = ", ".join(freeze.includes)
            draft.unknown.append(
                f"what {files} pins, which the freeze names and does not hold: python -m pip freeze does"
            )
    if not seen.python:
        told.append("unknown: python; nothing names it")
        draft.unknown.append(f"python: {python} is a guess")
    draft.put("pins", pins, *told)
    return release


def _likely_build(matrix: Matrix, release: str) -> str:
    """Name the CUDA build that matrix.yaml has for the release nearest to this one."""
    wanted = Version(release).release
    on_cuda = [one for one in matrix.environments.values() if one.device is Device.CUDA]
    return min(
        on_cuda or list(matrix.environments.values()),
        key=lambda one: [abs(mine - its) for mine, its in zip(Version(one.torch).release, wanted, strict=False)],
    ).build


def _pins_of(freeze: Freeze, release: str, python: str, build: str, told: list[str]) -> dict[str, Any]:
    """Say a freeze as pins; a release that somebody named takes the place of its torch."""
    other = freeze.torch not in ("", release)
    gone = [name for name in freeze.pinned if other and _OF_ONE_TORCH.fullmatch(name)]
    frozen = [f"{name}=={version}" for name, version in freeze.pinned.items() if name not in gone]
    pins: dict[str, Any] = {} if freeze.torch == release else {"torch": release}
    if not freeze.build or pins:
        pins["cuda"] = build if other else freeze.build or build
    if gone:
        more = f" and {len(gone) - 1} packages that go with it" if len(gone) > 1 else ""
        told.append(f"left out for torch {release}: torch {freeze.torch} of the freeze{more}")
    if other and freeze.build not in ("", build):
        told.append(f"the freeze has a build for {freeze.build}; {build} is that of the release nearest to {release}")
    pins |= {"python": python, "frozen": frozen}
    if "toto-ts" not in freeze.pinned:
        pins["toto_ts"] = "0.2.0"
        told.append("unknown: toto-ts is not in the freeze; 0.2.0 is taken")
    if freeze.other_build:
        told.append(f"torch is a build for {freeze.other_build} there, and none can be had: {pins['cuda']} is taken")
    if freeze.left_out:
        told.append(f"left out, since their lines name no release: {', '.join(freeze.left_out)}")
    if freeze.options:
        told.append(f"options of pip in the freeze were passed over: {', '.join(freeze.options)}")
    return pins


def _release(seen: Seen, torch: str | None, freeze: Freeze | None) -> tuple[str, str]:
    if torch:
        if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?(\.dev\d+)?(\+\w+)?", torch) or not is_version(torch):
            raise InputError(f"--torch {one_line(torch)[:60]!r}: no exact release", hint="one such as 2.9.0")
        return torch.partition("+")[0], "you said so"
    if freeze and freeze.torch:
        if not re.fullmatch(TORCH_RELEASE, freeze.torch):
            raise InputError(
                f"the freeze has torch {freeze.torch}, which is no release that can be had",
                hint="say which one is nearest to it: --torch 2.9.0",
            )
        return freeze.torch, "by the freeze"
    if not seen.releases:
        raise InputError(
            f"{seen.log}: nothing in it tells the torch release",
            hint="give it: --torch 2.9.0, or --freeze with the service's pip freeze",
        )
    if not seen.releases[0].fits:
        newest = seen.releases[-1].release
        return newest, f"{how_sure(seen.releases)}, the newest is taken"
    return seen.releases[0].release, how_sure(seen.releases)


def _environment_of(matrix: Matrix, release: str, build: str, *, on_cuda: bool) -> str:
    """Choose among environments with the release: the build that is known, production's, then the likelier device."""
    fitting = [
        name for name, one in matrix.environments.items() if one.torch == release and (not build or one.build == build)
    ]
    fitting.sort(
        key=lambda name: (
            name != matrix.production,
            (matrix.environments[name].device is Device.CUDA) is not on_cuda,
            name,
        )
    )
    return fitting[0] if fitting else ""


def _put_mode(draft: Draft, seen: Seen, given: ProductionEnv) -> None:
    variables = given.values
    logged, set_to = seen.setting("mode"), variables.get(_MODE, "")
    mode = logged or set_to
    if mode not in MODES:
        missing = f"the shell computes {_MODE}" if _MODE in given.computed else "no line names it"
        said = f"`{one_line(redact(mode))}` is no mode that can be run again" if mode else missing
        if _tells_of_cuda_graphs(seen) and variables.get("TORCHINDUCTOR_CUDAGRAPHS") != "1":
            guessed = "reduce-overhead is a guess: torch's own mode has no CUDA graphs, and the log tells of them"
            draft.put("mode", "reduce-overhead", f"unknown: {said}; {guessed}")
            draft.unknown.append(f"the mode: {said}; reduce-overhead is a guess")
            return
        draft.put("mode", "default", f"unknown: {said}; torch's own is taken")
        draft.unknown.append(f"the mode: {said}")
        return
    where = "in the log: Using torch.compile for ..." if logged else "by TOTO_COMPILE_MODE in the env file"
    draft.put("mode", mode, where)
    draft.told.append(f"mode     {mode}: {where}")
    if logged and set_to and logged != set_to:
        draft.remark("mode", f"the env file says {redact(set_to)}")


def _tells_of_cuda_graphs(seen: Seen) -> bool:
    return any(one.example.kind in OF_CUDA - {EventKind.TRITON_ERROR} for one in seen.events)


def _put_settings(draft: Draft, seen: Seen, variables: Mapping[str, str], cache: Guess, release: str) -> None:
    settings: dict[str, Any] = {}
    remarks = []
    captured = variables.get("TORCHDYNAMO_CAPTURE_SCALAR_OUTPUTS")
    guessed = guess_scalar_capture(seen)
    if captured is not None:
        settings["capture_scalar_outputs"] = captured == "1"
        remarks.append("TORCHDYNAMO_CAPTURE_SCALAR_OUTPUTS in the env file")
    elif guessed and cache.value == "compile_friendly":
        settings["capture_scalar_outputs"] = True
        remarks.append(f"guessed: {redact(guessed.because)}")
    elif guessed:
        told = redact(guessed.because)
        remarks.append(f"scalar capture is not set, since {cache.value} was not made for it. Yet {told}")
    for setting, (limit, *_) in seen.limits.items():
        if limit != (own := torchs_own(setting, release)):
            settings[setting] = limit
            remarks.append(f"{setting}: {limit} was hit, torch {release}'s own is {own}")
    backend = seen.setting("backend") or variables.get("TOTO_COMPILE_BACKEND", "")
    if backend and backend != "inductor":
        settings["backend"] = redact(backend)
    draft.put("settings", settings, *remarks)


def _put_variables(draft: Draft, given: ProductionEnv, env: Path) -> None:
    """Pass on what a cell may be given; everything else is named, its value never written."""
    clean = redact_variables(given.values)
    passed = {name: value for name, value in clean.items() if REDACTED not in value and not why_refused(name, value)}
    read_here = {_MODE, "TOTO_COMPILE_BACKEND", "TORCHDYNAMO_CAPTURE_SCALAR_OUTPUTS"}
    held_back = [name for name in clean if name not in passed and name not in read_here]
    remarks = [
        # a secret's name and a colon would hide what follows
        f"not passed on: {name}: {why}" if (why := why_refused(name, clean[name])) else f"{name} is kept back: a secret"
        for name in held_back
        if _OF_THE_COMPILER.match(name)
    ]
    others = [name for name in held_back if not _OF_THE_COMPILER.match(name)]
    if others:
        remarks.append(f"{len(others)} other variable{'s' if len(others) > 1 else ''} of {env.name} left out")
    if given.values.get("TOTO_DISABLE_COMPILE", "").lower() in _ON:
        remarks.append("TOTO_DISABLE_COMPILE is set there: this is not the env file of the day that the log is from")
    for name, line in given.computed.items():
        if _OF_THE_COMPILER.match(name):
            draft.unknown.append(f"{name}: the shell computes it, in line {line} of {env.name}")
    if given.unread:
        lines = ", ".join(map(str, given.unread[:_MOST_LINES])) + (", ..." if len(given.unread) > _MOST_LINES else "")
        draft.unknown.append(f"what these lines of {env.name} do, which are no plain NAME=value: {lines}")
    if passed:
        draft.put("variables", passed, *remarks)
    else:
        draft.remark("settings", *remarks)


def _put_events(draft: Draft, seen: Seen) -> None:
    expected, remarks = [], []
    can_come = [one for one in seen.events if _is_of_the_limit_taken(one, seen)]
    for one in can_come[:_MOST_EXPECTED]:
        event = one.example
        if (again := expected_event(event)) not in expected:
            expected.append(again)
        times = "once" if one.times == 1 else f"{one.times} times"
        remarks.append(f"{event.kind.value}{f' in {event.function}' if event.function else ''}: {times}")
        if event.file and not is_installed(event):
            remarks.append(f"  {event.file}:{event.line} is the service's own: no place is expected")
    for one in [one for one in seen.events if one not in can_come[:_MOST_EXPECTED]]:
        remarks.append(f"also in the log, not expected here: {describe(one)}")
    draft.put("expect", expected, "in the log, the worst first:", *(f"  {redact(remark)}" for remark in remarks))
    draft.told += [f"expects  {describe(one)}" for one in can_come[:_MOST_EXPECTED]]


def _is_of_the_limit_taken(one: SeenEvent, seen: Seen) -> bool:
    """Tell if it can come again with the limits that were taken; a log of two processes may have hit several."""
    limit, taken = one.example.limit, seen.limits.get(setting_of(one.example.limit_name))
    return limit is None or taken is None or limit == taken[0]


def describe(one: SeenEvent) -> str:
    event = one.example
    where = f" in {event.function}" if event.function else ""
    why = f": {event.reason}" if event.reason else ""
    return f"{event.kind.value}{where}{why} ({one.times}x)"
