"""`configure`: what the switch, the verdict and the installed packages come to, as one object that prints well."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path

from toto_compat.contract.request import CompileSettings, Device
from toto_compat.contract.torch_releases import config_name
from toto_compat.errors import InputError
from toto_compat.matrix.user_cache import user_cache_identity
from toto_compat.production.installed import installed_for, torch_version
from toto_compat.production.switch import Switch, SwitchReader
from toto_compat.verdict.switch_lines import COMPILE
from toto_compat.verdict.verdict_file import JudgedRow, permission, read_verdict

VERDICT_VARIABLE = "TOTO_COMPAT_VERDICT"
_DEFAULT_CACHE = "fixed_size"
_DEFAULT_MODE = "reduce-overhead"


class _StayEagerError(Exception):
    """Carries why nothing may be compiled."""


@dataclass(frozen=True)
class Plan:
    """What to run on a device: a cache and a mode, or toto-ts's own forecaster, and why."""

    cache: str | None  # None: toto-ts's own, eager
    cache_source: str  # what compile_toto takes as `cache`
    mode: str | None  # None: nothing is compiled
    settings: CompileSettings
    why: str


@dataclass(frozen=True)
class Bound:
    """Says what a forecaster was given in the end, as the objects themselves tell it."""

    device: str
    cache_class: str
    mode: str | None
    settings: CompileSettings
    why: str
    eager_because: str = ""  # '' or why nothing is compiled after all


def configure(
    env_file: str | Path | None = None,
    verdict: str | Path | None = None,
    *,
    environment: Mapping[str, str] | None = None,
) -> "Configuration":
    """Read the switch and the verdict; `print` what comes back to see what is in force and what decided it.

    `env_file` is looked at again before each forecast, with the process's environment, so that `toto-compat toggle
    disable` reaches a running service. `verdict` is a file of `toto-compat report --format verdict`; without it
    TOTO_COMPAT_VERDICT names one, and none means eager.
    """
    named = os.environ if environment is None else environment
    path = verdict or named.get(VERDICT_VARIABLE) or None
    file = Path(env_file).absolute() if env_file is not None else None
    return Configuration(SwitchReader(file, environment), Path(path) if path else None)


class Configuration:
    """The switch as it stands, the verdict, and what a forecaster bound on them."""

    def __init__(self, reader: SwitchReader, verdict: Path | None) -> None:
        self.verdict = verdict
        self.bound: Bound | None = None
        self._reader = reader

    @property
    def env_file(self) -> Path | None:
        return self._reader.file

    @property
    def switch(self) -> Switch:
        """Return what the variables ask for now."""
        return self._reader.read()

    def eager_now(self) -> str:
        """Say why the next forecast must be eager; '' if the switch does not ask for it."""
        switch = self._reader.read()
        if switch.eager_because:
            return switch.eager_because
        if switch.compile is False and self.bound is not None and self.bound.mode is not None:
            return f"{COMPILE} is off in {switch.decided_by[COMPILE]}"
        return ""

    def plan(self, device: Device, gpu: str | None, *, today: date | None = None) -> Plan:
        """Decide what to run on this device with what is installed."""
        try:
            return self._plan(device, gpu, today or datetime.now(UTC).date())
        except _StayEagerError as why:
            return Plan(None, "", None, CompileSettings(), str(why))

    def _plan(self, device: Device, gpu: str | None, today: date) -> Plan:
        switch = self.switch
        if switch.eager_because:
            raise _StayEagerError(switch.eager_because)
        if switch.forced:
            return _forced(switch)
        if self.verdict is None:
            raise _StayEagerError(f"there is no verdict ({VERDICT_VARIABLE} names none)")
        try:
            read = read_verdict(self.verdict)
        except InputError as error:
            raise _StayEagerError(error.message) from error
        installed = installed_for(device, gpu, _torch_here())
        found = permission(read, installed, today=today, mode=switch.mode, backend=switch.backend)
        row = found.row
        if row is None:
            raise _StayEagerError(found.why)
        if row.mode is not None and switch.compile is False:
            raise _StayEagerError(f"{COMPILE} is off in {switch.decided_by[COMPILE]}")
        _check_own_cache(row)
        source = row.cache if row.cache_source == "builtin" else row.cache_source
        return Plan(row.cache, source, row.mode, row.settings, found.why)

    def rows(self) -> list[tuple[str, str, str]]:
        """List what is in force: name, value, what decided it."""
        switch, bound = self.switch, self.bound
        torch = _torch_here()
        rows = [("torch", torch or "not installed", "the installed release")]
        if bound is None:
            says = switch.eager_because or "what the verdict allows, once forecaster(model) is called"
            rows.append(("runs", says if not switch.eager_because else f"eager: {says}", "the switch"))
        else:
            now = self.eager_now() or bound.eager_because
            compiled = bound.mode is not None and not now
            rows += [
                ("device", bound.device, "the model's weights"),
                ("runs", "compiled" if compiled else "eager", now or bound.why),
                ("cache class", bound.cache_class, "what is bound"),
                ("mode", (bound.mode or "none") if not now else "none", now or bound.why),
                *_settings_rows(bound, torch),
            ]
        rows += [(name, switch.values[name], where) for name, where in sorted(switch.decided_by.items())]
        rows.append(("env file", str(self.env_file or "none"), "configure(env_file=...)"))
        rows.append(("verdict", str(self.verdict or "none"), f"argument or {VERDICT_VARIABLE}"))
        return rows

    def __str__(self) -> str:
        rows = self.rows()
        wide = max(len(name) for name, _, _ in rows)
        return "\n".join(f"{name:<{wide}}  {value}  ({decided_by})" for name, value, decided_by in rows)


def dynamo_settings(settings: CompileSettings, torch: str) -> dict[str, object]:
    """Name dynamo's settings as the installed release does; those it lacks are left out."""
    values: dict[str, object] = {"capture_scalar_outputs": True} if settings.capture_scalar_outputs else {}
    for name in ("recompile_limit", "accumulated_recompile_limit"):
        value, spelled = getattr(settings, name), config_name(name, torch)
        if value is not None and spelled:
            values[spelled] = value
    return values


def _settings_rows(bound: Bound, torch: str) -> list[tuple[str, str, str]]:
    if bound.mode is None:
        return []
    held = {"backend": bound.settings.backend, **dynamo_settings(bound.settings, torch)}
    return [(name, str(value), "the settings that were judged") for name, value in held.items()]


def _check_own_cache(row: JudgedRow) -> None:
    """Check that a cache of the user's own is, file by file, the one that was judged."""
    if row.cache_source == "builtin":
        return
    try:
        here = user_cache_identity(row.cache_source)
    except InputError as error:
        raise _StayEagerError(f"cache {row.cache}: {error.message}") from error
    if not row.cache_identity or here != row.cache_identity:
        raise _StayEagerError(f"cache {row.cache}: {row.cache_source} differs from what was judged")


def _forced(switch: Switch) -> Plan:
    if switch.compile is not True:
        raise _StayEagerError(f"{COMPILE} is not on, forced or not")
    settings = CompileSettings(backend=switch.backend or "inductor")
    why = f"forced without a verdict: {switch.forced}"
    return Plan(_DEFAULT_CACHE, _DEFAULT_CACHE, switch.mode or _DEFAULT_MODE, settings, why)


def _torch_here() -> str:
    """Ask torch itself where the service has imported it, else its files."""
    loaded = sys.modules.get("torch")
    return str(getattr(loaded, "__version__", "")) or torch_version()
