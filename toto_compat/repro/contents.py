"""What goes into a bundle: the incident, everything pinned, what ran, what it said, and a script for an issue."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml
from packaging.utils import canonicalize_name

from toto_compat.contract.events import Event, EventKind
from toto_compat.contract.request import CellRequest
from toto_compat.contract.result import CellResult
from toto_compat.contract.suites import Suite
from toto_compat.environments.locks import found_lock_path, parse_lock
from toto_compat.environments.virtualenv import venv_folder
from toto_compat.errors import EnvironmentBuildError, InputError
from toto_compat.logs.source import opened_log
from toto_compat.matrix.document import is_file
from toto_compat.matrix.schema import CacheSource, Matrix
from toto_compat.matrix.toto_source import is_release
from toto_compat.matrix.user_cache import BUILTIN, decoded_code, split_source, user_cache_files
from toto_compat.repro.incident import Incident
from toto_compat.repro.minimal import NAME, NoMinimalScript, differences, minimal_script
from toto_compat.repro.portable import CACHE, portable_request
from toto_compat.repro.redaction.code import redact_code
from toto_compat.repro.redaction.text import redact, redact_data, redact_variables
from toto_compat.repro.trace import CELL_LOG, TracedRun

INCIDENT = "incident.yaml"
MATRIX = "matrix.yaml"
RESULT = "result.json"
REQUEST = "request.json"
_IN_THE_ENVIRONMENT = f"python -m toto_compat.cell {REQUEST} {RESULT}  # the cell, in its environment"
PACKAGES = "environment/packages.txt"
LOCK = "environment/lock.txt"
_LARGEST_LOG = 16 << 20
_LEAD = 64 << 10  # no secret of several lines is longer


@dataclass
class Contents:
    """The members of a bundle as they come together, and what could not be put in."""

    files: dict[str, bytes] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def put(self, name: str, text: str) -> None:
        self.files[name] = text.encode()


def gather(
    incident: Incident,
    incident_folder: Path,
    result: CellResult,
    matrix: Matrix,
    *,
    log: Path | None,
    command: Sequence[str],
    shows: str,
) -> Contents:
    """Collect everything but what must be run; every text passes the redaction on its way in."""
    contents = Contents()
    request = result.request
    data = portable_incident(incident, incident_folder, contents)
    # the environment under its name in the bundle's own matrix: whoever replays it needs no matrix of this project
    contents.put(INCIDENT, f"# From a bundle of toto-compat: {redact(incident.title)}\n{_yaml(data)}")
    contents.put(MATRIX, _yaml(_small_matrix(matrix, request, contents)))
    contents.put(RESULT, json.dumps(redact_data(result.model_dump(mode="json", by_alias=True)), indent=1) + "\n")
    packages = [f"{name}=={version}" for name, version in sorted(result.provenance.packages.items())]
    contents.put(PACKAGES, redact("\n".join(packages)) + "\n")
    contents.put("environment/variables.json", json.dumps(redact_variables(request.variables), indent=1) + "\n")
    _put_lock(contents, result)
    _put_log(contents, log)
    given = redact_data(portable_request(request).model_dump(mode="json", by_alias=True))
    contents.put(REQUEST, json.dumps(given, indent=1) + "\n")
    contents.put("command.txt", f"{redact(shlex.join(command))}\n{_IN_THE_ENVIRONMENT}\n")
    contents.put("README.txt", _readme(incident, result, shows))
    return contents


def add_script(contents: Contents, incident: Incident, result: CellResult) -> str:
    """Put the minimal script in; return it, empty where there is none."""
    shown = [redact(_told(event)) for event in failing_events(result)[:3]]
    provenance = result.provenance
    try:
        script = minimal_script(
            result.request,
            title=redact(incident.title),
            python=provenance.python,
            toto_ts=provenance.toto_ts,
            expected=shown,
        )
    except NoMinimalScript as none:
        contents.notes.append(f"no minimal script: {none}")
        return ""
    contents.notes += [f"{NAME} is not all of the cell: {told}" for told in differences(result.request)]
    script = redact_code(script)
    contents.put(NAME, script)
    return script


def add_run(contents: Contents, run: TracedRun) -> None:
    """Put in what a run under TORCH_TRACE left."""
    contents.files |= run.files
    contents.notes += run.notes


def about(result: CellResult, contents: Contents, *, command: Sequence[str], shows: str) -> dict[str, Any]:
    """Make the head of the manifest."""
    provenance = result.provenance
    return {
        "made_by": metadata.version("toto-compat"),
        "cell": str(result.cell),
        "torch": provenance.torch,
        "lock": provenance.lock,
        "image": provenance.image,
        "command": tuple(redact(word) for word in command),
        "shows": shows,
        "notes": tuple(redact(note) for note in contents.notes),  # of a build that failed, what pip said
    }


def failing_events(result: CellResult) -> list[Event]:
    """Pick the events that an issue would be about: limits before recompiles before breaks."""
    evidence = result.evidence.get(Suite.RECOMPILE)
    events = evidence.events if evidence else ()
    order = (EventKind.RECOMPILE_LIMIT, EventKind.CUDAGRAPH_SKIP, EventKind.RECOMPILE, EventKind.GRAPH_BREAK)
    ranked = [event for kind in order for event in events if event.kind is kind]
    return ranked or list(events)


def failing_frames(result: CellResult) -> set[str]:
    """Return the numbers of dynamo's frames that the worst events are about: '6' of '6/8'."""
    events = failing_events(result)
    worst = [event for event in events if event.kind is events[0].kind] if events else []
    return {event.compile_id.partition("/")[0] for event in worst if event.compile_id}


def _told(event: Event) -> str:
    head = f"[{event.compile_id}] " if event.compile_id else ""
    what = f"hit {event.limit_name or event.kind.value} ({event.limit})" if event.limit else event.kind.value
    where = f" in '{event.function}' ({event.file}:{event.line})" if event.function else ""
    return f"{head}{what}{where}: {event.reason}"


# --- the parts --------------------------------------------------------------------------------------------------------


def portable_incident(incident: Incident, folder: Path, contents: Contents) -> dict[str, Any]:
    """Name the incident's files as they are inside the bundle, or as missing."""
    data: dict[str, Any] = incident.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    data.setdefault("schema", 1)
    if incident.log:
        text = log_text(folder / incident.log)
        if text is None:
            data.pop("log")
            contents.notes.append("the incident's own log was not put in: it cannot be read")
        else:
            data["log"] = "production.log"
            contents.put("production.log", text)
    workload = data.get("workload", {})
    if workload.get("csv"):
        contents.notes.append(f"the series {workload['csv']['path']} is yours and was not put in: replay needs it")
    if workload.get("checkpoint"):
        contents.notes.append(
            f"the checkpoint {redact(workload['checkpoint'])} was not put in: replay loads it by name"
        )
    return redact_data(data)  # type: ignore[no-any-return]


def _small_matrix(matrix: Matrix, request: CellRequest, contents: Contents) -> dict[str, Any]:
    """Keep of the matrix the one environment, the built-in caches and the one that ran."""
    caches = {name: cache for name, cache in matrix.caches.items() if cache.source == BUILTIN}
    if request.cache.source != BUILTIN:
        file, class_name = split_source(request.cache.source)
        for name, content in user_cache_files(file).items():
            _put_code(contents, f"{CACHE}/{name}", content)
        caches[request.cache.name] = CacheSource(source=f"{CACHE}/{file.name}:{class_name}")
    fork = request.environment.toto_ts
    if not is_release(fork) and not re.match(r"git\+(?!file:)", fork):
        contents.notes.append(
            f"toto-ts is what lies at {fork} on this machine: every replay refuses the bundle. Name a commit in "
            "matrix.yaml that others can fetch, git+https://host/fork@<commit>, and run it again"
        )
    small = matrix.model_copy(
        update={
            "environments": {request.cell.environment: request.environment},
            "production": request.cell.environment,
            "caches": caches,
            # an incident has its own; files of other workloads are not where this is read
            "workloads": {
                name: workload.model_copy(update={"csv": None, "checkpoint": None})
                for name, workload in matrix.workloads.items()
            },
        }
    )
    data: dict[str, Any] = redact_data(small.model_dump(mode="json", by_alias=True, exclude_defaults=True))
    return data


def _put_code(contents: Contents, name: str, content: bytes) -> None:
    text, encoding = decoded_code(content)
    clean = redact_code(text)
    # what the encoding has no byte for came out of an escape, and becomes one again
    contents.files[name] = content if clean == text else clean.encode(encoding, "backslashreplace")
    if clean != text:
        contents.notes.append(f"secrets were taken out of {name}: it may not do what it did")


def _put_lock(contents: Contents, result: CellResult) -> None:
    request = result.request
    name = request.cell.environment
    locked, frozen = found_lock_path(name), venv_folder(name, request.environment) / "lock.txt"
    for path, member in ((locked, LOCK), (frozen, "environment/freeze.txt")):
        if (text := _text_of(path, 1 << 20)) is not None:
            contents.put(member, redact(text))
    if LOCK not in contents.files:
        contents.notes.append(f"{name} has no lock with hashes; {PACKAGES} lists what was installed")
        return
    if differs := _not_what_ran(locked, result):
        contents.notes.append(f"{LOCK} is the lock of {name} as it is now, and another than it ran with: {differs}")


def _not_what_ran(path: Path, result: CellResult) -> str:
    """Say in what a lock differs from the packages that the cell listed; empty where it does not."""
    try:
        lock = parse_lock(path.read_text(encoding="utf-8"), path)
    except (EnvironmentBuildError, OSError, UnicodeDecodeError) as error:
        return f"it cannot be read: {str(error).splitlines()[0]}"
    ran = {str(canonicalize_name(name)): version for name, version in result.provenance.packages.items()}
    differing = [
        f"{one.name} {one.version} in it, {ran[one.name]} when it ran"
        for one in lock.packages
        if one.name in ran and ran[one.name] != one.version
    ]
    return "; ".join(differing[:6])


def _put_log(contents: Contents, log: Path | None) -> None:
    text = log_text(log) if log else None
    if text is None:
        contents.notes.append("the cell's log is not kept any more, or is no text")
    else:
        contents.put("cell.log", text)


def log_text(path: Path) -> str | None:
    """Return a log without its secrets, packed or not, of a long one its beginning and its end; None if there is none.

    What stands in the middle of a secret of several lines can only be known by what comes before: the end is read from
    a little earlier than it is kept.
    """
    kept = _LARGEST_LOG // 2
    if not is_file(path):  # a pipe would be waited for
        return None
    try:
        with opened_log(str(path), path.name) as stream:
            head, tail, length = stream.read(kept), bytearray(), 0
            while chunk := stream.read(1 << 20):
                length += len(chunk)
                tail += chunk
                del tail[: max(0, len(tail) - kept - _LEAD)]
    except (InputError, OSError):
        return None
    if length == len(tail):
        return redact((head + tail).decode("utf-8", "replace"))
    first, last = (redact(part.decode("utf-8", "replace")) for part in (head, tail))
    _, _, whole_lines = last[max(_LEAD, len(last) - kept) :].partition("\n")
    told = f"[... about {(length - kept) / 1e6:.1f} MB of the log were left out here ...]"
    return "\n".join([first.rpartition("\n")[0], told, whole_lines])


def _text_of(path: Path, largest: int) -> str | None:
    try:
        if not path.is_file() or path.stat().st_size > largest:
            return None
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _yaml(data: Mapping[str, Any]) -> str:
    text: str = yaml.safe_dump(dict(data), sort_keys=False, allow_unicode=True, width=110)
    return text


def _readme(incident: Incident, result: CellResult, shows: str) -> str:
    provenance = result.provenance
    return redact(
        f"{incident.title}\n\n"
        f"{shows} with torch {provenance.torch}, toto-ts {provenance.toto_ts}, Python {provenance.python},"
        f" cell {result.cell}.\n\n"
        "toto-compat repro <this file>   runs it again in the same environment and says whether it is the same\n"
        f"{NAME}                      shows it with torch and toto-ts alone; minimal.log is what it printed\n"
        "incident.yaml, matrix.yaml      what is run again, and where\n"
        "environment/                    packages, hashed lock and variables of the process\n"
        "command.txt, request.json       the command that was given, and what the cell was asked\n"
        "result.json, cell.log           what the cell measured and printed\n"
        f"trace/, code/                   TORCH_TRACE of the script, or of the cell ({CELL_LOG}) where there is none;\n"
        "                                tlparse's page of it, generated code\n"
        "manifest.json                   every file with its sha256, and what is not here\n"
    )
