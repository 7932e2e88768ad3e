"""The installed torch under the live observer and in its own log: one run, the same counts."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from toto_compat.logs.parse import parse_lines  # noqa: E402

pytestmark = pytest.mark.cell

ROOT = Path(__file__).parent.parent.parent


def test_the_log_of_the_installed_release_counts_what_the_live_observer_counts(tmp_path: Path) -> None:
    counts = tmp_path / "counts.json"
    capture = ROOT / "tests" / "fixtures" / "logs" / "capture.py"
    environment = {
        **os.environ,
        "TORCH_LOGS": "recompiles,graph_breaks,perf_hints,cudagraphs",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    ran = subprocess.run(
        [sys.executable, str(capture), str(counts)], env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    observed = json.loads(counts.read_text(encoding="utf-8"))["events"]
    logged = Counter(event.kind.value for event in parse_lines(ran.stderr.splitlines(), "log"))
    assert logged == observed
    assert observed["recompile_limit"] == 1
