"""The docs site builds strictly, loads nothing from elsewhere, and a link that leads nowhere stops it."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent

pytest.importorskip("mkdocs", reason="mkdocs is not installed here: `nox -s tests` brings it")


def module(name: str) -> ModuleType:
    """A file of docs/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def build(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "docs" / "build.py"), "--site-dir", str(site)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_site_builds_and_has_every_page(tmp_path: Path) -> None:
    built = build(ROOT, tmp_path / "site")
    assert built.returncode == 0, built.stderr
    pages = {path.name for path in (tmp_path / "site").glob("*.html")}
    wanted = {"index", "reading-the-table", "gates", "cpu-and-cuda", "reference", "releases", "fleet", "production"}
    assert {f"{name}.html" for name in wanted | {"log-lines", "design", "containers"}} <= pages
    reference = (tmp_path / "site" / "reference.html").read_text(encoding="utf-8")
    assert "fixed_size" in reference
    assert (tmp_path / "site" / "reference" / "cpu.html").stat().st_size > 10_000


@pytest.mark.parametrize("link", ["[gone](gone.md)", "[gone](gates.md#gone)"])
def test_a_link_or_anchor_that_leads_nowhere_stops_the_build(tmp_path: Path, link: str) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copytree(ROOT / "toto_compat", tmp_path / "toto_compat", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "results" / "reference", tmp_path / "results" / "reference")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    with (tmp_path / "docs" / "fleet.md").open("a", encoding="utf-8") as page:
        page.write(f"\n{link}\n")
    built = build(tmp_path, tmp_path / "site")
    assert built.returncode != 0
    assert "gone" in built.stderr


@pytest.mark.parametrize(
    ("html", "is_found"),
    [
        ('<script src="https://cdn.example/a.js"></script>', True),
        ('<link rel="stylesheet" href="//fonts.example/a.css">', True),
        ('<img src="https://img.example/a.png">', True),
        ('<link rel="canonical" href="https://site.example/">', False),
        ('<a href="https://torch.example/">read</a>', False),
        ('<script src="assets/a.js"></script>', False),
    ],
)
def test_what_would_be_loaded_from_another_machine_is_found(tmp_path: Path, html: str, is_found: bool) -> None:
    (tmp_path / "page.html").write_text(html, encoding="utf-8")
    assert bool(module("build").loaded_from_elsewhere(tmp_path)) is is_found


def test_a_bar_in_code_of_a_table_needs_no_backslash_here() -> None:
    changed = module("site_pages").on_page_markdown("| `a\\|b` | c \\| d |\n`a\\|b`")
    assert changed == "| `a|b` | c \\| d |\n`a\\|b`"
