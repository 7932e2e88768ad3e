"""Forecasts of a cell again under TORCH_TRACE: by its minimal script, or by itself where there is none.

What it printed, tlparse's page, the generated code.
"""

import hashlib
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from toto_compat.contract.request import CellRequest
from toto_compat.contract.suites import Group
from toto_compat.errors import InputError, TotoCompatError
from toto_compat.evidence.files import cache_folder, write_model
from toto_compat.production.torch_trace import tlparse_program
from toto_compat.repro.minimal import NAME
from toto_compat.repro.portable import traceable_request
from toto_compat.repro.redaction.text import redact
from toto_compat.runtimes.cell_process import REQUEST_FILE
from toto_compat.runtimes.seam import PreparedEnvironment, Runtime

_LARGEST_LOG = 16 << 20
_LARGEST_TRACE = 48 << 20
_LARGEST_PAGE = 48 << 20
_MOST_FILES = 1_500
_MOST_CODE = 40
_TLPARSE_SECONDS = 300
CELL_LOG = "traced.log"  # what the cell printed; of a script it is minimal.log


@dataclass(frozen=True)
class TracedRun:
    """Holds what a run under TORCH_TRACE left: files by their name in a bundle, and remarks on what is not there."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def run_minimal(
    runtime: Runtime, prepared: PreparedEnvironment, script: str, *, minutes: float, frames: Iterable[str] = ()
) -> TracedRun:
    """Run the script with the environment's interpreter, isolated from this package. `frames` are those that failed."""
    with _scratch() as folder:
        (folder / NAME).write_text(script, encoding="utf-8")
        # isolated (-I): PYTHONPATH, where a cell finds this package, is not looked at
        words = ("{python}", "-I", NAME)
        traced = _Traced("the minimal script", "minimal", "minimal.log", minutes, frozenset(frames))
        return traced.run(runtime, prepared, words, folder, {})


def run_cell(
    runtime: Runtime, prepared: PreparedEnvironment, request: CellRequest, *, minutes: float, frames: Iterable[str] = ()
) -> TracedRun:
    """Take the cell's own forecasts with its own cache, as the suite does that watches the compiler."""
    traced = _Traced("the cell", "cell", CELL_LOG, minutes, frozenset(frames))
    if request.checkpoint_folder is not None and prepared.runtime == "docker":
        return TracedRun(notes=("no TORCH_TRACE: a container does not see the checkpoint",))
    with _scratch() as folder:
        try:
            write_model(folder / REQUEST_FILE, traceable_request(request, folder))
        except (TotoCompatError, OSError) as error:
            return TracedRun(notes=(f"no TORCH_TRACE: what the cell reads is not there any more: {error}",))
        # the group itself: a cell takes TORCH_TRACE away from those that it starts
        words = ("{python}", "-m", "toto_compat.cell.group", REQUEST_FILE, Group.OBSERVE.value, "left.json")
        return traced.run(runtime, prepared, words, folder, {**request.variables, "PYTHONSAFEPATH": "1"})


@contextmanager
def _scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="traced-", dir=cache_folder()) as scratch:
        folder = Path(scratch)
        (folder / "trace").mkdir()
        yield folder


@dataclass(frozen=True)
class _Traced:
    """What is run, and what its files are called."""

    what: str
    name: str
    log: str
    minutes: float
    frames: frozenset[str]

    def run(
        self,
        runtime: Runtime,
        prepared: PreparedEnvironment,
        words: tuple[str, ...],
        folder: Path,
        variables: Mapping[str, str],
    ) -> TracedRun:
        given = [f"{name}={value}" for name, value in variables.items()]
        try:
            attached = runtime.attached(prepared, ("env", *given, "TORCH_TRACE=trace", *words), folder, terminal=False)
        except TotoCompatError as error:
            return TracedRun(notes=(f"{self.what} was not run: {error.message}",))
        with (folder / "printed").open("w+b") as printed:
            try:
                done = subprocess.run(
                    attached.words,
                    env=attached.variables,
                    cwd=attached.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=printed,
                    stderr=subprocess.STDOUT,
                    timeout=self.minutes * 60,
                    check=False,
                )
                code: int | None = done.returncode
            except subprocess.TimeoutExpired:
                code = None
            printed.seek(0)
            said = redact(printed.read(_LARGEST_LOG).decode("utf-8", "replace"))
        notes = [f"{self.what} was given up after {self.minutes:g} minutes"] if code is None else []
        if code:
            notes.append(f"{self.what} ended with exit code {code}: see {self.log}")
        files, more = _traced(folder, self.name, self.frames)
        printed_files = {self.log: said.encode()} if said else {}
        return TracedRun({**printed_files, **files}, (*notes, *more))


def _traced(folder: Path, name: str, frames: frozenset[str]) -> tuple[dict[str, bytes], list[str]]:
    """Gather the trace, tlparse's page of it and the code of the frames that failed, as far as there are any."""
    traces = sorted((folder / "trace").glob("dedicated_log_torch_trace_*.log"), key=lambda path: path.stat().st_size)
    if not traces:
        return {}, ["no TORCH_TRACE was written"]
    trace = traces[-1]  # of workers there are others, empty but for their header
    if trace.stat().st_size > _LARGEST_TRACE:
        return {}, [f"TORCH_TRACE was left out: {trace.stat().st_size / 1e6:.0f} MB"]
    files = {f"trace/dedicated_log_torch_trace_{name}.log": _with_its_hashes(_redacted(trace.read_bytes()))}
    try:
        # the page is for people; the code is taken from plain text
        page, plain = (_tlparsed(trace, folder / name, *options) for name, options in _READINGS.items())
    except (InputError, subprocess.TimeoutExpired, OSError) as error:
        return files, [f"tlparse's page was not made: {redact(str(error))[:300]}"]
    notes = []
    page.pop("raw.log", None)  # the trace once more
    size = sum(path.stat().st_size for path in page.values())
    if len(page) > _MOST_FILES or size > _LARGEST_PAGE:
        told = f"{len(page)} files, {size / 1e6:.0f} MB"
        notes.append(f"tlparse's page was left out: {told}; `tlparse trace/*.log` makes it")
    else:
        files |= {f"trace/tlparse/{_member(own)}": _redacted(path.read_bytes()) for own, path in page.items()}
    code = dict(_generated_code(plain, frames))
    if not code:
        notes.append("no generated code: nothing of the failing function reached inductor")
    return {**files, **code}, notes


_READINGS: Mapping[str, tuple[str, ...]] = {"page": (), "plain": ("--plain-text",)}


def _tlparsed(trace: Path, out: Path, *options: str) -> dict[str, Path]:
    """Read a trace with tlparse; the files that it wrote, by their names below its folder."""
    done = subprocess.run(
        [tlparse_program(), "--no-browser", *options, "-o", str(out), str(trace)],
        capture_output=True,
        text=True,
        timeout=_TLPARSE_SECONDS,
        check=False,
    )
    if done.returncode or not (out / "index.html").is_file():
        said = (done.stderr.strip().splitlines() or ["it wrote no page"])[-1]
        raise InputError(said)
    return {path.relative_to(out).as_posix(): path for path in sorted(out.rglob("*")) if path.is_file()}


def _generated_code(pages: Mapping[str, Path], frames: frozenset[str]) -> Iterator[tuple[str, bytes]]:
    """Gather the failed frames' output code, of all where none is known: 'code/6_0/inductor_output_code.py'."""
    found = []
    for name, path in pages.items():
        part = re.match(
            r"-_(?P<frame>\d+)_(?P<compile>\d+)_(?P<attempt>\d+)/(?P<file>inductor_output_code.*)\.txt$", name
        )
        if part and (not frames or part["frame"] in frames):
            found.append((f"code/{part['frame']}_{part['compile']}_{part['attempt']}/{_member(part['file'])}.py", path))
    for name, path in found[:_MOST_CODE]:
        yield name, _redacted(path.read_bytes())


def _member(name: str) -> str:
    """Make a name that every system takes."""
    return "/".join(re.sub(r"[^A-Za-z0-9._+=@-]", "_", part)[-150:] or "_" for part in name.split("/"))


def _with_its_hashes(trace: bytes) -> bytes:
    """Write the hash of each payload anew: tlparse drops one that lost a secret and with it what its hash says."""
    lines = trace.split(b"\n")
    at, head = len(lines), len(lines)
    for at in range(len(lines) - 1, -1, -1):
        if lines[at].startswith(b"\t"):
            continue
        payload = b"\n".join(line[1:] for line in lines[at + 1 : head])
        told = hashlib.md5(payload, usedforsecurity=False).hexdigest().encode()
        lines[at] = _PAYLOAD.sub(rb"\g<name>" + told, lines[at])
        head = at
    return b"\n".join(lines)


_PAYLOAD = re.compile(rb'(?P<name>"has_payload": ")[0-9a-f]{32}(?=")')


def _redacted(content: bytes) -> bytes:
    return redact(content.decode("utf-8", "replace")).encode()
