"""Adds to the docs site what is made from results: the reference as a page, and the report of it. A hook of mkdocs."""

import re
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from toto_compat.reference.site import differences_page, reference_page, report_pages  # noqa: E402 - found from here on

# its tables are wide, and take the place of the contents
WITHOUT_CONTENTS = "---\nhide:\n  - toc\n---\n\n"
_CODE = re.compile(r"(`+)(.+?)\1")


def on_page_markdown(markdown: str, **_: object) -> str:
    """Take the backslash from a bar inside code in a table: GitHub needs it there, this Markdown shows it."""
    return "\n".join(
        _CODE.sub(lambda code: code[0].replace("\\|", "|"), line) if line.startswith("|") else line
        for line in markdown.split("\n")
    )


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that no file of docs/ holds."""
    folder = ROOT / "results" / "reference"
    files.append(File.generated(config, "reference.md", content=reference_page(folder)))
    files.append(File.generated(config, "differences.md", content=WITHOUT_CONTENTS + differences_page(folder)))
    for name, page in report_pages(folder):
        files.append(File.generated(config, f"reference/{name}.html", content=page))
    return files
