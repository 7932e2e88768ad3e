"""A folder of TORCH_TRACE through tlparse: the same counts as the log and the live observer of such a run."""

import json
import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest

from toto_compat.errors import InputError
from toto_compat.production import torch_trace
from toto_compat.production.analyze import analyze_logs

LOGS = Path(__file__).parent.parent / "fixtures" / "logs"
TRACE = LOGS / "trace-2.13.0"


def needs_tlparse() -> None:
    if not shutil.which("tlparse") and not (Path(sys.executable).parent / "tlparse").exists():
        pytest.skip("pip install 'toto-compat[logs]'")


def test_a_trace_counts_what_the_live_observer_counted() -> None:
    needs_tlparse()
    observed = json.loads((LOGS / "events-2.13.0.json").read_text(encoding="utf-8"))["events"]
    counted: Counter[str] = Counter()
    for group in analyze_logs([str(TRACE)]).groups:
        counted[group.kind.value] += group.events
    of_torch = {kind: count for kind, count in observed.items() if not kind.startswith("bucket")}
    assert counted == of_torch


def test_a_trace_names_function_reason_limit_and_time() -> None:
    needs_tlparse()
    limit = analyze_logs([str(TRACE)]).groups[0]
    assert (limit.function, limit.limits) == ("positional_embedding", {8})
    assert limit.normalised_reason == "kv_cache._current_idx[N] == N"
    assert limit.first_time.startswith("2026-11-17T")


def test_a_name_with_a_line_separator_is_read_as_one(tmp_path: Path) -> None:
    needs_tlparse()
    for trace in TRACE.iterdir():
        text = trace.read_text(encoding="utf-8").replace("positional_embedding", "positional\\u2028embedding")
        (tmp_path / trace.name).write_text(text, encoding="utf-8")
    assert analyze_logs([str(tmp_path)]).groups[0].limits == {8}


def test_without_tlparse_its_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match=r"toto-compat\[logs\]"):
        analyze_logs([str(TRACE)])


@pytest.mark.parametrize(
    ("does", "told"),
    [("exec sleep 60", "it did not end within 0.1 s"), ("exit 3", "it ended with 3"), ("exit 0", "it wrote no report")],
)
def test_a_tlparse_that_hangs_or_says_nothing_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, does: str, told: str
) -> None:
    program = tmp_path / "tlparse"
    program.write_text(f"#!/bin/sh\n{does}\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setattr(torch_trace, "tlparse_program", lambda: str(program))
    monkeypatch.setattr(torch_trace, "_SECONDS", 0.1 if "sleep" in does else 60.0)
    with pytest.raises(InputError, match=told):
        analyze_logs([str(TRACE)])
