"""Figures of the host side: the log analyzer against grep."""

import os
import re
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from toto_compat.bench.figures import BenchFigure, compared
from toto_compat.logs.parse import LITERALS

_APPLICATION_LINE = "2025-11-04 10:14:14 | INFO | forecast BTCUSD horizon=64 latency_ms=133.4 mae=0.0021 ok\n"
_COMPILER_LINES = (
    "W1104 10:14:14.409000 torch/_dynamo/convert_frame.py:1358] [6/8] torch._dynamo hit config.recompile_limit (8)\n"
    "W1104 10:14:14.409000 torch/_dynamo/convert_frame.py:1358] [6/8]    function: 'positional_embedding'\n"
    "W1104 10:14:14.409000 torch/_dynamo/convert_frame.py:1358] [6/8]    last reason: 6/7: kv_cache._idx[7] == 0\n"
    "skipping cudagraphs due to mutated inputs (8 instances)\n"
)


def host_figures(folder: Path) -> list[BenchFigure]:
    return [_analyze_over_grep(folder)]


def _analyze_over_grep(folder: Path) -> BenchFigure:
    """Time whole commands, start of the interpreter included, on a log of 1 GB with two events per thousand lines."""
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
