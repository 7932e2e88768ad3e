"""The minimal script run with torch and toto-ts, where this package cannot be imported."""

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from toto_compat.contract.cell_name import CellName  # noqa: E402
from toto_compat.contract.request import (  # noqa: E402
    CacheRequest,
    CellProfile,
    CellRequest,
    CompileSettings,
    Device,
    Environment,
    Workload,
)
from toto_compat.repro.minimal import minimal_script  # noqa: E402

pytestmark = pytest.mark.cell


def printed_by(cache: str, folder: Path, workload: Workload, settings: CompileSettings) -> str:
    """Run the script isolated (-I) in an empty folder; no code is generated, since dynamo gives up before that."""
    environment = Environment(torch=torch.__version__.partition("+")[0], build="cpu")
    request = CellRequest(
        cell=CellName.of("torch-2.13.0-cpu", cache, "default", "traced"),
        environment=environment,
        cache=CacheRequest(name=cache, source="builtin"),
        settings=settings,
        device=Device.CPU,
        profile_name="repro",
        profile=CellProfile(iterations=1),
        workload=workload,
    )
    script = minimal_script(request, title="a limit", python="", toto_ts="")
    # a script that is pasted elsewhere finds nothing of ours: it would say so here
    unreachable = "import importlib.util\nassert importlib.util.find_spec('toto_compat') is None\n"
    (folder / "minimal.py").write_text(script.replace("\nimport contextlib", f"\n{unreachable}import contextlib", 1))
    done = subprocess.run(
        [sys.executable, "-I", "minimal.py"],
        cwd=folder,
        env={"HOME": str(folder), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert unreachable in (folder / "minimal.py").read_text()
    return done.stdout


def test_list_index_prints_productions_warning(tmp_path: Path) -> None:
    workload = Workload(context=(64, 96), horizon=(64,), batches=(1,), sampling=("2/1",))
    printed = printed_by("list_index", tmp_path, workload, CompileSettings(backend="eager"))
    assert "torch._dynamo hit config.recompile_limit (8)" in printed
    assert "function: 'positional_embedding'" in printed
    assert "last reason: 6/7: kv_cache._current_idx[7] == 0" in printed
    assert "largest difference to eager" in printed


@pytest.mark.parametrize("cache", ["upstream", "compile_friendly"])
def test_the_other_caches_run_alone_too(cache: str, tmp_path: Path) -> None:
    workload = Workload(context=(64, 96), horizon=(64,), batches=(1,), sampling=("2/1",))
    printed = printed_by(cache, tmp_path, workload, CompileSettings(backend="eager", recompile_limit=2))
    assert "hit config.recompile_limit (2)" in printed
