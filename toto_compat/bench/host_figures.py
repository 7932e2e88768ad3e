"""Figures of the host side: the log analyzer against grep, and how much of a cell's time is not measuring."""

import os
import re
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from toto_compat.bench.figures import BenchFigure, compared, one_run
from toto_compat.errors import TotoCompatError
from toto_compat.evidence.store import find_run, load_run
from toto_compat.logs.parse import LITERALS

_APPLICATION_LINE = "2025-11-04 10:14:14 | INFO | forecast BTCUSD horizon=64 latency_ms=133.4 mae=0.0021 ok\n"
_COMPILER_LINES = (
    "W1104 10:14:14.409000 torch/_dynamo/convert_frame.py:1358] [6/8] torch._dynamo hit config.recompile_limit (8)\n"
    "W1104 10:14:14.409000 torch/_dynamo/convert_frame.py:1358] [6/8]    function: 'positional_embedding'\n"
    "W1104 10:14:14.409000 torch/_dynamo/convert_frame.py:1358] [6/8]    last reason: 6/7: kv_cache._idx[7] == 0\n"
    "skipping cudagraphs due to mutated inputs (8 instances)\n"
)


def host_figures(folder: Path) -> list[BenchFigure]:
    return [_analyze_over_grep(folder), *harness_share()]


def _analyze_over_grep(folder: Path) -> BenchFigure:
    """Whole commands, start of the interpreter included, on a log of 1 GB with two events per thousand lines."""
    log = folder / "production.log"
    block = (_APPLICATION_LINE * 1000 + _COMPILER_LINES).encode()
    with log.open("wb") as stream:
        for _ in range(10**9 // len(block) + 1):
            stream.write(block)
    patterns = "|".join(re.sub(r"([.()\[\]])", r"\\\1", literal) for literal in LITERALS)
    commands = {
        "grep": ["grep", "-cE", patterns, str(log)],
        "analyze": [sys.executable, "-m", "toto_compat.cli", "analyze", str(log), "--json"],
    }
    timings: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(10):
        for name, command in commands.items():
            start = time.perf_counter()
            # Not to /dev/null: grep ends at the first match when nobody reads what it prints.
            subprocess.run(command, capture_output=True, check=True, env={**os.environ, "LC_ALL": "C"})
            timings[name].append(time.perf_counter() - start)
    return compared(
        "analyze.speed_over_grep",
        timings["grep"],
        timings["analyze"],
        ">= 0.5",
        method=f"time of LC_ALL=C grep -cE with the {len(LITERALS)} literals that analyze looks for, over its time; "
        f"whole commands on a log of {log.stat().st_size // 10**6} MB, 10 runs each, interleaved; "
        + ("with hyperscan" if find_spec("hyperscan") else "without hyperscan"),
    )


def harness_share() -> list[BenchFigure]:
    """From the newest stored run: the part of the cells' time that no suite accounts for. No run, no figure."""
    try:
        run = find_run("latest")
    except TotoCompatError:
        return []
    cells = load_run(run).cells
    whole = sum(cell.seconds for cell in cells)
    measured = sum(evidence.seconds for cell in cells for evidence in cell.evidence.values())
    if not whole:
        return []
    method = (
        "1 - seconds that suites account for over seconds of the cells, newest run in results/; what speed and memory "
        "account for are whole processes, their start and imports included, so the share is a lower bound"
    )
    return [one_run("matrix.harness_share", max(0.0, 1 - measured / whole), "", "", method)]
