"""Where evidence comes from: enough to tell two runs apart, and no inventory of somebody's machine."""

import stat
from pathlib import Path

import pytest

from toto_compat.cell.provenance import collect_provenance, complete_provenance
from toto_compat.contract.request import Origin

INSTALLED = {"g++": "4:12.2.0-3", "libc6:amd64": "2.36-9", "postgresql-common": "248", "vim": "9.0"}


@pytest.fixture(autouse=True)
def debian(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dpkg-query that knows four packages."""
    program = tmp_path / "dpkg-query"
    lines = "".join(f"{name}\\t{version}\\n" for name, version in INSTALLED.items())
    program.write_text(f"#!/bin/sh\nprintf '{lines}'\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


def test_of_a_machine_only_what_a_cell_meets_is_recorded() -> None:
    assert set(collect_provenance(Origin(), started="now").system_packages) == {"g++", "libc6:amd64"}


def test_of_an_image_every_package_is_recorded() -> None:
    assert collect_provenance(Origin(image="sha256:1"), started="now").system_packages == INSTALLED


def test_what_only_the_groups_know_is_added_at_the_end() -> None:
    begun = collect_provenance(Origin(), started="2026-01-01T00:00:00Z")
    whole = complete_provenance(begun, cache_class="toto.KVCache", facts={"torch": "2.13.0+cpu"}, references=None)
    assert (whole.torch, whole.cache_class, whole.started) == ("2.13.0+cpu", "toto.KVCache", begun.started)
    assert whole.finished
