"""A folder that TORCH_TRACE wrote -> events, through tlparse: what a service told of every compilation, in full."""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from toto_compat.contract.events import Event
from toto_compat.contract.log_line import LogLine, printable
from toto_compat.contract.torch_messages import parse_messages
from toto_compat.errors import InputError
from toto_compat.logs.times import time_in

_TRACES = "dedicated_log_torch_trace_*.log"
_SECONDS = 600
_LIMIT = re.compile(
    r"(?P<name>(?:accumulated_)?(?:recompile|cache_size)_limit)\b.{0,200}?"
    r"(?:set to |reached ?\(?|\()(?P<number>\d{1,9})",
    re.S,
)


def is_trace_folder(path: str) -> bool:
    """Tell whether TORCH_TRACE wrote this folder."""
    return path != "-" and Path(path).is_dir() and next(Path(path).glob(_TRACES), None) is not None


def trace_events(folder: Path, name: str) -> Iterator[Event]:
    """Yield the events of every process that traced into the folder."""
    tlparse = tlparse_program()
    for trace in sorted(folder.glob(_TRACES)):
        with tempfile.TemporaryDirectory() as scratch:
            out = Path(scratch) / "out"
            said = _why_not_read([tlparse, "--no-browser", "--plain-text", "-o", str(out), str(trace)])
            if said or not (out / "raw.jsonl").exists():
                raise InputError(
                    f"{name}/{trace.name}: tlparse could not read it: {printable(said or 'it wrote no report')[:200]}",
                    hint="Was the process ended while it wrote? Delete the file and analyze the rest.",
                )
            yield from _events_of(out, f"{name}/{trace.name}")


def _why_not_read(command: list[str]) -> str:
    """Run tlparse; the last thing that it said where it failed, '' where it did not."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"it did not end within {_SECONDS:g} s"
    if not done.returncode:
        return ""
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"it ended with {done.returncode}"


def tlparse_program() -> str:
    """Name the program that reads a trace; InputError where it is not installed."""
    beside = Path(sys.executable).parent / "tlparse"
    found = str(beside) if beside.exists() else shutil.which("tlparse")
    if found is None:
        raise InputError(
            "a folder of TORCH_TRACE is read through tlparse, which is not installed",
            hint="pip install 'toto-compat[logs]'",
        )
    return found


def _events_of(report: Path, source: str) -> Iterator[Event]:
    text = (report / "raw.jsonl").read_text(encoding="utf-8", errors="replace")
    frames: dict[Any, tuple[str, str]] = {}  # frame -> function and place: a compilation that fails has no name itself
    records = []
    # splitlines also cuts at letters that JSON leaves in its strings
    for number, line in enumerate(filter(None, text.split("\n")), start=1):
        record = json.loads(line)
        metrics = record.get("compilation_metrics") or {}
        if metrics.get("co_name"):
            place = f"{metrics.get('co_filename') or 'unknown'}:{metrics.get('co_firstlineno') or 0}"
            frames.setdefault(record.get("frame_id"), (metrics["co_name"], place))
        records.append((number, record))
    for number, record in records:
        function, place = frames.get(record.get("frame_id"), ("unknown", "unknown:0"))
        said = LogLine(
            number,
            "",
            process=str(record.get("thread", "")),
            torch_prefix=True,
            compile_id=f"{record.get('frame_id')}/{record.get('frame_compile_id')}",
            time=time_in(str(record.get("timestamp", ""))),
        )
        lines = (replace(said, text=printable(text)) for text in _as_logged(record, function, place, report))
        yield from parse_messages(lines, source)


def _as_logged(record: dict[str, Any], function: str, place: str, report: Path) -> list[str]:
    """Write the lines of a log that say the same as a trace record, so that one grammar reads both."""
    artifact = (record.get("artifact") or {}).get("name", "")
    if artifact == "recompile_reasons":
        guards = (f"    - {guard}" for guard in _guards(_payload(record, report)))
        return [f"Recompiling function {function} in {place}", "triggered by the following guard failure(s):", *guards]
    if artifact == "dynamo_graph_break_reason":
        return _payload(record, report).splitlines()
    metrics = record.get("compilation_metrics") or {}
    limit = _LIMIT.search(str(metrics.get("fail_reason") or ""))
    if limit is None:
        return []
    reason = (str(metrics.get("recompile_reason") or "").splitlines() or [""])[0]
    return [
        f"torch._dynamo hit config.{limit['name']} ({limit['number']})",
        f"   function: '{function}' ({place})",
        f"   last reason: {reason}",
    ]


def _payload(record: dict[str, Any], report: Path) -> str:
    named = record.get("payload_filename")
    # The name comes from the trace: it must not lead out of the report.
    path = (report / str(named)).resolve()
    if not named or not path.is_relative_to(report.resolve()) or not path.is_file():
        return ""
    return path.read_text(encoding="utf-8", errors="replace")


def _guards(payload: str) -> list[str]:
    """Read the failed guards, which tlparse writes as a JSON list, or as text if there is one."""
    try:
        listed = json.loads(payload)
    except ValueError:
        listed = [payload]
    return [str(guard).splitlines()[0] for guard in listed if guard] if isinstance(listed, list) else []
