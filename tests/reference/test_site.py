"""Pages of the docs site that are made from the reference."""

from pathlib import Path

from toto_compat.reference.site import differences_page, reference_page

REFERENCE = Path(__file__).parents[2] / "results" / "reference"


def test_differences_between_releases_are_told_as_they_were_measured() -> None:
    page = differences_page(REFERENCE)
    several = len({path.name for path in (REFERENCE / "cpu" / "cells").iterdir()}) > 1
    assert "# What differs between torch releases" in page
    row = next(line for line in page.splitlines() if line.startswith("| 2.13.0 | ") and "recompile_limit" in line)
    assert row.split(" | ")[1:4] == ["47", "54", "1"]
    assert "**PASS** " in row
    assert ("## Defaults of torch that moved" in page) is several


def test_every_committed_run_is_told_with_its_kind_of_evidence_and_the_command_that_made_it() -> None:
    told = {part.partition("\n")[0]: part for part in reference_page(REFERENCE).split("\n## ")[1:]}
    assert "measured on cpu, profile `quick`" in told["cpu"] and "made by `nox -s reference`" in told["cpu"]
    assert "compiled for CUDA without a GPU (predictions, which decide nothing)" in told["cuda-lowered"]
    assert "`toto-compat merge results/reference/cuda-lowered" in told["cuda-lowered"]
    assert "1 row on torch 2.13.0, measured on cpu" in told["production-check"]
