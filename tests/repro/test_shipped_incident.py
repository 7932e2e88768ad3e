"""Production's incident of 2025-10-30 from its shipped file, with real Toto on real torch: what ends it."""

import subprocess
import sys
from pathlib import Path

import pytest

from toto_compat.errors import ExitCode

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def test_it_is_gone_with_fixed_size() -> None:
    """That it is there with list_index is shown in its container, and by its bundle where there is no engine."""
    asked = ("incidents/2025-10-30-recompile-limit.yaml", "--environment", "torch-2.13.0-cpu", "--cache", "fixed_size")
    command = [sys.executable, "-m", "toto_compat.cli", "repro", *asked, "--runtime", "venv", "--device", "cpu"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == ExitCode.NOT_REPRODUCED, ran.stdout + ran.stderr
    assert ran.stdout.splitlines()[-1].partition(":")[0] == "NOT REPRODUCED"
    limit = next(line for line in ran.stdout.splitlines() if "recompile_limit" in line)
    assert not limit.strip().startswith("as in production"), ran.stdout
    for part in ("'positional_embedding'", "'6/8'", "'6/7: kv_cache._current_idx[7] == 0'"):
        assert part in limit
