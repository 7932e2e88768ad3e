"""Production's incident of 2025-10-30 from its shipped file, with real Toto on real torch: what ends it."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.environments.small_project import why_no_engine
from toto_compat.errors import ExitCode

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def repro(*options: str) -> subprocess.CompletedProcess[str]:
    asked = ("incidents/2025-10-30-recompile-limit.yaml", "--environment", "torch-2.13.0-cpu", *options)
    command = [sys.executable, "-m", "toto_compat.cli", "repro", *asked, "--runtime", "venv", "--device", "cpu"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def limit_told_by(ran: subprocess.CompletedProcess[str]) -> str:
    limit = next(line.strip() for line in ran.stdout.splitlines() if "recompile_limit" in line)
    for part in ("'positional_embedding'", "'6/8'", "'6/7: kv_cache._current_idx[7] == 0'"):
        assert part in limit
    return limit


def test_it_is_there_again_with_list_index() -> None:
    if not why_no_engine():
        pytest.skip("an engine is here: test_docker_cells.py shows it in a container")
    ran = repro()
    assert ran.returncode == ExitCode.OK, ran.stdout + ran.stderr
    assert ran.stdout.splitlines()[-1] == "REPRODUCED"
    assert limit_told_by(ran).startswith("as in production")


def test_it_is_gone_with_fixed_size() -> None:
    ran = repro("--cache", "fixed_size")
    assert ran.returncode == ExitCode.NOT_REPRODUCED, ran.stdout + ran.stderr
    assert ran.stdout.splitlines()[-1].partition(":")[0] == "NOT REPRODUCED"
    assert not limit_told_by(ran).startswith("as in production"), ran.stdout
