"""Figures of the host side: the log analyzer against grep, and how much of a cell's time is not measuring."""

import subprocess
import sys
import time
from pathlib import Path

from toto_compat.bench.figures import BenchFigure, compared, one_run
from toto_compat.errors import TotoCompatError
from toto_compat.evidence.store import find_run, load_run

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
    """Whole commands, start of the interpreter included, on a log of about 100 MB with an event per thousand lines."""
    log = folder / "production.log"
    with log.open("w", encoding="utf-8") as stream:
        for _ in range(1200):
            stream.write(_APPLICATION_LINE * 1000 + _COMPILER_LINES)
    grep = ["grep", "-cE", "recompile_limit|cache_size_limit|__recompiles|skipping cudagraphs|Graph break", str(log)]
    analyze = [sys.executable, "-m", "toto_compat.cli", "analyze", str(log), "--json"]
    timings: dict[str, list[float]] = {"grep": [], "analyze": []}
    for _ in range(7):
        for name, command in (("grep", grep), ("analyze", analyze)):
            start = time.perf_counter()
            subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
            timings[name].append(time.perf_counter() - start)
    return compared(
        "analyze.speed_over_grep",
        timings["grep"],
        timings["analyze"],
        "",
        method=f"time of grep -cE over time of analyze on a log of {log.stat().st_size // 10**6} MB, "
        "7 runs each, interleaved",
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
