"""From a decision to the rows that a service may run, and to the lines that ask for them."""

from datetime import datetime

from toto_compat.errors import InputError
from toto_compat.matrix.user_cache import BUILTIN, split_source, user_cache_files, user_cache_identity
from toto_compat.verdict.decision import Decision, DeviceDecision
from toto_compat.verdict.judge import JudgedCell
from toto_compat.verdict.judged_run import JudgedRun
from toto_compat.verdict.switch_lines import switch_lines
from toto_compat.verdict.verdict_file import DeviceVerdict, JudgedRow, Verdict


def verdict_of(judged: JudgedRun) -> Verdict:
    """Give what `report --format verdict` writes: dated by the run, not by the day it is printed."""
    info = judged.run.info
    return Verdict(
        run=info.name,
        judged=(info.finished or info.started)[:10],
        review_by=judged.decision.review_by,
        devices={
            device: DeviceVerdict(
                answer=decided.answer.value, sentence=decided.sentence, reason=decided.reason, rows=judged_rows(decided)
            )
            for device, decided in judged.decision.devices.items()
        },
    )


def judged_rows(decided: DeviceDecision) -> tuple[JudgedRow, ...]:
    return tuple(_row(cell, compiled=not decided.take_cache_only) for cell in decided.allowed)


def settings_to_copy(decided: DeviceDecision) -> tuple[str, ...]:
    """Write the lines for the production environment file of one device."""
    rows = judged_rows(decided)
    return switch_lines(rows[0] if rows else None)


def env_text(decision: Decision, device_name: str | None = None) -> str:
    """Give what `report --format env` prints: of the device that is named, else of CUDA where it has an answer."""
    devices = {device.value: decided for device, decided in decision.devices.items()}
    answered = [name for name, decided in devices.items() if decided.contenders]
    name = device_name or next(iter(answered), "cuda")
    if name not in devices:
        raise InputError(f"--device {name}: the run has no cell on it", hint=f"it has {', '.join(devices)}")
    return "\n".join(settings_to_copy(devices[name])) + "\n"


def _row(cell: JudgedCell, *, compiled: bool) -> JudgedRow:
    request, origin = cell.result.request, cell.result.provenance
    return JudgedRow(
        cell=cell.result.cell,
        device=request.device,
        torch=origin.torch,
        # a fork has the version of what it was forked from
        toto_ts=f"{origin.toto_ts} of {origin.toto_fork}" if origin.toto_fork else origin.toto_ts,
        xformers=origin.xformers,
        gpu=origin.gpu,
        cache=request.cache.name,
        cache_source=request.cache.source,
        cache_identity=_identity(request.cache.source, origin.started),
        cache_class=origin.cache_class,
        source_hash=origin.source_hash,
        mode=request.cell.mode if compiled else None,
        settings=request.settings,
        judged=origin.started[:10],
    )


def _identity(source: str, judged_at: str) -> str:
    """Name the content of a user's own cache; '' where a file of it changed since it was judged, or is gone."""
    if source == BUILTIN:
        return ""
    file, _ = split_source(source)
    try:
        changed = max((file.parent / name).stat().st_mtime for name in user_cache_files(file))
        return user_cache_identity(source) if changed <= _seconds(judged_at) else ""
    except (InputError, OSError):
        return ""


def _seconds(moment: str) -> float:
    return datetime.fromisoformat(moment.replace("Z", "+00:00")).timestamp()
