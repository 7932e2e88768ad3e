"""The walls of the package: contract, library, cell and host, one direction, no cycles, nothing heavy by accident."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from toto_compat.runtimes.source import CELL_FOLDERS, PACKAGE

# From the first to the last: a package imports itself and those before it, nothing after it.
FLOW = (
    "errors",
    "contract",
    "caches",
    "model",
    "cell",
    "matrix",
    "evidence",
    "environments",
    "runtimes",
    "logs",
    "verdict",
    "report",
    "fleet",
    "production",
    "repro",
    "bench",
    "workflow",
    "releases",
    "detached",
    "false_alarms",
    "reference",
    "acceptance",
    "cli",
)
# What needs torch. The contest of bench runs in a cell's environment, and its top is read on the host.
CELL_SIDE = frozenset(CELL_FOLDERS) - {"contract"}
RUNS_IN_A_CELLS_ENVIRONMENT = {
    *(f"toto_compat.bench.{name}" for name in ("contest", "guard_cost", "shapes")),
    "toto_compat.production.backtest",
    "toto_compat.reference.logged_forecasts",
    "toto_compat.acceptance.sabotaged_caches",
    "toto_compat.production.warming",
}
# What is copied beside a matrix file as a user's own, and imported in a cell alone.
LAID_BESIDE_A_MATRIX = {"toto_compat.acceptance.sabotaged_caches"}
# What a service imports through `toto_compat.production`: it runs beside torch, behind a door that opens on first use.
SERVICE = {"toto_compat.production.switched", "toto_compat.production.guard"}
# The service imports it as `toto_compat.compile_toto`.
SERVICE_DOOR = ("toto_compat", "toto_compat.model.forecaster")

# Run in a fresh interpreter: refuses the modules of argv[1], imports those of argv[2].
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


@dataclass(frozen=True)
class Import:
    """One import of a module of the package by another."""

    importer: str
    imported: str
    line: int
    for_types_only: bool


def modules(package: Path = PACKAGE) -> dict[str, Path]:
    names = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def stage(module: str) -> str:
    """The package or top-level module that a module belongs to."""
    return module.split(".")[1] if "." in module else module


def imports_of(name: str, path: Path, known: Mapping[str, Path]) -> Iterator[Import]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        targets = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            inside = [f"{node.module}.{name}" for name in targets]
            targets = [one if one in known else node.module or "" for one in inside]
        for target in targets:
            if target in known and target != name:
                yield Import(name, target, node.lineno, id(node) in for_types)


def all_imports(package: Path = PACKAGE) -> list[Import]:
    known = modules(package)
    return [one for name, path in known.items() for one in imports_of(name, path, known)]


def cycles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """Names that reach themselves, by Tarjan's algorithm."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in edges.get(name, ()):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            component = [stack.pop()]
            while component[-1] != name:
                component.append(stack.pop())
            if len(component) > 1:
                found.append(sorted(component))

    for name in list(edges):
        if name not in index:
            visit(name)
    return found


def against_the_flow(imports: list[Import]) -> list[Import]:
    allowed = [one for one in imports if (one.importer, one.imported) != SERVICE_DOOR]
    return [
        one
        for one in allowed
        if FLOW.index(stage(one.imported)) > FLOW.index(stage(one.importer))
        or (stage(one.importer) == "contract" and stage(one.imported) not in ("contract", "errors"))
    ]


def host_imports_of_the_cell_side(imports: list[Import]) -> list[Import]:
    return [
        one
        for one in imports
        if stage(one.imported) in CELL_SIDE
        and stage(one.importer) not in CELL_SIDE
        and one.importer not in RUNS_IN_A_CELLS_ENVIRONMENT | SERVICE
        and (one.importer, one.imported) != SERVICE_DOOR
    ]


def imports_of_the_service(imports: list[Import]) -> list[Import]:
    return [
        one
        for one in imports
        if one.imported in SERVICE
        and one.importer not in SERVICE | RUNS_IN_A_CELLS_ENVIRONMENT
        and not one.for_types_only
    ]


def test_every_package_has_its_place_in_the_flow() -> None:
    assert {stage(name) for name in modules()} - {"toto_compat"} == set(FLOW)


def test_no_cycle_between_packages_or_modules() -> None:
    imports = [one for one in all_imports() if not one.for_types_only]
    by_module: dict[str, set[str]] = {}
    by_package: dict[str, set[str]] = {}
    for one in imports:
        if (one.importer, one.imported) == SERVICE_DOOR:
            continue
        by_module.setdefault(one.importer, set()).add(one.imported)
        if stage(one.importer) != stage(one.imported):
            by_package.setdefault(stage(one.importer), set()).add(stage(one.imported))
    assert cycles(by_module) == []
    assert cycles(by_package) == []


def test_no_import_goes_against_the_flow() -> None:
    assert against_the_flow(all_imports()) == []


def test_the_host_never_imports_the_cell_side() -> None:
    assert host_imports_of_the_cell_side(all_imports()) == []


def test_nothing_but_a_service_imports_what_runs_beside_torch() -> None:
    assert imports_of_the_service(all_imports()) == []


@pytest.mark.parametrize(
    ("importer", "imported"),
    [("runtimes", "verdict"), ("matrix", "evidence"), ("contract", "matrix"), ("evidence", "runtimes")],
)
def test_the_graph_notices_an_import_against_the_flow(tmp_path: Path, importer: str, imported: str) -> None:
    package = tmp_path / "toto_compat"
    for name in (importer, imported):
        (package / name).mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / imported / "other.py").touch()
    lazily = f"def later():\n    from toto_compat.{imported}.other import thing\n"
    (package / importer / "one.py").write_text(lazily, encoding="utf-8")
    assert len(against_the_flow(all_imports(package))) == 1


def test_the_graph_notices_a_cycle_behind_a_lazy_import(tmp_path: Path) -> None:
    package = tmp_path / "toto_compat" / "matrix"
    package.mkdir(parents=True)
    (package / "one.py").write_text("from toto_compat.matrix.two import b\n", encoding="utf-8")
    (package / "two.py").write_text("def c():\n    from toto_compat.matrix import one\n", encoding="utf-8")
    edges: dict[str, set[str]] = {}
    for found in all_imports(package.parent):
        edges.setdefault(found.importer, set()).add(found.imported)
    assert cycles(edges) == [["toto_compat.matrix.one", "toto_compat.matrix.two"]]


def unexplained_late_imports(path: Path) -> list[str]:
    """Imports inside functions that no comment stands before, beside or at the top of the block of imports."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    found = []
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        late = sorted({node.lineno for node in ast.walk(function) if isinstance(node, ast.Import | ast.ImportFrom)})
        for number in late:
            above = number - 1
            while above > 0 and (not lines[above - 1].strip() or above in late):
                above -= 1
            beside = lines[number - 1].partition("  # ")[2]
            explained = lines[above - 1].lstrip().startswith("#") or (beside and not beside.startswith("noqa"))
            if not explained:
                found.append(f"{path.name}:{number}: {lines[number - 1].strip()}")
    return found


@pytest.mark.parametrize("module", list(modules()))
def test_an_import_inside_a_function_says_what_it_keeps_quick(module: str) -> None:
    assert unexplained_late_imports(modules()[module]) == []


def host_modules() -> list[str]:
    return [name for name in modules() if stage(name) not in CELL_SIDE and name not in SERVICE | LAID_BESIDE_A_MATRIX]


def import_without(forbidden: list[str], names: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROBE, json.dumps(forbidden), json.dumps(names)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_host_modules_import_without_torch() -> None:
    probe = import_without(["torch", "toto"], [name for name in host_modules() if not name.endswith("__main__")])
    assert probe.returncode == 0, probe.stderr


# Files that the environment's own interpreter runs: a contest, and the probe of an environment.
RUN_BY_AN_ENVIRONMENT = {*RUNS_IN_A_CELLS_ENVIRONMENT, "toto_compat.runtimes.probe"}


@pytest.mark.parametrize("module", [name for name in host_modules() if name not in RUN_BY_AN_ENVIRONMENT])
def test_no_host_module_imports_torch_anywhere(module: str) -> None:
    tree = ast.parse(modules()[module].read_text(encoding="utf-8"))
    names = {
        name
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert {name.partition(".")[0] for name in names}.isdisjoint({"torch", "toto"})


@pytest.mark.parametrize("module", list(modules()))
def test_imports_are_absolute(module: str) -> None:
    tree = ast.parse(modules()[module].read_text(encoding="utf-8"))
    assert not [node.lineno for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level]


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
