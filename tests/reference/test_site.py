"""Pages of the docs site that are made from the reference."""

from pathlib import Path

from toto_compat.reference.site import differences_page

REFERENCE = Path(__file__).parents[2] / "results" / "reference"


def test_differences_between_releases_are_told_as_they_were_measured() -> None:
    page = differences_page(REFERENCE)
    several = len({path.name for path in (REFERENCE / "cpu" / "cells").iterdir()}) > 1
    assert "# What differs between torch releases" in page
    row = next(line for line in page.splitlines() if line.startswith("| 2.13.0 | ") and "recompile_limit" in line)
    assert row.split(" | ")[1:4] == ["47", "54", "1"]
    assert "**PASS** " in row
    assert ("## Defaults of torch that moved" in page) is several
