"""Markdown and HTML of an analysis: complete, self-contained, and nothing of a hostile log is obeyed."""

import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from toto_compat.production.analysis import Analysis, Timeline
from toto_compat.production.analysis_output import as_html, as_markdown, as_text
from toto_compat.production.analyze import analyze_logs

LOGS = Path(__file__).parent.parent / "fixtures" / "logs"
HOSTILE = (
    "2025-11-04 10:14:14 torch._dynamo hit config.recompile_limit (8)\n"
    "   function: '<script>alert(1)</script>|x' (/x/</td><img src=x onerror=alert(2)>.py:1)\n"
    "   last reason: 1/2: [click](javascript:alert(3)) | `<b>` </pre> ![i](https://x.example/p) == 0\n"
)


class Tags(HTMLParser):
    """Collects tags, attributes and text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture
def hostile(tmp_path: Path) -> Analysis:
    log = tmp_path / "a<i>.log"
    log.write_text(HOSTILE, encoding="utf-8")
    return analyze_logs([str(log)])


def test_the_page_shows_a_hostile_log_and_does_what_none_of_it_says(hostile: Analysis) -> None:
    page = Tags(as_html(hostile))
    ours = (
        "html head meta title style body h1 p table thead tbody tr th td br b code pre details summary ul li svg rect"
    )
    assert page.tags <= set(ours.split())
    assert page.attributes.isdisjoint({"onerror", "onclick", "src", "href"})
    assert "<script>alert(1)</script>|x" in page.text


def test_the_page_needs_nothing_from_elsewhere() -> None:
    page = as_html(analyze_logs([str(LOGS / "production.log")]))
    assert not re.search(r"https?://|@import|url\(|<script|<link", page)
    assert "default-src 'none'" in page.replace("&#x27;", "'")


def test_markdown_shows_a_hostile_log_as_text(hostile: Analysis) -> None:
    page = as_markdown(hostile)
    assert "<script" not in page
    assert "<img" not in page
    assert not re.search(r"(?<!\\)\]\(", page)  # no link, no picture
    table = [line for line in page.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in table} == {9}


@pytest.mark.parametrize("form", [as_markdown, as_html, as_text])
def test_every_format_tells_every_group_with_its_fix(form: Callable[[Analysis], str]) -> None:
    analysis = analyze_logs([str(LOGS / "production.log")])
    page = form(analysis)
    assert page.count("Fix") + page.count("fix (") >= len(analysis.groups)


@pytest.mark.parametrize("form", [as_markdown, as_html, as_text])
def test_a_quiet_log_says_so_in_every_format(form: Callable[[Analysis], str], tmp_path: Path) -> None:
    log = tmp_path / "quiet.log"
    log.touch()
    assert "no compiler events" in form(analyze_logs([str(log)])).replace("\n", " ")


def test_a_timeline_keeps_every_event_in_few_intervals() -> None:
    line = Timeline()
    for number in range(100_000):
        line.add(1.7e9 + number * 37.0)
    assert sum(line.counts.values()) == 100_000
    assert len(line.counts) <= line.most
    parts = line.between(line.first, line.last, 24)
    assert sum(parts) == 100_000
    assert max(parts) < 1.3 * min(parts)
