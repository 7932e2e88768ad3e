"""A bundle made in one place and replayed in an empty one, with real Toto on real torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from toto_compat.errors import ExitCode
from toto_compat.repro.archive import unpack, write_bundle

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
# No code is generated: dynamo gives up while it traces. The lengths are the shortest that reach the limit.
INCIDENT = """\
schema: 1
title: recompile limit hit in positional_embedding
date: "2025-10-30"
environment: torch-2.13.0-cpu
cache: list_index
settings: {backend: eager}
workload: {model: tiny, context: [128, 160], horizon: [64], batches: [1], sampling: [2/1]}
expect:
  - {kind: recompile_limit, function: positional_embedding, limit: 8, reason: "6/7: kv_cache._current_idx[7] == 0"}
"""


def repro(folder: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "toto_compat.cli", "repro", *words, "--runtime", "venv"]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **more}
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)


def test_a_bundle_replays_in_an_empty_folder_and_its_script_showed_the_same(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    (here / "incident.yaml").write_text(INCIDENT, encoding="utf-8")
    made = repro(here, "incident.yaml", "--matrix", str(ROOT / "matrix.yaml"), "--bundle", "-o", "b.zip")
    assert made.returncode == ExitCode.OK, made.stdout + made.stderr
    assert "REPRODUCED" in made.stdout

    manifest = unpack(here / "b.zip", tmp_path / "out")
    assert manifest.shows == "REPRODUCED"
    printed = (tmp_path / "out" / "minimal.log").read_text(encoding="utf-8")
    assert "hit config.recompile_limit (8)" in printed
    assert "function: 'positional_embedding'" in printed
    assert any(name.startswith("trace/") for name in manifest.files)

    an_incident_from_its_log_reproduces_it(here, tmp_path / "out" / "cell.log")

    (here / "b.zip").rename(there / "b.zip")
    replayed = repro(there, "b.zip")
    assert replayed.returncode == ExitCode.OK, replayed.stdout + replayed.stderr
    assert replayed.stdout.rstrip().endswith("REPRODUCED")
    assert "every hash as in its manifest" in replayed.stderr
    assert "packages  the bundle's own" in replayed.stderr
    assert list(there.iterdir()) == [there / "b.zip"]


def an_incident_from_its_log_reproduces_it(here: Path, log: Path) -> None:
    # production says how it compiles before anything else; a cell does not
    said = "Using torch.compile for Toto (mode=default, backend=eager)\n"
    (here / "prod.log").write_text(said + log.read_text(encoding="utf-8"), encoding="utf-8")
    matrix = ("--matrix", str(ROOT / "matrix.yaml"))
    written = repro(here, "--from-log", "prod.log", "-o", "again.yaml", *matrix)
    assert written.returncode == ExitCode.OK, written.stderr
    assert "2.13.0: certain" in written.stdout
    again = repro(here, "again.yaml", *matrix)
    assert again.returncode == ExitCode.OK, again.stdout + again.stderr
    assert again.stdout.rstrip().endswith("REPRODUCED")


def test_a_bundle_whose_pins_do_not_exist_says_which(tmp_path: Path) -> None:
    matrix = (ROOT / "matrix.yaml").read_text(encoding="utf-8").replace('torch: "2.13.0"', 'torch: "2.99.0"')
    files = {
        "incident.yaml": INCIDENT.replace("2.13.0", "2.99.0").encode(),
        "matrix.yaml": matrix.replace("torch-2.13.0", "torch-2.99.0").encode(),
    }
    write_bundle(tmp_path / "b.zip", {"made_by": "1", "cell": "x", "shows": "REPRODUCED"}, files)
    # no index: what exists nowhere need not be looked for far away
    refused = repro(tmp_path, "b.zip", TOTO_COMPAT_CACHE=str(tmp_path / "cache"), PIP_NO_INDEX="1")
    assert refused.returncode == ExitCode.ENVIRONMENT, refused.stdout + refused.stderr
    assert "torch==2.99.0" in refused.stderr
    assert "Traceback" not in refused.stderr
