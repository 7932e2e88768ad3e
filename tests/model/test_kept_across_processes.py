"""What one process compiled, the next one takes from the folder, and it compiles nothing anew.

All three kinds of graphs are met: the pass over the context, the draws and the decode step. What is counted are graphs
that inductor lowered and calls of the C++ compiler, not seconds.
"""

import json
import os
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.cell

ROOT = Path(__file__).parents[2]
# counts itself; what it is asked for beside its version is work that a warm start must not do
COMPILER = """#!/bin/sh
echo "$@" >> "{log}"
exec g++ "$@"
"""


@dataclass(frozen=True)
class Ended:
    answer: dict[str, Any]
    built: list[str]  # the compiler's command lines that built something
    log: str


def forecast(kept: Path, work: Path, compiler: Path) -> Ended:
    """Run a fresh process with temporary folders of its own; only the kept folder goes from one to the next."""
    work.mkdir()
    answer, calls = work / "answer.json", compiler.with_suffix(".log")
    calls.unlink(missing_ok=True)
    variables = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    variables |= {"CXX": str(compiler), "TMPDIR": str(work), "HOME": str(work), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(Path(__file__).with_name("keeping_process.py")), str(kept), str(answer)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = calls.read_text(encoding="utf-8").splitlines() if calls.exists() else []
    built = [line for line in lines if line.strip() not in ("--version", "-v", "-dumpversion", "")]
    return Ended(json.loads(answer.read_text(encoding="utf-8")), built, done.stdout)


def test_a_second_process_compiles_nothing_and_forecasts_the_same(tmp_path: Path) -> None:
    compiler, kept = tmp_path / "cxx", tmp_path / "kept"
    compiler.write_text(COMPILER.format(log=compiler.with_suffix(".log")), encoding="utf-8")
    compiler.chmod(0o700)
    first = forecast(kept, tmp_path / "first", compiler)
    kinds = [bucket.partition(" for ")[0] for bucket in first.answer["buckets"]]
    assert kinds == ["context pass", "decode step", "patch draws"]
    assert first.answer["graphs compiled"] >= len(kinds) and len(first.built) > len(kinds)
    assert "compiling cold: nothing is kept there" in first.log
    (file,) = kept.iterdir()
    assert (stat.S_IMODE(file.stat().st_mode), stat.S_IMODE(kept.stat().st_mode)) == (0o600, 0o700)
    before = file.read_bytes()

    second = forecast(kept, tmp_path / "second", compiler)
    assert (second.answer["graphs compiled"], second.built) == (0, [])
    assert second.answer["graphs found"] == first.answer["graphs compiled"]
    assert second.answer["forecasts"] == first.answer["forecasts"]
    assert second.answer["stepped aside"] == first.answer["stepped aside"] == 0
    assert second.answer["buckets"] == first.answer["buckets"]
    assert second.answer["folders changed"] == first.answer["folders changed"] == []
    assert file.read_bytes() == before  # nothing new, nothing written
    assert not list((tmp_path / "second").rglob("toto-compat-*"))  # its private folder is gone
