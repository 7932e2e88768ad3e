"""The verdict as one JSON file: what a service may run, on what it was judged, and until when that holds.

The service reads it, so nothing here needs more than pydantic.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from toto_compat.contract.request import CompileSettings, Device
from toto_compat.contract.strict_model import StrictModel
from toto_compat.errors import InputError

VERDICT_SCHEMA = 1
# A verdict is a few kilobytes. What is larger is another file, and a service does not read it into memory.
_MOST_BYTES = 1_000_000
# No verdict of this project asks to be reviewed later than this: one that does was not written by it.
_LONGEST_LIFE = timedelta(days=366)
_HINT = "write it anew: toto-compat report RUN --format verdict --output FILE"
_Date = Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")]
_Line = Annotated[str, Field(max_length=2000)]
_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:-]{0,199}$")]


class JudgedRow(StrictModel):
    """A row that is PASS as production runs it, with everything that must be the same where it is used."""

    cell: _Line
    device: Device
    torch: _Line  # as torch names itself, build included: 2.9.0+cu128
    toto_ts: _Line
    xformers: str | None = None
    gpu: str | None = None
    cache: _Name
    cache_source: _Line = "builtin"  # or path/to/file.py:Class
    cache_identity: _Line = ""  # of the files of a user's own cache; '' where they changed since
    cache_class: _Line = ""  # module:qualname that was bound
    source_hash: _Line  # of the code of this package that was judged
    mode: Annotated[str, Field(pattern=r"^[a-z-]{1,40}$")] | None  # None: the cache alone, nothing compiled
    settings: CompileSettings = CompileSettings()
    judged: _Date  # the day its evidence was measured


class DeviceVerdict(StrictModel):
    answer: _Line
    sentence: Annotated[str, Field(max_length=20_000)] = ""
    reason: Annotated[str, Field(max_length=20_000)] = ""
    rows: tuple[JudgedRow, ...] = Field(default=(), max_length=1000)  # the preferred one first


class Verdict(StrictModel):
    """Holds what one run allows, per device."""

    schema_version: Annotated[Literal[1], Field(alias="schema")] = 1
    run: _Line
    judged: _Date
    review_by: _Date
    devices: dict[Device, DeviceVerdict]

    @model_validator(mode="after")
    def _dates_make_sense(self) -> "Verdict":
        judged, review = date.fromisoformat(self.judged), date.fromisoformat(self.review_by)
        if not judged <= review <= judged + _LONGEST_LIFE:
            raise ValueError(f"review_by {review} does not follow from judged {judged}")
        return self

    def age_text(self, today: date) -> str:
        days = (today - date.fromisoformat(self.judged)).days
        left = (date.fromisoformat(self.review_by) - today).days
        until = f"{left} days left" if left >= 0 else f"past its review date since {-left} days"
        return f"run {self.run}, {days} days old, to be reviewed by {self.review_by} ({until})"


@dataclass(frozen=True)
class Installed:
    """Says what a service runs on, as far as a verdict depends on it."""

    device: Device
    torch: str
    toto_ts: str
    xformers: str | None
    gpu: str | None
    source_hash: str


@dataclass(frozen=True)
class Permission:
    """The row that may be used here, or None and why not."""

    row: JudgedRow | None
    why: str


def read_verdict(path: Path) -> Verdict:
    """Read and check a verdict; InputError for what is missing, damaged, of another schema or no verdict at all."""
    try:
        if path.exists() and not path.is_file():
            raise InputError(f"{path}: no regular file", hint=_HINT)  # a pipe would be waited for
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path}: the verdict cannot be read: {error.strerror or error}", hint=_HINT) from error
    if len(content) > _MOST_BYTES:
        raise InputError(f"{path}: larger than any verdict", hint=_HINT)
    try:
        document: Any = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: damaged, not JSON: {error}", hint=_HINT) from error
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != VERDICT_SCHEMA:
        found = "no verdict" if schema is None else f"of schema {schema!r}, this version reads {VERDICT_SCHEMA}"
        raise InputError(f"{path}: {found}", hint=_HINT)
    try:
        return Verdict.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InputError(f"{path}: {where + ': ' if where else ''}{first['msg']}", hint=_HINT) from error


class _RefusedError(Exception):
    """Carries why no row may be used here."""


def permission(
    verdict: Verdict, installed: Installed, *, today: date, mode: str | None = None, backend: str | None = None
) -> Permission:
    """Find the row that was judged on what is installed, with the mode and backend that are asked for, if any are."""
    try:
        _check_dates(verdict, today)
        rows = _rows_judged_here(verdict, installed)
        row = _row_asked_for(rows, mode, backend)
    except _RefusedError as refusal:
        return Permission(None, str(refusal))
    return Permission(row, f"{row.cell} is PASS in run {verdict.run} of {row.judged}")


def _check_dates(verdict: Verdict, today: date) -> None:
    if today > date.fromisoformat(verdict.review_by):
        raise _RefusedError(f"the verdict of run {verdict.run} was to be reviewed by {verdict.review_by}")
    if date.fromisoformat(verdict.judged) > today + timedelta(days=1):
        raise _RefusedError(f"the verdict is dated {verdict.judged}, which is in the future: check the clock")


def _rows_judged_here(verdict: Verdict, installed: Installed) -> Sequence[JudgedRow]:
    decided = verdict.devices.get(installed.device)
    if decided is None or not decided.rows:
        said = f"{decided.answer}: {decided.reason}" if decided else "nothing was judged"
        raise _RefusedError(f"the verdict allows nothing on {installed.device.value} ({said})")
    rows: Sequence[JudgedRow] = [row for row in decided.rows if row.device is installed.device]
    for name in ("torch", "gpu", "toto_ts", "xformers", "source_hash"):
        here = getattr(installed, name)
        if not here and name in ("torch", "toto_ts", "source_hash"):  # two unknowns are not the same thing
            raise _RefusedError(f"{_NAMES.get(name, name)} is not installed here")
        fitting = [row for row in rows if getattr(row, name) == here]
        if not fitting:
            raise _RefusedError(_differs(name, list(dict.fromkeys(getattr(row, name) for row in rows)), here))
        rows = fitting
    return rows


def _row_asked_for(rows: Sequence[JudgedRow], mode: str | None, backend: str | None) -> JudgedRow:
    if backend is not None:
        rows = [row for row in rows if row.settings.backend == backend]
        if not rows:
            raise _RefusedError(f"backend {backend} was not judged PASS here")
    judged = dict.fromkeys(row.mode or "none" for row in rows)
    for row in rows:
        if mode is None or row.mode in (mode, None):
            return row
    raise _RefusedError(f"mode {mode} was not judged PASS here, only {', '.join(judged)}")


_NAMES = {"gpu": "GPU", "toto_ts": "toto-ts", "source_hash": "the code of the cache and its model"}


def _differs(name: str, judged: Sequence[Any], here: Any) -> str:
    called = _NAMES.get(name, name)
    if name == "source_hash":
        return f"{called} differs from what was judged: another toto-compat, or an edited one; run the matrix with it"
    wanted = ", ".join(str(one or "none") for one in judged)
    return f"{called} here is {here or 'none'}, judged was {wanted}"
