"""Everything that runs in a cell imports without the host side of the package."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cell

PACKAGE = Path(__file__).parents[2] / "toto_compat"
IMPORT_ALL = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)"


def cell_folders() -> tuple[str, ...]:
    """The folders that the host stages, read and not imported: the host's packages are not here."""
    tree = ast.parse((PACKAGE / "contract" / "source_hash.py").read_text(encoding="utf-8"))
    values = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    names = [*ast.literal_eval(values["CELL_FOLDERS"]), *ast.literal_eval(values["_CELL_FILES"])]
    return tuple(str(name) for name in names)


def test_the_staged_part_imports_on_its_own(tmp_path: Path) -> None:
    staged = tmp_path / "toto_compat"
    staged.mkdir()
    for name in cell_folders():
        copy = shutil.copytree if (PACKAGE / name).is_dir() else shutil.copyfile
        copy(PACKAGE / name, staged / name)
    paths = [path for path in staged.rglob("*.py") if path.name not in ("__init__.py", "__main__.py")]
    modules = [".".join(path.relative_to(tmp_path).with_suffix("").parts) for path in paths]
    environment = {"PYTHONPATH": str(tmp_path), "PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    shown = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, *modules],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
