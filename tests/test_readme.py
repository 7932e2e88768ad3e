"""README and the pages it sends its reader to say what is there: links, exit codes, profiles, formats."""

import re
from pathlib import Path

import pytest

from toto_compat.errors import ExitCode
from toto_compat.matrix.load import load_matrix
from toto_compat.report.command import FORMATS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
RUNNING = (ROOT / "docs" / "running.md").read_text(encoding="utf-8")


def anchors(page: Path) -> set[str]:
    """Give the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def section(text: str, heading: str) -> str:
    return text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def first_column(table: str) -> list[str]:
    rows = re.findall(r"^\| ?(.+?) ?\|", table, re.MULTILINE)
    return [row.strip("` ") for row in rows[2:]]  # behind the head and the line below it


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)]+)\)", README))))
def test_every_link_of_the_readme_leads_somewhere(link: str) -> None:
    if link.startswith("https://"):
        return
    path, _, anchor = link.partition("#")
    page = ROOT / (path or "README.md")
    assert page.exists()
    assert not anchor or anchor in anchors(page)


def test_the_first_screen_has_the_answer_and_both_commands() -> None:
    first = README.partition("\n## ")[0]
    assert "The answer today" in first
    assert "pip install nox && nox -s matrix" in first
    assert "pip install nox && nox -s tests" in first
    assert len(first.splitlines()) <= 30


def test_every_exit_code_is_explained() -> None:
    assert first_column(section(RUNNING, "Exit codes")) == [str(code.value) for code in ExitCode]


def test_every_profile_is_explained() -> None:
    profiles = load_matrix(ROOT / "matrix.yaml").profiles
    assert first_column(section(RUNNING, "Profiles")) == list(profiles)


def test_every_report_format_is_named() -> None:
    named = set(re.findall(r"`(\w+)`", section(RUNNING, "Reports")))
    assert set(FORMATS) <= named
