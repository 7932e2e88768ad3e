"""The host side works on a machine without torch, and the command starts without the heavy libraries."""

import json
import pkgutil
import subprocess
import sys

import pytest

import toto_compat

# What runs inside a cell. Everything else is the host side, new modules included.
CELL_SIDE = ("caches", "model", "suites", "observe.live", "cell", "bench")

# Run in a fresh interpreter: refuses the modules of argv[1], imports those of argv[2], prints what got loaded.
PROBE = """
import importlib, json, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in forbidden:
            raise ImportError(f"{name} is forbidden here")

forbidden = set(json.loads(sys.argv[1]))
sys.meta_path.insert(0, Refuse())
for module in json.loads(sys.argv[2]):
    importlib.import_module(module)
"""

# Runs `toto-compat` with the arguments of argv[1:] and prints the top-level packages it loaded.
LOADED_BY_COMMAND = """
import sys
from toto_compat.cli import cli
try:
    cli(sys.argv[1:], standalone_mode=False)
finally:
    print("LOADED", *sorted({name.partition(".")[0] for name in sys.modules}))
"""


def host_modules() -> list[str]:
    cell_side = tuple(f"toto_compat.{name}" for name in CELL_SIDE)
    found = (module.name for module in pkgutil.walk_packages(toto_compat.__path__, "toto_compat."))
    return [name for name in found if not any(name == side or name.startswith(f"{side}.") for side in cell_side)]


def import_without(forbidden: list[str], modules: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROBE, json.dumps(forbidden), json.dumps(modules)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("module", host_modules())
def test_host_module_imports_without_torch(module: str) -> None:
    probe = import_without(["torch", "toto"], [module])
    assert probe.returncode == 0, probe.stderr


def test_the_import_probe_notices_a_forbidden_import() -> None:
    probe = import_without(["click"], ["toto_compat.cli"])
    assert "click is forbidden here" in probe.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["analyze", "--help"]], ids=" ".join)
def test_quick_commands_load_no_heavy_library(arguments: list[str]) -> None:
    shown = subprocess.run(
        [sys.executable, "-c", LOADED_BY_COMMAND, *arguments], capture_output=True, text=True, check=True
    )
    loaded = set(shown.stdout.rpartition("LOADED")[2].split())
    assert "Usage:" in shown.stdout
    assert "click" in loaded  # else the list below says nothing
    assert loaded.isdisjoint({"torch", "toto", "docker", "matplotlib", "numpy", "requests", "submitit"})
