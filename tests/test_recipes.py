"""The recipes of CONTRIBUTING are true: their files exist, and following one is enough."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "toto_compat"
RECIPES = ("a gate", "a suite", "a cache", "a torch release", "a kind of log line", "a report format", "an executor")

GATE_ROW = """
    HIDDEN = (
        "hidden",
        GateRule(
            suite=Suite.RECOMPILE,
            meaning="Functions compiled anew as another code object.",
            default=GateLimit(max=0),
            figure="recompiles_hidden",
            comparison=Comparison.COUNT,
            column=Column("hidden recompiles", "hidden"),
        ),
    )
"""

JUDGED_BY_IT = """
from pathlib import Path
from toto_compat.evidence.store import load_run
from toto_compat.matrix.expand import gate_limits
from toto_compat.matrix.load import json_schema_text, load_matrix
from toto_compat.report.table import terminal_table
from toto_compat.verdict.judged_run import judge_run
run = load_run(Path("results/reference/cpu"))
judged = judge_run(run, gate_limits(load_matrix(Path("matrix.yaml")), "quick"))
print([cell.gates["hidden"].status.value for cell in judged.cells])
print("hidden" in terminal_table(judged), '"hidden"' in json_schema_text())
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the package that a recipe may be followed in."""
    shutil.copytree(PACKAGE, tmp_path / "toto_compat", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def answer(copy: Path, script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(copy), "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def recipe(name: str) -> str:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = re.search(rf"^### Add {name}\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL)
    assert section, f"CONTRIBUTING.md has no recipe for {name}"
    return section[1]


@pytest.mark.parametrize("name", RECIPES)
def test_the_files_that_a_recipe_names_are_there(name: str) -> None:
    paths = re.findall(r"`((?:toto_compat|tests|docker|docs)/[\w./-]+|matrix\.yaml)`", recipe(name))
    assert paths
    for path in paths:
        assert (ROOT / path).exists(), path


def test_a_new_gate_is_one_row(copy: Path) -> None:
    gates = copy / "toto_compat" / "matrix" / "gates.py"
    gates.write_text(gates.read_text(encoding="utf-8") + GATE_ROW, encoding="utf-8")
    statuses, shown = answer(copy, JUDGED_BY_IT).splitlines()
    assert set(re.findall(r"PASS|FAIL", statuses)) == {"PASS", "FAIL"}
    assert shown == "True True"


def test_a_new_executor_is_one_module_and_one_row(copy: Path) -> None:
    package = copy / "toto_compat" / "runtimes"
    (package / "nowhere.py").write_text("def run_cells(cells, runtime, **how): ...\n", encoding="utf-8")
    table = package / "executors.py"
    row = '"nowhere": "toto_compat.runtimes.nowhere:run_cells", "local":'
    table.write_text(table.read_text(encoding="utf-8").replace('"local":', row, 1), encoding="utf-8")
    script = "from toto_compat.cli import cli; cli(['matrix', '--help'], standalone_mode=False)"
    assert "[nowhere|local|slurm]" in answer(copy, script)


def test_a_new_report_format_is_one_row(copy: Path) -> None:
    command = copy / "toto_compat" / "report" / "command.py"
    text = command.read_text(encoding="utf-8")
    command.write_text(
        text.replace(
            '    "md": markdown_table,',
            '    "md": markdown_table,\n    "shout": lambda judged: judged.decision.sentence.upper(),',
        ),
        encoding="utf-8",
    )
    script = (
        "from toto_compat.cli import cli; cli(['report', 'reference/cpu', '--format', 'shout'], standalone_mode=False)"
    )
    assert answer(copy, script).startswith("ON CUDA")


@pytest.mark.cell
def test_a_new_suite_is_one_module_and_one_row(copy: Path) -> None:
    package = copy / "toto_compat"
    (package / "cell" / "suites" / "patches.py").write_text(
        "from toto_compat.contract.result import Figure, Outcome, SuiteEvidence\n"
        "from toto_compat.contract.suites import Suite\n\n"
        "def run_patches(session):\n"
        "    figures = {'patches': Figure(value=session.trial.max_patches)}\n"
        "    return SuiteEvidence(suite=Suite.PATCHES, outcome=Outcome.MEASURED, figures=figures)\n",
        encoding="utf-8",
    )
    table = package / "contract" / "suites.py"
    row = '    PATCHES = "patches", SuiteRule(version=1, runners={Group.OBSERVE: "patches:run_patches"})\n'
    text = table.read_text(encoding="utf-8")
    end = text.index("\nWITHOUT_GPU =")  # behind the last row
    table.write_text(text[:end].rstrip() + "\n" + row + "\n\n" + text[end:], encoding="utf-8")
    script = """
from pathlib import Path
from toto_compat.cell.group import run_group
from toto_compat.contract.cell_name import CellName
from toto_compat.contract.request import CacheRequest, CellProfile, CellRequest, Device, Environment, Workload
from toto_compat.contract.suites import Group, Suite
request = CellRequest(
    cell=CellName("e/upstream/default"), environment=Environment(torch="2.13.0", build="cpu"),
    cache=CacheRequest(name="upstream", source="builtin"), device=Device.CPU, profile_name="p",
    profile=CellProfile(iterations=1, suites=(Suite.PATCHES,)), workload=Workload(),
)
run_group(request, Group.OBSERVE, lambda result: print("saw", result.evidence[Suite.PATCHES].figures["patches"].value))
"""
    assert "saw 76.0" in answer(copy, script)


@pytest.mark.cell
def test_a_new_cache_is_one_file_and_one_row(copy: Path) -> None:
    package = copy / "toto_compat"
    (package / "caches" / "plain.py").write_text(
        "from toto.model.util import KVCache\n\nclass PlainKVCache(KVCache): ...\n", encoding="utf-8"
    )
    table = package / "contract" / "caches.py"
    row = '    "plain": BuiltinCache("whole_model", "caches.plain:PlainKVCache", "nothing added"),\n    "upstream"'
    table.write_text(table.read_text(encoding="utf-8").replace('    "upstream"', row, 1), encoding="utf-8")
    script = """
from tests.cell.small_trials import trial_of
print(trial_of("plain").eager(trial_of("plain").cache).cache_class)
"""
    assert "toto_compat.caches.plain:PlainKVCache" in answer(copy, "import sys; sys.path.append('.')\n" + script)
